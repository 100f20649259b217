"""`mega report`: what one run did, or several beside each other, as a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from mega_trainer.config import flat
from mega_trainer.job.goodput import REASONS
from mega_trainer.pages.figures import Bar, Event, Series, Write, areas, bars, lines
from mega_trainer.pages.page import Section, page, table, wide
from mega_trainer.pages.plan_page import Pipeline, schedule_picture
from mega_trainer.pages.run_log import RunLog
from mega_trainer.pages.scale import evenly, gib, of_bytes, of_seconds, percent, short

PHASES = ("data", "forward", "backward", "pipeline", "reduce", "norm", "update", "evaluate", "save")
MOST_ROWS = 40  # of a table of checkpoints or starts
DRAWN_OPERATIONS = 1200  # of a schedule's picture
Predicted = Mapping[str, float]  # by key of metrics.jsonl


def run_page(runs: Sequence[RunLog]) -> str:
    """The page of these runs."""
    names = _names(runs)
    title = f"Run {names[0]}" if len(runs) == 1 else f"{len(runs)} runs: {', '.join(names)}"
    planned = [_planned(run) for run in runs]
    sections = [
        _learning(runs, names),
        _speed(runs, names, planned),
        _time(runs, names),
        _experts(runs, names),
        _data(runs, names),
        *_schedules(runs, names),
        _happened(runs, names),
        _settings(runs, names),
        _environment(runs, names),
    ]
    return page(title, _subtitle(runs), _tiles(runs[0], planned[0]) if len(runs) == 1 else _rows(runs, names), sections)


def _planned(run: RunLog) -> Predicted:
    """What was predicted of its last step, where its machine is known."""
    expected, taken = run.last.get("predicted_seconds"), run.last.get("seconds")
    if not expected or not taken:
        return {}
    rates = {key: run.last[key] * taken / expected for key in ("tokens_per_second", "mfu") if run.last.get(key)}
    return {"seconds": expected, **rates}


def _names(runs: Sequence[RunLog]) -> list[str]:
    """Of each run one that no other has."""
    short_names = [run.name for run in runs]
    return [str(run.folder) if short_names.count(run.name) > 1 else run.name for run in runs]


def _subtitle(runs: Sequence[RunLog]) -> str:
    return ", ".join(str(run.folder) for run in runs)


def _tiles(run: RunLog, planned: Predicted) -> list[tuple[str, str]]:
    last, tiles = run.last, []
    tiles.append(("step" if run.steps is None else f"of {run.steps:,} steps", f"{last['step']:,}"))
    tiles.append(("loss", _number(last.get("loss"), "{:.4f}")))
    valid = [value for _, value in run.points("valid_loss") if math.isfinite(value)]
    if valid:
        tiles.append(("best validation loss", f"{min(valid):.4f}"))
    for key, what in (("tokens_per_second", "tokens a second"), ("mfu", "MFU")):
        values = sorted(value for _, value in run.points(key)[-200:] if math.isfinite(value))
        if values:
            write: Write = percent if key == "mfu" else short
            beside = f", planned {write(planned[key])}" if key in planned else ""
            tiles.append((f"{what}, median of the last steps{beside}", write(values[len(values) // 2])))
    tiles.append(("memory", of_bytes(last.get("memory_bytes") or 0)))
    if "goodput" in last:
        tiles.append(("goodput", percent(last["goodput"])))
    if run.starts:
        tiles.append(("starts", str(len(run.starts))))
    return tiles


def _rows(runs: Sequence[RunLog], names: Sequence[str]) -> list[tuple[str, str]]:
    return [
        (f"{name}, step {run.last['step']:,}", f"loss {_number(run.last.get('loss'), '{:.4f}')}")
        for run, name in zip(runs, names, strict=True)
    ]


def _number(value: object, form: str) -> str:
    return form.format(value) if isinstance(value, int | float) else "not finite"


def _each(
    runs: Sequence[RunLog], names: Sequence[str], title: str, key: str, *, write: Write = short, log_from: float = math.inf,
    zero: bool = False, unit: float = 1.0, further: Sequence[Series] = (),
) -> str:  # fmt: skip
    """One figure of a key, a line a run, in multiples of `unit`."""
    series = [
        Series(name, [(step, value / unit) for step, value in run.points(key)], place)
        for place, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    return lines(title, [*series, *further], write=write, log_from=log_from, zero=zero, events=_events(runs))


def _events(runs: Sequence[RunLog]) -> list[Event]:
    """Restarts and rollbacks, of one run: no process starts as fast as a run goes back within one."""
    if len(runs) > 1:
        return []
    return [
        Event(step, f"{'restart' if more >= 1 else 'rollback'}: {of_seconds(more)} before step {step:g}")
        for step, more in runs[0].restarts
    ]


def _learning(runs: Sequence[RunLog], names: Sequence[str]) -> Section:
    valid = [
        Series(f"{name}, validation" if len(runs) > 1 else "validation", run.points("valid_loss"),
               place if len(runs) > 1 else 1, marks=True, dashed=len(runs) > 1)
        for place, (run, name) in enumerate(zip(runs, names, strict=True))
    ]  # fmt: skip
    figures = [
        _each(runs, ["training"] if len(runs) == 1 else names, "Loss", "loss", log_from=3, further=valid),
        _each(runs, names, "Learning rate", "lr", zero=True),
        _each(runs, names, "Gradient norm, before the clip", "grad_norm", log_from=30),
        _each(runs, names, "Loss of further tokens", "mtp_loss"),
        _each(runs, names, "Loss of the order of segments", "pair_loss"),
        _each(runs, names, "Loss scale", "loss_scale", log_from=30),
    ]
    return Section("Learning", figures)


def _speed(runs: Sequence[RunLog], names: Sequence[str], planned: Sequence[Predicted]) -> Section:
    def beside(key: str) -> list[Series]:
        several = len(runs) > 1
        return [
            Series(f"{name}, planned" if several else "planned", [(run.points(key)[0][0], told[key]), (run.points(key)[-1][0], told[key])],
                   place if several else 1, dashed=True)
            for place, (run, name, told) in enumerate(zip(runs, names, planned, strict=True)) if key in told and run.points(key)
        ]  # fmt: skip

    def shown(title: str, key: str, write: Write) -> str:
        name = ["measured"] if len(runs) == 1 else names
        return _each(runs, name, title, key, write=write, zero=True, further=beside(key))

    return Section(
        "Speed and memory",
        [
            shown("Tokens a second", "tokens_per_second", short),
            shown("Model FLOPs utilisation", "mfu", percent),
            shown("Seconds a step", "seconds", of_seconds),
            _each(runs, names, "Memory of rank 0", "memory_bytes", write=gib, zero=True, unit=2**30),
        ],
    )


def _time(runs: Sequence[RunLog], names: Sequence[str]) -> Section:
    figures = []
    for run, name in zip(runs, names, strict=True):
        behind = f" of {name}" if len(runs) > 1 else ""
        figures += [_phases(run, f"Seconds of a step by phase{behind}"), _lost(run, f"Time lost{behind}")]
    figures.append(
        _each(
            runs, names, "Goodput: share of the time since the first step that was not lost", "goodput", write=percent
        )
    )
    return Section("Where the time went", figures, "Of rank 0. What a phase waits for in another is not in both.")


def _phases(run: RunLog, title: str) -> str:
    known = run.under("phases/")
    order = [*(name for name in PHASES if name in known), *(name for name in known if name not in PHASES)]
    steps = [step for step, _ in run.points("seconds")]
    stacked = []
    for name in order:
        there = dict(run.points(f"phases/{name}"))
        stacked.append(Series(name.replace("_", " "), [(step, there.get(step, 0.0)) for step in steps]))
    return areas(title, stacked, write=of_seconds, events=_events([run])) if stacked else ""


def _lost(run: RunLog, title: str) -> str:
    lost = {reason: run.last.get(f"lost/{reason}", 0.0) for reason in REASONS}
    rows = [Bar(reason, [(reason, seconds)], of_seconds(seconds)) for reason, seconds in lost.items()]
    return bars(title, rows, write=of_seconds) if any(lost.values()) else ""


def _experts(runs: Sequence[RunLog], names: Sequence[str]) -> Section:
    shown = [
        ("Most loaded expert, in multiples of the mean", "expert_load_max"),
        ("Least loaded expert, in multiples of the mean", "expert_load_min"),
        ("Entropy of the router, nats", "router_entropy"),
        ("Choices dropped", "drop_rate"),
        ("Balancing loss", "aux_loss"),
        ("z-loss of the router", "z_loss"),
    ]
    return Section("Routing of experts", [_each(runs, names, title, key) for title, key in shown])


def _data(runs: Sequence[RunLog], names: Sequence[str]) -> Section:
    several = len(runs) > 1
    series = [
        Series(f"{name}: {read}" if several else read, run.points(f"epochs/{read}"))
        for run, name in zip(runs, names, strict=True)
        for read in run.under("epochs/")
    ]
    return Section("Data", [lines("How often each data set was read", series, zero=True) if series else ""])


def _schedules(runs: Sequence[RunLog], names: Sequence[str]) -> list[Section]:
    sections: list[Section] = []
    seen: list[Pipeline] = []
    for run, name in zip(runs, names, strict=True):
        shape = _pipeline(run)
        if shape is not None and shape not in seen:
            seen.append(shape)
            picture, text = schedule_picture(shape)
            sections.append(Section(f"Pipeline schedule of {name}", [wide(picture)], text, wide=True))
    return sections


def _pipeline(run: RunLog) -> Pipeline | None:
    """That of the last start, if it had one."""
    parallel, batch = run.settings.get("parallel", {}), run.settings.get("batch", {})
    pp = parallel.get("pp", 1)
    if pp == 1 or not run.starts or "global" not in batch:
        return None
    dp = run.starts[-1]["layout"]["ranks"] // (parallel.get("tp", 1) * parallel.get("cp", 1) * pp)
    micro = batch["global"] // (batch.get("micro", 1) * max(dp, 1))
    return Pipeline(parallel.get("schedule", "1f1b"), pp, parallel.get("virtual_stages", 1), max(micro, 1))


def _happened(runs: Sequence[RunLog], names: Sequence[str]) -> Section:
    parts = []
    for run, name in zip(runs, names, strict=True):
        behind = f" of {name}" if len(runs) > 1 else ""
        starts = [run.starts[place] for place in evenly(len(run.starts), MOST_ROWS)]
        rows = [
            (
                _when(start["time"]),
                f"{start.get('step', 0):,}",
                _layout(start.get("layout", {})),
                str(start.get("host", "")),
            )
            for start in starts
        ]
        parts.append(table((f"Start{behind}", "after step", "layout", "rank 0 on"), rows, numbers=(1,)))
        kept = run.checkpoints()
        shown = [kept[place] for place in evenly(len(kept), MOST_ROWS)]
        saved = [(f"step {one.step:,}", _when(one.written), of_bytes(one.size)) for one in shown]
        parts.append(table((f"Checkpoint{behind}", "written", "size"), saved, numbers=(2,)))
        errors = run.errors()
        ends = [(_when(when), rank, what) for when, rank, what in errors[:MOST_ROWS]]
        parts.append(table((f"Error{behind}", "rank", "what it said"), ends, numbers=(1,)))
    return Section("Starts, errors and checkpoints", parts)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _layout(layout: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in layout.items())


def _settings(runs: Sequence[RunLog], names: Sequence[str]) -> Section:
    """What differs between runs; of one all of it."""
    found = [flat(run.settings) if run.settings else {} for run in runs]
    keys = list(dict.fromkeys(key for settings in found for key in settings))
    if len(runs) > 1:
        keys = [key for key in keys if len({str(settings.get(key)) for settings in found}) > 1]
    rows = [(key, *(str(settings.get(key, "(default)")) for settings in found)) for key in keys]
    text = "Those that differ; all others are alike." if len(runs) > 1 else ""
    listed = table(("setting", *names), rows)
    if len(rows) > MOST_ROWS:
        listed = f"<details><summary>{len(rows)} settings</summary>{listed}</details>"
    return Section("Settings", [listed], text, wide=True)


def _environment(runs: Sequence[RunLog], names: Sequence[str]) -> Section:
    told = [run.starts[-1] if run.starts else {} for run in runs]
    found = [
        {key: str(start[key]) for key in ("host", "machine", "cpus") if key in start} | start.get("versions", {})
        for start in told
    ]
    keys = list(dict.fromkeys(key for one in found for key in one))
    rows = [(key, *(str(one.get(key, "")) for one in found)) for key in keys]
    return Section("Environment", [table(("at the last start", *names), rows)], wide=True)
