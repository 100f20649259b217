"""Follows a script from top to bottom: which variables it sets and which commands it would start. Nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from tree_sitter import Node

from mega_cli.megatron_args.arithmetic import calculate
from mega_cli.megatron_args.commands import Leave, run_command
from mega_cli.megatron_args.conditions import Condition, Operand, Truth, both, either, negation
from mega_cli.megatron_args.expand import Expander, Value
from mega_cli.megatron_args.globs import matches, quoted
from mega_cli.megatron_args.shell import CLOSE, MARK, OPEN, Word, shown, unknown
from mega_cli.megatron_args.syntax import faults, parse, text_of

ROUNDS = 256  # of a loop
NESTED = 24  # functions, substitutions and scripts in scripts
ALWAYS_SET = re.compile(r"HOME|USER|PWD|HOSTNAME|RANDOM|SECONDS|BASH\w*|(?:SLURM|OMPI|PMI|PBS)_\w+")
ASKING = re.compile(r"(?:grep|egrep|command|which|type|hash|pgrep|diff|cmp)\b")
VALUES = frozenset(
    {"word", "string", "raw_string", "ansi_c_string", "translated_string", "concatenation", "number", "simple_expansion",
     "expansion", "command_substitution", "arithmetic_expansion", "process_substitution", "brace_expression",
     "extglob_pattern", "regex", "variable_name", "array"}
)  # fmt: skip


T = TypeVar("T")


@dataclass
class Script:
    """What a script comes to.

    Attributes:
        variables: what it leaves behind, by name and index.
        commands: each command that would be started, in order, as its words; for what a launcher is given as a script,
            the launcher's words stand before.
        remarks: what could not be followed, as (line, sentence).
        texts: the script itself, and scripts in it.
    """

    variables: dict[str, Value] = field(default_factory=dict)
    commands: list[list[Word]] = field(default_factory=list)
    remarks: list[tuple[int, str]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


def read_script(
    text: str,
    *,
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    define: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
) -> Script:
    """Follow a script.

    Args:
        path: where it lies; files that it sources or starts are looked for beside it.
        environment: variables that are set before its first line.
        define: variables that hold, whatever it assigns to them itself.
        arguments: `$1` and on; None where they are not given.
    """
    reader = Reader(Script(), path)
    for name, value in {**(environment or {}), **(define or {})}.items():
        reader.words.set_text(name, value, 0)
    reader.words.defined = set(define or {})
    given = None if arguments is None else [Word(argument, 0) for argument in arguments]
    reader.read(text, 1, given)
    reader.script.variables = reader.words.variables
    return reader.script


class Reader:
    """Goes through the statements of a tree.

    Attributes:
        launcher: the words of the command that was given the script being read.
        entered: what a command reads from its input; None where that is not known.
        printed: what has been printed; an item is None where that is not known.
        files: what was written to files.
    """

    def __init__(self, script: Script, path: Path | None) -> None:
        self.script, self.path = script, path
        self.words = Expander(self._substituted)
        self.functions: dict[str, tuple[Node, int]] = {}
        self.launcher: list[Word] = []
        self.entered: str | None = None
        self.printed: list[str | None] = []
        self.files: dict[str, str] = {}
        self.locals: list[dict[str, Value | None]] = []
        self.depth = 0

    def read(self, text: str, line: int, arguments: list[Word] | None = None) -> Truth:
        """Read a script, or the text of `eval`; its first line is `line`."""
        text = text.replace("\r\n", "\n")
        self.script.texts.append(text)
        root = parse(self.words.numbered(text))
        try:
            with self.deeper(), self.words.at(line, arguments):
                for node in faults(root):
                    self.remark(node, f"{text_of(node).strip()[:40]!r} makes no sense to the shell here")
                return self._block(root.named_children)
        except Leave:
            return None

    def remark(self, node: Node, sentence: str) -> None:
        """Tell the user something about a place of the script."""
        remark = (self.words.line(node), sentence)
        if remark not in self.script.remarks:
            self.script.remarks.append(remark)

    # Statements.

    def _block(self, nodes: Sequence[Node]) -> Truth:
        status: Truth = True
        for node in nodes:
            if node.type != "comment":
                status = self._statement(node)
        return status

    def _statement(self, node: Node) -> Truth:
        follow = STATEMENTS.get(node.type)
        if follow:
            return follow(self, node)
        self.printed.append(None)
        return self._block([child for child in node.named_children if child.type in STATEMENTS])

    def _inside(self, node: Node) -> Truth:
        """`( ... )`: what is set there is not set afterwards."""
        before = dict(self.words.variables)
        try:
            return self._block(node.named_children)
        finally:
            self.words.variables = before

    def _compound(self, node: Node) -> Truth:
        """`{ ... }` or `(( ... ))`."""
        if node.children[0].type != "((":
            return self._block(node.named_children)
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
        return self._joined(self._statement(left), left, sign, right)

    def _joined(self, status: Truth, left: Node, sign: str, right: Node) -> Truth:
        if status is None and left.type not in ("test_command", "list", "compound_statement"):
            status = None if ASKING.match(text_of(left)) else True  # commands do what they are asked to
        if status is not None and status == (sign == "||"):
            return status
        if status is not None:
            return self._statement(right)
        found: list[Truth] = []
        self._either(right, "the condition before this holds", lambda: found.append(self._statement(right)), _nothing)
        return (both if sign == "&&" else either)(status, found[0] if found else None)

    def _pipeline(self, node: Node) -> Truth:
        status, entered = None, self.entered
        stages = node.named_children
        for number, stage in enumerate(stages):
            if number + 1 < len(stages):
                before = dict(self.words.variables)
                self.entered, status = self.captured(partial(self._statement, stage))
                self.words.variables = before
            else:
                status = self._statement(stage)
        self.entered = entered
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
        return negation(self._statement(node.named_children[-1]))

    def _if(self, node: Node) -> Truth:
        return self._arms(node, list(_arms(node)))

    def _arms(self, node: Node, arms: Sequence[tuple[list[Node], list[Node]]]) -> Truth:
        for number, (condition, body) in enumerate(arms):
            holds = self._block(condition)
            if holds:
                return self._block(body)
            if holds is None:
                rest = arms[number + 1 :]
                follow, go_on = partial(self._block, body), partial(self._arms, node, rest)
                self._either(node, "this `if` holds", follow, go_on)
                return None
        return True

    def _case(self, node: Node) -> Truth:
        value = node.child_by_field_name("value")
        text = self.words.text(value) if value else ""
        return self._items(node, text, [child for child in node.children if child.type == "case_item"])

    def _items(self, node: Node, text: str, items: Sequence[Node]) -> Truth:
        worth = self._worth(text, node)
        for number, item in enumerate(items):
            patterns, body = self._patterns(item)
            found = [None if worth is None and p != "*" else matches(worth or "", p) for p in patterns]
            holds: Truth = True if True in found else None if None in found else False
            if holds:
                return self._block(body)
            if holds is None:
                rest = items[number + 1 :]
                follow, go_on = partial(self._block, body), partial(self._items, node, text, rest)
                self._either(node, f"{shown(text)} is {shown(patterns[0])}", follow, go_on)
                return None
        return True

    def _patterns(self, item: Node) -> tuple[list[str], list[Node]]:
        """The patterns of an item of a `case`, and its statements."""
        end = next(at for at, child in enumerate(item.children) if child.type == ")")
        groups = adjacent([child for child in item.children[:end] if child.type in VALUES])
        return [self.words.pattern(*group) for group in groups], [
            child for child in item.children[end + 1 :] if child.is_named
        ]

    def _either(self, node: Node, what: str, *ways: Callable[[], object]) -> None:
        """Go each of the ways, for it is not known which is the script's. What they leave different is not known."""
        before, ends = self.words.variables, list[dict[str, Value]]()
        for way in ways:
            self.words.variables = dict(before)
            with suppress(Leave):
                way()
            ends.append(self.words.variables)
        names = sorted({name for end in ends for name in end})
        self.words.variables = dict(ends[0])
        differing = [name for name in names if any(_texts(end.get(name)) != _texts(ends[0].get(name)) for end in ends)]
        for name in differing:
            self.words.variables[name] = _common(name, [end.get(name) for end in ends], self.words.line(node))
        if differing:
            named = ", ".join(f"${name}" for name in differing[:6]) + (" and others" if len(differing) > 6 else "")
            self.remark(node, f"it is not known whether {what}: what it says of {named} is left open")

    # Loops.

    def _for(self, node: Node) -> Truth:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        if variable is None or body is None:
            return None
        name, listed = text_of(variable), any(child.type == "in" for child in node.children)
        given = [word for value in node.children_by_field_name("value") for word in self.words.fields(value)]
        values = given if listed else list(self.words.positional or [])
        rounds = iter(values[:ROUNDS])

        def begin() -> Truth:
            value = next(rounds, None)
            if value is not None:
                self.words.set(name, {"0": value})
            return value is not None

        if any(MARK.search(word.text) for word in values):
            self._either(node, f"${name} of this loop has a value", lambda: self._once(name, body, node), _nothing)
            return True
        return self._rounds(node, begin, lambda: self._statement(body))

    def _once(self, name: str, body: Node, node: Node) -> None:
        self.words.set_text(name, unknown("{" + name + "}"), self.words.line(node))
        self._statement(body)

    def _while(self, node: Node) -> Truth:
        body = node.child_by_field_name("body")
        conditions = [child for child in node.children_by_field_name("condition") if child.is_named]
        until = node.children[0].type == "until"

        def begin() -> Truth:
            holds = self._block(conditions)
            return negation(holds) if until else holds

        return self._rounds(node, begin, lambda: self._statement(body) if body else None)

    def _counting(self, node: Node) -> Truth:
        """`for ((i = 0; i < 3; i++))`."""
        parts = [part.strip() for part in text_of(node).partition("((")[2].partition("))")[0].split(";")]
        body = node.child_by_field_name("body")
        if len(parts) != 3 or body is None:
            return None
        self.calculate(self.words.evaluated(parts[0]))

        def begin() -> Truth:
            value = self.calculate(self.words.evaluated(parts[1])) if parts[1] else 1
            return None if value is None else value != 0

        def follow() -> None:
            self._statement(body)
            self.calculate(self.words.evaluated(parts[2]))

        return self._rounds(node, begin, follow)

    def _rounds(self, node: Node, begin: Callable[[], Truth], follow: Callable[[], object]) -> Truth:
        """Follow the rounds of a loop as long as `begin` says that there is another."""
        for _ in range(ROUNDS):
            before, holds = self.words.variables.copy(), begin()
            if not holds:
                break
            try:
                follow()
            except Leave as leave:
                if leave.args[0] == "break":
                    return True
                if leave.args[0] != "continue":
                    raise
            if node.type == "while_statement" and self.words.variables == before:
                return True  # it would go on like this for ever
        else:
            holds = None
        if holds is None:
            self._either(node, "this loop goes on", follow, _nothing)
        return True

    # Commands.

    def _assignments(self, node: Node) -> Truth:
        for child in node.named_children:
            self._assign(child)
        return True

    def _assign(self, node: Node) -> Truth:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None:
            return True
        words, name = self.words, text_of(target.child_by_field_name("name") or target)
        appended = any(child.type == "+=" for child in node.children)
        old = words.get(name) or {} if appended else {}
        if value is not None and value.type == "array":
            words.set(name, self._array(name, value, dict(old)))
            return True
        text = words.text(value) if value else ""
        key: str | None = "0"
        if target.type == "subscript":
            index = target.child_by_field_name("index")
            key, old = words.key(name, index) if index else "0", words.get(name) or {}
        if key is None:
            words.set_number(name, None)
            return True
        awaited = (match := MARK.fullmatch(text)) is not None and (match[1].isdigit() or match[1] in words.awaited)
        if awaited and match and match[1].isdigit():
            text = unknown(name)  # an argument of the script is better known by the variable that it is given to
        before = old[key].text if appended and key in old else ""
        words.set(name, {**old, key: Word(before + text, old[key].line if before else words.line(node))})
        if awaited:
            words.awaited.add(name)
        return True

    def _array(self, name: str, node: Node, value: Value) -> Value:
        position = len(value)
        for item in node.named_children:
            keyed = re.match(r"\[([^]]*)\]=", text_of(item))
            if item.type == "comment":
                continue
            if keyed:
                key = self.words.evaluated(keyed[1].strip("'\""))
                value[key] = Word(self.words.between(item, keyed.end(), quote=""), self.words.line(item))
                continue
            for word in self.words.fields(item):
                value[str(position)] = word
                position += 1
        return value

    def _declare(self, node: Node) -> Truth:
        """`export`, `declare`, `local` and their kin."""
        command, words = node.children[0].type, self.words
        options = "".join(text_of(child) for child in node.named_children if text_of(child).startswith("-"))
        for child in node.named_children:
            name = re.match(r"\w*", text_of(child))[0]  # type: ignore[index]
            if self.locals and command not in ("export", "readonly") and name:
                self.locals[-1].setdefault(name, words.variables.get(name))
            if "A" in options and name:
                words.associative.add(name)
            if child.type == "variable_assignment":
                self._assign(child)
                if "i" in options:
                    words.set_number(name, None if (value := self.calculate(name)) is None else str(value))
            elif child.type == "variable_name" and (command == "local" or "A" in options or "a" in options):
                words.set(name, {})
            elif assigned := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words.text(child), re.DOTALL):
                words.set_text(assigned[1], assigned[2], words.line(node))
        return True

    def _unset(self, node: Node) -> Truth:
        for child in node.named_children:
            if text_of(child) == "IFS":
                self.words.variables.pop("IFS", None)
            elif not text_of(child).startswith("-"):
                self.words.set(text_of(child), {})
        return True

    def _define(self, node: Node) -> Truth:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name and body:
            self.functions[text_of(name)] = (body, self.words.first_line)
        return True

    def call(self, name: str, arguments: list[Word]) -> Truth:
        """Call a function."""
        body, first_line = self.functions[name]
        self.locals.append({})
        try:
            with self.deeper(), self.words.at(first_line, arguments):
                return self._statement(body)
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
                return self.captured(lambda: self._block(node.named_children))[0]
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
                self._assign(child)
            elif child.type == "herestring_redirect":
                self.entered = words.text(child.named_children[-1]) + "\n"
        try:
            return run_command(self, fields, node) if fields else True
        finally:
            self.entered = entered
            for name in [text_of(prefix).partition("=")[0] for prefix in prefixes] if fields else []:
                words.variables.pop(name, None)
                words.variables |= {name: before[name]} if name in before else {}

    def _redirected(self, node: Node) -> Truth:
        body, before = node.child_by_field_name("body"), self.entered
        redirects = [*node.children_by_field_name("redirect")]
        heredocs = [child for child in redirects if child.type == "heredoc_redirect"]
        redirects += [inner for child in heredocs for inner in child.children_by_field_name("redirect")]
        further = [inner for child in heredocs for inner in child.named_children if inner.type == "pipeline"]
        for redirect in redirects:
            self._enter(redirect)
        writing = next(filter(None, map(_written, redirects)), None)
        try:
            if body is None:
                return True
            if writing is None and not further:
                return self._statement(body)
            text, status = self.captured(lambda: self._statement(body))
            if writing is not None and text is not None:
                name = self.words.text(writing.named_children[-1])
                old = self.files.get(name, "") if writing.children[0].type == ">>" else ""
                self.files[name] = old + text
            self.entered = text
            return self._block(further) if further else status
        finally:
            self.entered = before

    def _enter(self, redirect: Node) -> None:
        """What a command reads."""
        if redirect.type == "herestring_redirect":
            self.entered = self.words.text(redirect.named_children[-1]) + "\n"
        elif redirect.type == "heredoc_redirect":
            body = next((child for child in redirect.named_children if child.type == "heredoc_body"), None)
            start = next(text_of(child) for child in redirect.named_children if child.type == "heredoc_start")
            literal = re.search(r"[\"'\\]", start)
            text = "" if body is None else self.words.heredoc(body, literal=literal is not None)
            self.entered = re.sub(r"(?m)^\t+", "", text) if redirect.children[0].type == "<<-" else text
        elif redirect.children[0].type == "<":
            self.entered = self.files.get(self.words.text(redirect.named_children[-1]))

    def _test(self, node: Node) -> Truth:
        """`[ ... ]` and `[[ ... ]]`."""
        double = node.children[0].type == "[["
        found: list[Operand] = []
        for group in adjacent(list(_leaves(node))[1:-1]):
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
        return Condition(operands, lambda text: self._worth(text, node), self.calculate).holds()

    def _worth(self, text: str, node: Node) -> str | None:
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
    "variable_assignment": Reader._assign,
    "variable_assignments": Reader._assignments,
    "declaration_command": Reader._declare,
    "unset_command": Reader._unset,
    "list": Reader._list,
    "pipeline": Reader._pipeline,
    "redirected_statement": Reader._redirected,
    "negated_command": Reader._negated,
    "if_statement": Reader._if,
    "case_statement": Reader._case,
    "for_statement": Reader._for,
    "c_style_for_statement": Reader._counting,
    "while_statement": Reader._while,
    "function_definition": Reader._define,
    "subshell": Reader._inside,
    "compound_statement": Reader._compound,
    "do_group": lambda reader, node: reader._block(node.named_children),
    "test_command": Reader._test,
}


def _nothing() -> None:
    """The way of a script that does not do something."""


def _arms(node: Node) -> Iterator[tuple[list[Node], list[Node]]]:
    """The conditions of an `if`, each with its statements; `else` has the empty one."""
    condition: list[Node] = []
    body: list[Node] = []
    into = condition
    for child in node.children:
        if child.type == "then" or node.type == "else_clause":
            into = body
        if child.is_named and child.type not in ("elif_clause", "else_clause"):
            into.append(child)
    yield condition, body
    for child in node.named_children:
        if child.type in ("elif_clause", "else_clause"):
            yield from _arms(child)


def _written(redirect: Node) -> Node | None:
    """The redirection if it takes what a command prints."""
    signs = [child.type for child in redirect.children if not child.is_named]
    to_error = redirect.children[0].type == "file_descriptor" and text_of(redirect.children[0]) != "1"
    return redirect if signs and signs[0] in (">", ">>", "&>", "&>>", ">|", ">&") and not to_error else None


def adjacent(nodes: Sequence[Node], *, every: bool = False) -> list[list[Node]]:
    """Nodes without a blank between them make up one word; of `every` node, or of those that no sign is."""
    groups: list[list[Node]] = []
    for node in nodes:
        last = groups[-1][-1] if groups else None
        word = every or (last is not None and last.type in VALUES and node.type in VALUES)
        if last is not None and word and _touching(last, node):
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _touching(left: Node, right: Node) -> bool:
    if left.end_byte == right.start_byte:
        return not text_of(right)[:1].isspace()
    between = _source(left)[left.end_byte : right.start_byte]
    return between == b"\\\n"


def _source(node: Node) -> bytes:
    while node.parent is not None:
        node = node.parent
    return b" " * node.start_byte + (node.text or b"")


def _leaves(node: Node) -> Iterator[Node]:
    """Words and signs of a condition in their order."""
    for child in node.children:
        if child.type in VALUES or not child.child_count:
            yield child
        else:
            yield from _leaves(child)


def _texts(value: Value | None) -> dict[str, str] | None:
    return None if value is None else {key: word.text for key, word in value.items()}


def _common(name: str, values: Sequence[Value | None], line: int) -> Value:
    """What is the same in the values of a variable, up to where they begin to differ."""
    mark = unknown("{" + name + "}")
    if any(value and set(value) != {"0"} for value in values):
        same = dict(_leading([list((_texts(value) or {}).items()) for value in values]))
        first = next(filter(None, values))
        return {**{key: first[key] for key in same}, str(len(same)): Word(mark, line)}
    texts = [value["0"].text if value else "" for value in values]
    tokens = [re.findall(rf"{OPEN}[^{CLOSE}]*{CLOSE}|\s+|[^\s{OPEN}]+", text) for text in texts]
    start = "".join(_leading(tokens))
    return {"0": Word((start.rstrip() + " " if start.strip() else "") + mark, line)}


def _leading(lists: Sequence[Sequence[T]]) -> list[T]:
    """What several lists begin with alike."""
    return [row[0] for row in takewhile(lambda row: all(item == row[0] for item in row), zip(*lists, strict=False))]
