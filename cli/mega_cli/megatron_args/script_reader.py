"""Static interpretation of a script: the variables it sets and the commands it would start. Nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from tree_sitter import Node

from mega_cli.megatron_args.assignments import (
    interpret_shell_assignment,
    interpret_shell_assignment_list,
    interpret_shell_declare_builtin,
    interpret_unset_builtin,
)
from mega_cli.megatron_args.conditions import (
    KnownTruth,
    ShellConditionOperand,
    three_valued_and,
    three_valued_not,
    three_valued_or,
)
from mega_cli.megatron_args.control_flow import (
    interpret_c_style_for_loop,
    interpret_case_statement,
    interpret_for_loop,
    interpret_if_statement,
    interpret_while_loop,
)
from mega_cli.megatron_args.script_state import STEPS, ShellInterpreter, ShellScriptResult, Statement
from mega_cli.megatron_args.shell_commands import interpret_redirection, interpret_shell_command, read_redirected_input
from mega_cli.megatron_args.shell_patterns import escape_shell_pattern
from mega_cli.megatron_args.shell_words import CLOSE, OPEN, ShellWord
from mega_cli.megatron_args.syntax_tree import (
    VALUES,
    get_node_source_text,
    group_adjacent_syntax_nodes,
    iterate_condition_tokens,
)
from mega_common.errors import ConfigError

ASKING = re.compile(r"(?:grep|egrep|command|which|type|hash|pgrep|diff|cmp)\b")


def _follow_subshell(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Follow `( ... )`, whose assignments are local to it."""
    before = dict(reader.words.variables)
    try:
        return reader.interpret_statements(node.named_children)
    finally:
        reader.words.variables = before


def _compound(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Follow `{ ... }` or `(( ... ))`."""
    if node.children[0].type != "((":
        return reader.interpret_statements(node.named_children)
    value = reader.evaluate_arithmetic_expression(reader.words.expand_node_source(node, 2, 2))
    return None if value is None else value != 0


def _list(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Follow `a && b` and `a || b`."""
    left, right = node.named_children[0], node.named_children[-1]
    sign = next((child.type for child in node.children if child.type in ("&&", "||")), "&&")
    return _joined(reader, reader.interpret_shell_statement(left), left, sign, right)


def _joined(reader: ShellInterpreter, status: KnownTruth, left: Node, sign: str, right: Node) -> KnownTruth:
    if status is None and left.type not in ("test_command", "list", "compound_statement"):
        status = None if ASKING.match(get_node_source_text(left)) else True  # commands are assumed to succeed
    if status is not None and status == (sign == "||"):
        return status
    if status is not None:
        return reader.interpret_shell_statement(right)
    found: list[KnownTruth] = []
    reader.interpret_all_branches(
        right,
        "the condition before this holds",
        lambda: found.append(reader.interpret_shell_statement(right)),
        _skip_branch,
    )
    return (three_valued_and if sign == "&&" else three_valued_or)(status, found[0] if found else None)


def _pipeline(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Follow `a | b`, each in its own shell."""
    before, status = (dict(reader.words.variables), reader.entered), None
    *first, last = node.named_children
    for stage in first:
        reader.entered, status = reader.capture_output(partial(reader.interpret_shell_statement, stage))
        reader.words.variables = dict(before[0])
    status = reader.interpret_shell_statement(last)
    reader.words.variables, reader.entered = before
    return status


def _negated(reader: ShellInterpreter, node: Node) -> KnownTruth:
    return three_valued_not(reader.interpret_shell_statement(node.named_children[-1]))


def _define(reader: ShellInterpreter, node: Node) -> KnownTruth:
    name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
    if name and body:
        reader.functions[get_node_source_text(name)] = (body, reader.words.place)
    return True


def _command(reader: ShellInterpreter, node: Node) -> KnownTruth:
    words, before, entered = reader.words, dict(reader.words.variables), reader.entered
    prefixes = [child for child in node.named_children if child.type == "variable_assignment"]
    names = [child.children[0] for child in node.children_by_field_name("name")]
    parts = group_adjacent_syntax_nodes([*names, *node.children_by_field_name("argument")], every=True)
    fields = [word for group in parts for word in words.expand_to_words(*group)]
    for child in node.named_children:
        if child.type == "variable_assignment":
            interpret_shell_assignment(reader, child)
        elif child.type == "herestring_redirect":
            read_redirected_input(reader, child)
    try:
        return interpret_shell_command(reader, fields, node) if fields else True
    finally:
        if any(child.type == "herestring_redirect" for child in node.named_children):
            reader.entered = entered
        for name in [get_node_source_text(prefix).partition("=")[0] for prefix in prefixes] if fields else []:
            words.variables.pop(name, None)
            words.variables |= {name: before[name]} if name in before else {}


def _test(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Follow `[ ... ]` and `[[ ... ]]`."""
    double = node.children[0].type == "[["
    found: list[ShellConditionOperand] = []
    for group in group_adjacent_syntax_nodes(list(iterate_condition_tokens(node))[1:-1]):
        if group[0].type not in VALUES:
            found.append(ShellConditionOperand(get_node_source_text(group[0]), ""))
        elif double:
            regex = get_node_source_text(group[0]) if group[0].type == "regex" else ""
            found.append(
                ShellConditionOperand(
                    reader.words.expand_to_text(*group), regex or reader.words.expand_to_shell_pattern(*group)
                )
            )
        else:
            found += [
                ShellConditionOperand(word.text, escape_shell_pattern(word.text))
                for word in reader.words.expand_to_words(*group)
            ]
    return reader.evaluate_condition(found, node)


def _skip_branch() -> None:
    """Follow the branch of a script that does nothing."""


STATEMENTS: dict[str, Statement] = {
    "command": _command,
    "variable_assignment": interpret_shell_assignment,
    "variable_assignments": interpret_shell_assignment_list,
    "declaration_command": interpret_shell_declare_builtin,
    "unset_command": interpret_unset_builtin,
    "list": _list,
    "pipeline": _pipeline,
    "redirected_statement": interpret_redirection,
    "negated_command": _negated,
    "if_statement": interpret_if_statement,
    "case_statement": interpret_case_statement,
    "for_statement": interpret_for_loop,
    "c_style_for_statement": interpret_c_style_for_loop,
    "while_statement": interpret_while_loop,
    "function_definition": _define,
    "subshell": _follow_subshell,
    "compound_statement": _compound,
    "do_group": lambda reader, node: reader.interpret_statements(node.named_children),
    "test_command": _test,
}


def interpret_shell_script(
    text: str,
    *,
    path: Path | None = None,
    environment: Mapping[str, str] | None = None,
    define: Mapping[str, str] | None = None,
    arguments: Sequence[str] | None = None,
) -> ShellScriptResult:
    """Return the variables that a shell script sets and the commands it would start, without running anything.

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
    reader = ShellInterpreter(ShellScriptResult(path=path), STATEMENTS)
    for name, value in {**(environment or {}), **(define or {})}.items():
        reader.words.set_text_variable(name, value, 0)
    reader.words.defined = set(define or {})
    given = None if arguments is None else [ShellWord(argument, 0) for argument in arguments]
    try:
        reader.interpret_source(text, 1, given, flat=False)
    except RecursionError:
        raise ConfigError(
            "the launch script is nested too deeply to be read", hint="check that the file is a shell script"
        ) from None
    if reader.steps > STEPS:
        reader.script.remarks.append((1, f"the script was followed for its first {STEPS} statements only"))
    reader.script.variables = reader.words.variables
    return reader.script
