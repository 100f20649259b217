from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mega_common.errors import ConfigError, DataError
from mega_data.blended_dataset import BlendedDataset, build_blended_datasets, open_sequential_dataset
from mega_data.data_config import DataConfig
from mega_data.kinds.running_text import EndOfDocumentRules
from mega_data.sampling.dataset_parts import compute_split_bounds
from mega_data.token_files.indexed_reader import IndexedReader
from mega_data.token_files.indexed_writer import IndexedWriter

EOD = 0


def data_set(prefix: Path, documents: int, seed: int) -> str:
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 90, documents)
    tokens = random.integers(1, 5000, lengths.sum())
    tokens[np.cumsum(lengths) - 1] = EOD
    with IndexedWriter(prefix, "uint16") as writer:
        writer.add_documents(tokens, lengths)
    return str(prefix)


def config(**fields: Any) -> DataConfig:
    return DataConfig.parse({"seq_length": 32, **fields})


def tokens(dataset: BlendedDataset | None, count: int) -> np.ndarray:
    assert dataset is not None
    return np.stack([dataset[k].tokens for k in range(count)])


# ---- Megatron as the oracle


class Tokenizer:
    vocab_size, eod, eos, pad = 5000, EOD, EOD, -1
    unique_identifiers = {"name": "none"}


def megatrons(sizes: tuple[int, int, int], seed: int, **fields: Any) -> list[Any]:
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="the oracle is not installed")
    builder = pytest.importorskip(
        "megatron.core.datasets.blended_megatron_dataset_builder", reason="the oracle is not installed"
    )
    flags = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, **fields}
    settings = gpt.GPTDatasetConfig(random_seed=seed, sequence_length=32, tokenizer=Tokenizer(), **flags)
    return list(builder.BlendedMegatronDatasetBuilder(gpt.GPTDataset, sizes, lambda: True, settings).build())


def equal_samples(ours: BlendedDataset | None, theirs: Any, count: int) -> bool:
    expected = np.stack([theirs[k]["tokens"].numpy() for k in range(count)])
    return np.array_equal(tokens(ours, count), expected)


@pytest.mark.parametrize("seed", [1, 1234])
@pytest.mark.parametrize(("split", "train"), [("900,80,20", 40), ("8,1,1", 700), ("960,40", 290), ("1", 500)])
def test_one_data_set_in_megatrons_order(tmp_path: Path, seed: int, split: str, train: int) -> None:
    prefix = data_set(tmp_path / "d", 200, seed)
    sizes = (train, 25, 10)
    theirs = megatrons(sizes, seed, blend=([prefix], None), split=split)
    ours = build_blended_datasets(
        config(train=prefix, split=split, order="megatron"),
        seed=seed, samples=dict(zip(("train", "valid", "test"), sizes, strict=True)), eod=None,
    )  # fmt: skip
    for mine, other, count in zip(ours, theirs, sizes, strict=True):
        assert (mine is None) == (other is None)
        assert other is None or equal_samples(mine, other, count)


@pytest.mark.parametrize("past", [-1, 0, 1])
def test_last_epoch_is_apart_below_eighty_per_cent_of_it(tmp_path: Path, past: int) -> None:
    prefix = data_set(tmp_path / "d", 200, 4)
    per_epoch = (IndexedReader(Path(prefix)).num_tokens - 1) // 32
    before_last = (2 * IndexedReader(Path(prefix)).num_tokens - 1) // 32
    train = before_last + int(0.80 * per_epoch) + past
    theirs = megatrons((train, 0, 0), 4, blend=([prefix], None), split="1,0,0")
    ours = build_blended_datasets(
        config(train=prefix, split="1", order="megatron"), seed=4, samples={"train": train}, eod=None
    )
    assert equal_samples(ours[0], theirs[0], train)


@pytest.mark.parametrize("weights", [[0.3, 0.7], [5.0, 1.0, 0.25], [1.0]])
def test_blend_in_megatrons_order(tmp_path: Path, weights: list[float]) -> None:
    prefixes = [data_set(tmp_path / f"d{i}", 60 + 40 * i, i) for i in range(len(weights))]
    theirs = megatrons((900, 60, 0), 7, blend=(prefixes, weights), split="9,1,0")
    train = [{"path": path, "weight": weight} for path, weight in zip(prefixes, weights, strict=True)]
    ours = build_blended_datasets(
        config(train=train, split=[9, 1], order="megatron"), seed=7, samples={"train": 900, "valid": 60}, eod=None
    )
    assert equal_samples(ours[0], theirs[0], 900)
    assert equal_samples(ours[1], theirs[1], 60)
    with pytest.raises(DataError, match=r"data.order = megatron.* is fixed for"):
        tokens(ours[0], 2000)


def test_splits_of_their_own_in_megatrons_order(tmp_path: Path) -> None:
    one, two, three = (data_set(tmp_path / f"d{i}", 50, i) for i in range(3))
    blends = [([one, two], [1.0, 2.0]), ([three], [4.0]), ([two], None)]
    theirs = megatrons((300, 40, 30), 7, blend_per_split=blends)
    ours = build_blended_datasets(
        config(
            train=[{"path": one, "weight": 1}, {"path": two, "weight": 2}],
            valid=[{"path": three, "weight": 4}], test=two, order="megatron",
        ),
        seed=7, samples={"train": 300, "valid": 40, "test": 30}, eod=None,
    )  # fmt: skip
    for mine, other, count in zip(ours, theirs, (300, 40, 30), strict=True):
        assert equal_samples(mine, other, count)


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_masks_and_positions_are_megatrons(tmp_path: Path, positions: bool, attention: bool, loss: bool) -> None:
    prefix = data_set(tmp_path / "d", 200, 3)
    flags = {"reset_position_ids": positions, "reset_attention_mask": attention, "eod_mask_loss": loss}
    theirs = megatrons((50, 0, 0), 3, blend=([prefix], None), split="1,0,0", **flags)[0]
    ours, _, _ = build_blended_datasets(
        config(train=prefix, split="1", order="megatron", **flags), seed=3, samples={"train": 50}, eod=EOD
    )
    for k in range(50):
        mine, other = ours[k], theirs[k]
        assert np.array_equal(mine.labels, other["labels"])
        assert np.array_equal(mine.loss_weights, other["loss_mask"])
        assert np.array_equal(mine.position_ids, other["position_ids"])
        assert (mine.document_ids is not None) == attention
        allowed = np.tril(np.ones((32, 32), bool))
        if mine.document_ids is not None:
            allowed &= mine.document_ids[:, None] == mine.document_ids
        assert np.array_equal(~allowed, other["attention_mask"][0].numpy())


# ---- the orders of mega


@pytest.mark.parametrize("order", ["stable", "shuffled"])
def test_orders_but_megatrons_have_no_end_and_need_no_total(tmp_path: Path, order: str) -> None:
    train = [data_set(tmp_path / "a", 100, 1), {"path": data_set(tmp_path / "b", 50, 2), "weight": 0.5}]
    short, long = (
        build_blended_datasets(config(train=train, order=order), seed=5, samples={"train": n}, eod=None)[0]
        for n in (10, 10_000)
    )
    assert np.array_equal(tokens(short, 400), tokens(long, 400))
    assert short.fingerprint == long.fingerprint
    assert short[10**9].tokens.shape == (32,)
    assert short[3].labels[:-1].tolist() == short[3].tokens[1:].tolist()
    assert short[3].document_ids is None
    assert (tmp_path / ".cache").exists() == (order == "shuffled")


def test_fingerprint_of_the_stable_order_is_fixed_for_ever(tmp_path: Path) -> None:
    """A change would tell every run that goes on that its data is another's."""
    train = [data_set(tmp_path / "a", 100, 1), {"path": data_set(tmp_path / "b", 50, 2), "weight": 0.5}]
    made = build_blended_datasets(config(train=train, order="stable"), seed=5, samples={"train": 1}, eod=None)[0]
    assert made.fingerprint == "4e8c596fd3c2316511606489d8ed9efe"


def test_fingerprint_tells_what_matters(tmp_path: Path) -> None:
    one, two = data_set(tmp_path / "a", 100, 1), data_set(tmp_path / "b", 100, 2)

    def fingerprint(seed: int = 5, total: int = 10, **fields: Any) -> str:
        return build_blended_datasets(config(**{"train": one, **fields}), seed=seed, samples={"train": total}, eod=0)[
            0
        ].fingerprint

    made = [
        fingerprint(), fingerprint(seed=6), fingerprint(train=two), fingerprint(seq_length=16), fingerprint(split="1"),
        fingerprint(train=[one, two]), fingerprint(train=[one, {"path": two, "weight": 2}]),
        fingerprint(eod_mask_loss=True), fingerprint(order="megatron"), fingerprint(order="megatron", total=11),
    ]  # fmt: skip
    assert len(set(made)) == len(made)
    assert fingerprint(total=99) == made[0]


def test_splits_share_no_token(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", "int32") as writer:
        writer.add_documents(np.arange(1000), [10] * 100)
    sets = build_blended_datasets(
        config(train=tmp_path / "d", split=[80, 15, 5], seq_length=8),
        seed=1, samples={"train": 1, "valid": 1, "test": 1}, eod=None,
    )  # fmt: skip
    seen = [set(tokens(each, 300).ravel().tolist()) for each in sets]
    assert [(min(each), max(each), len(each)) for each in seen] == [(0, 799, 800), (800, 949, 150), (950, 999, 50)]


def test_split_bounds_leave_out_what_has_no_share() -> None:
    assert compute_split_bounds([969, 30, 1]) == [(0.0, 0.969), (0.969, 0.999), (0.999, 1.0)]
    assert compute_split_bounds([1, 0, 1]) == [(0.0, 0.5), None, (0.5, 1.0)]


def test_valid_is_none_when_not_asked_for_or_without_share(tmp_path: Path) -> None:
    prefix = data_set(tmp_path / "d", 100, 1)
    _, valid, test = build_blended_datasets(config(train=prefix), seed=1, samples={"train": 5, "valid": 5}, eod=None)
    assert valid is not None
    assert test is None
    assert build_blended_datasets(config(train=prefix, split="1"), seed=1, samples={"valid": 5}, eod=None)[1:] == (
        None,
        None,
    )


def test_a_split_that_comes_out_empty_is_told(tmp_path: Path) -> None:
    small, large = data_set(tmp_path / "small", 3, 1), data_set(tmp_path / "large", 100, 2)
    with pytest.raises(DataError, match="leaves no sequence for valid"):
        build_blended_datasets(config(train=small), seed=1, samples={"train": 5, "valid": 5}, eod=None)
    with pytest.raises(DataError, match="small: has no training tokens"):
        build_blended_datasets(config(train=small, split=[1, 9]), seed=1, samples={"train": 5}, eod=None)
    _, valid, _ = build_blended_datasets(
        config(train=[small, large]), seed=1, samples={"train": 5, "valid": 5}, eod=None
    )
    assert valid is not None


def test_rules_about_documents_need_the_token(tmp_path: Path) -> None:
    prefix = data_set(tmp_path / "d", 10, 1)
    with pytest.raises(ConfigError, match=r"data\.eod_mask_loss: requires a tokenizer with an end-of-document token"):
        build_blended_datasets(config(train=prefix, eod_mask_loss=True), seed=1, samples={"train": 5}, eod=None)


def test_document_rules_by_hand() -> None:
    sample = EndOfDocumentRules(9, True, True, True).build_sample(np.array([1, 9, 2, 3, 9, 9, 4, 5]))
    assert sample.tokens.tolist() == [1, 9, 2, 3, 9, 9, 4]
    assert sample.labels.tolist() == [9, 2, 3, 9, 9, 4, 5]
    assert sample.loss_weights.tolist() == [1, 0, 1, 1, 0, 0, 1]
    assert sample.position_ids.tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert sample.document_ids is not None
    assert sample.document_ids.tolist() == [0, 0, 1, 1, 1, 2, 3]


# ---- evaluation


@pytest.mark.parametrize("seq_length", [1, 4, 7, 29, 30, 31])
def test_sequential_predicts_every_token_once(tmp_path: Path, seq_length: int) -> None:
    with IndexedWriter(tmp_path / "d", "uint16") as writer:
        writer.add_documents(np.arange(100, 130), [10, 20])
    dataset = open_sequential_dataset(tmp_path / "d", seq_length)
    samples = [dataset[k] for k in range(len(dataset))]
    assert all(sample.tokens.shape == sample.labels.shape == (seq_length,) for sample in samples)
    assert np.concatenate([s.labels[s.loss_weights > 0] for s in samples]).tolist() == list(range(101, 130))
    assert np.concatenate([s.tokens[s.loss_weights > 0] for s in samples]).tolist() == list(range(100, 129))
    assert dataset.num_labels == 29
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_sequential_of_nothing(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "d", "uint16") as writer:
        writer.add_document([1])
    with pytest.raises(DataError, match="requires at least two tokens"):
        open_sequential_dataset(tmp_path / "d", 8)


# ---- configuration


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"train": []}, "train = .*at least 1 item"),
        ({"train": [{"path": "a", "weight": 0}]}, r"train\.0\.weight"),
        ({"train": [{"path": "a", "wieght": 1}]}, "did you mean 'weight'"),
        ({"train": "a", "split": "1,2,3,4"}, "split.*up to three numbers"),
        ({"train": "a", "split": "0,1,0"}, "split.*the share of train must be above 0"),
        ({"train": "a", "split": "x"}, "split"),
        ({"train": ["a", "b"], "order": "megatron"}, r"train\.0\.weight: order: megatron requires a weight"),
    ],
)
def test_configuration_problems(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        DataConfig.parse(fields, source="data")


def test_configuration_forms() -> None:
    made = DataConfig.parse({"train": ["a", {"path": "b", "weight": 2}], "valid": "c", "split": "969,30,1"})
    assert [(str(s.path), s.weight) for s in made.train] == [("a", None), ("b", 2.0)]
    assert made.split_shares == [969.0, 0.0, 1.0]
    assert DataConfig.parse(made.model_dump(mode="json")) == made
