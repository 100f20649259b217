"""Labeled texts, words and groups: records, tokens as transformers has them, and packed samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_common.errors import DataError
from mega_data.blended_dataset import build_blended_datasets
from mega_data.chat.chat_preparation import ChatOptions
from mega_data.chat.labeled_records import parse_labeled_record
from mega_data.data_config import DataConfig
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.reports.show_tokens import split_document_for_display
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.loss_mask import read_dataset_kind

transformers = pytest.importorskip("transformers", reason="whose tokens are the truth here")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from masked_data import SPECIAL, WORDS
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, normalizers, pre_tokenizers, processors

    pieces = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
    backend = Backend(
        models.WordPiece({w: i for i, w in enumerate(dict.fromkeys([*SPECIAL, *WORDS, *pieces]))}, unk_token="[UNK]")
    )
    backend.normalizer, backend.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [(name, SPECIAL.index(name)) for name in ("[CLS]", "[SEP]")]
    )
    folder = tmp_path_factory.mktemp("tok")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    return folder


def write(folder: Path, records: list[Any], tokenizer: Path, **options: Any) -> Path:
    path = folder / "raw.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    preprocess_corpus([path], tokenizer, folder / "made", chat=ChatOptions(**options))
    assert read_dataset_kind(IndexedReader(folder / "made")) == options["kind"]
    return folder / "made"


def samples(prefix: Path, kind: str, length: int = 32) -> list[Any]:
    config = DataConfig.parse({"train": str(prefix), "kind": kind, "seq_length": length, "split": "1"})
    data, _, _ = build_blended_datasets(config, seed=1, samples={"train": 1}, eod=None)
    return [data[k] for k in range(int(data.samples_per_epoch))]


def documents(made: list[Any]) -> list[dict[str, list[Any]]]:
    """The documents of samples, by their fields."""
    found = []
    for sample in made:
        for number in range(sample.document_ids.max() + 1):
            own = sample.document_ids == number
            if sample.tokens[own].any():
                names = ("tokens", "position_ids", "token_types", "targets", "loss_weights")
                found.append(
                    {name: getattr(sample, name)[own].tolist() for name in names if getattr(sample, name) is not None}
                )
    return found


def test_texts_have_the_tokens_of_transformers_and_their_labels(tokenizer: Path, tmp_path: Path) -> None:
    pairs = [("the cat saw abc", "a dog on it"), ("its mat", "and"), ("the " * 20, "dog " * 3)]
    labels = [0.1, -3.0, 65_537.0]
    records = [{"text": a, "text_pair": b, "label": label} for (a, b), label in zip(pairs, labels, strict=True)]
    prefix = write(tmp_path, records, tokenizer, kind="labels", max_length=12)
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer)
    found = {tuple(each["tokens"]): each for each in documents(samples(prefix, "labels"))}
    for pair, label in zip(pairs, labels, strict=True):
        expected = theirs(*pair, truncation=True, max_length=12, return_token_type_ids=True)
        each = found[tuple(expected["input_ids"])]
        assert each["token_types"] == expected["token_type_ids"]
        assert each["position_ids"] == list(range(len(expected["input_ids"])))
        assert {*each["targets"]} == {float(np.float32(label))}
        assert {*each["loss_weights"]} == {1.0}


def test_the_first_token_of_a_word_has_its_label(tokenizer: Path, tmp_path: Path) -> None:
    words, tags = ["the", "xyz", "cat"], ["O", "PER", -100]
    prefix = write(
        tmp_path, [{"tokens": words, "ner_tags": tags}], tokenizer, kind="token_labels", labels=["O", "LOC", "PER"]
    )
    (each,) = documents(samples(prefix, "token_labels"))
    expected = transformers.AutoTokenizer.from_pretrained(tokenizer)(words, is_split_into_words=True)
    assert each["tokens"] == expected["input_ids"]
    seen: dict[int, float] = {}
    for word, target, weight in zip(expected.word_ids(), each["targets"], each["loss_weights"], strict=True):
        first = word is not None and word not in seen
        if word is not None:
            seen.setdefault(word, target)
        assert weight == (first and tags[word] != -100)
    assert [seen[0], seen[1]] == [0, 2]


def test_groups_are_whole_and_in_order(tokenizer: Path, tmp_path: Path) -> None:
    records = [
        {"anchor": "the cat", "positive": f"a dog {letter}", "negatives": ["mat", "and", "on"]} for letter in "abcdefg"
    ]
    prefix = write(tmp_path, records, tokenizer, kind="groups", negatives=2)
    made = samples(prefix, "groups", 48)
    assert {sample.group_size for sample in made} == {4}
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer)
    encoded = [theirs(text)["input_ids"] for text in ("mat", "and")]
    for sample in made:
        rows = documents([sample])
        assert len(rows) % 4 == 0
        for number in range(0, len(rows), 4):
            texts = [row["tokens"] for row in rows[number : number + 4]]
            assert texts[0] == theirs("the cat")["input_ids"]
            assert texts[2:] == encoded
    assert sum(len(documents([sample])) for sample in made) == 4 * len(records)


def test_documents_are_shown_with_their_labels(tokenizer: Path, tmp_path: Path) -> None:
    prefix = write(tmp_path, [{"text": "the cat", "label": 0.25}], tokenizer, kind="labels")
    (part,) = split_document_for_display(prefix, 0, None)
    assert (part.name, len(part.tokens)) == ("document 0, label 0.25", 8)


def test_a_text_that_does_not_fit_is_left_out(tokenizer: Path, tmp_path: Path) -> None:
    prefix = write(tmp_path, [{"text": "the " * n, "label": 1} for n in (3, 40)], tokenizer, kind="labels")
    assert len(documents(samples(prefix, "labels"))) == 1
    with pytest.raises(DataError, match=r"none of its 2 records fits into data\.seq_length = 4"):
        samples(prefix, "labels", 4)


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        ({"text": "a"}, {}, "no 'label'; the keys are text"),
        ({"text": "a", "label": "yes"}, {}, "'label' must be a number, as no names are set, not 'yes'"),
        ({"text": "a", "label": "yes"}, {"labels": ["no"]}, "'label' must be one of no, not 'yes'"),
        ({"text": "a", "label": [1]}, {}, "'label' must be a finite number or a name"),
        ({"text": "", "label": 1}, {}, "'text' is not a text"),
        ({"query": "a", "label": 1}, {}, "no 'passage'; the keys are query, label"),
        ({"tokens": ["a"], "tags": [0, 1]}, {"kind": "token_labels"}, "requires a list of 1 labels"),
        ({"tokens": ["a"], "tags": [0.5]}, {"kind": "token_labels"}, "must be a whole number from 0 to"),
        ({"tokens": "a", "tags": [0]}, {"kind": "token_labels"}, "'tokens' is not a list of words"),
        ({"query": "a"}, {"kind": "groups"}, "no 'positive'; the keys are query"),
        ({"query": "a", "positive": "b", "negatives": ["c"]}, {"kind": "groups", "negatives": 2}, "has 1 negatives, fewer than the 2"),
        ({"query": "a", "positive": "b", "negatives": [1]}, {"kind": "groups"}, "'negatives' is not a text or a list"),
        ([1], {}, "the record is a list, not an object"),
    ],
)  # fmt: skip
def test_wrong_records_are_named(record: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_labeled_record(json.dumps(record), ChatOptions(**{"kind": "labels", **options}))
