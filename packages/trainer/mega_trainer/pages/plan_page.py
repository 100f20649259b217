"""HTML page of `mega plan --html`: predicted memory, time and schedule of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mega_common.progress_logging import format_with_decimal_unit
from mega_trainer.pages.axis_scale import format_bytes, format_compact, format_duration, format_gib, format_percent
from mega_trainer.pages.page_elements import (
    PageSection,
    ScatterPoint,
    StackedBar,
    draw_bar_figure,
    draw_scatter_figure,
    render_page,
    render_table,
    wrap_wide_picture,
)
from mega_trainer.pipeline.schedule_svg import draw_schedule_svg
from mega_trainer.pipeline.schedules import (
    SPLIT_BACKWARD,
    PipelineOpCosts,
    make_pipeline_schedule,
    simulate_pipeline_schedule,
)
from mega_trainer.plan.held_out_error import format_prediction_error

MAX_OPERATIONS = 2400  # of a schedule's picture
MAX_RANK_OPERATIONS = 160  # readable operations of a rank
MAX_ROWS = 16  # pipeline ranks whose memory is shown


class PipelineShape(NamedTuple):
    """Shape of a pipeline for a picture: schedule, ranks, stages per rank and micro-batches."""

    schedule: str
    ranks: int
    stages: int
    microbatches: int
    pairs_passes: bool = False


@dataclass(frozen=True)
class LayoutCandidate:
    """Layout found by `mega plan --search`, as shown on the plan's HTML page.
    It has the step time, tokens per second and GPU, memory in bytes, settings in words, and why it takes that time.
    """

    seconds: float
    rate: float
    memory: int
    settings: str
    reason: str


def render_plan_page(
    title: str,
    plan: Mapping[str, Any],
    moments: Sequence[str],
    pipeline: PipelineShape,
    message: int,
    costs: PipelineOpCosts | None = None,
    found: Sequence[LayoutCandidate] = (),
) -> str:
    """Return the HTML page of the predictions of `mega plan`: memory, step time, pipeline and searched layouts.

    Args:
        title: title of the page.
        plan: plan as printed by `mega plan --json`.
        moments: operation at the memory peak of each pipeline rank.
        pipeline: shape of the pipeline.
        message: bytes that a stage sends to the next one for each micro-batch.
        costs: seconds of pipeline operations, if the machine is known.
        found: layouts found by a search, fastest first.
    """
    ranks, timed = plan["ranks"], plan.get("time", {})
    degrees = ", ".join(f"{name} {size}" for name, size in ranks.items() if name != "world")
    machine = f" on {timed['machine']}" if timed else ""
    sections = [
        *([_search_section(found, timed)] if found else []),
        _memory_section(plan, timed, moments),
        _schedule_section(pipeline, message, costs),
        *([_fitting_section(timed)] if timed and not timed["fits"] else []),
        *([_changes_section(timed)] if timed else []),
    ]
    return render_page(title, f"{ranks['world']:,} ranks{machine}: {degrees}", _make_tiles(plan, timed), sections)


def draw_pipeline_schedule(pipeline: PipelineShape, costs: PipelineOpCosts | None = None) -> tuple[str, str]:
    """Return an SVG picture of a pipeline's schedule over time, and its caption.
    The picture has as many micro-batches as are readable.
    """
    each = pipeline.ranks * pipeline.stages * (3 if pipeline.schedule in SPLIT_BACKWARD else 2)
    most = min(MAX_OPERATIONS // each, max(pipeline.ranks, MAX_RANK_OPERATIONS * pipeline.ranks // each))
    shown = max(1, min(pipeline.microbatches, most))
    schedule = make_pipeline_schedule(
        pipeline.schedule, pp=pipeline.ranks, microbatches=shown, virtual_stages=pipeline.stages,
        pairs_passes=pipeline.pairs_passes,
    )  # fmt: skip
    text = "Each row is a pipeline rank; the number in a box is the micro-batch."
    text += " Boxes above each other run in turn, each hiding the other's expert exchange." * bool(schedule.pairs)
    if shown < pipeline.microbatches:
        text += f" Shows {shown} of {pipeline.microbatches} micro-batches, so its bubble is larger than that of a step."
    unit = "units of time" if costs is None else "s"
    return draw_schedule_svg(schedule, simulate_pipeline_schedule(schedule, costs), unit), text


def _make_tiles(plan: Mapping[str, Any], timed: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the tiles of a plan."""
    most = max(sum(kinds.values()) for kinds in plan["memory_bytes"])
    tiles = [
        ("parameters", format_with_decimal_unit(plan["parameters"])),
        ("tokens per step", format_with_decimal_unit(plan["tokens_per_step"])),
        ("FLOPs per step", format_with_decimal_unit(plan["flops_per_step"])),
        ("predicted peak memory of a rank", format_bytes(most)),
        ("pipeline bubble for equal stages", format_percent(plan["bubble"])),
    ]
    if timed:
        fits = "fits" if timed["fits"] else "does not fit"
        tiles += [
            (
                f"predicted step time on {timed['machine']}, {fits} in its memory",
                format_duration(timed["seconds_per_step"]),
            ),
            ("predicted tokens/s per GPU", f"{timed['tokens_per_second_per_gpu']:,.0f}"),
            (
                f"predicted MFU of the {timed['peak_of']} peak; with 6N FLOPs {format_percent(timed['mfu_palm'])}",
                format_percent(timed["mfu_causal"]),
            ),
        ]
    if "hours" in timed:
        suffix = f"{format_with_decimal_unit(timed['tokens'])} tokens" + ("" if timed["fits"] else ", if it fitted")
        tiles.append((f"predicted time for {suffix}", format_duration(3600 * timed["hours"])))
        if "cost" in timed:
            tiles.append((f"predicted cost of {suffix}", format_with_decimal_unit(timed["cost"])))
        if "energy_mwh" in timed:
            tiles.append(("predicted energy at the GPUs' power limit", f"{timed['energy_mwh']:,.1f} MWh"))
    return tiles


def _memory_section(plan: Mapping[str, Any], timed: Mapping[str, Any], moments: Sequence[str]) -> PageSection:
    """Return the section about memory and time."""
    every, limit = plan["memory_bytes"], timed.get("memory_limit_bytes")
    rows = [
        StackedBar(f"rank {rank}", list(every[rank].items()), format_bytes(sum(every[rank].values())))
        for rank in range(0, len(every), -(-len(every) // MAX_ROWS))
    ]
    memory = draw_bar_figure(
        "Peak memory of each pipeline rank", rows, write=format_bytes, limit=limit, limit_name="GPU memory"
    )
    peaks = [
        (str(rank), format_bytes(sum(kinds.values())), moments[rank], str(flight))
        for rank, (kinds, flight) in enumerate(zip(every, plan["microbatches_in_flight"], strict=True))
    ]
    listed = render_table(("rank", "peak memory", "peak in", "activations in flight"), peaks, numbers=(0, 1, 3))
    parts = timed.get("seconds", {})
    shares = [
        StackedBar(kind, [(kind, part)], format_percent(part / timed["seconds_per_step"]))
        for kind, part in parts.items()
    ]
    time = draw_bar_figure("Step time by part", shares, write=format_duration) if shares else ""
    text = ""
    if time:
        text = (
            "All figures are predicted. Times are of the slowest pipeline rank, without overlapped communication. "
            f"Error of the step time: {format_prediction_error(timed['error'])}."
        )
    return PageSection("Memory and time" if time else "Memory", [memory, time, listed], text)


def _schedule_section(pipeline: PipelineShape, message: int, costs: PipelineOpCosts | None) -> PageSection:
    """Return the section about the pipeline schedule."""
    if pipeline.ranks == 1:
        return PageSection("Pipeline schedule", [])
    picture, text = draw_pipeline_schedule(pipeline, costs)
    text += f" A message (activations or their gradient) has {format_bytes(message)}."
    text += (
        " Times are predicted, in seconds."
        if costs is not None
        else " Forward, input gradient and weight gradient take 1 unit each."
    )
    return PageSection("Pipeline schedule", [wrap_wide_picture(picture)], text, wide=True)


def _fitting_section(timed: Mapping[str, Any]) -> PageSection:
    """Return the section about the settings with which a layout that does not fit would fit."""
    rows = [
        (
            " ".join(f"--set {setting}" for setting in change["settings"]),
            f"{100 * change['slower']:+.1f} %",
            format_bytes(change["memory_bytes"]),
        )
        for change in timed["fitting"]
    ]
    limit = format_bytes(timed["memory_limit_bytes"])
    text = f"The layout does not fit in {limit}. These changes make it fit."
    if not rows:
        text = f"The layout does not fit in {limit}, and no single change of recompute, offload, ZeRO or micro-batch makes it fit."
    table = render_table(("change", "step time", "peak memory"), rows, numbers=(1, 2))
    return PageSection("Settings that fit", [table] if rows else [], text, wide=True)


def _changes_section(timed: Mapping[str, Any]) -> PageSection:
    """Return the section about changes that make the run faster."""
    rows = [
        (
            " ".join(f"--set {setting}" for setting in change["settings"]),
            format_percent(change["gain"]),
            format_bytes(change["memory_bytes"]),
        )
        for change in timed["faster"]
    ]
    return PageSection(
        "Faster settings", [render_table(("change", "gain", "peak memory"), rows, numbers=(1, 2))], wide=True
    )


def _search_section(found: Sequence[LayoutCandidate], timed: Mapping[str, Any]) -> PageSection:
    """Return the section about the layouts that fit: memory against throughput, coloured by tensor and pipeline ranks."""
    limit = timed.get("memory_limit_bytes")
    drawn = [
        ScatterPoint(
            layout.memory / 2**30,
            layout.rate,
            _split_name(layout.settings),
            f"{layout.settings}: {format_duration(layout.seconds)} per step",
            index == 0,
        )
        for index, layout in enumerate(found)
    ]
    figure = draw_scatter_figure(
        "Layouts that fit (large: fastest)", drawn, x_name="peak memory of a rank",
        y_name="tokens/s per GPU", write_x=format_gib, limit=limit and limit / 2**30,
    )  # fmt: skip
    best = found[0].seconds
    rows = [
        (
            layout.settings,
            f"{layout.seconds:.3f} s",
            f"+{100 * (layout.seconds / best - 1):.1f} %",
            format_compact(layout.rate),
            format_bytes(layout.memory),
            layout.reason,
        )
        for layout in found[:12]
    ]
    head = ("layout", "step time", "slower", "tokens/s/GPU", "memory", "explanation")
    return PageSection(
        "Search",
        [figure, render_table(head, rows, numbers=(1, 2, 3, 4))],
        "Predictions; the plan below is for the fastest layout.",
    )


def _split_name(settings: str) -> str:
    """Return the tensor and pipeline ranks in a layout's settings, which determine its colour."""
    words = settings.split()
    kept = [f"{name} {words[words.index(name) + 1]}" for name in ("tp", "pp") if name in words]
    return ", ".join(kept) or "tp 1, pp 1"
