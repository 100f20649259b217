"""Markdown pages of the repository, parsed: their blocks, commands and named files."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "recipes", "examples", "packages", "cli", "docker")


@dataclass(frozen=True)
class Block:
    """Fenced block: language, `title="..."`, text and first line."""

    language: str
    title: str
    text: str
    line: int


def pages() -> list[Path]:
    """Return every page of the repository except CHANGELOG.md."""
    below = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))]
    return [path for path in [*sorted(ROOT.glob("*.md")), *below] if path.name != "CHANGELOG.md"]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks in order."""
    for token in _tokens(page):
        if token.type == "fence":
            language, _, rest = token.info.partition(" ")
            title = re.search(r'title="([^"]*)"', rest)
            yield Block(language, title[1] if title else "", token.content, (token.map or [0])[0] + 1)


def commands(page: Path) -> Iterator[tuple[int, list[str], bool]]:
    """Yield line and words of each `mega ...`, and whether it is a whole command (in a block) or a mention (in text)."""
    for block in blocks(page):
        if block.language != "python":
            text = block.text.replace("\\\n", " ")
            for number, line in enumerate(text.splitlines()):
                yield from ((block.line + number + 1, words, "..." not in words) for words in _calls(line))
    for token in _tokens(page):
        for child in token.children or ():
            if child.type == "code_inline":
                yield from (((token.map or [0])[0] + 1, words, False) for words in _calls(child.content))


def named(page: Path) -> Iterator[str]:
    """Yield paths of tests, benchmarks, examples, recipes and pages that the text names in code spans."""
    for token in _tokens(page):
        found = (child.content for child in token.children or () if child.type == "code_inline")
        yield from (name for name in found if re.fullmatch(r"(tests|benchmarks|examples|docs|recipes)/[\w/.-]+", name))


def _calls(line: str) -> Iterator[list[str]]:
    """Yield the commands of a line that begin with `mega`, without pipes and redirections."""
    if not re.search(r"(^|[ #$|&;])mega( |$)", line):
        return
    lexer = shlex.shlex(re.sub(r"^[#$]? *", "", line), posix=True, punctuation_chars=";|&<>()")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words: list[str] = []
    for word in [*lexer, ";"]:
        if re.fullmatch(r"[;|&<>()]+", word):
            if words[:1] == ["mega"]:
                yield words[1:]
            words = ["a file"] if set(word) & set("<>") else []
        else:
            words.append(word)


def _tokens(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8"))
