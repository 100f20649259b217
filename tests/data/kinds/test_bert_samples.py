"""BERT's samples: Megatron's own, one by one, and those of the other orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from masked_data import sentences, their_splits

from mega_common.errors import DataError
from mega_data.blended_dataset import BlendedDataset, build_blended_datasets
from mega_data.data_config import DataConfig
from mega_data.kinds.bert_samples import BertSample
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.tokenizer import Tokenizer

S = 64
CLS, SEP, MASK = 2, 3, 4
SIZES = {"train": 120, "valid": 10, "test": 5}


def mega_datasets(tokenizer: Tokenizer, seed: int, **fields: Any) -> list[BlendedDataset | None]:
    config = DataConfig.parse({"seq_length": S, "kind": "bert", **fields})
    return list(build_blended_datasets(config, seed=seed, samples=SIZES, eod=None, tokenizer=tokenizer))


def megatron_datasets(
    tokenizer: Any, seed: int, cache: Path, *, short: float = 0.1, pairs: bool = True, **fields: Any
) -> list[Any]:
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig

    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=seed, sequence_length=S, tokenizer=tokenizer, path_to_cache=str(cache),
        masking_probability=0.15, short_sequence_probability=short, masking_max_ngram=3, masking_do_full_word=True,
        masking_do_permutation=False, masking_use_longer_ngrams=False, masking_use_geometric_distribution=False,
        classification_head=pairs, **fields,
    )  # fmt: skip
    return their_splits(BERTMaskedWordPieceDataset, config, [*SIZES.values()])


def assert_same(mine: BertSample, other: dict[str, Any]) -> None:
    assert np.array_equal(mine.tokens, other["text"])
    assert np.array_equal(mine.token_types, other["types"])
    assert np.array_equal(mine.labels, other["labels"])
    assert np.array_equal(mine.loss_weights, other["loss_mask"])
    assert np.array_equal(mine.padding_mask, other["padding_mask"])
    assert (mine.is_random, mine.truncated) == (other["is_random"], other["truncated"])


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("seed", "short", "pairs"),
    [(1, 0.0, True), (2, 0.1, True), (3, 0.4, True), (1234, 1.0, True), (5, 0.1, False), (6, 0.0, False)],
)
def test_every_sample_is_megatrons(
    tmp_path: Path, word_pieces: Tokenizer, their_tokenizer: Any, seed: int, short: float, pairs: bool
) -> None:
    prefix = sentences(tmp_path / "d", seed, longest=10 * seed % 50 + 10)
    expected = megatron_datasets(
        their_tokenizer, seed, tmp_path / "c", short=short, pairs=pairs, blend=([str(prefix)], None), split="8,1,1"
    )
    bert = {"short_probability": short, "sentence_pairs": pairs}
    found = mega_datasets(word_pieces, seed, train=str(prefix), split=[8, 1, 1], order="megatron", bert=bert)
    for mine, other, count in zip(found, expected, SIZES.values(), strict=True):
        assert mine is not None
        for k in range(count):
            assert_same(mine[k], other[k])


@pytest.mark.usefixtures("megatron")
def test_a_blend_is_megatrons(tmp_path: Path, word_pieces: Tokenizer, their_tokenizer: Any) -> None:
    prefixes = [str(sentences(tmp_path / f"d{i}", i)) for i in range(3)]
    weights = [3.0, 1.0, 0.5]
    expected = megatron_datasets(their_tokenizer, 5, tmp_path / "c", blend=(prefixes, weights), split="9,1,0")[0]
    train = [{"path": path, "weight": weight} for path, weight in zip(prefixes, weights, strict=True)]
    (found, *_) = mega_datasets(word_pieces, 5, train=train, split=[9, 1], order="megatron")
    assert found is not None
    for k in range(SIZES["train"]):
        assert_same(found[k], expected[k])


# ---- the other orders


def test_a_sample_depends_on_seed_and_number_alone(tmp_path: Path, word_pieces: Tokenizer) -> None:
    prefix = str(sentences(tmp_path / "d", 1))
    first, again, other = (mega_datasets(word_pieces, seed, train=prefix, split=[1])[0] for seed in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert other is not None
    backwards = [again[k] for k in reversed(range(300))][::-1]
    assert [first[k].tokens.tolist() for k in range(300)] == [sample.tokens.tolist() for sample in backwards]
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert any(first[k].tokens.tolist() != other[k].tokens.tolist() for k in range(5))


def original(sample: BertSample) -> list[int]:
    """The tokens before any was masked, without the padding."""
    tokens: list[int] = np.where(sample.labels >= 0, sample.labels, sample.tokens)[sample.padding_mask].tolist()
    return tokens


def test_an_epoch_has_every_sentence_once(tmp_path: Path, word_pieces: Tokenizer) -> None:
    counts = [2, 20, 8, 1, 3, 14, 0, 12]  # the seventh token on, a sentence each
    with IndexedWriter(tmp_path / "d", "uint16") as writer:
        writer.add_documents(np.arange(7, 7 + sum(counts)), np.ones(sum(counts)), sequences=counts)
    bert = {"short_probability": 0}
    data = mega_datasets(word_pieces, 1, train=str(tmp_path / "d"), split=[1], bert=bert, seq_length=9)[0]
    assert data is not None
    alone = 7 + 2 + 20 + 8  # a document of one sentence makes no pair
    k, orders = 0, set()
    for _ in range(3):
        seen: list[int] = []
        while len(seen) < sum(counts) - 1:
            assert not data[k].truncated
            seen += sorted(token for token in original(data[k]) if token not in (CLS, SEP))
            k += 1
        assert sorted(seen) == [token for token in range(7, 7 + sum(counts)) if token != alone]
        orders.add(tuple(seen))
    assert len(orders) == 3
    assert data.count_epochs_by_path(k) == {str(tmp_path / "d"): 3}


def test_samples_are_masked_and_paired_as_they_should_be(tmp_path: Path, word_pieces: Tokenizer) -> None:
    data = mega_datasets(word_pieces, 1, train=str(sentences(tmp_path / "d", 1, documents=200)), split=[1])[0]
    assert data is not None
    samples: list[BertSample] = [data[k] for k in range(2000)]
    masked = np.concatenate([sample.tokens[sample.labels >= 0] for sample in samples])
    labels = np.concatenate([sample.labels[sample.labels >= 0] for sample in samples])
    assert np.mean(masked == MASK) == pytest.approx(0.8, abs=0.02)
    assert np.mean(masked == labels) == pytest.approx(0.1, abs=0.02)
    tokens = sum(len(original(sample)) for sample in samples)
    assert labels.size / tokens == pytest.approx(0.15, abs=0.02)
    assert np.mean([sample.is_random for sample in samples]) == pytest.approx(0.5, abs=0.04)
    for sample in samples[:200]:
        text = np.array(original(sample))
        first, last = np.flatnonzero(text == SEP).tolist()
        assert text[0] == CLS
        assert last == text.size - 1
        assert np.array_equal(np.flatnonzero(sample.token_types), np.arange(first + 1, text.size))
        assert not sample.tokens[text.size :].any()


# ---- what is refused


def test_documents_of_one_sentence_are_refused(tmp_path: Path, word_pieces: Tokenizer) -> None:
    with IndexedWriter(tmp_path / "d", "uint16") as writer:
        writer.add_documents(np.arange(30), np.full(3, 10))
    data = mega_datasets(word_pieces, 1, train=str(tmp_path / "d"), split=[1])[0]
    assert data is not None
    with pytest.raises(DataError, match="d: none of its 3 documents has at least 2 sentences") as refused:
        data[0]
    assert "--split-sentences" in str(refused.value.hint)


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer.json: the special token \[CLS\] or <s> is missing"):
        mega_datasets(Tokenizer(tokenizer_folder), 1, train=str(sentences(tmp_path / "d", 1)), split=[1])


def test_a_sample_past_the_end_of_megatrons_order_is_refused(tmp_path: Path, word_pieces: Tokenizer) -> None:
    data = mega_datasets(word_pieces, 1, train=str(sentences(tmp_path / "d", 1)), split=[1], order="megatron")[0]
    assert data is not None
    with pytest.raises(DataError, match=r"data.order = megatron.* is fixed for"):
        data[5000]
