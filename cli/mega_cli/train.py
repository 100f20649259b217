"""`mega train`: check the run, start its ranks where none are there, train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mega_trainer.config import RunConfig
    from mega_trainer.loop import Scorer

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
    """Train a model as run.yaml says. The same command goes on from the newest checkpoint of its output folder.

    Exit status: 0 all steps are done; 75 asked to end before that (SIGTERM, SIGINT, SIGHUP, SIGUSR1), saved, and the same
    command goes on; 2 a mistake in what it was given; 1 a failure; 130 ended at once by a second Ctrl-C.
    """
    import json

    import yaml

    from mega_common.config import json_schema
    from mega_common.errors import ConfigError
    from mega_trainer.config import RunConfig, load_run
    from mega_trainer.data_check import check_data, told

    if schema:
        print(json.dumps(json_schema(RunConfig), indent=1))
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
        raise typer.Exit(again.reproduce(reproduce, set_ or [], nproc, _start))
    run = _only_run(words or [])
    overrides: Sequence[str] = set_ or []
    config = load_run(run, overrides, tell=check)  # a run that starts tells by itself, once
    if nproc is not None:
        config, overrides = _laid_out(config, run, overrides, nproc)
        config.check_ranks(nproc)
    if check:
        _check_inputs(config, run, data=data)
        uses = check_data(config) if data else []
        print(yaml.safe_dump(config.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=False), end="")
        print("".join(f"# {told(use)}\n" for use in uses), end="")
        print(f"# {_kernels(config)}")
        return
    _check_patterns(config, run)
    if find_micro_batch:
        print(_largest_micro_batch(config, run, overrides, nproc))
        return
    if replay is not None:
        raise typer.Exit(again.replay(config, replay, nproc, _start))
    if status := _start(config, run, nproc, overrides):
        raise typer.Exit(status)


def _laid_out(
    config: RunConfig, run: Path, overrides: Sequence[str], ranks: int, *, tells: bool = True
) -> tuple[RunConfig, Sequence[str]]:
    """The run and its overrides, with the layout that is chosen for so many ranks where it has none."""
    from mega_ckpt.checkpoint import Checkpoint
    from mega_trainer.config import load_run
    from mega_trainer.device import machine_here
    from mega_trainer.plan.laid_out import laid_out
    from mega_trainer.plan.search import overrides as as_overrides
    from mega_trainer.state import starting_point

    if ranks == 1 or "parallel" in config.model_fields_set or (machine := machine_here(config)) is None:
        return config, overrides
    checkpoint = starting_point(config)
    saved = None if checkpoint is None else Checkpoint.open(checkpoint).state.get("settings")
    settings, told = laid_out(config, ranks, machine, saved)
    if tells:
        typer.echo(told, err=True)
    chosen = [*overrides, *as_overrides(settings)]
    return load_run(run, chosen), chosen


def _largest_micro_batch(config: RunConfig, run: Path, overrides: Sequence[str], nproc: int | None) -> str:
    """The command that trains with it."""
    import sys

    from mega_common.log import setup_log
    from mega_trainer.job.micro_batch import find_micro_batch
    from mega_trainer.ranks import default_ranks

    count = nproc or default_ranks(config.ranks_asked, config.device)
    config.check_ranks(count)
    setup_log(rank=0, world_size=1)
    command = [sys.executable, "-m", "mega_cli.main", "train", f"--nproc={count}"]
    size = find_micro_batch(config, run, overrides, command, count)
    options = [f"--set {setting}" for setting in (*overrides, f"batch.micro={size}")]
    return f"mega train {run} {' '.join(options)}" + (f" --nproc {nproc}" if nproc else "")


def _kernels(config: RunConfig) -> str:
    """Which back ends a run on this machine would use, and why; or why it would not run here, as on a login node."""
    from mega_common.errors import ConfigError
    from mega_trainer.build import choose_kernels
    from mega_trainer.device import pick_device

    try:
        return str(choose_kernels(config, pick_device(config.device, 0)))
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
    from mega_cli.megatron_args import to_yaml, translate
    from mega_common.errors import ConfigError
    from mega_common.parsing import LARGEST_SETTINGS

    try:
        with script.open("rb") as file:
            text = file.read(LARGEST_SETTINGS).decode("utf-8", errors="replace")  # comments are in any encoding
    except OSError as error:
        raise ConfigError(f"{script}: cannot be read ({error})") from None
    variables = dict(_definition(text) for text in define)
    return to_yaml(translate(text, path=script, define=variables, arguments=arguments, strict=strict))


def _check_inputs(config: RunConfig, run: Path, *, data: bool) -> None:
    """Check that the files, folders and names which a run refers to exist.

    Raises:
        ConfigError: with all that are missing.
    """
    from mega_common.config import raise_problems
    from mega_trainer.input_check import input_problems

    if found := input_problems(config, data=data):
        raise_problems(found, str(run))


def _check_patterns(config: RunConfig, run: Path) -> None:
    """Refuse patterns of tensors or modules that match nothing in the model, which would train something else."""
    from mega_common.config import raise_problems
    from mega_trainer.input_check import pattern_problems

    if found := pattern_problems(config):
        raise_problems(found, str(run))


def _moved_in(deepspeed: Path | None, hf_args: Path | None, ranks: int | None) -> str:
    from mega_cli import moving_in
    from mega_cli.megatron_args import to_yaml
    from mega_common.errors import ConfigError

    if deepspeed is not None and hf_args is not None:
        raise ConfigError("--from-deepspeed and --from-hf-args are translated one at a time")
    if deepspeed is not None:
        return to_yaml(moving_in.from_deepspeed(deepspeed, ranks))
    assert hf_args is not None
    return to_yaml(moving_in.from_hf_args(hf_args, ranks))


def _definition(text: str) -> tuple[str, str]:
    from mega_common.errors import ConfigError

    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--define {text}: not of the form NAME=VALUE", hint="as in --define GPUS_PER_NODE=8")
    return name, value


def _start(config: RunConfig, run: Path, nproc: int | None, overrides: Sequence[str] = ()) -> int:
    """Train in this process when it is a rank of a job, or needs no others; else start the ranks. Returns the status."""
    import os
    import sys

    _end_with_launcher()
    from mega_common.errors import ConfigError, DataError, Interrupted, NumbersError, Terminated
    from mega_trainer.job.environment import library_settings

    for name, value in library_settings(config).items():
        os.environ.setdefault(name, value)
    from mega_common.log import setup_log
    from mega_trainer.ranks import (
        Ranks,
        default_ranks,
        end_torchrun,
        joined,
        ranks_of,
        start_local_ranks,
        tell_torchrun,
        warn_of_restarts,
    )

    ranks = ranks_of(os.environ)
    if ranks is None:
        count = nproc or default_ranks(config.ranks_asked, config.device)
        config, overrides = _laid_out(config, run, overrides, count)
        config.check_ranks(count)
        if count > 1:
            options = [f"--set={override}" for override in overrides]
            command = [sys.executable, "-m", "mega_cli.main", "train", str(run), *options]
            return start_local_ranks(command, count, Path(config.output))
        ranks = Ranks()
    config, _ = _laid_out(config, run, overrides, ranks.world_size, tells=ranks.rank == 0)
    setup_log(rank=ranks.rank, world_size=ranks.world_size)
    if ranks.rank == 0:
        warn_of_restarts(os.environ)
    from mega_trainer.train import run as train

    try:
        config.check_ranks(ranks.world_size)  # who may be fewer than before, since a machine is lost
        with joined(ranks, config.device, config.timeout_seconds) as store:
            train(config, ranks, store, _scorer(config))
    except Terminated as error:  # by torchrun itself, which ends, or goes on with more ranks
        tell_torchrun(os.environ, error.exit_status)
        raise
    except (Interrupted, ConfigError, DataError, NumbersError) as error:
        end_torchrun(os.environ, error.exit_status)
        raise
    return 0


def _scorer(config: RunConfig) -> Scorer | None:
    """What runs the tasks of `eval`, if any are asked for."""
    if not config.eval.tasks:
        return None
    from mega_cli.eval_tasks import import_harness

    import_harness(offline=False)
    from mega_eval.in_training import TrainingTasks

    return TrainingTasks(config)


def _end_with_launcher() -> None:
    """Have Linux send a rank SIGTERM when its launcher, torchrun or ours, dies: it saves and ends, and is no orphan.

    To be called before torch is imported, which takes long enough for a launcher to die meanwhile.
    """
    import ctypes
    import os
    import signal
    import sys

    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
