"""Commands refuse small files that are not what they should be, with exit status 2 and one sentence that names the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mega_cli.main import main

CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "nul": b"\0" * 64,
    "deep": b"[" * 200_000,
    "truncated": b'{"a": [1, 2',
    "list": b"[1, 2]\n",
    "number": b"7\n",
    "encoding": b"\xff\xfe\xe9caf\xe9: 1\n",
    "huge_integer": b'{"n": ' + b"9" * 5000 + b"}\n",
    "self_reference": b"a: &a [*a]\n",
}
SPECIAL = ("folder", "fifo")
COMMANDS: dict[str, list[str]] = {
    "train": ["train", "{file}", "--check"],
    "plan": ["plan", "{file}"],
    "run": ["run", "{file}"],
    "compare": ["compare", "{file}", "{file}"],
    "ckpt inspect": ["ckpt", "inspect", "{file}"],
}


@pytest.mark.parametrize("content", [*CONTENTS, *SPECIAL])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_of_something_else_is_refused(
    command: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "input"
    if content == "folder":
        path.mkdir()
    elif content == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(CONTENTS[content])
    with pytest.raises(SystemExit) as ended:
        main([word.format(file=path) for word in COMMANDS[command]])
    told = capsys.readouterr().err
    assert ended.value.code == 2, told
    assert str(path) in told
    assert "Errno" not in told
    assert "internal error" not in told


@pytest.mark.parametrize("content", ["empty", "nul", "deep", "truncated", "list"])
def test_a_damaged_manifest_is_named(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "manifest.json").write_bytes(CONTENTS[content])
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", "inspect", str(tmp_path)])
    assert ended.value.code == 2
    assert "manifest.json" in capsys.readouterr().err
