"""`mega plan --html`: what a run is planned to need, as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mega_common.log import human
from mega_trainer.pages.figures import Bar, Dot, bars, dots
from mega_trainer.pages.page import Section, page, table, wide
from mega_trainer.pages.scale import gib, of_bytes, of_seconds, percent, short
from mega_trainer.pipeline.draw import draw
from mega_trainer.pipeline.schedules import Costs, make_schedule, simulate

DRAWN = 2400  # operations of a schedule's picture, at most
SEEN = 160  # of a rank, that one can tell from each other
ROWS = 16  # pipeline ranks whose memory is shown


class Pipeline(NamedTuple):
    """How the layers are passed through: by which schedule, among how many ranks of how many stages each."""

    schedule: str
    ranks: int
    stages: int
    microbatches: int


@dataclass(frozen=True)
class Found:
    """A layout that a search found: its seconds a step, tokens a second and GPU, bytes, settings in words, and why it is so."""

    seconds: float
    rate: float
    memory: int
    settings: str
    reason: str


def plan_page(
    title: str,
    told: Mapping[str, Any],
    moments: Sequence[str],
    pipeline: Pipeline,
    message: int,
    costs: Costs | None = None,
    found: Sequence[Found] = (),
) -> str:
    """The page of a plan.

    Args:
        title: what is planned.
        told: the plan as `mega plan --json` prints it.
        moments: when each pipeline rank holds most.
        pipeline: how it is cut.
        message: bytes that a stage sends to the next one of each micro-batch.
        costs: of its operations in seconds, where the machine is known.
        found: what a search found, the best first.
    """
    ranks, timed = told["ranks"], told.get("time", {})
    degrees = ", ".join(f"{name} {size}" for name, size in ranks.items() if name != "world")
    machine = f" on {timed['machine']}" if timed else ""
    sections = [
        *([_search(found, timed)] if found else []),
        _needs(told, timed, moments),
        _pipeline(pipeline, message, costs),
        *([_faster(timed)] if timed else []),
    ]
    return page(title, f"{ranks['world']:,} ranks{machine}: {degrees}", _tiles(told, timed), sections)


def schedule_picture(pipeline: Pipeline, costs: Costs | None = None) -> tuple[str, str]:
    """A picture of its schedule, of as many micro-batches as one can see, and what is to be said of it."""
    each = pipeline.ranks * pipeline.stages * (3 if pipeline.schedule.startswith("zb") else 2)
    most = min(DRAWN // each, max(pipeline.ranks, SEEN * pipeline.ranks // each))
    shown = max(1, min(pipeline.microbatches, most))
    schedule = make_schedule(pipeline.schedule, pp=pipeline.ranks, microbatches=shown, virtual_stages=pipeline.stages)
    text = "A row is a pipeline rank; the number in a box is its micro-batch."
    if shown < pipeline.microbatches:
        text += f" Drawn with {shown} of {pipeline.microbatches} micro-batches: a full pipeline goes on as it is."
    return draw(schedule, simulate(schedule, costs)), text


def _tiles(told: Mapping[str, Any], timed: Mapping[str, Any]) -> list[tuple[str, str]]:
    most = max(sum(kinds.values()) for kinds in told["memory_bytes"])
    tiles = [
        ("parameters", human(told["parameters"])),
        ("tokens a step", human(told["tokens_per_step"])),
        ("FLOP a step", human(told["flops_per_step"])),
        ("of the fullest rank", of_bytes(most)),
        ("pipeline bubble of equal stages", percent(told["bubble"])),
    ]
    if timed:
        fits = "fits" if timed["fits"] else "does not fit"
        tiles += [
            (f"a step on {timed['machine']}, {fits} its memory", of_seconds(timed["seconds_per_step"])),
            ("tokens a second and GPU", f"{timed['tokens_per_second_per_gpu']:,.0f}"),
            (f"MFU of the {timed['peak_of']} peak, by 6N {percent(timed['mfu_palm'])}", percent(timed["mfu_causal"])),
        ]
    if "hours" in timed:
        tiles.append((f"to {human(timed['tokens'])} tokens", of_seconds(3600 * timed["hours"])))
    if "cost" in timed:
        tiles.append((f"costs to {human(timed['tokens'])} tokens", human(timed["cost"])))
    return tiles


def _needs(told: Mapping[str, Any], timed: Mapping[str, Any], moments: Sequence[str]) -> Section:
    every, limit = told["memory_bytes"], timed.get("memory_limit_bytes")
    rows = [
        Bar(f"rank {rank}", list(every[rank].items()), of_bytes(sum(every[rank].values())))
        for rank in range(0, len(every), -(-len(every) // ROWS))
    ]
    memory = bars(
        "Memory of each pipeline rank at its peak", rows, write=of_bytes, limit=limit, limit_name="the GPU has"
    )
    peaks = [
        (str(rank), of_bytes(sum(kinds.values())), moments[rank], str(flight))
        for rank, (kinds, flight) in enumerate(zip(every, told["microbatches_in_flight"], strict=True))
    ]
    listed = table(("rank", "needs", "most in", "activations in flight"), peaks, numbers=(0, 1, 3))
    parts = timed.get("seconds", {})
    shares = [Bar(kind, [(kind, part)], percent(part / timed["seconds_per_step"])) for kind, part in parts.items()]
    time = bars("Where a step's time goes", shares, write=of_seconds) if shares else ""
    text = (
        "Time is that of the pipeline rank that works most; what runs beside other work is not in it." if time else ""
    )
    return Section("Memory and time" if time else "Memory", [memory, time, listed], text)


def _pipeline(pipeline: Pipeline, message: int, costs: Costs | None) -> Section:
    if pipeline.ranks == 1:
        return Section("Pipeline schedule", [])
    picture, text = schedule_picture(pipeline, costs)
    text += f" A message, the output of a stage or its gradient, has {of_bytes(message)}."
    text += (
        " Times are those predicted, in seconds."
        if costs is not None
        else " Forward, input's and weights' gradient take 1 each."
    )
    return Section("Pipeline schedule", [wide(picture)], text, wide=True)


def _faster(timed: Mapping[str, Any]) -> Section:
    rows = [
        (
            " ".join(f"--set {setting}" for setting in change["settings"]),
            percent(change["gain"]),
            of_bytes(change["memory_bytes"]),
        )
        for change in timed["faster"]
    ]
    return Section("What to change first", [table(("change", "gains", "then needs"), rows, numbers=(1, 2))], wide=True)


def _search(found: Sequence[Found], timed: Mapping[str, Any]) -> Section:
    """The layouts that fit, memory against throughput, in the colours of their splits."""
    limit = timed.get("memory_limit_bytes")
    drawn = [
        Dot(
            one.memory / 2**30,
            one.rate,
            _split(one.settings),
            f"{one.settings}: {of_seconds(one.seconds)} a step",
            place == 0,
        )
        for place, one in enumerate(found)
    ]
    figure = dots(
        "Layouts that fit: the large one is the fastest", drawn, x_name="memory of the fullest rank",
        y_name="tokens a second and GPU", write_x=gib, limit=limit and limit / 2**30,
    )  # fmt: skip
    best = found[0].seconds
    rows = [
        (
            f"{one.seconds:.3f} s",
            f"+{percent(one.seconds / best - 1)}",
            short(one.rate),
            of_bytes(one.memory),
            one.settings,
            one.reason,
        )
        for one in found[:12]
    ]
    head = ("a step", "slower", "tokens/s/GPU", "memory", "layout", "why")
    return Section(
        "Search", [figure, table(head, rows, numbers=(0, 1, 2, 3))], "Predicted; the plan below is of the fastest."
    )


def _split(settings: str) -> str:
    """Of a layout in words its tensor and pipeline ranks, which a colour stands for."""
    words = settings.split()
    kept = [f"{name} {words[words.index(name) + 1]}" for name in ("tp", "pp") if name in words]
    return ", ".join(kept) or "one rank a copy"
