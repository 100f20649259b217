"""The training command among the commands of a script, and the number of ranks that its launcher starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from mega_cli.megatron_args.script_reader import interpret_shell_script
from mega_cli.megatron_args.script_state import ShellScriptResult
from mega_cli.megatron_args.shell_words import MARK, ShellWord, format_unknown_placeholders, split_on_blanks
from mega_common.errors import ConfigError

NOTHING: Mapping[str, str] = MappingProxyType({})
OTHER_MODELS = re.compile(r"(?:^|[_-])(?:bert|t5|ict|retro|vision|vlm|mimo|multimodal|realm|orqa)(?:[_.-]|$)")
BERT, T5 = "pretrain_bert.py", "pretrain_t5.py"
TRAINING = re.compile(r"train|finetune|sft|gpt|llama", re.IGNORECASE)
MODEL = re.compile(
    r"--(?:(?:en|de)coder-)?num-layers|--hidden-size|--use-checkpoint-args|--yaml-cfg|--config(?:-(?:file|path|name|yaml))?"
    r"|--model-(?:name|size|type|config|path)|--(?:load-)?(?:hf|huggingface|pretrained)-\S*"
)
LAUNCHER = re.compile(
    r"--(?:nproc-per-node|nnodes|node-rank|master-(?:addr|port)|rdzv-.*|max-restarts|tee|log-dir|redirects|role|no-python"
    r"|standalone|local-addr|monitor-interval|num-(?:gpus|nodes)|hostfile|include|exclude|launcher)"
)
STARTING = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|srun|mpirun|mpiexec|deepspeed|accelerate|launch|exec|run|env)")
SBATCH = re.compile(r"^#SBATCH\s+(--?[\w-]+)(?:=|[ \t]*)([^\s#]*)", re.MULTILINE)
WordsAtLine = tuple[list[ShellWord], int]  # a command, and the index of its Python file
LONG = {"-N": "--nodes", "-n": "--ntasks", "-np": "--ntasks", "--nnode": "--nnodes"}


@dataclass(frozen=True)
class MegatronTrainingCommand:
    """Training command that a launch script starts: the program, its arguments, machines and ranks.

    Attributes:
        program: the Python file it starts, or empty for a bare list of arguments.
        arguments: the words after it.
        nodes, per_node: number of machines and ranks per machine, None if unknown.
        remarks: (line, sentence) of warnings.
        file: function that returns a file that the script wrote, or that is in its folder, by name.
    """

    program: str
    arguments: list[ShellWord]
    nodes: int | None
    per_node: int | None
    remarks: list[tuple[int, str]]
    file: Callable[[str], str | None]

    @property
    def world_size(self) -> int | None:
        """Total number of ranks that the command starts; None if it is unknown."""
        return self.nodes * self.per_node if self.nodes and self.per_node else None


def find_training_command(
    text: str, *, path: Path | None = None, define: Mapping[str, str] = NOTHING, arguments: Sequence[str] = ()
) -> MegatronTrainingCommand:
    """Return the training command that a launch script starts, or one from a bare list of Megatron arguments.
    The script is interpreted, not executed.

    Args:
        path: path of the script; files that it sources are read from its folder.
        define: variables that override assignments of the script.
        arguments: arguments of the script: `$1`, `$2`, ...

    Raises:
        ConfigError: if there is none, or it trains an unsupported kind of model.
    """
    script = interpret_shell_script(
        text, path=path, environment=_slurm_variables(_batch_options(text)), define=define, arguments=arguments or None
    )
    batch = _batch_options(*script.texts)
    commands = [(command, at) for command in script.commands if (at := _program_index(command)) is not None]
    modelled = [found for found in commands if _has_model(found[0][found[1] + 1 :])]
    if not modelled:
        return _bare_arguments(script, batch, commands)
    command, at = _choose_command(modelled)
    remarks = [
        (other[i].line, f"another training command, {format_unknown_placeholders(other[i].text)}, was not read")
        for other, i in commands
        if other is not command and _is_training_program(other, i)
    ]
    if not _is_training_program(command, at):
        remarks.append(
            (
                command[at].line,
                f"{format_unknown_placeholders(command[at].text)} may not be a training program; its arguments were read",
            )
        )
    nodes, per_node = _count_ranks(command[:at], batch)
    found = [*script.remarks, *dict.fromkeys(remarks)]
    return MegatronTrainingCommand(
        _name(command[at]), _split_joined_arguments(command[at + 1 :]), nodes, per_node, found, script.read_file
    )


def _choose_command(commands: Sequence[WordsAtLine]) -> WordsAtLine:
    """Return the first command that trains a plain decoder, BERT or T5; else the first related one."""
    plain = [(command, at) for command, at in commands if not _trains_other_model(_name(command[at]))]
    if not plain:
        command, at = commands[0]
        raise ConfigError(
            f"line {command[at].line}: {_name(command[at])} is not supported: it does not train a decoder, BERT or T5",
            hint="supported programs are pretrain_gpt.py, pretrain_bert.py and pretrain_t5.py",
        )
    return next((found for found in plain if _is_training_program(*found)), plain[0])


def _trains_other_model(program: str) -> bool:
    """Return whether a program trains a model that mega does not support."""
    return program not in (BERT, T5) and OTHER_MODELS.search(program) is not None


def _bare_arguments(
    script: ShellScriptResult, batch: dict[str, str], commands: Sequence[WordsAtLine]
) -> MegatronTrainingCommand:
    """Return arguments without a command: lines of them, or variables that hold them."""
    lines = [word for words in script.commands if words[0].text.startswith("--") for word in words]
    words = lines or _variable_arguments(script)
    if not lines and not _has_model(words):
        raise _nothing_trained([found for found in commands if _is_training_program(*found)], script)
    launcher = _launcher_arrays(script)
    nodes, per_node = _count_ranks(launcher, batch) if len(launcher) > 1 else (None, None)
    return MegatronTrainingCommand("", words, nodes, per_node, script.remarks, script.read_file)


def _name(program: ShellWord) -> str:
    return PurePosixPath(format_unknown_placeholders(program.text)).name


def _nothing_trained(training: Sequence[WordsAtLine], script: ShellScriptResult) -> ConfigError:
    unread = [
        sentence for _, sentence in script.remarks if sentence.startswith(("the file of", "the script was followed"))
    ]
    if not training:
        return ConfigError(
            "the launch script has no training command of Megatron-LM"
            + "".join(f"; {sentence}" for sentence in unread),
            hint="give a script with a command such as `torchrun ... pretrain_gpt.py --num-layers ...`, or a file with its arguments",
        )
    command, at = training[0]
    marks = dict.fromkeys(
        format_unknown_placeholders(word.text) for word in command[at + 1 :] if MARK.fullmatch(word.text)
    )
    return ConfigError(
        f"line {command[at].line}: {format_unknown_placeholders(command[at].text)} requires flags that set a model, such as --num-layers"
        + "".join(f"; {sentence}" for sentence in unread)
        + (f"; unknown: {', '.join(marks)}" if marks else ""),
        hint="set variables of the script with --define NAME=VALUE, and give its arguments after `--`; settings of another trainer"
        " are read by --from-deepspeed or --from-hf-args",
    )


def _batch_options(*texts: str) -> dict[str, str]:
    """Return the `#SBATCH` options of scripts."""
    return {_long(key): value for text in texts for key, value in SBATCH.findall(text)}


def _long(option: str) -> str:
    return LONG.get(option, option if not option.startswith("--") else option.replace("_", "-"))


def _program_index(command: Sequence[ShellWord]) -> int | None:
    """Return the index of the Python file in a command, or of its placeholder."""
    if command[0].text.startswith("--"):
        return None  # a list of arguments
    files = [at for at, word in enumerate(command) if word.text.endswith(".py")]
    if files:
        return next((at for at in files if TRAINING.search(PurePosixPath(command[at].text).name)), files[0])
    model = next((at for at, word in enumerate(command) if _has_model([word])), None)
    if model is None:
        return None
    words = [word.text for word in command[:model]]
    modules = [at for at in range(1, model) if words[at - 1] == "-m" and not words[at].startswith("torch.")]
    free = [at for at in range(1, model) if not words[at].startswith("-") and not words[at - 1].startswith("-")]
    candidates = [at for at in free if not STARTING.fullmatch(words[at])] or [
        at for at in range(1, model) if MARK.search(words[at])
    ]
    following = [at for at in candidates if at + 1 not in candidates]  # the last of adjacent words
    return next(iter(modules or following), None)


def _is_training_program(command: Sequence[ShellWord], at: int) -> bool:
    """Return whether a command's Python file trains, by its name or its arguments."""
    named = MARK.search(command[at].text) or re.search("train|finetune|sft", _name(command[at]))
    return named is not None or any(_long(word.text) == "--micro-batch-size" for word in command)


def _has_model(words: Sequence[ShellWord]) -> bool:
    """Return whether arguments describe a model."""
    return any(MODEL.fullmatch(_long(word.text.partition("=")[0])) for word in _split_joined_arguments(words))


def _split_joined_arguments(words: Sequence[ShellWord]) -> list[ShellWord]:
    """Return arguments of which some may be joined in one text, split if the script splits them."""
    return [
        ShellWord(part, word.line)
        for word in words
        for part in (
            split_on_blanks(word.text.strip()) if re.match(r"\s*--[\w-]+\s", MARK.sub("", word.text)) else [word.text]
        )
    ]


def _variable_arguments(script: ShellScriptResult) -> list[ShellWord]:
    """Return the arguments in variables, without variables that are contained in others."""
    arrays = [words for words in _argument_arrays(script) if not _has_launcher_flags(words)]
    texts = [" ".join(word.text for word in words) for words in arrays]
    return [
        word
        for words, text in zip(arrays, texts, strict=True)
        if not any(text in other and len(text) < len(other) for other in texts)
        for word in words
    ]


def _launcher_arrays(script: ShellScriptResult) -> list[ShellWord]:
    return [
        ShellWord("torchrun", 0),
        *(word for words in _argument_arrays(script) if _has_launcher_flags(words) for word in words),
    ]


def _has_launcher_flags(words: Sequence[ShellWord]) -> bool:
    return all(LAUNCHER.fullmatch(_long(w.text.partition("=")[0])) for w in words if w.text.startswith("--"))


def _argument_arrays(script: ShellScriptResult) -> list[list[ShellWord]]:
    """Return the variables that hold arguments."""
    values = [_split_joined_arguments(list(value.values())) for value in script.variables.values()]
    return [words for words in values if words and words[0].text.startswith("--")]


def _slurm_variables(batch: dict[str, str]) -> dict[str, str]:
    """Return the variables that Slurm sets for a job with these options."""
    variables: dict[str, str] = {}
    if (nodes := batch.get("--nodes", "")).isdigit():
        variables |= {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes}
    if (tasks := batch.get("--ntasks-per-node", "")).isdigit():
        variables |= {"SLURM_NTASKS_PER_NODE": tasks}
    gpus = batch.get("--gpus-per-node") or batch.get("--gres", "")
    if (count := gpus.rpartition(":")[2]).isdigit():
        variables |= {"SLURM_GPUS_PER_NODE": count, "SLURM_GPUS_ON_NODE": count}
    return variables


def _count_ranks(launcher: Sequence[ShellWord], batch: dict[str, str]) -> tuple[int | None, int | None]:
    """Return the number of nodes and of ranks on each."""
    options: dict[str, str] = {}
    for word, following in pairwise([*launcher, ShellWord("", 0)]):
        key, equals, value = word.text.partition("=")
        options[_long(key)] = value if equals else following.text
    names = {PurePosixPath(word.text).name for word in launcher}
    if names & {"torchrun", "accelerate"} or "torch.distributed" in " ".join(options):
        nodes, per_node = options.get("--nnodes", "1"), options.get("--nproc-per-node", "1")
    elif "deepspeed" in names:
        nodes, per_node = options.get("--num-nodes", ""), options.get("--num-gpus", "")
    elif "srun" in names:
        options = batch | options
        nodes, per_node = options.get("--nodes", "1"), options.get("--ntasks-per-node", "1")
        if "--ntasks" in options and "--ntasks-per-node" not in options:
            nodes, per_node = "1", options["--ntasks"]
    elif names & {"mpirun", "mpiexec"}:
        nodes, per_node = "1", options.get("--ntasks", "")
    else:
        return 1, 1
    return (int(nodes) if nodes.isdigit() else None), (int(per_node) if per_node.isdigit() else None)
