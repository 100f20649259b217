"""Shell commands that change how the script continues: builtins, functions, and scripts passed to a command."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from tree_sitter import Node

from mega_cli.megatron_args.conditions import KnownTruth, ShellConditionOperand
from mega_cli.megatron_args.script_state import ShellControlFlowException, ShellInterpreter
from mega_cli.megatron_args.shell_patterns import escape_shell_pattern
from mega_cli.megatron_args.shell_words import MARK, ShellWord, format_unknown_placeholders
from mega_cli.megatron_args.syntax_tree import get_node_source_text, stdout_redirection
from mega_cli.megatron_args.text_tools import COMMANDS, simulate_shell_command_output

SHELL = re.compile(r"(?:.*/)?(?:ba|z|da|k)?sh")
SCRIPT = re.compile(r".*\.(?:sh|bash|slurm|sbatch|job|batch|pbs)")
SURROUNDINGS = re.compile(r".*(?:activate|bashrc|profile|setvars\.sh|set_env\.sh|(?:conda|modules|lmod)\.sh|/init/\w+)")
READING = frozenset({"cat", "sed", "awk", "head", "tail", "cut"})  # commands whose last arguments are files
TRANSPARENT = frozenset({"command", "builtin", "exec", "time", "nohup"})
HANDLING = frozenset(
    {"chmod", "cp", "mv", "rm", "ls", "scp", "rsync", "touch", "dos2unix", "grep", "git", "chown", "ln"}
)


class NestedScript(NamedTuple):
    """Script passed to a command such as `bash -c` or `sbatch`.
    It has the command's other words, and the script's text and arguments.
    """

    launcher: list[ShellWord]
    text: str
    arguments: list[ShellWord]


def interpret_shell_command(reader: ShellInterpreter, words: list[ShellWord], node: Node) -> KnownTruth:
    """Interpret a shell command given as expanded words; return whether it succeeds, or None if unknown.
    It is a function, a builtin, a simulated tool or a nested script; others are recorded as started.
    """
    words = list(words)
    while len(words) > 1 and words[0].text in TRANSPARENT and not words[1].text.startswith("-"):
        del words[0]
    name, arguments = words[0].text, [word.text for word in words[1:]]
    if name in reader.functions:
        return reader.interpret_function_call(name, words[1:])
    if name in BUILTINS:
        return BUILTINS[name](reader, words, node)
    if name in COMMANDS:
        output = simulate_shell_command_output(name, *_split_read_files(reader, name, arguments))
        reader.words.budget.spend_characters(len(output or ""))
        reader.printed.append(output)
        return name != "false"
    reader.printed.append(None)
    nested = _find_nested_script(reader, words)
    if nested is None:
        reader.script.commands.append([*reader.launcher, *words])
        return None
    before = dict(reader.words.variables), reader.launcher, reader.entered
    reader.launcher, reader.entered = [*reader.launcher, *nested.launcher], None
    try:
        return reader.interpret_source(nested.text, words[0].line, nested.arguments)
    finally:
        reader.words.variables, reader.launcher, reader.entered = before


def _split_read_files(reader: ShellInterpreter, name: str, arguments: list[str]) -> tuple[list[str], str | None]:
    """Return the arguments without the files that the command reads, and the content of those."""
    first = 0 if name == "cat" else max(1, len(arguments) - 1)
    files = [reader.script.read_file(argument) for argument in arguments[first:]]
    if name not in READING or not files or None in files:
        return arguments, reader.entered
    reader.words.budget.spend_characters(sum(len(file or "") for file in files))
    return arguments[:first], "".join(filter(None, files))


def _find_nested_script(reader: ShellInterpreter, words: list[ShellWord]) -> NestedScript | None:
    """Return the script that a command runs in a shell: `bash -c`, `bash file`, `sbatch`, `ssh host`."""
    for at, word in enumerate(() if words[0].text in HANDLING else words):
        if SHELL.fullmatch(word.text):
            return _parse_shell_call(reader, words, at)
        if word.text in ("--wrap", "-c") and at + 1 < len(words) and words[0].text in ("sbatch", "su"):
            return NestedScript(words[:at], words[at + 1].text, [])
        if word.text.startswith("--wrap="):
            return NestedScript(words[:at], word.text.partition("=")[2], [])
        if (at == 0 or SCRIPT.fullmatch(word.text)) and (text := reader.script.read_file(word.text)) is not None:
            return NestedScript(words[:at], text, words[at + 1 :])
        if word.text.endswith(".py"):
            return None
        if re.search(r"\s", bare := MARK.sub("", word.text)) and re.search(r"\.py\b|\.sh\b", bare):
            return NestedScript(words[:at], word.text, [])
    entered = reader.entered is not None and words[0].text in ("sbatch", "qsub", "bsub", "ssh", "srun", "docker")
    return NestedScript(words, reader.entered or "", []) if entered else None


def _parse_shell_call(reader: ShellInterpreter, words: list[ShellWord], at: int) -> NestedScript | None:
    """Return the script of a `bash ...` at a position of a command."""
    following = at + 1
    while following < len(words) and re.match(r"[-+]\w", words[following].text):
        if re.fullmatch(r"-\w*c", words[following].text) and following + 1 < len(words):
            return NestedScript(words[:at], words[following + 1].text, words[following + 3 :])
        following += 2 if words[following].text in ("-o", "+o", "-O") else 1
    if following == len(words) or words[following].text == "-":
        return None if reader.entered is None else NestedScript(words[:at], reader.entered, [])
    text = reader.script.read_file(words[following].text)
    return None if text is None else NestedScript(words[:at], text, words[following + 1 :])


# Builtins.


def _eval(reader: ShellInterpreter, words: list[ShellWord], node: Node) -> KnownTruth:
    return reader.interpret_source(" ".join(word.text for word in words[1:]), words[0].line)


def _source(reader: ShellInterpreter, words: list[ShellWord], node: Node) -> KnownTruth:
    name = words[1].text if len(words) > 1 else ""
    text = reader.script.read_file(name)
    if text is None:
        if not SURROUNDINGS.fullmatch(name):
            reader.add_remark(
                node, f"the file of `{format_unknown_placeholders(' '.join(word.text for word in words))}` was not read"
            )
        return None
    return reader.interpret_source(text, words[0].line, words[2:] or None)


def _set(reader: ShellInterpreter, words: list[ShellWord], node: Node) -> KnownTruth:
    texts = [word.text for word in words]
    if "--" in texts:
        reader.words.positional = words[texts.index("--") + 1 :]
    return True


def _shift(reader: ShellInterpreter, words: list[ShellWord], node: Node) -> KnownTruth:
    count = int(words[1].text) if len(words) > 1 and words[1].text.isdigit() else 1
    enough = len(reader.words.positional or []) >= count
    if reader.words.positional is not None and enough:
        reader.words.positional = reader.words.positional[count:]
    return enough


def _follow_exit(reader: ShellInterpreter, words: list[ShellWord], node: Node) -> KnownTruth:
    """Ignore `exit` in a branch, which handles missing arguments; elsewhere it ends the script."""
    name = words[0].text
    if name != "exit" or (node.parent is not None and node.parent.type == "program"):
        raise ShellControlFlowException(name)
    return None


def _read(reader: ShellInterpreter, words: list[ShellWord], node: Node) -> KnownTruth:
    names = [word.text for word in words[1:] if word.text.isidentifier()]
    array = any(re.fullmatch("-[a-z]*a", word.text) for word in words)
    line, entered = words[0].line, reader.entered
    if entered is None:
        for name in names:
            reader.words.assign_number(name, None)
        return None
    first, _, reader.entered = entered.partition("\n")
    fields = reader.words.split_words(first)
    if array:
        reader.words.set_variable(names[-1], {str(i): ShellWord(field, line) for i, field in enumerate(fields)})
        return bool(entered)
    for at, name in enumerate(names):
        rest = fields[at:] if at + 1 == len(names) else fields[at : at + 1]
        if len(rest) > 1 and not _blank_separated(reader):
            reader.words.assign_number(name, None)
        else:
            reader.words.set_text_variable(name, " ".join(rest), line)
    return bool(entered)


def _blank_separated(reader: ShellInterpreter) -> bool:
    return not reader.words.variables.get("IFS")


def _mapfile(reader: ShellInterpreter, words: list[ShellWord], node: Node) -> KnownTruth:
    name, line = words[-1].text, words[0].line
    if reader.entered is None:
        reader.words.assign_number(name, None)
    else:
        rows = reader.entered.splitlines()
        reader.words.set_variable(name, {str(at): ShellWord(row, line) for at, row in enumerate(rows)})
    return True


def _let(reader: ShellInterpreter, words: list[ShellWord], node: Node) -> KnownTruth:
    value: int | None = None
    for word in words[1:]:
        value = reader.evaluate_arithmetic_expression(word.text)
    return None if value is None else value != 0


def _printf(reader: ShellInterpreter, words: list[ShellWord], node: Node) -> KnownTruth:
    texts = [word.text for word in words[1:]]
    if texts[:1] != ["-v"] or len(texts) < 3:
        reader.printed.append(simulate_shell_command_output("printf", texts, None))
        return True
    output = simulate_shell_command_output("printf", texts[2:], None)
    if output is None:
        reader.words.assign_number(texts[1], None)
    else:
        reader.words.set_text_variable(texts[1], output, words[0].line)
    return True


def _tee(reader: ShellInterpreter, words: list[ShellWord], node: Node) -> KnownTruth:
    if reader.entered is not None:
        for word in words[1:]:
            if not word.text.startswith("-"):
                reader.script.record_written_file(word.text, reader.entered)
    reader.printed.append(reader.entered)
    return True


def _test(reader: ShellInterpreter, words: list[ShellWord], node: Node) -> KnownTruth:
    return reader.evaluate_condition(
        [ShellConditionOperand(word.text, escape_shell_pattern(word.text)) for word in words[1:]], node
    )


def _getopts(reader: ShellInterpreter, words: list[ShellWord], node: Node) -> KnownTruth:
    """Follow `getopts`; a script without arguments has no options."""
    if not reader.words.positional:
        return False
    for name in (words[-1].text, "OPTARG"):
        reader.words.assign_number(name, None)
    return None


Builtin = Callable[[ShellInterpreter, list[ShellWord], Node], KnownTruth]
BUILTINS: dict[str, Builtin] = {
    "eval": _eval, "source": _source, ".": _source, "set": _set, "shift": _shift, "exit": _follow_exit, "return": _follow_exit,
    "break": _follow_exit, "continue": _follow_exit, "read": _read, "mapfile": _mapfile, "readarray": _mapfile, "let": _let,
    "printf": _printf, "tee": _tee, "test": _test, "getopts": _getopts,
}  # fmt: skip


def interpret_redirection(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Interpret a shell command with redirected input or output; return whether it succeeds, or None if unknown.
    Redirections are `command < file > file` or `command <<EOF`. Known output to a file is recorded, not written.
    """
    body, before = node.child_by_field_name("body"), reader.entered
    redirects = [child for child in node.named_children if child.type.endswith("_redirect")]
    heredocs = [child for child in redirects if child.type == "heredoc_redirect"]
    redirects += [inner for child in heredocs for inner in child.children_by_field_name("redirect")]
    further = [inner for child in heredocs for inner in child.named_children if inner.type == "pipeline"]
    after = [inner for child in heredocs for inner in child.children_by_field_name("right")]
    for redirect in redirects:
        read_redirected_input(reader, redirect)
    writing = next(filter(None, map(stdout_redirection, redirects)), None)
    try:
        if body is None:
            return True
        if writing is None and not further:
            return reader.interpret_statements([body, *after])
        text, status = reader.capture_output(lambda: reader.interpret_shell_statement(body))
        if writing is not None and text is not None:
            name = reader.words.expand_to_text(writing.named_children[-1])
            reader.script.record_written_file(name, text, append=writing.children[0].type == ">>")
        reader.entered = text
        return reader.interpret_statements([*further, *after]) if further or after else status
    finally:
        reader.entered = before


def read_redirected_input(reader: ShellInterpreter, redirect: Node) -> None:
    """Set the interpreted script's standard input to the text of a redirection.
    The redirection is `< file`, a here-document or a here-string.
    """
    if redirect.type == "herestring_redirect":
        reader.entered = reader.words.expand_to_text(redirect.named_children[-1]) + "\n"
    elif redirect.type == "heredoc_redirect":
        body = next((child for child in redirect.named_children if child.type == "heredoc_body"), None)
        start = next(get_node_source_text(child) for child in redirect.named_children if child.type == "heredoc_start")
        literal = re.search(r"[\"'\\]", start)
        text = "" if body is None else reader.words.expand_heredoc(body, literal=literal is not None)
        reader.entered = re.sub(r"(?m)^\t+", "", text) if redirect.children[0].type == "<<-" else text
    elif redirect.children[0].type == "<":
        reader.entered = reader.script.read_file(reader.words.expand_to_text(redirect.named_children[-1]))
