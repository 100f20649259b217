"""Reader of a run's folder, also while the run writes it: settings, metrics, starts, checkpoints and errors."""

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
from statistics import fmean
from typing import Any

from mega_common.bounded_parsing import BoundedYamlLoader, parse_json_text, parse_yaml_text, read_settings_file
from mega_common.errors import ConfigError
from mega_common.object_store import parse_location
from mega_trainer.job.error_log import ERRORS, RANKS

METRICS = "metrics.jsonl"
LAUNCHER = "the launcher"  # source of an error that no rank reported


@dataclass
class MetricColumn:
    """Values of one metrics.jsonl key with their steps, from the lines that have the key; NaN for null."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def list_points(self) -> list[tuple[float, float]]:
        """Return the (step, value) pairs of the metric."""
        return list(zip(self.steps, self.values, strict=True))

    def iterate_deltas(self) -> Iterator[tuple[float, float]]:
        """Yield (step, difference of the metric from its previous logged value).

        The first difference is from 0.
        """
        before = 0.0
        for step, value in zip(self.steps, self.values, strict=True):
            yield step, value - before
            before = value


@dataclass
class RunLog:
    """Log of a run as its folder contains it so far: metrics, settings, starts, errors and checkpoints; read-only.

    Attributes:
        folder: folder of the run.
        columns: columns of metrics.jsonl by key.
        last: last complete line of metrics.jsonl.
        settings: run.yaml as nested mappings; empty if it is missing.
        starts: lines of starts.jsonl.
    """

    folder: Path
    columns: Mapping[str, MetricColumn]
    last: dict[str, Any]
    settings: dict[str, Any]
    starts: Sequence[dict[str, Any]]

    @classmethod
    def read_folder(
        cls, path: Path, *, tail: int | None = None, advance: Callable[[int], object] = lambda size: None
    ) -> RunLog:
        """Read the log of a training run from the run's folder or the folder of a metrics.jsonl.
        `path` is the folder; with `tail` only the last `tail` bytes of the metrics lines are read.

        `advance` is called with the number of bytes that were read.

        Raises:
            ConfigError: when there are no metrics of a step.
        """
        folder = path.parent if path.name == METRICS else path
        columns: defaultdict[str, MetricColumn] = defaultdict(MetricColumn)
        last: dict[str, Any] = {}
        for line in read_jsonl_records(_find_metrics(folder), tail=tail, advance=advance):
            for key, value in line.items():
                if isinstance(value, int | float) or value is None:
                    columns[key].steps.append(line["step"])
                    columns[key].values.append(math.nan if value is None else value)
            last = line
        if not last:
            raise ConfigError(
                f"{folder / METRICS} has no metrics of a step yet",
                hint="wait for the first step of the run, or start the run with mega train",
            )
        starts = list(read_jsonl_records(folder / "starts.jsonl", "time"))
        return cls(folder, columns, last, _read_settings(folder / "run.yaml"), starts)

    @property
    def run_name(self) -> str:
        """Name of the run's folder."""
        return self.folder.resolve().name

    def metric_points(self, key: str) -> list[tuple[float, float]]:
        """Return (step, value) of each line of metrics.jsonl that has the key `key`."""
        return self.columns[key].list_points() if key in self.columns else []

    def mean_of_last_steps(self, key: str, share: float = 0.1) -> float | None:
        """Return the mean of a metric over the last tenth (`share`) of the steps so far; None if it is not logged.
        A metric that is logged more rarely counts by its last value.
        """
        points = self.metric_points(key)
        if not points:
            return None
        first = self.last["step"] * (1 - share)
        return fmean([value for step, value in points if step > first] or [points[-1][1]])

    def list_key_suffixes(self, prefix: str) -> list[str]:
        """Return the remainders, without the prefix, of all metrics keys that begin with `prefix`."""
        return [key.removeprefix(prefix) for key in self.columns if key.startswith(prefix)]

    @property
    def planned_steps(self) -> int | None:
        """Number of training steps in the run's settings; None if the settings are missing."""
        found = self.settings.get("train", {}).get("steps")
        return found if isinstance(found, int) else None

    @property
    def is_finished(self) -> bool:
        """True if the last planned step of the run is done."""
        return self.planned_steps is not None and self.last["step"] >= self.planned_steps

    @cached_property
    def restart_points(self) -> list[tuple[float, float]]:
        """Pairs (step, lost seconds), one for the first metrics line after each restart or rollback."""
        column = self.columns.get("lost/restart")
        return [(step, more) for step, more in column.iterate_deltas() if more > 0] if column else []

    def list_checkpoints(self) -> list[SavedCheckpoint]:
        """Return the run's complete checkpoints in this file system, in order of steps."""
        kept = self.settings.get("checkpoint", {}).get("path")
        root = self.folder / "checkpoints" if kept is None else parse_location(kept)
        found = []
        for manifest in sorted(root.glob("step-*/manifest.json")) if isinstance(root, Path) else ():
            with contextlib.suppress(OSError, ValueError):  # the run may remove it at any time
                step = int(manifest.parent.name.removeprefix("step-"))
                found.append(SavedCheckpoint(step, manifest.stat().st_mtime, manifest.parent))
        return found

    def list_rank_errors(self) -> list[tuple[float, str, str]]:
        """Return (time, ranks, message) of each error that ended ranks of the run, oldest first.
        Consecutive equal errors of several ranks are merged into one.
        """
        errors = sorted(read_jsonl_records(self.folder / ERRORS, "time"), key=lambda line: float(line["time"]))
        groups = [list(lines) for _, lines in itertools.groupby(errors, key=lambda line: str(line["error"]))]
        return [(lines[0]["time"], _format_ranks(lines), lines[0]["error"]) for lines in groups]

    def read_rank_states(self) -> list[dict[str, Any]]:
        """Return the last state of each rank as the hang watchdog wrote it to ranks.json; empty for a run on one rank."""
        try:
            found = parse_json_text((self.folder / RANKS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return list(found)


def _format_ranks(lines: Sequence[dict[str, Any]], most: int = 8) -> str:
    """Return the ranks of error lines as text."""
    ranks = sorted({line["rank"] for line in lines if line["rank"] is not None})
    return ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "") or LAUNCHER


@dataclass(frozen=True)
class SavedCheckpoint:
    """Complete checkpoint of a run on disk, and the time at which it was written."""

    step: int
    written: float
    folder: Path

    @property
    def size_bytes(self) -> int:
        """Total bytes of the checkpoint's files."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())


def read_jsonl_records(
    path: Path, key: str = "step", *, tail: int | None = None, advance: Callable[[int], object] = lambda size: None
) -> Iterator[dict[str, Any]]:
    """Yield the JSON mappings of a .jsonl file that have a number under `key`; nothing if the file does not exist.
    Truncated lines are left out.
    """
    if not path.exists():
        return
    with open(path, "rb") as stream:
        if tail is not None:
            stream.seek(max(0, path.stat().st_size - tail))
        for text in stream:
            advance(len(text))
            with contextlib.suppress(ValueError):
                line = parse_json_text(text)
                if isinstance(line, dict) and isinstance(line.get(key), int | float):
                    yield line


def _find_metrics(folder: Path) -> Path:
    """Return the path of an existing metrics.jsonl."""
    path = folder / METRICS
    if not path.is_file():
        message = f"{folder} does not exist" if not folder.exists() else f"{folder} has no {METRICS}"
        raise ConfigError(message, hint="pass the folder of a run (`output` in run.yaml), such as runs/llama3-8b")
    return path


def _read_settings(path: Path) -> dict[str, Any]:
    """Return run.yaml as nested mappings; empty if it cannot be read."""
    try:
        found = parse_yaml_text(read_settings_file(path), str(path), BoundedYamlLoader)
    except ConfigError:
        return {}
    return found if isinstance(found, dict) else {}
