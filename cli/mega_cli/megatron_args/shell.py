"""Reads a launch script as bash would, as far as that needs nothing but the script itself. Nothing is executed.

Variables, arrays, quotes, `if` and `case` are followed; what only a running shell knows (`$1`, the environment, the
output of commands) stays in the words as a mark that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from mega_cli.megatron_args.arithmetic import calculate
from mega_common.errors import ConfigError

# An unknown parameter stands in a text between these two characters of Unicode's private use area.
OPEN, CLOSE = "\ue000", "\ue001"
MARK = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
BLANKS = re.compile(rf"(\s+)(?![^{OPEN}]*{CLOSE})")  # not those inside a mark
ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=", re.ASCII)
PARAMETER = re.compile(
    r"(?P<name>[A-Za-z_]\w*|\d+|[@*?#$!-])(?:\[(?P<index>[^]]*)\])?(?P<rest>.*)", re.DOTALL | re.ASCII
)
OPERATORS = re.compile(r"&&|\|\||;;&?|;&|\|&|[;&|()]")
REDIRECTION = re.compile(r"&>>?|[<>]{1,3}[&|]?-?")


class Word(NamedTuple):
    """A word of the script, after expansion, and the line it comes from."""

    text: str
    line: int


def unknown(name: str) -> str:
    """The mark of a parameter without a value."""
    return f"{OPEN}{name}{CLOSE}"


def shown(text: str) -> str:
    """A text as the script would write it: `$NAME` for each mark."""
    return MARK.sub(r"$\1", text)


def is_unset(text: str) -> bool:
    """Whether a text is nothing but a parameter that the script does not set."""
    match = MARK.fullmatch(text)
    return match is not None and (match[1].isidentifier() or match[1].isdigit())


class Token(NamedTuple):
    """A word with its quotes (`word`), an operator or newline (`operator`), or an assigned array (`array`)."""

    kind: str
    raw: str
    line: int
    items: tuple[Token, ...] = ()


class Lexer:
    """Cuts a script into tokens."""

    def __init__(self, text: str, line: int = 1) -> None:
        self.text, self.at, self.line = text, 0, line
        self.heredocs: list[str] = []
        self.tokens: list[Token] = []

    def run(self, closing: str = "") -> list[Token]:
        """All tokens up to `closing` or the end.

        Raises:
            ConfigError: for a quote or bracket that is never closed.
        """
        conditional = False
        while self.at < len(self.text):
            char = self.text[self.at]
            if closing and char == closing:
                self.at += 1
                return self.tokens
            if char in " \t\r" or self.text.startswith("\\\n", self.at) or self.text.startswith("\\\r\n", self.at):
                self._advance(self.text.index("\n", self.at) + 1 if char == "\\" else self.at + 1)
            elif char == "#":
                self._advance(self._find("\n"))
            elif char == "\n":
                self._newline()
            elif not conditional and (match := REDIRECTION.match(self.text, self.at)):
                self._redirect(match)
            elif not conditional and (match := OPERATORS.match(self.text, self.at)):
                self.tokens.append(Token("operator", match[0], self.line))
                self._advance(match.end())
            else:
                self._word(conditional)
                conditional = self.tokens[-1].raw == "[[" or (conditional and self.tokens[-1].raw != "]]")
        if closing:
            raise ConfigError(f"line {self.line}: the script ends before {closing!r}")
        return self.tokens

    def _find(self, what: str) -> int:
        found = self.text.find(what, self.at)
        return len(self.text) if found < 0 else found

    def _advance(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def _newline(self) -> None:
        self.tokens.append(Token("operator", "\n", self.line))
        self._advance(self.at + 1)
        while self.heredocs:
            end = re.compile(rf"^\t*{re.escape(self.heredocs.pop(0))}\s*$\n?", re.MULTILINE)
            match = end.search(self.text, self.at)
            self._advance(match.end() if match else len(self.text))

    def _redirect(self, match: re.Match[str]) -> None:
        if self.tokens and self.tokens[-1].raw.isdigit() and self.text[self.at - 1].isdigit():
            self.tokens.pop()
        self._advance(match.end())
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        self._advance(self._balanced(self.at + 1, ")") if self.text.startswith("(", self.at) else self._word_end())
        target = self.text[match.end() : self.at].strip()
        if match[0] in ("<<", "<<-"):
            self.heredocs.append(re.sub(r"""["'\\]""", "", target))

    def _word(self, conditional: bool) -> None:
        start, line, end = self.at, self.line, self._word_end(conditional)
        raw = self.text[start:end]
        self._advance(end)
        match = ASSIGNMENT.fullmatch(raw)
        if match and self.text.startswith("(", end):
            inner = Lexer(self.text, line)
            inner.at = end + 1
            items = inner.run(")")
            self.at, self.line = inner.at, inner.line
            self.tokens.append(Token("array", raw, line, tuple(item for item in items if item.kind == "word")))
        else:
            self.tokens.append(Token("word", raw, line))

    def _word_end(self, conditional: bool = False) -> int:
        at, stops = self.at, " \t\r\n;" + ("" if conditional else "&|()<>")
        while at < len(self.text) and self.text[at] not in stops:
            at = self.past(at)
        return max(at, min(self.at + 1, len(self.text)))

    def past(self, at: int) -> int:
        """The position after the character, quote or expansion at `at`."""
        text = self.text
        if text[at] == OPEN:
            return max(at, text.find(CLOSE, at)) + 1
        if text[at] == "\\":
            return min(at + 2, len(text))
        if text[at] == "'":
            return self._closed(text.find("'", at + 1), at) + 1
        if text[at] == '"':
            return self._balanced(at + 1, '"')
        if text[at] == "`":
            return self._closed(text.find("`", at + 1), at) + 1
        if text.startswith("$(", at):
            return self._balanced(at + 2, ")")
        if text.startswith("${", at):
            return self._balanced(at + 2, "}")
        return at + 1

    def _balanced(self, at: int, closing: str) -> int:
        start = at
        while at < len(self.text) and self.text[at] != closing:
            if closing == '"' and self.text[at] == "'":
                at += 1
            elif closing == ")" and self.text[at] == "(":
                at = self._balanced(at + 1, ")")
            else:
                at = self.past(at)
        return self._closed(at if at < len(self.text) else -1, start - 1) + 1

    def _closed(self, found: int, start: int) -> int:
        if found < 0:
            line = self.line + self.text.count("\n", self.at, start)
            raise ConfigError(f"line {line}: {self.text[start]!r} is opened here and never closed")
        return found


class Chunk(NamedTuple):
    """Part of a word under expansion; `None` instead of one ends the word."""

    text: str
    line: int


@dataclass
class Expander:
    """Expands words with the variables known so far."""

    variables: dict[str, list[Word]] = field(default_factory=dict)

    def fields(self, raw: str, line: int) -> list[Word]:
        """The words that one word of the script becomes: none, one or many."""
        found: list[Word] = []
        current: Word | None = None
        for chunk in self._chunks(raw, line, quoted=False):
            if chunk is None:
                found += [current] if current else []
                current = None
            else:
                before = current or Word("", chunk.line)
                current = Word(before.text + chunk.text, before.line if before.text else chunk.line)
        return found + ([current] if current else [])

    def text(self, raw: str, line: int) -> str:
        """A word of the script as one text, as in the value of an assignment."""
        return " ".join(
            "".join(chunk.text for chunk in group)
            for group in _groups(self._chunks(raw, line, quoted=False, split=False))
        )

    def _chunks(self, raw: str, line: int, *, quoted: bool, split: bool = True) -> Iterator[Chunk | None]:
        lexer, at = Lexer(raw, line), 0
        while at < len(raw):
            char, start = raw[at], at
            if char == "\\" and not (quoted and raw[at + 1 : at + 2] not in ("$", "`", '"', "\\", "\n")):
                escaped = raw[at + 1 : at + 2]
                at += 2
                if escaped != "\n":  # which goes on in the next line
                    yield Chunk(escaped, line)
            elif char == OPEN:
                at = lexer.past(at)
                yield Chunk(raw[start:at], line)
            elif char == "'" and not quoted:
                at = lexer.past(at)
                yield Chunk(raw[start + 1 : at - 1], line)
            elif char == '"' and not quoted:
                at = lexer.past(at)
                yield Chunk("", line)
                yield from self._chunks(raw[start + 1 : at - 1], line, quoted=True)
            elif char in "$`":
                at, values = self._expansion(raw, at, line, lexer)
                if quoted and raw[start:at].endswith("[*]}"):
                    values = [Word(" ".join(value.text for value in values), line)]
                yield from _joined(values, quoted=quoted or not split)
            else:
                at += 1
                yield Chunk(char, line)

    def _expansion(self, raw: str, at: int, line: int, lexer: Lexer) -> tuple[int, list[Word]]:
        """What the expansion at `at` stands for, and the position after it."""
        if raw[at] == "`":
            end = lexer.past(at)
            return end, [Word(unknown(f"({raw[at + 1 : end - 1]})"), line)]
        if raw.startswith("$((", at):
            end = lexer.past(at)
            return end, [Word(self._arithmetic(raw[at + 3 : end - 2], line), line)]
        if raw.startswith("$(", at):
            end = lexer.past(at)
            return end, [Word(unknown(raw[at + 1 : end]), line)]
        if raw.startswith("${", at):
            end = lexer.past(at)
            return end, self._parameter(raw[at + 2 : end - 1], line)
        match = re.compile(r"[A-Za-z_]\w*|[\d@*?#$!-]", re.ASCII).match(raw, at + 1)
        return (match.end(), self._value(match[0], line)) if match else (at + 1, [Word("$", line)])

    def _value(self, name: str, line: int) -> list[Word]:
        """The first element of a variable, as `$NAME` gives it."""
        return self.variables[name][:1] if name in self.variables else [Word(unknown(name), line)]

    def _parameter(self, body: str, line: int) -> list[Word]:
        """The value of `${body}`."""
        match = PARAMETER.fullmatch(body)
        if not match or body.startswith("#"):
            return self._length(body, line)
        name, index, rest = match["name"], match["index"], match["rest"]
        if index in ("@", "*"):
            value = self.variables.get(name, [Word(unknown(name), line)])
        elif index is not None:
            value = self._element(name, index, line)
        else:
            value = self._value(name, line)
        if not rest:
            return value
        if choice := re.fullmatch(r"(:?)([-=+?])(.*)", rest, re.DOTALL):
            return self._default(name, value, choice, line)
        if rest in ("^^", ",,") and name in self.variables:
            return [Word(word.text.upper() if rest == "^^" else word.text.lower(), word.line) for word in value]
        return [Word(unknown("{" + body + "}"), line)]

    def _default(self, name: str, value: list[Word], choice: re.Match[str], line: int) -> list[Word]:
        """`${NAME:-default}` and its kin. What the script does not set is taken as not set."""
        colon, operator, default = choice.groups()
        text = "".join(word.text for word in value)
        unset = is_unset(text) or (bool(colon) and not text)
        if operator == "?" or unset == (operator == "+"):
            return [] if operator == "+" else value
        chosen = [Word(self.text(default, line), line)]
        if operator == "=":
            self.variables[name] = chosen
        return chosen

    def _length(self, body: str, line: int) -> list[Word]:
        match = re.fullmatch(r"#(\w+)\[[@*]\]", body)
        if match and match[1] in self.variables:
            return [Word(str(len(self.variables[match[1]])), line)]
        return [Word(unknown("{" + body + "}"), line)]

    def _element(self, name: str, index: str, line: int) -> list[Word]:
        items, number = self.variables.get(name), self._arithmetic(index, line)
        if items is None or not number.isdigit():
            return [Word(unknown(f"{{{name}[{index}]}}"), line)]
        return items[int(number) : int(number) + 1]

    def _arithmetic(self, expression: str, line: int) -> str:
        """An arithmetic expression's value, or its mark."""
        value = calculate(self.text(re.sub(r"(?<![\w$\{])([A-Za-z_]\w*)", r"${\1}", expression), line))
        return unknown(f"(({expression}))") if value is None else str(value)


def _joined(values: list[Word], *, quoted: bool) -> Iterator[Chunk | None]:
    """The chunks of an expansion: the elements of an array are words apart, blanks part words unless quoted."""
    for number, value in enumerate(values):
        if number:
            yield None
        for part in [value.text] if quoted else BLANKS.split(value.text):
            if quoted or (part and not part.isspace()):
                yield Chunk(part, value.line)
            elif part:
                yield None


def _groups(chunks: Iterator[Chunk | None]) -> Iterator[list[Chunk]]:
    group: list[Chunk] = []
    for chunk in chunks:
        if chunk is None:
            yield group
            group = []
        else:
            group.append(chunk)
    yield group
