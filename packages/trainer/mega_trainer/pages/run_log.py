"""What a run has written into its folder: settings, a line a step, its starts, its checkpoints. Read while it runs, too."""

from __future__ import annotations

import contextlib
import itertools
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mega_common.errors import ConfigError
from mega_common.parsing import BoundedLoader, parse_json, parse_yaml, read_settings
from mega_common.remote import place
from mega_trainer.job.job_log import ERRORS, RANKS

METRICS = "metrics.jsonl"
LAUNCHER = "the launcher"  # where an error is no rank's own


@dataclass
class Column:
    """Values of one key, of those lines that have it; NaN where a line has null."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def points(self) -> list[tuple[float, float]]:
        """(step, value)."""
        return list(zip(self.steps, self.values, strict=True))

    def deltas(self) -> Iterator[tuple[float, float]]:
        """(step, how much more than on the line before)."""
        before = 0.0
        for step, value in zip(self.steps, self.values, strict=True):
            yield step, value - before
            before = value


@dataclass
class RunLog:
    """A run's folder, as far as it is written.

    Attributes:
        folder: of the run.
        columns: by key of metrics.jsonl.
        last: the last whole line.
        settings: run.yaml, nested; empty without one.
        starts: of starts.jsonl.
    """

    folder: Path
    columns: Mapping[str, Column]
    last: dict[str, Any]
    settings: dict[str, Any]
    starts: Sequence[dict[str, Any]]

    @classmethod
    def read(
        cls, path: Path, *, tail: int | None = None, advance: Callable[[int], object] = lambda size: None
    ) -> RunLog:
        """Of the folder `path`, or the folder of that metrics.jsonl; with `tail` only the last so many bytes of lines.

        `advance` is told of the bytes that were read.

        Raises:
            ConfigError: where there is no line of a step.
        """
        folder = path.parent if path.name == METRICS else path
        columns: defaultdict[str, Column] = defaultdict(Column)
        last: dict[str, Any] = {}
        for line in whole_lines(_existing(folder), tail=tail, advance=advance):
            for key, value in line.items():
                if isinstance(value, int | float) or value is None:
                    columns[key].steps.append(line["step"])
                    columns[key].values.append(math.nan if value is None else value)
            last = line
        if not last:
            raise ConfigError(
                f"{folder / METRICS}: has no line of a step yet", hint="a run writes one after its first step"
            )
        starts = list(whole_lines(folder / "starts.jsonl", "time"))
        return cls(folder, columns, last, _settings(folder / "run.yaml"), starts)

    @property
    def name(self) -> str:
        """What to call it."""
        return self.folder.resolve().name

    def points(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of each line that has the key."""
        return self.columns[key].points() if key in self.columns else []

    def under(self, prefix: str) -> list[str]:
        """What follows `prefix` in the keys that begin with it."""
        return [key.removeprefix(prefix) for key in self.columns if key.startswith(prefix)]

    @property
    def steps(self) -> int | None:
        """How many it is to make, where its settings tell."""
        found = self.settings.get("train", {}).get("steps")
        return found if isinstance(found, int) else None

    @property
    def finished(self) -> bool:
        """Whether its last step is made."""
        return self.steps is not None and self.last["step"] >= self.steps

    @cached_property
    def restarts(self) -> list[tuple[float, float]]:
        """(step, seconds) of each first line after a restart or a rollback, and what that took."""
        column = self.columns.get("lost/restart")
        return [(step, more) for step, more in column.deltas() if more > 0] if column else []

    def checkpoints(self) -> list[Saved]:
        """Those that are complete, where they lie in this file system; by step."""
        kept = self.settings.get("checkpoint", {}).get("path")
        root = self.folder / "checkpoints" if kept is None else place(kept)
        found = []
        for manifest in sorted(root.glob("step-*/manifest.json")) if isinstance(root, Path) else ():
            with contextlib.suppress(OSError, ValueError):  # it may go while it is looked at
                step = int(manifest.parent.name.removeprefix("step-"))
                found.append(Saved(step, manifest.stat().st_mtime, manifest.parent))
        return found

    def errors(self) -> list[tuple[float, str, str]]:
        """(when, ranks, what) of each error that ended ranks, the first one first; what several told alike is one."""
        told = sorted(whole_lines(self.folder / ERRORS, "time"), key=lambda line: float(line["time"]))
        alike = [list(lines) for _, lines in itertools.groupby(told, key=lambda line: str(line["error"]))]
        return [(lines[0]["time"], _ranks(lines), lines[0]["error"]) for lines in alike]

    def ranks(self) -> list[dict[str, Any]]:
        """How each rank was when it was last heard of, as `watch` tells it; none of a run on one rank."""
        try:
            found = parse_json((self.folder / RANKS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return list(found)


def _ranks(lines: Sequence[dict[str, Any]], most: int = 8) -> str:
    told = sorted({line["rank"] for line in lines if line["rank"] is not None})
    return ", ".join(map(str, told[:most])) + (", ..." if len(told) > most else "") or LAUNCHER


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint, and when it was written."""

    step: int
    written: float
    folder: Path

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def whole_lines(
    path: Path, key: str = "step", *, tail: int | None = None, advance: Callable[[int], object] = lambda size: None
) -> Iterator[dict[str, Any]]:
    """Mappings with a number under `key`, a line each; a line that is cut short, as by a kill, is left out."""
    if not path.exists():
        return
    with open(path, "rb") as stream:
        if tail is not None:
            stream.seek(max(0, path.stat().st_size - tail))
        for text in stream:
            advance(len(text))
            with contextlib.suppress(ValueError):
                line = parse_json(text)
                if isinstance(line, dict) and isinstance(line.get(key), int | float):
                    yield line


def _existing(folder: Path) -> Path:
    path = folder / METRICS
    if not path.is_file():
        what = f"{folder}: no such folder" if not folder.exists() else f"{folder}: holds no {METRICS}"
        raise ConfigError(what, hint="give the folder of a run, its `output`, such as runs/llama3-8b")
    return path


def _settings(path: Path) -> dict[str, Any]:
    try:
        found = parse_yaml(read_settings(path), str(path), BoundedLoader)
    except ConfigError:
        return {}
    return found if isinstance(found, dict) else {}
