"""What sets the variables of a script: assignments, `export`, `local` and their kin."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mega_cli.megatron_args.conditions import Truth
from mega_cli.megatron_args.shell import MARK, Word, unknown
from mega_cli.megatron_args.syntax import text_of

if TYPE_CHECKING:
    from tree_sitter import Node

    from mega_cli.megatron_args.expand import Expander, Value
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
    old, single = words.get(name) or {}, target.type != "subscript"
    appended = any(child.type == "+=" for child in node.children)
    if value is not None and value.type == "array":
        words.set(name, _in_order(words, name, _array(reader, value, dict(old) if appended else {})))
        return True
    text = words.text(value) if value else ""
    key = "0" if single else words.key(name, target)
    if key is None:
        words.set_number(name, None)
    elif appended and key in old:
        words.set(name, {**old, key: Word(old[key].text + text, old[key].line)})
    else:
        kept = {} if single and not appended else old
        awaited = _awaited(words, text)
        # An argument of the script is better known by the variable that it is given to.
        word = Word(unknown(name) if awaited and single else text, words.line(node))
        words.set(name, _in_order(words, name, {**kept, key: word}))
        words.awaited |= {name} if awaited else set()
    return True


def _awaited(words: Expander, text: str) -> bool:
    """Whether a text is nothing but an argument of the script that was not given."""
    match = MARK.fullmatch(text)
    return match is not None and (match[1].isdigit() or match[1] in words.awaited)


def _array(reader: Reader, node: Node, value: Value) -> Value:
    """`( ... )`, added to a value."""
    position = 1 + max((int(key) for key in value if key.isdigit()), default=-1)
    for item in node.named_children:
        keyed = re.match(r"\[([^]]*)\]=", text_of(item))
        if item.type == "comment":
            continue
        if keyed:
            key = reader.words.evaluated(keyed[1].strip("'\""))
            value[key] = Word(reader.words.between(item, keyed.end(), quote=""), reader.words.line(item))
            position = int(key) + 1 if key.isdigit() else position
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
    """`unset A B 'L[1]'`."""
    words, names, end = reader.words, list[str](), -1
    for child in node.named_children:
        text = words.text(child)
        if child.start_byte == end:  # an index that is not quoted is a node of its own
            text = names.pop() + text
        names.append(text)
        end = child.end_byte
    for text in names:
        if text == "IFS":
            words.variables.pop("IFS", None)
        elif element := re.fullmatch(r"(\w+)\[(.+)\]", text):
            value = dict(words.get(element[1]) or {})
            value.pop(_element(reader, element[1], element[2], value), None)
            words.set(element[1], value)
        elif not text.startswith("-"):
            words.set(text, {})
    return True


def _element(reader: Reader, name: str, index: str, value: Value) -> str:
    """Return the key of an element of a list, which may be counted from its end, or of an associative array."""
    number = None if name in reader.words.associative else reader.calculate(index)
    if number is not None and number < 0:
        number += 1 + max((int(key) for key in value if key.isdigit()), default=0)
    return index if number is None else str(number)


def _in_order(words: Expander, name: str, value: Value) -> Value:
    """The elements of a list by their index."""
    listed = name not in words.associative and all(map(str.isdigit, value))
    return dict(sorted(value.items(), key=lambda item: int(item[0]))) if listed else value
