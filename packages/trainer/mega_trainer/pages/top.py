"""`mega top`: a run at this moment, as lines for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mega_common.log import human
from mega_trainer.job.goodput import REASONS
from mega_trainer.pages.run_log import LAUNCHER, RunLog
from mega_trainer.pages.run_page import PHASES
from mega_trainer.pages.scale import of_bytes, of_seconds, percent

TAIL = 1 << 20  # bytes of metrics.jsonl that are read each time: a thousand steps, about
POINTS = 48  # of a sparkline
SILENT = 5.0  # as many steps' time without a line, and a run is not called running
MOST, ERRORS = 8, 3  # ranks and errors that are shown
LEVELS = "▁▂▃▄▅▆▇█"


def view(run: RunLog, now: float) -> RenderableType:
    """The run as it is `now`, in seconds of the Unix clock."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    for name, told in _facts(run, now):
        facts.add_row(name, told)
    parts: list[RenderableType] = [Text(f"{run.folder}  {_state(run, now)}", style="bold")]
    if run.steps:
        done = Table.grid(padding=(0, 2))
        done.add_row(
            ProgressBar(total=run.steps, completed=run.last["step"], width=60), percent(run.last["step"] / run.steps)
        )
        parts.append(done)
    return Group(*parts, facts, *_phases(run), *_ranks(run, now), *_errors(run, now))


def sparkline(values: Sequence[float], points: int = POINTS) -> str:
    """The means of so many pieces of these values, as heights of a character.

    >>> sparkline([1, 2, 3, 4])
    '▁▃▆█'
    """
    finite = [value for value in values if math.isfinite(value)]
    count = min(points, len(finite))
    edges = [len(finite) * place // count for place in range(count + 1)] if count else []
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    top = len(LEVELS) - 1
    return "".join(LEVELS[round(top * (mean - low) / (high - low)) if high > low else top // 2] for mean in means)


def _state(run: RunLog, now: float) -> str:
    last = run.last
    if run.finished:
        return "finished"
    if "time" not in last:
        return ""
    quiet = now - last["time"]
    return "running" if quiet < max(30.0, SILENT * last["seconds"]) else f"no step since {of_seconds(quiet)}"


def _facts(run: RunLog, now: float) -> Iterator[tuple[str, str]]:
    last = run.last
    yield "step", f"{last['step']:,}" + (f" of {run.steps:,}" if run.steps else "") + _left(run)
    for key, name in (("loss", "loss"), ("valid_loss", "validation loss"), ("grad_norm", "gradient norm")):
        points = run.points(key)
        if points:
            yield name, f"{points[-1][1]:.4f}  {sparkline([value for _, value in points])}"
    yield "learning rate", f"{last['lr']:.3g}"
    rates = [value for _, value in run.points("tokens_per_second")]
    yield "tokens a second", f"{human(last['tokens_per_second'])}  {sparkline(rates)}  MFU {percent(last['mfu'])}"
    yield "a step", of_seconds(last["seconds"])
    yield "memory", of_bytes(last["memory_bytes"])
    if "goodput" in last:
        lost = [f"{reason} {of_seconds(last[f'lost/{reason}'])}" for reason in REASONS if last.get(f"lost/{reason}")]
        yield "goodput", percent(last["goodput"]) + (f", lost: {', '.join(lost)}" if lost else "")
    saved = run.checkpoints()
    if saved:
        yield "checkpoint", f"step {saved[-1].step:,}, {of_seconds(max(now - saved[-1].written, 0))} ago"
    if run.starts:
        layout = ", ".join(f"{key} {value}" for key, value in run.starts[-1].get("layout", {}).items())
        yield "starts", f"{len(run.starts)}, the last with {layout} on {run.starts[-1].get('host', '?')}"


def _left(run: RunLog) -> str:
    left = run.last.get("seconds_left")
    return f", {of_seconds(left)} left" if left else ""


def _phases(run: RunLog) -> Iterator[RenderableType]:
    """Of the last step, as bars."""
    shares = {name: run.last.get(f"phases/{name}", 0.0) / run.last["seconds"] for name in PHASES}
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", width=15)
    for name, share in shares.items():
        if share >= 0.001:
            table.add_row(name.replace("_", " "), Bar(1.0, 0.0, min(share, 1.0), width=40), percent(share))
    if table.row_count:
        yield Text("phases of the last step, on rank 0", style="bold")
        yield table


def _ranks(run: RunLog, now: float) -> Iterator[RenderableType]:
    """Those furthest behind of a run that goes on: what they are at, and how old that is."""
    if run.finished:
        return
    signs = sorted(run.ranks(), key=lambda sign: (sign["step"], sign["heard"] - sign["still"]))
    table = Table.grid(padding=(0, 2))
    for sign in signs[:MOST]:
        at = f"waiting: {sign['waits']}" if sign["waits"] else sign["phase"] or "between phases"
        still = f"for {of_seconds(sign['still'])}" if sign["still"] >= 1 else ""
        heard = f"heard of {of_seconds(max(now - sign['heard'], 0))} ago"
        table.add_row(f"rank {sign['rank']}", sign["host"], f"step {sign['step']:,}", at, still, heard)
    if signs:
        more = f", those furthest behind of {len(signs)}" if len(signs) > MOST else ""
        yield Text(f"ranks{more}", style="bold")
        yield table


def _errors(run: RunLog, now: float) -> Iterator[RenderableType]:
    """The last ones."""
    for when, rank, what in run.errors()[-ERRORS:]:
        who = rank if rank == LAUNCHER else f"rank {rank}"
        yield Text(f"{of_seconds(max(now - when, 0))} ago, {who}: {what}", style="yellow")
