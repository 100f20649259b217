"""Patterns of a shell: `{a,b}` and `{1..4}`, and what `*`, `?` and `[...]` match in a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from mega_cli.megatron_args.shell import MARK, Piece

EXTENDED = re.compile(r"[@+?!*]\(")
LETTERS: dict[str, Callable[[str], str]] = {
    "^^": str.upper,
    ",,": str.lower,
    "^": lambda text: text[:1].upper() + text[1:],
    ",": lambda text: text[:1].lower() + text[1:],
}
RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?", re.ASCII)
HELD = 0xE100  # from here on, characters of the private use area stand for the pieces that no brace counts in
LONGEST_RANGE = 10_000


def quoted(text: str) -> str:
    """A text as a pattern that matches nothing else."""
    return re.sub(r"([*?[\\])", r"\\\1", text)


def pattern_of(pieces: Sequence[Piece | None]) -> str:
    """Pieces as a pattern: what is quoted stands for itself."""
    return "".join(quoted(piece.text) if piece.kind == "quoted" else piece.text for piece in pieces if piece)


def glob_regex(pattern: str) -> str | None:
    """The regular expression of a pattern; None for the extended patterns of bash."""
    if EXTENDED.search(pattern):
        return None

    def one(match: re.Match[str]) -> str:
        token = match[0]
        if token in "*?":
            return ".*" if token == "*" else "."
        if token[0] == "[" and len(token) > 1:
            return "[" + re.sub(r"^[!^]", "^", token[1:-1]).replace("\\", "\\\\") + "]"
        return re.escape(token[-1])

    return "(?s:" + re.sub(r"\\.|\[[!^]?\]?[^]]*\]|.", one, pattern, flags=re.DOTALL) + ")"


def matches(text: str, pattern: str) -> bool | None:
    """Whether a text is of a pattern, if that is known."""
    regex = glob_regex(pattern)
    return None if regex is None or MARK.search(text + pattern) else re.fullmatch(regex, text) is not None


def changed(text: str, operator: str, pieces: Sequence[Piece | None]) -> str | None:
    """`${NAME#pattern}`, `${NAME/pattern/text}`, `${NAME^^}` and the like; None for what is not known."""
    if operator in LETTERS and not pieces:
        return None if MARK.search(text) else LETTERS[operator](text)
    if operator in ("#", "##", "%", "%%"):
        return _trimmed(text, operator, pattern_of(pieces))
    return _replaced(text, operator, pieces) if operator in ("/", "//", "/#", "/%") else None


def _trimmed(text: str, operator: str, pattern: str) -> str | None:
    regex = glob_regex(pattern)
    if regex is None or MARK.search(pattern):
        return None
    cuts = range(len(text) + 1)
    for cut in reversed(cuts) if operator in ("##", "%") else cuts:
        removed, kept = (text[:cut], text[cut:]) if operator[0] == "#" else (text[cut:], text[:cut])
        if re.fullmatch(regex, removed):
            # What is not known may hold a shorter match, or a longer one.
            open_ = MARK.search(removed if len(operator) == 1 else kept)
            return None if open_ or len(MARK.findall(kept)) != kept.count("\ue000") else kept
    return None if MARK.search(text) else text


def _replaced(text: str, operator: str, pieces: Sequence[Piece | None]) -> str | None:
    before: list[Piece] = []
    after: list[Piece] = []
    for piece in filter(None, pieces):
        if not after and piece.kind == "plain" and "/" in piece.text:
            head, _, tail = piece.text.partition("/")
            before.append(piece._replace(text=head))
            after.append(piece._replace(text=tail))
        else:
            (after or before).append(piece)
    regex = glob_regex(pattern_of(before))
    if regex is None or MARK.search(text + pattern_of(before)):
        return None
    regex = {"/#": rf"\A{regex}", "/%": rf"{regex}\Z"}.get(operator, regex)
    instead = "".join(piece.text for piece in after)
    return re.sub(regex, lambda match: instead if match[0] else "", text, count=0 if operator == "//" else 1)


def brace_expansion(pieces: Sequence[Piece | None]) -> list[list[Piece | None]]:
    """`a{b,c}{1..3}` in the plain text of a word, as the words that it makes."""
    if not any(piece and piece.kind == "plain" and "{" in piece.text for piece in pieces):
        return [list(pieces)]
    held = [piece for piece in pieces if piece is None or piece.kind != "plain"]
    numbers = iter(range(len(held)))
    text = "".join(p.text if p and p.kind == "plain" else chr(HELD + next(numbers)) for p in pieces)
    line = next(piece.line for piece in pieces if piece)

    def whole(word: str) -> Iterator[Piece | None]:
        for part in re.split(f"([{chr(HELD)}-{chr(HELD + len(held))}])", word):
            if len(part) == 1 and HELD <= ord(part) < HELD + len(held):
                yield held[ord(part) - HELD]
            elif part:
                yield Piece(part, "plain", line)

    return [list(whole(word)) for word in _braces(text)]


def _braces(text: str) -> list[str]:
    for start in (i for i, char in enumerate(text) if char == "{"):
        depth, commas = 0, [start]
        for at in range(start, len(text)):
            depth += (text[at] == "{") - (text[at] == "}")
            if text[at] == "," and depth == 1:
                commas.append(at)
            if depth == 0:
                inner = text[start + 1 : at]
                parts = [text[a + 1 : b] for a, b in zip(commas, [*commas[1:], at], strict=True)]
                chosen = [w for part in parts for w in _braces(part)] if len(parts) > 1 else _range(inner)
                rests = _braces(text[at + 1 :]) if chosen else []
                if 0 < len(chosen) * len(rests) <= LONGEST_RANGE:
                    return [text[:start] + word + rest for word in chosen for rest in rests]
                break
    return [text]


def _range(text: str) -> list[str]:
    match = RANGE.fullmatch(text)
    if not match or match[1].isalpha() != match[2].isalpha():
        return []
    first, last = (ord(end) if end.isalpha() else int(end) for end in match.group(1, 2))
    step = abs(int(match[3] or 1)) or 1
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    if match[1].isalpha():
        return [chr(number) for number in numbers]
    padded = any(re.match(r"-?0\d", end) for end in match.group(1, 2))
    width = max(map(len, match.group(1, 2))) if padded else 0
    return [str(number).zfill(width) for number in numbers[:LONGEST_RANGE]]
