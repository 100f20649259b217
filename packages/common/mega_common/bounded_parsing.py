"""YAML and JSON parsers that terminate on any input: bounded in size, nesting, aliases and digits.

Files of other people may be small and still ask for endless work: aliases of aliases, thousands of nested brackets,
integers of thousands of digits, a device in place of a file. All of these are refused here with one sentence.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml

from mega_common.errors import ConfigError, MegaError

LARGEST_SETTINGS = 2 * 1024 * 1024  # bytes of a file of settings
DEEPEST = 64  # levels of nesting in a file of settings
EXPANSION = 100_000  # nodes, or 16 characters each, that all aliases of a file stand for
LARGEST_FILE = 1 << 28  # bytes of a file of text or JSON that is read as a whole
LONGEST_INTEGER = 40  # digits
# Errors that PyYAML's constructors raise for values which do not fit their own tag, such as `!!timestamp x`.
MISFITS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


class BoundedYamlLoader(yaml.SafeLoader):
    """YAML 1.1 loader of PyYAML with limits on nesting, on the expansion of aliases and on integers."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth, self._size, self._expanded = 0, 0, 0
        self._sizes: dict[str, int | None] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next node.

        Raises:
            ConfigError: when a limit is passed, or a node contains itself.
        """
        event = self.peek_event()  # type: ignore[no-untyped-call]
        anchor: str | None = event.anchor
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) and anchor in self._sizes:
            self._count_alias_expansion(anchor, line)
            return super().compose_node(parent, index)
        before, self._depth = self._size, self._depth + 1
        if self._depth > DEEPEST:
            raise ConfigError(f"line {line}: nested deeper than {DEEPEST} levels")
        if anchor is not None:
            self._sizes[anchor] = None
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._size += 1 + (len(node.value) // 16 if isinstance(node, yaml.ScalarNode) else 0)
        if anchor is not None:
            self._sizes[anchor] = self._size - before
        return node

    def _count_alias_expansion(self, anchor: str, line: int) -> None:
        size = self._sizes[anchor]
        if size is None:
            raise ConfigError(f"line {line}: the value of &{anchor} contains itself")
        self._size += size
        self._expanded += size
        if self._expanded > EXPANSION:
            raise ConfigError(f"line {line}: the aliases of this file stand for more than {EXPANSION:,} values")


class StrictYamlLoader(BoundedYamlLoader):
    """Strict YAML loader: a key given twice is an error instead of the last one winning.

    Plain words are read by the core schema of YAML 1.2: `3e-4` is a number, while `no`, `12:30:00` and `2026-01-31`
    stay text.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping.

        Raises:
            ConfigError: when a key is given twice.
        """
        seen: set[object] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # refused below
            if key in seen:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: the key {key!r} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


for _kind, _pattern, _starts in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
):
    StrictYamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), _starts)


def _check_digits(node: yaml.ScalarNode) -> None:
    if len(node.value) > LONGEST_INTEGER:
        line = node.start_mark.line + 1
        raise ConfigError(f"line {line}: an integer of {len(node.value)} characters, {node.value[:12]}...")


def _construct_core_integer(loader: StrictYamlLoader, node: yaml.ScalarNode) -> int:
    _check_digits(node)
    return int(node.value, 16 if "x" in node.value else 10)


def _construct_integer(loader: BoundedYamlLoader, node: yaml.ScalarNode) -> int:
    _check_digits(node)
    return loader.construct_yaml_int(node)


BoundedYamlLoader.add_constructor("tag:yaml.org,2002:int", _construct_integer)
StrictYamlLoader.add_constructor("tag:yaml.org,2002:int", _construct_core_integer)


def parse_yaml_text(text: str, source: str, loader: type[BoundedYamlLoader] = StrictYamlLoader) -> Any:
    """Return the value of a YAML document, read by the core schema of YAML 1.2 unless another `loader` is given.

    Raises:
        ConfigError: when it is no YAML, repeats a key or passes a limit; the message begins with `source`.
    """
    try:
        return yaml.load(text, loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}") from None
    except MISFITS as error:
        raise ConfigError(f"{source}: holds a value that is not of its own YAML tag ({error})") from None


def check_yaml_limits(path: Path) -> None:
    """Check that a YAML file, which another library loads with its own tags, stays within the limits.

    Raises:
        ConfigError: when it cannot be read, is no YAML or passes a limit.
    """
    text = read_settings_file(path)
    try:
        for _ in yaml.compose_all(text, BoundedYamlLoader):
            pass
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None


def read_file_start(path: Path, length: int = -1) -> bytes:
    """Return the first `length` bytes of a file, by default all; a FIFO without a writer reads as empty.

    Raises:
        OSError: when it is missing or no file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # which does not wait until someone opens it for writing
    with open(descriptor, "rb") as file:
        os.set_blocking(descriptor, True)
        return file.read(length)


def explain_read_error(error: Exception) -> str:
    """Return the reason why a file cannot be read, without its name and the error number."""
    if isinstance(error, IsADirectoryError):
        return "it is a folder, and a file is required"
    if isinstance(error, NotADirectoryError):
        return "a folder is required, and a part of the path is a file"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text, see byte {error.start}"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_settings_file(path: Path, largest: int = LARGEST_SETTINGS) -> str:
    """Return the text of a settings file, at most `largest` bytes of UTF-8.

    Raises:
        ConfigError: when it is missing, larger or no text.
    """
    try:
        content = read_file_start(path, largest + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({explain_read_error(error)})") from None
    if len(content) > largest:
        raise ConfigError(f"{path}: larger than {largest:,} bytes, the limit for a file of settings")
    return text


def read_utf8_text(path: Path, refusal: type[MegaError], *, hint: str | None = None) -> str:
    """Return the text of a file in UTF-8, at most `LARGEST_FILE` bytes.

    Raises:
        MegaError: of the type `refusal`, when it is missing, no file, larger or no text.
    """
    try:
        content = read_file_start(path, LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise refusal(f"{path}: larger than {LARGEST_FILE:,} bytes, the limit for such a file", hint=hint)
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(f"{path}: cannot be read ({explain_read_error(error)})", hint=hint) from None


def read_json_file(path: Path, refusal: type[MegaError], *, hint: str | None = None) -> Any:
    """Return the value of a JSON file.

    Raises:
        MegaError: of the type `refusal`, when it is missing, no file or no JSON.
    """
    text = read_utf8_text(path, refusal, hint=hint)
    try:
        return parse_json_text(text)
    except ValueError as error:
        raise refusal(f"{path}: cannot be read (not valid JSON: {error})", hint=hint) from None


def parse_json_text(text: str | bytes) -> Any:
    """Return the value of a JSON document.

    Raises:
        ValueError: when it is no JSON, is nested too deeply, gives a key two values, or holds an integer of thousands of
            digits.
    """
    try:
        return json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def reject_duplicate_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object as a dictionary.

    Raises:
        ValueError: when a key has two different values.
    """
    members = dict(pairs)
    if len(members) != len(pairs):
        for key, value in pairs:
            if members[key] != value:
                raise ValueError(f"the key {key!r} has two values")
    return members
