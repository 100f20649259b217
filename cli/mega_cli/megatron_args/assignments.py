"""Shell constructs that set variables: assignments, `export`, `local` and others."""

from __future__ import annotations

import re

from tree_sitter import Node

from mega_cli.megatron_args.conditions import KnownTruth
from mega_cli.megatron_args.script_state import ShellInterpreter
from mega_cli.megatron_args.script_variables import VariableValue
from mega_cli.megatron_args.shell_words import MARK, ShellWord, make_unknown_placeholder
from mega_cli.megatron_args.syntax_tree import get_node_source_text
from mega_cli.megatron_args.word_expansion import ShellWordExpander


def interpret_shell_assignment_list(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Set the variables of a shell line `A=1 B=2` in the state of the interpreted script; return True."""
    for child in node.named_children:
        interpret_shell_assignment(reader, child)
    return True


def interpret_shell_assignment(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Set the variable of `A=1`, `A+=x`, `A=(1 2)` or `A[k]=1` in the state of the interpreted script; return True."""
    target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
    if target is None:
        return True
    words, name = reader.words, get_node_source_text(target.child_by_field_name("name") or target)
    old, single = words.get_variable(name) or {}, target.type != "subscript"
    appended = any(child.type == "+=" for child in node.children)
    if value is not None and value.type == "array":
        words.set_variable(
            name, _ordered_elements(words, name, _assign_array(reader, value, dict(old) if appended else {}))
        )
        return True
    text = words.expand_to_text(value) if value else ""
    key = "0" if single else words.expand_array_subscript(name, target)
    if key is None:
        words.assign_number(name, None)
    elif appended and key in old:
        words.set_variable(name, {**old, key: ShellWord(old[key].text + text, old[key].line)})
    else:
        kept = {} if single and not appended else old
        awaited = _is_missing_argument(words, text)
        # A missing argument of the script is reported by the name of the variable that it is assigned to.
        word = ShellWord(make_unknown_placeholder(name) if awaited and single else text, words.line_number(node))
        words.set_variable(name, _ordered_elements(words, name, {**kept, key: word}))
        words.awaited |= {name} if awaited else set()
    return True


def _is_missing_argument(words: ShellWordExpander, text: str) -> bool:
    """Return whether a text is only a script argument that was not given."""
    match = MARK.fullmatch(text)
    return match is not None and (match[1].isdigit() or match[1] in words.awaited)


def _assign_array(reader: ShellInterpreter, node: Node, value: VariableValue) -> VariableValue:
    """Return the value of `( ... )`, appended to a value."""
    position = 1 + max((int(key) for key in value if key.isdigit()), default=-1)
    for item in node.named_children:
        keyed = re.match(r"\[([^]]*)\]=", get_node_source_text(item))
        if item.type == "comment":
            continue
        if keyed:
            key = reader.words.expand_double_quoted_text(keyed[1].strip("'\""))
            value[key] = ShellWord(
                reader.words.expand_node_source(item, keyed.end(), quote=""), reader.words.line_number(item)
            )
            position = int(key) + 1 if key.isdigit() else position
            continue
        for word in reader.words.expand_to_words(item):
            value[str(position)] = word
            position += 1
    return value


def interpret_shell_declare_builtin(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Set the variables of `export`, `declare`, `local` and similar in the interpreted script's state; return True."""
    command, words = node.children[0].type, reader.words
    options = "".join(
        get_node_source_text(child) for child in node.named_children if get_node_source_text(child).startswith("-")
    )
    for child in node.named_children:
        name = re.match(r"\w*", get_node_source_text(child))[0]  # type: ignore[index]
        if reader.locals and command not in ("export", "readonly") and name:
            reader.locals[-1].setdefault(name, words.variables.get(name))
        if "A" in options and name:
            words.associative.add(name)
        if child.type == "variable_assignment":
            interpret_shell_assignment(reader, child)
            if "i" in options:
                words.assign_number(
                    name, None if (value := reader.evaluate_arithmetic_expression(name)) is None else str(value)
                )
        elif child.type == "variable_name" and (command == "local" or "A" in options or "a" in options):
            words.set_variable(name, {})
        elif assigned := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words.expand_to_text(child), re.DOTALL):
            words.set_text_variable(assigned[1], assigned[2], words.line_number(node))
    return True


def interpret_unset_builtin(reader: ShellInterpreter, node: Node) -> KnownTruth:
    """Remove the variables of `unset A B 'L[1]'` from the state of the interpreted script; return True."""
    words, names, end = reader.words, list[str](), -1
    for child in node.named_children:
        text = words.expand_to_text(child)
        if child.start_byte == end:  # an unquoted index is a separate node
            text = names.pop() + text
        names.append(text)
        end = child.end_byte
    for text in names:
        if text == "IFS":
            words.variables.pop("IFS", None)
        elif element := re.fullmatch(r"(\w+)\[(.+)\]", text):
            value = dict(words.get_variable(element[1]) or {})
            value.pop(_element(reader, element[1], element[2], value), None)
            words.set_variable(element[1], value)
        elif not text.startswith("-"):
            words.set_variable(text, {})
    return True


def _element(reader: ShellInterpreter, name: str, index: str, value: VariableValue) -> str:
    """Return the key of an element of a list, which may be counted from its end, or of an associative array."""
    number = None if name in reader.words.associative else reader.evaluate_arithmetic_expression(index)
    if number is not None and number < 0:
        number += 1 + max((int(key) for key in value if key.isdigit()), default=0)
    return index if number is None else str(number)


def _ordered_elements(words: ShellWordExpander, name: str, value: VariableValue) -> VariableValue:
    """Return the elements of a list in the order of their indices."""
    listed = name not in words.associative and all(map(str.isdigit, value))
    return dict(sorted(value.items(), key=lambda item: int(item[0]))) if listed else value
