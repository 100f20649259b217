"""Do two models differ on the same samples? Their results of tasks, sample by sample, with a paired test.

Scores of 0 and 1 are compared by McNemar's exact test: of the samples that one model alone has right, how unlikely is it
that so many are the same one's, by a fair coin. Others are compared by Student's paired t-test.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from mega_common.errors import DataError
from mega_common.log import logger
from mega_common.parsing import explain_read_error, parse_json, read_start

Key = tuple[str, str, str]  # task, metric, filter


@dataclass(frozen=True)
class Comparison:
    """One metric of one task on the samples that both have.

    Attributes:
        task, metric, filter: as the harness calls them.
        scores: of each sample by its number, the first model's and the second's.
        p: probability of a difference at least as large, were there none; 1 where no sample differs.
        test: `mcnemar` or `t-test`.
    """

    task: str
    metric: str
    filter: str
    scores: dict[int, tuple[float, float]]
    p: float
    test: str

    @property
    def means(self) -> tuple[float, float]:
        """The first model's and the second's."""
        first, second = zip(*self.scores.values(), strict=True)
        return statistics.fmean(first), statistics.fmean(second)

    @property
    def differing(self) -> tuple[int, int]:
        """Samples with a lower and with a higher score in the second."""
        return sum(b < a for a, b in self.scores.values()), sum(b > a for a, b in self.scores.values())

    def as_json(self) -> dict[str, Any]:
        """For a script."""
        (first, second), (lower, higher) = self.means, self.differing
        return {
            "task": self.task, "metric": self.metric, "filter": self.filter, "samples": len(self.scores), "first": first,
            "second": second, "lower": lower, "higher": higher, "test": self.test, "p": self.p,
        }  # fmt: skip


def compare_results(first: Path, second: Path) -> list[Comparison]:
    """Compare what two runs of `mega eval --tasks` wrote, on the tasks, metrics and samples that both have.

    Raises:
        DataError: when a file has no samples, there is nothing in common, or samples of one number are not the same.
    """
    one, other = _read(first), _read(second)
    for name, mine, theirs in ((first, one, other), (second, other, one)):
        if left := sorted({task for task, *_ in mine.keys() - theirs.keys()} - {task for task, *_ in theirs}):
            logger.warning("%s alone has %s", name, ", ".join(left))
    found = [_compared(key, one[key], other[key], second) for key in one if key in other]
    if not found:
        raise DataError(f"{first} and {second} have no task in common")
    return found


def _compared(key: Key, one: Mapping[int, _Sample], other: Mapping[int, _Sample], path: Path) -> Comparison:
    common = [number for number in one if number in other]
    for number in common:
        if one[number].document != other[number].document:
            raise DataError(f"{path}: sample {number} of {key[0]} is another one than in the first file")
    if not common:
        raise DataError(f"{path}: no sample of {key[0]} is in the first file, too")
    if len(common) < max(len(one), len(other)):
        logger.warning("%s: %d samples are in both, of %d and %d", key[0], len(common), len(one), len(other))
    scores = {number: (one[number].score, other[number].score) for number in common}
    p, test = p_value(list(scores.values()))
    return Comparison(*key, scores, p, test)


def p_value(scores: list[tuple[float, float]]) -> tuple[float, str]:
    """Probability under no difference of one at least as large as between paired scores, and by which test."""
    lower, higher = (sum(sign * (b - a) > 0 for a, b in scores) for sign in (-1, 1))
    binary = {score for pair in scores for score in pair} <= {0.0, 1.0}
    test = "mcnemar" if binary else "t-test"
    if lower + higher == 0:
        return 1.0, test
    if binary:
        return float(stats.binomtest(lower, lower + higher).pvalue), test
    differences = [b - a for a, b in scores]
    if len(set(differences)) == 1:  # no spread to judge by
        return (1.0 if len(differences) == 1 else 0.0), test
    return float(stats.ttest_1samp(differences, 0.0).pvalue), test


@dataclass(frozen=True)
class _Sample:
    """A sample's score, and what tells it from other samples."""

    score: float
    document: str


def _read(path: Path) -> dict[Key, dict[int, _Sample]]:
    """Scores by task, metric and filter, and by number of the sample."""
    try:
        raw = parse_json(read_start(path))
        tasks = raw.get("samples") if isinstance(raw, dict) else None
    except (OSError, ValueError) as error:
        hint = "mega compare takes two result files of mega eval --tasks with --log-samples --output"
        raise DataError(f"{path}: cannot be read ({explain_read_error(error)})", hint=hint) from None
    if not tasks:
        raise DataError(f"{path}: there are no samples in it", hint="mega eval --tasks with --log-samples keeps them")
    found: dict[Key, dict[int, _Sample]] = {}
    for task, samples in tasks.items():
        for sample in samples:
            for metric, score in _scores(sample):
                key = (task, metric, str(sample.get("filter", "none")))
                found.setdefault(key, {})[sample["doc_id"]] = _Sample(score, str(sample.get("doc_hash")))
    return found


def _scores(sample: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The metrics of a sample that are a number, or a number and its weight in the whole."""
    for metric in sample.get("metrics", ()):
        value = sample.get(metric)
        if isinstance(value, list) and len(value) == 2:
            value = value[0]
        if isinstance(value, int | float):
            yield metric, float(value)
