"""A page: one HTML file that needs no other, for a narrow screen and a wide one, dark and light."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib.resources import files
from pathlib import Path

from mega_common.errors import ConfigError
from mega_common.files import atomic_file


@dataclass(frozen=True)
class Section:
    """A heading, what is said below it, and figures or tables in HTML; those that are empty are left out."""

    title: str
    parts: Sequence[str]
    text: str = ""
    wide: bool = False

    def html(self) -> str:
        """The section, "" without a part."""
        parts = [part for part in self.parts if part]
        if not parts:
            return ""
        said = f'<p class="quiet">{escape(self.text)}</p>' if self.text else ""
        body = "".join(parts) if self.wide else f'<div class="grid">{"".join(parts)}</div>'
        return f"<section><h2>{escape(self.title)}</h2>{said}{body}</section>\n"


def page(title: str, subtitle: str, tiles: Iterable[tuple[str, str]], sections: Iterable[Section]) -> str:
    """The whole page; `tiles` are (what, how much) that stand first."""
    here = files(__package__ or "mega_trainer.pages")
    css, script = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    first = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)
    made = datetime.now().astimezone().isoformat(" ", "minutes")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(title)}</h1><p class="quiet">{escape(subtitle)}</p></header>\n'
        f'<div class="tiles">{first}</div>\n{"".join(section.html() for section in sections)}'
        f"<footer>made by mega, {escape(made)}</footer>\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Rows under a head, those columns of `numbers` to the right; "" without a row."""

    def row(cells: Sequence[str], tag: str) -> str:
        marked = (
            f"<{tag}{' class=number' * (place in numbers)}>{escape(cell)}</{tag}>" for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(marked)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f'<div class="scroll"><table>{row(head, "th") if head else ""}{body}</table></div>' if body else ""


def wide(picture: str) -> str:
    """A picture that is wider than a screen may be."""
    return f'<div class="scroll wide">{picture}</div>'


def write_page(path: Path, text: str, option: str) -> None:
    """Write it, whole or not at all.

    Raises:
        ConfigError: when the file cannot be written, by the name of the `option` that named it.
    """
    try:
        with atomic_file(path, text=True) as stream:
            stream.write(text)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror})", hint="give another file") from error
