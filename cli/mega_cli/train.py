"""`mega train`: check the run, start its ranks if it is not one of them, train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig
    from mega_trainer.run.training_context import TaskScorer

PR_SET_PDEATHSIG = 1  # of Linux's prctl

EXAMPLES = """
Examples:

  mega train run.yaml

  mega train run.yaml --set batch.micro=2 --nproc 8

  mega train run.yaml --check

  mega train run.yaml --find-micro-batch

  mega train run.yaml --replay 1200

  mega train --reproduce runs/llama3-8b/checkpoints/step-00001000

  mega train --schema > run.schema.json

  mega train --from-megatron-args pretrain.sh > run.yaml

  mega train --from-megatron-args pretrain.sh --define GPUS=8 -- 7b data/wiki > run.yaml

  mega train --from-deepspeed ds_config.json --nproc 8 > run.yaml

  mega train --from-hf-args training_args.json --nproc 8 > run.yaml

  torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host:29500 -m mega_cli.main train run.yaml
"""


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]",
        help="The run's configuration, run.yaml. With --from-megatron-args: the script's own arguments, after `--`.",
        show_default=False,
    ),
]
LaunchScript = Annotated[
    Path | None,
    typer.Option(help="Translate this launch script of Megatron-LM into a run.yaml, print it, and stop."),
]
DeepSpeedConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Translate this ds_config.json of DeepSpeed, on --nproc ranks, into a run.yaml, print it, and stop.",
    ),
]
HfArgs = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The same of HuggingFace's TrainingArguments as JSON, and of what Axolotl, TRL, LLaMA-Factory and Accelerate have as YAML.",
    ),
]
Define = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="With --from-megatron-args: a variable of the script, whatever it sets it to itself. Repeatable.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="With --from-megatron-args: refuse flags and values that Megatron-LM has not."),
]
Replay = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="STEP",
        help="Make this step again, from the newest checkpoint before it, and tell bit by bit what differs from "
        "metrics.jsonl; the run itself stays as it is. Status 1 when something differs.",
    ),
]
Reproduce = Annotated[
    str | None,
    typer.Option(
        metavar="CHECKPOINT",
        help="Make the step after this checkpoint again, by the settings saved in it, and compare it likewise; what differs "
        "in versions, commit, machine and data is told first.",
    ),
]


def train_command(
    words: Words = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting: a.b=value. Repeatable.")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks to start here. Default: one a GPU; on CPU as many as the layout asks for."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check configuration and data, print what they come to, and stop.")
    ] = False,
    find_micro_batch: Annotated[
        bool,
        typer.Option(
            "--find-micro-batch",
            help="Find the largest batch.micro that fits this machine, by training a few steps with some; print it, and stop.",
        ),
    ] = False,
    replay: Replay = None,
    reproduce: Reproduce = None,
    data: Annotated[bool, typer.Option(help="With --check: look at the data, too.")] = True,
    from_megatron_args: LaunchScript = None,
    from_deepspeed: DeepSpeedConfig = None,
    from_hf_args: HfArgs = None,
    define: Define = None,
    strict: Strict = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of run.yaml, for editors.")] = False,
) -> None:
    """Train a model as run.yaml says. The same command resumes from the newest checkpoint of its output folder.

    Exit status: 0 all steps are done; 75 asked to end before that (SIGTERM, SIGINT, SIGHUP, SIGUSR1), saved, and the same
    command goes on; 2 a mistake in what it was given; 1 a failure; 130 ended at once by a second Ctrl-C.
    """
    import json

    import yaml

    from mega_common.errors import ConfigError
    from mega_common.strict_config import build_json_schema
    from mega_trainer.config.run_config import RunConfig, load_run_config
    from mega_trainer.data.data_check import check_datasets, format_usage

    if schema:
        print(json.dumps(build_json_schema(RunConfig), indent=1))
        return
    if from_megatron_args is not None:
        print(_translated(from_megatron_args, define or [], words or [], strict=strict), end="")
        return
    if from_deepspeed is not None or from_hf_args is not None:
        print(_moved_in(from_deepspeed, from_hf_args, nproc), end="")
        return
    if define or strict:
        raise ConfigError(
            f"{'--define' if define else '--strict'} is for --from-megatron-args",
            hint="a setting of run.yaml is overridden by --set",
        )
    from mega_cli import replay as again

    if reproduce is not None:
        if words or replay is not None:
            raise ConfigError("--reproduce takes its settings from the checkpoint", hint="--set changes some of them")
        raise typer.Exit(again.reproduce_step(reproduce, set_ or [], nproc, _train_or_start_ranks))
    run = _only_run(words or [])
    overrides: Sequence[str] = set_ or []
    config = load_run_config(run, overrides, warn_unread=check)  # a run that starts tells by itself, once
    if nproc is not None:
        config, overrides = _resolve_layout(config, run, overrides, nproc)
        config.check_world_size(nproc)
    if check:
        _check_inputs(config, run, data=data)
        uses = check_datasets(config) if data else []
        print(yaml.safe_dump(config.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=False), end="")
        print("".join(f"# {format_usage(use)}\n" for use in uses), end="")
        print(f"# {_describe_kernels(config)}")
        return
    _check_patterns(config, run)
    if find_micro_batch:
        print(_find_micro_batch(config, run, overrides, nproc))
        return
    if replay is not None:
        raise typer.Exit(again.replay_step(config, replay, nproc, _train_or_start_ranks))
    if status := _train_or_start_ranks(config, run, nproc, overrides):
        raise typer.Exit(status)


def _resolve_layout(
    config: RunConfig, run: Path, overrides: Sequence[str], ranks: int, *, tells: bool = True
) -> tuple[RunConfig, Sequence[str]]:
    """Return the run with its overrides, and with the layout chosen for that number of ranks if it has none."""
    from mega_ckpt.checkpoint import Checkpoint
    from mega_trainer.config.run_config import load_run_config
    from mega_trainer.distributed.device import detect_machine
    from mega_trainer.plan.automatic_layout import choose_layout
    from mega_trainer.plan.layout_search import format_overrides as as_overrides
    from mega_trainer.run.train_state import find_start_checkpoint

    if ranks == 1 or "parallel" in config.model_fields_set or (machine := detect_machine(config)) is None:
        return config, overrides
    checkpoint = find_start_checkpoint(config)
    saved = None if checkpoint is None else Checkpoint.open_folder(checkpoint).trainer_state.get("settings")
    settings, told = choose_layout(config, ranks, machine, saved)
    if tells:
        typer.echo(told, err=True)
    chosen = [*overrides, *as_overrides(settings)]
    return load_run_config(run, chosen), chosen


def _find_micro_batch(config: RunConfig, run: Path, overrides: Sequence[str], nproc: int | None) -> str:
    """Print the command that trains with the largest micro-batch that fits."""
    import sys

    from mega_common.progress_logging import configure_logging
    from mega_trainer.job.micro_batch_search import find_micro_batch
    from mega_trainer.launch.local_ranks import default_rank_count

    count = nproc or default_rank_count(config.minimum_world_size, config.device)
    config.check_world_size(count)
    configure_logging(rank=0, world_size=1)
    command = [sys.executable, "-m", "mega_cli.main", "train", f"--nproc={count}"]
    size = find_micro_batch(config, run, overrides, command, count)
    options = [f"--set {setting}" for setting in (*overrides, f"batch.micro={size}")]
    return f"mega train {run} {' '.join(options)}" + (f" --nproc {nproc}" if nproc else "")


def _describe_kernels(config: RunConfig) -> str:
    """Return the back ends that a run on this machine would use, and why; or why it would not run here, as on a login
    node.
    """
    from mega_common.errors import ConfigError
    from mega_trainer.distributed.device import select_rank_device
    from mega_trainer.run.build_components import choose_kernels

    try:
        return str(choose_kernels(config, select_rank_device(config.device, 0)))
    except ConfigError as error:
        return f"not on this machine: {error}"


def _only_run(words: list[str]) -> Path:
    from mega_common.errors import ConfigError

    if not words:
        raise ConfigError("no run.yaml given", hint="mega train run.yaml; see mega train --help")
    if len(words) > 1:
        raise ConfigError(f"one run.yaml is trained at a time, and {words[1]} is given too", hint="mega train run.yaml")
    return Path(words[0])


def _translated(script: Path, define: list[str], arguments: list[str], *, strict: bool) -> str:
    from mega_cli.megatron_args import render_run_yaml, translate_script
    from mega_common.bounded_parsing import LARGEST_SETTINGS, explain_read_error, read_file_start
    from mega_common.errors import ConfigError

    try:
        text = read_file_start(script, LARGEST_SETTINGS).decode(
            "utf-8", errors="replace"
        )  # comments are in any encoding
    except OSError as error:
        raise ConfigError(f"{script}: cannot be read ({explain_read_error(error)})") from None
    variables = dict(_definition(text) for text in define)
    return render_run_yaml(translate_script(text, path=script, define=variables, arguments=arguments, strict=strict))


def _check_inputs(config: RunConfig, run: Path, *, data: bool) -> None:
    """Check that the files, folders and names which a run refers to exist.

    Raises:
        ConfigError: with all that are missing.
    """
    from mega_common.strict_config import raise_config_error
    from mega_trainer.run.input_check import find_input_problems

    if found := find_input_problems(config, data=data):
        raise_config_error(found, str(run))


def _check_patterns(config: RunConfig, run: Path) -> None:
    """Refuse patterns of tensors or modules that match nothing in the model, which would train something else."""
    from mega_common.strict_config import raise_config_error
    from mega_trainer.run.input_check import find_pattern_problems

    if found := find_pattern_problems(config):
        raise_config_error(found, str(run))


def _moved_in(deepspeed: Path | None, hf_args: Path | None, ranks: int | None) -> str:
    from mega_cli import moving_in
    from mega_cli.megatron_args import render_run_yaml
    from mega_common.errors import ConfigError

    if deepspeed is not None and hf_args is not None:
        raise ConfigError("--from-deepspeed and --from-hf-args are translated one at a time")
    if deepspeed is not None:
        return render_run_yaml(moving_in.translate_deepspeed(deepspeed, ranks))
    assert hf_args is not None
    return render_run_yaml(moving_in.translate_hf_args(hf_args, ranks))


def _definition(text: str) -> tuple[str, str]:
    from mega_common.errors import ConfigError

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--define {text}: not of the form NAME=VALUE", hint="as in --define GPUS_PER_NODE=8")
    return name, value


def _train_or_start_ranks(config: RunConfig, run: Path, nproc: int | None, overrides: Sequence[str] = ()) -> int:
    """Train in this process if it is a rank of a job or needs no others; else start the ranks. Returns the status."""
    import os
    import sys

    _follow_launcher_death()
    from mega_common.errors import ConfigError, DataError, NumericalError, TrainingInterrupted, TrainingTerminated
    from mega_trainer.job.environment import library_settings

    for name, value in library_settings(config).items():
        os.environ.setdefault(name, value)
    from mega_common.progress_logging import configure_logging
    from mega_trainer.distributed.rank_info import RankInfo
    from mega_trainer.launch.local_ranks import (
        default_rank_count,
        join_process_group,
        rank_from_environment,
        run_local_ranks,
        terminate_torchrun,
        warn_unsafe_restarts,
        write_exit_status_note,
    )

    ranks = rank_from_environment(os.environ)
    if ranks is None:
        count = nproc or default_rank_count(config.minimum_world_size, config.device)
        config, overrides = _resolve_layout(config, run, overrides, count)
        config.check_world_size(count)
        if count > 1:
            options = [f"--set={override}" for override in overrides]
            command = [sys.executable, "-m", "mega_cli.main", "train", str(run), *options]
            return run_local_ranks(command, count, Path(config.output))
        ranks = RankInfo()
    config, _ = _resolve_layout(config, run, overrides, ranks.world_size, tells=ranks.rank == 0)
    configure_logging(rank=ranks.rank, world_size=ranks.world_size)
    if ranks.rank == 0:
        warn_unsafe_restarts(os.environ)
    from mega_trainer.run.training_run import run_training as train

    try:
        config.check_world_size(ranks.world_size)  # who may be fewer than before, since a machine is lost
        with join_process_group(ranks, config.device, config.timeout_seconds) as store:
            train(config, ranks, store, _build_task_scorer(config))
    except TrainingTerminated as error:  # by torchrun itself, which ends, or goes on with more ranks
        write_exit_status_note(os.environ, error.exit_status)
        raise
    except (TrainingInterrupted, ConfigError, DataError, NumericalError) as error:
        terminate_torchrun(os.environ, error.exit_status)
        raise
    return 0


def _build_task_scorer(config: RunConfig) -> TaskScorer | None:
    """Return a function that runs the tasks of `eval`, or None if there are none."""
    if not config.eval.tasks:
        return None
    from mega_cli.eval_tasks import import_harness

    import_harness(offline=False)
    from mega_eval.in_training_tasks import TrainingTasks

    return TrainingTasks(config)


def _follow_launcher_death() -> None:
    """Have Linux send a rank SIGTERM when its launcher (torchrun or ours) dies, so that it saves and ends instead of
    being orphaned.

    To be called before torch is imported, which takes long enough for a launcher to die meanwhile.
    """
    import ctypes
    import os
    import signal
    import sys

    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
