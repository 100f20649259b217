"""Packing: how full samples are, what the index costs, and how fast one thread of a loader makes batches of them.

A log-normal corpus (median 500 tokens, mean about 1,000) in samples of 8,192. The loader is that of one data rank of 64,
which deals each step of 1,024 samples; its rate is set against what a rank trains: an 8B model on an H100 at half of its
peak, and a 135M model at as much, which no GPU reaches.
"""

from __future__ import annotations

import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import record

from mega_data.batch_loader import BatchLoader, assign_samples_to_ranks
from mega_data.blended_dataset import BlendedDataset, build_blended_datasets
from mega_data.data_config import DataConfig
from mega_data.token_files.indexed_writer import IndexedWriter

DOCUMENTS, SEQ_LENGTH, STEPS = 400_000, 8192, 20
PEAK = 989e12  # FLOP/s of an H100 in bf16
NEEDED = {"8B": 0.5 * PEAK / (6 * 8e9), "135M": 0.5 * PEAK / (6 * 135e6)}  # tokens a second


def corpus(prefix: Path) -> int:
    """Write it; returns its tokens."""
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(np.log(500), 1.2, DOCUMENTS), 100_000).astype(np.int64) + 2
    with IndexedWriter(prefix, "uint16") as writer:
        for part in np.array_split(lengths, 100):
            writer.add_documents(rng.integers(1, 50_000, part.sum(), np.uint16), part)
    return int(lengths.sum())


def opened(prefix: Path, kind: str) -> BlendedDataset:
    """The data set as training has it."""
    raw = {"train": str(prefix), "kind": kind, "seq_length": SEQ_LENGTH, "split": [1], "order": "shuffled"}
    return build_blended_datasets(DataConfig.parse(raw), seed=1, samples={"train": 1}, eod=0)[0]


def rate(dataset: BlendedDataset) -> float:
    """Tokens a processor second of one rank's loader, its share of the dealing included."""
    loader = iter(BatchLoader(dataset, global_batch=1024, seq_length=SEQ_LENGTH, dp_rank=3, dp_size=64, prefetch=0))
    next(loader)
    begin, made = time.process_time(), 0
    for batch in islice(loader, STEPS):
        made += batch.tokens.size
    return made / (time.process_time() - begin)


def balance(dataset: BlendedDataset, ranks: int) -> dict[str, float]:
    """The most work of a rank over the mean, of some steps: dealt by work, and in the order of the numbers."""
    dealt_work, plain = [], []
    for step in range(STEPS):
        work = dataset.estimate_attention_work(range(1024 * step, 1024 * (step + 1)))
        for found, hands in (
            (dealt_work, assign_samples_to_ranks(work, ranks)),
            (plain, np.arange(1024).reshape(ranks, -1)),
        ):
            sums = work[hands].sum(1)
            found.append(sums.max() / sums.mean())
    return {"dealt": float(np.mean(dealt_work)), "by_number": float(np.mean(plain))}


def context_balance(dataset: BlendedDataset, ranks: int) -> float:
    """The most pairs of tokens of a context rank over the mean, of micro-batches of one sample."""
    found = []
    for k in range(200):
        chunks = (dataset[k].position_ids + 1).reshape(2 * ranks, -1).sum(1)
        work = (chunks + chunks[::-1])[:ranks]
        found.append(work.max() / work.mean())
    return float(np.mean(found))


def main() -> None:
    """Measure, print and write the results."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        tokens = corpus(prefix)
        begin = time.process_time()
        packed = opened(prefix, "documents")
        samples = packed.samples_per_epoch
        results["index_microseconds_a_document"] = (time.process_time() - begin) / DOCUMENTS * 1e6
        results["positions_used"] = (tokens - DOCUMENTS) / (samples * SEQ_LENGTH)
        results["tokens_a_second"] = rate(packed)
        results["tokens_a_second_text"] = rate(opened(prefix, "text"))
        results["times_what_a_rank_trains"] = {name: results["tokens_a_second"] / each for name, each in NEEDED.items()}
        results["work_of_data_ranks"] = {ranks: balance(packed, ranks) for ranks in (8, 64, 256)}
        results["work_of_context_ranks"] = {ranks: context_balance(packed, ranks) for ranks in (2, 4, 8)}
    for name, value in results.items():
        print(f"{name}: {value}")
    print(
        record.write(
            "packing", {"documents": DOCUMENTS, "tokens": tokens, "seq_length": SEQ_LENGTH, **results}, ["numpy"]
        )
    )


if __name__ == "__main__":
    main()
