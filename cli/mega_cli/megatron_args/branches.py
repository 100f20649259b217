"""`if` and `case` of a script; where it is not known which way it goes, each is gone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mega_cli.megatron_args.conditions import Truth
from mega_cli.megatron_args.globs import matches
from mega_cli.megatron_args.shell import shown
from mega_cli.megatron_args.syntax import VALUES, adjacent, arms

if TYPE_CHECKING:
    from tree_sitter import Node

    from mega_cli.megatron_args.script import Reader


def follow_if(reader: Reader, node: Node) -> Truth:
    """`if ...; then ...; elif ...; else ...; fi`."""
    return _arms(reader, node, list(arms(node)))


def _arms(reader: Reader, node: Node, found: Sequence[tuple[list[Node], list[Node]]]) -> Truth:
    for number, (condition, body) in enumerate(found):
        holds = reader.block(condition)
        if holds:
            return reader.block(body)
        if holds is None:
            rest = found[number + 1 :]
            reader.either(node, "this `if` holds", partial(reader.block, body), partial(_arms, reader, node, rest))
            return None
    return True


def follow_case(reader: Reader, node: Node) -> Truth:
    """`case ... in pattern) ...;; esac`."""
    value = node.child_by_field_name("value")
    text = reader.words.text(value) if value else ""
    return _items(reader, node, text, [child for child in node.children if child.type == "case_item"])


def _items(reader: Reader, node: Node, text: str, items: Sequence[Node]) -> Truth:
    worth = reader.worth(text, node)
    for number, item in enumerate(items):
        patterns, body = _patterns(reader, item)
        found = [None if worth is None and p != "*" else matches(worth or "", p) for p in patterns]
        holds: Truth = True if True in found else None if None in found else False
        if holds:
            reader.block(body)
            through = any(child.type == ";&" for child in item.children) and number + 1 < len(items)
            return reader.block(_patterns(reader, items[number + 1])[1]) if through else True
        if holds is None:
            follow, go_on = partial(reader.block, body), partial(_items, reader, node, text, items[number + 1 :])
            reader.either(node, f"{shown(text)} is {shown(patterns[0])}", follow, go_on)
            return None
    return True


def _patterns(reader: Reader, item: Node) -> tuple[list[str], list[Node]]:
    """The patterns of an item of a `case`, and its statements."""
    end = next(at for at, child in enumerate(item.children) if child.type == ")")
    groups = adjacent([child for child in item.children[:end] if child.type in VALUES])
    return [reader.words.pattern(*group) for group in groups], [
        child for child in item.children[end + 1 :] if child.is_named
    ]
