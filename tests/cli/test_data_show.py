from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CONVERSATIONS, chat_tokenizer
from masked_data import SENTINELS, SPECIAL, WORDS, sentences
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
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


def test_a_middle_to_fill_in_of_a_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {preset: llama3-8b, vocab_size: 400}\n"
        f"data: {{train: {folder / 'text'}, kind: fim, seq_length: 20, split: '1',"
        " fim: {rate: 1, spm_rate: 0, tokens: ['X', 'Y', 'Z']}}\n"
    )
    (part,) = json.loads(data("show", "--run", tmp_path / "run.yaml", "--json"))
    text = "".join(token["text"] for token in part["tokens"])
    assert text[0] == "X"
    assert "Z" in text


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
        with pytest.raises(ConfigError, match="requires PREFIX or --run"):
            data("show", *args)
    with pytest.raises(DataError, match=r"no document 3; its 3 documents are numbered from 0"):
        data("show", folder / "chat", "--sample", 3)
    with pytest.raises(DataError, match=r"not .*base"):
        data("show", folder / "chat", "--tokenizer", folder / "base")


def test_pairs_of_a_run_lie_side_by_side(folder: Path) -> None:
    run = (folder / "run.yaml").read_text().replace("conversations", "pairs").replace("chat", "pairs")
    (folder / "pairs.yaml").write_text(run)
    shown = data("show", "--run", folder / "pairs.yaml").splitlines()
    assert [line for line in shown if not line.startswith(" ")] == [
        "document 0: 70 tokens, 11 count in the loss",
        "document 1: 63 tokens, 4 count in the loss",
        "padding: 70 tokens, 0 count in the loss",
    ]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of sentences, and a tokenizer with the special tokens of BERT and T5; a word is a token."""
    folder = tmp_path_factory.mktemp("words")
    names = [*SPECIAL, *WORDS, *SENTINELS]
    backend = Backend(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([*SPECIAL, *SENTINELS])
    (folder / "tok").mkdir()
    backend.save(str(folder / "tok" / "tokenizer.json"))
    sentences(folder / "d", 1)
    return folder


def of_kind(words: Path, kind: str) -> dict[str, list[dict[str, Any]]]:
    (words / "run.yaml").write_text(
        f"model: {{preset: llama3-8b}}\ndata: {{train: {words / 'd'}, kind: {kind}, seq_length: 200, split: '1',"
        f" tokenizer: {words / 'tok'}}}\n"
    )
    return {part["name"]: part["tokens"] for part in json.loads(data("show", "--run", words / "run.yaml", "--json"))}


def test_masked_words_of_a_run_and_what_is_to_be_guessed(words: Path) -> None:
    parts = of_kind(words, "bert")
    assert list(parts) == ["segment A", "segment B", "labels"]
    shown = {token["position"]: token for part in ("segment A", "segment B") for token in parts[part]}
    assert "[CLS]" in shown[0]["text"]
    asked = [place for place, token in shown.items() if token["weight"]]
    assert asked == [token["position"] for token in parts["labels"]]
    assert 0.1 < len(asked) / len(shown) < 0.2
    assert sum(shown[place]["id"] == SPECIAL.index("[MASK]") for place in asked) > len(asked) / 2


def test_spans_of_a_run_and_what_tells_them(words: Path) -> None:
    parts = of_kind(words, "t5")
    assert list(parts) == ["encoder", "decoder", "labels"]
    assert "<extra_id_0>" in "".join(token["text"] for token in parts["encoder"])
    assert [token["id"] for token in parts["decoder"][1:]] == [token["id"] for token in parts["labels"][:-1]]
    assert {token["weight"] for token in parts["labels"]} == {1.0}


@pytest.mark.parametrize(
    "wrong", ["--loss-on last", "--max-length 5", "--turn-weights", "--chat-template x", "--kind pairs --append-eod",
              "--kind conversations --json-key body", "--kind conversations --template-option thinking"],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(folder: Path, wrong: str) -> None:
    args = ("--input", folder / "chat.jsonl", "--tokenizer", folder / "tok", "--output", folder / "x")
    with pytest.raises(ConfigError, match=r"conflicts with texts|conflicts with --append-eod|KEY=VALUE"):
        data("preprocess", *args, *wrong.split())


def test_options_reach_the_template(folder: Path) -> None:
    (folder / "t.jinja").write_text(
        "{{ name }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    data("preprocess", "--input", folder / "chat.jsonl", "--tokenizer", folder / "tok", "--output", folder / "x", "--kind", "conversations",
         "--chat-template", folder / "t.jinja", "--template-option", "name=Max", "--loss-on", "all", "--max-length", 9)  # fmt: skip
    (part,) = json.loads(data("show", folder / "x", "--json"))
    assert "".join(token["text"] for token in part["tokens"]) == "MaxWhat is"


ASK, REPLY = "What is 2 + 2?", "It is 4."
TURNS = [{"role": "user", "content": ASK}, {"role": "assistant", "content": REPLY}]
CHAT = f"<|im_start|>user↵{ASK}<|im_end|>↵<|im_start|>assistant↵", f"{REPLY}<|im_end|>↵"
RAW_FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "messages (OpenAI)": ({"messages": TURNS}, {}),
    "conversations (ShareGPT)": (
        {"conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": REPLY}]}, {},
    ),
    "prompt and completion": ({"prompt": ASK, "completion": REPLY}, {}),
    "prompt and response": ({"prompt": TURNS[:1], "response": TURNS[1:]}, {}),
    "instruction and output (Alpaca)": ({"instruction": ASK, "input": "", "output": REPLY}, {}),
    "chosen and rejected (preference)": ({"prompt": ASK, "chosen": REPLY, "rejected": "No"}, {"kind": "pairs"}),
    "completion and label (KTO)": ({"prompt": ASK, "completion": REPLY, "label": True}, {"kind": "pairs"}),
    "columns {prompt: q, completion: label}": (
        {"q": ASK, "label": REPLY, "text": "x"}, {"map": {"prompt": "q", "completion": "label"}},
    ),
    "text": ({"text": REPLY}, {"kind": "text"}),
    "columns {text: body}": ({"body": REPLY}, {"kind": "documents", "map": {"text": "body"}}),
    "plain text": ({}, {"kind": "text"}),
    "text and label (classification)": ({"text": REPLY, "label": 2}, {"kind": "labels"}),
    "query, passage and label (reranking)": ({"query": ASK, "passage": REPLY, "label": 0.5}, {"kind": "labels"}),
    "tokens and tags (token classification)": ({"tokens": ["It", "is", "4."], "tags": [0, -100, 3]}, {"kind": "token_labels"}),
    "query and positive (retrieval)": ({"query": ASK, "positive": REPLY}, {"kind": "groups"}),
}  # fmt: skip


@pytest.mark.parametrize("form", RAW_FORMS)
def test_raw_data_of_a_run_by_the_form_of_its_records(form: str, folder: Path, tmp_path: Path) -> None:
    """The form is named, and what is trained is shown; a second time the tokens are those of the cache."""
    record, settings = RAW_FORMS[form]
    path = tmp_path / ("raw.txt" if form == "plain text" else "raw.jsonl")
    path.write_text((REPLY if form == "plain text" else json.dumps(record)) + "\n")
    source = {"path": str(path), **{key: value for key, value in settings.items() if key == "map"}}
    kind = settings.get("kind", "conversations")
    section = {
        "train": [source], "kind": kind, "seq_length": 8 if kind == "text" else 200, "split": "1", "tokenizer": str(folder / "tok"),
        "cache": str(tmp_path / "cache"),
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(
        json.dumps(
            {
                "model": {"preset": "llama3-8b", "vocab_size": 400},
                "data": section,
                "objective": {"kind": "cross_entropy"},
            }
        )
        if kind != "pairs"
        else json.dumps(
            {"model": {"preset": "llama3-8b", "vocab_size": 400}, "data": section, "objective": {"kind": "simpo"}}
        )
    )
    shown = data("show", tmp_path / "run.yaml")
    assert shown.startswith(f"{path}: {form}; 1 documents, ")
    assert shown == data("show", "--run", tmp_path / "run.yaml")
    texts = [line.split(maxsplit=2)[-1] for line in shown.splitlines() if line.startswith("   ")]
    if kind == "labels":
        assert f"document 0, label {record['label']:g}: " in shown
        assert ASK + REPLY in "".join(texts) or texts == [REPLY]
    elif kind == "token_labels":
        assert "document 0, labels 0 3: " in shown
    elif kind == "groups":
        assert [line for line in shown.splitlines() if line.startswith("group")] == [
            "group 0, positive: 7 tokens, 7 count in the loss", "group 0, query: 13 tokens, 13 count in the loss",
        ] or ("group 0, query: " in shown and "group 0, positive: " in shown)  # fmt: skip
        assert texts == [ASK, REPLY]
    elif kind in ("conversations", "pairs"):
        assert texts[0].endswith(CHAT[0])
        assert texts[1] == CHAT[1]
    else:
        assert "4." in "".join(texts)  # a window of running text may begin within it
