"""Follows a script from top to bottom: which variables it sets and which commands it would start. Nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath

from tree_sitter import Node

from mega_cli.megatron_args.arithmetic import calculate
from mega_cli.megatron_args.assignments import assign, assign_all, declare, unset
from mega_cli.megatron_args.branches import follow_case, follow_if
from mega_cli.megatron_args.budget import PARSED, Budget
from mega_cli.megatron_args.commands import Leave, run_command
from mega_cli.megatron_args.conditions import Condition, Operand, Truth, both, either, negation
from mega_cli.megatron_args.expand import Expander, Value
from mega_cli.megatron_args.globs import quoted
from mega_cli.megatron_args.loops import follow_counting, follow_for, follow_while
from mega_cli.megatron_args.merge import common_value, texts_of
from mega_cli.megatron_args.redirects import enter, follow_redirected
from mega_cli.megatron_args.shell import CLOSE, MARK, OPEN, Word
from mega_cli.megatron_args.syntax import VALUES, adjacent, faults, leaves, parse, text_of
from mega_common.errors import ConfigError

STEPS = 20_000  # statements of a script, in all rounds of its loops
LARGEST_FILE = 1_000_000  # bytes
LARGEST_SCRIPT = 256_000  # characters
NESTED = 24  # functions, substitutions and scripts in scripts
ALWAYS_SET = re.compile(r"HOME|USER|PWD|HOSTNAME|RANDOM|SECONDS|BASH\w*|(?:SLURM|OMPI|PMI|PBS)_\w+")
ASKING = re.compile(r"(?:grep|egrep|command|which|type|hash|pgrep|diff|cmp)\b")


@dataclass
class Script:
    """What a script comes to.

    Attributes:
        variables: what it leaves behind, by name and index.
        commands: each command that would be started, in order, as its words; for what a launcher is given as a script,
            the launcher's words stand before.
        remarks: what could not be followed, as (line, sentence).
        texts: the script itself, and scripts in it.
        path: where it lies.
        files: what it wrote to files, by their names.
        budget: of the characters that following it may make.
    """

    variables: dict[str, Value] = field(default_factory=dict)
    commands: list[list[Word]] = field(default_factory=list)
    remarks: list[tuple[int, str]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    path: Path | None = None
    files: dict[str, str] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)

    def write(self, name: str, text: str, *, append: bool = False) -> None:
        """Have it write a file."""
        name = name.removeprefix("./")
        before = self.files.get(name, "") if append else ""
        self.budget.spend(len(before) + len(text))
        self.files[name] = before + text

    def file(self, name: str) -> str | None:
        """A file that it wrote, or that lies beside it."""
        if (name := name.removeprefix("./")) in self.files:
            return self.files[name]
        relative = MARK.split(name)[-1].lstrip("/")
        if self.path is None or not relative:
            return None
        for candidate in (relative, PurePosixPath(relative).name):
            file = self.path.parent / candidate
            with suppress(OSError, ValueError):
                if file.is_file() and file.stat().st_size <= LARGEST_FILE and not file.samefile(self.path):
                    self.budget.spend(file.stat().st_size)
                    return file.read_text(encoding="utf-8")
        return None


def read_script(
    text: str,
    *,
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    define: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
) -> Script:
    """Follow a script.

    Raises:
        ConfigError: for what is nested too deeply.

    Args:
        path: where it lies; files that it sources or starts are looked for beside it.
        environment: variables that are set before its first line.
        define: variables that hold, whatever it assigns to them itself.
        arguments: `$1` and on; None where they are not given.
    """
    if OPEN in text or CLOSE in text:
        raise ConfigError("the launch script holds characters of Unicode's private use area; remove them")
    reader = Reader(Script(path=path))
    for name, value in {**(environment or {}), **(define or {})}.items():
        reader.words.set_text(name, value, 0)
    reader.words.defined = set(define or {})
    given = None if arguments is None else [Word(argument, 0) for argument in arguments]
    try:
        reader.read(text, 1, given, flat=False)
    except RecursionError:
        raise ConfigError("the launch script is nested too deeply to be read", hint="is it a shell script?") from None
    if reader.steps > STEPS:
        reader.script.remarks.append((1, f"the script was followed for its first {STEPS} statements only"))
    reader.script.variables = reader.words.variables
    return reader.script


class Reader:
    """Goes through the statements of a tree.

    Attributes:
        launcher: the words of the command that was given the script being read.
        entered: what a command reads from its input; None where that is not known.
        printed: what has been printed; an item is None where that is not known.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.words = Expander(self._substituted, budget=script.budget)
        self.functions: dict[str, tuple[Node, tuple[int, bool]]] = {}
        self.launcher: list[Word] = []
        self.entered: str | None = None
        self.printed: list[str | None] = []
        self.locals: list[dict[str, Value | None]] = []
        self.depth = self.steps = 0

    def read(self, text: str, line: int, arguments: list[Word] | None = None, *, flat: bool = True) -> Truth:
        """Read a script; or, `flat`, one that stands in a line of it, such as the text of `eval`."""
        text = text.replace("\r\n", "\n")
        if len(text) > LARGEST_SCRIPT:
            raise ConfigError(f"the launch script is longer than {LARGEST_SCRIPT:,} characters")
        self.script.budget.spend(PARSED * len(text) + len(self.words.marks))
        self.script.texts.append(text)
        root = parse(self.words.numbered(text))
        try:
            with self.deeper(), self.words.at((line, flat), arguments):
                for node in faults(root):
                    self.remark(node, f"{text_of(node).strip()[:40]!r} makes no sense to the shell here")
                return self.block(root.named_children)
        except Leave:
            return None

    def remark(self, node: Node, sentence: str) -> None:
        """Tell the user something about a place of the script."""
        remark = (self.words.line(node), sentence)
        if remark not in self.script.remarks:
            self.script.remarks.append(remark)

    # Statements.

    def block(self, nodes: Sequence[Node]) -> Truth:
        """Follow statements; the last one's status."""
        status: Truth = True
        for node in nodes:
            if node.type != "comment":
                status = self.statement(node)
        return status

    def statement(self, node: Node) -> Truth:
        """Follow a statement; None where its status is not known."""
        self.steps += 1
        if self.steps > STEPS:
            raise Leave("exit")
        follow = STATEMENTS.get(node.type)
        if follow:
            return follow(self, node)
        self.printed.append(None)
        return self.block([child for child in node.named_children if child.type in STATEMENTS])

    def _inside(self, node: Node) -> Truth:
        """`( ... )`: what is set there is not set afterwards."""
        before = dict(self.words.variables)
        try:
            return self.block(node.named_children)
        finally:
            self.words.variables = before

    def _compound(self, node: Node) -> Truth:
        """`{ ... }` or `(( ... ))`."""
        if node.children[0].type != "((":
            return self.block(node.named_children)
        value = self.calculate(self.words.between(node, 2, 2))
        return None if value is None else value != 0

    def calculate(self, text: str) -> int | None:
        """The value of an expression; where that is not known, neither is what it sets."""
        if MARK.search(text):
            for name in re.findall(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)", text):
                self.words.set_number(name, None)
            return None
        return calculate(text, self.words)

    def _list(self, node: Node) -> Truth:
        """`a && b`, `a || b`."""
        left, right = node.named_children[0], node.named_children[-1]
        sign = next((child.type for child in node.children if child.type in ("&&", "||")), "&&")
        return self._joined(self.statement(left), left, sign, right)

    def _joined(self, status: Truth, left: Node, sign: str, right: Node) -> Truth:
        if status is None and left.type not in ("test_command", "list", "compound_statement"):
            status = None if ASKING.match(text_of(left)) else True  # commands do what they are asked to
        if status is not None and status == (sign == "||"):
            return status
        if status is not None:
            return self.statement(right)
        found: list[Truth] = []
        self.either(right, "the condition before this holds", lambda: found.append(self.statement(right)), _nothing)
        return (both if sign == "&&" else either)(status, found[0] if found else None)

    def _pipeline(self, node: Node) -> Truth:
        """`a | b`: each in a shell of its own."""
        before, status = (dict(self.words.variables), self.entered), None
        *first, last = node.named_children
        for stage in first:
            self.entered, status = self.captured(partial(self.statement, stage))
            self.words.variables = dict(before[0])
        status = self.statement(last)
        self.words.variables, self.entered = before
        return status

    def captured(self, follow: Callable[[], Truth]) -> tuple[str | None, Truth]:
        """What is printed while statements are followed, if that is known, and their status."""
        before, self.printed = self.printed, []
        try:
            status = follow()
            texts = self.printed
            return (None if None in texts else "".join(filter(None, texts))), status
        finally:
            self.printed = before

    def _negated(self, node: Node) -> Truth:
        return negation(self.statement(node.named_children[-1]))

    def either(self, node: Node, what: str, *ways: Callable[[], object]) -> None:
        """Go each of the ways, for it is not known which is the script's. What they leave different is not known."""
        before, ends = self.words.variables, list[dict[str, Value]]()
        for way in ways:
            self.words.variables = dict(before)
            with suppress(Leave):
                way()
            ends.append(self.words.variables)
        names = sorted({name for end in ends for name in end})
        self.words.variables = dict(ends[0])
        differing = [name for name in names if any(_differ(end.get(name), ends[0].get(name)) for end in ends)]
        for name in differing:
            self.words.variables[name] = common_value(name, [end.get(name) for end in ends], self.words.line(node))
        if differing:
            named = ", ".join(f"${name}" for name in differing[:6]) + (" and others" if len(differing) > 6 else "")
            self.remark(node, f"it is not known whether {what}: what it says of {named} is left open")

    # Commands.

    def _define(self, node: Node) -> Truth:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name and body:
            self.functions[text_of(name)] = (body, self.words.place)
        return True

    def call(self, name: str, arguments: list[Word]) -> Truth:
        """Call a function."""
        body, place = self.functions[name]
        self.locals.append({})
        try:
            with self.deeper(), self.words.at(place, arguments):
                return self.statement(body)
        except Leave as leave:
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
    def deeper(self) -> Iterator[None]:
        """One level deeper in functions, substitutions and scripts in scripts."""
        self.depth += 1
        try:
            if self.depth > NESTED:
                raise Leave("return")
            yield
        finally:
            self.depth -= 1

    def _substituted(self, node: Node) -> str | None:
        """What `$(...)` prints."""
        before = dict(self.words.variables)
        try:
            with self.deeper():
                return self.captured(lambda: self.block(node.named_children))[0]
        except Leave:
            return None
        finally:
            self.words.variables = before

    def _command(self, node: Node) -> Truth:
        words, before, entered = self.words, dict(self.words.variables), self.entered
        prefixes = [child for child in node.named_children if child.type == "variable_assignment"]
        names = [child.children[0] for child in node.children_by_field_name("name")]
        parts = adjacent([*names, *node.children_by_field_name("argument")], every=True)
        fields = [word for group in parts for word in words.fields(*group)]
        for child in node.named_children:
            if child.type == "variable_assignment":
                assign(self, child)
            elif child.type == "herestring_redirect":
                enter(self, child)
        try:
            return run_command(self, fields, node) if fields else True
        finally:
            if any(child.type == "herestring_redirect" for child in node.named_children):
                self.entered = entered
            for name in [text_of(prefix).partition("=")[0] for prefix in prefixes] if fields else []:
                words.variables.pop(name, None)
                words.variables |= {name: before[name]} if name in before else {}

    def _test(self, node: Node) -> Truth:
        """`[ ... ]` and `[[ ... ]]`."""
        double = node.children[0].type == "[["
        found: list[Operand] = []
        for group in adjacent(list(leaves(node))[1:-1]):
            if group[0].type not in VALUES:
                found.append(Operand(text_of(group[0]), ""))
            elif double:
                regex = text_of(group[0]) if group[0].type == "regex" else ""
                found.append(Operand(self.words.text(*group), regex or self.words.pattern(*group)))
            else:
                found += [Operand(word.text, quoted(word.text)) for word in self.words.fields(*group)]
        return self.holds(found, node)

    def holds(self, operands: Sequence[Operand], node: Node) -> Truth:
        """Whether a condition holds."""
        return Condition(operands, lambda text: self.worth(text, node), self.calculate).holds()

    def worth(self, text: str, node: Node) -> str | None:
        """A text in a comparison, where what is not set counts as empty; None where it is not known."""
        for name in MARK.findall(text):
            if not name.isidentifier() or name in self.words.awaited or ALWAYS_SET.fullmatch(name):
                return None
            self.remark(
                node, f"${name} is not set in the script and counts as empty here; --define {name}=... gives it a value"
            )
        return MARK.sub("", text)


STATEMENTS: dict[str, Callable[[Reader, Node], Truth]] = {
    "command": Reader._command,
    "variable_assignment": assign,
    "variable_assignments": assign_all,
    "declaration_command": declare,
    "unset_command": unset,
    "list": Reader._list,
    "pipeline": Reader._pipeline,
    "redirected_statement": follow_redirected,
    "negated_command": Reader._negated,
    "if_statement": follow_if,
    "case_statement": follow_case,
    "for_statement": follow_for,
    "c_style_for_statement": follow_counting,
    "while_statement": follow_while,
    "function_definition": Reader._define,
    "subshell": Reader._inside,
    "compound_statement": Reader._compound,
    "do_group": lambda reader, node: reader.block(node.named_children),
    "test_command": Reader._test,
}


def _differ(one: Value | None, other: Value | None) -> bool:
    return one is not other and texts_of(one) != texts_of(other)


def _nothing() -> None:
    """The way of a script that does not do something."""
