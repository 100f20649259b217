"""Variables of a shell script: their values, and the merge of values after branches of which the taken one is unknown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

from tree_sitter import Node

from mega_cli.megatron_args.arithmetic import evaluate_bash_arithmetic
from mega_cli.megatron_args.shell_words import (
    CLOSE,
    EXPRESSION,
    MARK,
    OPEN,
    CharacterBudget,
    ShellWord,
    make_unknown_placeholder,
)

VariableValue = dict[str, ShellWord]  # by index or key; a plain variable has the key "0"

LONGEST = 1_000_000  # characters of a variable, against loops that double it
NUMBERED = re.compile(f"{OPEN}#(\\d+){CLOSE}")

T = TypeVar("T")


@dataclass
class ShellScriptVariables:
    """Variables of an interpreted shell script, and the line of the script that is being interpreted.

    Attributes:
        variables: values by name; values are replaced, not mutated, so that a shallow copy is a snapshot.
        positional: `$1`, `$2`, ...; None if unknown.
        defined: variables that override assignments of the script.
        awaited: variables that contain a missing argument of the script.
        associative: names of associative arrays.
        marks: names of marks in a parsed text, where they are encoded as numbers.
        budget: limit of the characters that may still be created.
        place: first line of the text under expansion in the script, and True if all of it counts as this line.
    """

    variables: dict[str, VariableValue] = field(default_factory=dict)
    positional: list[ShellWord] | None = None
    defined: set[str] = field(default_factory=set)
    awaited: set[str] = field(default_factory=set)
    associative: set[str] = field(default_factory=set)
    marks: list[str] = field(default_factory=list)
    place: tuple[int, bool] = (1, False)
    budget: CharacterBudget = field(default_factory=CharacterBudget)

    def line_number(self, node: Node) -> int:
        """Return the line of the script where a node of its syntax tree begins."""
        first, flat = self.place
        return first if flat else first + node.start_point[0]

    def index_unknown_placeholders(self, text: str) -> str:
        """Return a text in which the marks that stand for unknown values are replaced by numbered ones.
        They are replaced because their names may contain characters that the shell parser rejects.
        """
        self.marks = [*self.marks, *MARK.findall(text)]
        numbers = iter(range(len(self.marks) - len(MARK.findall(text)), len(self.marks)))
        return MARK.sub(lambda _: f"{OPEN}#{next(numbers)}{CLOSE}", text)

    def restore_unknown_placeholders(self, text: str) -> str:
        """Return a text with the numbers from `index_unknown_placeholders` replaced by names of unknown values."""
        return NUMBERED.sub(lambda match: make_unknown_placeholder(self.marks[int(match[1])]), text)

    @contextmanager
    def enter_nested_script(self, place: tuple[int, bool], arguments: list[ShellWord] | None) -> Iterator[None]:
        """Give a nested script its own line numbers and positional parameters while the `with` block runs.
        Line numbers count from `place`, (first line, True if all text counts as this line), and `arguments` are `$1`,
        `$2`, ... unless None.
        """
        before = self.place, self.positional
        self.place = place
        if arguments is not None:
            self.positional = arguments
        try:
            yield
        finally:
            self.place, self.positional = before

    def get_variable(self, name: str) -> VariableValue | None:
        """Return the value of a variable or positional parameter, or None if the script does not set it."""
        if name.isdigit() and name != "0" and self.positional is not None:
            return {"0": self.positional[int(name) - 1]} if int(name) <= len(self.positional) else {}
        return self.variables.get(name)

    def set_variable(self, name: str, value: VariableValue) -> None:
        """Set a variable of the script, unless it was defined from outside, such as by `--define`."""
        self.budget.spend_characters(1 + len(value))
        if sum(len(word.text) + 1 for word in value.values()) > LONGEST:
            value = {"0": ShellWord(make_unknown_placeholder("{" + name + "}"), self.place[0])}
        if name not in self.defined:
            self.variables[name] = value
            self.awaited.discard(name)

    def set_text_variable(self, name: str, text: str, line: int) -> None:
        """Set a scalar variable of the interpreted shell script to `text`, which is on line `line` of the script."""
        self.set_variable(name, {"0": ShellWord(text, line)})

    def read_number(self, name: str) -> str | None:
        """Return a shell variable's or array element's text for an arithmetic expression, or None if it is unknown."""
        self.budget.spend_characters(EXPRESSION)
        name, _, index = name.removesuffix("]").partition("[")
        key = "0" if not index else index if name in self.associative else self.evaluate_array_index(index)
        word = (self.get_variable(name) or {}).get(key or "")
        return None if word is None or MARK.search(word.text) else word.text

    def assign_number(self, name: str, value: str | None) -> None:
        """Set a shell variable to the result of an arithmetic assignment; None marks its value as unknown."""
        self.set_text_variable(
            name, make_unknown_placeholder("{" + name + "}") if value is None else value, self.place[0]
        )

    def evaluate_array_index(self, text: str) -> str | None:
        """Return a shell array element's key, given by an arithmetic expression, or None if it is unknown."""
        number = None if MARK.search(text) else evaluate_bash_arithmetic(text, self)
        return None if number is None else str(number)


def get_shell_value_texts(value: VariableValue | None) -> dict[str, str] | None:
    """Return the texts of a shell variable's elements by key, without their line numbers; None for None."""
    return None if value is None else {key: word.text for key, word in value.items()}


def merge_variable_across_branches(name: str, values: Sequence[VariableValue | None], line: int) -> VariableValue:
    """Return the common prefix of a shell variable's values after several branches, and a mark for the unknown rest.
    The script may take any of the branches.
    """
    mark = make_unknown_placeholder("{" + name + "}")
    if any(value and set(value) != {"0"} for value in values):
        same = dict(_common_prefix([list((get_shell_value_texts(value) or {}).items()) for value in values]))
        first = next(filter(None, values))
        return {**{key: first[key] for key in same}, str(len(same)): ShellWord(mark, line)}
    texts = [value["0"].text if value else "" for value in values]
    tokens = [re.findall(rf"{OPEN}[^{CLOSE}]*{CLOSE}|\s+|[^\s{OPEN}]+", text) for text in texts]
    start = "".join(_common_prefix(tokens))
    return {"0": ShellWord((start.rstrip() + " " if start.strip() else "") + mark, line)}


def _common_prefix(lists: Sequence[Sequence[T]]) -> list[T]:
    """Return the common prefix of several lists."""
    return [row[0] for row in takewhile(lambda row: all(item == row[0] for item in row), zip(*lists, strict=False))]
