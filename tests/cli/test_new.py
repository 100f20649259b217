"""`mega new`: each template trains, and its test passes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mega_cli.main import main
from mega_cli.new import ExtensionTemplate

# Overrides that make a run short; the data are texts, as in docs/start.md.
SHORT = ("train.steps=2", "data.seq_length=32", "lr_schedule.warmup_steps=0")
MORE = {"reward": ("batch.global=4", "objective.max_new_tokens=4", "data.seq_length=64")}
QUICK = (ExtensionTemplate.MIXER, ExtensionTemplate.TOKENIZER, ExtensionTemplate.FILTER)


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, a tokenizer and data as in docs/start.md, and one package of each kind."""
    out = tmp_path_factory.mktemp("new")
    texts = [{"text": f"The statement number {i} is {'long ' * (i % 7)}enough."} for i in range(200)]
    (out / "train.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    vocabulary = {letter: i for i, letter in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    (out / "tok").mkdir()
    tokenizer.save(str(out / "tok" / "tokenizer.json"))
    (out / "tok" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out)
        text = ("--input", "train.jsonl", "--tokenizer", "tok", "--append-eod", "--output", "data/train")
        assert call("data", "preprocess", *text) == 0
        for kind in ExtensionTemplate:
            assert call("new", kind, f"own_{kind}") == 0
    return out


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.long) for kind in ExtensionTemplate]
)
def test_a_new_package_trains(kind: ExtensionTemplate, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the commands in the first lines of its run.yaml."""
    monkeypatch.chdir(folder)
    lines = (folder / f"own_{kind}" / "run.yaml").read_text().splitlines()
    for words in (shlex.split(line.removeprefix("#   mega ")) for line in lines if line.startswith("#   mega ")):
        if words[0] == "train":
            words += [f"--set={setting}" for setting in (*SHORT, *MORE.get(kind, ()))]
        if words[0] == "generate":
            words += ["--max-new-tokens", "4"]
        assert call(*words) == 0
    assert (folder / f"runs/own_{kind}/checkpoints/step-00000002").is_dir()


@pytest.mark.parametrize(
    "chosen", ["not layout and not kernel_of_mega", pytest.param("layout or kernel_of_mega", marks=pytest.mark.long)]
)
def test_the_tests_of_new_packages_pass(chosen: str, folder: Path) -> None:
    """The long ones verify their package in parallel layouts."""
    packages = [f"own_{kind}" for kind in ExtensionTemplate]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *packages]
    done = subprocess.run(command, cwd=folder, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_no_file_keeps_the_name_of_the_template(folder: Path) -> None:
    files = [path for path in folder.glob("own_*/*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) >= 5 * len(ExtensionTemplate)
    found = [path for path in files for word in ("my_extension", "my-extension", "FOLDER") if word in path.read_text()]
    assert not found


def test_a_package_in_another_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert call("new", "norm", "far", "--output", tmp_path / "deep" / "far") == 0
    assert f"extensions: [{tmp_path}/deep/far/far.py]" in (tmp_path / "deep" / "far" / "run.yaml").read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_mixer", "own_mixer already exists"), ("Own-Mixer", "lower-case letters"), ("class", "not a keyword of Python"),
        ("json", "is the name of an installed module"), ("torch", "is the name of an installed module"),
        ("adamw", "is a name of mega"),
    ],
)  # fmt: skip
def test_a_name_that_cannot_be_used(
    name: str, words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(path.name for path in folder.iterdir())
    assert call("new", "optimizer", name) == 2
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == before
