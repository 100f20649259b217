"""Syntax tree of a shell script, parsed by tree-sitter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from mega_cli.megatron_args.shell_patterns import replace_regex_matches

PLACEHOLDER = re.compile(r"^([ \t]*(?:export[ \t]+)?\w+=)(<[^<>\n'()]+>[^\s'()<>]*)[ \t]*(?=$|#)", re.MULTILINE)
SUBSTRING = re.compile(r"(?<=:)\s*\$(?=\w+[:}])")
PASSES = 4
NAME = re.compile(rb"[A-Za-z_]\w*")
PARAMETER = re.compile(rb"[A-Za-z_]\w*|[\d@*#]")
VALUES = frozenset(
    {"word", "string", "raw_string", "ansi_c_string", "translated_string", "concatenation", "number", "simple_expansion",
     "expansion", "command_substitution", "arithmetic_expansion", "process_substitution", "brace_expression",
     "extglob_pattern", "regex", "variable_name", "array"}
)  # fmt: skip
NEWLINE = re.compile(rb"(?<!\\)\n")
BRACKETS = r"(?m)(^|[^\w\[])\[(\s[^\n]*?\\\([^\n]*?\s)\](\s|;|$)"  # for RE2


@cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def parse_shell_script(text: str) -> Node:
    """Return the syntax tree of a shell script, parsed by tree-sitter.

    Known errors of the parser are corrected: placeholders such as `NAME=<path to data>`, `${x:$i}`, `[ \\( ... ]`, a line
    of several assignments (which it joins with the next line), and a `$NAME` whose `$` it parses separately.
    """
    source = text.encode()
    root = _parser().parse(source).root_node
    if root.has_error:
        for pattern, said in ((PLACEHOLDER, r"\1'\2'"), (SUBSTRING, "")):
            text = pattern.sub(said, text)
        text = replace_regex_matches(BRACKETS, r"\1test\2\3", text)
        source = text.encode()
        root = _parser().parse(source).root_node
    for _ in range(PASSES):
        slips = sorted(_known_misparses(root, source))
        if not slips:
            break
        for at, length, instead in reversed(slips):
            source = source[:at] + instead + source[at + length :]
        root = _parser().parse(source).root_node
    return root


def _known_misparses(node: Node, source: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield known parser errors as (offset, length, equivalent text that is parsed correctly)."""
    for child in node.children:
        yield from _known_misparses(child, source)
        following = child.next_sibling
        if child.type == "$" and node.type != "simple_expansion" and (name := PARAMETER.match(source, child.end_byte)):
            yield child.end_byte, len(name[0]), b"{" + name[0] + b"}"
        if (
            child.type == "variable_name"
            and node.type == "variable_assignment"
            and not NAME.fullmatch(child.text or b"")
        ):
            yield child.start_byte, 0, b"\\"  # --flag=value
        if node.type == "ERROR" and child.type in ("==", "=~"):
            yield child.start_byte, 0, b"\\"  # a word
        if (
            node.type == "command"
            and child.type == "variable_assignment"
            and following is not None
            and NEWLINE.search(source[child.end_byte : following.start_byte])
        ):
            yield child.end_byte, 0, b";"


def find_syntax_errors(node: Node) -> Iterator[Node]:
    """Yield the nodes of a shell script's syntax tree that the parser could not parse."""
    if node.type == "ERROR" or node.is_missing:
        yield node
    elif node.has_error:
        for child in node.children:
            yield from find_syntax_errors(child)


def get_node_source_text(node: Node) -> str:
    """Return the source text of a node of a shell script's syntax tree."""
    return (node.text or b"").decode()


def iterate_if_branches(node: Node) -> Iterator[tuple[list[Node], list[Node]]]:
    """Yield (condition, statements) of each branch of a shell `if`; the condition of `else` is empty."""
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
            yield from iterate_if_branches(child)


def stdout_redirection(redirect: Node) -> Node | None:
    """Return the given redirection if it sends standard output to a file, else None."""
    signs = [child.type for child in redirect.children if not child.is_named]
    to_error = redirect.children[0].type == "file_descriptor" and get_node_source_text(redirect.children[0]) != "1"
    return redirect if signs and signs[0] in (">", ">>", "&>", "&>>", ">|", ">&") and not to_error else None


def group_adjacent_syntax_nodes(nodes: Sequence[Node], *, every: bool = False) -> list[list[Node]]:
    """Group syntax nodes that have no blank between them into words of a shell script.
    All nodes are grouped with `every`, else only nodes that are not operators.
    """
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
        return not get_node_source_text(right)[:1].isspace()
    # Two bytes that end a line between words of one command are a backslash and the line's end.
    return (
        right.start_byte - left.end_byte == 2
        and right.start_point.row == left.end_point.row + 1
        and not right.start_point.column
    )


def iterate_condition_tokens(node: Node) -> Iterator[Node]:
    """Yield the words and operators of a shell condition in source order."""
    for child in node.children:
        if child.type in VALUES or not child.child_count:
            yield child
        else:
            yield from iterate_condition_tokens(child)
