"""Static interpretation of a script: the variables it sets and the commands it would start. Nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from tree_sitter import Node

from mega_cli.megatron_args.arithmetic import evaluate_arithmetic
from mega_cli.megatron_args.assignments import assign_variable, assign_variables, declare_variables, unset_variables
from mega_cli.megatron_args.branch_values import merge_branch_values, word_texts
from mega_cli.megatron_args.conditions import (
    ConditionEvaluator,
    ConditionOperand,
    KnownTruth,
    three_valued_and,
    three_valued_not,
    three_valued_or,
)
from mega_cli.megatron_args.control_flow import (
    follow_case_statement,
    follow_counting_loop,
    follow_for_loop,
    follow_if_statement,
    follow_while_loop,
)
from mega_cli.megatron_args.shell_commands import ScriptExit, follow_command, follow_redirection, read_redirected_input
from mega_cli.megatron_args.shell_patterns import quote_pattern
from mega_cli.megatron_args.shell_words import CLOSE, MARK, OPEN, PARSED, ShellWord, WorkBudget
from mega_cli.megatron_args.syntax_tree import (
    VALUES,
    condition_leaves,
    find_syntax_errors,
    group_adjacent,
    node_text,
    parse_script,
)
from mega_cli.megatron_args.word_expansion import VariableValue, WordExpander
from mega_common.errors import ConfigError

STEPS = 20_000  # statements of a script, in all rounds of its loops
LARGEST_FILE = 1_000_000  # bytes
LARGEST_SCRIPT = 256_000  # characters
NESTED = 24  # functions, substitutions and scripts in scripts
ALWAYS_SET = re.compile(r"HOME|USER|PWD|HOSTNAME|RANDOM|SECONDS|BASH\w*|(?:SLURM|OMPI|PMI|PBS)_\w+")
ASKING = re.compile(r"(?:grep|egrep|command|which|type|hash|pgrep|diff|cmp)\b")


@dataclass
class ScriptResult:
    """Variables, commands, files and remarks that static interpretation of a shell script found.

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
    budget: WorkBudget = field(default_factory=WorkBudget)

    def write_file(self, name: str, text: str, *, append: bool = False) -> None:
        """Record in `files` the text that the interpreted shell script would write or append to `name`; nothing is
        written to disk.
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


def follow_script(
    text: str,
    *,
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    define: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
) -> ScriptResult:
    """Interpret a shell script statically: return the variables it sets and the commands it would start. Nothing is
    executed.

    Args:
        path: path of the script; files that it sources or starts are searched in its folder.
        environment: variables that are set before its first line.
        define: variables that override assignments of the script.
        arguments: `$1`, `$2`, ...; None if they are unknown.

    Raises:
        ConfigError: if it is nested too deeply, or too long.
    """
    if OPEN in text or CLOSE in text:
        raise ConfigError(
            "the launch script contains characters of Unicode's private use area",
            hint="remove U+E000 and U+E001 from it",
        )
    reader = ScriptReader(ScriptResult(path=path))
    for name, value in {**(environment or {}), **(define or {})}.items():
        reader.words.set_text_variable(name, value, 0)
    reader.words.defined = set(define or {})
    given = None if arguments is None else [ShellWord(argument, 0) for argument in arguments]
    try:
        reader.read_source(text, 1, given, flat=False)
    except RecursionError:
        raise ConfigError(
            "the launch script is nested too deeply to be read", hint="check that the file is a shell script"
        ) from None
    if reader.steps > STEPS:
        reader.script.remarks.append((1, f"the script was followed for its first {STEPS} statements only"))
    reader.script.variables = reader.words.variables
    return reader.script


class ScriptReader:
    """Static interpreter of a shell script's syntax tree; it executes nothing.

    Attributes:
        launcher: words of the command that runs the script being read.
        entered: standard input of a command; None if unknown.
        printed: printed texts; None for an unknown one.
    """

    def __init__(self, script: ScriptResult) -> None:
        self.script = script
        self.words = WordExpander(self._substitute_command, budget=script.budget)
        self.functions: dict[str, tuple[Node, tuple[int, bool]]] = {}
        self.launcher: list[ShellWord] = []
        self.entered: str | None = None
        self.printed: list[str | None] = []
        self.locals: list[dict[str, VariableValue | None]] = []
        self.depth = self.steps = 0

    def read_source(
        self, text: str, line: int, arguments: list[ShellWord] | None = None, *, flat: bool = True
    ) -> KnownTruth:
        """Interpret the text of a script that begins at `line`; with `flat` all of it counts as this one line, as for
        `eval`.
        """
        text = text.replace("\r\n", "\n")
        if len(text) > LARGEST_SCRIPT:
            raise ConfigError(f"the launch script is longer than {LARGEST_SCRIPT:,} characters")
        self.script.budget.spend_characters(PARSED * len(text) + len(self.words.marks))
        self.script.texts.append(text)
        root = parse_script(self.words.encode_marks(text))
        try:
            with self.enter_level(), self.words.at_offset((line, flat), arguments):
                for node in find_syntax_errors(root):
                    self.add_remark(node, f"{node_text(node).strip()[:40]!r} is not valid shell syntax here")
                return self.follow_block(root.named_children)
        except ScriptExit:
            return None

    def add_remark(self, node: Node, sentence: str) -> None:
        """Add a remark on the script's line where `node` begins, unless the result already has it."""
        remark = (self.words.line_number(node), sentence)
        if remark not in self.script.remarks:
            self.script.remarks.append(remark)

    # Statements.

    def follow_block(self, nodes: Sequence[Node]) -> KnownTruth:
        """Interpret statements one after another; return whether the last one succeeds, or None if unknown."""
        status: KnownTruth = True
        for node in nodes:
            if node.type != "comment":
                status = self.follow_statement(node)
        return status

    def follow_statement(self, node: Node) -> KnownTruth:
        """Interpret one statement; return whether it succeeds, or None if unknown."""
        self.steps += 1
        if self.steps > STEPS:
            raise ScriptExit("exit")
        follow = STATEMENTS.get(node.type)
        if follow:
            return follow(self, node)
        self.printed.append(None)
        return self.follow_block([child for child in node.named_children if child.type in STATEMENTS])

    def _follow_subshell(self, node: Node) -> KnownTruth:
        """Follow `( ... )`, whose assignments are local to it."""
        before = dict(self.words.variables)
        try:
            return self.follow_block(node.named_children)
        finally:
            self.words.variables = before

    def _compound(self, node: Node) -> KnownTruth:
        """Follow `{ ... }` or `(( ... ))`."""
        if node.children[0].type != "((":
            return self.follow_block(node.named_children)
        value = self.evaluate_expression(self.words.source_from(node, 2, 2))
        return None if value is None else value != 0

    def evaluate_expression(self, text: str) -> int | None:
        """Return the value of a shell arithmetic expression, or None if unknown; then every variable that it sets
        becomes unknown.
        """
        if MARK.search(text):
            for name in re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)", text):
                self.words.assign_number(name, None)
            return None
        return evaluate_arithmetic(text, self.words)

    def _list(self, node: Node) -> KnownTruth:
        """Follow `a && b` and `a || b`."""
        left, right = node.named_children[0], node.named_children[-1]
        sign = next((child.type for child in node.children if child.type in ("&&", "||")), "&&")
        return self._joined(self.follow_statement(left), left, sign, right)

    def _joined(self, status: KnownTruth, left: Node, sign: str, right: Node) -> KnownTruth:
        if status is None and left.type not in ("test_command", "list", "compound_statement"):
            status = None if ASKING.match(node_text(left)) else True  # commands are assumed to succeed
        if status is not None and status == (sign == "||"):
            return status
        if status is not None:
            return self.follow_statement(right)
        found: list[KnownTruth] = []
        self.follow_all_branches(
            right, "the condition before this holds", lambda: found.append(self.follow_statement(right)), _skip_branch
        )
        return (three_valued_and if sign == "&&" else three_valued_or)(status, found[0] if found else None)

    def _pipeline(self, node: Node) -> KnownTruth:
        """Follow `a | b`, each in its own shell."""
        before, status = (dict(self.words.variables), self.entered), None
        *first, last = node.named_children
        for stage in first:
            self.entered, status = self.capture_output(partial(self.follow_statement, stage))
            self.words.variables = dict(before[0])
        status = self.follow_statement(last)
        self.words.variables, self.entered = before
        return status

    def capture_output(self, follow: Callable[[], KnownTruth]) -> tuple[str | None, KnownTruth]:
        """Return the output of the statements that `follow` interprets, or None if unknown, and their status."""
        before, self.printed = self.printed, []
        try:
            status = follow()
            texts = self.printed
            return (None if None in texts else "".join(filter(None, texts))), status
        finally:
            self.printed = before

    def _negated(self, node: Node) -> KnownTruth:
        return three_valued_not(self.follow_statement(node.named_children[-1]))

    def follow_all_branches(self, node: Node, condition: str, *branches: Callable[[], object]) -> None:
        """Interpret each branch, because the taken one is unknown. Variables that differ afterwards keep their common
        prefix and are unknown from there.
        """
        before, ends = self.words.variables, list[dict[str, VariableValue]]()
        for follow_branch in branches:
            self.words.variables = dict(before)
            with suppress(ScriptExit):
                follow_branch()
            ends.append(self.words.variables)
        names = sorted({name for end in ends for name in end})
        self.words.variables = dict(ends[0])
        differing = [name for name in names if any(_differ(end.get(name), ends[0].get(name)) for end in ends)]
        for name in differing:
            self.words.variables[name] = merge_branch_values(
                name, [end.get(name) for end in ends], self.words.line_number(node)
            )
        if differing:
            named = ", ".join(f"${name}" for name in differing[:6]) + (" and others" if len(differing) > 6 else "")
            self.add_remark(
                node, f"it is unknown if {condition}: {named} {'is' if len(differing) == 1 else 'are'} left open"
            )

    # Commands.

    def _define(self, node: Node) -> KnownTruth:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name and body:
            self.functions[node_text(name)] = (body, self.words.place)
        return True

    def call_function(self, name: str, arguments: list[ShellWord]) -> KnownTruth:
        """Interpret a call of a function that the script defines; return whether it succeeds, or None if unknown."""
        body, place = self.functions[name]
        self.locals.append({})
        try:
            with self.enter_level(), self.words.at_offset(place, arguments):
                return self.follow_statement(body)
        except ScriptExit as leave:
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
    def enter_level(self) -> Iterator[None]:
        """Enter one level of nested functions, substitutions or scripts; too deep a level raises
        `ScriptExit("return")`.
        """
        self.depth += 1
        try:
            if self.depth > NESTED:
                raise ScriptExit("return")
            yield
        finally:
            self.depth -= 1

    def _substitute_command(self, node: Node) -> str | None:
        """Return the output of `$(...)`."""
        before = dict(self.words.variables)
        try:
            with self.enter_level():
                return self.capture_output(lambda: self.follow_block(node.named_children))[0]
        except ScriptExit:
            return None
        finally:
            self.words.variables = before

    def _command(self, node: Node) -> KnownTruth:
        words, before, entered = self.words, dict(self.words.variables), self.entered
        prefixes = [child for child in node.named_children if child.type == "variable_assignment"]
        names = [child.children[0] for child in node.children_by_field_name("name")]
        parts = group_adjacent([*names, *node.children_by_field_name("argument")], every=True)
        fields = [word for group in parts for word in words.expand_fields(*group)]
        for child in node.named_children:
            if child.type == "variable_assignment":
                assign_variable(self, child)
            elif child.type == "herestring_redirect":
                read_redirected_input(self, child)
        try:
            return follow_command(self, fields, node) if fields else True
        finally:
            if any(child.type == "herestring_redirect" for child in node.named_children):
                self.entered = entered
            for name in [node_text(prefix).partition("=")[0] for prefix in prefixes] if fields else []:
                words.variables.pop(name, None)
                words.variables |= {name: before[name]} if name in before else {}

    def _test(self, node: Node) -> KnownTruth:
        """Follow `[ ... ]` and `[[ ... ]]`."""
        double = node.children[0].type == "[["
        found: list[ConditionOperand] = []
        for group in group_adjacent(list(condition_leaves(node))[1:-1]):
            if group[0].type not in VALUES:
                found.append(ConditionOperand(node_text(group[0]), ""))
            elif double:
                regex = node_text(group[0]) if group[0].type == "regex" else ""
                found.append(
                    ConditionOperand(self.words.expand_text(*group), regex or self.words.expand_pattern(*group))
                )
            else:
                found += [
                    ConditionOperand(word.text, quote_pattern(word.text)) for word in self.words.expand_fields(*group)
                ]
        return self.evaluate_condition(found, node)

    def evaluate_condition(self, operands: Sequence[ConditionOperand], node: Node) -> KnownTruth:
        """Return the truth of a `[ ... ]` or `[[ ... ]]` condition, or None if unknown."""
        return ConditionEvaluator(
            operands, lambda text: self.comparison_text(text, node), self.evaluate_expression
        ).evaluate()

    def comparison_text(self, text: str, node: Node) -> str | None:
        """Return a text as a condition compares it, or None if unknown; unset variables count as empty, with a remark."""
        for name in MARK.findall(text):
            if not name.isidentifier() or name in self.words.awaited or ALWAYS_SET.fullmatch(name):
                return None
            self.add_remark(
                node, f"${name} is not set in the script and counts as empty here; --define {name}=... gives it a value"
            )
        return MARK.sub("", text)


STATEMENTS: dict[str, Callable[[ScriptReader, Node], KnownTruth]] = {
    "command": ScriptReader._command,
    "variable_assignment": assign_variable,
    "variable_assignments": assign_variables,
    "declaration_command": declare_variables,
    "unset_command": unset_variables,
    "list": ScriptReader._list,
    "pipeline": ScriptReader._pipeline,
    "redirected_statement": follow_redirection,
    "negated_command": ScriptReader._negated,
    "if_statement": follow_if_statement,
    "case_statement": follow_case_statement,
    "for_statement": follow_for_loop,
    "c_style_for_statement": follow_counting_loop,
    "while_statement": follow_while_loop,
    "function_definition": ScriptReader._define,
    "subshell": ScriptReader._follow_subshell,
    "compound_statement": ScriptReader._compound,
    "do_group": lambda reader, node: reader.follow_block(node.named_children),
    "test_command": ScriptReader._test,
}


def _differ(one: VariableValue | None, other: VariableValue | None) -> bool:
    return one is not other and word_texts(one) != word_texts(other)


def _skip_branch() -> None:
    """Follow the branch of a script that does nothing."""
