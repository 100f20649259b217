"""Settings of a file, translated to keys of a run.yaml or notes; all others are reported at the end."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from mega_cli.megatron_args.run_draft import FlagTranslationNote, NoteKind
from mega_cli.megatron_args.translate import RunYamlTranslation
from mega_common.bounded_parsing import BoundedYamlLoader, parse_yaml_text, read_settings_file
from mega_common.errors import ConfigError

AUTO = ("auto", None)  # values in files of DeepSpeed and HuggingFace for "decided elsewhere"
# Notes on keys that set no key of run.yaml: {reason: patterns of keys}.
Reasons = Mapping[str, str]


class ForeignSettingsFile:
    """Settings of another trainer's JSON or YAML file by dotted keys, and the run.yaml they are translated to.

    Raises:
        ConfigError: if the file cannot be read, or has no settings.
    """

    def __init__(self, path: Path, description: str) -> None:
        self.path, self._description = path, description
        self._values: dict[str, Any] = {}
        self._left: set[str] = set()
        self._asked: set[str] = set()  # keys that the translation knows
        self._take(_read(path, description))
        self._run: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._notes: list[FlagTranslationNote] = []

    def _take(self, values: Mapping[str, Any], path: str = "") -> None:
        found = dict(_flat(values, path))
        off = tuple(
            key.removesuffix("enabled") for key, value in found.items() if key.endswith(".enabled") and value is False
        )
        self._values |= found
        self._left |= {key for key, value in found.items() if value not in AUTO and not key.startswith(off)}

    def include_file(self, name: str, prefix: str, description: str) -> bool:
        """Add the settings of another file with `prefix` before their keys; return False if it does not exist.
        `description` names the file in errors.

        Raises:
            ConfigError: if it exists and has no settings.
        """
        path = next((path for path in (self.path.parent / name, Path(name)) if path.is_file()), None)
        if path is not None:
            self._take(_read(path, description), prefix)
        return path is not None

    def has_key(self, *keys: str) -> bool:
        """Return True if the settings file has one of the keys, with any value."""
        self._asked.update(keys)
        return any(key in self._values for key in keys)

    def peek_value(self, key: str) -> Any:
        """Return the value of a key of the settings file, or None, without marking the key as translated."""
        return self._values.get(key)

    def refuse_value(self, key: str, rule: str, hint: str = "") -> NoReturn:
        """Raise ConfigError for a key of the settings file whose value cannot be translated.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self.path}: {key} = {self._values.get(key)} {rule}", hint=hint or None)

    def refuse_combination(self, rule: str, hint: str) -> NoReturn:
        """Raise ConfigError for settings of the file that conflict.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{self.path}: {rule}", hint=hint)

    def get_run_yaml_value(self, key: str) -> Any:
        """Return the value that a dotted key of the new run.yaml has so far, else None."""
        node: Any = self._run
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    def take_value(self, *keys: str) -> Any:
        """Return the first set value (not `auto`) of the settings file's `keys`, else None; mark them as translated."""
        self._asked.update(keys)
        found = [key for key in keys if key in self._left]
        self._left.difference_update(found)
        return self._values[found[0]] if found else None

    def take_integer(self, *keys: str) -> int | None:
        """Return the first set value of the settings file's `keys` as a whole number, else None; mark them as translated.

        Raises:
            ConfigError: for anything else.
        """
        value = self.take_number(*keys)
        if value is not None and value != int(value):
            raise ConfigError(f"{self.path}: {keys[0]} must be a whole number, found {value!r}")
        return None if value is None else int(value)

    def take_number(self, *keys: str) -> float | None:
        """Return the first set value of the settings file's `keys` as a number, else None; mark them as translated.
        A text such as 1e-4 in YAML is a number too.

        Raises:
            ConfigError: for anything else.
        """
        value = self.take_value(*keys)
        if value is None or isinstance(value, bool):
            return None
        try:
            found = float(value)
        except (TypeError, ValueError):
            raise ConfigError(f"{self.path}: {keys[0]} must be a number, found {value!r}") from None
        return int(found) if found.is_integer() and not isinstance(value, float) else found

    def set_key(self, key: str, value: Any, origin: str) -> None:
        """Set a dotted key of the new run.yaml, unless the value is None; `origin` becomes its comment."""
        if value is None:
            return
        self._origins[key], node = origin, self._run
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value

    def leave_open(self, key: str, text: str) -> None:
        """Set a key of the new run.yaml to `TO BE FILLED IN`, which `mega train` rejects, with a note for the user."""
        self.set_key(key, "TO BE FILLED IN", "to be filled in")
        self.add_note("open", text, key)

    def add_note(self, kind: NoteKind, text: str, name: str = "") -> None:
        """Add a note for the header of the new run.yaml, on the settings file's key `name` or a general one."""
        self._notes.append(FlagTranslationNote(kind, text, name or None))

    def add_notes_on_matching_keys(self, kind: NoteKind, text: str, patterns: str) -> None:
        """Add a note on each untranslated key of the file that matches a glob pattern; mark these keys as translated."""
        for key in sorted(self._left):
            if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
                self.add_note(kind, text, f"{key}: {self.take_value(key)}")

    def copy_settings(self, table: Mapping[str, str]) -> None:
        """Copy settings with their values to the new run.yaml; `table` is {key of run.yaml: keys of the settings file}.
        The keys are separated by blanks; the first that is set counts.
        """
        for key, names in table.items():
            there = [name for name in names.split() if name in self._left]
            self.set_key(key, _parse_yaml_number(self.take_value(*names.split())), ", ".join(there))

    def note_untranslated_optimizer(self, name: object, key: str) -> None:
        """Add a note that the file's optimizer, `name`, is not translated and AdamW is set instead."""
        others = "settings of Muon are not translated" if "muon" in str(name).lower() else f"but not {name}"
        known = "mega has adamw and muon"
        self.add_note("open", f"{known}, {others}; AdamW is set here: check it", key)

    def set_missing_keys_to_defaults(self, values: Mapping[str, Any], whose: str) -> None:
        """Set keys of the new run.yaml that are not set yet to `values`, the defaults of the program `whose`."""
        for key, value in values.items():
            if key not in self._origins:
                self.set_key(key, value, f"{whose} default")

    def has_auto_value(self, *keys: str) -> bool:
        """Return True if the value of one of the settings file's keys is `auto`, that is, decided elsewhere."""
        return any(self._values.get(key) == "auto" for key in keys)

    def finish_translation(self, reasons: Mapping[NoteKind, Reasons], launch: str) -> RunYamlTranslation:
        """Return the translation, with a note for every key of the settings file that is left untranslated.
        The argument `reasons` has the texts of the notes, by patterns of keys; other keys are for the user to check.
        """
        auto = sorted(key for key, value in self._values.items() if value == "auto")
        if auto:
            self.add_note(
                "open",
                "is auto: set by the training program, or by HuggingFace's arguments (--from-hf-args)",
                ", ".join(auto),
            )
        patterns = " ".join(text for rows in reasons.values() for text in rows.values()).split()
        if not any(key in self._asked or any(fnmatchcase(key, each) for each in patterns) for key in self._values):
            names = ", ".join(dict.fromkeys(key.partition(".")[0] for key in self._values))
            self.refuse_combination(f"has no setting of such a file, only {names:.60}", f"give {self._description}")
        for key in sorted(self._left):
            found = (
                (kind, why)
                for kind, rows in reasons.items()
                for why, patterns in rows.items()
                if any(fnmatchcase(key, pattern) for pattern in patterns.split())
            )
            near = difflib.get_close_matches(key, self._asked - self._values.keys(), n=1, cutoff=0.9)
            meant = f"is not a known setting; did you mean {near[0]}?" if near else ""
            kind, why = next(found, ("open", meant or "is not translated; check if it changes the model or the run"))
            self.add_note(kind, why, f"{key}: {self._values[key]}")
        return RunYamlTranslation(self._run, self._notes, self._origins, launch, self._description)


def _read(path: Path, description: str) -> Mapping[str, Any]:
    """Return the settings of a file of JSON or YAML."""
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder, and a file is required", hint=f"give {description}: JSON or YAML")
    values = parse_yaml_text(read_settings_file(path), str(path), BoundedYamlLoader)  # JSON is YAML
    if not isinstance(values, Mapping) or not values:
        raise ConfigError(f"{path}: the file has no settings", hint=f"give {description}: JSON or YAML")
    if isinstance(values.get("model"), Mapping) and isinstance(values.get("data"), Mapping):
        raise ConfigError(f"{path}: is a run.yaml of mega already", hint=f"give {description}, or mega train {path}")
    if {"model_type", "architectures"} <= values.keys():
        hint = f"give {description}; the model itself is a setting: mega train run.yaml --set model.from={path.parent}"
        raise ConfigError(f"{path}: is the config.json of a model", hint=hint)
    return values


def _parse_yaml_number(value: Any) -> Any:
    """Convert a number that YAML parses as a text, such as 1e-4."""
    number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?(e[-+]?\d+)?", value, re.IGNORECASE)
    return float(value) if number else value


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
