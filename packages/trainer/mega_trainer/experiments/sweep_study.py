"""Sweep in a folder: trials drawn by optuna, a run.yaml and a run folder for each run, results read from the runs.

The folder has `sweep.yaml` (the request), `study.log` (optuna's journal, which optuna's own tools read), and for each run
`run-000.yaml`, `run-000.log` and the run's folder `run-000`.
"""

from __future__ import annotations

import json
import math
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState, create_trial

from mega_common.atomic_files import open_atomic_file
from mega_common.errors import ConfigError
from mega_common.strict_config import apply_config_overrides, load_yaml_mapping
from mega_trainer.config.run_config import format_overrides
from mega_trainer.experiments.sweep_config import (
    SEED_KEY,
    NumberRange,
    SweepConfig,
    SweptValues,
    build_checked_trial_config,
    check_each_swept_value,
)
from mega_trainer.pages.run_log import METRICS, RunLog

REQUEST, STUDY, PAGE = "sweep.yaml", "study.log", "sweep.html"
DEFAULT_SEED = 1234  # of train.seed
SAMPLERS: Mapping[str, type[BaseSampler]] = {"random": RandomSampler, "tpe": TPESampler, "gp": GPSampler}


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep: a trial with one seed."""

    number: int
    trial: int
    settings: Mapping[str, Any]
    config_file: Path

    @property
    def folder(self) -> Path:
        """Output folder of this run of a sweep."""
        return self.config_file.with_suffix("")

    @property
    def log_file(self) -> Path:
        """File with the output of the run's processes."""
        return self.config_file.with_suffix(".log")


@dataclass(frozen=True)
class TrialResult:
    """Result of one trial: its settings, the logs of its runs as far as they exist, and the metric of each run.

    Attributes:
        state: done, failed, begun or waiting.
        note: last line of the output of a failed run.
    """

    number: int
    settings: Mapping[str, Any]
    state: str
    logs: Sequence[RunLog] = ()
    values: Sequence[float] = ()
    note: str = ""

    @property
    def mean(self) -> float:
        """Mean of the metric over the seeds; NaN without a value."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def standard_error(self) -> float:
        """Standard error of the mean over the seeds; NaN for less than two."""
        return standard_error(self.values)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of independent values; NaN for less than two."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


class SweepStudy:
    """Trials of a sweep, drawn by optuna and kept in its journal, or in memory for a check.

    A draw depends on the sampler's seed, the trial's number and the results so far, not on restarts.
    """

    def __init__(self, config: SweepConfig, path: Path | None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.config = config
        self._distributions = {key: _build_distribution(values) for key, values in config.values.items()}
        storage: BaseStorage = JournalStorage(JournalFileBackend(str(path))) if path else InMemoryStorage()
        self._study = optuna.create_study(study_name="sweep", storage=storage, load_if_exists=True)

    def draw_trial(self, number: int) -> dict[str, Any]:
        """Return the settings of trial `number`; if the study does not have it, draw and record it."""
        trials = self._study.get_trials(deepcopy=False)
        if number < len(trials):
            params = trials[number].params
        else:
            params = self._draw_params(number)
            # Added as a whole: a kill leaves no trial without settings.
            drawn = create_trial(state=TrialState.RUNNING, params=params, distributions=self._distributions)
            self._study.add_trial(drawn)
        return {key: _decode_value(params[key], self._distributions[key]) for key in self.config.settings}

    def _draw_params(self, number: int) -> dict[str, Any]:
        if self.config.sampler == "grid":
            return {key: json.dumps(value) for key, value in self.config.grid_points()[number].items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = SAMPLERS[self.config.sampler](seed=self.config.sampler_seed * 100_003 + number)  # type: ignore[call-arg]
        study = optuna.create_study(sampler=sampler)
        study.add_trials(self._study.get_trials(states=(TrialState.COMPLETE,)))
        return study.ask(self._distributions).params

    def get_trial_status(self, number: int) -> str:
        """Return the state of a trial: `done`, `failed`, `begun`, or `waiting` if it is not drawn yet."""
        trials = self._study.get_trials(deepcopy=False)
        names = {TrialState.COMPLETE: "done", TrialState.FAIL: "failed"}
        return names.get(trials[number].state, "begun") if number < len(trials) else "waiting"

    def finish_trial(self, number: int, value: float | None) -> None:
        """Record the metric of a trial for the sampler; None or a non-finite value: it failed."""
        if value is None or not math.isfinite(value):
            self._study.tell(number, state=TrialState.FAIL)
        else:
            self._study.tell(number, value if self.config.goal == "min" else -value)


def _build_distribution(values: SweptValues) -> BaseDistribution:
    """Return optuna's distribution of values; listed values are categories, as JSON."""
    if not isinstance(values, NumberRange):
        return CategoricalDistribution([json.dumps(value) for value in values])
    if isinstance(values.low, int) and isinstance(values.high, int):
        return IntDistribution(values.low, values.high, log=values.log)
    return FloatDistribution(values.low, values.high, log=values.log)


def _decode_value(value: Any, distribution: BaseDistribution) -> Any:
    return json.loads(value) if isinstance(distribution, CategoricalDistribution) else value


@dataclass
class Sweep:
    """Hyperparameter sweep whose state is kept in a folder.

    Attributes:
        folder: folder of the sweep.
        base: settings of run.yaml.
        source: name of run.yaml in messages.
    """

    folder: Path
    config: SweepConfig
    base: Mapping[str, Any]
    source: str
    study: SweepStudy
    _finished: dict[int, RunLog] = field(default_factory=dict)

    @classmethod
    def open_folder(cls, folder: Path, config: SweepConfig, base: Mapping[str, Any], source: str) -> Sweep:
        """Check a sweep, and open its folder, which is created if it does not exist. Nothing is started.

        Raises:
            ConfigError: for settings that run.yaml refuses, or a folder with another sweep.
        """
        check_each_swept_value(base, config, source)
        if not config.is_adaptive:
            draft = SweepStudy(config, None)
            for number in range(config.num_trials):
                build_checked_trial_config(base, draft.draw_trial(number), source)
        _keep_request(folder, {"run": dict(base), **config.model_dump(mode="json")})
        return cls(folder, config, base, source, SweepStudy(config, folder / STUDY))

    def create_trial_runs(self, trial: int) -> list[SweptRun]:
        """Return the runs of a trial, one for each seed; their run.yaml files are written.

        Raises:
            ConfigError: if run.yaml refuses the combination of an adaptive sampler.
        """
        settings = self.study.draw_trial(trial)
        checked = build_checked_trial_config(self.base, settings, self.source)
        first = trial * self.config.seeds
        seeds: list[dict[str, Any]] = [{}]
        if self.config.seeds > 1:
            seeds = [{SEED_KEY: checked.train.seed + index} for index in range(self.config.seeds)]
        return [self._make_run(first + index, trial, {**settings, **seed}) for index, seed in enumerate(seeds)]

    def _make_run(self, number: int, trial: int, settings: Mapping[str, Any]) -> SweptRun:
        run = SweptRun(number, trial, settings, self.folder / f"run-{number:03}.yaml")
        if not run.config_file.exists():
            raw = apply_config_overrides(self.base, format_overrides({**settings, "output": str(run.folder)}))
            _write_yaml(run.config_file, raw)
        return run

    def read_log(self, run: SweptRun) -> RunLog | None:
        """Return the log of a run, or None before its first step; logs of finished runs are kept in memory."""
        if run.number not in self._finished:
            try:
                log = RunLog.read_folder(run.folder)
            except ConfigError:  # no step yet
                return None
            if not log.is_finished:
                return log
            self._finished[run.number] = log
        return self._finished[run.number]

    def is_run_finished(self, run: SweptRun) -> bool:
        """Return whether the run has done its last step and, if it saves checkpoints, saved the last one."""
        log = self.read_log(run)
        if log is None or not log.is_finished:
            return False
        kept = log.settings.get("checkpoint", {})
        saves_here = kept.get("save", True) and "://" not in str(kept.get("path"))
        return not saves_here or any(each.step == log.last["step"] for each in log.list_checkpoints())

    def finish_trial(self, trial: int, *, failed: bool) -> None:
        """Record for the sampler the mean metric of a trial whose runs have ended, or that the trial failed.

        Raises:
            ConfigError: if the runs did not log the metric.
        """
        result = self.read_result(trial)
        if not failed and not result.values:
            known = ", ".join(sorted({key for log in result.logs for key in log.columns} - {"step", "time"})[:12])
            hint = f"choose a key of {METRICS} with --metric: {known}"
            raise ConfigError(f"--metric {self.config.metric} is not logged by the runs of {self.folder}", hint=hint)
        self.study.finish_trial(trial, None if failed else result.mean)

    def read_result(self, trial: int) -> TrialResult:
        """Return the result of a trial so far; its state is `waiting` until one of its runs has logged a step."""
        state = self.study.get_trial_status(trial)
        if state == "waiting":
            return TrialResult(trial, {}, state)
        try:
            runs = self.create_trial_runs(trial)
        except ConfigError as error:
            return TrialResult(trial, self.study.draw_trial(trial), state, note=error.message)
        logs = [log for run in runs if (log := self.read_log(run)) is not None]
        state = "waiting" if state == "begun" and not logs else state
        found = [log.mean_of_last_steps(self.config.metric) for log in logs]
        values = [value for value in found if value is not None]
        note = next((read_last_nonempty_line(run.log_file) for run in runs if not self.is_run_finished(run)), "")
        return TrialResult(trial, self.study.draw_trial(trial), state, logs, values, note if state == "failed" else "")

    def read_trial_results(self) -> list[TrialResult]:
        """Return the results of all drawn trials: done ones best first, then running, waiting and failed ones."""
        results = [self.read_result(trial) for trial in range(self.config.num_trials)]
        sign = 1 if self.config.goal == "min" else -1
        order = {"done": 0, "begun": 1, "waiting": 2, "failed": 3}

        def rank(result: TrialResult) -> tuple[int, bool, float]:
            return order[result.state], not math.isfinite(result.mean), sign * result.mean

        return sorted((result for result in results if result.settings), key=rank)


def _keep_request(folder: Path, request: dict[str, Any]) -> None:
    """Write the request of a sweep into its folder, or compare it with that of the sweep there; more trials are allowed."""
    path = folder / REQUEST
    if path.exists():
        before = load_yaml_mapping(path)
        free = {"metric", "goal"} if request["sampler"] in ("grid", "random") else set()
        changed = [key for key in request if before.get(key) != request[key] and key not in {"trials", *free}]
        if changed or (before.get("trials") or 0) > (request["trials"] or 0):
            key = (changed or ["trials"])[0]
            shown = "" if key == "run" else f": {before.get(key)}, found {request[key]}"
            name = "run.yaml" if key == "run" else key
            raise ConfigError(
                f"--output {folder} has a sweep with another {name}{shown}",
                hint="choose another --output, or remove the folder to start over",
            )
    elif folder.exists() and any(each.name != ".lock" for each in folder.iterdir()):
        raise ConfigError(f"--output {folder} has files that are not of a sweep", hint="choose another --output")
    _write_yaml(path, request)


def _write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    with open_atomic_file(path, text=True) as stream:
        yaml.safe_dump(dict(content), stream, sort_keys=False, default_flow_style=None, width=110)


def read_last_nonempty_line(path: Path) -> str:
    """Return the last line of a text file that is not empty; "" if the file does not exist."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def iterate_unfinished_trials(sweep: Sweep) -> Iterator[int]:
    """Yield the numbers of trials that are neither done nor failed; those with settings already drawn first."""
    for trial in range(sweep.config.num_trials):
        if sweep.study.get_trial_status(trial) in ("begun", "waiting"):
            yield trial
