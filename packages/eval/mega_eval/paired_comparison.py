"""Paired comparison of the task results of two models, sample by sample, with a significance test.

Scores of 0 and 1 are compared by McNemar's exact test: a binomial test on the samples that only one of the models answers
correctly. Others are compared by Student's paired t-test.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from mega_common.bounded_parsing import explain_read_error, parse_json_text, read_file_start
from mega_common.errors import DataError
from mega_common.progress_logging import logger

SampleKey = tuple[str, str, str]  # task, metric, filter


@dataclass(frozen=True)
class PairedComparison:
    """Comparison of two models on one metric of one task, with the p-value of the difference.
    It is over the samples that both result files contain.

    Attributes:
        task, metric, filter: names in the harness.
        scores: scores of the first and the second model, by sample number.
        p: p-value of the difference; 1 if no sample differs.
        test: `mcnemar` or `t-test`.
    """

    task: str
    metric: str
    filter: str
    scores: dict[int, tuple[float, float]]
    p: float
    test: str

    @property
    def mean_scores(self) -> tuple[float, float]:
        """Mean scores (first model, second model) over the shared samples."""
        first, second = zip(*self.scores.values(), strict=True)
        return statistics.fmean(first), statistics.fmean(second)

    @property
    def differing_counts(self) -> tuple[int, int]:
        """Numbers of samples on which the second model has (a lower, a higher) score than the first."""
        return sum(b < a for a, b in self.scores.values()), sum(b > a for a, b in self.scores.values())

    def as_json(self) -> dict[str, Any]:
        """Return the comparison of the two models as JSON fields."""
        (first, second), (lower, higher) = self.mean_scores, self.differing_counts
        return {
            "task": self.task, "metric": self.metric, "filter": self.filter, "samples": len(self.scores), "first": first,
            "second": second, "lower": lower, "higher": higher, "test": self.test, "p": self.p,
        }  # fmt: skip


def compare_task_results(first: Path, second: Path) -> list[PairedComparison]:
    """Return the comparison of two result files of `mega eval --tasks` for every task and metric that both contain.
    The comparison is over the samples that both files contain.

    Raises:
        DataError: when a file has no samples, the files have no task or sample in common, or documents differ.
    """
    one, other = _read_samples(first), _read_samples(second)
    for name, samples, others in ((first, one, other), (second, other, one)):
        if left := sorted({task for task, *_ in samples.keys() - others.keys()} - {task for task, *_ in others}):
            logger.warning("only %s has the tasks %s", name, ", ".join(left))
    found = [_compare_metric(key, one[key], other[key], second) for key in one if key in other]
    if not found:
        raise DataError(f"{first} and {second} have no task in common")
    return found


def _compare_metric(
    key: SampleKey, one: Mapping[int, _Sample], other: Mapping[int, _Sample], path: Path
) -> PairedComparison:
    """Return the comparison of one metric on the common samples, which must be of the same documents."""
    common = [number for number in one if number in other]
    for number in common:
        if one[number].document != other[number].document:
            raise DataError(f"{path}: sample {number} of {key[0]} differs from that of the first file")
    if not common:
        raise DataError(f"{path}: the files have no sample of {key[0]} in common")
    if len(common) < max(len(one), len(other)):
        logger.warning("%s: %d samples in common, of %d and %d", key[0], len(common), len(one), len(other))
    scores = {number: (one[number].score, other[number].score) for number in common}
    p, test = run_paired_test(list(scores.values()))
    return PairedComparison(*key, scores, p, test)


def run_paired_test(scores: list[tuple[float, float]]) -> tuple[float, str]:
    """Return the p-value of the difference between paired scores and the name of the statistical test.
    It is `mcnemar` if all scores are 0 or 1, else `t-test`.
    """
    lower, higher = (sum(sign * (b - a) > 0 for a, b in scores) for sign in (-1, 1))
    binary = {score for pair in scores for score in pair} <= {0.0, 1.0}
    test = "mcnemar" if binary else "t-test"
    if lower + higher == 0:
        return 1.0, test
    if binary:
        return float(stats.binomtest(lower, lower + higher).pvalue), test
    differences = [b - a for a, b in scores]
    if len(set(differences)) == 1:  # zero variance
        return (1.0 if len(differences) == 1 else 0.0), test
    return float(stats.ttest_1samp(differences, 0.0).pvalue), test


@dataclass(frozen=True)
class _Sample:
    """Score of a sample, and the hash of its document."""

    score: float
    document: str


def _read_samples(path: Path) -> dict[SampleKey, dict[int, _Sample]]:
    """Return samples by (task, metric, filter) and by number."""
    try:
        raw = parse_json_text(read_file_start(path))
        tasks = raw.get("samples") if isinstance(raw, dict) else None
    except (OSError, ValueError) as error:
        hint = "pass two result files of mega eval --tasks with --log-samples --output"
        raise DataError(f"{path}: cannot be read ({explain_read_error(error)})", hint=hint) from None
    if not tasks:
        of_data = isinstance(raw, dict) and "perplexity" in raw
        raise DataError(
            f"{path}: is a result of mega eval --data, without samples" if of_data else f"{path}: samples are missing",
            hint="compare results of mega eval MODEL --tasks NAME --log-samples --output FILE",
        )
    found: dict[SampleKey, dict[int, _Sample]] = {}
    for task, samples in tasks.items():
        for sample in samples:
            for metric, score in _iterate_scores(sample):
                key = (task, metric, str(sample.get("filter", "none")))
                found.setdefault(key, {})[sample["doc_id"]] = _Sample(score, str(sample.get("doc_hash")))
    return found


def _iterate_scores(sample: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the metrics of a sample that are a number, or a number with a weight."""
    for metric in sample.get("metrics", ()):
        value = sample.get(metric)
        if isinstance(value, list) and len(value) == 2:
            value = value[0]
        if isinstance(value, int | float):
            yield metric, float(value)
