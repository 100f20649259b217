"""Rendering of a translation as run.yaml: notes at the top, the flag of each key in a comment."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from mega_cli.megatron_args.run_draft import FlagNote, NoteKind
from mega_cli.megatron_args.translate import ScriptTranslation

HEADINGS: dict[NoteKind, str] = {
    "open": "To check before the first run:",
    "no equivalent": "Without an equivalent in mega, left out:",
    "changes meaning": "Different in mega:",
    "not needed": "Not needed in mega:",
}
WIDTH = 118
LONGEST_COMMENT = 70


def render_run_yaml(translation: ScriptTranslation) -> str:
    """Return the text of run.yaml for a translation: notes at the top, and the flags that set each key as comments."""
    lines = [*_header(translation), *_mapping(translation.run, "", translation.origins)]
    return "\n".join(lines) + "\n"


def _header(translation: ScriptTranslation) -> Iterator[str]:
    yield f"# Translated from {translation.source}."
    if translation.launch:
        yield f"# Launch: {translation.launch}."
    for kind, heading in HEADINGS.items():
        notes = list(_group_notes([note for note in translation.notes if note.kind == kind]))
        if notes:
            yield "#"
            yield f"# {heading}"
        for note in notes:
            yield from textwrap.wrap(
                _comment_text(note), WIDTH, initial_indent="#   ", subsequent_indent="#     ", break_on_hyphens=False
            )
    yield ""


def _group_notes(notes: Sequence[FlagNote]) -> Iterator[str]:
    """Return the notes, with flags of the same reason together."""
    reasons: dict[str, list[str]] = {}
    for note in notes:
        reasons.setdefault(note.text, []).extend(filter(None, [note.flag or note.key]))
    for reason, names in reasons.items():
        yield f"{', '.join(names)}: {reason}" if names else reason


def _mapping(node: Mapping[str, Any], path: str, origins: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * (path.count(".") if path else 0)
    for key, value in node.items():
        full = path + key
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _mapping(value, full + ".", origins)
            continue
        comment = f"  # {textwrap.shorten(_comment_text(origins[full]), LONGEST_COMMENT, placeholder=' ...')}"
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield f"{indent}{key}:{comment}"
            yield from (f"{indent}  - {_inline_yaml(item)}" for item in value)
        else:
            yield f"{indent}{key}: {_inline_yaml(value)}{comment}"


def _inline_yaml(value: Any) -> str:
    """Return a value on one line."""
    text = yaml.dump(value, Dumper=_QuotingDumper, default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def _comment_text(text: str) -> str:
    """Return a text for a comment, without line breaks."""
    return "".join(char if char.isprintable() else " " for char in text)


class _QuotingDumper(yaml.SafeDumper):
    """YAML dumper that quotes everything except plain words: run.yaml is read as YAML 1.2, which parses more numbers."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = re.fullmatch(r"[A-Za-z_/$][\w/.$-]*", text, re.ASCII)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_QuotingDumper.add_representer(str, _text)
