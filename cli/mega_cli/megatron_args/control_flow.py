"""Control flow of a script: `for` and `while` loops iteration by iteration, `if` and `case`; unknown conditions follow
every branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tree_sitter import Node

from mega_cli.megatron_args.conditions import KnownTruth, three_valued_not
from mega_cli.megatron_args.script_state import ShellControlFlowException, ShellInterpreter
from mega_cli.megatron_args.shell_patterns import matches_shell_pattern
from mega_cli.megatron_args.shell_words import MARK, format_unknown_placeholders, make_unknown_placeholder
from mega_cli.megatron_args.syntax_tree import (
    VALUES,
    get_node_source_text,
    group_adjacent_syntax_nodes,
    iterate_if_branches,
)

ROUNDS = 256  # most iterations of a loop


def interpret_for_loop(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Interpret a shell loop `for NAME in ...`; return whether its last command succeeds, or None if unknown.
    If a word is unknown, the body is interpreted once with NAME unknown.
    """
    variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
    if variable is None or body is None:
        return None
    name, listed = get_node_source_text(variable), any(child.type == "in" for child in node.children)
    given = [word for value in node.children_by_field_name("value") for word in reader.words.expand_to_words(value)]
    values = given if listed else list(reader.words.positional or [])
    rounds = iter(values[:ROUNDS])

    def begin_iteration() -> KnownTruth:
        value = next(rounds, None)
        if value is not None:
            reader.words.set_variable(name, {"0": value})
        return value is not None

    if any(MARK.fullmatch(word.text) for word in values):
        reader.interpret_all_branches(
            node,
            f"${name} of this loop has a value",
            lambda: _follow_unknown_iteration(reader, name, body, node),
            lambda: None,
        )
        return True
    return _follow_iterations(reader, node, begin_iteration, lambda: reader.interpret_shell_statement(body))


def _follow_unknown_iteration(reader: ShellInterpreter, name: str, body: Node, node: Node) -> None:
    reader.words.set_text_variable(name, make_unknown_placeholder("{" + name + "}"), reader.words.line_number(node))
    reader.interpret_shell_statement(body)


def interpret_while_loop(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Interpret a shell loop `while ...` or `until ...`; return whether its last command succeeds, or None if unknown."""
    body = node.child_by_field_name("body")
    conditions = [child for child in node.children_by_field_name("condition") if child.is_named]
    until = node.children[0].type == "until"

    def begin_iteration() -> KnownTruth:
        holds = reader.interpret_statements(conditions)
        return three_valued_not(holds) if until else holds

    return _follow_iterations(
        reader, node, begin_iteration, lambda: reader.interpret_shell_statement(body) if body else None
    )


def interpret_c_style_for_loop(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Interpret a loop `for ((i = 0; i < 3; i++))`; return whether its last command succeeds, or None if unknown."""
    parts = [part.strip() for part in get_node_source_text(node).partition("((")[2].partition("))")[0].split(";")]
    body = node.child_by_field_name("body")
    if len(parts) != 3 or body is None:
        return None
    reader.evaluate_arithmetic_expression(reader.words.expand_double_quoted_text(parts[0]))

    def begin_iteration() -> KnownTruth:
        value = (
            reader.evaluate_arithmetic_expression(reader.words.expand_double_quoted_text(parts[1])) if parts[1] else 1
        )
        return None if value is None else value != 0

    def follow_expression() -> None:
        reader.interpret_shell_statement(body)
        reader.evaluate_arithmetic_expression(reader.words.expand_double_quoted_text(parts[2]))

    return _follow_iterations(reader, node, begin_iteration, follow_expression)


def _follow_iterations(
    reader: ShellInterpreter, node: Node, begin: Callable[[], KnownTruth], follow: Callable[[], object]
) -> KnownTruth:
    """Follow the iterations of a loop while `begin` returns that there is another."""
    for _ in range(ROUNDS):
        before, holds = reader.words.variables.copy(), begin()
        if not holds:
            break
        try:
            follow()
        except ShellControlFlowException as leave:
            if leave.args[0] == "break":
                return True
            if leave.args[0] != "continue":
                raise
        if node.type == "while_statement" and reader.words.variables == before:
            return True  # the loop would not terminate
    else:
        holds = None
    if holds is None:
        reader.interpret_all_branches(node, "this loop continues", follow, lambda: None)
    return True


def interpret_if_statement(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Interpret a shell `if`; return whether its last command succeeds, or None if unknown.
    Every branch is interpreted if the condition is unknown.
    """
    return _follow_branches(reader, node, list(iterate_if_branches(node)))


def _follow_branches(
    reader: ShellInterpreter, node: Node, found: Sequence[tuple[list[Node], list[Node]]]
) -> KnownTruth:
    for number, (condition, body) in enumerate(found):
        holds = reader.interpret_statements(condition)
        if holds:
            return reader.interpret_statements(body)
        if holds is None:
            rest = found[number + 1 :]
            reader.interpret_all_branches(
                node,
                "this `if` holds",
                partial(reader.interpret_statements, body),
                partial(_follow_branches, reader, node, rest),
            )
            return None
    return True


def interpret_case_statement(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Interpret a shell `case`; return whether its last command succeeds, or None if unknown.
    Every branch is interpreted if the value is unknown.
    """
    value = node.child_by_field_name("value")
    text = reader.words.expand_to_text(value) if value else ""
    return _follow_case_items(reader, node, text, [child for child in node.children if child.type == "case_item"])


def _follow_case_items(reader: ShellInterpreter, node: Node, text: str, items: Sequence[Node]) -> KnownTruth:
    value = reader.expand_condition_operand(text, node)
    for number, item in enumerate(items):
        patterns, body = _case_patterns(reader, item)
        found = [None if value is None and p != "*" else matches_shell_pattern(value or "", p) for p in patterns]
        holds: KnownTruth = True if True in found else None if None in found else False
        if holds:
            reader.interpret_statements(body)
            through = any(child.type == ";&" for child in item.children) and number + 1 < len(items)
            return reader.interpret_statements(_case_patterns(reader, items[number + 1])[1]) if through else True
        if holds is None:
            follow, skip = (
                partial(reader.interpret_statements, body),
                partial(_follow_case_items, reader, node, text, items[number + 1 :]),
            )
            reader.interpret_all_branches(
                node, f"{format_unknown_placeholders(text)} is {format_unknown_placeholders(patterns[0])}", follow, skip
            )
            return None
    return True


def _case_patterns(reader: ShellInterpreter, item: Node) -> tuple[list[str], list[Node]]:
    """Return the patterns of an item of a `case`, and its statements."""
    end = next(at for at, child in enumerate(item.children) if child.type == ")")
    groups = group_adjacent_syntax_nodes([child for child in item.children[:end] if child.type in VALUES])
    return [reader.words.expand_to_shell_pattern(*group) for group in groups], [
        child for child in item.children[end + 1 :] if child.is_named
    ]
