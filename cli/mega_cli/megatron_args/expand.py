"""Expands the words of a script with the variables known so far."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tree_sitter import Node

from mega_cli.megatron_args.arithmetic import calculate
from mega_cli.megatron_args.braces import brace_expansion
from mega_cli.megatron_args.budget import EXPRESSION, WORD, Budget
from mega_cli.megatron_args.globs import changed, pattern_of
from mega_cli.megatron_args.shell import CLOSE, MARK, OPEN, Piece, Word, is_unset, split_fields, unknown
from mega_cli.megatron_args.syntax import parse, text_of

Value = dict[str, Word]  # by index or key; a plain variable is what lies at "0"

LONGEST = 1_000_000  # characters of a variable, lest a loop doubles it for ever
EXPANSIONS = frozenset({"simple_expansion", "expansion", "command_substitution", "arithmetic_expansion"})
ESCAPED = {'"': re.compile(r'\\([$`"\\])|\\\n'), "<<": re.compile(r"\\([$`\\])|\\\n"), "": re.compile(r"\\(.)|\\\n")}
STARRED = re.compile(r"\$(\*|\{\*|\{!?\w+\[\*\])")  # whose words are joined by IFS between quotes
NUMBERED = re.compile(f"{OPEN}#(\\d+){CLOSE}")
ANSI = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "e": "\x1b", "a": "\a", "0": "\0"}


@dataclass
class Expander:
    """The variables of a script, and its words with them.

    Attributes:
        variables: by name; a dictionary in it is replaced when it changes, so that a copy of this one is enough.
        positional: `$1` and on; None where they are not known.
        defined: variables that keep their value whatever the script assigns to them.
        awaited: variables that hold an argument of the script that was not given.
        associative: variables that are dictionaries.
        substitute: the output of a command substitution; None for not known.
        marks: names of marks in a text that was parsed, which stand there as numbers.
        budget: of the characters that may still be made.
        place: line of the script where the text under expansion begins, and whether all of it stands there.
    """

    substitute: Callable[[Node], str | None]
    variables: dict[str, Value] = field(default_factory=dict)
    positional: list[Word] | None = None
    defined: set[str] = field(default_factory=set)
    awaited: set[str] = field(default_factory=set)
    associative: set[str] = field(default_factory=set)
    marks: list[str] = field(default_factory=list)
    place: tuple[int, bool] = (1, False)
    budget: Budget = field(default_factory=Budget)

    def line(self, node: Node) -> int:
        """The line of the script where a node begins."""
        first, flat = self.place
        return first if flat else first + node.start_point[0]

    def numbered(self, text: str) -> str:
        """A text to be parsed: its marks, which may hold any character, as numbers."""
        self.marks = [*self.marks, *MARK.findall(text)]
        numbers = iter(range(len(self.marks) - len(MARK.findall(text)), len(self.marks)))
        return MARK.sub(lambda _: f"{OPEN}#{next(numbers)}{CLOSE}", text)

    def restored(self, text: str) -> str:
        """A text that was parsed, with its marks."""
        return NUMBERED.sub(lambda match: unknown(self.marks[int(match[1])]), text)

    @contextmanager
    def at(self, place: tuple[int, bool], arguments: list[Word] | None) -> Iterator[None]:
        """In a text that begins at a place, and with arguments, if it has its own."""
        before = self.place, self.positional
        self.place = place
        if arguments is not None:
            self.positional = arguments
        try:
            yield
        finally:
            self.place, self.positional = before

    # The variables.

    def get(self, name: str) -> Value | None:
        """The value of a variable or positional parameter."""
        if name.isdigit() and name != "0" and self.positional is not None:
            return {"0": self.positional[int(name) - 1]} if int(name) <= len(self.positional) else {}
        return self.variables.get(name)

    def set(self, name: str, value: Value) -> None:
        """Set a variable, unless it was defined from outside."""
        self.budget.spend(1 + len(value))
        if sum(len(word.text) + 1 for word in value.values()) > LONGEST:
            value = {"0": Word(unknown("{" + name + "}"), self.place[0])}
        if name not in self.defined:
            self.variables[name] = value
            self.awaited.discard(name)

    def set_text(self, name: str, text: str, line: int) -> None:
        """Set a plain variable."""
        self.set(name, {"0": Word(text, line)})

    def number(self, name: str) -> str | None:
        """The text of a variable in arithmetic (`calculate`)."""
        self.budget.spend(EXPRESSION)
        name, _, index = name.removesuffix("]").partition("[")
        key = "0" if not index else index if name in self.associative else self._index(index)
        word = (self.get(name) or {}).get(key or "")
        return None if word is None or MARK.search(word.text) else word.text

    def set_number(self, name: str, value: str | None) -> None:
        """Set a variable by arithmetic (`calculate`)."""
        self.set_text(name, unknown("{" + name + "}") if value is None else value, self.place[0])

    def _index(self, text: str) -> str | None:
        """The key of an array's element; None where it is not known."""
        number = None if MARK.search(text) else calculate(text, self)
        return None if number is None else str(number)

    # Words.

    def fields(self, *nodes: Node) -> list[Word]:
        """The words that a word of the script, which adjacent nodes make up, becomes: none, one or many."""
        pieces = [piece for node in nodes for piece in self.pieces(node)]
        return [word for part in brace_expansion(pieces, self.budget.spend) for word in self._split(part)]

    def text(self, *nodes: Node) -> str:
        """Return a word as one text, as in the value of an assignment, where `*` is joined as between quotes."""
        starred = any(STARRED.search(text_of(node)) for node in nodes)
        joint = self.separators[:1] if starred else " "
        return "".join(joint if piece is None else piece.text for node in nodes for piece in self.pieces(node))

    def pattern(self, *nodes: Node) -> str:
        """A word as a pattern of file names: what is quoted stands for itself."""
        return pattern_of([piece for node in nodes for piece in self.pieces(node)])

    def between(self, node: Node, start: int, cut: int = 0, quote: str = '"') -> str:
        """The text of a node from an offset on, without its last `cut` bytes."""
        pieces = self.mixed(node, quote, start, len(node.text or b"") - cut)
        return "".join(" " if piece is None else piece.text for piece in pieces)

    def evaluated(self, text: str) -> str:
        """A text with its expansions, as between double quotes."""
        node = parse(f'"{text}"')
        return self.between(node.named_children[0].named_children[0].named_children[0], 1, 1) if "$" in text else text

    def heredoc(self, node: Node, *, literal: bool) -> str:
        """The text of a here-document."""
        return self.restored(text_of(node)) if literal else self.between(node, 0, quote="<<")

    def split(self, text: str) -> list[str]:
        """The words of a text that is no part of the script."""
        return [word.text for word in self._split([Piece(text, "value", 0)])]

    @property
    def separators(self) -> str:
        """IFS: the characters that part words, of which the first joins `"$*"` and `"${NAME[*]}"`."""
        value = self.variables.get("IFS")
        return value["0"].text if value else " \t\n"

    def _split(self, pieces: Sequence[Piece | None]) -> Iterator[Word]:
        separators = self.separators
        current: Word | None = None
        for piece in [*pieces, None]:
            text = piece.text if piece else ""
            self.budget.spend(WORD + len(text))
            parts = split_fields(text, separators) if piece and piece.kind == "value" else [(text, False)]
            for number, (part, ends_empty) in enumerate(parts):
                self.budget.spend(WORD if number else 0)
                if ends_empty and current is None and piece is not None:
                    yield Word("", piece.line)
                if (number or piece is None) and current is not None:
                    yield current
                    current = None
                if piece is not None and (part or piece.kind != "value"):
                    before = current or Word("", piece.line)
                    current = Word(before.text + part, before.line if before.text else piece.line)

    def pieces(self, node: Node, quote: str = "") -> list[Piece | None]:
        """The parts of a word, or of what stands between the double quotes of one."""
        line, source = self.line(node), text_of(node)
        if node.type == "raw_string":
            return [Piece(self.restored(source[1:-1]), "quoted", line)]
        if node.type == "ansi_c_string":
            text = re.sub(r"\\(.)", lambda match: ANSI.get(match[1], match[0]), source[2:-1], flags=re.DOTALL)
            return [Piece(self.restored(text), "quoted", line)]
        if node.type in ("string", "translated_string"):
            inner = list(self.mixed(node, '"', source.index('"') + 1, len(source.encode()) - source.endswith('"')))
            several = any(text_of(child).strip("${}").endswith(("@", "[@]")) for child in node.named_children)
            return inner if several and all(piece is None or not piece.text for piece in inner) else [
                Piece("", "quoted", line), *inner
            ]  # fmt: skip
        if node.type in EXPANSIONS:
            return list(self._expansion(node, quote))
        if node.type == "process_substitution":
            return [Piece(unknown(self.restored(source)), "quoted", line)]
        return list(self.mixed(node, quote, 0, len(source.encode())))

    def mixed(self, node: Node, quote: str, start: int, end: int) -> Iterator[Piece | None]:
        """What lies between two offsets of a node: expansions and quotes, and text between them.

        The text is what is left of the source, for the parser's own nodes leave out blanks.
        """
        source = node.text or b""
        for child in node.children:
            first, last = child.start_byte - node.start_byte, child.end_byte - node.start_byte
            if first < start or last > end or not _stands_for_something(child):
                continue
            if child.type in EXPANSIONS:  # whose first token takes up the blanks before it
                first += min(at for at in map((child.text or b"").find, (b"$", b"`")) if at >= 0)
            yield from self._literal(source[start:first].decode(), quote, node)
            yield from self._regex(child) if child.type == "regex" else self.pieces(child, quote)
            start = last
        yield from self._literal(source[start:end].decode(), quote, node)

    def _regex(self, node: Node) -> list[Piece | None]:
        """A pattern in `${NAME%pattern}`, which the parser leaves whole, expansions and all."""
        value = parse("x=" + text_of(node)).named_children[0].child_by_field_name("value")
        return self.pieces(value) if value else []

    def _literal(self, source: str, quote: str, node: Node) -> Iterator[Piece]:
        """Text of the script, its escapes resolved."""
        line, at = self.line(node), 0
        if not quote and node.prev_sibling is None and re.match("~(?=/|$)", source):
            yield Piece(unknown("HOME"), "quoted", line)
            at = 1
        for match in [*ESCAPED[quote].finditer(source, at), None]:
            text = source[at : match.start() if match else None]
            if text:
                self.budget.spend(len(text))
                yield Piece(self.restored(text), "quoted" if quote else "plain", line)
            if match:
                at = match.end()
                if match[1]:
                    yield Piece(match[1], "quoted", line)

    # Expansions.

    def _expansion(self, node: Node, quote: str) -> Iterator[Piece | None]:
        line, kind = self.line(node), "quoted" if quote else "value"
        source = text_of(node).lstrip(" \t\n\\").replace("\\\n", "")
        if node.type == "command_substitution":
            output = self.substitute(node)
            inner = source[1:] if source.startswith("$") else f"({source[1:-1]})"
            values = [Word(unknown(self.restored(inner)) if output is None else output.rstrip("\n"), line)]
        elif node.type == "arithmetic_expansion":
            values = [Word(self._arithmetic(node, source), line)]
        elif node.type == "simple_expansion":
            values = self.value(source[1:], line)
        else:
            found = _Parameter(self, node, source, quote).values()
            if isinstance(found, tuple):  # a default, of which parts may be quoted
                yield from (
                    piece and piece._replace(kind=kind if piece.kind == "plain" else piece.kind) for piece in found
                )
                return
            values = found
        if quote and STARRED.match(source):
            values = [Word(self.separators[:1].join(value.text for value in values), line)]
        for number, value in enumerate(values):
            self.budget.spend(WORD + len(value.text))
            if number:
                yield None
            yield Piece(value.text, kind, value.line)

    def _arithmetic(self, node: Node, source: str) -> str:
        start, end = (2, 1) if source.startswith("$[") else (3, 2)
        text = self.between(node, len(node.text or b"") - len(source.encode()) + start, end)
        value = None if MARK.search(text) else calculate(text, self)
        return unknown(self.restored(source[1:])) if value is None else str(value)

    def value(self, name: str, line: int) -> list[Word]:
        """The words of `$NAME`."""
        if name in ("@", "*"):
            return list(self.positional or [])
        if name == "#":
            return [Word(str(len(self.positional or [])), line)]
        value = self.get(name)
        return [Word(unknown(name), line)] if value is None else [value["0"]] if "0" in value else []

    def key(self, name: str, subscript: Node) -> str | None:
        """The key of `NAME[...]`, of a dictionary or a list; None where it is not known."""
        text = self.between(subscript, text_of(subscript).index("[") + 1, 1)
        value = self.get(name) or {}
        if MARK.search(text):
            return None
        if name in self.associative:
            return text
        key = self._index(text)
        return list(value)[int(key)] if key and key.startswith("-") and len(value) >= -int(key) else key


@dataclass
class _Parameter:
    """`${...}`, whose parts are a sign before the name, the name, an index, an operator and what it works with."""

    words: Expander
    node: Node
    source: str
    quote: str

    def values(self) -> list[Word] | tuple[Piece | None, ...]:
        """The words that it stands for, or the parts of a default."""
        name, index, operator, operand = _parts(self.node)
        if name is None:
            return self._unknown()
        prefix, whole = self.source[2], index is not None and text_of(index).endswith(("[@]", "[*]"))
        if prefix == "!":
            return self._keys(name) if whole else self._named_by(name)
        values = self._elements(name, index)
        if prefix == "#" and len(self.source) > 4:
            return self._length(values, whole)
        if not operator:
            return values
        # A pattern counts as one between double quotes, too.
        quote = self.quote if operator.lstrip(":") in ("", "-", "=", "+", "?") else ""
        pieces = list(self.words.mixed(self.node, quote, operand, len(self.node.text or b"") - 1)) if operand else []
        if operator.lstrip(":") in ("-", "=", "+", "?"):
            return self._default(name, values, operator, pieces)
        if operator == ":":
            return self._slice(values, "".join(piece.text for piece in pieces if piece), name)
        return [
            self._changed(value, changed(value.text, operator, pieces, self.words.budget.spend)) for value in values
        ]

    def _unknown(self) -> list[Word]:
        return [Word(unknown(self.words.restored(self.source[1:])), self.words.line(self.node))]

    def _changed(self, value: Word, text: str | None) -> Word:
        return self._unknown()[0] if text is None else Word(text, value.line)

    def _keys(self, name: str) -> list[Word]:
        value = self.words.get(name)
        return self._unknown() if value is None else [Word(key, word.line) for key, word in value.items()]

    def _named_by(self, name: str) -> list[Word]:
        target = "".join(word.text for word in self.words.value(name, 0))
        return self.words.value(target, self.words.line(self.node)) if target.isidentifier() else self._unknown()

    def _elements(self, name: str, index: Node | None) -> list[Word]:
        line = self.words.line(self.node)
        if index is None:
            return self.words.value(name, line)
        value, whole = self.words.get(name), text_of(index).endswith(("[@]", "[*]"))
        if value is None:
            return [Word(unknown(name), line)] if whole else self._unknown()
        if whole:
            return list(value.values())
        key = self.words.key(name, index)
        return self._unknown() if key is None else [value[key]] if key in value else []

    def _length(self, values: list[Word], whole: bool) -> list[Word]:
        if any(MARK.search(word.text) for word in values):
            return self._unknown()
        length = len(values) if whole else sum(len(word.text) for word in values)
        return [Word(str(length), self.words.line(self.node))]

    def _default(
        self, name: str, values: list[Word], operator: str, pieces: list[Piece | None]
    ) -> list[Word] | tuple[Piece | None, ...]:
        """`${NAME:-default}` and its kin. What the script does not set is taken as not set."""
        text = "".join(word.text for word in values)
        unset = is_unset(text) or (not text and (operator[0] == ":" or self.words.get(name) is None))
        if operator[-1] == "?" or unset == (operator[-1] == "+"):
            return [] if operator[-1] == "+" else values
        if operator[-1] == "=":
            chosen = "".join(" " if piece is None else piece.text for piece in pieces)
            self.words.set_text(name, chosen, self.words.line(self.node))
        return tuple(pieces)

    def _slice(self, values: list[Word], bounds: str, name: str) -> list[Word]:
        start, colon, length = bounds.partition(":")
        first, count = (0 if not part.strip() else calculate(part, self.words) for part in (start, length))
        several = name == "@" or len(values) > 1
        text = "".join(word.text for word in values)
        if first is None or count is None or (not several and MARK.search(text)):
            return self._unknown()
        size = len(values) if several else len(text)
        first = first - (name == "@") if first >= 0 else size + first  # ${@:1} begins with the first
        last = size if not colon else first + count if count >= 0 else size + count
        return values[first:last] if several else [Word(text[first:last], self.words.line(self.node))]


def _stands_for_something(node: Node) -> bool:
    """Whether part of a word is more than text as it stands."""
    if node.type == "regex":
        return "$" in text_of(node)
    return node.is_named and node.type != "string_content" and (node.child_count > 0 or "string" in node.type)


def _parts(node: Node) -> tuple[str | None, Node | None, str, int]:
    """Of `${...}`: the name, the index, the operator and the offset where the operand begins, or 0."""
    name, index, following = None, None, None
    for child in node.children:
        if child.type == "subscript":
            inner = child.child_by_field_name("name")
            name, index = text_of(inner) if inner else None, child
        elif child.type in ("variable_name", "special_variable_name"):
            name = text_of(child)
        if name is not None:
            following = child.next_sibling
            break
    if following is None or text_of(following) == "}":
        return name, index, "", 0
    return name, index, text_of(following).strip(), following.end_byte - node.start_byte
