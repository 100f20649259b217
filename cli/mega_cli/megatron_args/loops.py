"""The loops of a script, round by round."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mega_cli.megatron_args.commands import Leave
from mega_cli.megatron_args.conditions import Truth, negation
from mega_cli.megatron_args.shell import MARK, unknown
from mega_cli.megatron_args.syntax import text_of

if TYPE_CHECKING:
    from tree_sitter import Node

    from mega_cli.megatron_args.script import Reader

ROUNDS = 256  # of a loop


def follow_for(reader: Reader, node: Node) -> Truth:
    """`for NAME in ...`; what is not known is not gone through word by word."""
    variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
    if variable is None or body is None:
        return None
    name, listed = text_of(variable), any(child.type == "in" for child in node.children)
    given = [word for value in node.children_by_field_name("value") for word in reader.words.fields(value)]
    values = given if listed else list(reader.words.positional or [])
    rounds = iter(values[:ROUNDS])

    def begin() -> Truth:
        value = next(rounds, None)
        if value is not None:
            reader.words.set(name, {"0": value})
        return value is not None

    if any(MARK.fullmatch(word.text) for word in values):
        reader.either(node, f"${name} of this loop has a value", lambda: _once(reader, name, body, node), lambda: None)
        return True
    return _rounds(reader, node, begin, lambda: reader.statement(body))


def _once(reader: Reader, name: str, body: Node, node: Node) -> None:
    reader.words.set_text(name, unknown("{" + name + "}"), reader.words.line(node))
    reader.statement(body)


def follow_while(reader: Reader, node: Node) -> Truth:
    """`while ...` and `until ...`."""
    body = node.child_by_field_name("body")
    conditions = [child for child in node.children_by_field_name("condition") if child.is_named]
    until = node.children[0].type == "until"

    def begin() -> Truth:
        holds = reader.block(conditions)
        return negation(holds) if until else holds

    return _rounds(reader, node, begin, lambda: reader.statement(body) if body else None)


def follow_counting(reader: Reader, node: Node) -> Truth:
    """`for ((i = 0; i < 3; i++))`."""
    parts = [part.strip() for part in text_of(node).partition("((")[2].partition("))")[0].split(";")]
    body = node.child_by_field_name("body")
    if len(parts) != 3 or body is None:
        return None
    reader.calculate(reader.words.evaluated(parts[0]))

    def begin() -> Truth:
        value = reader.calculate(reader.words.evaluated(parts[1])) if parts[1] else 1
        return None if value is None else value != 0

    def follow() -> None:
        reader.statement(body)
        reader.calculate(reader.words.evaluated(parts[2]))

    return _rounds(reader, node, begin, follow)


def _rounds(reader: Reader, node: Node, begin: Callable[[], Truth], follow: Callable[[], object]) -> Truth:
    """Follow the rounds of a loop as long as `begin` says that there is another."""
    for _ in range(ROUNDS):
        before, holds = reader.words.variables.copy(), begin()
        if not holds:
            break
        try:
            follow()
        except Leave as leave:
            if leave.args[0] == "break":
                return True
            if leave.args[0] != "continue":
                raise
        if node.type == "while_statement" and reader.words.variables == before:
            return True  # it would go on like this for ever
    else:
        holds = None
    if holds is None:
        reader.either(node, "this loop goes on", follow, lambda: None)
    return True
