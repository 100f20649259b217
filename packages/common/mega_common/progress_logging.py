"""Logging by rank, and progress bars for terminals and files.

Both write to standard error; standard output has only results, so that `--json` output can be piped.
"""

from __future__ import annotations

import logging
import math
import socket
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

logger = logging.getLogger("mega")


def configure_logging(*, rank: int = 0, world_size: int = 1, verbose: bool = False) -> None:
    """Send the `mega` logger to standard error: rank 0 logs everything, other ranks only warnings and errors.

    With more than one rank each line of another rank names it and its host.
    """
    logger.setLevel((logging.DEBUG if verbose else logging.INFO) if rank == 0 else logging.WARNING)
    logger.propagate = False
    if sys.stderr.isatty() and world_size == 1:
        handler: logging.Handler = RichHandler(console=Console(stderr=True), show_path=False, show_level=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        prefix = f"[rank {rank} on {socket.gethostname()}] " if world_size > 1 and rank else ""
        handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    logger.handlers[:] = [handler]


class ProgressBar:
    """Progress display of one long operation: a live bar on a terminal, a plain line every few seconds elsewhere.

    >>> with ProgressBar("tokenizing", total=size, unit="bytes") as bar:   # doctest: +SKIP
    ...     bar.advance(4096)
    """

    def __init__(self, title: str, *, total: float | None = None, unit: str = "", every: float = 5.0) -> None:
        self.title, self.total, self.unit, self.every = title, total, unit, every
        self.done = 0.0
        self._start = self._printed = time.monotonic()
        self._live: Progress | None = None
        if sys.stderr.isatty():
            counts: list[ProgressColumn] = (
                [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
            )
            columns = [TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn()]
            self._live = Progress(*columns, console=Console(stderr=True), transient=False)
            self._task = self._live.add_task(title, total=total)

    def advance(self, amount: float) -> None:
        """Add `amount` finished units of work to the progress display."""
        self.done += amount
        if self._live is not None:
            self._live.update(self._task, completed=self.done)
        elif time.monotonic() - self._printed >= self.every:
            self._printed = time.monotonic()
            print(self._format_line(), file=sys.stderr, flush=True)

    def _format_line(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        text = f"{self.title}: {format_with_decimal_unit(self.done)} {self.unit}".rstrip()
        if self.total:
            left = seconds * (self.total / self.done - 1) if self.done else float("nan")
            text += (
                f" of {format_with_decimal_unit(self.total)} ({100 * self.done / self.total:.0f} %, {left:.0f} s left)"
            )
        return f"{text}, {format_with_decimal_unit(self.done / seconds)} {self.unit}/s".replace(" /s", "/s")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()


def format_with_decimal_unit(number: float) -> str:
    """Return a number as text with a decimal unit: 1234567 -> '1.23M'. Small whole numbers stay unchanged."""
    for exponent, suffix in zip(range(24, 0, -3), "YZEPTGMk", strict=True):
        factor = 10.0**exponent
        if abs(number) >= 0.9995 * factor and math.isfinite(number):  # rounds up to the factor with three digits
            return f"{number / factor:.3g}{suffix}"
    return f"{number:.0f}" if float(number).is_integer() else f"{number:.3g}"


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
