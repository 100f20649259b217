from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_common.errors import ConfigError, DataError
from mega_data.batch_loader import BatchLoader, StepBatch, assign_samples_to_ranks
from mega_data.blended_dataset import BlendedDataset, EndOfDocumentRules, TrainingSample, build_blended_datasets
from mega_data.data_config import DataConfig
from mega_data.token_files.indexed_writer import IndexedWriter

S = 8


class Numbered:
    """Sample k is k, k, k, ...; from `end` on there is none."""

    def __init__(self, end: int = 10**9) -> None:
        self.end = end

    def __getitem__(self, k: int) -> TrainingSample:
        if k >= self.end:
            raise DataError(f"sample {k} of {self.end}")
        return EndOfDocumentRules().build_sample(np.full(S + 1, k))

    def estimate_attention_work(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.full(len(numbers), S * S)


def take_batches(loader: BatchLoader, steps: int) -> list[StepBatch]:
    return list(islice(loader, steps))


@given(
    dp_size=st.sampled_from([1, 2, 3, 4, 6, 12]),
    prefetch=st.integers(0, 4),
    before=st.integers(0, 5),
    dp_size_before=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=30, deadline=None)
def test_order_does_not_depend_on_world_size_prefetch_or_restarts(
    dp_size: int, prefetch: int, before: int, dp_size_before: int
) -> None:
    straight = [
        batch.sample_ids.tolist() for batch in take_batches(BatchLoader(Numbered(), global_batch=12, seq_length=S), 8)
    ]
    first = BatchLoader(Numbered(), global_batch=12, seq_length=S, dp_size=dp_size_before, prefetch=prefetch)
    take_batches(first, before)
    assert first.consumed_samples == 12 * before
    ranks = [
        BatchLoader(
            Numbered(), global_batch=12, seq_length=S, dp_rank=rank, dp_size=dp_size,
            consumed_samples=first.consumed_samples, prefetch=prefetch,
        )
        for rank in range(dp_size)
    ]  # fmt: skip
    steps = zip(*(take_batches(loader, 8 - before) for loader in ranks), strict=True)
    for expected, parts in zip(straight[before:], steps, strict=True):
        assert [k for part in parts for k in part.sample_ids.tolist()] == expected
        for part in parts:
            assert part.tokens.tolist() == [[k] * S for k in part.sample_ids.tolist()]


@pytest.mark.parametrize("order", ["stable", "megatron"])
def test_order_does_not_depend_on_caches(tmp_path: Path, order: str) -> None:
    with IndexedWriter(tmp_path / "d", "uint16") as writer:
        writer.add_documents(np.arange(2000), [20] * 100)
    source = {"path": tmp_path / "d", "weight": 1.0}

    def read(cache: str) -> list[list[int]]:
        config = DataConfig.parse(
            {"train": [source, source], "order": order, "seq_length": S, "cache": tmp_path / cache}
        )
        train: BlendedDataset = build_blended_datasets(config, seed=1, samples={"train": 300}, eod=None)[0]
        return [batch.tokens.tolist() for batch in take_batches(BatchLoader(train, global_batch=30, seq_length=S), 10)]

    (tmp_path / "blocked").write_text("not a folder")
    assert read("cold") == read("cold") == read("other") == read("blocked")


def test_batch_has_shapes_and_types() -> None:
    rules = EndOfDocumentRules(0, reset_attention_mask=True)

    class WithDocuments(Numbered):
        def __getitem__(self, k: int) -> TrainingSample:
            return rules.build_sample(np.arange(S + 1))

    for dataset, has in ((Numbered(), False), (WithDocuments(), True)):
        batch = next(iter(BatchLoader(dataset, global_batch=6, seq_length=S, dp_rank=1, dp_size=2)))
        for name, dtype in (
            ("tokens", np.int64),
            ("labels", np.int64),
            ("position_ids", np.int64),
            ("loss_weights", np.float32),
        ):
            assert getattr(batch, name).shape == (3, S)
            assert getattr(batch, name).dtype == dtype
        assert (batch.document_ids is not None) == has
        assert batch.document_ids is None or batch.document_ids.dtype == np.int32
        assert batch.sample_ids.tolist() == [3, 4, 5]


def test_a_sample_without_documents_is_one_among_others() -> None:
    class Mixed(Numbered):
        def __getitem__(self, k: int) -> TrainingSample:
            return EndOfDocumentRules(1, reset_attention_mask=k % 2 == 0).build_sample(np.arange(S + 1))

    batch = next(iter(BatchLoader(Mixed(), global_batch=2, seq_length=S)))
    assert batch.document_ids is not None
    assert batch.document_ids.tolist() == [[0, 0] + [1] * (S - 2), [0] * S]


class Uneven(Numbered):
    def estimate_attention_work(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        return np.array(numbers) * 7919 % 1000 + 1


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 6])
def test_samples_of_uneven_work_are_those_of_the_step_and_dealt_evenly(dp_size: int) -> None:
    made = [
        BatchLoader(Uneven(), global_batch=24, seq_length=S, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)
    ]
    for step, parts in enumerate(zip(*(take_batches(loader, 4) for loader in made), strict=True)):
        ids = [part.sample_ids.tolist() for part in parts]
        assert sorted(k for own in ids for k in own) == list(range(24 * step, 24 * step + 24))
        work = [Uneven().estimate_attention_work(own).sum() for own in ids]
        assert max(work) <= 1.1 * sum(work) / dp_size
        for part in parts:
            assert part.tokens.tolist() == [[k] * S for k in part.sample_ids.tolist()]


@given(st.integers(1, 8), st.integers(1, 6), st.data())
@settings(max_examples=60, deadline=None)
def test_every_sample_is_dealt_once_the_large_ones_first(ranks: int, share: int, data: st.DataObject) -> None:
    work = data.draw(st.lists(st.integers(0, 99), min_size=ranks * share, max_size=ranks * share))
    hands = assign_samples_to_ranks(np.array(work), ranks)
    assert hands.shape == (ranks, share)
    assert sorted(hands.ravel().tolist()) == list(range(ranks * share))
    if len(set(work)) > 1:
        assert (np.diff(np.array(work)[hands], axis=1) <= 0).all()


def test_errors_come_where_the_batch_would_have_come() -> None:
    loader = BatchLoader(Numbered(end=12), global_batch=4, seq_length=S, prefetch=3)
    batches = iter(loader)
    assert [next(batches).sample_ids[0] for _ in range(3)] == [0, 4, 8]
    with pytest.raises(DataError, match="sample 12 of 12"):
        next(batches)
    assert loader.consumed_samples == 12


def test_global_batch_must_divide() -> None:
    with pytest.raises(ConfigError, match=r"batch\.global = 10"):
        BatchLoader(Numbered(), global_batch=10, seq_length=S, dp_size=4)


def test_a_dropped_loader_ends_its_thread_and_reads_no_more() -> None:
    go_on, seen = threading.Event(), []

    class Slow(Numbered):
        def __getitem__(self, k: int) -> TrainingSample:
            seen.append(k)
            assert k == 0 or go_on.wait(10)
            return super().__getitem__(k)

    batches = iter(BatchLoader(Slow(), global_batch=1, seq_length=S, prefetch=4))
    next(batches)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("loader")]
    del batches
    go_on.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert seen in ([0], [0, 1])


def test_a_program_that_leaves_in_the_middle_ends() -> None:
    program = """
import numpy as np
from mega_data.blended_dataset import EndOfDocumentRules
from mega_data.batch_loader import BatchLoader
class Data:
    def __getitem__(self, k): return EndOfDocumentRules().build_sample(np.full(9, k))
batches = iter(BatchLoader(Data(), global_batch=4, seq_length=8))
print(next(batches).sample_ids[0])
raise SystemExit(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=60,
        check=False,
    )
    assert done.returncode == 3
