"""Blends that change during a run: by curriculum, when a data set reaches its maximum epochs, and at a resume.

If a resumed run has another blend (data sets, weights, temperature, epochs, curriculum), the new blend begins at the
first sample after the resume, and each data set continues with its next sample: no sample is repeated or skipped.
`data.begun` records the start, so that the run's samples remain a function of its settings. A data set is identified by
its path or, if it was moved, by its file name.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from pydantic import ValidationError

from mega_common.errors import DataError
from mega_common.progress_logging import logger
from mega_data.data_config import BlendRestartPoint, DataConfig, lookup_curriculum_weight
from mega_data.sampling.dataset_parts import DatasetPart, find_matching_prefixes
from mega_data.sampling.weighted_blend import StableBlend


@dataclass(frozen=True)
class BlendStage:
    """Stage of a run's blend with fixed data sets and weights.

    Attributes:
        first: number of its first sample.
        chosen: indices of its data sets.
        read: number of samples of each data set of the run before this stage.
    """

    first: int
    blend: StableBlend
    chosen: Sequence[int]
    read: Sequence[int]

    def count_samples(self, k: int) -> list[int]:
        """Return, for each data set of the run, the number of its samples among the blend's samples 0 to `k` - 1.
        `k` is in this stage.
        """
        counts = list(self.read)
        for source, count in zip(self.chosen, self.blend.count_samples(k - self.first), strict=True):
            counts[source] += count
        return counts


class StagedBlend:
    """Blend of data sets whose weights change between stages, and whose samples may be limited in number.
    The blend is a pure function of its arguments and sample number.

    Each data set continues with its next sample from stage to stage.

    Args:
        weights: first sample of each stage with the weight of each data set, which may be 0. The first stage begins
            with the blend.
        limits: maximum number of samples of each data set, None for no limit. When one is reached, the others continue
            with their weights.
        read: number of samples of each data set before the blend began.
    """

    def __init__(
        self, weights: Sequence[tuple[int, Sequence[float]]], limits: Sequence[int | None], read: Sequence[int]
    ) -> None:
        self.content_key = f"staged {weights} limits={limits} read={read}"
        self._weights, self._limits, self._read = weights, limits, read
        self._coming, self._lock = self._plan_stages(list(read)), Lock()
        self._stages: list[BlendStage] = []
        self._end: float = weights[0][0]  # end of the last stage in `_stages`

    def locate_sample(self, k: int) -> tuple[int, int]:
        """Return (index of the data set that blend sample `k` comes from, number of the sample within that data set).

        Raises:
            DataError: if all data sets have reached their limits.
        """
        stage = self._get_stage(k)
        source, number = stage.blend.locate_sample(k - stage.first)
        return stage.chosen[source], stage.read[stage.chosen[source]] + number

    def count_samples(self, k: int) -> list[int]:
        """Return, for each data set, the number of its samples among the blend's samples 0 to `k` - 1.
        `k` may be the end of the blend.
        """
        if k <= self._weights[0][0]:
            return list(self._read)
        return self._get_stage(k - 1).count_samples(k)

    def _get_stage(self, k: int) -> BlendStage:
        with self._lock:  # called by the loader thread and by the one that reports
            while self._end <= k:
                try:
                    stage, self._end = next(self._coming)
                except StopIteration:
                    raise DataError(
                        f"sample {k}: every data set has reached its max_epochs",
                        hint="raise max_epochs, add data, or train fewer steps",
                    ) from None
                self._stages.append(stage)
        return self._stages[bisect_right(self._stages, k, key=lambda stage: stage.first) - 1]

    def _plan_stages(self, read: list[int]) -> Iterator[tuple[BlendStage, float]]:
        """Yield the stages in order, each with its end."""
        ends = [first for first, _ in self._weights[1:]]
        for (first, weights), end in zip(self._weights, [*ends, math.inf], strict=True):
            at: float = first
            while at < end:
                chosen = [i for i, weight in enumerate(weights) if weight > 0 and self._count_remaining(i, read) > 0]
                if not chosen:
                    return
                stage = BlendStage(int(at), StableBlend([weights[i] for i in chosen]), chosen, list(read))
                at = min(
                    end, at + self._compute_stage_length(stage.blend, [self._count_remaining(i, read) for i in chosen])
                )
                yield stage, at
                if at < math.inf:
                    read = stage.count_samples(int(at))

    def _count_remaining(self, source: int, read: Sequence[int]) -> float:
        limit = self._limits[source]
        return math.inf if limit is None else limit - read[source]

    def _compute_stage_length(self, blend: StableBlend, left: Sequence[float]) -> float:
        """Return the number of samples of a blend until its first data set is exhausted."""
        if min(left) == math.inf:
            return math.inf
        high = 1
        while all(count < limit for count, limit in zip(blend.count_samples(high), left, strict=True)):
            high *= 2

        def reached(k: int) -> bool:
            return any(count >= limit for count, limit in zip(blend.count_samples(k), left, strict=True))

        return bisect_left(range(high + 1), True, key=reached)


def build_training_blend(
    parts: Sequence[DatasetPart], config: DataConfig, limits: Sequence[int | None]
) -> StableBlend | StagedBlend:
    """Return the blend of the training split for sample orders other than `megatron`.
    `limits` are maximum numbers of samples per data set, None for no limit.
    """
    begun = config.begun or BlendRestartPoint(samples=0, read={})
    weights = compute_blend_stage_weights([part.weights_by_tokens for part in parts], config.seq_length, begun.samples)
    read = [begun.read.get(name, 0) for name in number_repeated_paths(part.name for part in parts)]
    if config.begun is None and len(weights) == 1 and all(weights[0][1]) and not any(limits):
        return StableBlend(weights[0][1])
    return StagedBlend(weights, limits, read)


def build_evaluation_blend(parts: Sequence[DatasetPart]) -> StableBlend | StagedBlend:
    """Return the blend of a validation or test split, with the data sets' initial weights over the whole run."""
    weights = [part.weights_by_tokens[0] for part in parts]
    return StableBlend(weights) if all(weights) else StagedBlend([(0, weights)], [None] * len(parts), [0] * len(parts))


def number_repeated_paths(paths: Iterable[Path | str]) -> list[str]:
    """Return the paths as text, with `#2`, `#3` and so on appended to repetitions, so that each is unique."""
    counts: Counter[str] = Counter()
    names = []
    for path in map(str, paths):
        counts[path] += 1
        names.append(path if counts[path] == 1 else f"{path}#{counts[path]}")
    return names


def compute_blend_stage_weights(
    curricula: Sequence[Mapping[int, float]], seq_length: int, first: int
) -> list[tuple[int, list[float]]]:
    """Return (first sample, weight of each data set) of each stage of a blend.

    The `curricula` map training tokens to weights; the first stage begins at sample `first`. A change at n tokens takes
    effect at the first sample with at least n tokens before it.
    """
    steps = sorted({-(-tokens // seq_length) for each in curricula for tokens in each})
    begins = [first, *(step for step in steps if step > first)]
    return [(begin, [lookup_curriculum_weight(each, begin * seq_length) for each in curricula]) for begin in begins]


def resume_data_config(
    config: DataConfig, saved: Mapping[str, Any], consumed: int, read: Mapping[str, int] | None
) -> DataConfig:
    """Return the data configuration of a run resumed after `consumed` samples, where a changed blend starts again.
    It has the saved sample order unless one is set.

    Args:
        config: configuration of the resumed run.
        saved: the `data` section of the checkpoint.
        consumed: number of samples consumed at the checkpoint.
        read: number of samples of each data set at the checkpoint, by path; None for a checkpoint of a version that
            did not record them.

    Raises:
        DataError: if no data set matches a glob.
    """
    order = config.order or saved.get("order") or "stable"  # the only order of the versions that did not save it
    config = config.model_copy(update={"order": order, "begun": None, "streamed": {}})
    try:
        previous = DataConfig.model_validate(saved)
    except ValidationError:  # saved by another version
        return config
    if order == "megatron" or previous.sample_order == "megatron":
        return config
    names = _list_dataset_names(config)
    before = dict(read) if read is not None else _count_weighted_samples(previous, consumed)
    if _blend_key(previous) == _blend_key(config) and [*map(_get_file_name, before)] == [*map(_get_file_name, names)]:
        start = previous.begun
        begun = start and BlendRestartPoint(samples=start.samples, read=_match_read_counts(start.read, names))
    else:
        begun = BlendRestartPoint(samples=consumed, read=_match_read_counts(before, names))
        logger.info(
            "the blend changes at sample %d: %s",
            consumed,
            _format_changes(begun.read, before.keys() - begun.read.keys()),
        )
    return config.model_copy(update={"begun": begun})


def _blend_key(config: DataConfig) -> object:
    sources = [(source.path.name, source.weights_by_tokens, source.max_epochs) for source in config.train]
    return config.temperature, sources


def _list_dataset_names(config: DataConfig) -> list[str]:
    return number_repeated_paths(path for source in config.train for path in find_matching_prefixes(source))


def _count_weighted_samples(config: DataConfig, consumed: int) -> dict[str, int]:
    """Return the number of consumed samples of each data set of a run whose blend had only weights."""
    counts = StableBlend([source.weight or 1.0 for source in config.train]).count_samples(consumed)
    return dict(zip(number_repeated_paths(source.path for source in config.train), counts, strict=True))


def _match_read_counts(read: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """Return the sample counts `read` for the data sets `names`, by path or, if unique, by file name."""
    names = list(names)
    unique = [
        {name for name, count in Counter(map(_get_file_name, paths)).items() if count == 1} for paths in (read, names)
    ]
    moved = {
        _get_file_name(path): count for path, count in read.items() if _get_file_name(path) in unique[0] & unique[1]
    }
    counts = {name: read.get(name, moved.get(_get_file_name(name))) for name in names}
    return {name: count for name, count in counts.items() if count is not None}


def _get_file_name(name: str) -> str:
    return Path(name).name


def _format_changes(read: Mapping[str, int], gone: Iterable[str]) -> str:
    shown = [f"{name} continues after {count} of its samples" for name, count in read.items()]
    shown += [f"{name} is removed" for name in gone]
    rest = f", and {len(shown) - 8} others" if len(shown) > 8 else ""
    return ", ".join(shown[:8]) + rest + "; new data sets begin with their first sample"
