"""What sets the variables of a script: assignments, `export`, `local` and their kin."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mega_cli.megatron_args.conditions import Truth
from mega_cli.megatron_args.shell import MARK, Word, unknown
from mega_cli.megatron_args.syntax import text_of

if TYPE_CHECKING:
    from tree_sitter import Node

    from mega_cli.megatron_args.expand import Value
    from mega_cli.megatron_args.script import Reader


def assign_all(reader: Reader, node: Node) -> Truth:
    """`A=1 B=2`."""
    for child in node.named_children:
        assign(reader, child)
    return True


def assign(reader: Reader, node: Node) -> Truth:
    """`A=1`, `A+=x`, `A=(1 2)`, `A[k]=1`."""
    target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
    if target is None:
        return True
    words, name = reader.words, text_of(target.child_by_field_name("name") or target)
    appended = any(child.type == "+=" for child in node.children)
    old = words.get(name) or {} if appended else {}
    if value is not None and value.type == "array":
        words.set(name, _array(reader, name, value, dict(old)))
        return True
    text = words.text(value) if value else ""
    key: str | None = "0"
    if target.type == "subscript":
        key, old = words.key(name, target), words.get(name) or {}
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


def _array(reader: Reader, name: str, node: Node, value: Value) -> Value:
    position = len(value)
    for item in node.named_children:
        keyed = re.match(r"\[([^]]*)\]=", text_of(item))
        if item.type == "comment":
            continue
        if keyed:
            key = reader.words.evaluated(keyed[1].strip("'\""))
            value[key] = Word(reader.words.between(item, keyed.end(), quote=""), reader.words.line(item))
            continue
        for word in reader.words.fields(item):
            value[str(position)] = word
            position += 1
    return value


def declare(reader: Reader, node: Node) -> Truth:
    """`export`, `declare`, `local` and their kin."""
    command, words = node.children[0].type, reader.words
    options = "".join(text_of(child) for child in node.named_children if text_of(child).startswith("-"))
    for child in node.named_children:
        name = re.match(r"\w*", text_of(child))[0]  # type: ignore[index]
        if reader.locals and command not in ("export", "readonly") and name:
            reader.locals[-1].setdefault(name, words.variables.get(name))
        if "A" in options and name:
            words.associative.add(name)
        if child.type == "variable_assignment":
            assign(reader, child)
            if "i" in options:
                words.set_number(name, None if (value := reader.calculate(name)) is None else str(value))
        elif child.type == "variable_name" and (command == "local" or "A" in options or "a" in options):
            words.set(name, {})
        elif assigned := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", words.text(child), re.DOTALL):
            words.set_text(assigned[1], assigned[2], words.line(node))
    return True


def unset(reader: Reader, node: Node) -> Truth:
    """`unset A B`."""
    for child in node.named_children:
        if text_of(child) == "IFS":
            reader.words.variables.pop("IFS", None)
        elif not text_of(child).startswith("-"):
            reader.words.set(text_of(child), {})
    return True
