"""Brace expansion of a shell, `{a,b}` and `{1..4}`, counted before it is expanded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mega_cli.megatron_args.shell_words import WORD, WordPiece

RANGE = re.compile(r"(-?\d{1,18}|[A-Za-z])\.\.(-?\d{1,18}|[A-Za-z])(?:\.\.(-?\d{1,18}))?", re.ASCII)
FIRST_PLACEHOLDER = 0xE100  # private use characters from here on replace pieces that are not plain text
MAX_PLACEHOLDERS = 0xF8FF - FIRST_PLACEHOLDER


@dataclass
class _BraceGroup:
    """Pair of braces: the sequences of parts between its commas.

    Attributes:
        opening: offset of its `{`.
        choices: the sequences.
    """

    opening: int
    choices: list[list[str | _BraceGroup]] = field(default_factory=lambda: [[]])

    def literal_parts(self) -> list[str | _BraceGroup]:
        """Return the parts of unmatched braces in a shell word as literal text, without the closing brace."""
        parts: list[str | _BraceGroup] = ["{"]
        for number, choice in enumerate(self.choices):
            parts += [",", *choice] if number else choice
        return parts


def expand_shell_braces(
    pieces: Sequence[WordPiece | None], spend: Callable[[int], None]
) -> list[list[WordPiece | None]]:
    """Return the words that brace expansion, `a{b,c}{1..3}`, makes of one shell word.
    The word is given as its quoted and unquoted pieces; only unquoted text is expanded. `spend` is called with the
    total number of characters of the words before they are created.
    """
    if not any(piece and piece.kind == "plain" and "{" in piece.text for piece in pieces):
        return [list(pieces)]
    opaque = [piece for piece in pieces if piece is None or piece.kind != "plain"]
    if len(opaque) > MAX_PLACEHOLDERS:
        return [list(pieces)]
    numbers = iter(range(len(opaque)))
    text = "".join(p.text if p and p.kind == "plain" else chr(FIRST_PLACEHOLDER + next(numbers)) for p in pieces)
    line = next(piece.line for piece in pieces if piece)

    def join_parts(word: str) -> Iterator[WordPiece | None]:
        for part in re.split(f"([{chr(FIRST_PLACEHOLDER)}-{chr(FIRST_PLACEHOLDER + len(opaque))}])", word):
            if len(part) == 1 and 0 <= ord(part) - FIRST_PLACEHOLDER < len(opaque):
                yield opaque[ord(part) - FIRST_PLACEHOLDER]
            elif part:
                yield WordPiece(part, "plain", line)

    parts = _parse_braces(text)
    count, characters = _count_expansion(parts)
    if count == 1:
        return [list(join_parts(text))]
    spend(characters + count * (WORD + sum(len(piece.text) for piece in opaque if piece)))
    return [list(join_parts(word)) for word in _words(parts)]


def _parse_braces(text: str) -> list[str | _BraceGroup]:
    """Parse the braces of a text; braces without a partner, a comma or a range are literal."""
    found: list[str | _BraceGroup] = []
    opened: list[_BraceGroup] = []
    for match in re.finditer(r"[{},]|[^{},]+", text):
        token, into = match[0], opened[-1].choices[-1] if opened else found
        if token == "{":
            opened.append(_BraceGroup(match.start()))
        elif token == "," and opened:
            opened[-1].choices.append([])
        elif token == "}" and opened:
            group = opened.pop()
            _close(group, text[group.opening + 1 : match.start()], opened[-1].choices[-1] if opened else found)
        else:
            into.append(token)
    for group in opened:  # without a closing brace, outermost first
        found += group.literal_parts()
    return found


def _close(group: _BraceGroup, inner: str, into: list[str | _BraceGroup]) -> None:
    span = RANGE.fullmatch(inner) if len(group.choices) == 1 and len(inner) < 64 else None
    if len(group.choices) > 1 or (span and span[1].isalpha() == span[2].isalpha()):
        into.append(group)
    else:
        into += [*group.literal_parts(), "}"]


def _parse_range(group: _BraceGroup) -> tuple[range, Callable[[int], str]] | None:
    """Return the numbers of `{1..4}` and their format, or None for a list."""
    match = RANGE.fullmatch("".join(part for part in group.choices[0] if isinstance(part, str)))
    if len(group.choices) > 1 or not match:
        return None
    letters = match[1].isalpha()
    first, last = (ord(end) if letters else int(end) for end in match.group(1, 2))
    step = abs(int(match[3] or 1)) or 1
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    if letters:
        return numbers, chr
    padded = any(re.match(r"-?0\d", end) for end in match.group(1, 2))
    width = max(map(len, match.group(1, 2))) if padded else 0
    return numbers, lambda number: str(number).zfill(width)


def _count_expansion(parts: Sequence[str | _BraceGroup]) -> tuple[int, int]:
    """Return the number of words that parts expand to, and of characters in all of them."""
    count, characters = 1, 0
    for part in parts:
        number, length = (1, len(part)) if isinstance(part, str) else _size_of(part)
        count, characters = count * number, characters * number + length * count
        if count > 1 << 62:
            break  # more than any budget
    return count, characters


def _size_of(group: _BraceGroup) -> tuple[int, int]:
    if found := _parse_range(group):
        numbers = found[0]
        count = (numbers[-1] - numbers[0]) // numbers.step + 1
        return count, count * len(str(numbers[-1]))
    sizes = [_count_expansion(choice) for choice in group.choices]
    return sum(count for count, _ in sizes), sum(characters for _, characters in sizes)


def _words(parts: Sequence[str | _BraceGroup]) -> list[str]:
    words = [""]
    for part in parts:
        chosen = [part] if isinstance(part, str) else _chosen(part)
        words = [word + choice for word in words for choice in chosen]
    return words


def _chosen(group: _BraceGroup) -> list[str]:
    if found := _parse_range(group):
        numbers, written = found
        return [written(number) for number in numbers]
    return [word for choice in group.choices for word in _words(choice)]
