"""`mega train`: check the configuration, start the ranks unless this process is one, and train."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega_cli.workflow_config import load_run_file
from mega_common.parent_death import terminate_with_parent

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig
    from mega_trainer.objectives.policy_objective import RolloutGenerator
    from mega_trainer.run.training_context import TaskScorer

UNSUPPORTED_HERE = "kernels: this machine cannot run it"
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
        help="Configuration file, e.g. run.yaml. With --from-megatron-args: arguments of the script, after `--`.",
        show_default=False,
    ),
]
LaunchScript = Annotated[
    Path | None,
    typer.Option(help="Translate this Megatron-LM launch script to a run.yaml, print it and exit, e.g. pretrain.sh."),
]
DeepSpeedConfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Translate this DeepSpeed ds_config.json to a run.yaml for --nproc ranks, print it and exit.",
    ),
]
HfArgs = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Translate HuggingFace TrainingArguments (JSON), or a YAML config of Axolotl, TRL, LLaMA-Factory or Accelerate, to a run.yaml, print it and exit.",
    ),
]
Define = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="With --from-megatron-args: override a shell variable of the script, e.g. GPUS_PER_NODE=8. Repeatable.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="With --from-megatron-args: reject flags and values unknown to Megatron-LM."),
]
Replay = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="STEP",
        help="Re-run this step from the latest checkpoint before it, and compare it bitwise with metrics.jsonl, e.g. 1200. "
        "The run's own files are not changed. Exit status 1 if something differs.",
    ),
]
Reproduce = Annotated[
    str | None,
    typer.Option(
        metavar="CHECKPOINT",
        help="Re-run the step after this checkpoint with the settings saved in it, and compare it bitwise with "
        "metrics.jsonl; differences in versions, commit, machine and data are printed first.",
    ),
]


def train_command(
    words: Words = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. --set batch.micro=2. Repeatable."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks to start on this machine. Default: one per GPU; on CPU the minimum of the layout."
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check configuration and data, print all settings, and exit without training."),
    ] = False,
    find_micro_batch: Annotated[
        bool,
        typer.Option(
            "--find-micro-batch",
            help="Find the largest batch.micro that fits in memory, by training a few steps with several sizes; print it and exit.",
        ),
    ] = False,
    replay: Replay = None,
    reproduce: Reproduce = None,
    data: Annotated[bool, typer.Option(help="With --check: also check the data.")] = True,
    from_megatron_args: LaunchScript = None,
    from_deepspeed: DeepSpeedConfig = None,
    from_hf_args: HfArgs = None,
    define: Define = None,
    strict: Strict = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of run.yaml, for editors, and exit.")
    ] = False,
) -> None:
    """Train the model that run.yaml describes. Re-running the command resumes from the latest checkpoint.

    Exit status: 0 all steps are done; 75 stopped early by a signal (SIGTERM, SIGINT, SIGHUP, SIGUSR1), saved and
    resumable; 2 user error; 1 internal error; 130 stopped by a second Ctrl-C without saving.
    """
    import json

    from mega_common.errors import ConfigError
    from mega_common.strict_config import build_json_schema
    from mega_trainer.config.run_config import RunConfig

    if schema:
        print(json.dumps(build_json_schema(RunConfig), indent=1))
        return
    if from_megatron_args is not None:
        from mega_cli.translation import translate_megatron_script

        print(translate_megatron_script(from_megatron_args, define or [], words or [], strict=strict), end="")
        return
    if from_deepspeed is not None or from_hf_args is not None:
        from mega_cli.translation import translate_deepspeed_or_hf_config

        print(translate_deepspeed_or_hf_config(from_deepspeed, from_hf_args, nproc), end="")
        return
    if define or strict:
        raise ConfigError(
            f"{'--define' if define else '--strict'} requires --from-megatron-args",
            hint="to override a setting of run.yaml, use --set KEY=VALUE",
        )
    from mega_cli import replay as again

    if reproduce is not None:
        if words or replay is not None:
            other = "--replay" if replay is not None else f"a run.yaml ({words[0] if words else ''})"
            raise ConfigError(
                f"--reproduce conflicts with {other}: the settings are read from the checkpoint",
                hint="leave it out; use --set KEY=VALUE to override a setting",
            )
        raise typer.Exit(again.reproduce_step(reproduce, set_ or [], nproc, train_or_start_ranks))
    run = _select_run(words or [])
    overrides: Sequence[str] = set_ or []
    config = load_run_file(run, overrides, warn_unread=check)  # a training run logs these warnings itself
    if nproc is not None:
        config, overrides = _resolve_layout(config, run, overrides, nproc)
        config.check_world_size(nproc)
    if check:
        _print_checked_run(config, run, data=data)
        return
    _check_patterns(config, run)
    if find_micro_batch:
        print(_find_micro_batch(config, run, overrides, nproc))
        return
    if replay is not None:
        raise typer.Exit(again.replay_step(config, replay, nproc, train_or_start_ranks))
    if status := train_or_start_ranks(config, run, nproc, overrides):
        raise typer.Exit(status)


def _print_checked_run(config: RunConfig, run: Path, *, data: bool) -> None:
    """Print all settings of a run as YAML, with comments about its data, kernels and the checkpoint that it resumes from.

    Raises:
        ConfigError: with all inputs that do not exist, or when the run may not resume from its checkpoint.
    """
    import yaml

    from mega_trainer.data.data_check import check_datasets, format_usage
    from mega_trainer.job.resume import find_resume_changes

    check_run_inputs_exist(config, run, data=data)
    changes = find_resume_changes(config)
    uses = check_datasets(config) if data else []
    print(yaml.safe_dump(config.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=False), end="")
    print("".join(f"# {format_usage(use)}\n" for use in uses), end="")
    kernels = _describe_kernels(config)
    print(f"# {kernels}")
    print("".join(f"# {line}\n" for line in changes), end="")
    print("".join(f"# warning: {warning}\n" for warning in config.find_warnings()), end="")
    if config.model.transformers is not None:
        print("# not predicted with model.implementation = transformers: memory, step time, FLOPs and MFU")
    elsewhere = ", but not on this machine" if kernels.startswith(UNSUPPORTED_HERE) else ""
    print(f"# ok: the configuration{' and the data' if data else ''} can be used{elsewhere}")


def _resolve_layout(
    config: RunConfig, run: Path, overrides: Sequence[str], ranks: int, *, log: bool = True
) -> tuple[RunConfig, Sequence[str]]:
    """Return the configuration and its overrides; without `parallel`, a layout is chosen for the number of ranks."""
    from mega_ckpt.checkpoint import Checkpoint
    from mega_trainer.config.run_config import format_overrides, load_run_config
    from mega_trainer.job.resume import find_start_checkpoint
    from mega_trainer.plan.automatic_layout import choose_parallel_layout
    from mega_trainer.run.run_summary import detect_machine

    if ranks == 1 or "parallel" in config.model_fields_set or (machine := detect_machine(config)) is None:
        return config, overrides
    checkpoint = find_start_checkpoint(config)
    saved = None if checkpoint is None else Checkpoint.open_folder(checkpoint).trainer_state.get("settings")
    settings, summary = choose_parallel_layout(config, ranks, machine, saved)
    if log:
        typer.echo(summary, err=True)
    chosen = [*overrides, *format_overrides(settings)]
    return load_run_config(run, chosen), chosen


def _find_micro_batch(config: RunConfig, run: Path, overrides: Sequence[str], nproc: int | None) -> str:
    """Return the command that trains with the largest micro-batch that fits in memory."""

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
    """Return the kernel backends of a run on this machine and the reasons, or why it cannot run here (a login node)."""
    from mega_common.errors import ConfigError
    from mega_trainer.distributed.device import select_rank_device
    from mega_trainer.run.build_components import choose_kernels

    try:
        return str(choose_kernels(config, select_rank_device(config.device, 0)))
    except ConfigError as error:
        return f"{UNSUPPORTED_HERE}: {error.message}"


def _select_run(words: list[str]) -> Path:
    from mega_common.errors import ConfigError

    if not words:
        raise ConfigError("mega train requires a run.yaml", hint="mega train run.yaml; see mega train --help")
    if len(words) > 1:
        assigned = next((word for word in words[1:] if "=" in word), None)
        extra = (
            f"--set {assigned} overrides a setting"
            if assigned
            else f"mega train {words[0]}, and settings as --set KEY=VALUE"
        )
        raise ConfigError(f"mega train requires one run.yaml, found {len(words)}: {', '.join(words)}", hint=extra)
    return Path(words[0])


def check_run_inputs_exist(config: RunConfig, run: Path, *, data: bool) -> None:
    """Raise ConfigError if a file, folder or name that run.yaml refers to does not exist; with `data`, data sets too.

    Raises:
        ConfigError: with all missing ones.
    """
    from mega_common.strict_config import raise_config_error
    from mega_trainer.run.input_check import find_input_problems

    if found := find_input_problems(config, data=data):
        raise_config_error(found, str(run))


def _check_patterns(config: RunConfig, run: Path) -> None:
    """Reject patterns of tensors or modules that match nothing in the model."""
    from mega_common.strict_config import raise_config_error
    from mega_trainer.run.input_check import find_unmatched_patterns

    if found := find_unmatched_patterns(config):
        raise_config_error(found, str(run))


def train_or_start_ranks(config: RunConfig, run: Path, nproc: int | None, overrides: Sequence[str] = ()) -> int:
    """Train in this process if it is a rank or the only one, else start the ranks. Returns the exit status."""
    import os

    _follow_launcher_death()
    from mega_common.errors import ConfigError, DataError, NumericalError, TrainingInterrupted, TrainingTerminated
    from mega_data.preprocessing.token_cache import tokenize_raw_data
    from mega_trainer.job.environment import get_library_environment

    for name, value in get_library_environment(config).items():
        os.environ.setdefault(name, value)
    from mega_common.progress_logging import configure_logging
    from mega_trainer.distributed.process_groups import RankInfo
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
            tokenize_raw_data(config.data)  # before any rank starts
            options = [f"--set={override}" for override in overrides]
            command = [sys.executable, "-m", "mega_cli.main", "train", str(run), *options]
            return run_local_ranks(command, count, Path(config.output))
        ranks = RankInfo()
    config, _ = _resolve_layout(config, run, overrides, ranks.world_size, log=ranks.rank == 0)
    configure_logging(rank=ranks.rank, world_size=ranks.world_size)
    if ranks.rank == 0:
        warn_unsafe_restarts(os.environ)
    from mega_trainer.run.training_run import run_training as train

    try:
        tokenize_raw_data(config.data)  # one rank of a machine; the others wait, before they join
        config.check_world_size(
            ranks.world_size
        )  # torchrun may have restarted with fewer ranks, after the loss of a machine
        with join_process_group(ranks, config.device, config.timeout_seconds) as store:
            train(config, ranks, store, _build_task_scorer(config), _build_rollout_sampler(config))
    except TrainingTerminated as error:  # by torchrun, which exits or restarts with more ranks
        write_exit_status_note(os.environ, error.exit_status)
        raise
    except (TrainingInterrupted, ConfigError, DataError, NumericalError) as error:
        terminate_torchrun(os.environ, error.exit_status)
        raise
    return 0


def _build_task_scorer(config: RunConfig) -> TaskScorer | None:
    """Return the scorer that runs the tasks of `eval.tasks`, or None without tasks."""
    if not config.eval.tasks:
        return None
    from mega_cli.eval_ranks import import_lm_eval

    import_lm_eval(offline=False)
    from mega_eval.in_training_tasks import InTrainingTaskEvaluator

    return InTrainingTaskEvaluator(config)


def _build_rollout_sampler(config: RunConfig) -> RolloutGenerator | None:
    """Return the sampler of answers for `objective.kind: grpo`, or None for another objective."""
    if config.objective.kind != "grpo":
        return None
    from mega_eval.live_model import RolloutSampler

    return RolloutSampler(config)


def _follow_launcher_death() -> None:
    """Have this rank saved and ended when its launcher dies, instead of being orphaned.

    Call it before torch is imported: the import takes long enough for the launcher to die meanwhile.
    """
    import os

    if "TORCHELASTIC_RUN_ID" in os.environ:
        terminate_with_parent()
