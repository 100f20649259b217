from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import ANSWER, ASK, CONVERSATIONS, MORE, chat_tokenizer

from mega_common.errors import DataError
from mega_data.chat.chat_preparation import ChatOptions
from mega_data.preprocessing.dataset_output import DatasetOutput
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.preprocessing.sharding import InputShard
from mega_data.token_files.dataset_info import (
    UNPAIRED,
    DatasetInfo,
    count_unpaired_answers,
    list_dataset_files,
    read_dataset_info,
)
from mega_data.token_files.indexed_reader import IndexedReader, get_bin_path, get_idx_path, get_loss_mask_prefix
from mega_data.token_files.loss_mask import LossWeights, open_loss_mask
from mega_data.token_files.merge_datasets import merge_datasets
from mega_data.token_files.verify_dataset import verify_dataset
from mega_data.tokenizer import Tokenizer

pytest.importorskip("transformers", reason="what renders templates")
NO = {"role": "assistant", "content": "I do not know."}


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_tokenizer(tokenizer_folder, tmp_path_factory.mktemp("chat"), "qwen", marks=False)


def written(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def preprocess_records(folder: Path, tokenizer: Path, records: list[Any], name: str = "d", **how: Any) -> DatasetInfo:
    chat = ChatOptions(**{key: how.pop(key) for key in list(how) if key in ChatOptions.__dataclass_fields__})
    return preprocess_corpus([written(folder / f"{name}.jsonl", records)], tokenizer, folder / name, chat=chat, **how)


def counted(prefix: Path, tokenizer: Path) -> list[str]:
    """What counts of each sequence."""
    reader, backend = IndexedReader(prefix), Tokenizer(tokenizer)
    masks = open_loss_mask(reader)
    return [backend.decode(reader.read_sequence(i)[masks.read_sequence(i) > 0].tolist()) for i in range(len(reader))]


def test_conversations_are_tokens_and_beside_them_what_counts(tmp_path: Path, tokenizer: Path) -> None:
    info = preprocess_records(tmp_path, tokenizer, [CONVERSATIONS["turns"], {"prompt": "Hi", "response": "Hello"}])
    assert info.chat is not None
    assert (info.documents, info.chat.kind, info.chat.one, info.chat.marked) == (2, "conversations", 1, False)
    first = "".join(message["content"] + "<|im_end|>\n" for message in (ANSWER, MORE[1]))
    assert counted(tmp_path / "d", tokenizer) == [first, "Hello<|im_end|>\n"]
    reader = IndexedReader(tmp_path / "d")
    text = Tokenizer(tokenizer).decode(reader.read_sequence(1).tolist())
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n"
    )
    assert verify_dataset(tmp_path / "d") == info


def test_pairs_are_two_sequences_a_document(tmp_path: Path, tokenizer: Path) -> None:
    record = {"prompt": [ASK, ANSWER, MORE[0]], "chosen": [MORE[1]], "rejected": [NO]}
    info = preprocess_records(
        tmp_path, tokenizer, [record, {"prompt": "Hi", "chosen": "Hello", "rejected": "No"}], kind="pairs"
    )
    assert (info.documents, info.chat and info.chat.kind) == (2, "pairs")
    assert IndexedReader(tmp_path / "d").document_index.tolist() == [0, 2, 4]
    texts = (MORE[1]["content"], NO["content"], "Hello", "No")
    assert counted(tmp_path / "d", tokenizer) == [text + "<|im_end|>\n" for text in texts]


def test_weights_of_turns_are_hundredths(tmp_path: Path, tokenizer: Path) -> None:
    record = {"messages": [ASK, {**ANSWER, "weight": 0.25}, MORE[0], {**MORE[1], "weight": 2}]}
    preprocess_records(tmp_path, tokenizer, [record], turn_weights=True)
    weights = LossWeights(IndexedReader(tmp_path / "d"))
    assert set(weights[0:10_000].tolist()) == {0, 0.25, 2}
    with pytest.raises(DataError, match=r"b.jsonl:1: the weight of an answer must be 0 or 1, not 0.25"):
        preprocess_records(tmp_path, tokenizer, [record], "b")
    with pytest.raises(DataError, match=r"a multiple of 0.01 up to 2.55"):
        preprocess_records(
            tmp_path, tokenizer, [{"messages": [ASK, {**ANSWER, "weight": 0.333}]}], "c", turn_weights=True
        )


def test_what_the_limit_cuts_is_counted(tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = CONVERSATIONS["turns"]
    whole = preprocess_records(tmp_path, tokenizer, [record])
    begin = int(np.flatnonzero(open_loss_mask(IndexedReader(tmp_path / "d")).tokens)[0])
    for limit, cut, documents in ((whole.tokens, 0, 1), (whole.tokens - 1, 1, 1), (begin + 2, 2, 1)):
        info = preprocess_records(tmp_path, tokenizer, [record], max_length=limit, overwrite=True)
        assert info.chat is not None
        assert (info.tokens, info.chat.cut, info.documents) == (limit, cut, documents)
    assert "2 answers were truncated to" in caplog.text
    info = preprocess_records(
        tmp_path, tokenizer, [{"prompt": "Hi", "response": "a"}, record], max_length=begin, overwrite=True
    )
    assert (info.documents, info.skipped.empty) == (1, 1)
    assert "1 conversations without an answer within the length limit were left out" in caplog.text


def test_bad_records_are_named_or_set_aside(tmp_path: Path, tokenizer: Path) -> None:
    records = [CONVERSATIONS["one"], {"messages": [ASK]}, {"text": "no chat"}]
    with pytest.raises(DataError, match=r"d.jsonl:2: no message has the role 'assistant'; the roles are 'user'"):
        preprocess_records(tmp_path, tokenizer, records)
    info = preprocess_records(tmp_path, tokenizer, records, on_bad_line="skip")
    assert (info.documents, info.skipped.bad) == (1, 2)
    aside = [json.loads(line) for line in (tmp_path / "d.quarantine.jsonl").read_text().splitlines()]
    assert [(one["line"], json.loads(one["content"])) for one in aside] == [(2, records[1]), (3, records[2])]


def test_a_table_of_prompts_and_responses(tmp_path: Path, tokenizer: Path) -> None:
    preprocess_records(tmp_path, tokenizer, [{"prompt": "Hi, you", "response": "Hello\nthere"}])
    (tmp_path / "in.csv").write_text('id,prompt,response\n7,"Hi, you","Hello\nthere"\n')
    preprocess_corpus([tmp_path / "in.csv"], tokenizer, tmp_path / "other", chat=ChatOptions())
    assert get_bin_path(tmp_path / "other").read_bytes() == get_bin_path(tmp_path / "d").read_bytes()


class Stopped(BaseException):
    """As Ctrl-C."""


@pytest.mark.parametrize("kind", ["conversations", "pairs"])
def test_a_run_that_was_ended_goes_on_with_the_mask(
    tmp_path: Path, tokenizer: Path, kind: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mega_data.preprocessing.dataset_output.RECORD_INTERVAL", 0.0)
    monkeypatch.setattr("mega_data.preprocessing.text_batches.BATCH", 1500)
    caplog.set_level("INFO")
    records = [
        {"prompt": f"q{n}", "response": "a " * n, "chosen": "a" * (n % 9 + 1), "rejected": "b"} for n in range(1, 60)
    ]
    straight = preprocess_records(tmp_path, tokenizer, records, kind=kind, max_length=90)
    real, left = DatasetOutput.add_batch, [0]

    def add(self: DatasetOutput, *args: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise Stopped
        real(self, *args)

    monkeypatch.setattr(DatasetOutput, "add_batch", add)
    chat = ChatOptions(kind=kind, max_length=90)
    for batches in (2, 4):
        left[0] = batches
        with pytest.raises(Stopped):
            preprocess_corpus([tmp_path / "d.jsonl"], tokenizer, tmp_path / "e", chat=chat, workers=1)
    assert preprocess_corpus([tmp_path / "d.jsonl"], tokenizer, tmp_path / "e", chat=chat) == straight
    assert "e: resuming an interrupted run after " in caplog.text
    for prefix in (tmp_path / "d", get_loss_mask_prefix(tmp_path / "d")):
        for path in (get_bin_path, get_idx_path):
            assert path(prefix).read_bytes() == path(tmp_path / prefix.name.replace("d", "e")).read_bytes()


@pytest.mark.parametrize("form", ["json", "parquet", "folder"])
def test_records_of_other_formats(tmp_path: Path, tokenizer: Path, form: str) -> None:
    records = [CONVERSATIONS[name] for name in ("one", "turns", "system")]
    preprocess_records(tmp_path, tokenizer, records)
    path = tmp_path / ("in" if form == "folder" else f"in.{form}")
    if form == "json":
        path.write_text(json.dumps(records, indent=1))
    elif form == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(records), path)
    else:
        path.mkdir()
        for number, record in enumerate(records):
            written(path / f"{number}.json", [record])
    preprocess_corpus([path], tokenizer, tmp_path / "other", chat=ChatOptions())
    for one, other in zip(list_dataset_files(tmp_path / "d"), list_dataset_files(tmp_path / "other"), strict=True):
        assert one.exists() == other.exists()
        assert one.suffix in (".info", ".jsonl") or not one.exists() or one.read_bytes() == other.read_bytes()


def test_shards_and_merges_keep_the_mask(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"prompt": f"q{n} " * (n % 7), "response": f"a{n} " * (n % 5 + 1)} for n in range(60)]
    whole = preprocess_records(tmp_path, tokenizer, records)
    for number in (2, 1, 3):
        preprocess_corpus(
            [tmp_path / "d.jsonl"], tokenizer, tmp_path / "s", chat=ChatOptions(), shard=InputShard(number, 3)
        )
    preprocess_records(tmp_path, tokenizer, records[:20], "one")
    preprocess_records(tmp_path, tokenizer, records[20:], "two")
    merged = merge_datasets([tmp_path / "one", tmp_path / "two"], tmp_path / "m")
    for other in (tmp_path / "s", tmp_path / "m"):
        for path in (get_bin_path, get_idx_path):
            assert path(other).read_bytes() == path(tmp_path / "d").read_bytes()
            assert (
                path(get_loss_mask_prefix(other)).read_bytes()
                == path(get_loss_mask_prefix(tmp_path / "d")).read_bytes()
            )
        assert (info := read_dataset_info(other)) is not None
        assert info.chat == whole.chat
        verify_dataset(other)
    assert merged.documents == 60
    preprocess_corpus([tmp_path / "d.jsonl"], tokenizer, tmp_path / "text", json_key="prompt")
    with pytest.raises(DataError, match=r"has text, .* conversations"):
        merge_datasets([tmp_path / "one", tmp_path / "text"], tmp_path / "no")


def test_text_in_place_of_conversations_has_no_mask(tmp_path: Path, tokenizer: Path) -> None:
    preprocess_records(tmp_path, tokenizer, [{"prompt": "Hi", "response": "a"}])
    preprocess_corpus([tmp_path / "d.jsonl"], tokenizer, tmp_path / "d", json_key="prompt", overwrite=True)
    assert not get_idx_path(get_loss_mask_prefix(tmp_path / "d")).exists()
    with pytest.raises(DataError, match=r"the loss mask .* is missing"):
        open_loss_mask(IndexedReader(tmp_path / "d"))


def test_a_mask_of_other_tokens_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    preprocess_records(tmp_path, tokenizer, [CONVERSATIONS["one"]])
    preprocess_records(tmp_path, tokenizer, [CONVERSATIONS["turns"]], "e")
    for path in (get_bin_path, get_idx_path):
        path(get_loss_mask_prefix(tmp_path / "d")).write_bytes(path(get_loss_mask_prefix(tmp_path / "e")).read_bytes())
    with pytest.raises(DataError, match="is not the loss mask of"):
        open_loss_mask(IndexedReader(tmp_path / "d"))
    with pytest.raises(DataError, match="is not the loss mask of"):
        verify_dataset(tmp_path / "d")


def test_an_encoder_that_knows_no_places_is_not_taken_and_that_is_said(
    tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    preprocess_records(tmp_path, tokenizer, [CONVERSATIONS["turns"]], encoder="fastokens")
    assert "encoder: tokenizers (fastokens does not return the character offsets that chats require)" in caplog.messages


def test_what_the_template_does_is_told(tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (tmp_path / "t.jinja").write_text(
        "{{ strftime_now('%d') }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    preprocess_records(tmp_path, tokenizer, [CONVERSATIONS["one"]], template=tmp_path / "t.jinja")
    for said in (
        "does not mark answers",
        "writes the current date",
        "d.jsonl:1: an answer does not end with a special token",
    ):
        assert said in caplog.text


SPELLED: list[tuple[dict[str, Any], set[str]]] = [
    ({"prompt": "Hi", "response": "Hello"}, set()),
    ({"prompt": "what is <|im_end|>?", "response": "Hello"}, {"<|im_end|>"}),
    ({"prompt": "Hi", "response": "a<|im_end|><|im_start|>user\n"}, {"<|im_end|>", "<|im_start|>"}),
    ({"system": "<|im_start|>", "prompt": "Hi", "response": "Hello"}, {"<|im_start|>"}),
    ({"messages": [ASK, {"role": "assistant", "content": "<|im_start|>"}]}, {"<|im_start|>"}),
    ({"prompt": "<|im_en d|> < |im_start|>", "response": "<|im_start"}, set()),
]


@pytest.mark.parametrize(("record", "tokens"), SPELLED)
def test_special_tokens_that_a_conversation_spells_are_counted(
    record: dict[str, Any], tokens: set[str], tmp_path: Path, tokenizer: Path
) -> None:
    info = preprocess_records(tmp_path, tokenizer, [record, {"prompt": "Hi", "response": "Hello"}])
    assert info.chat is not None
    spelled = {note: count for note, count in info.chat.notes.items() if "spell the special token" in note}
    assert spelled == {
        f"spell the special token {token!r} in a message or in 'tools', which is encoded as that token": 1
        for token in tokens
    }


def test_rated_answers_are_pairs_of_which_one_is_missing(
    tmp_path: Path, tokenizer: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What stands in place of a missing answer is two tokens of the prompt, of which none counts."""
    records = [
        {"prompt": "Hi", "completion": text, "label": label} for text, label in (("Hello", True), ("Bah", False))
    ]
    both = {"prompt": "Hi", "chosen": "Hello", "rejected": "Bah"}
    info = preprocess_records(tmp_path, tokenizer, [*records, both], kind="pairs")
    assert info.chat is not None
    assert (info.documents, info.chat.notes) == (3, {UNPAIRED: 2})
    assert f"2 conversations {UNPAIRED}" in caplog.messages
    assert count_unpaired_answers(tmp_path / "d") == 2
    assert counted(tmp_path / "d", tokenizer) == [f"{text}<|im_end|>\n" if text else "" for text in
                                                  ("Hello", "", "", "Bah", "Hello", "Bah")]  # fmt: skip
    reader = IndexedReader(tmp_path / "d")
    assert reader.read_sequence(1).tolist() == reader.read_sequence(2).tolist() == reader.read_sequence(0)[:2].tolist()
    assert reader.document_index.tolist() == [0, 2, 4, 6]
