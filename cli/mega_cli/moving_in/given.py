"""A file of settings, whose keys become keys of a run.yaml or notes; what neither happened to is told at the end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from mega_cli.megatron_args.draft import Kind, Note
from mega_cli.megatron_args.translate import Translation
from mega_common.errors import ConfigError
from mega_common.parsing import BoundedLoader, parse_yaml, read_settings

AUTO = ("auto", None)  # what DeepSpeed's and HuggingFace's files say where something else decides
# What has a counterpart that needs no setting: {reason: patterns of keys}.
Reasons = Mapping[str, str]


class Given:
    """The settings of a file, by dotted keys, and the run that is made of them.

    Raises:
        ConfigError: when the file cannot be read, or holds no settings.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path, self._what = path, what
        self._values: dict[str, Any] = {}
        self._left: set[str] = set()
        self._take(_read(path, what))
        self._run: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._notes: list[Note] = []

    def _take(self, values: Mapping[str, Any], path: str = "") -> None:
        found = dict(_flat(values, path))
        off = {key for key, value in found.items() if key.endswith(".enabled") and value is False}
        self._values |= found
        self._left |= {key for key, value in found.items() if value not in AUTO} - off

    def include(self, name: str, prefix: str, what: str) -> bool:
        """Add the settings of another file under a prefix; return False where it is not there.

        Raises:
            ConfigError: when it is there, and holds no settings.
        """
        path = next((path for path in (self.path.parent / name, Path(name)) if path.is_file()), None)
        if path is not None:
            self._take(_read(path, what), prefix)
        return path is not None

    def has(self, *keys: str) -> bool:
        """Return whether the file names one of the keys, whatever their values."""
        return any(key in self._values for key in keys)

    def peek(self, key: str) -> Any:
        """Return the value of a key without accounting for it."""
        return self._values.get(key)

    def refuse(self, key: str, rule: str, hint: str = "") -> NoReturn:
        """Raise the error of a key whose value cannot be translated.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self.path}: {key} = {self._values.get(key)} {rule}", hint=hint or None)

    def refuse_run(self, rule: str, hint: str) -> NoReturn:
        """Raise the error of settings that do not fit each other.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self.path}: {rule}", hint=hint)

    def set_to(self, key: str) -> Any:
        """Return what a key of the run is set to so far, else None."""
        node: Any = self._run
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    def get(self, *keys: str) -> Any:
        """The value of the first key that is there and says something, which is then accounted for."""
        found = [key for key in keys if key in self._left]
        self._left.difference_update(found)
        return self._values[found[0]] if found else None

    def whole(self, *keys: str) -> int | None:
        """Return a whole number of the file, else None.

        Raises:
            ConfigError: for anything else.
        """
        value = self.number(*keys)
        if value is not None and value != int(value):
            raise ConfigError(f"{self.path}: {keys[0]} = {value!r}: expected a whole number")
        return None if value is None else int(value)

    def number(self, *keys: str) -> float | None:
        """The same of a number, which YAML takes for a text where it is written as 1e-4.

        Raises:
            ConfigError: for anything else.
        """
        value = self.get(*keys)
        if value is None or isinstance(value, bool):
            return None
        try:
            found = float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{self.path}: {keys[0]} = {value!r}: expected a number") from None
        return int(found) if found.is_integer() and not isinstance(value, float) else found

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set a key of the run, unless there is nothing to set."""
        if value is None:
            return
        self._origins[key], node = origin, self._run
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value

    def ask(self, key: str, text: str) -> None:
        """Leave a key to be filled in."""
        self.put(key, "TO BE FILLED IN", "to be filled in")
        self.tell("open", text, key)

    def tell(self, kind: Kind, text: str, name: str = "") -> None:
        """Note something, of a key or in general."""
        self._notes.append(Note(kind, text, name or None))

    def rows(self, table: Mapping[str, str]) -> None:
        """Settings that keep their value: {key of a run.yaml: keys of the file}."""
        for key, names in table.items():
            there = [name for name in names.split() if name in self._left]
            self.put(key, _plain(self.get(*names.split())), ", ".join(there))

    def tell_optimizer(self, name: object, key: str) -> None:
        """Note an optimizer that is not translated, in whose place AdamW stands."""
        others = "settings of Muon are not translated" if "muon" in str(name).lower() else f"and not {name}"
        known = "mega has adamw and muon"
        self.tell("open", f"{known}, {others}; AdamW stands here, until another one is written", key)

    def defaults(self, values: Mapping[str, Any], whose: str) -> None:
        """Write out what holds where the file says nothing, for mega's own defaults are others."""
        for key, value in values.items():
            if key not in self._origins:
                self.put(key, value, f"{whose} default")

    def automatic(self, *keys: str) -> bool:
        """Whether the file leaves one of the keys to a program."""
        return any(self._values.get(key) == "auto" for key in keys)

    def finish(self, reasons: Mapping[Kind, Reasons], launch: str) -> Translation:
        """The run, with a note for every key that is left."""
        auto = sorted(key for key, value in self._values.items() if value == "auto")
        if auto:
            self.tell("open", "is left to the program, or to HuggingFace's arguments (--from-hf-args)", ", ".join(auto))
        for key in sorted(self._left):
            found = (
                (kind, why)
                for kind, rows in reasons.items()
                for why, patterns in rows.items()
                if any(fnmatchcase(key, pattern) for pattern in patterns.split())
            )
            kind, why = next(found, ("open", "not known here; see whether it changes the model or the run"))
            self.tell(kind, why, f"{key}: {self._values[key]}")
        return Translation(self._run, self._notes, self._origins, launch, self._what)


def _read(path: Path, what: str) -> Mapping[str, Any]:
    """Return the settings of a file of JSON or YAML."""
    values = parse_yaml(read_settings(path), str(path), BoundedLoader)  # JSON is YAML
    if not isinstance(values, Mapping) or not values:
        raise ConfigError(f"{path}: holds no settings", hint=f"give {what}: JSON or YAML")
    return values


def _plain(value: Any) -> Any:
    """A number that YAML takes for a text, as it does 1e-4."""
    number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", value, re.IGNORECASE)
    return float(value) if number else value


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
