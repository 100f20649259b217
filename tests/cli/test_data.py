from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mega_cli.data import app
from mega_common.errors import ConfigError, DataError
from mega_data.reports.inspect_dataset import inspect_dataset


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"the {name} " * 20, "body": name}) + "\n")
    return tmp_path


@pytest.fixture
def tokenizer(corpus: Path) -> Path:
    status, _ = data("train-tokenizer", "--input", corpus / "a.jsonl", "--vocab-size", 260, "--output", corpus / "tok")
    assert status == 0
    return corpus / "tok"


def data(*args: object) -> tuple[int, str]:
    """Exit status and standard output of `mega data ARGS`; a MegaError comes through, as to `mega`."""
    done = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False, env={"COLUMNS": "200"})
    return done.exit_code, done.stdout


def test_the_command_of_the_readme(corpus: Path, tokenizer: Path) -> None:
    """A shell makes many words of `corpus/*.jsonl`."""
    inputs = sorted(corpus.glob("*.jsonl"))
    status, told = data(
        "preprocess", "--input", *inputs, "--tokenizer", tokenizer, "--output", corpus / "d", "--append-eod"
    )
    assert (status, told) == (
        0,
        f"{corpus / 'd'}: 3 documents, {inspect_dataset(corpus / 'd').tokens} tokens, 360 bytes of text\n",
    )
    assert [sample.text for sample in inspect_dataset(corpus / "d", head=1000).samples] == [
        f"the {name} " * 20 + "<|endoftext|>" for name in "abc"
    ]


@pytest.mark.parametrize(
    "form",
    ["-- --input a b c", "--input a b c --", "--input a --input b -i c --", "--input a -- --input b c", "glob --"],
)
def test_inputs_in_any_form_are_read_in_order(corpus: Path, tokenizer: Path, form: str) -> None:
    """In `form` the letters stand for files, and `--` for the other options."""
    words: list[object] = []
    for word in form.split():
        if word == "--":
            words += ["--tokenizer", tokenizer, "--json-key", "body", "--output", corpus / "d"]
        elif word == "glob":
            words += ["--input", f"{corpus}/*.jsonl"]
        else:
            words.append(corpus / f"{word}.jsonl" if word in "abc" else word)
    assert data("preprocess", *words)[0] == 0
    assert [sample.text for sample in inspect_dataset(corpus / "d").samples] == ["a", "b", "c"]


def test_options_reach_their_place(corpus: Path, tokenizer: Path) -> None:
    (corpus / "a.jsonl").write_text("oops\n" + (corpus / "a.jsonl").read_text())
    args = ("preprocess", "-i", corpus / "a.jsonl", "--tokenizer", tokenizer, "--output", corpus / "d")
    with pytest.raises(DataError, match="not JSON"):
        data(*args)
    assert data(*args, "--on-bad-line", "skip", "--workers", 2)[0] == 0
    with pytest.raises(DataError, match="exists already"):
        data(*args, "--on-bad-line", "skip")
    assert data(*args, "--on-bad-line", "skip", "--overwrite")[0] == 0


@pytest.mark.parametrize("wrong", ["--on-bad-line never", "--workers 0", "--unknown", ""])
def test_what_the_command_refuses(corpus: Path, wrong: str) -> None:
    inputs = ["-i", corpus / "a.jsonl"] if wrong else []
    status, _ = data("preprocess", *inputs, "--tokenizer", "tok", "--output", corpus / "d", *wrong.split())
    assert status == 2


def test_inspect_merge_verify(corpus: Path, tokenizer: Path) -> None:
    for name in "ab":
        data("preprocess", "-i", corpus / f"{name}.jsonl", "--tokenizer", tokenizer, "--output", corpus / name)
    assert "2 documents" in data("merge", corpus / "a", corpus / "b", "--output", corpus / "ab")[1]
    shown = data("inspect", corpus / "ab")[1]
    assert "2 documents, 2 sequences" in shown
    assert "the a the a" in shown
    found = json.loads(data("inspect", corpus / "ab", "--json", "--samples", 1)[1])
    assert (found["documents"], found["info"]["append_eod"], len(found["samples"])) == (2, False, 1)
    names = [corpus / name for name in ("a", "b", "ab")]
    assert data("verify", *names, "--tokenizer", tokenizer)[1].splitlines() == [f"{name}: ok" for name in names]


def test_verify_tells_of_every_data_set(corpus: Path, tokenizer: Path) -> None:
    data("preprocess", "-i", corpus / "a.jsonl", "--tokenizer", tokenizer, "--output", corpus / "a")
    with pytest.raises(DataError, match=r"x.idx: no such file(?s:.*)y.idx: no such file"):
        data("verify", corpus / "x", corpus / "a", corpus / "y")


@pytest.mark.parametrize("command", ["preprocess", "train-tokenizer", "clean", "inspect", "report", "merge", "verify"])
def test_help_has_examples(command: str) -> None:
    assert f"Example: mega data {command}" in data(command, "--help")[1]


def test_neither_command_nor_package_imports_torch() -> None:
    code = (
        "import sys, mega_cli.data, mega_data.preprocessing.preprocess_corpus, mega_data.reports.inspect_dataset, mega_data.token_files.merge_datasets\n"
        "assert not {'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_sentences_are_sequences(corpus: Path, tokenizer: Path) -> None:
    pytest.importorskip("sentencex", reason="sentences need the package sentencex")
    (corpus / "s.txt").write_text("The cat sat. Did it sit? It did!")
    options = ("--input", corpus / "s.txt", "--tokenizer", tokenizer, "--output", corpus / "d")
    assert data("preprocess", *options, "--split-sentences", "--language", "de")[0] == 0
    found = inspect_dataset(corpus / "d")
    assert (found.documents, found.sequences) == (1, 3)
    with pytest.raises(ConfigError, match="--language de requires --split-sentences"):
        data("preprocess", *options, "--language", "de")
    with pytest.raises(ConfigError, match=r"conflicts with .*--split-sentences"):
        data("preprocess", *options, "--split-sentences", "--kind", "conversations")
