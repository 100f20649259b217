"""HTML page of `mega plan --html`: predicted memory, time and schedule of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mega_common.progress_logging import format_number
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
from mega_trainer.pipeline.schedules import PipelineOpCosts, make_schedule, simulate_schedule

DRAWN = 2400  # operations of a schedule's picture, at most
SEEN = 160  # of a rank, that one can tell from each other
ROWS = 16  # pipeline ranks whose memory is shown


class PipelineShape(NamedTuple):
    """Shape of a pipeline: schedule, ranks, stages per rank and micro-batches."""

    schedule: str
    ranks: int
    stages: int
    microbatches: int


@dataclass(frozen=True)
class SearchedLayout:
    """Layout found by a search: seconds per step, tokens per second and GPU, bytes, settings in words, and an
    explanation of its time.
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
    found: Sequence[SearchedLayout] = (),
) -> str:
    """Return the HTML page of a plan.

    Args:
        title: what is planned.
        plan: the plan as `mega plan --json` prints it.
        moments: when each pipeline rank holds most.
        pipeline: how it is cut.
        message: bytes that a stage sends to the next one of each micro-batch.
        costs: of its operations in seconds, where the machine is known.
        found: what a search found, the best first.
    """
    ranks, timed = plan["ranks"], plan.get("time", {})
    degrees = ", ".join(f"{name} {size}" for name, size in ranks.items() if name != "world")
    machine = f" on {timed['machine']}" if timed else ""
    sections = [
        *([_search_section(found, timed)] if found else []),
        _memory_section(plan, timed, moments),
        _schedule_section(pipeline, message, costs),
        *([_changes_section(timed)] if timed else []),
    ]
    return render_page(title, f"{ranks['world']:,} ranks{machine}: {degrees}", _make_tiles(plan, timed), sections)


def draw_schedule(pipeline: PipelineShape, costs: PipelineOpCosts | None = None) -> tuple[str, str]:
    """Return a picture of a pipeline's schedule, with as many micro-batches as are readable, and its caption."""
    each = pipeline.ranks * pipeline.stages * (3 if pipeline.schedule.startswith("zb") else 2)
    most = min(DRAWN // each, max(pipeline.ranks, SEEN * pipeline.ranks // each))
    shown = max(1, min(pipeline.microbatches, most))
    schedule = make_schedule(pipeline.schedule, pp=pipeline.ranks, microbatches=shown, virtual_stages=pipeline.stages)
    text = "A row is a pipeline rank; the number in a box is its micro-batch."
    if shown < pipeline.microbatches:
        text += f" Drawn with {shown} of {pipeline.microbatches} micro-batches: a full pipeline goes on as it is."
    return draw_schedule_svg(schedule, simulate_schedule(schedule, costs)), text


def _make_tiles(plan: Mapping[str, Any], timed: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the tiles of a plan."""
    most = max(sum(kinds.values()) for kinds in plan["memory_bytes"])
    tiles = [
        ("parameters", format_number(plan["parameters"])),
        ("tokens a step", format_number(plan["tokens_per_step"])),
        ("FLOP a step", format_number(plan["flops_per_step"])),
        ("of the fullest rank", format_bytes(most)),
        ("pipeline bubble of equal stages", format_percent(plan["bubble"])),
    ]
    if timed:
        fits = "fits" if timed["fits"] else "does not fit"
        tiles += [
            (f"a step on {timed['machine']}, {fits} its memory", format_duration(timed["seconds_per_step"])),
            ("tokens a second and GPU", f"{timed['tokens_per_second_per_gpu']:,.0f}"),
            (
                f"MFU of the {timed['peak_of']} peak, by 6N {format_percent(timed['mfu_palm'])}",
                format_percent(timed["mfu_causal"]),
            ),
        ]
    if "hours" in timed:
        tiles.append((f"to {format_number(timed['tokens'])} tokens", format_duration(3600 * timed["hours"])))
    if "cost" in timed:
        tiles.append((f"costs to {format_number(timed['tokens'])} tokens", format_number(timed["cost"])))
    return tiles


def _memory_section(plan: Mapping[str, Any], timed: Mapping[str, Any], moments: Sequence[str]) -> PageSection:
    """Return the section about memory and time."""
    every, limit = plan["memory_bytes"], timed.get("memory_limit_bytes")
    rows = [
        StackedBar(f"rank {rank}", list(every[rank].items()), format_bytes(sum(every[rank].values())))
        for rank in range(0, len(every), -(-len(every) // ROWS))
    ]
    memory = draw_bar_figure(
        "Memory of each pipeline rank at its peak", rows, write=format_bytes, limit=limit, limit_name="the GPU has"
    )
    peaks = [
        (str(rank), format_bytes(sum(kinds.values())), moments[rank], str(flight))
        for rank, (kinds, flight) in enumerate(zip(every, plan["microbatches_in_flight"], strict=True))
    ]
    listed = render_table(("rank", "needs", "most in", "activations in flight"), peaks, numbers=(0, 1, 3))
    parts = timed.get("seconds", {})
    shares = [
        StackedBar(kind, [(kind, part)], format_percent(part / timed["seconds_per_step"]))
        for kind, part in parts.items()
    ]
    time = draw_bar_figure("Where a step's time goes", shares, write=format_duration) if shares else ""
    text = (
        "Time is that of the pipeline rank that works most; what runs beside other work is not in it." if time else ""
    )
    return PageSection("Memory and time" if time else "Memory", [memory, time, listed], text)


def _schedule_section(pipeline: PipelineShape, message: int, costs: PipelineOpCosts | None) -> PageSection:
    """Return the section about the pipeline schedule."""
    if pipeline.ranks == 1:
        return PageSection("Pipeline schedule", [])
    picture, text = draw_schedule(pipeline, costs)
    text += f" A message, the output of a stage or its gradient, has {format_bytes(message)}."
    text += (
        " Times are those predicted, in seconds."
        if costs is not None
        else " Forward, input's and weights' gradient take 1 each."
    )
    return PageSection("Pipeline schedule", [wrap_wide_picture(picture)], text, wide=True)


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
        "What to change first", [render_table(("change", "gains", "then needs"), rows, numbers=(1, 2))], wide=True
    )


def _search_section(found: Sequence[SearchedLayout], timed: Mapping[str, Any]) -> PageSection:
    """Return the section about the layouts that fit: memory against throughput, coloured by tensor and pipeline ranks."""
    limit = timed.get("memory_limit_bytes")
    drawn = [
        ScatterPoint(
            one.memory / 2**30,
            one.rate,
            _split_name(one.settings),
            f"{one.settings}: {format_duration(one.seconds)} a step",
            place == 0,
        )
        for place, one in enumerate(found)
    ]
    figure = draw_scatter_figure(
        "Layouts that fit: the large one is the fastest", drawn, x_name="memory of the fullest rank",
        y_name="tokens a second and GPU", write_x=format_gib, limit=limit and limit / 2**30,
    )  # fmt: skip
    best = found[0].seconds
    rows = [
        (
            f"{one.seconds:.3f} s",
            f"+{format_percent(one.seconds / best - 1)}",
            format_compact(one.rate),
            format_bytes(one.memory),
            one.settings,
            one.reason,
        )
        for one in found[:12]
    ]
    head = ("a step", "slower", "tokens/s/GPU", "memory", "layout", "why")
    return PageSection(
        "Search",
        [figure, render_table(head, rows, numbers=(0, 1, 2, 3))],
        "Predicted; the plan below is of the fastest.",
    )


def _split_name(settings: str) -> str:
    """Return the tensor and pipeline ranks in a layout's words, which determine its colour."""
    words = settings.split()
    kept = [f"{name} {words[words.index(name) + 1]}" for name in ("tp", "pp") if name in words]
    return ", ".join(kept) or "one rank a copy"
