from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_templates import CONVERSATIONS, chat_tokenizer
from typer.testing import CliRunner

from mega_cli.data import app
from mega_common.errors import ConfigError, DataError
from mega_data.tokenizer import train_tokenizer

pytest.importorskip("transformers", reason="what renders templates")
PAIR = {"prompt": "Hi", "chosen": "Hel\x1blo é", "rejected": "No"}


def data(*args: object) -> str:
    done = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False, env={"COLUMNS": "40"})
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data sets `chat`, `pairs` and `text`, and a run on the first."""
    folder = tmp_path_factory.mktemp("show")
    train_tokenizer(["the cat sat on the mat\n"], 270, folder / "base")
    tokenizer = chat_tokenizer(folder / "base", folder / "tok", "qwen", marks=True)
    records = [CONVERSATIONS[name] for name in ("one", "turns", "system")]
    for name, lines, kind in (
        ("chat", records, "conversations"),
        ("pairs", [PAIR], "pairs"),
        ("text", [{"text": "the mat"}], "text"),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        data(
            "preprocess",
            "--input",
            folder / f"{name}.jsonl",
            "--tokenizer",
            tokenizer,
            "--output",
            folder / name,
            "--kind",
            kind,
        )
    (folder / "run.yaml").write_text(
        "model: {preset: llama3-8b, vocab_size: 400}\n"
        f"data: {{train: {folder / 'chat'}, kind: conversations, seq_length: 200, split: '1'}}\n"
    )
    return folder


def test_a_pair_as_plain_text_where_nothing_shows_colours(folder: Path) -> None:
    assert data("show", folder / "pairs").splitlines() == [
        "document 0, chosen: 69 tokens, 11 count in the loss",
        "      0-57         0  <|im_start|>system↵You are a helpful assistant.<|im_end|>↵<|im_start|>user↵Hi<|im_end|>↵<|im_start|>assistant↵",
        "     58-68         1  Hel␛lo ‹Ã›‹©›<|im_end|>↵",
        "document 0, rejected: 62 tokens, 4 count in the loss",
        "      0-57         0  <|im_start|>system↵You are a helpful assistant.<|im_end|>↵<|im_start|>user↵Hi<|im_end|>↵<|im_start|>assistant↵",
        "     58-61         1  No<|im_end|>↵",
    ]


def test_a_sample_of_a_run_by_documents(folder: Path) -> None:
    """Each begins at position 0, and what counts is what counts of the data set."""
    shown = [json.loads(data("show", "--run", folder / "run.yaml", "--sample", k, "--json")) for k in range(3)]
    parts = [part for parts in shown for part in parts]
    assert {part["tokens"][0]["position"] for part in parts} == {0}
    named = [part for part in parts if part["name"] != "padding"]
    own = [json.loads(data("show", folder / "chat", "--sample", k, "--json"))[0] for k in range(3)]
    texts = [[(token["text"], token["weight"]) for token in part["tokens"]] for part in named]
    assert all([(token["text"], token["weight"]) for token in part["tokens"]] in texts for part in own)
    assert "padding: " in data("show", "--run", folder / "run.yaml", "--sample", 0)


def test_text_counts_whole(folder: Path) -> None:
    (part,) = json.loads(data("show", folder / "text", "--json"))
    assert "".join(token["text"] for token in part["tokens"]) == "the mat"
    assert [token["weight"] for token in part["tokens"]] == [0.0] + [1.0] * (len(part["tokens"]) - 1)


def test_without_its_tokenizer_numbers_are_shown(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("pairs.*"):
        if path.suffix != ".info":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    first, line, *_ = data("show", tmp_path / "pairs").splitlines()
    assert (
        first == "document 0, sequence 0: 69 tokens, 11 count in the loss"
    )  # without its description a pair is two sequences
    assert line.startswith("      0-57         0  273 83 89 83 84")


def test_what_is_refused(folder: Path) -> None:
    for args in ((), (folder / "chat", "--run", folder / "run.yaml")):
        with pytest.raises(ConfigError, match="takes a PREFIX or --run"):
            data("show", *args)
    with pytest.raises(DataError, match=r"no document 3; its 3 are numbered from 0"):
        data("show", folder / "chat", "--sample", 3)
    with pytest.raises(DataError, match=r"which is not .*base"):
        data("show", folder / "chat", "--tokenizer", folder / "base")


def test_pairs_are_not_trained_on_yet(folder: Path) -> None:
    run = (folder / "run.yaml").read_text().replace("conversations", "pairs").replace("chat", "pairs")
    (folder / "pairs.yaml").write_text(run)
    with pytest.raises(ConfigError, match="has no loss to train with yet"):
        data("show", "--run", folder / "pairs.yaml")


@pytest.mark.parametrize(
    "wrong", ["--loss-on last", "--max-length 5", "--turn-weights", "--chat-template x", "--kind pairs --append-eod",
              "--kind conversations --json-key body", "--kind conversations --template-option thinking"],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(folder: Path, wrong: str) -> None:
    args = ("--input", folder / "chat.jsonl", "--tokenizer", folder / "tok", "--output", folder / "x")
    with pytest.raises(ConfigError, match=r"for conversations|takes no --append-eod|KEY=VALUE"):
        data("preprocess", *args, *wrong.split())


def test_options_reach_the_template(folder: Path) -> None:
    (folder / "t.jinja").write_text(
        "{{ name }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    data("preprocess", "--input", folder / "chat.jsonl", "--tokenizer", folder / "tok", "--output", folder / "x", "--kind", "conversations",
         "--chat-template", folder / "t.jinja", "--template-option", "name=Max", "--loss-on", "all", "--max-length", 9)  # fmt: skip
    (part,) = json.loads(data("show", folder / "x", "--json"))
    assert "".join(token["text"] for token in part["tokens"]) == "MaxWhat is"
