"""Terminal view of `mega top`: the current state of a run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mega_common.progress_logging import format_with_decimal_unit
from mega_trainer.job.goodput import REASONS
from mega_trainer.pages.axis_scale import format_bytes, format_duration, format_percent
from mega_trainer.pages.run_log import LAUNCHER, RunLog
from mega_trainer.pages.run_page import PHASES

TAIL = 1 << 20  # bytes of metrics.jsonl that are read each time: about a thousand steps
POINTS = 48  # characters of a sparkline
SILENT = 5.0  # steps' time without a new line after which a run does not count as running
MAX_RANKS, MAX_ERRORS = 8, 3  # ranks and errors that are shown
LEVELS = "▁▂▃▄▅▆▇█"


def render_run_view(run: RunLog, now: float) -> RenderableType:
    """Return the state of a run, for display in the terminal, at time `now` in seconds of the Unix clock."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for name, text in _iterate_facts(run, now):
        facts.add_row(name, text)
    parts: list[RenderableType] = [Text(f"{run.folder}  {_describe_state(run, now)}", style="bold")]
    if run.planned_steps:
        done = Table.grid(padding=(0, 2))
        done.add_row(
            ProgressBar(total=run.planned_steps, completed=run.last["step"], width=60),
            format_percent(run.last["step"] / run.planned_steps),
        )
        parts.append(done)
    return Group(*parts, facts, *_phase_bars(run), *_slowest_ranks(run, now), *_last_errors(run, now))


def draw_sparkline(values: Sequence[float], points: int = POINTS) -> str:
    """Return a sparkline of the values as text: one bar character for the mean of each of `points` equal intervals.

    >>> draw_sparkline([1, 2, 3, 4])
    '▁▃▆█'
    """
    finite = [value for value in values if math.isfinite(value)]
    count = min(points, len(finite))
    edges = [len(finite) * index // count for index in range(count + 1)] if count else []
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    top = len(LEVELS) - 1
    return "".join(LEVELS[round(top * (mean - low) / (high - low)) if high > low else top // 2] for mean in means)


def _describe_state(run: RunLog, now: float) -> str:
    """Return whether the run is running, finished or silent, as text."""
    last = run.last
    if run.is_finished:
        return "finished"
    if "time" not in last:
        return ""
    quiet = now - last["time"]
    return "running" if quiet < max(30.0, SILENT * last["seconds"]) else f"no step since {format_duration(quiet)}"


def _iterate_facts(run: RunLog, now: float) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of the facts about a run."""
    last = run.last
    yield (
        "step",
        f"{last['step']:,}" + (f" of {run.planned_steps:,}" if run.planned_steps else "") + _remaining_time(run),
    )
    for key, name in (("loss", "loss"), ("valid_loss", "validation loss"), ("grad_norm", "gradient norm")):
        points = run.metric_points(key)
        if points:
            yield name, f"{points[-1][1]:.4f}  {draw_sparkline([value for _, value in points])}"
    yield "learning rate", f"{last['lr']:.3g}"
    rates = [value for _, value in run.metric_points("tokens_per_second")]
    yield (
        "tokens/s",
        f"{format_with_decimal_unit(last['tokens_per_second'])}  {draw_sparkline(rates)}  MFU {format_percent(last['mfu'])}",
    )
    yield "step time", format_duration(last["seconds"])
    yield "memory", format_bytes(last["memory_bytes"])
    if "goodput" in last:
        lost = [
            f"{reason} {format_duration(last[f'lost/{reason}'])}" for reason in REASONS if last.get(f"lost/{reason}")
        ]
        yield "goodput", format_percent(last["goodput"]) + (f", lost: {', '.join(lost)}" if lost else "")
    saved = run.list_checkpoints()
    if saved:
        yield "checkpoint", f"step {saved[-1].step:,}, {format_duration(max(now - saved[-1].written, 0))} ago"
    if run.starts:
        layout = ", ".join(f"{key} {value}" for key, value in run.starts[-1].get("layout", {}).items())
        yield "starts", f"{len(run.starts)}; last start: {layout} on {run.starts[-1].get('host', '?')}"


def _remaining_time(run: RunLog) -> str:
    """Return the remaining time of a run as text."""
    left = run.last.get("seconds_left")
    return f", {format_duration(left)} left" if left else ""


def _phase_bars(run: RunLog) -> Iterator[RenderableType]:
    """Yield the phases of the last step as bars."""
    shares = {name: run.last.get(f"phases/{name}", 0.0) / run.last["seconds"] for name in PHASES}
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=15)
    for name, share in shares.items():
        if share >= 0.001:
            table.add_row(name.replace("_", " "), Bar(1.0, 0.0, min(share, 1.0), width=40), format_percent(share))
    if table.row_count:
        yield Text("phases of the last step (rank 0)", style="bold")
        yield table


def _slowest_ranks(run: RunLog, now: float) -> Iterator[RenderableType]:
    """Yield the ranks of a running run that are furthest behind, with their phase and its duration."""
    if run.is_finished:
        return
    states = sorted(run.read_rank_states(), key=lambda state: (state["step"], state["heard"] - state["still"]))
    table = Table.grid(padding=(0, 2))
    for state in states[:MAX_RANKS]:
        phase = f"waiting: {state['waits']}" if state["waits"] else state["phase"] or "between phases"
        duration = f"for {format_duration(state['still'])}" if state["still"] >= 1 else ""
        heartbeat = f"heartbeat {format_duration(max(now - state['heard'], 0))} ago"
        table.add_row(f"rank {state['rank']}", state["host"], f"step {state['step']:,}", phase, duration, heartbeat)
    if states:
        title = f"slowest {MAX_RANKS} of {len(states)} ranks" if len(states) > MAX_RANKS else "ranks"
        yield Text(title, style="bold")
        yield table


def _last_errors(run: RunLog, now: float) -> Iterator[RenderableType]:
    """Yield the last errors of ranks."""
    for time, rank, message in run.list_rank_errors()[-MAX_ERRORS:]:
        source = rank if rank == LAUNCHER else f"rank {rank}"
        yield Text(f"{format_duration(max(now - time, 0))} ago, {source}: {message}", style="yellow")
