"""Commands refuse small files that are not what they should be, with exit status 2 and one sentence that names the file."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_models import save_tiny, variant

from mega_ckpt.families import find_family_by_name
from mega_cli.main import main
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import train_tokenizer

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
    "null": b"null\n",
    "nan": b"NaN\n",
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


# Commands that read a file of a model's folder `x`, which is damaged.
FOLDER_COMMANDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "ckpt convert": (["ckpt", "convert", "x", "out", "--to", "mega"], ("config.json", "model.safetensors")),
    "eval": (["eval", "x", "--data", "tokens"], ("config.json", "model.safetensors", "tokenizer.json")),
    "generate": (
        ["generate", "x", "--prompt", "the"],
        ("config.json", "tokenizer_config.json", "generation_config.json"),
    ),
    "data preprocess": (
        ["data", "preprocess", "-i", "text.txt", "--tokenizer", "x", "--output", "out"],
        ("tokenizer.json",),
    ),
    "tune": (["tune", "x", "text.txt", "--check"], ("config.json", "tokenizer.json")),
}
# Names of Python's types and errors, which are no words for a user.
PYTHON_NAMES = re.compile(r"internal error|Errno|NoneType|\bdict\b|\w+Error\b|object at 0x")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model `hf`, a data set `tokens` and a text."""
    base = tmp_path_factory.mktemp("models")
    train_tokenizer(["the end of the story"] * 9, 300, base / "hf")
    save_tiny(base / "hf", find_family_by_name("llama"), variant("grouped").model_copy(update={"vocab_size": 300}))
    with IndexedWriter(base / "tokens", np.uint16) as writer:
        writer.add_document(np.arange(50))
    (base / "text.txt").write_text("the end\n")
    return base


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("command", FOLDER_COMMANDS)
def test_a_damaged_file_of_a_model_folder_is_named(
    command: str, content: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    shutil.copytree(model_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    words, files = FOLDER_COMMANDS[command]
    for name in files:
        shutil.copytree(tmp_path / "hf", tmp_path / "x", dirs_exist_ok=True)
        (tmp_path / "x" / name).write_bytes(CONTENTS[content])
        with pytest.raises(SystemExit) as ended:
            main(words)
        message = capsys.readouterr().err
        assert ended.value.code == 2, f"{name}: {message}"
        assert name in message, message
        assert not PYTHON_NAMES.search(message), message
