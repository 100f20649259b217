"""Megatron-LM's flags as a table, and the arguments of a command read with it."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from mega_cli.megatron_args.shell import MARK, Word, shown
from mega_common.config import Problem, raise_problems

SOURCE = "the launch script"


@dataclass(frozen=True)
class Flag:
    """One flag of Megatron-LM's `pretrain_gpt.py`, a line of `flags.csv`.

    Attributes:
        name, aliases: its spellings.
        dest: the setting it gives.
        takes: how many values: `1`, `3`, `+`, `*`; or `on`, `off`, `switch` for a flag without one (`switch` is on
            as `--x` and off as `--no-x`).
        type: of its values: `int`, `float`, `str`.
        default: what the setting is without the flag, as text; empty for none.
        choices: what its values may be; empty for anything.
    """

    name: str
    aliases: tuple[str, ...]
    dest: str
    takes: str
    type: str
    default: str
    choices: tuple[str, ...]

    @property
    def many(self) -> bool:
        """Whether the setting is a list."""
        return self.takes in ("3", "+", "*")

    def convert(self, text: str) -> Any:
        """A value as its type.

        Raises:
            ValueError: when it is none.
        """
        return int(text) if self.type == "int" else float(text) if self.type == "float" else text

    def default_value(self) -> Any:
        """The setting's value when the flag is not given."""
        if not self.type:
            return self.takes == "off"
        if not self.default:
            return [] if self.many else None
        return [self.convert(self.default)] if self.many else self.convert(self.default)


def load_flags() -> list[Flag]:
    """The table."""
    text = (files("mega_cli.megatron_args") / "flags.csv").read_text(encoding="utf-8")
    return [
        Flag(
            row["flag"], tuple(row["aliases"].split()), row["dest"], row["takes"], row["type"], row["default"],
            tuple(filter(None, row["choices"].split("|"))),
        )
        for row in csv.DictReader(text.splitlines())
    ]  # fmt: skip


@dataclass(frozen=True)
class Given:
    """A flag as a command gives it: the table's entry, its spelling there, its values with marks, its line."""

    flag: Flag
    spelling: str
    values: tuple[str, ...]
    line: int

    def __str__(self) -> str:
        return " ".join([self.spelling, *(shown(value) or "''" for value in self.values)])

    @property
    def unset(self) -> list[str]:
        """Names of the parameters in its values that the script does not set."""
        return [name for value in self.values for name in MARK.findall(value)]

    def value(self) -> Any:
        """The setting's value.

        Raises:
            ValueError: when it is not of the flag's type.
        """
        if not self.flag.type:
            return self.flag.takes == "on" or (self.flag.takes == "switch" and not self.spelling.startswith("--no-"))
        converted = [self.flag.convert(value) for value in self.values]
        return converted if self.flag.many else converted[0]


@dataclass
class Arguments:
    """The settings of a command: `arguments[dest]` is what it gives, or Megatron's default.

    Attributes:
        given: by setting, the flag that counts, which is the last one.
        problems: what cannot be understood; told together by `check`.
        remarks: (line, sentence) for the user to know.
    """

    flags: Mapping[str, Flag]
    given: dict[str, Given] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    remarks: list[tuple[int, str]] = field(default_factory=list)

    def __getitem__(self, dest: str) -> Any:
        given = self.given.get(dest)
        if given is None:
            return self.flags[dest].default_value()
        if given.unset and given.flag.type != "str":
            self.refuse(
                given, f"{shown(given.values[0])} is not set in the script", "give it a value above, as NAME=value"
            )
            return self.flags[dest].default_value()
        return given.value()

    def __contains__(self, dest: str) -> bool:
        return dest in self.given

    def add(self, given: Given) -> None:
        """Take a flag up, or the problem with it."""
        try:
            values = [given.value()] if given.flag.type and not given.unset else []
        except ValueError:
            return self.refuse(given, f"must be {'a whole number' if given.flag.type == 'int' else 'a number'}")
        choices = given.flag.choices
        for value in values[0] if given.flag.many and values else values:
            if choices and str(value) not in choices:
                near = difflib.get_close_matches(str(value), choices, n=1)
                return self.refuse(given, f"must be one of {', '.join(choices)}", near[0] if near else "")
        before = self.given.get(given.flag.dest)
        if before is not None and before.values != given.values:
            self.remarks.append((given.line, f"{given} replaces {before} of line {before.line}"))
        self.given[given.flag.dest] = given
        return None

    def refuse(self, given: Given, rule: str, hint: str = "") -> None:
        """Note what cannot be understood of a flag."""
        problem = Problem(f"line {given.line}: {given}", rule, hint=hint)
        if problem not in self.problems:
            self.problems.append(problem)

    def check(self) -> None:
        """Raise `ConfigError` with every problem found."""
        if self.problems:
            raise_problems(self.problems, SOURCE)


def parse_arguments(words: Sequence[Word], table: Iterable[Flag]) -> Arguments:
    """The arguments of a training command. Problems are kept for `Arguments.check`."""
    table = list(table)
    spellings = {name: flag for flag in table for name in (flag.name, *flag.aliases)}
    arguments = Arguments({flag.dest: flag for flag in reversed(table)})
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        spelling, equals, attached = word.text.partition("=")
        flag = spellings.get(spelling)
        if flag is None:
            _stray(word, spelling, spellings, arguments)
            while spelling.startswith("--") and at < len(words) and not words[at].text.startswith("--"):
                at += 1  # the values of an unknown flag
            continue
        values = [attached] if equals else []
        count = {"1": 1, "3": 3, "+": len(words), "*": len(words)}.get(flag.takes, 0)
        while at < len(words) and len(values) < count and not words[at].text.startswith("--"):
            values.append(words[at].text)
            at += 1
        given = Given(flag, spelling, tuple(values), word.line)
        wanted = {"1": 1, "3": 3, "+": 1}.get(flag.takes, 0)
        if len(values) < wanted or (equals and not flag.type):
            rule = f"needs {wanted} value{'s' if wanted > 1 else ''}" if wanted else "takes no value"
            arguments.problems.append(Problem(f"line {word.line}: {given}", rule))
        else:
            arguments.add(given)
    return arguments


def _stray(word: Word, spelling: str, spellings: Mapping[str, Flag], arguments: Arguments) -> None:
    if MARK.fullmatch(word.text):
        text = f"{shown(word.text)} is not known: flags that it may hold were not read"
        arguments.remarks.append((word.line, text))
    elif spelling.startswith("-"):
        near = difflib.get_close_matches(spelling.replace("_", "-"), spellings, n=1, cutoff=0.75)
        hint = f"did you mean {near[0]}?" if near else ""
        arguments.problems.append(
            Problem(f"line {word.line}: {shown(spelling)}", "no flag of Megatron-LM's", hint=hint)
        )
    else:
        hint = 'if it belongs to the value before it, quote the array as well: "${ARGS[@]}"'
        arguments.problems.append(
            Problem(f"line {word.line}: {shown(word.text)}", "stands where a flag should", hint=hint)
        )
