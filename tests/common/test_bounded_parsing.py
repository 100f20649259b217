"""Settings that would never end or eat all memory are refused, and ordinary ones are read as before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mega_common import bounded_parsing
from mega_common.bounded_parsing import (
    MAX_DEPTH,
    MAX_SETTINGS_BYTES,
    BoundedYamlLoader,
    StrictYamlLoader,
    check_yaml_file_limits,
    parse_json_text,
    parse_yaml_text,
    read_json_file,
)
from mega_common.errors import ConfigError, DataError
from mega_common.strict_config import apply_config_overrides, load_yaml_mapping

BOMB = "x: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"y{i}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]" for i in range(8)
)
MERGES = "a: &a {k0: 1}\n" + "\n".join(
    f"b{i}: &{chr(98 + i)} {{<<: [{','.join(['*' + chr(97 + i)] * 9)}], k{i + 1}: 1}}" for i in range(8)
)
ENDLESS = {
    "aliases of aliases": (BOMB, "aliases"),
    "merges of merges": (MERGES, "aliases"),
    "keys of aliases": (BOMB.replace("y7: ", "? "), "YAML|aliases"),
    "aliases of a long text": (f"x: &a {'w' * 100_000}\ny: [{','.join(['*a'] * 1000)}]", "aliases"),
    "a list in itself": ("x: &a [1, *a]", "contains itself"),
    "a mapping in itself": ("x: &a {b: {c: *a}}", "contains itself"),
    "the whole file in itself": ("&a\nx: *a", "contains itself"),
    "an alias of nothing": ("x: *a", "YAML"),
    "nested lists": ("x: " + "[" * 100_000, "nested|YAML"),
    "nested lists, closed": ("x: " + "[" * 5000 + "]" * 5000, "nested"),
    "nested mappings": ("x: " + "{a: " * 5000 + "}" * 5000, "nested"),
    "nested blocks": ("\n".join(" " * i + "a:" for i in range(500)), "nested"),
    "nested dashes": ("x:\n  " + "- " * 5000 + "1", "nested"),
    "an integer of 5,000 digits": ("x: " + "9" * 5000, "integer"),
    "a hexadecimal of 100,000 digits": ("x: 0x" + "f" * 100_000, "integer"),
    "an integer by tag": ("x: !!int '" + "9" * 5000 + "'", "integer"),
    "a time that is none": ("x: !!timestamp soon", "tag"),
    "a truth that is none": ("x: !!bool perhaps", "tag"),
    "a number that is none": ("x: !!float ''", "tag"),
    "an object of Python": ("x: !!python/object/apply:os.system [ls]", "YAML"),
    "control characters": ("x: \x01", "YAML"),
    "two documents": ("x: 1\n---\ny: 2", "YAML"),
}


@pytest.mark.parametrize("loader", [StrictYamlLoader, BoundedYamlLoader])
@pytest.mark.parametrize("name", ENDLESS)
def test_yaml_that_asks_for_endless_work_is_refused_in_a_sentence(name: str, loader: type[BoundedYamlLoader]) -> None:
    text, word = ENDLESS[name]
    with pytest.raises(ConfigError, match=word) as found:
        parse_yaml_text(text, "run.yaml", loader)
    assert found.value.message.startswith("run.yaml: ")
    assert len(found.value.message) < 600


def test_yaml_of_other_libraries_is_checked_with_its_own_tags(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text("task: x\nprocess_docs: !function utils.process\n")
    check_yaml_file_limits(path)
    path.write_text("task: x\nprocess_docs: !function utils.process\n" + BOMB)
    with pytest.raises(ConfigError, match="aliases"):
        check_yaml_file_limits(path)


def test_aliases_and_merges_that_people_write_are_read() -> None:
    text = "a: &a {lr: 1e-3, betas: [0.9, 0.95]}\nb: {<<: *a, lr: 2e-3}\nc: [*a, *a]"
    found = parse_yaml_text(text.replace("e-3", ".0e-3"), "axolotl.yaml", BoundedYamlLoader)
    assert found["b"] == {"lr": 2e-3, "betas": [0.9, 0.95]}
    assert found["c"] == [found["a"], found["a"]]


def test_nesting_up_to_the_limit_is_read() -> None:
    depth = MAX_DEPTH - 2
    value, found = parse_yaml_text("x: " + "[" * depth + "]" * depth, "run.yaml")["x"], 1
    while value:
        (value,), found = value, found + 1
    assert found == depth


def test_a_file_larger_than_the_limit_is_refused_and_a_device_ends(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("x: " + "a" * MAX_SETTINGS_BYTES)
    for one in (path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"larger than|cannot be read"):
            load_yaml_mapping(one)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x00", b"", b"[1]", b"3"])
def test_a_file_that_is_no_mapping_is_refused_by_its_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.yaml: "):
        load_yaml_mapping(path)


@pytest.mark.parametrize("value", ["&a [*a]", "9" * 5000, "[" * 500 + "]" * 500, "!!timestamp soon"])
def test_an_override_is_held_to_the_same_limits(value: str) -> None:
    with pytest.raises(ConfigError, match="--set x="):
        apply_config_overrides({}, [f"x={value}"])


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "{", b"\xff"])
def test_json_raises_one_kind_of_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json_text(text)


def _spoil(path: Path, kind: str) -> None:
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "below_a_file":
        path.parent.rmdir()
        path.parent.write_text("")
    elif kind != "missing":
        path.write_bytes(
            {"binary": b"\xff", "utf16": "{}".encode("utf-16"), "cut": b'{"a"', "twice": b'{"a":1,"a":2}'}[kind]
        )


SPOILT = ["missing", "folder", "dangling", "loop", "fifo", "device", "below_a_file", "binary", "utf16", "cut", "twice"]


@pytest.mark.parametrize("kind", SPOILT)
def test_a_json_file_that_cannot_be_read_is_named_without_an_errno(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_parsing, "MAX_FILE_BYTES", 1 << 16)
    path = tmp_path / "inner" / "settings.json"
    path.parent.mkdir()
    _spoil(path, kind)
    with pytest.raises(DataError) as found:
        read_json_file(path, DataError, hint="copy it again")
    assert found.value.message.startswith(f"{path}: ")
    assert "Errno" not in found.value.message
    assert found.value.hint == "copy it again"


def test_a_key_given_twice_with_one_value_is_read() -> None:
    assert parse_json_text('{"a": {"b": 1}, "a": {"b": 1}}') == {"a": {"b": 1}}
