"""Expansion of a script's words with the variables known so far."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tree_sitter import Node

from mega_cli.megatron_args.arithmetic import evaluate_bash_arithmetic
from mega_cli.megatron_args.brace_expansion import expand_shell_braces
from mega_cli.megatron_args.script_variables import ShellScriptVariables
from mega_cli.megatron_args.shell_patterns import apply_shell_parameter_expansion, convert_pieces_to_shell_pattern
from mega_cli.megatron_args.shell_words import (
    MARK,
    WORD,
    ShellWord,
    WordPiece,
    is_unset_shell_parameter,
    make_unknown_placeholder,
    split_on_separators,
)
from mega_cli.megatron_args.syntax_tree import get_node_source_text, parse_shell_script

EXPANSIONS = frozenset({"simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"})
ESCAPED = {'"': re.compile(r'\\([$`"\\])|\\\n'), "<<": re.compile(r"\\([$`\\])|\\\n"), "": re.compile(r"\\(.)|\\\n")}
STARRED = re.compile(r"\$(\*|\{\*|\{!?\w+\[\*\])")  # words joined by IFS in double quotes
ANSI = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "e": "\x1b", "a": "\a", "0": "\0"}


@dataclass
class ShellWordExpander(ShellScriptVariables):
    """Variables of an interpreted shell script, and expansion of the script's words with their values.

    Attributes:
        substitute: function that returns the output of a command substitution, None if unknown.
    """

    substitute: Callable[[Node], str | None] = field(kw_only=True)

    def expand_to_words(self, *nodes: Node) -> list[ShellWord]:
        """Return the words that a word of the shell script expands to: none, one or several.
        The word is given as adjacent syntax nodes.
        """
        pieces = [piece for node in nodes for piece in self.expand_to_pieces(node)]
        return [
            word for part in expand_shell_braces(pieces, self.budget.spend_characters) for word in self._split(part)
        ]

    def expand_to_text(self, *nodes: Node) -> str:
        """Return the expansion of a shell word as one text, as in the value of an assignment.
        Words of `$*` are joined as in double quotes.
        """
        starred = any(STARRED.search(get_node_source_text(node)) for node in nodes)
        joint = self.field_separators[:1] if starred else " "
        return "".join(
            joint if piece is None else piece.text for node in nodes for piece in self.expand_to_pieces(node)
        )

    def expand_to_shell_pattern(self, *nodes: Node) -> str:
        """Return the expansion of a shell word as a shell pattern, with its quoted parts literal."""
        return convert_pieces_to_shell_pattern([piece for node in nodes for piece in self.expand_to_pieces(node)])

    def expand_node_source(self, node: Node, start: int, cut: int = 0, quote: str = '"') -> str:
        """Return the source of a syntax node of a shell script, with variables expanded.
        It is taken from byte `start` on, without its last `cut` bytes.
        """
        pieces = self.expand_node_range(node, quote, start, len(node.text or b"") - cut)
        return "".join(" " if piece is None else piece.text for piece in pieces)

    def expand_double_quoted_text(self, text: str) -> str:
        """Return a text with its variables and substitutions expanded, as between double quotes."""
        node = parse_shell_script(f'"{text}"')
        return (
            self.expand_node_source(node.named_children[0].named_children[0].named_children[0], 1, 1)
            if "$" in text
            else text
        )

    def expand_heredoc(self, node: Node, *, literal: bool) -> str:
        """Return the text of a here-document, expanded unless it is `literal`."""
        return (
            self.restore_unknown_placeholders(get_node_source_text(node))
            if literal
            else self.expand_node_source(node, 0, quote="<<")
        )

    def split_words(self, text: str) -> list[str]:
        """Return the words of a text, split at the characters of the shell variable IFS.
        The text is for example the output of a command.
        """
        return [word.text for word in self._split([WordPiece(text, "value", 0)])]

    @property
    def field_separators(self) -> str:
        """Value of the shell variable IFS, the characters that separate words.
        The first one joins `"$*"` and `"${NAME[*]}"`.
        """
        value = self.variables.get("IFS")
        return value["0"].text if value else " \t\n"

    def _split(self, pieces: Sequence[WordPiece | None]) -> Iterator[ShellWord]:
        separators = self.field_separators
        current: ShellWord | None = None
        for piece in [*pieces, None]:
            text = piece.text if piece else ""
            self.budget.spend_characters(WORD + len(text))
            parts = split_on_separators(text, separators) if piece and piece.kind == "value" else [(text, False)]
            for number, (part, ends_empty) in enumerate(parts):
                self.budget.spend_characters(WORD if number else 0)
                if ends_empty and current is None and piece is not None:
                    yield ShellWord("", piece.line)
                if (number or piece is None) and current is not None:
                    yield current
                    current = None
                if piece is not None and (part or piece.kind != "value"):
                    before = current or ShellWord("", piece.line)
                    current = ShellWord(before.text + part, before.line if before.text else piece.line)

    def expand_to_pieces(self, node: Node, quote: str = "") -> list[WordPiece | None]:
        """Return the expanded quoted and unquoted pieces of a shell word; None separates the words that it becomes.
        The word may also be the text between its double quotes.
        """
        line, source = self.line_number(node), get_node_source_text(node)
        if node.type == "raw_string":
            return [WordPiece(self.restore_unknown_placeholders(source[1:-1]), "quoted", line)]
        if node.type == "ansi_c_string":
            text = re.sub(r"\\(.)", lambda match: ANSI.get(match[1], match[0]), source[2:-1], flags=re.DOTALL)
            return [WordPiece(self.restore_unknown_placeholders(text), "quoted", line)]
        if node.type in ("string", "translated_string"):
            inner = list(
                self.expand_node_range(node, '"', source.index('"') + 1, len(source.encode()) - source.endswith('"'))
            )
            several = any(
                get_node_source_text(child).strip("${}").endswith(("@", "[@]")) for child in node.named_children
            )
            return inner if several and all(piece is None or not piece.text for piece in inner) else [
                WordPiece("", "quoted", line), *inner
            ]  # fmt: skip
        if node.type in EXPANSIONS:
            return list(self._expansion(node, quote))
        if node.type == "process_substitution":
            return [WordPiece(make_unknown_placeholder(self.restore_unknown_placeholders(source)), "quoted", line)]
        return list(self.expand_node_range(node, quote, 0, len(source.encode())))

    def expand_node_range(self, node: Node, quote: str, start: int, end: int) -> Iterator[WordPiece | None]:
        """Yield the expanded pieces of a shell word between two byte offsets of a syntax node.
        They are expansions, quotes and text.

        Text is taken from the source between expansions, because the nodes of the parser omit blanks.
        """
        source = node.text or b""
        for child in node.children:
            first, last = child.start_byte - node.start_byte, child.end_byte - node.start_byte
            if first < start or last > end or not _needs_expansion(child):
                continue
            if child.type in EXPANSIONS:  # their first token includes the blanks before it
                first += min(at for at in map((child.text or b"").find, (b"$", b"`")) if at >= 0)
            yield from self._unescape_text(source[start:first].decode(), quote, node)
            yield from self._expand_operand(child) if child.type == "regex" else self.expand_to_pieces(child, quote)
            start = last
        yield from self._unescape_text(source[start:end].decode(), quote, node)

    def _expand_operand(self, node: Node) -> list[WordPiece | None]:
        """Return the pattern in `${NAME%pattern}`, which the parser does not parse."""
        value = parse_shell_script("x=" + get_node_source_text(node)).named_children[0].child_by_field_name("value")
        return self.expand_to_pieces(value) if value else []

    def _unescape_text(self, source: str, quote: str, node: Node) -> Iterator[WordPiece]:
        """Return text of the script with its escapes resolved."""
        line, at = self.line_number(node), 0
        if not quote and node.prev_sibling is None and re.match("~(?=/|$)", source):
            yield WordPiece(make_unknown_placeholder("HOME"), "quoted", line)
            at = 1
        for match in [*ESCAPED[quote].finditer(source, at), None]:
            text = source[at : match.start() if match else None]
            if text:
                self.budget.spend_characters(len(text))
                yield WordPiece(self.restore_unknown_placeholders(text), "quoted" if quote else "plain", line)
            if match:
                at = match.end()
                if match[1]:
                    yield WordPiece(match[1], "quoted", line)

    # Expansions.

    def _expansion(self, node: Node, quote: str) -> Iterator[WordPiece | None]:
        line, kind = self.line_number(node), "quoted" if quote else "value"
        source = get_node_source_text(node).lstrip(" \t\n\\").replace("\\\n", "")
        if node.type == "command_substitution":
            output = self.substitute(node)
            inner = source[1:] if source.startswith("$") else f"({source[1:-1]})"
            values = [
                ShellWord(
                    make_unknown_placeholder(self.restore_unknown_placeholders(inner))
                    if output is None
                    else output.rstrip("\n"),
                    line,
                )
            ]
        elif node.type == "arithmetic_expansion":
            values = [ShellWord(self._arithmetic(node, source), line)]
        elif node.type == "simple_expansion":
            values = self.expand_variable(source[1:], line)
        else:
            found = _ParameterExpansion(self, node, source, quote).expand_values()
            if isinstance(found, tuple):  # a default, which may have quoted parts
                yield from (
                    piece and piece._replace(kind=kind if piece.kind == "plain" else piece.kind) for piece in found
                )
                return
            values = found
        if quote and STARRED.match(source):
            values = [ShellWord(self.field_separators[:1].join(value.text for value in values), line)]
        for number, value in enumerate(values):
            self.budget.spend_characters(WORD + len(value.text))
            if number:
                yield None
            yield WordPiece(value.text, kind, value.line)

    def _arithmetic(self, node: Node, source: str) -> str:
        start, end = (2, 1) if source.startswith("$[") else (3, 2)
        text = self.expand_node_source(node, len(node.text or b"") - len(source.encode()) + start, end)
        value = None if MARK.search(text) else evaluate_bash_arithmetic(text, self)
        return make_unknown_placeholder(self.restore_unknown_placeholders(source[1:])) if value is None else str(value)

    def expand_variable(self, name: str, line: int) -> list[ShellWord]:
        """Return the words that `$NAME` expands to in the interpreted script."""
        if name in ("@", "*"):
            return list(self.positional or [])
        if name == "#":
            return [ShellWord(str(len(self.positional or [])), line)]
        value = self.get_variable(name)
        return (
            [ShellWord(make_unknown_placeholder(name), line)] if value is None else [value["0"]] if "0" in value else []
        )

    def expand_array_subscript(self, name: str, subscript: Node) -> str | None:
        """Return the key of the shell array element `NAME[...]`, or None if it is unknown."""
        text = self.expand_node_source(subscript, get_node_source_text(subscript).index("[") + 1, 1)
        value = self.get_variable(name) or {}
        if MARK.search(text):
            return None
        if name in self.associative:
            return text
        key = self.evaluate_array_index(text)
        return list(value)[int(key)] if key and key.startswith("-") and len(value) >= -int(key) else key


@dataclass
class _ParameterExpansion:
    """`${...}`: an operator before the name, the name, an index, an operator and its operand."""

    words: ShellWordExpander
    node: Node
    source: str
    quote: str

    def expand_values(self) -> list[ShellWord] | tuple[WordPiece | None, ...]:
        """Return the words that a shell parameter expansion yields, or the pieces of a default."""
        name, index, operator, operand = _split_parameter(self.node)
        if name is None:
            return self._unknown()
        prefix, whole = self.source[2], index is not None and get_node_source_text(index).endswith(("[@]", "[*]"))
        if prefix == "!":
            return self._keys(name) if whole else self._named_by(name)
        values = self._elements(name, index)
        if prefix == "#" and len(self.source) > 4:
            return self._length(values, whole)
        if not operator:
            return values
        # A pattern is a pattern in double quotes too.
        quote = self.quote if operator.lstrip(":") in ("", "-", "=", "+", "?") else ""
        pieces = (
            list(self.words.expand_node_range(self.node, quote, operand, len(self.node.text or b"") - 1))
            if operand
            else []
        )
        if operator.lstrip(":") in ("-", "=", "+", "?"):
            return self._default(name, values, operator, pieces)
        if operator == ":":
            return self._slice(values, "".join(piece.text for piece in pieces if piece), name)
        return [
            self._changed(
                value, apply_shell_parameter_expansion(value.text, operator, pieces, self.words.budget.spend_characters)
            )
            for value in values
        ]

    def _unknown(self) -> list[ShellWord]:
        return [
            ShellWord(
                make_unknown_placeholder(self.words.restore_unknown_placeholders(self.source[1:])),
                self.words.line_number(self.node),
            )
        ]

    def _changed(self, value: ShellWord, text: str | None) -> ShellWord:
        return self._unknown()[0] if text is None else ShellWord(text, value.line)

    def _keys(self, name: str) -> list[ShellWord]:
        value = self.words.get_variable(name)
        return self._unknown() if value is None else [ShellWord(key, word.line) for key, word in value.items()]

    def _named_by(self, name: str) -> list[ShellWord]:
        target = "".join(word.text for word in self.words.expand_variable(name, 0))
        return (
            self.words.expand_variable(target, self.words.line_number(self.node))
            if target.isidentifier()
            else self._unknown()
        )

    def _elements(self, name: str, index: Node | None) -> list[ShellWord]:
        line = self.words.line_number(self.node)
        if index is None:
            return self.words.expand_variable(name, line)
        value, whole = self.words.get_variable(name), get_node_source_text(index).endswith(("[@]", "[*]"))
        if value is None:
            return [ShellWord(make_unknown_placeholder(name), line)] if whole else self._unknown()
        if whole:
            return list(value.values())
        key = self.words.expand_array_subscript(name, index)
        return self._unknown() if key is None else [value[key]] if key in value else []

    def _length(self, values: list[ShellWord], whole: bool) -> list[ShellWord]:
        if any(MARK.search(word.text) for word in values):
            return self._unknown()
        length = len(values) if whole else sum(len(word.text) for word in values)
        return [ShellWord(str(length), self.words.line_number(self.node))]

    def _default(
        self, name: str, values: list[ShellWord], operator: str, pieces: list[WordPiece | None]
    ) -> list[ShellWord] | tuple[WordPiece | None, ...]:
        """Return the value of `${NAME:-default}` and similar. A variable that the script does not set counts as unset."""
        text = "".join(word.text for word in values)
        unset = is_unset_shell_parameter(text) or (
            not text and (operator[0] == ":" or self.words.get_variable(name) is None)
        )
        if operator[-1] == "?" or unset == (operator[-1] == "+"):
            return [] if operator[-1] == "+" else values
        if operator[-1] == "=":
            chosen = "".join(" " if piece is None else piece.text for piece in pieces)
            self.words.set_text_variable(name, chosen, self.words.line_number(self.node))
        return tuple(pieces)

    def _slice(self, values: list[ShellWord], bounds: str, name: str) -> list[ShellWord]:
        start, colon, length = bounds.partition(":")
        first, count = (
            0 if not part.strip() else evaluate_bash_arithmetic(part, self.words) for part in (start, length)
        )
        several = name == "@" or len(values) > 1
        text = "".join(word.text for word in values)
        if first is None or count is None or (not several and MARK.search(text)):
            return self._unknown()
        size = len(values) if several else len(text)
        first = first - (name == "@") if first >= 0 else size + first  # ${@:1} begins with the first
        last = size if not colon else first + count if count >= 0 else size + count
        return values[first:last] if several else [ShellWord(text[first:last], self.words.line_number(self.node))]


def _needs_expansion(node: Node) -> bool:
    """Return whether part of a word is more than literal text."""
    if node.type == "regex":
        return "$" in get_node_source_text(node)
    return node.is_named and node.type != "string_content" and (node.child_count > 0 or "string" in node.type)


def _split_parameter(node: Node) -> tuple[str | None, Node | None, str, int]:
    """Return the name, the index, the operator and the offset of the operand (or 0) of `${...}`."""
    name, index, following = None, None, None
    for child in node.children:
        if child.type == "subscript":
            inner = child.child_by_field_name("name")
            name, index = get_node_source_text(inner) if inner else None, child
        elif child.type in ("variable_name", "special_variable_name"):
            name = get_node_source_text(child)
        if name is not None:
            following = child.next_sibling
            break
    if following is None or get_node_source_text(following) == "}":
        return name, index, "", 0
    return name, index, get_node_source_text(following).strip(), following.end_byte - node.start_byte
