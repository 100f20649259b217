"""`mega sweep`: runs with different settings, ranked and drawn on one page."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mega_cli.serve_replicas import list_visible_devices
from mega_cli.train import check_run_inputs_exist
from mega_cli.workflow_config import load_run_file
from mega_cli.workflow_runner import MEGA, handle_stop_signals
from mega_common.atomic_files import lock_folder
from mega_common.errors import INTERRUPTED_STATUS, ConfigError
from mega_common.parent_death import terminate_with_parent
from mega_common.progress_logging import format_columns, logger
from mega_common.strict_config import apply_config_overrides, load_yaml_mapping

if TYPE_CHECKING:
    from mega_trainer.experiments.sweep_config import SweepConfig
    from mega_trainer.experiments.sweep_study import Sweep, SweptRun

EXAMPLES = """Examples:

  mega sweep run.yaml --grid optimizer.lr=1e-3,3e-3,1e-2 batch.global=8,16

  mega sweep run.yaml --random 12 optimizer.lr=1e-4..1e-2:log optimizer.weight_decay=0..0.2 --jobs 2

  mega sweep run.yaml --random 30 optimizer.lr=1e-4..1e-2:log --sampler tpe --output sweeps/lr

  mega sweep run.yaml --grid optimizer.name=adamw,lion --seeds 3

  mega sweep run.yaml --from sweep.yaml --prepare && mega launch slurm sweeps/run --nodes 1
"""
POLL_SECONDS = 0.2
SHOWN_TRIALS = 10


def sweep_command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Configuration file that each run starts from, e.g. run.yaml.")
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUES...",
            help="Settings by their path in run.yaml: KEY=V1,V2 or, for a range, KEY=LOW..HIGH[:log].",
            show_default=False,
        ),
    ] = None,
    grid: Annotated[bool, typer.Option("--grid", help="Try every combination of the listed values.")] = False,
    random: Annotated[int | None, typer.Option("--random", min=1, metavar="N", help="Draw N trials, e.g. 12.")] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", help="YAML file with settings, sampler, trials, metric, goal, seeds, sampler_seed."),
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(help="With --random: random, or tpe or gp, which learn from earlier trials (optuna).")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Key of metrics.jsonl.", show_default="valid_loss; loss for runs without validation"),
    ] = None,
    goal: Annotated[str | None, typer.Option(help="min or max: best value of the metric.", show_default="min")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Runs of each trial, with consecutive train.seed, e.g. 3.", show_default="1"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of the sweep.", show_default="sweeps/NAME of RUN")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time on this machine, e.g. 2.")] = 1,
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks of each run.", show_default="as mega train")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of run.yaml for all runs. Repeatable."),
    ] = None,
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare", help="Start no run: write the run files, for mega launch slurm FOLDER, and the page."
        ),
    ] = False,
) -> None:
    """Train with different settings, and write one HTML page that ranks and draws the runs.

    All settings are checked before anything starts. Each run is an ordinary `mega train` in a folder of its own. Re-running
    the command resumes: finished runs are not run again, a begun one resumes from its checkpoint. --random with a larger N
    adds trials. Exit status: 0 all trials done, 1 some failed, 2 user error, 75 interrupted and resumable.
    """
    base_config = load_run_file(run, set_ or [])
    base = apply_config_overrides(load_yaml_mapping(run), set_ or [])
    config = _read_request(
        from_, words or [], grid=grid, trials=random, given={"sampler": sampler, "metric": metric, "goal": goal, "seeds": seeds},
        validates=base_config.train.eval_every > 0,
    )  # fmt: skip
    try:
        from mega_trainer.experiments.sweep_study import Sweep
    except ModuleNotFoundError as error:
        raise _require_optuna(error) from None
    check_run_inputs_exist(base_config, run, data=True)
    if prepare and config.is_adaptive:
        raise ConfigError(
            f"--prepare conflicts with --sampler {config.sampler}, whose trials depend on results of earlier ones",
            hint="use --sampler random, or leave out --prepare",
        )
    folder = output or Path("sweeps") / run.stem
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder) as lock:
        sweep = Sweep.open_folder(folder, config, base, str(run))
        status = _prepare(sweep) if prepare else _run_trials(sweep, jobs, nproc, lock)
        _write_page(sweep)
        print(_format_ranking(sweep))
    if status:
        raise typer.Exit(status)


def _read_request(
    file: Path | None, words: list[str], *, grid: bool, trials: int | None, given: Mapping[str, Any], validates: bool
) -> SweepConfig:
    """Return the configuration of the sweep that the command describes."""
    from mega_trainer.experiments.sweep_config import SweepConfig, load_sweep_config, parse_setting_words

    if grid + (trials is not None) + (file is not None) != 1:
        raise ConfigError(
            "mega sweep requires one of --grid, --random N and --from sweep.yaml", hint="see mega sweep --help"
        )
    request = {key: value for key, value in given.items() if value is not None}
    if trials is not None:
        request = {"sampler": "random", "trials": trials} | request
    if words or file is None:
        request["settings"] = parse_setting_words(words)
    config = SweepConfig.parse(request, source="mega sweep") if file is None else load_sweep_config(file, request)
    if "metric" not in config.model_fields_set and not validates:
        config = config.model_copy(update={"metric": "loss"})
    if config.metric == "valid_loss" and not validates:
        raise ConfigError(
            "--metric valid_loss requires validation", hint="--set train.eval_every=100, or --metric loss"
        )
    return config


def _require_optuna(error: ModuleNotFoundError) -> Exception:
    from mega_common.errors import MissingPackageError

    if error.name != "optuna":
        return error
    return MissingPackageError("mega sweep requires optuna, which is not installed", hint="pip install optuna")


def _prepare(sweep: Sweep) -> int:
    """Write the run files of all trials, and record those that a launcher has finished."""
    for trial in range(sweep.config.num_trials):
        runs = sweep.create_trial_runs(trial)
        if sweep.study.get_trial_status(trial) == "begun" and all(map(sweep.is_run_finished, runs)):
            sweep.finish_trial(trial, failed=False)
    return 0


def _run_trials(sweep: Sweep, jobs: int, nproc: int | None, lock: int) -> int:
    """Run all runs that are not finished, and return the exit status of the sweep.

    The children inherit the lock: if this process is killed, no other can start their runs while they save.
    """
    received: list[int] = []
    running: dict[subprocess.Popen[bytes], tuple[SweptRun, int]] = {}
    ended: dict[int, list[int]] = {}  # exit statuses of the runs of a trial

    def forward_signal(number: int, _: object) -> None:
        received.append(number)
        for process in running:
            process.send_signal(number)

    waiting, interrupted = _iterate_runs(sweep, ended), False
    with handle_stop_signals(forward_signal):
        while True:
            while len(running) < jobs and not received and not interrupted and (run := next(waiting, None)) is not None:
                slot = min({*range(jobs)} - {used for _, used in running.values()})
                running[_start_run(run, nproc, lock, _slot_environment(slot, jobs))] = run, slot
            if not running:
                break
            done = [process for process in running if process.poll() is not None]
            for process in done:
                run, _ = running.pop(process)
                stopped = process.returncode < 0 or process.returncode == INTERRUPTED_STATUS  # by a signal
                interrupted |= stopped
                if not stopped and not received:
                    _end_run(sweep, run, process.returncode, ended)
            if not done:
                time.sleep(POLL_SECONDS)
    if received or interrupted:
        logger.info("%s: interrupted; the same command resumes", sweep.folder)
        return INTERRUPTED_STATUS
    return int(any(sweep.study.get_trial_status(trial) == "failed" for trial in range(sweep.config.num_trials)))


def _iterate_runs(sweep: Sweep, ended: dict[int, list[int]]) -> Iterator[SweptRun]:
    """Yield the runs to start; a trial is drawn when its first run can start."""
    from mega_trainer.experiments.sweep_study import iterate_unfinished_trials

    for trial in iterate_unfinished_trials(sweep):
        try:
            runs = sweep.create_trial_runs(trial)
        except ConfigError as error:  # of an adaptive sampler; the combinations of the others are checked at the start
            logger.warning("trial %d: %s", trial, error.message)
            sweep.study.finish_trial(trial, None)
            continue
        open_runs = [run for run in runs if not sweep.is_run_finished(run)]
        ended[trial] = [0] * (len(runs) - len(open_runs))
        if not open_runs:
            sweep.finish_trial(trial, failed=False)
        yield from open_runs


def _start_run(run: SweptRun, nproc: int | None, lock: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start `mega train` for a run; its output is appended to the run's log file."""
    from mega_trainer.experiments.sweep_page import format_settings

    logger.info("%s: %s %s", run.folder, "resumes" if run.folder.exists() else "starts", format_settings(run.settings))
    command = [*MEGA, "train", str(run.config_file), *([f"--nproc={nproc}"] if nproc else [])]
    with open(run.log_file, "ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0, pass_fds=[lock],
            env={**os.environ, **environment}, preexec_fn=terminate_with_parent,
        )  # fmt: skip


def _slot_environment(slot: int, jobs: int) -> dict[str, str]:
    """Return the environment that gives a run its share of the GPUs, if several run at the same time."""
    if jobs == 1:
        return {}
    devices = list_visible_devices("auto")
    share = len(devices) // jobs
    if devices and not share:
        raise ConfigError(
            f"--jobs {jobs} requires a GPU for each run, found {len(devices)}", hint=f"--jobs {len(devices)}"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot * share : (slot + 1) * share])} if devices else {}


def _end_run(sweep: Sweep, run: SweptRun, status: int, ended: dict[int, list[int]]) -> None:
    """Log the end of a run, and record its trial when all of its runs have ended."""
    from mega_trainer.experiments.sweep_page import format_metric_with_stderr
    from mega_trainer.experiments.sweep_study import read_last_nonempty_line

    if status:
        logger.warning("%s: failed with status %d: %s", run.folder, status, read_last_nonempty_line(run.log_file))
    ended[run.trial].append(status)
    if len(ended[run.trial]) == sweep.config.seeds:
        sweep.finish_trial(run.trial, failed=any(ended[run.trial]))
        result = sweep.read_result(run.trial)
        logger.info("trial %d: %s %s", run.trial, sweep.config.metric, format_metric_with_stderr(result) or "failed")
        _write_page(sweep)


def _write_page(sweep: Sweep) -> None:
    from mega_trainer.experiments.sweep_page import render_sweep_page
    from mega_trainer.experiments.sweep_study import PAGE
    from mega_trainer.pages.page_elements import write_html_page

    page = render_sweep_page(f"Sweep {sweep.folder.name}", sweep.config, sweep.read_trial_results())
    write_html_page(sweep.folder / PAGE, page, "--output")


def _format_ranking(sweep: Sweep) -> str:
    """Return the best trials as a table in text, and the name of the page."""
    from mega_trainer.experiments.sweep_page import format_trial_ranking_rows
    from mega_trainer.experiments.sweep_study import PAGE

    results = sweep.read_trial_results()
    rows = format_trial_ranking_rows(sweep.config, results)[: SHOWN_TRIALS + 1]
    lines = [format_columns(rows)]
    lines += [f"... {len(results) - SHOWN_TRIALS} more"] if len(results) > SHOWN_TRIALS else []
    return "\n".join([*lines, str(sweep.folder / PAGE)])
