"""YAML and JSON parsers that terminate on any input: bounded in size, nesting, aliases and digits.

A small file from an untrusted source can take unbounded work: aliases of aliases, thousands of nested brackets,
integers of thousands of digits, a device in place of a file. All of these raise a one-sentence error here.
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

MAX_SETTINGS_BYTES = 2 * 1024 * 1024
SETTINGS_FILE = "a settings file"  # in messages
MAX_FILE_BYTES = 1 << 28  # of a text or JSON file that is read as a whole
GIT_LFS_POINTER = b"version https://git-lfs"  # start of the file that Git LFS leaves in place of a file not fetched
MAX_DEPTH = 64  # nesting levels of a settings file
MAX_EXPANSION = 100_000  # nodes, or 16 characters each, that all aliases of a file expand to
MAX_INTEGER_LENGTH = 40  # characters
# Errors that PyYAML's constructors raise for values that do not match their tag, such as `!!timestamp x`.
TAG_ERRORS = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


class BoundedYamlLoader(yaml.SafeLoader):
    """YAML 1.1 loader of PyYAML with limits on nesting, on the expansion of aliases and on integers."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth, self._size, self._expanded = 0, 0, 0
        self._sizes: dict[str, int | None] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the next YAML node like PyYAML, and raise an error beyond the limits on nesting and alias expansion.

        Raises:
            ConfigError: if a limit is exceeded, or a node contains itself.
        """
        event = self.peek_event()  # type: ignore[no-untyped-call]
        anchor: str | None = event.anchor
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) and anchor in self._sizes:
            self._count_alias_expansion(anchor, line)
            return super().compose_node(parent, index)
        before, self._depth = self._size, self._depth + 1
        if self._depth > MAX_DEPTH:
            raise ConfigError(f"line {line}: is nested deeper than {MAX_DEPTH} levels")
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
        if self._expanded > MAX_EXPANSION:
            raise ConfigError(f"line {line}: the aliases of this file expand to more than {MAX_EXPANSION:,} values")


class StrictYamlLoader(BoundedYamlLoader):
    """Bounded YAML loader with the YAML 1.2 core schema (`no` is text, `3e-4` a number) that rejects duplicate keys.

    `12:30:00` and `2026-01-31` are text as well.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct the dictionary of a YAML mapping node; a duplicate key is an error.

        Raises:
            ConfigError: for a duplicate key.
        """
        keys: set[object] = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # rejected by the base class
            if key in keys:
                raise ConfigError(f"line {key_node.start_mark.line + 1}: the key {key!r} is given twice")
            keys.add(key)
        return super().construct_mapping(node, deep)


for _kind, _pattern, _starts in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", list("-+.0123456789")),
):
    StrictYamlLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(f"^(?:{_pattern})$"), _starts)


def _check_digits(node: yaml.ScalarNode) -> None:
    if len(node.value) > MAX_INTEGER_LENGTH:
        line = node.start_mark.line + 1
        raise ConfigError(
            f"line {line}: an integer must have at most {MAX_INTEGER_LENGTH} characters, and {node.value[:12]}... has"
            f" {len(node.value)}"
        )


def _construct_core_integer(loader: StrictYamlLoader, node: yaml.ScalarNode) -> int:
    _check_digits(node)
    return int(node.value, 16 if "x" in node.value else 10)


def _construct_integer(loader: BoundedYamlLoader, node: yaml.ScalarNode) -> int:
    _check_digits(node)
    return loader.construct_yaml_int(node)


BoundedYamlLoader.add_constructor("tag:yaml.org,2002:int", _construct_integer)
StrictYamlLoader.add_constructor("tag:yaml.org,2002:int", _construct_core_integer)


def parse_yaml_text(text: str, source: str, loader: type[BoundedYamlLoader] = StrictYamlLoader) -> Any:
    """Return the value of a YAML document, read by YAML 1.2's core schema by default; ConfigError if it is not valid.
    The document is `text`; another schema is read by another `loader`. Error messages name `source`.

    Raises:
        ConfigError: if it is not YAML, repeats a key or exceeds a limit; the message begins with `source`.
    """
    try:
        return yaml.load(text, loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: is not valid YAML: {_explain_yaml_error(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{source}: {error.message}") from None
    except TAG_ERRORS as error:
        raise ConfigError(f"{source}: has a value that does not match its YAML tag ({error})") from None


def _explain_yaml_error(error: yaml.YAMLError) -> str:
    """Return the problem of a YAML error in one line, with the line and column where it is."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    mark, context = error.problem_mark, f" {error.context}" if error.context else ""
    if str(error.context).startswith("while parsing a flow") and (start := error.context_mark) is not None:
        where = f"line {start.line + 1}, column {start.column + 1}: the {'{' if 'mapping' in context else '['}"
        if mark.line == start.line:
            return f"{where} has no comma before column {mark.column + 1}, or is not closed"
        return f"{where} is not closed before line {mark.line + 1}, or a comma is missing there"
    if context == " while scanning a quoted scalar" and error.context_mark is not None:
        return f"line {error.context_mark.line + 1}: the quotation mark is not closed"
    if error.problem == "could not find expected ':'" and error.context_mark is not None:
        return f"line {error.context_mark.line + 1} has no KEY: VALUE; write a space after the colon"
    if "'\\t' that cannot start" in str(error.problem):
        return f"line {mark.line + 1} is indented with a tab; YAML requires spaces"
    if "'<document start>'" in str(error.problem):
        return f"line {mark.line + 1}: a second value begins, as in JSON lines or TOML; a file of settings is YAML, written as KEY: VALUE"
    if error.problem == "mapping values are not allowed here":
        nested = ":" in (mark.buffer or "").split("\n")[mark.line][: mark.column]
        fix = "quote the value if it is a text with a colon" if nested else "indent it like the line above"
        return f"line {mark.line + 1} has a KEY: VALUE inside a value; {fix}"
    if "expected <block end>" in str(error.problem):
        return f"line {mark.line + 1} is indented differently from the section's other lines; indent all of them alike"
    return f"line {mark.line + 1}, column {mark.column + 1}:{context}: {error.problem}".replace("::", ":").replace(
        "'<stream end>'", "the end of the file"
    )


def check_yaml_file_limits(path: Path) -> None:
    """Raise `ConfigError` unless a file is YAML within the limits of `BoundedYamlLoader` (size, nesting, aliases).

    Raises:
        ConfigError: if it cannot be read, is not YAML or exceeds a limit.
    """
    text = read_settings_file(path)
    try:
        for _ in yaml.compose_all(text, BoundedYamlLoader):
            pass
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not valid YAML: {_explain_yaml_error(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None


def read_file_start(path: Path, length: int = -1) -> bytes:
    """Return the first `length` bytes of a file, by default the whole file.
    A FIFO without a writer reads as empty instead of blocking.

    Raises:
        OSError: if it is missing or not a file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # do not wait for a writer of a FIFO
    with open(descriptor, "rb") as file:
        os.set_blocking(descriptor, True)
        return file.read(length)


def explain_read_error(error: Exception) -> str:
    """Return the reason why reading a file raised `error`, as text for a user.
    The text has neither the file name nor the error number.
    """
    if isinstance(error, IsADirectoryError):
        return "it is a folder, and a file is required"
    if isinstance(error, NotADirectoryError):
        return "a folder is required, and a part of the path is a file"
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 text, see byte {error.start}"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON, see line {error.lineno}, column {error.colno}: {error.msg}"
    if isinstance(error, FileExistsError):
        return "a folder is required here, and it is a file"
    if isinstance(error, FileNotFoundError):
        return "no such file or folder"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_settings_file(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> str:
    """Return the text of a UTF-8 settings file, without a byte order mark.

    Raises:
        ConfigError: if it is missing, has more than `max_bytes` bytes or is not text.
    """
    return _read_bounded_text(path, ConfigError, max_bytes, SETTINGS_FILE, None).removeprefix("\ufeff")


def read_utf8_text(path: Path, error_type: type[MegaError], *, hint: str | None = None) -> str:
    """Return the text of a UTF-8 file of at most `MAX_FILE_BYTES` (256 MiB).

    Raises:
        MegaError: of type `error_type` with `hint`, if it is missing, not a file, larger or not text.
    """
    return _read_bounded_text(path, error_type, MAX_FILE_BYTES, "such a file", hint)


def _read_bounded_text(path: Path, error_type: type[MegaError], max_bytes: int, kind: str, hint: str | None) -> str:
    try:
        content = read_file_start(path, max_bytes + 1)
        if len(content) > max_bytes:
            raise error_type(f"{path}: is larger than {max_bytes:,} bytes, the limit for {kind}", hint=hint)
        return content.decode("utf-8")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError) and kind == SETTINGS_FILE:
            hint = hint or "the file is binary; give a file of settings in YAML or JSON, and for a model its folder"
        raise error_type(f"{path}: cannot be read ({explain_read_error(error)})", hint=hint) from None


def read_json_file(path: Path, error_type: type[MegaError], *, hint: str | None = None) -> Any:
    """Return the value of a JSON file.

    Raises:
        MegaError: of type `error_type`, if it is missing, not a file or not JSON.
    """
    text = read_utf8_text(path, error_type, hint=hint)
    try:
        return parse_json_text(text)
    except ValueError as error:
        raise error_type(f"{path}: cannot be read (not valid JSON: {error})", hint=hint) from None


def refuse_lfs_pointer(path: Any, error_type: type[MegaError], head: bytes | None = None) -> None:
    """Raise an error if a local file, or its beginning `head` if it was read already, is a Git LFS pointer.

    Raises:
        OSError: if it cannot be read.
        MegaError: of type `error_type`.
    """
    if (read_file_start(path, len(GIT_LFS_POINTER)) if head is None else head).startswith(GIT_LFS_POINTER):
        raise error_type(f"{path}: is a Git LFS pointer, not the file itself", hint="fetch it: git lfs pull")


def parse_json_text(text: str | bytes) -> Any:
    """Return the value of a JSON document; `ValueError` also for a key with two different values and for deep nesting.

    Raises:
        ValueError: if it is not JSON, is nested too deeply, gives a key two values, or has an integer of thousands of
            digits.
    """
    if (text if isinstance(text, bytes) else text[: len(GIT_LFS_POINTER)].encode()).startswith(GIT_LFS_POINTER):
        raise ValueError("it is a Git LFS pointer; git lfs pull fetches the file itself")
    try:
        return json.loads(text, object_pairs_hook=reject_conflicting_keys)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def describe_json_type(value: object) -> str:
    """Return the type of a parsed JSON value as a word of JSON with its article, such as "a list" or "null"."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"of type {type(value).__name__}")


def reject_conflicting_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict, for `object_pairs_hook`; ValueError if a key has two different values."""
    members = dict(pairs)
    if len(members) != len(pairs):
        for key, value in pairs:
            if members[key] != value:
                raise ValueError(f"the key {key!r} has two values")
    return members
