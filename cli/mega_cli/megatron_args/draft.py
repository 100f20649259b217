"""A run.yaml in the making: each key with where it comes from, and a note for every flag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, Literal

import yaml

from mega_cli.megatron_args.flags import Arguments, Given
from mega_cli.megatron_args.shell import MARK, shown

Kind = Literal["translated", "not needed", "changes meaning", "no equivalent", "open"]
DEFAULT = "Megatron's default"


@dataclass(frozen=True)
class Note:
    """What became of a flag, or something else to know.

    Attributes:
        kind: what of it mega has; `open` is what the user has to fill in or to look at.
        text: one sentence or clause.
        flag, line: the flag as given and its line in the script; none for notes of no single flag.
        key: the key of run.yaml that it gives.
    """

    kind: Kind
    text: str
    flag: str | None = None
    line: int | None = None
    key: str | None = None


class Draft:
    """Collects keys and notes while the arguments are gone through.

    Attributes:
        arguments: the settings of the command.
        ranks: number of ranks, if the script says it.
        run: the content of run.yaml so far.
        origins: by dotted key, the flags that it comes from.
    """

    def __init__(self, arguments: Arguments, ranks: int | None) -> None:
        self.arguments, self.ranks = arguments, ranks
        self.run: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self._flags: dict[str, Note] = {}
        self._general: list[Note] = []

    def __getitem__(self, dest: str) -> Any:
        return self.arguments[dest]

    def __contains__(self, dest: str) -> bool:
        return dest in self.arguments

    @property
    def notes(self) -> list[Note]:
        """General notes, then those of the flags in the order of the command."""
        return self._general + [self._flags[dest] for dest in self.arguments.given if dest in self._flags]

    def put(self, key: str, value: Any, *dests: str, because: str = "", ask: str = "not in the script") -> None:
        """Set a key to what the settings `dests` give; `None` is left for the user to fill in, who is told `ask`."""
        found = [given for dest in dests if (given := self.arguments.given.get(dest))]
        self.origins[key] = because or ", ".join(map(str, found)) or DEFAULT
        node = self.run
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = _plain(value)
        if value is None:
            self.origins[key] = "to be filled in"
            self.tell("open", f"{ask}; to be filled in", key=key)
        for name in dict.fromkeys(_marks(value)):
            self.tell("open", f"${name} is not set in the script", key=key)
        for given in found:
            self._flags.setdefault(given.flag.dest, Note("translated", key, str(given), given.line, key))

    def tell(self, kind: Kind, text: str, *dests: str, key: str | None = None) -> None:
        """Note something on the settings `dests` as far as they are given, or in general without any."""
        for given in filter(None, map(self.arguments.given.get, dests)):
            before = self._flags.get(given.flag.dest)
            note = Note(kind, text, str(given), given.line, before.key if before else key)
            self._flags[given.flag.dest] = note
        if not dests:
            self._general.append(Note(kind, text, key=key))

    def remark(self, line: int, text: str) -> None:
        """Note something about a line of the script."""
        self._general.append(Note("open", f"line {line}: {text}", line=line))

    def refuse(self, dest: str, rule: str) -> None:
        """Note that the value of a flag cannot be understood, which is told with all other such problems."""
        self.arguments.refuse(self.arguments.given[dest], rule)

    def finish(self) -> None:
        """Note what becomes of the flags that no key came from."""
        handling = load_handling()
        for dest, given in self.arguments.given.items():
            if dest not in self._flags:
                self._flags[dest] = _handled(given, handling)


def load_handling() -> list[tuple[str, Kind, str]]:
    """What becomes of flags without a key, from `handling.yaml`: (pattern of the flag's name, kind, why)."""
    text = (files("mega_cli.megatron_args") / "handling.yaml").read_text(encoding="utf-8")
    table: Mapping[Kind, Mapping[str, str]] = yaml.safe_load(text)
    return [
        (pattern, kind, why) for kind, rows in table.items() for why, flags in rows.items() for pattern in flags.split()
    ]


def _handled(given: Given, handling: list[tuple[str, Kind, str]]) -> Note:
    kind, why = next((kind, why) for pattern, kind, why in handling if fnmatchcase(given.flag.name, pattern))
    note = Note(kind, why, str(given), given.line)
    if kind == "no equivalent" and not given.unset and given.value() == given.flag.default_value():
        return replace(note, kind="not needed", text="this is what Megatron does without it")
    return note


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _marks(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from MARK.findall(value)
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _marks(item)
