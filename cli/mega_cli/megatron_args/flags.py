"""The flags of Megatron-LM and of its forks as tables, and the arguments of a command read with them."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from mega_cli.megatron_args.shell import MARK, why_unknown
from mega_common.config import Problem, raise_problems

SOURCE = "the launch script"
PLACEHOLDER = re.compile(r"<[^<>]+>")
TABLES = ("flags.csv", "forks.csv")
# What a list is made of, an entry each: a slip of the pen must not take all memory.
COUNTS = frozenset({"num_layers", "encoder_num_layers", "mtp_num_layers", "pipeline_model_parallel_size"})
MOST = 100_000


@dataclass(frozen=True)
class Flag:
    """One flag of `pretrain_gpt.py`, a line of `flags.csv` (Megatron-LM's own) or `forks.csv` (what its forks add).

    Attributes:
        name, aliases: its spellings.
        dest: the setting it gives.
        takes: how many values: `1`, `3`, `+`, `*`; or `on`, `off`, `switch` for a flag without one (`switch` is on
            as `--x` and off as `--no-x`).
        type: of its values: `int`, `float`, `str`.
        default: what the setting is without the flag, as text; empty for none.
        choices: what its values may be, each with Megatron-LM's word for it; empty for anything.
        means: the flags of Megatron-LM that say the same, `{}` for its value; empty for a flag with a setting of its own.
        fork: whether Megatron-LM itself does not have it.
    """

    name: str
    aliases: tuple[str, ...]
    dest: str
    takes: str
    type: str
    default: str
    choices: Mapping[str, str]
    means: str = ""
    fork: bool = False

    @property
    def many(self) -> bool:
        """Whether the setting is a list."""
        return self.takes in ("3", "+", "*")

    @property
    def least(self) -> int:
        """How many values it must have."""
        return {"1": 1, "3": 3, "+": 1}.get(self.takes, 0)

    @property
    def most(self) -> float:
        """How many values it may have."""
        return {"1": 1, "3": 3, "+": float("inf"), "*": float("inf")}.get(self.takes, 0)

    def convert(self, text: str) -> Any:
        """A value as its type, a choice as Megatron-LM's word for it.

        Raises:
            ValueError: when it is none.
        """
        if self.type == "int":
            number = float(text) if "." in text or "e" in text.lower() else int(text)
            if number != int(number):
                raise ValueError(text)
            return int(number)
        return float(text) if self.type == "float" else self.choices.get(_folded(text), text)

    def default_value(self) -> Any:
        """The setting's value when the flag is not given."""
        if not self.type:
            return self.takes == "off"
        if not self.default:
            return [] if self.many else None
        return [self.convert(self.default)] if self.many else self.convert(self.default)


def _folded(word: str) -> str:
    """A choice as it is looked up: forks differ in case and in dashes."""
    return word.lower().replace("_", "-")


@cache
def load_flags() -> tuple[Flag, ...]:
    """Both tables."""
    return tuple(
        Flag(
            row["flag"], tuple(row["aliases"].split()), row["dest"], row["takes"], row["type"], row["default"],
            _choices(row["choices"]), row.get("means", ""), table == TABLES[1],
        )
        for table in TABLES
        for row in csv.DictReader((files("mega_cli.megatron_args") / table).read_text(encoding="utf-8").splitlines())
    )  # fmt: skip


def _choices(text: str) -> dict[str, str]:
    """`a|b|c=a`: a and b, and c as another word for a."""
    pairs = (choice.partition("=") for choice in filter(None, text.split("|")))
    return {_folded(word): meaning or word for word, _, meaning in pairs}


@dataclass(frozen=True)
class Given:
    """A flag as a command gives it.

    Attributes:
        flag: the table's entry that counts.
        on: whether it switches its setting on, for a flag without values.
        values: with marks for what the script does not set.
        text: flag and values as they stand in the command.
        line: where.
    """

    flag: Flag
    on: bool
    values: tuple[str, ...]
    text: str
    line: int

    def __str__(self) -> str:
        return self.text

    @property
    def unset(self) -> list[str]:
        """Names of the parameters in its values that the script does not set, and placeholders such as `<path>`."""
        return [name for value in self.values for name in MARK.findall(value) + PLACEHOLDER.findall(value)]

    @property
    def unknown(self) -> str:
        """Why its value cannot be used; empty if it can."""
        if self.unset and (self.flag.type != "str" or self.flag.choices):
            return why_unknown(next(value for value in self.values if MARK.search(value) or PLACEHOLDER.search(value)))
        if len(self.values) < self.flag.least:
            return f"{self.text} needs {self.flag.least} value{'s' if self.flag.least > 1 else ''}"
        return ""

    @property
    def odd(self) -> str:
        """Why its value is none that Megatron-LM has; empty if it is."""
        words = set(self.flag.choices.values())
        if not words or self.unset or all(str(self.flag.convert(value)) in words for value in self.values):
            return ""
        return f"{self.text} is none of {', '.join(dict.fromkeys(self.flag.choices.values()))}"

    def value(self) -> Any:
        """The setting's value; None where it cannot be known.

        Raises:
            ValueError: when it is not of the flag's type.
        """
        if not self.flag.type:
            return self.on
        if self.unknown:
            return [] if self.flag.many else None
        converted = [self.flag.convert(value) for value in self.values]
        return converted if self.flag.many else converted[0]


@dataclass
class Arguments:
    """The settings of a command: `arguments[dest]` is what it gives, or Megatron's default.

    Attributes:
        strict: whether flags and values that Megatron-LM does not have are problems; else they are remarks.
        given: by setting, the flag that counts, which is the last one.
        others: flags in none of the tables, with their values and line.
        unread: what is not set in the script and may hold flags.
        respelled: the spellings with underscores where the tables have dashes.
        problems: what cannot be understood; told together by `check`.
        remarks: (line, sentence) for the user to know.
    """

    flags: Mapping[str, Flag]
    strict: bool = False
    given: dict[str, Given] = field(default_factory=dict)
    others: list[Given] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    respelled: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    remarks: list[tuple[int, str]] = field(default_factory=list)

    def __getitem__(self, dest: str) -> Any:
        given = self.given.get(dest)
        return self.flags[dest].default_value() if given is None else given.value()

    def __contains__(self, dest: str) -> bool:
        return dest in self.given

    def add(self, given: Given) -> None:
        """Take a flag up, or the problem with it."""
        try:
            value = given.value()
        except ValueError:
            return self.refuse(given, f"must be {'a whole number' if given.flag.type == 'int' else 'a number'}")
        if given.flag.dest in COUNTS and value is not None and value > MOST:
            return self.refuse(given, f"must be at most {MOST:,}")
        if self.strict and (given.unknown or given.odd):
            near = difflib.get_close_matches(_folded(given.values[-1]), given.flag.choices, n=1) if given.odd else []
            return self.refuse(given, given.unknown or given.odd, given.flag.choices[near[0]] if near else "")
        before = self.given.get(given.flag.dest)
        if before is not None and (before.values, before.on) != (given.values, given.on):
            self.remarks.append((given.line, f"{given} replaces {before} of line {before.line}"))
        self.given[given.flag.dest] = given
        return None

    def refuse(self, given: Given, rule: str, hint: str = "") -> None:
        """Note what cannot be understood of a flag."""
        problem = Problem(f"line {given.line}: {given}", rule, hint=hint)
        if problem not in self.problems:
            self.problems.append(problem)

    def doubt(self, line: int, text: str, rule: str, hint: str) -> None:
        """Note what Megatron-LM would refuse: a problem if `strict`, else a remark."""
        if self.strict:
            self.problems.append(Problem(f"line {line}: {text}", rule, hint=hint))
        else:
            self.remarks.append((line, f"{text} {rule}" + (f" ({hint})" if hint else "")))

    def check(self) -> None:
        """Raise `ConfigError` with every problem found."""
        if self.problems:
            raise_problems(self.problems, SOURCE)
