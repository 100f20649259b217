"""The syntax tree of a shell script. The parser is tree-sitter's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

PLACEHOLDER = re.compile(r"^(\s*(?:export\s+)?\w+=)(<[^<>\n'()]+>[^\s'()<>]*)[ \t]*(?=$|#)", re.MULTILINE)
SUBSTRING = re.compile(r"(?<=:)\s*\$(?=\w+[:}])")
PASSES = 4
NAME = re.compile(rb"[A-Za-z_]\w*")
PARAMETER = re.compile(rb"[A-Za-z_]\w*|[\d@*#]")
NEWLINE = re.compile(rb"(?<!\\)\n")
BRACKET = re.compile(r"(?<=\s)\\([()])(?=\s)")


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def parse(text: str) -> Node:
    """The tree of a script.

    Where the parser stumbles, it is helped over what people write that it does not know: `NAME=<path to data>`, which
    a user was to fill in, `${x:$i}`, and `\\(` in a test; over a line of several assignments, to which it takes the next
    line, and a `$NAME` whose sign it takes for itself.
    """
    source = text.encode()
    root = _parser().parse(source).root_node
    if root.has_error:
        for pattern, said in ((PLACEHOLDER, r"\1'\2'"), (SUBSTRING, ""), (BRACKET, r'"\1"')):
            text = pattern.sub(said, text)
        source = text.encode()
        root = _parser().parse(source).root_node
    for _ in range(PASSES):
        slips = sorted(_slips(root, source))
        if not slips:
            break
        for at, length, instead in reversed(slips):
            source = source[:at] + instead + source[at + length :]
        root = _parser().parse(source).root_node
    return root


def _slips(node: Node, source: bytes) -> Iterator[tuple[int, int, bytes]]:
    """What the parser is known to take wrongly, as (offset, length, what says the same and is understood)."""
    for child in node.children:
        yield from _slips(child, source)
        following = child.next_sibling
        if child.type == "$" and node.type != "simple_expansion" and (name := PARAMETER.match(source, child.end_byte)):
            yield child.end_byte, len(name[0]), b"{" + name[0] + b"}"
        if (
            child.type == "variable_name"
            and node.type == "variable_assignment"
            and not NAME.fullmatch(child.text or b"")
        ):
            yield child.start_byte, 0, b"\\"  # --flag=value
        if (
            node.type == "command"
            and child.type == "variable_assignment"
            and following is not None
            and NEWLINE.search(source[child.end_byte : following.start_byte])
        ):
            yield child.end_byte, 0, b";"


def faults(node: Node) -> Iterator[Node]:
    """What the parser made no sense of."""
    if node.type == "ERROR" or node.is_missing:
        yield node
    elif node.has_error:
        for child in node.children:
            yield from faults(child)


def text_of(node: Node) -> str:
    """The source of a node."""
    return (node.text or b"").decode()
