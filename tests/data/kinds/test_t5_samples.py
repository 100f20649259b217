"""T5's samples: Megatron's own, one by one; and T5's own rule in the other orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from masked_data import SENTINELS, SPECIAL, WORDS, sentences, their_splits

from mega_common.errors import DataError
from mega_data.batch_loader import BatchLoader
from mega_data.blended_dataset import BlendedDataset, build_blended_datasets
from mega_data.data_config import DataConfig, SpanCorruption
from mega_data.kinds.t5_samples import T5Sample
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.tokenizer import Tokenizer

S, D = 64, 48
SIZES = {"train": 120, "valid": 10, "test": 5}
FIRST = len(SPECIAL + WORDS)  # sentinel
PAD, EOS = 0, 6


def mega_datasets(tokenizer: Tokenizer, seed: int, **fields: Any) -> list[BlendedDataset | None]:
    config = DataConfig.parse({"seq_length": S, "kind": "t5", **fields})
    return list(build_blended_datasets(config, seed=seed, samples=SIZES, eod=None, tokenizer=tokenizer))


def megatron_datasets(
    tokenizer: Any, seed: int, cache: Path, *, short: float, share: float, **fields: Any
) -> list[Any]:
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig

    config = T5MaskedWordPieceDatasetConfig(
        random_seed=seed, sequence_length=S, sequence_length_decoder=D, tokenizer=tokenizer, path_to_cache=str(cache),
        masking_probability=share, short_sequence_probability=short, masking_max_ngram=10, masking_do_full_word=True,
        masking_do_permutation=False, masking_use_longer_ngrams=False, masking_use_geometric_distribution=True, **fields,
    )  # fmt: skip
    return their_splits(T5MaskedWordPieceDataset, config, [*SIZES.values()])


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("seed", "short", "share"), [(1, 0.0, 0.15), (2, 0.1, 0.15), (3, 0.4, 0.3), (1234, 1.0, 0.15), (5, 0.1, 0.05)]
)
def test_every_sample_is_megatrons(
    tmp_path: Path, word_pieces: Tokenizer, their_tokenizer: Any, seed: int, short: float, share: float
) -> None:
    prefix = sentences(tmp_path / "d", seed, longest=10 * seed % 50 + 10)
    expected = megatron_datasets(
        their_tokenizer, seed, tmp_path / "c", short=short, share=share, blend=([str(prefix)], None), split="8,1,1"
    )
    t5 = {"short_probability": short, "mask_probability": share, "decoder_seq_length": D}
    found = mega_datasets(word_pieces, seed, train=str(prefix), split=[8, 1, 1], order="megatron", t5=t5)
    for mine, other, count in zip(found, expected, SIZES.values(), strict=True):
        assert mine is not None
        for k in range(count):
            assert_same(mine[k], other[k])


def assert_same(mine: T5Sample, other: dict[str, Any]) -> None:
    assert np.array_equal(mine.encoder_tokens, other["text_enc"])
    assert np.array_equal(mine.decoder_tokens, other["text_dec"])
    assert np.array_equal(mine.labels, other["labels"])
    assert np.array_equal(mine.loss_weights, other["loss_mask"])
    assert np.array_equal(mine.encoder_mask, other["enc_mask"])
    assert np.array_equal(mine.decoder_mask, other["dec_mask"])
    assert mine.truncated == other["truncated"]


# ---- the other orders: T5's own rule


def lengths_of_t5(room: int, share: float, mean: float) -> tuple[int, int]:
    """Tokens taken and tokens of the target for so much room, as T5's own preprocessing counts them."""

    def both(tokens: int) -> tuple[int, int]:
        hidden = round(tokens * share)
        spans = round(hidden / mean)
        return tokens - hidden + spans + 1, hidden + spans + 1

    tokens = room
    while both(tokens + 1)[0] <= room:
        tokens += 1
    return tokens, both(tokens)[1]


@pytest.mark.parametrize(("share", "mean"), [(0.15, 3.0), (0.15, 8.0), (0.3, 2.5)])
def test_room_is_used_as_t5_does(share: float, mean: float) -> None:
    for room in (*range(32, 200), 512, 1024):
        spans = SpanCorruption.from_encoder_length(room, share, mean)
        assert (spans.tokens, spans.hidden + spans.count + 1) == lengths_of_t5(room, share, mean)
    assert (
        SpanCorruption.from_encoder_length(512, 0.15, 3.0).tokens,
        SpanCorruption.from_encoder_length(1024, 0.15, 3.0).tokens,
    ) == (568, 1137)


def test_filling_the_spans_in_gives_the_text_back(tmp_path: Path, word_pieces: Tokenizer) -> None:
    prefix = sentences(tmp_path / "d", 1)
    data = mega_datasets(word_pieces, 1, train=str(prefix), split=[1], order="stable")[0]
    assert data is not None
    text = IndexedReader(prefix).tokens
    circle = np.concatenate([text, text]).astype(np.uint16).tobytes()
    taken, targets = lengths_of_t5(S, 0.15, 3.0)
    for k in range(100):
        sample = data[k]
        assert np.concatenate([sample.encoder_mask, sample.decoder_mask, sample.loss_weights]).all()
        assert (sample.encoder_tokens.size, sample.labels.size) == (S, targets)
        assert sample.decoder_tokens.tolist() == [PAD, *sample.labels[:-1].tolist()]
        assert sample.encoder_tokens[-1] == sample.labels[-1] == EOS
        hidden: dict[int, list[int]] = {}
        for token in sample.labels[:-1].tolist():
            if token >= FIRST:
                hidden[token] = []
            else:
                hidden[max(hidden)].append(token)
        assert [*hidden] == [*range(FIRST, FIRST + len(hidden))]
        assert all(hidden.values())
        assert sample.encoder_tokens[0] < FIRST  # text comes first
        whole = [part for token in sample.encoder_tokens[:-1].tolist() for part in hidden.get(token, [token])]
        assert len(whole) == taken
        assert np.array(whole, np.uint16).tobytes() in circle


def test_every_way_to_part_the_spans_is_equally_likely() -> None:
    spans = SpanCorruption(tokens=8, hidden=3, count=2)
    random = np.random.RandomState(0)
    ways: dict[tuple[int, ...], int] = {}
    for _ in range(4000):
        drawn = spans.draw_spans(random)
        assert sum(span.size for span in drawn) == 3
        assert 0 < drawn[0][0] <= drawn[0][-1] < drawn[1][0] - 1
        key = tuple(np.concatenate(drawn).tolist())
        ways[key] = ways.get(key, 0) + 1
    assert len(ways) == 2 * 4  # two ways to part 3 in two, four to part 5
    assert min(ways.values()) > 400


def test_a_sample_depends_on_seed_and_number_alone(tmp_path: Path, word_pieces: Tokenizer) -> None:
    prefix = str(sentences(tmp_path / "d", 1))
    first, again, other = (mega_datasets(word_pieces, seed, train=prefix, split=[1])[0] for seed in (1, 1, 2))
    assert first is not None
    assert again is not None
    assert other is not None
    backwards = [again[k] for k in reversed(range(50))][::-1]
    assert all(np.array_equal(first[k].labels, backwards[k].labels) for k in range(50))
    assert first.fingerprint == again.fingerprint != other.fingerprint


# ---- what is refused


def test_too_little_room_for_the_decoder_is_told(tmp_path: Path, word_pieces: Tokenizer) -> None:
    t5 = {"decoder_seq_length": 4}
    data = mega_datasets(word_pieces, 1, train=str(sentences(tmp_path / "d", 1)), split=[1], order="megatron", t5=t5)[0]
    assert data is not None
    with pytest.raises(DataError, match=r"data.t5.decoder_seq_length = 4: must be at least \d+"):
        [data[k] for k in range(20)]


def test_too_few_sentinels_are_told(tmp_path: Path, word_pieces: Tokenizer) -> None:
    fields = {"train": str(sentences(tmp_path / "d", 1)), "split": [1], "seq_length": 4000}
    data = mega_datasets(word_pieces, 1, **fields)[0]
    assert data is not None
    with pytest.raises(
        DataError, match=rf"has {len(SENTINELS)} sentinel tokens, but a sample of data.seq_length = 4000"
    ):
        data[0]


def test_a_tokenizer_without_sentinels_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(DataError, match=r"are missing|is missing"):
        mega_datasets(Tokenizer(tokenizer_folder), 1, train=str(sentences(tmp_path / "d", 1)), split=[1])


# ---- what a trainer is handed


@pytest.mark.parametrize("order", ["megatron", "stable"])
def test_a_batch_of_both_sequences(tmp_path: Path, word_pieces: Tokenizer, order: str) -> None:
    t5 = {"decoder_seq_length": D}
    data = mega_datasets(word_pieces, 1, train=str(sentences(tmp_path / "d", 1)), split=[1], order=order, t5=t5)[0]
    assert data is not None
    batch = next(iter(BatchLoader(data, global_batch=4, seq_length=S, dp_rank=1, dp_size=2)))
    assert batch.source is not None
    assert (batch.tokens.shape, batch.source.tokens.shape) == ((2, D), (2, S))
    for row, k in enumerate(batch.sample_ids.tolist()):
        sample = data[k]
        assert np.array_equal(batch.source.tokens[row], sample.encoder_tokens)
        assert batch.source.lengths[row] == sample.encoder_mask.sum()
        counts = batch.loss_weights[row] > 0
        assert np.array_equal(batch.labels[row][counts], sample.labels[sample.labels >= 0])
    assert batch.labels.min() == 0  # -1 in the padding is no token
