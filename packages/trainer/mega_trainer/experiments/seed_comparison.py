"""Comparison of two variants of a training, each run with several seeds: error bars and a significance test."""

from __future__ import annotations

import glob
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from mega_common.errors import ConfigError
from mega_common.progress_logging import logger
from mega_trainer.config.run_config import flatten_settings
from mega_trainer.experiments.sweep_config import SEED_KEY
from mega_trainer.experiments.sweep_study import standard_error
from mega_trainer.pages.run_log import METRICS, RunLog

SIGNIFICANCE = 0.05
POWER_SUM = 2.8  # normal quantiles of 97.5 % and 80 %: test of 5 % that finds a difference with probability 80 %
RUN_KEYS = (SEED_KEY, "output", "checkpoint.path")  # settings in which the runs of a variant differ


@dataclass(frozen=True)
class VariantRuns:
    """Runs of one variant of a training.

    Attributes:
        name: pattern of the runs' folders.
        logs: logs of the runs.
        values: mean of the metric over the last tenth of the steps of each run.
        seeds: train.seed of each run; None if its settings are missing.
    """

    name: str
    logs: Sequence[RunLog]
    values: Sequence[float]
    seeds: Sequence[int | None]

    @staticmethod
    def read_run_logs(pattern: str) -> list[RunLog]:
        """Read the logs of runs; `pattern` is a folder, a glob pattern, or several of them with commas between.

        Raises:
            ConfigError: if no run is found.
        """
        paths = sorted(path for part in pattern.split(",") for path in glob.glob(f"{part}/{METRICS}"))
        if not paths:
            raise ConfigError(f"{pattern} has no run with {METRICS}", hint="give folders of runs, e.g. 'runs/base-*'")
        return [RunLog.read_folder(Path(path)) for path in paths]

    @classmethod
    def read_runs(cls, pattern: str, metric: str) -> VariantRuns:
        """Read the runs of a variant with the mean of `metric` over the last tenth of their steps.

        For `pattern` see `read_run_logs`.

        Raises:
            ConfigError: if no run is found, or a run has not logged the metric or has a value that is not finite.
        """
        logs = cls.read_run_logs(pattern)
        values = []
        for log in logs:
            value = log.mean_of_last_steps(metric)
            if value is None:
                keys = ", ".join(sorted(log.columns)[:12])
                raise ConfigError(f"{log.folder} has not logged {metric}", hint=f"choose --metric of {keys}, ...")
            if not math.isfinite(value):
                raise ConfigError(
                    f"{log.folder}: {metric} is not finite", hint="leave out this run, or choose --metric"
                )
            if not log.is_finished:
                logger.warning("%s has done %d steps of %s", log.folder, log.last["step"], log.planned_steps or "?")
            values.append(value)
        variant = cls(pattern, logs, values, [log.settings.get("train", {}).get("seed") for log in logs])
        if differing := find_differing_settings([log.settings for log in logs]):
            logger.warning("the runs of %s also differ in %s", pattern, ", ".join(differing))
        return variant

    @property
    def mean(self) -> float:
        """Mean of the metric over the runs."""
        return statistics.fmean(self.values)


def find_differing_settings(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the paths of settings that are not equal in all runs, without seeds and folders."""
    flat = [flatten_settings(each) for each in settings]
    keys = dict.fromkeys(key for each in flat for key in each if key not in RUN_KEYS)
    return [key for key in keys if len({str(each.get(key)) for each in flat}) > 1]


@dataclass(frozen=True)
class SeedComparison:
    """Difference of a metric between two variants of a run over their seeds, with its confidence interval and p-value.

    Attributes:
        difference: mean of the second variant minus that of the first.
        interval: 95 % confidence interval of the difference; NaN without a test.
        p: p-value of the difference; NaN without a test.
        test: `paired t-test` if each seed has a run of both variants, else `Welch's t-test`; "" with a single run.
        needed: runs of each variant that would show a difference of this size with probability 80 %; None without a test.
    """

    first: VariantRuns
    second: VariantRuns
    metric: str
    difference: float
    interval: tuple[float, float]
    p: float
    test: str
    needed: int | None

    @property
    def differing_settings(self) -> list[str]:
        """Paths of the settings that differ between the first runs of both variants."""
        return find_differing_settings([self.first.logs[0].settings, self.second.logs[0].settings])

    def conclusion(self) -> str:
        """Return the conclusion of the comparison as a sentence: whether the variants differ."""
        names = f"{self.metric} of {self.second.name}", f"that of {self.first.name}"
        if not self.test:
            return f"Nothing can be concluded about {names[0]} and {names[1]}: a variant has one run; run more seeds."
        low, high = self.interval
        found = f"95 % interval {low:+.4f} to {high:+.4f}, {self.test}, p = {self.p:.2g}"
        if self.p < SIGNIFICANCE:
            order = "lower" if self.difference < 0 else "higher"
            return f"{names[0]} is {order} than {names[1]} by {abs(self.difference):.4f} ({found})."
        needed = f" About {self.needed} runs of each would show a difference of this size." if self.needed else ""
        return f"No difference between {names[0]} and {names[1]} can be concluded ({found}).{needed}"

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON fields; numbers that do not exist are null."""
        variants = [
            {"runs": [str(log.folder) for log in each.logs], "seeds": list(each.seeds), "values": list(each.values),
             "mean": each.mean, "standard_error": _finite(standard_error(each.values))}
            for each in (self.first, self.second)
        ]  # fmt: skip
        return {
            "metric": self.metric, "first": variants[0], "second": variants[1], "difference": self.difference,
            "interval": [_finite(end) for end in self.interval], "p": _finite(self.p), "test": self.test or None,
            "needed": self.needed, "differing_settings": self.differing_settings, "conclusion": self.conclusion(),
        }  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def compare_variants_over_seeds(first: VariantRuns, second: VariantRuns, metric: str) -> SeedComparison:
    """Compare two variants: paired by seed if both have the same seeds, else by Welch's t-test."""
    difference, nan = second.mean - first.mean, math.nan
    paired = _pair_by_seed(first, second)
    if min(len(first.values), len(second.values)) < 2:
        return SeedComparison(first, second, metric, difference, (nan, nan), nan, "", None)
    if paired:
        a, b = map(list, zip(*paired, strict=True))
        variance, name = statistics.variance([y - x for x, y in paired]), "paired t-test"
        result = stats.ttest_rel(b, a) if variance else None
    else:
        a, b, name = list(first.values), list(second.values), "Welch's t-test"
        variance = statistics.variance(a) + statistics.variance(b)
        result = stats.ttest_ind(b, a, equal_var=False) if variance else None
    if result is None:  # equal runs, or differences that are all equal
        interval, p = (difference, difference), float(difference == 0)
    else:
        low, high = result.confidence_interval(1 - SIGNIFICANCE)
        interval, p = (float(low), float(high)), float(result.pvalue)
    needed = math.ceil(POWER_SUM**2 * variance / difference**2) + 1 if difference else None
    return SeedComparison(first, second, metric, difference, interval, p, name, needed)


def _pair_by_seed(first: VariantRuns, second: VariantRuns) -> list[tuple[float, float]]:
    """Return pairs of values with equal seeds; [] unless both variants have one run of each seed."""
    one, other = (dict(zip(each.seeds, each.values, strict=True)) for each in (first, second))
    unique = len(one) == len(first.values) and len(other) == len(second.values) and None not in one
    return [(one[seed], other[seed]) for seed in one] if unique and one.keys() == other.keys() else []
