"""Flags of Megatron-LM and its forks as tables, and the arguments of a command parsed with them."""

from __future__ import annotations

import csv
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from mega_cli.megatron_args.shell_words import MARK, ShellWord, explain_unknown_flag_value, format_unknown_placeholders
from mega_common.strict_config import ConfigProblem, raise_config_error

SOURCE = "the launch script"
PLACEHOLDER = re.compile(r"<[^<>]+>")
TABLES = ("flags.csv", "forks.csv")
# Settings that become the length of a list; the limit keeps a typing error from exhausting memory.
COUNTS = frozenset({"num_layers", "encoder_num_layers", "mtp_num_layers", "pipeline_model_parallel_size"})
MOST = 100_000


@dataclass(frozen=True)
class MegatronFlagSpec:
    """Command-line flag of Megatron's `pretrain_gpt.py`.
    It is a row of mega's table of Megatron-LM's own flags (`flags.csv`) or of those that forks add (`forks.csv`).

    Attributes:
        name, aliases: spellings.
        dest: name of the setting.
        takes: number of values: `1`, `3`, `+`, `*`; or `on`, `off`, `switch` for a flag without a value (`switch`: `--x`
            is on, `--no-x` is off).
        type: type of the values: `int`, `float`, `str`.
        default: default value as text; empty without one.
        choices: allowed values, each with Megatron-LM's spelling; empty if all values are allowed.
        means: equivalent flags of Megatron-LM, with `{}` for the value; empty if the flag has its own setting.
        fork: True if only a fork has the flag.
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
    def takes_list(self) -> bool:
        """True if the value of the Megatron flag is a list."""
        return self.takes in ("3", "+", "*")

    @property
    def min_value_count(self) -> int:
        """Smallest number of values after the Megatron flag."""
        return {"1": 1, "3": 3, "+": 1}.get(self.takes, 0)

    @property
    def max_value_count(self) -> float:
        """Largest number of values after the Megatron flag; infinity for `+` and `*`."""
        return {"1": 1, "3": 3, "+": float("inf"), "*": float("inf")}.get(self.takes, 0)

    def convert_value(self, text: str) -> Any:
        """Return a value's text converted to the flag's type, or a ValueError; a choice gets Megatron-LM's spelling.

        Raises:
            ValueError: if the text is not of this type.
        """
        if self.type == "int":
            number = float(text) if "." in text or "e" in text.lower() else int(text)
            if number != int(number):
                raise ValueError(text)
            return int(number)
        return float(text) if self.type == "float" else self.choices.get(_fold_choice(text), text)

    def default_value(self) -> Any:
        """Return the value that the flag's setting has in Megatron when the command does not give the flag."""
        if not self.type:
            return self.takes == "off"
        if not self.default:
            return [] if self.takes_list else None
        return [self.convert_value(self.default)] if self.takes_list else self.convert_value(self.default)


def _fold_choice(word: str) -> str:
    """Return the normalised form of a choice: forks differ in case and dashes."""
    return word.lower().replace("_", "-")


@cache
def load_megatron_flag_specs() -> tuple[MegatronFlagSpec, ...]:
    """Return all known flags of Megatron-LM and its forks, from mega's tables `flags.csv` and `forks.csv`."""
    return tuple(
        MegatronFlagSpec(
            row["flag"], tuple(row["aliases"].split()), row["dest"], row["takes"], row["type"], row["default"],
            _parse_choices(row["choices"]), row.get("means", ""), table == TABLES[1],
        )
        for table in TABLES
        for row in csv.DictReader((files("mega_cli.megatron_args") / table).read_text(encoding="utf-8").splitlines())
    )  # fmt: skip


def _parse_choices(text: str) -> dict[str, str]:
    """Parse `a|b|c=a`: a and b, and c as another word for a."""
    pairs = (choice.partition("=") for choice in filter(None, text.split("|")))
    return {_fold_choice(word): meaning or word for word, _, meaning in pairs}


@dataclass(frozen=True)
class ParsedMegatronFlag:
    """Flag that a training command gives, with its values.

    Attributes:
        flag: entry of the table.
        on: for a flag without values, True if it switches the setting on.
        values: values, with marks for variables that the script does not set.
        text: flag and values as written in the command.
        line: line of the script.
    """

    flag: MegatronFlagSpec
    on: bool
    values: tuple[str, ...]
    text: str
    line: int

    def __str__(self) -> str:
        return self.text

    @property
    def unset_shell_variables(self) -> list[str]:
        """Names of shell variables in the flag's values that the launch script does not set.
        Placeholders such as `<path>` are included.
        """
        return [name for value in self.values for name in MARK.findall(value) + PLACEHOLDER.findall(value)]

    @property
    def unknown_value_reason(self) -> str:
        """Reason why the flag's value cannot be used; empty if it can."""
        if self.unset_shell_variables and (self.flag.type != "str" or self.flag.choices):
            return explain_unknown_flag_value(
                next(value for value in self.values if MARK.search(value) or PLACEHOLDER.search(value))
            )
        if len(self.values) < self.flag.min_value_count:
            return (
                f"{self.text} requires {self.flag.min_value_count} value{'s' if self.flag.min_value_count > 1 else ''}"
            )
        return ""

    @property
    def invalid_value_reason(self) -> str:
        """Reason why Megatron-LM rejects the flag's value; empty if it accepts the value."""
        words = set(self.flag.choices.values())
        if (
            not words
            or self.unset_shell_variables
            or all(str(self.flag.convert_value(value)) in words for value in self.values)
        ):
            return ""
        return f"{self.text} must be one of {', '.join(dict.fromkeys(self.flag.choices.values()))}"

    def parsed_value(self) -> Any:
        """Return the value that the flag gives its setting: None, or [] for a list, if it is unknown.

        Raises:
            ValueError: if it is not of the flag's type.
        """
        if not self.flag.type:
            return self.on
        if self.unknown_value_reason:
            return [] if self.flag.takes_list else None
        converted = [self.flag.convert_value(value) for value in self.values]
        return converted if self.flag.takes_list else converted[0]


@dataclass
class MegatronCommandSettings:
    """Settings of a Megatron training command from its flags.
    `settings[dest]` is the given value, or Megatron's default.

    Attributes:
        strict: report flags and values unknown to Megatron-LM as problems instead of remarks.
        given: flag of each setting; the last one if it is repeated.
        others: flags in none of the tables.
        unread: unset variables of the script that may contain flags.
        respelled: flags spelled with underscores instead of dashes.
        problems: errors, raised together by `raise_problems`.
        remarks: (line, sentence) of warnings.
    """

    flags: Mapping[str, MegatronFlagSpec]
    strict: bool = False
    given: dict[str, ParsedMegatronFlag] = field(default_factory=dict)
    others: list[ParsedMegatronFlag] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    respelled: set[str] = field(default_factory=set)
    problems: list[ConfigProblem] = field(default_factory=list)
    remarks: list[tuple[int, str]] = field(default_factory=list)

    def __getitem__(self, dest: str) -> Any:
        given = self.given.get(dest)
        return self.flags[dest].default_value() if given is None else given.parsed_value()

    def __contains__(self, dest: str) -> bool:
        return dest in self.given

    def add_flag(self, given: ParsedMegatronFlag) -> None:
        """Record a flag of the command, replacing an earlier one, or a problem if its value is invalid."""
        try:
            value = given.parsed_value()
        except ValueError:
            return self.add_flag_problem(
                given, f"must be {'a whole number' if given.flag.type == 'int' else 'a number'}"
            )
        if given.flag.dest in COUNTS and value is not None and value > MOST:
            return self.add_flag_problem(given, f"must be at most {MOST:,}")
        if self.strict and (given.unknown_value_reason or given.invalid_value_reason):
            near = (
                difflib.get_close_matches(_fold_choice(given.values[-1]), given.flag.choices, n=1)
                if given.invalid_value_reason
                else []
            )
            return self.add_flag_problem(
                given,
                given.unknown_value_reason or given.invalid_value_reason,
                given.flag.choices[near[0]] if near else "",
            )
        before = self.given.get(given.flag.dest)
        if before is not None and (before.values, before.on) != (given.values, given.on):
            self.remarks.append((given.line, f"{given} replaces {before} of line {before.line}"))
        self.given[given.flag.dest] = given
        return None

    def add_flag_problem(self, given: ParsedMegatronFlag, rule: str, hint: str = "") -> None:
        """Add a flag whose value cannot be used to the problems that `raise_problems` raises later.
        `rule` is the rule that the value violates.
        """
        problem = ConfigProblem(f"line {given.line}: {given}", rule, hint=hint)
        if problem not in self.problems:
            self.problems.append(problem)

    def add_rejected_settings_problem(self, line: int, text: str, rule: str, hint: str) -> None:
        """Record settings that Megatron-LM would reject: as a problem if `strict`, else as a remark.
        They are on line `line` of the launch script; `rule` is the rule that they violate.
        """
        if self.strict:
            self.problems.append(ConfigProblem(f"line {line}: {text}", rule, hint=hint))
        else:
            self.remarks.append((line, f"{text} {rule}" + (f" ({hint})" if hint else "")))

    def raise_problems(self) -> None:
        """Raise one `ConfigError` with all recorded problems of the flags, if there are any."""
        if self.problems:
            raise_config_error(self.problems, SOURCE)


def parse_megatron_arguments(
    words: Sequence[ShellWord], table: Iterable[MegatronFlagSpec], *, strict: bool = False
) -> MegatronCommandSettings:
    """Return the settings of a Megatron training command's arguments by the flags of `table`, with problems recorded.
    Problems are not raised here, but by `MegatronCommandSettings.raise_problems`.
    """
    table, words = list(table), _join_placeholders(words)
    spellings = {name: flag for flag in table for name in (flag.name, *flag.aliases)}
    arguments = MegatronCommandSettings({flag.dest: flag for flag in reversed(table) if not flag.means}, strict)
    at = 0
    while at < len(words):
        word, at = words[at], at + 1
        if not word.text.startswith("--") or MARK.match(word.text, 2):
            _record_non_flag(word, arguments)
            continue
        spelling, equals, attached = word.text.partition("=")
        flag = spellings.get(spelling) or spellings.get(spelling.replace("_", "-"))
        most = flag.max_value_count if flag else float("inf")
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
            if equals and not flag.max_value_count:
                arguments.add_rejected_settings_problem(word.line, str(given), "takes no value", "")
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
    return " ".join(
        [format_unknown_placeholders(spelling), *(format_unknown_placeholders(value) or "''" for value in values)]
    )


def _to_megatron_flag(
    flag: MegatronFlagSpec, spelling: str, values: tuple[str, ...], line: int, spellings: Mapping[str, MegatronFlagSpec]
) -> Iterator[ParsedMegatronFlag]:
    """Return a fork's flag as Megatron-LM's own flag."""
    text = _text(spelling, values)
    if not flag.means:
        on = flag.takes == "on" or (flag.takes == "switch" and not spelling.startswith("--no-"))
        yield ParsedMegatronFlag(flag, on, values, text, line)
        return
    for part in flag.means.split("--")[1:]:
        name, *meant = part.split()
        own = spellings[f"--{name}"]
        filled = tuple(value for word in meant for value in (values if word == "{}" else (word,)))
        yield ParsedMegatronFlag(own, own.takes == "on", filled, text, line)


def _parse_unknown_flag(
    spelling: str, values: Sequence[str], line: int, spellings: Sequence[str], arguments: MegatronCommandSettings
) -> None:
    """Parse a flag that no table has; the words up to the next flag count as its values."""
    near = difflib.get_close_matches(spelling.replace("_", "-"), spellings, n=1, cutoff=0.85)
    hint = f"did you mean {near[0]}?" if near else ""
    if arguments.strict:
        arguments.add_rejected_settings_problem(
            line, format_unknown_placeholders(spelling), "is not a flag of Megatron-LM", hint
        )
    else:
        flag = MegatronFlagSpec(spelling, (), hint, "*" if values else "on", "str" if values else "", "", {})
        arguments.others.append(ParsedMegatronFlag(flag, True, tuple(values), _text(spelling, values), line))


def _record_non_flag(word: ShellWord, arguments: MegatronCommandSettings) -> None:
    if MARK.search(word.text):
        arguments.unread.append(format_unknown_placeholders(word.text))
        text = (
            f"the value of {format_unknown_placeholders(word.text)} is unknown: flags that it may contain were not read"
        )
        arguments.remarks.append((word.line, text))
    else:
        hint = 'if it is part of the value before it, quote the array: "${ARGS[@]}"'
        arguments.add_rejected_settings_problem(
            word.line, format_unknown_placeholders(word.text), "is not a flag", hint
        )
