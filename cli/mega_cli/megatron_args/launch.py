"""Finds the training command among the commands of a script, and how many ranks its launcher starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from mega_cli.megatron_args.script import Script, read_script
from mega_cli.megatron_args.shell import Word, shown
from mega_common.errors import ConfigError

NOTHING: Mapping[str, str] = MappingProxyType({})
OTHER_MODELS = re.compile(r"bert|t5|ict|retro|vision|vlm|mimo|multimodal|mamba|hybrid|realm|orqa")
SBATCH = re.compile(r"^#SBATCH\s+(--?[\w-]+)(?:=|[ \t]*)([^\s#]*)", re.MULTILINE)
LONG = {"-N": "--nodes", "-n": "--ntasks", "--nproc_per_node": "--nproc-per-node"}


@dataclass(frozen=True)
class Launch:
    """A training command.

    Attributes:
        program: the Python file it starts, or nothing for a bare list of arguments.
        arguments: the words after it.
        nodes, per_node: machines and ranks on each, where the script says so.
        remarks: (line, sentence) for the user to know.
    """

    program: str
    arguments: list[Word]
    nodes: int | None
    per_node: int | None
    remarks: list[tuple[int, str]]

    @property
    def ranks(self) -> int | None:
        """Number of ranks, if known."""
        return self.nodes * self.per_node if self.nodes and self.per_node else None


def find_launch(
    text: str, *, path: Path | None = None, define: Mapping[str, str] = NOTHING, arguments: Sequence[str] = ()
) -> Launch:
    """The training command of a script, or of a bare list of arguments.

    Args:
        path: where the script lies; files that it sources are read from beside it.
        define: variables of the script, which hold whatever it assigns to them itself.
        arguments: of the script: `$1` and on.

    Raises:
        ConfigError: when there is none, or it trains another kind of model.
    """
    batch = {LONG.get(key, key): value for key, value in SBATCH.findall(text)}
    script = read_script(
        text, {name: [Word(value, 0)] for name, value in {**_slurm_variables(batch), **define}.items()}
    )
    commands = [(command, at) for command in _commands(script) if (at := _program(command)) is not None]
    training = [found for found in commands if _trains(*found)]
    if not training:
        bare = [word for command in script.commands if command[0].text.startswith("--") for word in command]
        if not bare:
            raise ConfigError(
                "no training command in the launch script",
                hint="expected a command such as `torchrun ... pretrain_gpt.py --num-layers ...`, or arguments alone",
            )
        return Launch("", bare, None, None, script.remarks)
    command, at = training[0]
    program = PurePosixPath(shown(command[at].text)).name
    if OTHER_MODELS.search(program):
        raise ConfigError(
            f"line {command[at].line}: {program} trains a model that is not a plain decoder, which mega does not"
        )
    remarks = list(script.remarks)
    remarks += [
        (other[i].line, f"another training command, {shown(other[i].text)}, was not read") for other, i in training[1:]
    ]
    nodes, per_node = _ranks(command[:at], batch)
    return Launch(program, command[at + 1 :], nodes, per_node, remarks)


def _commands(script: Script) -> list[list[Word]]:
    """All commands, those in the text of `bash -c "..."` or `eval ...` too."""
    found: list[list[Word]] = []
    for command in script.commands:
        if command[0].text in ("echo", "printf"):
            continue
        nested = [word for word in command if ".py" in word.text and re.search(r"\s", word.text)]
        if command[0].text == "eval":
            nested = [Word(" ".join(word.text for word in command[1:]), command[0].line)]
        inner = [read_script(word.text, script.variables, word.line) for word in nested]
        launcher = [word for word in command if word not in nested]
        found += [launcher + c for part in inner for c in part.commands] if nested else [command]
    return found


def _program(command: Sequence[Word]) -> int | None:
    """Where the Python file stands in a command."""
    return next((i for i, word in enumerate(command) if word.text.endswith(".py")), None)


def _trains(command: Sequence[Word], at: int) -> bool:
    """Whether a command's Python file trains, by its name or by what it is given."""
    return "train" in PurePosixPath(command[at].text).name or any(word.text == "--micro-batch-size" for word in command)


def _slurm_variables(batch: dict[str, str]) -> dict[str, str]:
    """What Slurm will set for a job with these options."""
    variables: dict[str, str] = {}
    if (nodes := batch.get("--nodes", "")).isdigit():
        variables |= {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes}
    if (tasks := batch.get("--ntasks-per-node", "")).isdigit():
        variables |= {"SLURM_NTASKS_PER_NODE": tasks}
    gpus = batch.get("--gpus-per-node") or batch.get("--gres", "")
    if (count := gpus.rpartition(":")[2]).isdigit():
        variables |= {"SLURM_GPUS_PER_NODE": count, "SLURM_GPUS_ON_NODE": count}
    return variables


def _ranks(launcher: Sequence[Word], batch: dict[str, str]) -> tuple[int | None, int | None]:
    """Nodes and ranks on each."""
    options: dict[str, str] = {}
    for word, following in zip(launcher, [*launcher[1:], Word("", 0)], strict=True):
        key, equals, value = word.text.partition("=")
        options[LONG.get(key, key)] = value if equals else following.text
    if "torchrun" in " ".join(options) or "torch.distributed" in " ".join(options):
        nodes, per_node = options.get("--nnodes", "1"), options.get("--nproc-per-node", "1")
    elif any(PurePosixPath(word.text).name == "srun" for word in launcher):
        options = batch | options
        nodes, per_node = options.get("--nodes", "1"), options.get("--ntasks-per-node", "1")
        if "--ntasks" in options and "--ntasks-per-node" not in options:
            nodes, per_node = "1", options["--ntasks"]
    else:
        return 1, 1
    return (int(nodes) if nodes.isdigit() else None), (int(per_node) if per_node.isdigit() else None)
