"""Corpora as people have them, from the outside: files, the command, and what comes of it."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from mega_cli.main import main
from mega_cli.workflow_config import WorkflowConfig
from mega_data.token_files.indexed_reader import IndexedReader
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
    return [loaded.decode(reader.read_sequence(i).tolist()) for i in range(len(reader))]


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
        assert re.search("both an input and the output|is the description of a mega data set", capsys.readouterr().err)
        assert kept.read_text() == before

    def test_no_tokenizer_replaces_its_input(self, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = (here / "tok/tokenizer.json").read_bytes()
        assert mega("data train-tokenizer --input tok --vocab-size 300 --output tok --overwrite") == 2
        assert "both an input and the output" in capsys.readouterr().err
        assert (here / "tok/tokenizer.json").read_bytes() == before

    def test_a_file_that_is_no_description_is_not_replaced(
        self, here: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (here / "a.txt").write_text("one")
        (here / "wiki.info").write_text("my notes")
        assert preprocess("--input a.txt --output wiki --overwrite") == 2
        assert "wiki.info: exists and is not a data set description" in capsys.readouterr().err

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
    loaded = WorkflowConfig.parse(yaml.safe_load((ROOT / "examples" / workflow / "workflow.yaml").read_text()))
    stage = loaded.stages["tokens"]
    monkeypatch.chdir(folder)
    assert mega(" ".join(stage.command_arguments)) == 0
    (corpus / "b.txt").write_text("two")
    for output in stage.outputs:
        (folder / output).rename(folder / f"{output}.old-1")
    assert mega(" ".join(stage.command_arguments)) == 0
    assert documents("data/corpus", "tokenizer") == ["one<|endoftext|>", "two<|endoftext|>"]
    # As workflows written before name them, with the description staying behind.
    for suffix in ("bin", "idx"):
        (folder / f"data/corpus.{suffix}").unlink()
    assert mega(" ".join(stage.command_arguments)) == 0


def gz(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)  # no time in it: it may be in a test's name


ROWS: dict[str, tuple[dict[str, str | bytes], str, list[str] | None, str]] = {
    # JSON lines by whatever name
    "JSON lines in a folder's .json": (
        {"in/part-0.json": lines("a", "b"), "in/part-1.json": lines("c")}, "in", ["a", "b", "c"], "2 as JSON lines",
    ),
    "upper case": ({"A.JSONL": lines("a", "b")}, "A.JSONL", ["a", "b"], ""),
    "no suffix": ({"part-00000": lines("a", "b")}, "part-00000", ["a", "b"], ""),
    "a number for a suffix, another key": ({"in/c.00001": lines("a", "b", key="body")}, "in --json-key body", ["a", "b"], ""),
    "JSON lines called .txt": ({"a.txt": lines("a", "b")}, "a.txt", ["a", "b"], "1 as JSON lines"),
    "JSON lines without the key": ({"part-0": lines("a", "b", key="body")}, "part-0", None, "no key 'text'; the keys are body"),
    "a setting beside code": ({"in/a.py": "x = 1", "in/b.json": '{"x": 1}'}, "in", ["x = 1", '{"x": 1}'], "2 as plain text"),
    "a first line longer than is looked at": ({"part-0": lines("a" * 70_000, "b")}, "part-0", ["a" * 70_000, "b"], ""),
    # JSON
    "an array": ({"a.json": json.dumps([{"text": "a"}, {"text": "b"}], indent=2)}, "a.json", ["a", "b"], "1 as JSON"),
    "an array in a folder": ({"in/a.json": '[{"text": "a"},{"text": "b"}]'}, "in", ["a", "b"], ""),
    "objects over many lines": (
        {"in/1.json": json.dumps({"id": 1, "text": "a"}, indent=1), "in/2.json": json.dumps({"text": "b"}, indent=1)},
        "in", ["a", "b"], "2 as JSON",
    ),
    "a broken array": ({"a.json": '[{"text": "a"}, {"text": b}]'}, "a.json", None, "a.json:2: not JSON"),
    "a broken array, skipped": ({"a.json": '[{"text": "a"}, {"text": b}]'}, "a.json --on-bad-line skip", ["a"], "1 bad lines"),
    # packed
    "C4": ({"in/c4-train.00000-of-00001.json.gz": gz(lines("a", "b"))}, "in", ["a", "b"], ""),
    "Dolma": ({"in/a.txt.gz": gz("a"), "in/b.jsonl.gz": gz(lines("b"))}, "in", ["a", "b"], ""),
    "bzip2 and xz": ({"a.jsonl.bz2": bz2.compress(lines("a").encode()), "b.txt.xz": lzma.compress(b"b")},
                     "a.jsonl.bz2 b.txt.xz", ["a", "b"], ""),
    "unpacked by the download": ({"a.jsonl.gz": lines("a")}, "a.jsonl.gz", ["a"], ""),
    "truncated": ({"a.jsonl.gz": gz(lines(*"abc"))[:-12], "b.jsonl": lines("d")}, "a.jsonl.gz b.jsonl", None,
                  "a.jsonl.gz:.*cannot be read to its end"),
    "truncated, skipped": ({"a.jsonl.gz": gz(lines(*"abc"))[:-8], "b.jsonl": lines("d")},
                           "a.jsonl.gz b.jsonl --on-bad-line skip", [*"abcd"], "1 bad lines"),
    "a truncated text in a folder": ({"in/a.txt.gz": gz("the cat " * 99)[:-9]}, "in", None, "a.txt.gz:1: cannot be read"),
    # tables
    "CSV": ({"a.csv": 'id,text\n1,"a\nb"\n2,c\n'}, "a.csv", ["a\nb", "c"], "1 as CSV"),
    "TSV in a folder": ({"in/a.tsv": 'text\tid\na"b\t1\n'}, "in", ['a"b'], ""),
    "CSV without the column": ({"a.csv": "id,body\n1,a\n"}, "a.csv", None, "a.csv: no column 'text'; the columns are id, body"),
    "CSV without the column beside code": ({"in/a.csv": "id\n1\n", "in/b.py": "b"}, "in", ["b"], "no column 'text'.: in/a.csv"),
    # keys
    "a nested key": ({"a.jsonl": '{"meta": {"text": "a"}}\n{"meta.text": "b"}\n'}, "a.jsonl --json-key meta.text", ["a", "b"], ""),
    "no such nested key": ({"a.jsonl": '{"meta": {"body": "a"}, "id": 1}\n'}, "a.jsonl --json-key meta.text", None,
                           "no key 'meta.text'; the keys are meta.body, id"),
    # what of a folder is no corpus
    "a snapshot of the Hub": (
        {"in/README.md": "---\nlicense: mit\n---\nabout", "in/LICENSE": "mit", "in/data/train-0.jsonl": lines("a"),
         "in/data/test-0.jsonl": lines("t"), "in/.gitattributes": "x"},
        "in", ["a"], "other splits than train.*in/data/test-0.jsonl(?s:.*)descriptions of the data.: .*README.md",
    ),
    "only a test split": ({"in/test.jsonl": lines("t")}, "in", ["t"], ""),
    "tests of code": ({"in/train.py": "a", "in/test_train.py": "b", "in/README.md": "c"}, "in", ["c", "b", "a"], ""),
    "what is no text": ({"in/a.txt": "a", "in/b.png": b"\x89PNG\xff", "in/c.gz": b"\x1f\x8b\xff"}, "in", ["a"],
                        "not UTF-8 text.: in/b.png(?s:.*)damaged or truncated.: in/c.gz"),
    "bad lines of an earlier run": ({"in/a.txt": "a", "in/wiki.quarantine.jsonl": "{}\n"}, "in", ["a"], "mega data sets"),
    # special tokens
    "an end token in the text": ({"a.txt": "a<|endoftext|>b"}, "a.txt --append-eod", ["a<|endoftext|>b<|endoftext|>"],
                                 "1 documents spell the end token"),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_files_in_documents_out(here: Path, row: str, capsys: pytest.CaptureFixture[str]) -> None:
    files, arguments, expected, told = ROWS[row]
    for name, content in files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    status = preprocess(f"--output out --input {arguments}")
    errors = capsys.readouterr().err
    assert re.search(told, errors), errors
    assert status == (0 if expected is not None else 2), errors
    if expected is not None:
        assert documents("out") == expected
    assert not list(here.glob(".out*"))


def test_parquet_with_structs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrow = pytest.importorskip("pyarrow", reason="reads Parquet")
    import pyarrow.parquet

    table = arrow.table({"id": [1, 2], "meta": [{"text": "a", "n": 1}, {"text": "b", "n": 2}]})
    pyarrow.parquet.write_table(table, here / "a.parquet")
    shutil.copy(here / "a.parquet", here / "blob")
    assert preprocess("--input a.parquet blob --json-key meta.text --output out") == 0
    assert documents("out") == ["a", "b", "a", "b"]
    assert preprocess("--input a.parquet --json-key meta --output no") == 2
    assert "the columns are id, meta.text, meta.n" in capsys.readouterr().err


def test_a_snapshot_with_a_card_is_read_as_its_card_says(here: Path) -> None:
    pytest.importorskip("datasets", reason="reads hf: inputs")
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: one.jsonl\n---\n"
    for name, content in {"README.md": card, "one.jsonl": lines("a"), "two.jsonl": lines("b")}.items():
        (here / "in" / name).parent.mkdir(exist_ok=True)
        (here / "in" / name).write_text(content)
    assert preprocess("--input in --output out") == 0
    assert documents("out") == ["a"]


def test_special_tokens_on_request(here: Path) -> None:
    (here / "a.txt").write_text("a<|endoftext|>b")
    for option, count in (("", 0), ("--parse-special-tokens", 1)):
        assert preprocess(f"--input a.txt --output out --overwrite {option}") == 0
        assert IndexedReader(here / "out").tokens.tolist().count(0) == count


@pytest.mark.parametrize("pattern", ["in/**/*.txt", "in/**", "in"])
def test_each_file_counts_once_whatever_links_there_are(
    here: Path, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("in/a.txt", "in/b/c.txt"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(name)
    (here / "in" / "b" / "loop").symlink_to(here / "in")
    (here / "in" / "z.txt").symlink_to("a.txt")
    assert preprocess(f"--input {pattern} --output out") == 0
    assert documents("out") == ["in/a.txt", "in/b/c.txt"]
    assert re.search("skipped .(duplicate links|links to folders).*loop", capsys.readouterr().err)


def test_data_sets_of_ours_in_a_folder_are_left_out(here: Path) -> None:
    (here / "in").mkdir()
    (here / "in" / "a.txt").write_text("a")
    for prefix in ("in/one", "in/two", "in/one --overwrite"):
        assert preprocess(f"--input in --output {prefix}") == 0
        assert documents(prefix.split()[0]) == ["a"]
    (here / "in" / "one.info").rename(here / "in" / "one.json")
    assert preprocess("--input in --output out") == 0
    assert documents("out") == ["a"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [(lines("a", "b").encode(), ["a", "b"]), (gz(lines("a")), ["a"]), (b"one\ntwo", ["one\ntwo"])],
    ids=["JSON lines", "gzip", "text"],
)
def test_standard_input(here: Path, content: bytes, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "piped").write_bytes(content)
    with open(here / "piped") as piped:
        monkeypatch.setattr(sys, "stdin", piped)
        assert preprocess("--input - --output out") == 0
    assert documents("out") == expected
