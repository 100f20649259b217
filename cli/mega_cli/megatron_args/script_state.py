"""State of the static interpretation of a shell script: its result, its variables, and the steps that statements share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tree_sitter import Node

from mega_cli.megatron_args.arithmetic import evaluate_bash_arithmetic
from mega_cli.megatron_args.conditions import (
    KnownTruth,
    ShellConditionEvaluator,
    ShellConditionOperand,
)
from mega_cli.megatron_args.script_variables import VariableValue, get_shell_value_texts, merge_variable_across_branches
from mega_cli.megatron_args.shell_words import MARK, PARSED, CharacterBudget, ShellWord
from mega_cli.megatron_args.syntax_tree import (
    find_syntax_errors,
    get_node_source_text,
    parse_shell_script,
)
from mega_cli.megatron_args.word_expansion import ShellWordExpander
from mega_common.errors import ConfigError

STEPS = 20_000  # statements of a script, in all rounds of its loops
LARGEST_FILE = 1_000_000  # bytes
LARGEST_SCRIPT = 256_000  # characters
NESTED = 24  # functions, substitutions and scripts in scripts
ALWAYS_SET = re.compile(r"HOME|USER|PWD|HOSTNAME|RANDOM|SECONDS|BASH\w*|(?:SLURM|OMPI|PMI|PBS)_\w+")


class ShellControlFlowException(Exception):
    """Raised when an interpreted script leaves a loop, a function or itself: `break`, `continue`, `return`, `exit`."""


@dataclass
class ShellScriptResult:
    """Result of interpreting a shell script: its variables, commands to start, files to write, and remarks.

    Attributes:
        variables: values at the end of the script, by name and index.
        commands: words of each command that would be started, in order; commands of a script that is passed to a
            launcher begin with the launcher's words.
        remarks: (line, sentence) on parts that could not be interpreted.
        texts: the script itself, and nested scripts.
        path: path of the script.
        files: content of the files that it writes, by name.
        budget: limit of the characters that the interpretation may create.
    """

    variables: dict[str, VariableValue] = field(default_factory=dict)
    commands: list[list[ShellWord]] = field(default_factory=list)
    remarks: list[tuple[int, str]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    path: Path | None = None
    files: dict[str, str] = field(default_factory=dict)
    budget: CharacterBudget = field(default_factory=CharacterBudget)

    def record_written_file(self, name: str, text: str, *, append: bool = False) -> None:
        """Record the text that the interpreted shell script would write or append to a file.
        It is recorded in `files` under `name`; nothing is written to disk.
        """
        name = name.removeprefix("./")
        before = self.files.get(name, "") if append else ""
        self.budget.spend_characters(len(before) + len(text))
        self.files[name] = before + text

    def read_file(self, name: str) -> str | None:
        """Return the text of a file that the script writes or that is in the script's folder; None if there is none."""
        if (name := name.removeprefix("./")) in self.files:
            return self.files[name]
        relative = MARK.split(name)[-1].lstrip("/")
        if self.path is None or not relative:
            return None
        for candidate in (relative, PurePosixPath(relative).name):
            file = self.path.parent / candidate
            with suppress(OSError, ValueError):
                if file.is_file() and file.stat().st_size <= LARGEST_FILE and not file.samefile(self.path):
                    self.budget.spend_characters(file.stat().st_size)
                    return file.read_text(encoding="utf-8")
        return None


Statement = Callable[["ShellInterpreter", Node], KnownTruth]


class ShellInterpreter:
    """State of the static interpretation of a shell script, and the steps that all its statements share.

    Attributes:
        statements: function that interprets a statement, by its type in the syntax tree.
        launcher: words of the command that runs the script being read.
        entered: standard input of a command; None if unknown.
        printed: printed texts; None for an unknown one.
    """

    def __init__(self, script: ShellScriptResult, statements: Mapping[str, Statement]) -> None:
        self.script = script
        self.statements = statements
        self.words = ShellWordExpander(substitute=self._substitute_command, budget=script.budget)
        self.functions: dict[str, tuple[Node, tuple[int, bool]]] = {}
        self.launcher: list[ShellWord] = []
        self.entered: str | None = None
        self.printed: list[str | None] = []
        self.locals: list[dict[str, VariableValue | None]] = []
        self.depth = self.steps = 0

    def interpret_source(
        self, text: str, line: int, arguments: list[ShellWord] | None = None, *, flat: bool = True
    ) -> KnownTruth:
        """Interpret a shell script's text; return whether its last command succeeds, or None if unknown.
        It begins at `line`. With `flat`, all of it counts as this one line, as for `eval`.
        """
        text = text.replace("\r\n", "\n")
        if len(text) > LARGEST_SCRIPT:
            raise ConfigError(f"the launch script is longer than {LARGEST_SCRIPT:,} characters")
        self.script.budget.spend_characters(PARSED * len(text) + len(self.words.marks))
        self.script.texts.append(text)
        root = parse_shell_script(self.words.index_unknown_placeholders(text))
        try:
            with self.enter_nesting_level(), self.words.enter_nested_script((line, flat), arguments):
                for node in find_syntax_errors(root):
                    self.add_remark(node, f"{get_node_source_text(node).strip()[:40]!r} is not valid shell syntax here")
                return self.interpret_statements(root.named_children)
        except ShellControlFlowException:
            return None

    def add_remark(self, node: Node, sentence: str) -> None:
        """Add a remark on the script's line where the syntax node `node` begins, unless it was made before."""
        remark = (self.words.line_number(node), sentence)
        if remark not in self.script.remarks:
            self.script.remarks.append(remark)

    def interpret_statements(self, nodes: Sequence[Node]) -> KnownTruth:
        """Interpret shell statements one after another; return whether the last one succeeds, or None if unknown."""
        status: KnownTruth = True
        for node in nodes:
            if node.type != "comment":
                status = self.interpret_shell_statement(node)
        return status

    def interpret_shell_statement(self, node: Node) -> KnownTruth:
        """Interpret one shell statement; return whether it succeeds, or None if unknown."""
        self.steps += 1
        if self.steps > STEPS:
            raise ShellControlFlowException("exit")
        follow = self.statements.get(node.type)
        if follow:
            return follow(self, node)
        self.printed.append(None)
        return self.interpret_statements([child for child in node.named_children if child.type in self.statements])

    def evaluate_arithmetic_expression(self, text: str) -> int | None:
        """Carry out the assignments of a shell arithmetic expression; return its value, or None if unknown.
        Every variable that an unknown expression sets becomes unknown.
        """
        if MARK.search(text):
            for name in re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)", text):
                self.words.assign_number(name, None)
            return None
        return evaluate_bash_arithmetic(text, self.words)

    def capture_output(self, follow: Callable[[], KnownTruth]) -> tuple[str | None, KnownTruth]:
        """Return the output of the statements that `follow` interprets and whether they succeed, each None if unknown."""
        before, self.printed = self.printed, []
        try:
            status = follow()
            texts = self.printed
            return (None if None in texts else "".join(filter(None, texts))), status
        finally:
            self.printed = before

    def interpret_all_branches(self, node: Node, condition: str, *branches: Callable[[], object]) -> None:
        """Interpret each branch, as it is unknown which one the script takes; variables that differ become unknown.
        They keep their common prefix and are unknown from there.
        """
        before, ends = self.words.variables, list[dict[str, VariableValue]]()
        for follow_branch in branches:
            self.words.variables = dict(before)
            with suppress(ShellControlFlowException):
                follow_branch()
            ends.append(self.words.variables)
        names = sorted({name for end in ends for name in end})
        self.words.variables = dict(ends[0])
        differing = [name for name in names if any(_differ(end.get(name), ends[0].get(name)) for end in ends)]
        for name in differing:
            self.words.variables[name] = merge_variable_across_branches(
                name, [end.get(name) for end in ends], self.words.line_number(node)
            )
        if differing:
            named = ", ".join(f"${name}" for name in differing[:6]) + (" and others" if len(differing) > 6 else "")
            self.add_remark(
                node, f"it is unknown if {condition}: {named} {'is' if len(differing) == 1 else 'are'} left open"
            )

    def interpret_function_call(self, name: str, arguments: list[ShellWord]) -> KnownTruth:
        """Interpret a call of a function that the script defines; return whether it succeeds, or None if unknown."""
        body, place = self.functions[name]
        self.locals.append({})
        try:
            with self.enter_nesting_level(), self.words.enter_nested_script(place, arguments):
                return self.interpret_shell_statement(body)
        except ShellControlFlowException as leave:
            if leave.args[0] != "return":
                raise
            return None
        finally:
            for variable, value in self.locals.pop().items():
                if value is None:
                    self.words.variables.pop(variable, None)
                else:
                    self.words.variables[variable] = value

    @contextmanager
    def enter_nesting_level(self) -> Iterator[None]:
        """Context manager of one level of nested functions, substitutions or scripts; if too deep, ShellControlFlowException."""
        self.depth += 1
        try:
            if self.depth > NESTED:
                raise ShellControlFlowException("return")
            yield
        finally:
            self.depth -= 1

    def _substitute_command(self, node: Node) -> str | None:
        """Return the output of `$(...)`."""
        before = dict(self.words.variables)
        try:
            with self.enter_nesting_level():
                return self.capture_output(lambda: self.interpret_statements(node.named_children))[0]
        except ShellControlFlowException:
            return None
        finally:
            self.words.variables = before

    def evaluate_condition(self, operands: Sequence[ShellConditionOperand], node: Node) -> KnownTruth:
        """Return the truth of a shell condition `[ ... ]` or `[[ ... ]]`, given as its words, or None if unknown."""
        return ShellConditionEvaluator(
            operands, lambda text: self.expand_condition_operand(text, node), self.evaluate_arithmetic_expression
        ).evaluate()

    def expand_condition_operand(self, text: str, node: Node) -> str | None:
        """Return an operand of a shell condition with its variables and quotes resolved, or None for unknown values.
        Unset variables count as empty, with a remark on the line of `node`.
        """
        for name in MARK.findall(text):
            if not name.isidentifier() or name in self.words.awaited or ALWAYS_SET.fullmatch(name):
                return None
            self.add_remark(
                node, f"${name} is not set in the script and counts as empty here; --define {name}=... gives it a value"
            )
        return MARK.sub("", text)


def _differ(one: VariableValue | None, other: VariableValue | None) -> bool:
    return one is not other and get_shell_value_texts(one) != get_shell_value_texts(other)
