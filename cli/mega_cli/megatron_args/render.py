"""A translation as the text of run.yaml: the notes on top, the flag of each key beside it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from mega_cli.megatron_args.draft import Kind, Note
from mega_cli.megatron_args.translate import Translation

HEADINGS: dict[Kind, str] = {
    "open": "To look at before the first run:",
    "no equivalent": "Without an equivalent in mega, left out:",
    "changes meaning": "Different in mega:",
    "not needed": "Not needed in mega:",
}
WIDTH = 118
LONGEST_COMMENT = 70


def to_yaml(translation: Translation) -> str:
    """The text of run.yaml."""
    lines = [*_header(translation), *_mapping(translation.run, "", translation.origins)]
    return "\n".join(lines) + "\n"


def _header(translation: Translation) -> Iterator[str]:
    yield f"# Translated from {translation.what}."
    if translation.launch:
        yield f"# Launch: {translation.launch}."
    for kind, heading in HEADINGS.items():
        notes = list(_by_reason([note for note in translation.notes if note.kind == kind]))
        if notes:
            yield "#"
            yield f"# {heading}"
        for note in notes:
            yield from textwrap.wrap(
                _printable(note), WIDTH, initial_indent="#   ", subsequent_indent="#     ", break_on_hyphens=False
            )
    yield ""


def _by_reason(notes: Sequence[Note]) -> Iterator[str]:
    """The notes, those of flags with the same reason together."""
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
        comment = f"  # {textwrap.shorten(_printable(origins[full]), LONGEST_COMMENT, placeholder=' ...')}"
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield f"{indent}{key}:{comment}"
            yield from (f"{indent}  - {_flow(item)}" for item in value)
        else:
            yield f"{indent}{key}: {_flow(value)}{comment}"


def _flow(value: Any) -> str:
    """A value on one line."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, sort_keys=False, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def _printable(text: str) -> str:
    """A text for a comment, which must not end the line."""
    return "".join(char if char.isprintable() else " " for char in text)


class _Dumper(yaml.SafeDumper):
    """Quotes all but plain words, for run.yaml is read by YAML 1.2, where more words are numbers than PyYAML knows."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = re.fullmatch(r"[A-Za-z_/$][\w/.$-]*", text, re.ASCII)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text)
