"""Configuration of a sweep over settings of run.yaml, as given on the command line or in sweep.yaml."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from mega_common.bounded_parsing import TAG_ERRORS, StrictYamlLoader
from mega_common.errors import ConfigError
from mega_common.strict_config import ConfigProblem, StrictConfig, apply_config_overrides, load_yaml_mapping
from mega_trainer.config.run_config import RunConfig, format_overrides, resolve_run_config

SEED_KEY = "train.seed"
_NUMBER = r"[\d.]+(?:e[+-]?\d+)?"
_DASHED_RANGE = re.compile(f"({_NUMBER})-({_NUMBER})")


@dataclass(frozen=True)
class NumberRange:
    """Range of numbers that a sampler draws from, both ends included; whole numbers if both ends are."""

    low: float
    high: float
    log: bool = False


SweptValues = list[Any] | NumberRange


class SweepConfig(StrictConfig):
    """Settings of a hyperparameter sweep, from sweep.yaml and the command line."""

    settings: dict[str, list[Any] | str] = Field(
        min_length=1,
        description="values by the path of the setting in run.yaml: a list, or a range such as 1e-4..1e-2:log",
    )
    sampler: Literal["grid", "random", "tpe", "gp"] = Field(
        "grid", description="grid: every combination; the others are optuna's samplers of the same name"
    )
    trials: int | None = Field(None, gt=0, le=100_000, description="number of trials; not for a grid")
    metric: str = Field(
        "valid_loss", description="key of metrics.jsonl; its mean over the last tenth of the steps counts"
    )
    goal: Literal["min", "max"] = Field("min", description="best value of the metric: the lowest or the highest")
    seeds: int = Field(1, gt=0, le=1000, description="runs of each trial, with consecutive values of train.seed")
    sampler_seed: int = Field(0, ge=0, description="seed of the sampler")

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield invalid values, ranges in a grid, and numbers of trials or seeds that conflict with other settings."""
        values = {}
        for key, given in self.settings.items():
            try:
                values[key] = parse_swept_values(given)
            except ConfigError as error:
                yield ConfigProblem(f"settings.{key}", error.message, given, error.hint or "")
                continue
            if self.sampler == "grid" and isinstance(values[key], NumberRange):
                hint = "list the values, or use --random N"
                yield ConfigProblem(f"settings.{key}", "a range is not supported with a grid", given, hint)
        if (self.sampler == "grid") != (self.trials is None):
            rule = "must not be given with a grid" if self.trials else f"is required with sampler = {self.sampler}"
            yield ConfigProblem(
                "trials", rule, self.trials, "use --random N for N trials, or --grid for all combinations"
            )
        if self.seeds > 1 and SEED_KEY in self.settings:
            yield ConfigProblem("seeds", f"conflicts with settings.{SEED_KEY}", self.seeds, "remove one of them")

    @property
    def values(self) -> dict[str, SweptValues]:
        """Values, or range of values, that the sweep tries for each setting."""
        return {key: parse_swept_values(given) for key, given in self.settings.items()}

    @property
    def num_trials(self) -> int:
        """Number of trials: `trials`, or for a grid the number of combinations."""
        return self.trials or math.prod(len(given) for given in self.settings.values())

    @property
    def is_adaptive(self) -> bool:
        """True if trials depend on the results of earlier ones."""
        return self.sampler in ("tpe", "gp")

    def grid_points(self) -> list[dict[str, Any]]:
        """Return the settings of every trial of a grid."""
        lists = [values for values in self.values.values() if isinstance(values, list)]
        return [dict(zip(self.settings, point, strict=True)) for point in itertools.product(*lists)]


def parse_setting_words(words: list[str]) -> dict[str, list[Any] | str]:
    """Return the `settings` of a sweep from words of the form KEY=V1,V2 or KEY=LOW..HIGH[:log].

    Raises:
        ConfigError: for a word of another form, or a key given twice.
    """
    found: dict[str, list[Any] | str] = {}
    if not words:
        hint = "example: optimizer.lr=1e-4,3e-4,1e-3, or optimizer.lr=1e-4..1e-2:log"
        raise ConfigError("mega sweep requires a setting and its values", hint=hint)
    for word in words:
        key, equals, text = word.partition("=")
        if not key or not equals or not text or key in found:
            rule = "is given twice" if key in found else "must have the form KEY=V1,V2 or KEY=LOW..HIGH[:log]"
            raise ConfigError(f"the setting {word!r} {rule}", hint="example: optimizer.lr=1e-4,3e-4,1e-3")
        if (bounds := _DASHED_RANGE.fullmatch(text)) is not None:
            hint = f"write {key}={bounds[1]}..{bounds[2]}, or with :log for equal steps of the logarithm"
            raise ConfigError(f"the setting {word!r} must have a range as LOW..HIGH[:log]", hint=hint)
        found[key] = text if _parse_range(text) is not None else _parse_list(word, text)
    return found


def _parse_list(word: str, text: str) -> list[Any]:
    try:
        return list(yaml.load(f"[{text}]", StrictYamlLoader))  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ConfigError, *TAG_ERRORS):
        message = f"the setting {word!r} must have values separated by commas"
        raise ConfigError(message, hint="example: optimizer.betas=[0.9,0.95],[0.9,0.99]") from None


def parse_swept_values(given: list[Any] | str) -> SweptValues:
    """Return the list or the range of values of one setting.

    Raises:
        ConfigError: for an empty list, equal values, a text that is not a range, or a range without numbers in it.
    """
    if isinstance(given, list):
        texts = [json.dumps(value, sort_keys=True) for value in given]
        if not given or len(set(texts)) < len(texts):
            raise ConfigError("must have one value or more, all different")
        return given
    found = _parse_range(given)
    if found is None:
        raise ConfigError("must be a list of values or a range", hint="write [1, 2] or 1e-4..1e-2:log")
    if not found.low < found.high or (found.log and found.low <= 0):
        rule = "must be above 0 with :log" if found.log and found.low <= 0 else "must be below the second"
        raise ConfigError(f"the first number of a range {rule}")
    return found


def _parse_range(text: str) -> NumberRange | None:
    first, dots, rest = text.partition("..")
    second, colon, log = rest.partition(":")
    if not dots or (colon and log != "log"):
        return None
    for number in (int, float):
        try:
            return NumberRange(number(first), number(second), bool(colon))
        except ValueError:
            continue
    return None


def build_checked_trial_config(base: Mapping[str, Any], settings: Mapping[str, Any], source: str) -> RunConfig:
    """Return the configuration of the run.yaml `base` with the settings of a trial.

    Raises:
        ConfigError: with the settings, and every rule that they violate.
    """
    overrides = format_overrides(settings)
    raw = resolve_run_config(apply_config_overrides(base, overrides))
    return RunConfig.parse(raw, source=" ".join([source, "with", *overrides]) if overrides else source)


def check_each_swept_value(base: Mapping[str, Any], config: SweepConfig, source: str) -> None:
    """Raise `ConfigError` for an unknown setting, or a value or end of a range that run.yaml rejects whatever the others."""
    build_checked_trial_config(base, {}, source)
    for key, values in config.values.items():
        for value in values if isinstance(values, list) else (values.low, values.high):
            try:
                build_checked_trial_config(base, {key: value}, source)
            except ConfigError as error:
                if f"  {key}" in error.message:  # other rules may hold with another value of another setting
                    raise


def load_sweep_config(path: Path, given: Mapping[str, Any]) -> SweepConfig:
    """Read sweep.yaml with the options `given` on the command line on top.

    Raises:
        ConfigError: with every problem.
    """
    return SweepConfig.parse(load_yaml_mapping(path) | dict(given), source=str(path))
