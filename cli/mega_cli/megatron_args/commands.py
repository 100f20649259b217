"""What the commands of a script do to the reading of it: builtins, functions, and scripts that are given to a command."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from mega_cli.megatron_args.conditions import Operand, Truth
from mega_cli.megatron_args.globs import quoted
from mega_cli.megatron_args.output import COMMANDS, output_of
from mega_cli.megatron_args.shell import MARK, Word, shown

if TYPE_CHECKING:
    from tree_sitter import Node

    from mega_cli.megatron_args.script import Reader

SHELL = re.compile(r"(?:.*/)?(?:ba|z|da|k)?sh")
SCRIPT = re.compile(r".*\.(?:sh|bash|slurm|sbatch|job|batch|pbs)")
SURROUNDINGS = re.compile(r".*(?:activate|bashrc|profile|setvars\.sh|set_env\.sh|(?:conda|modules|lmod)\.sh|/init/\w+)")
TRANSPARENT = frozenset({"command", "builtin", "exec", "time", "nohup"})
HANDLING = frozenset(
    {"chmod", "cp", "mv", "rm", "ls", "scp", "rsync", "touch", "dos2unix", "grep", "git", "chown", "ln"}
)


class Leave(Exception):
    """The script leaves a loop, a function or itself: `break`, `continue`, `return` or `exit`."""


class Given(NamedTuple):
    """A script that a command is given: the command's other words, its text and its own arguments."""

    launcher: list[Word]
    text: str
    arguments: list[Word]


def run_command(reader: Reader, words: list[Word], node: Node) -> Truth:
    """Follow a command, which is not empty."""
    words = list(words)
    while len(words) > 1 and words[0].text in TRANSPARENT and not words[1].text.startswith("-"):
        del words[0]
    name, arguments = words[0].text, [word.text for word in words[1:]]
    if name in reader.functions:
        return reader.call(name, words[1:])
    if name in BUILTINS:
        return BUILTINS[name](reader, words, node)
    if name in COMMANDS:
        reader.printed.append(output_of(name, *_files_read(reader, name, arguments)))
        return name != "false"
    reader.printed.append(None)
    given = _given_script(reader, words)
    if given is None:
        reader.script.commands.append([*reader.launcher, *words])
        return None
    before = dict(reader.words.variables), reader.launcher, reader.entered
    reader.launcher, reader.entered = [*reader.launcher, *given.launcher], None
    try:
        return reader.read(given.text, words[0].line, given.arguments)
    finally:
        reader.words.variables, reader.launcher, reader.entered = before


def _files_read(reader: Reader, name: str, arguments: list[str]) -> tuple[list[str], str | None]:
    """The arguments without the files that the command reads, and what it reads."""
    named = 0 if name == "cat" else 1
    files = [reader.script.file(argument) for argument in arguments[named:]]
    if name not in ("cat", "sed") or not files or None in files:
        return arguments, reader.entered
    reader.words.budget.spend(sum(len(file or "") for file in files))
    return arguments[:named], "".join(filter(None, files))


def _given_script(reader: Reader, words: list[Word]) -> Given | None:
    """The script that a command runs in a shell: `bash -c`, `bash file`, `sbatch`, `ssh host`."""
    for at, word in enumerate(() if words[0].text in HANDLING else words):
        if SHELL.fullmatch(word.text):
            return _of_shell(reader, words, at)
        if word.text in ("--wrap", "-c") and at + 1 < len(words) and words[0].text in ("sbatch", "su"):
            return Given(words[:at], words[at + 1].text, [])
        if word.text.startswith("--wrap="):
            return Given(words[:at], word.text.partition("=")[2], [])
        if (at == 0 or SCRIPT.fullmatch(word.text)) and (text := reader.script.file(word.text)) is not None:
            return Given(words[:at], text, words[at + 1 :])
        if word.text.endswith(".py"):
            return None
        if re.search(r"\s", bare := MARK.sub("", word.text)) and re.search(r"\.py\b|\.sh\b", bare):
            return Given(words[:at], word.text, [])
    entered = reader.entered is not None and words[0].text in ("sbatch", "qsub", "bsub", "ssh", "srun", "docker")
    return Given(words, reader.entered or "", []) if entered else None


def _of_shell(reader: Reader, words: list[Word], at: int) -> Given | None:
    """The script of `bash ...`, which stands at a place of a command."""
    following = at + 1
    while following < len(words) and re.match(r"[-+]\w", words[following].text):
        if re.fullmatch(r"-\w*c", words[following].text) and following + 1 < len(words):
            return Given(words[:at], words[following + 1].text, words[following + 3 :])
        following += 2 if words[following].text in ("-o", "+o", "-O") else 1
    if following == len(words) or words[following].text == "-":
        return None if reader.entered is None else Given(words[:at], reader.entered, [])
    text = reader.script.file(words[following].text)
    return None if text is None else Given(words[:at], text, words[following + 1 :])


# Builtins.


def _eval(reader: Reader, words: list[Word], node: Node) -> Truth:
    return reader.read(" ".join(word.text for word in words[1:]), words[0].line)


def _source(reader: Reader, words: list[Word], node: Node) -> Truth:
    name = words[1].text if len(words) > 1 else ""
    text = reader.script.file(name)
    if text is None:
        if not SURROUNDINGS.fullmatch(name):
            reader.remark(node, f"the file of `{shown(' '.join(word.text for word in words))}` was not read")
        return None
    return reader.read(text, words[0].line, words[2:] or None)


def _set(reader: Reader, words: list[Word], node: Node) -> Truth:
    texts = [word.text for word in words]
    if "--" in texts:
        reader.words.positional = words[texts.index("--") + 1 :]
    return True


def _shift(reader: Reader, words: list[Word], node: Node) -> Truth:
    count = int(words[1].text) if len(words) > 1 and words[1].text.isdigit() else 1
    enough = len(reader.words.positional or []) >= count
    if reader.words.positional is not None and enough:
        reader.words.positional = reader.words.positional[count:]
    return enough


def _leave(reader: Reader, words: list[Word], node: Node) -> Truth:
    """`exit` in a branch is left out, for it is there for calls that lack something, as ours does."""
    name = words[0].text
    if name != "exit" or (node.parent is not None and node.parent.type == "program"):
        raise Leave(name)
    return None


def _read(reader: Reader, words: list[Word], node: Node) -> Truth:
    names = [word.text for word in words[1:] if word.text.isidentifier()]
    array = any(re.fullmatch("-[a-z]*a", word.text) for word in words)
    line, entered = words[0].line, reader.entered
    if entered is None:
        for name in names:
            reader.words.set_number(name, None)
        return None
    first, _, reader.entered = entered.partition("\n")
    fields = reader.words.split(first)
    if array:
        reader.words.set(names[-1], {str(i): Word(field, line) for i, field in enumerate(fields)})
        return bool(entered)
    for at, name in enumerate(names):
        rest = fields[at:] if at + 1 == len(names) else fields[at : at + 1]
        if len(rest) > 1 and not _blank_separated(reader):
            reader.words.set_number(name, None)
        else:
            reader.words.set_text(name, " ".join(rest), line)
    return bool(entered)


def _blank_separated(reader: Reader) -> bool:
    return not reader.words.variables.get("IFS")


def _mapfile(reader: Reader, words: list[Word], node: Node) -> Truth:
    name, line = words[-1].text, words[0].line
    if reader.entered is None:
        reader.words.set_number(name, None)
    else:
        rows = reader.entered.splitlines()
        reader.words.set(name, {str(at): Word(row, line) for at, row in enumerate(rows)})
    return True


def _let(reader: Reader, words: list[Word], node: Node) -> Truth:
    value: int | None = None
    for word in words[1:]:
        value = reader.calculate(word.text)
    return None if value is None else value != 0


def _printf(reader: Reader, words: list[Word], node: Node) -> Truth:
    texts = [word.text for word in words[1:]]
    if texts[:1] != ["-v"] or len(texts) < 3:
        reader.printed.append(output_of("printf", texts, None))
        return True
    output = output_of("printf", texts[2:], None)
    if output is None:
        reader.words.set_number(texts[1], None)
    else:
        reader.words.set_text(texts[1], output, words[0].line)
    return True


def _tee(reader: Reader, words: list[Word], node: Node) -> Truth:
    if reader.entered is not None:
        for word in words[1:]:
            if not word.text.startswith("-"):
                reader.script.write(word.text, reader.entered)
    reader.printed.append(reader.entered)
    return True


def _test(reader: Reader, words: list[Word], node: Node) -> Truth:
    return reader.holds([Operand(word.text, quoted(word.text)) for word in words[1:]], node)


def _getopts(reader: Reader, words: list[Word], node: Node) -> Truth:
    """Options of the script; there are none if it is not given any arguments."""
    if not reader.words.positional:
        return False
    for name in (words[-1].text, "OPTARG"):
        reader.words.set_number(name, None)
    return None


Builtin = Callable[["Reader", list[Word], "Node"], Truth]
BUILTINS: dict[str, Builtin] = {
    "eval": _eval, "source": _source, ".": _source, "set": _set, "shift": _shift, "exit": _leave, "return": _leave,
    "break": _leave, "continue": _leave, "read": _read, "mapfile": _mapfile, "readarray": _mapfile, "let": _let,
    "printf": _printf, "tee": _tee, "test": _test, "getopts": _getopts,
}  # fmt: skip
