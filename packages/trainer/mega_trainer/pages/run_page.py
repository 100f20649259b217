"""HTML page of `mega report`: one run, or several compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mega_trainer.config.run_config import flatten_settings
from mega_trainer.job.goodput import REASONS
from mega_trainer.pages.axis_scale import (
    format_bytes,
    format_compact,
    format_duration,
    format_gib,
    format_percent,
    pick_evenly_spaced_indices,
)
from mega_trainer.pages.page_elements import (
    FigureEvent,
    FormatNumber,
    LineSeries,
    PageSection,
    StackedBar,
    draw_area_figure,
    draw_bar_figure,
    draw_line_figure,
    render_page,
    render_table,
    wrap_wide_picture,
)
from mega_trainer.pages.plan_page import PipelineShape, draw_pipeline_schedule
from mega_trainer.pages.run_log import RunLog

PHASES = ("data", "forward", "backward", "forward_backward", "pipeline", "reduce", "norm", "update", "evaluate", "save")
MAX_ROWS = 40  # rows of a table of checkpoints, starts or errors
PredictedMetrics = Mapping[str, float]  # by key of metrics.jsonl


def render_run_page(runs: Sequence[RunLog]) -> str:
    """Return the HTML page with figures and tables of one run, or of several runs in comparison.
    They show learning, speed, time, data, settings and environment.
    """
    names = _unique_names(runs)
    title = f"Run {names[0]}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names)}"
    planned = [_predicted_metrics(run) for run in runs]
    sections = [
        _learning_section(runs, names),
        _reward_section(runs, names),
        _speed_section(runs, names, planned),
        _time_section(runs, names),
        _routing_section(runs, names),
        _data_section(runs, names),
        *_schedule_sections(runs, names),
        _history_section(runs, names),
        _settings_section(runs, names),
        _environment_section(runs, names),
    ]
    return render_page(
        title,
        _subtitle(runs),
        _make_tiles(runs[0], planned[0]) if len(runs) == 1 else _make_run_tiles(runs, names),
        sections,
    )


def _predicted_metrics(run: RunLog) -> PredictedMetrics:
    """Return the predicted metrics of a run's last step, if its machine is known."""
    expected, taken = run.last.get("predicted_seconds"), run.last.get("seconds")
    if not expected or not taken:
        return {}
    rates = {key: run.last[key] * taken / expected for key in ("tokens_per_second", "mfu") if run.last.get(key)}
    return {"seconds": expected, **rates}


def _unique_names(runs: Sequence[RunLog]) -> list[str]:
    """Return a unique name for each run."""
    short_names = [run.run_name for run in runs]
    return [str(run.folder) if short_names.count(run.run_name) > 1 else run.run_name for run in runs]


def _subtitle(runs: Sequence[RunLog]) -> str:
    """Return the folders of the runs."""
    return ", ".join(str(run.folder) for run in runs)


def _make_tiles(run: RunLog, planned: PredictedMetrics) -> list[tuple[str, str]]:
    """Return the tiles of one run."""
    last, tiles = run.last, []
    tiles.append(("step" if run.planned_steps is None else f"of {run.planned_steps:,} steps", f"{last['step']:,}"))
    tiles.append(("loss", _format_number(last.get("loss"), "{:.4f}")))
    valid = [value for _, value in run.metric_points("valid_loss") if math.isfinite(value)]
    if valid:
        tiles.append(("best validation loss", f"{min(valid):.4f}"))
    for key, name in (("tokens_per_second", "tokens/s"), ("mfu", "MFU")):
        values = sorted(value for _, value in run.metric_points(key)[-200:] if math.isfinite(value))
        if values:
            write: FormatNumber = format_percent if key == "mfu" else format_compact
            prediction = f", planned {write(planned[key])}" if key in planned else ""
            tiles.append((f"{name}, median of the last steps{prediction}", write(values[len(values) // 2])))
    tiles.append(("memory", format_bytes(last.get("memory_bytes") or 0)))
    if "goodput" in last:
        tiles.append(("goodput", format_percent(last["goodput"])))
    if run.starts:
        tiles.append(("starts", str(len(run.starts))))
    return tiles


def _make_run_tiles(runs: Sequence[RunLog], names: Sequence[str]) -> list[tuple[str, str]]:
    """Return one tile for each run."""
    return [
        (f"{name}, step {run.last['step']:,}", f"loss {_format_number(run.last.get('loss'), '{:.4f}')}")
        for run, name in zip(runs, names, strict=True)
    ]


def _format_number(value: object, form: str) -> str:
    """Return a number in a format, or "not finite"."""
    return form.format(value) if isinstance(value, int | float) else "not finite"


def _draw_metric(
    runs: Sequence[RunLog], names: Sequence[str], title: str, key: str, *, write: FormatNumber = format_compact, log_from: float = math.inf,
    zero: bool = False, unit: float = 1.0, extra: Sequence[LineSeries] = (),
) -> str:  # fmt: skip
    """Draw a figure of one key with a line for each run, in multiples of `unit`."""
    series = [
        LineSeries(name, [(step, value / unit) for step, value in run.metric_points(key)], index)
        for index, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    return draw_line_figure(
        title, [*series, *extra], write=write, log_from=log_from, zero=zero, events=_restart_events(runs)
    )


def _restart_events(runs: Sequence[RunLog]) -> list[FigureEvent]:
    """Return the restarts and rollbacks of a single run; changes under one second are rollbacks."""
    if len(runs) > 1:
        return []
    return [
        FigureEvent(step, f"{'restart' if more >= 1 else 'rollback'}: {format_duration(more)} before step {step:g}")
        for step, more in runs[0].restart_points
    ]


def _learning_section(runs: Sequence[RunLog], names: Sequence[str]) -> PageSection:
    """Return the section about losses, learning rate and gradient norm."""
    valid = [
        LineSeries(f"{name}, validation" if len(runs) > 1 else "validation", run.metric_points("valid_loss"),
               index if len(runs) > 1 else 1, marks=True, dashed=len(runs) > 1)
        for index, (run, name) in enumerate(zip(runs, names, strict=True))
    ]  # fmt: skip
    figures = [
        _draw_metric(runs, ["training"] if len(runs) == 1 else names, "Loss", "loss", log_from=3, extra=valid),
        _draw_metric(runs, names, "Learning rate", "lr", zero=True),
        _draw_metric(runs, names, "Gradient norm before clipping", "grad_norm", log_from=30),
        _draw_metric(runs, names, "Multi-token prediction (MTP) loss", "mtp_loss"),
        _draw_metric(runs, names, "Segment order loss", "pair_loss"),
        _draw_metric(runs, names, "Loss scale", "loss_scale", log_from=30),
    ]
    return PageSection("Learning", figures)


def _speed_section(runs: Sequence[RunLog], names: Sequence[str], planned: Sequence[PredictedMetrics]) -> PageSection:
    """Return the section about speed and memory."""

    def make_planned_series(key: str) -> list[LineSeries]:
        several = len(runs) > 1
        return [
            LineSeries(f"{name}, planned" if several else "planned", [(run.metric_points(key)[0][0], plan[key]), (run.metric_points(key)[-1][0], plan[key])],
                   index if several else 1, dashed=True)
            for index, (run, name, plan) in enumerate(zip(runs, names, planned, strict=True)) if key in plan and run.metric_points(key)
        ]  # fmt: skip

    def draw_speed_figure(title: str, key: str, write: FormatNumber) -> str:
        name = ["measured"] if len(runs) == 1 else names
        return _draw_metric(runs, name, title, key, write=write, zero=True, extra=make_planned_series(key))

    return PageSection(
        "Speed and memory",
        [
            draw_speed_figure("Tokens per second", "tokens_per_second", format_compact),
            draw_speed_figure("Model FLOPs utilisation (MFU)", "mfu", format_percent),
            draw_speed_figure("Step time", "seconds", format_duration),
            _draw_metric(runs, names, "Memory of rank 0", "memory_bytes", write=format_gib, zero=True, unit=2**30),
        ],
    )


def _time_section(runs: Sequence[RunLog], names: Sequence[str]) -> PageSection:
    """Return the section about time by phase and lost time."""
    figures = []
    for run, name in zip(runs, names, strict=True):
        suffix = f" of {name}" if len(runs) > 1 else ""
        figures += [
            _draw_phases(run, f"Step time by phase{suffix}"),
            _draw_lost_time(run, f"Lost time{suffix}"),
        ]
    figures.append(
        _draw_metric(
            runs,
            names,
            "Goodput: share of the time since the first step that was not lost",
            "goodput",
            write=format_percent,
        )
    )
    return PageSection("Time breakdown", figures, "Measured on rank 0; nested phases are counted once.")


def _draw_phases(run: RunLog, title: str) -> str:
    """Draw the seconds of a step by phase."""
    known = run.list_key_suffixes("phases/")
    order = [*(name for name in PHASES if name in known), *(name for name in known if name not in PHASES)]
    steps = [step for step, _ in run.metric_points("seconds")]
    stacked = []
    for name in order:
        seconds = dict(run.metric_points(f"phases/{name}"))
        stacked.append(LineSeries(name.replace("_", " "), [(step, seconds.get(step, 0.0)) for step in steps]))
    return draw_area_figure(title, stacked, write=format_duration, events=_restart_events([run])) if stacked else ""


def _draw_lost_time(run: RunLog, title: str) -> str:
    """Draw the time lost by reason."""
    lost = {reason: run.last.get(f"lost/{reason}", 0.0) for reason in REASONS}
    rows = [StackedBar(reason, [(reason, seconds)], format_duration(seconds)) for reason, seconds in lost.items()]
    return draw_bar_figure(title, rows, write=format_duration) if any(lost.values()) else ""


def _routing_section(runs: Sequence[RunLog], names: Sequence[str]) -> PageSection:
    """Return the section about the routing of experts."""
    shown = [
        ("Maximum expert load / mean", "expert_load_max"),
        ("Minimum expert load / mean", "expert_load_min"),
        ("Router entropy, nats", "router_entropy"),
        ("Dropped tokens", "drop_rate"),
        ("Load balancing loss", "aux_loss"),
        ("Router z-loss", "z_loss"),
        ("Indexer loss", "indexer_loss"),
    ]
    return PageSection("Expert routing", [_draw_metric(runs, names, title, key) for title, key in shown])


def _reward_section(runs: Sequence[RunLog], names: Sequence[str]) -> PageSection:
    """Return the section about the rewards and answers of reinforcement learning."""
    shown = [
        ("Mean reward", "reward/mean"),
        ("Share of groups with equal rewards", "reward/equal_groups"),
        ("Tokens of an answer", "answer/length"),
        ("Share of clipped tokens", "policy/clip_fraction"),
        ("KL divergence from the reference, nats per token", "policy/kl"),
    ]
    return PageSection("Rewards", [_draw_metric(runs, names, title, key) for title, key in shown])


def _data_section(runs: Sequence[RunLog], names: Sequence[str]) -> PageSection:
    """Return the section about epochs of the data sets."""
    several = len(runs) > 1
    series = [
        LineSeries(f"{name}: {dataset}" if several else dataset, run.metric_points(f"epochs/{dataset}"))
        for run, name in zip(runs, names, strict=True)
        for dataset in run.list_key_suffixes("epochs/")
    ]
    return PageSection("Data", [draw_line_figure("Epochs of each data set", series, zero=True) if series else ""])


def _schedule_sections(runs: Sequence[RunLog], names: Sequence[str]) -> list[PageSection]:
    """Return one section for each different pipeline schedule."""
    sections: list[PageSection] = []
    seen: list[PipelineShape] = []
    for run, name in zip(runs, names, strict=True):
        shape = _pipeline_shape(run)
        if shape is not None and shape not in seen:
            seen.append(shape)
            picture, text = draw_pipeline_schedule(shape)
            sections.append(PageSection(f"Pipeline schedule of {name}", [wrap_wide_picture(picture)], text, wide=True))
    return sections


def _pipeline_shape(run: RunLog) -> PipelineShape | None:
    """Return the pipeline shape of a run's last start, or None without a pipeline."""
    parallel, batch = run.settings.get("parallel", {}), run.settings.get("batch", {})
    pp = parallel.get("pp", 1)
    if pp == 1 or not run.starts or "global" not in batch:
        return None
    dp = run.starts[-1]["layout"]["ranks"] // (parallel.get("tp", 1) * parallel.get("cp", 1) * pp)
    micro = batch["global"] // (batch.get("micro", 1) * max(dp, 1))
    schedule, stages = parallel.get("schedule", "1f1b"), parallel.get("virtual_stages", 1)
    return PipelineShape(schedule, pp, stages, max(micro, 1), parallel.get("overlap_expert_exchange", False))


def _history_section(runs: Sequence[RunLog], names: Sequence[str]) -> PageSection:
    """Return the section about starts, errors and checkpoints."""
    parts = []
    for run, name in zip(runs, names, strict=True):
        suffix = f" of {name}" if len(runs) > 1 else ""
        starts = [run.starts[index] for index in pick_evenly_spaced_indices(len(run.starts), MAX_ROWS)]
        rows = [
            (
                _format_time(start["time"]),
                f"{start.get('step', 0):,}",
                _format_layout(start.get("layout", {})),
                str(start.get("host", "")),
            )
            for start in starts
        ]
        parts.append(render_table((f"Start{suffix}", "after step", "layout", "rank 0 on"), rows, numbers=(1,)))
        kept = run.list_checkpoints()
        shown = [kept[index] for index in pick_evenly_spaced_indices(len(kept), MAX_ROWS)]
        saved = [(f"step {each.step:,}", _format_time(each.written), format_bytes(each.size_bytes)) for each in shown]
        parts.append(render_table((f"Checkpoint{suffix}", "written", "size"), saved, numbers=(2,)))
        errors = run.list_rank_errors()
        ends = [(_format_time(time), rank, message) for time, rank, message in errors[:MAX_ROWS]]
        parts.append(render_table((f"Error{suffix}", "rank", "message"), ends, numbers=(1,)))
    return PageSection("Starts, errors and checkpoints", parts)


def _format_time(seconds: float) -> str:
    """Return a Unix time as local date and time."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _format_layout(layout: Mapping[str, Any]) -> str:
    """Return a layout as text."""
    return ", ".join(f"{key} {value}" for key, value in layout.items())


def _settings_section(runs: Sequence[RunLog], names: Sequence[str]) -> PageSection:
    """Return the section about settings: all of one run, or the differences between several."""
    found = [flatten_settings(run.settings) if run.settings else {} for run in runs]
    keys = list(dict.fromkeys(key for settings in found for key in settings))
    if len(runs) > 1:
        keys = [key for key in keys if len({str(settings.get(key)) for settings in found}) > 1]
    rows = [(key, *(str(settings.get(key, "(default)")) for settings in found)) for key in keys]
    text = "Only settings that differ." if len(runs) > 1 else ""
    listed = render_table(("setting", *names), rows)
    if len(rows) > MAX_ROWS:
        listed = f"<details><summary>{len(rows)} settings</summary>{listed}</details>"
    return PageSection("Settings", [listed], text, wide=True)


def _environment_section(runs: Sequence[RunLog], names: Sequence[str]) -> PageSection:
    """Return the section about hosts and software versions."""
    starts = [run.starts[-1] if run.starts else {} for run in runs]
    found = [
        {key: str(start[key]) for key in ("host", "machine", "cpus") if key in start} | start.get("versions", {})
        for start in starts
    ]
    keys = list(dict.fromkeys(key for environment in found for key in environment))
    rows = [(key, *(str(environment.get(key, "")) for environment in found)) for key in keys]
    return PageSection("Environment", [render_table(("at the last start", *names), rows)], wide=True)
