"""Blends that change during a run: by curriculum, when a data set reaches its maximum epochs, and at a resume, with the
data configuration of a resumed run.

The rule: where the blend was changed (data sets, weights, temperature, epochs, curriculum), the new one begins at the
sample the run has come to, and each data set goes on with its next sample: nothing is read again or left out for the
change. `data.begun` keeps that begin, so that the run's samples are a function of its settings from then on too. A data
set is known by its path, or, where it was moved, by its name.
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
from mega_data.data_config import BlendStart, DataConfig, lookup_curriculum_weight
from mega_data.sampling.dataset_parts import DatasetPart, find_matching_prefixes
from mega_data.sampling.weighted_blend import StableBlend


@dataclass(frozen=True)
class BlendStage:
    """Part of a run with one fixed blend.

    Attributes:
        first: number of its first sample.
        chosen: the data sets that it has.
        read: samples that were read of each data set, of all of them, before it.
    """

    first: int
    blend: StableBlend
    chosen: Sequence[int]
    read: Sequence[int]

    def count_samples(self, k: int) -> list[int]:
        """Return the number of samples before `k`, which is in this stage, from each data set."""
        counts = list(self.read)
        for source, count in zip(self.chosen, self.blend.count_samples(k - self.first), strict=True):
            counts[source] += count
        return counts


class StagedBlend:
    """Blend of several stages as a pure function of its arguments and k. Each data set continues with its next sample
    from stage to stage.

    Args:
        weights: of each data set, from which sample on; some may be 0. The first begins where the blend does.
        limits: samples that may be read of each data set, None for any number. Where one is reached, the others go on
            by their weights.
        read: samples that were read of each before the blend began.
    """

    def __init__(
        self, weights: Sequence[tuple[int, Sequence[float]]], limits: Sequence[int | None], read: Sequence[int]
    ) -> None:
        self.identity = f"staged {weights} limits={limits} read={read}"
        self._weights, self._limits, self._read = weights, limits, read
        self._coming, self._lock = self._plan_stages(list(read)), Lock()
        self._stages: list[BlendStage] = []
        self._end: float = weights[0][0]  # up to which the stages are made

    def locate_sample(self, k: int) -> tuple[int, int]:
        """Return the index of the data set of sample `k`, and the sample's number there.

        Raises:
            DataError: when all data sets have been read as often as they may be.
        """
        stage = self._get_stage(k)
        source, number = stage.blend.locate_sample(k - stage.first)
        return stage.chosen[source], stage.read[stage.chosen[source]] + number

    def count_samples(self, k: int) -> list[int]:
        """Return the number of samples before `k` from each data set; `k` may be the end."""
        if k <= self._weights[0][0]:
            return list(self._read)
        return self._get_stage(k - 1).count_samples(k)

    def _get_stage(self, k: int) -> BlendStage:
        with self._lock:  # asked by the thread that loads and by the one that tells
            while self._end <= k:
                try:
                    stage, self._end = next(self._coming)
                except StopIteration:
                    raise DataError(
                        f"sample {k}: every data set has been read as often as its max_epochs allows",
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
        while all(count < most for count, most in zip(blend.count_samples(high), left, strict=True)):
            high *= 2

        def reached(k: int) -> bool:
            return any(count >= most for count, most in zip(blend.count_samples(k), left, strict=True))

        return bisect_left(range(high + 1), True, key=reached)


def build_training_blend(
    parts: Sequence[DatasetPart], config: DataConfig, limits: Sequence[int | None]
) -> StableBlend | StagedBlend:
    """Return the blend of the training split in any order but Megatron's; `limits` as in `StagedBlend`."""
    begun = config.begun or BlendStart(samples=0, read={})
    weights = compute_stage_weights([part.weights_by_tokens for part in parts], config.seq_length, begun.samples)
    read = [begun.read.get(name, 0) for name in number_repeated_paths(part.name for part in parts)]
    if config.begun is None and len(weights) == 1 and all(weights[0][1]) and not any(limits):
        return StableBlend(weights[0][1])
    return StagedBlend(weights, limits, read)


def build_fixed_blend(parts: Sequence[DatasetPart]) -> StableBlend | StagedBlend:
    """Return the blend of a validation or test split, constant over the run, by the initial weights."""
    weights = [part.weights_by_tokens[0] for part in parts]
    return StableBlend(weights) if all(weights) else StagedBlend([(0, weights)], [None] * len(parts), [0] * len(parts))


def number_repeated_paths(paths: Iterable[Path | str]) -> list[str]:
    """Return the paths of data sets, with a number appended to repeated ones."""
    seen: Counter[str] = Counter()
    names = []
    for path in map(str, paths):
        seen[path] += 1
        names.append(path if seen[path] == 1 else f"{path}#{seen[path]}")
    return names


def compute_stage_weights(
    curricula: Sequence[Mapping[int, float]], seq_length: int, first: int
) -> list[tuple[int, list[float]]]:
    """Return the first sample of each stage and the weights from it on, for weights given by training tokens; the first
    stage begins at `first`.

    A change counts from the first sample that begins with so many tokens or more before it.
    """
    steps = sorted({-(-tokens // seq_length) for each in curricula for tokens in each})
    begins = [first, *(step for step in steps if step > first)]
    return [(begin, [lookup_curriculum_weight(each, begin * seq_length) for each in curricula]) for begin in begins]


def resume_data_config(
    config: DataConfig, saved: Mapping[str, Any], consumed: int, read: Mapping[str, int] | None
) -> DataConfig:
    """Return the data configuration of a run that resumes from a checkpoint.

    Args:
        config: as it is asked for now.
        saved: the `data` section of the run that was saved.
        consumed: samples it had read.
        read: samples it had read of each data set, by path; None: saved by a version that did not tell.

    Raises:
        DataError: when a glob matches nothing.
    """
    order = config.order or saved.get("order") or "stable"  # which was the default before there was another
    config = config.model_copy(update={"order": order, "begun": None})
    try:
        was = DataConfig.model_validate(saved)
    except ValidationError:  # of another version
        return config
    if order == "megatron" or was.sample_order == "megatron":
        return config
    names = _list_dataset_names(config)
    before = dict(read) if read is not None else _count_weighted_samples(was, consumed)
    if _blend_key(was) == _blend_key(config) and [*map(_get_file_name, before)] == [*map(_get_file_name, names)]:
        begun = was.begun and BlendStart(samples=was.begun.samples, read=_match_read_counts(was.begun.read, names))
    else:
        begun = BlendStart(samples=consumed, read=_match_read_counts(before, names))
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


def _count_weighted_samples(was: DataConfig, consumed: int) -> dict[str, int]:
    """Return the samples read of each data set of a run whose blend had only weights."""
    counts = StableBlend([source.weight or 1.0 for source in was.train]).count_samples(consumed)
    return dict(zip(number_repeated_paths(source.path for source in was.train), counts, strict=True))


def _match_read_counts(read: Mapping[str, int], names: Iterable[str]) -> dict[str, int]:
    """Return the samples read of the data sets with these names, at their current paths."""
    names = list(names)
    once = [
        {name for name, count in Counter(map(_get_file_name, each)).items() if count == 1} for each in (read, names)
    ]
    moved = {_get_file_name(name): count for name, count in read.items() if _get_file_name(name) in once[0] & once[1]}
    found = {name: read.get(name, moved.get(_get_file_name(name))) for name in names}
    return {name: count for name, count in found.items() if count is not None}


def _get_file_name(name: str) -> str:
    return Path(name).name


def _format_changes(read: Mapping[str, int], gone: Iterable[str]) -> str:
    shown = [f"{name} goes on after {count} of its samples" for name, count in read.items()]
    shown += [f"{name} is no more" for name in gone]
    rest = f", and {len(shown) - 8} others" if len(shown) > 8 else ""
    return ", ".join(shown[:8]) + rest + "; what is new begins with its first"
