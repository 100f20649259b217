"""Parsing of a training command's words into settings."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from mega_cli.megatron_args.flag_tables import CommandSettings, FlagSpec, GivenFlag
from mega_cli.megatron_args.shell_words import MARK, ShellWord, format_unknown_marks


def parse_command_arguments(
    words: Sequence[ShellWord], table: Iterable[FlagSpec], *, strict: bool = False
) -> CommandSettings:
    """Parse the arguments of a Megatron training command with the flags of `table`. Problems are not raised here, but
    by `CommandSettings.raise_problems`.
    """
    table, words = list(table), _join_placeholders(words)
    spellings = {name: flag for flag in table for name in (flag.name, *flag.aliases)}
    arguments = CommandSettings({flag.dest: flag for flag in reversed(table) if not flag.means}, strict)
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if not word.text.startswith("--") or MARK.match(word.text, 2):
            _record_non_flag(word, arguments)
            continue
        spelling, equals, attached = word.text.partition("=")
        flag = spellings.get(spelling) or spellings.get(spelling.replace("_", "-"))
        most = flag.max_values if flag else float("inf")
        values = [attached] if equals else []
        while at < len(words) and len(values) < most and not words[at].text.startswith("--"):
            values.append(words[at].text)
            at += 1
        if flag is None or (strict and flag.fork):
            _parse_unknown_flag(
                spelling, values, word.line, [name for name in spellings if not spellings[name].fork], arguments
            )
            continue
        if spelling not in spellings:
            arguments.respelled.add(spelling)
        for given in _to_megatron_flag(flag, spelling, tuple(values), word.line, spellings):
            if equals and not flag.max_values:
                arguments.add_megatron_problem(word.line, str(given), "takes no value", "")
            arguments.add_flag(given)
    return arguments


def _join_placeholders(words: Sequence[ShellWord]) -> list[ShellWord]:
    """Return the words; the words of a placeholder such as `<path to data>` are joined."""
    found: list[ShellWord] = []
    for word in words:
        if found and found[-1].text.count("<") > found[-1].text.count(">") and not word.text.startswith("--"):
            found[-1] = ShellWord(f"{found[-1].text} {word.text}", found[-1].line)
        else:
            found.append(word)
    return found


def _text(spelling: str, values: Sequence[str]) -> str:
    return " ".join([format_unknown_marks(spelling), *(format_unknown_marks(value) or "''" for value in values)])


def _to_megatron_flag(
    flag: FlagSpec, spelling: str, values: tuple[str, ...], line: int, spellings: Mapping[str, FlagSpec]
) -> Iterator[GivenFlag]:
    """Return a fork's flag as Megatron-LM's own flag."""
    text = _text(spelling, values)
    if not flag.means:
        on = flag.takes == "on" or (flag.takes == "switch" and not spelling.startswith("--no-"))
        yield GivenFlag(flag, on, values, text, line)
        return
    for part in flag.means.split("--")[1:]:
        name, *meant = part.split()
        own = spellings[f"--{name}"]
        filled = tuple(value for word in meant for value in (values if word == "{}" else (word,)))
        yield GivenFlag(own, own.takes == "on", filled, text, line)


def _parse_unknown_flag(
    spelling: str, values: Sequence[str], line: int, spellings: Sequence[str], arguments: CommandSettings
) -> None:
    """Parse a flag that no table has; the words up to the next flag count as its values."""
    near = difflib.get_close_matches(spelling.replace("_", "-"), spellings, n=1, cutoff=0.85)
    hint = f"did you mean {near[0]}?" if near else ""
    if arguments.strict:
        arguments.add_megatron_problem(line, format_unknown_marks(spelling), "is not a flag of Megatron-LM", hint)
    else:
        flag = FlagSpec(spelling, (), hint, "*" if values else "on", "str" if values else "", "", {})
        arguments.others.append(GivenFlag(flag, True, tuple(values), _text(spelling, values), line))


def _record_non_flag(word: ShellWord, arguments: CommandSettings) -> None:
    if MARK.search(word.text):
        arguments.unread.append(format_unknown_marks(word.text))
        text = f"the value of {format_unknown_marks(word.text)} is unknown: flags that it may contain were not read"
        arguments.remarks.append((word.line, text))
    else:
        hint = 'if it is part of the value before it, quote the array: "${ARGS[@]}"'
        arguments.add_megatron_problem(word.line, format_unknown_marks(word.text), "is not a flag", hint)
