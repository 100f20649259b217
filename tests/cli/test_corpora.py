"""Corpora as people have them, from the outside: files, the command, and what comes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from mega_cli.main import main
from mega_cli.workflow_config import Workflow
from mega_data.indexed import IndexedReader
from mega_data.tokenizer import Tokenizer, train_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of 300 tokens; 0 is <|endoftext|>."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["the cat sat on the mat\n", "def f(x):\n    return x + 1\n"] * 20, 300, folder)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Path) -> Path:
    """A folder to work in, with the tokenizer as `tok`."""
    shutil.copytree(tokenizer, tmp_path / "tok")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def mega(command: str) -> int:
    """The exit status of a command as typed."""
    with pytest.raises(SystemExit) as end:
        main(command.split())
    return int(end.value.code or 0)


def preprocess(arguments: str) -> int:
    return mega(f"data preprocess --tokenizer tok {arguments}")


def documents(prefix: str, tokenizer: str = "tok") -> list[str]:
    reader, loaded = IndexedReader(Path(prefix)), Tokenizer(Path(tokenizer))
    return [loaded.decode(reader.read(i).tolist()) for i in range(len(reader))]


def lines(*texts: str, key: str = "text") -> str:
    return "".join(json.dumps({key: text}) + "\n" for text in texts)


class TestOutputs:
    def test_the_corpus_of_the_same_name_stays(self, here: Path) -> None:
        corpus = here / "wiki.json"
        corpus.write_text(lines("one", "two"))
        for _ in range(2):
            assert preprocess("--input wiki.json --output wiki --overwrite") == 0
            assert documents("wiki") == ["one", "two"]
        assert corpus.read_text() == lines("one", "two")

    @pytest.mark.parametrize("output", ["wiki.info", "wiki.bin", "wiki.quarantine.jsonl", "tok/tokenizer.info"])
    @pytest.mark.parametrize("link", ["", "symlink", "hardlink"])
    def test_no_output_is_an_input(
        self, here: Path, output: str, link: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        kept = here / ("corpus.txt" if link else output)
        kept.write_text(json.dumps({"bin_sha256": "as our own"}))
        if link:
            getattr(here / output, f"{link}_to")(kept)
        before = kept.read_text()
        prefix = output.partition(".")[0]
        assert preprocess(f"--input {kept.name if link else output} --output {prefix} --overwrite") == 2
        assert "both an input and the output" in capsys.readouterr().err
        assert kept.read_text() == before

    def test_a_file_that_is_no_description_is_not_replaced(
        self, here: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (here / "a.txt").write_text("one")
        (here / "wiki.info").write_text("my notes")
        assert preprocess("--input a.txt --output wiki --overwrite") == 2
        assert "wiki.info: is in the way" in capsys.readouterr().err

    def test_an_earlier_description_is_read_and_replaced(self, here: Path) -> None:
        (here / "a.txt").write_text("one")
        assert preprocess("--input a.txt --output wiki") == 0
        (here / "wiki.info").rename(here / "wiki.json")
        assert mega("data verify wiki --tokenizer tok") == 0
        assert preprocess("--input a.txt --output wiki --overwrite") == 0
        assert {path.name for path in here.glob("wiki.*")} == {"wiki.bin", "wiki.idx", "wiki.info"}

    @pytest.mark.parametrize("given", ["wiki.bin", "wiki.idx"])
    def test_a_file_of_a_data_set_means_its_prefix(self, here: Path, given: str) -> None:
        (here / "a.txt").write_text("one")
        assert preprocess(f"--input a.txt --output {given}") == 0
        assert documents(given) == documents("wiki") == ["one"]
        assert mega(f"data verify {given} --tokenizer tok") == 0
        assert mega(f"data merge {given} {given} --output two.bin") == 0
        assert documents("two") == ["one", "one"]


@pytest.mark.parametrize("workflow", ["quickstart", "experts"])
def test_an_example_runs_again_with_another_file_in_its_corpus(
    here: Path, workflow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its two stages of data, as the workflow runs them: what they made is set aside first."""
    corpus, folder = here / "quickstart" / "corpus", here / workflow
    corpus.mkdir(parents=True)
    shutil.copytree(here / "tok", folder / "tokenizer")
    (corpus / "a.txt").write_text("one")
    loaded = Workflow.parse(yaml.safe_load((ROOT / "examples" / workflow / "workflow.yaml").read_text()))
    stage = loaded.stages["tokens"]
    monkeypatch.chdir(folder)
    assert mega(" ".join(stage.command)) == 0
    (corpus / "b.txt").write_text("two")
    for output in stage.outputs:
        (folder / output).rename(folder / f"{output}.old-1")
    assert mega(" ".join(stage.command)) == 0
    assert documents("data/corpus", "tokenizer") == ["one<|endoftext|>", "two<|endoftext|>"]
    # As workflows written before name them, with the description staying behind.
    for suffix in ("bin", "idx"):
        (folder / f"data/corpus.{suffix}").unlink()
    assert mega(" ".join(stage.command)) == 0
