"""Packed documents in any layout, against the same documents one by one in one process: each in a row of its own.

`python tests/parity/packing.py` holds every layout of up to four ranks against it.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from parity.cases import all_layouts
from ranks import run_ranks

from mega_data.batch_loader import BatchLoader, StepBatch
from mega_data.data_config import DataConfig
from mega_data.kinds.dataset_kind import DatasetContext
from mega_data.kinds.packed_documents import PackedSamples
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.token_files.indexed_reader import IndexedReader, get_loss_mask_prefix
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_data.token_files.loss_mask import LossWeights
from mega_trainer.config.run_config import RunConfig
from mega_trainer.verify.case_comparison import (
    TOLERANCE,
    RankFindings,
    compare_cases_with_outcomes,
    merge_findings_by_case,
)
from mega_trainer.verify.case_trainer import SingleProcessOutcomes
from mega_trainer.verify.layout_case import LayoutCase, group_cases_by_rank_count

RANKS = 4
TOKENS = 53  # ids that all of the models have
# Of two rows a loss or a draw that is not a sum over tokens makes something else than of one with the tokens of both.
WITHOUT = {
    "moe": {"aux_loss": 0.0, "z_loss": 0.0},
    # its layer of further tokens routes the last token of a document with what stands behind, and the bias follows the load
    "deepseek": {"aux_loss": 0.0, "bias_rate": 0.0}, "hybrid": {"aux_loss": 0.0, "z_loss": 0.0},
}  # fmt: skip
# whose dropout, in attention too, is part of it; that reads a text beside; whose rows hold images; whose chunks are cut by place
NOT_PACKED = ("tied", "t5", "vision", "retro")


def plain_layouts() -> list[LayoutCase]:
    """Every layout of up to four ranks of the models whose loss is a sum over tokens."""
    found = []
    for case in all_layouts():
        if case.ranks <= RANKS and case.name not in NOT_PACKED:
            model = {**case.model, "embedding_dropout": 0.0, "residual_dropout": 0.0}
            if "moe" in model:
                model["moe"] = {**model["moe"], **WITHOUT[case.name]}
            if indexer := (model.get("mla") or {}).get("indexer"):  # whose loss is a mean over a sequence
                model["mla"] = {**model["mla"], "indexer": {**indexer, "kl_loss": 0.0}}
            found.append(replace(case, model=model))
    return [case for case in found if not (case.model.get("moe") or {}).get("sinkhorn")]  # a choice over the batch


def make_corpus(folder: Path, length: int, count: int) -> None:
    """Documents that fill, packed by best fit, `count` samples of `length`, but for one position of the last; and weights."""
    rng = np.random.default_rng([length, count])
    prefix = folder / f"{length}-{count}"
    while True:
        cuts = [np.sort(rng.choice(np.arange(1, length), rng.integers(0, 5), replace=False)) for _ in range(count)]
        sizes = np.concatenate([np.diff(cut, prepend=0, append=length) for cut in cuts])
        sizes[-1] -= sizes[-1] > 1
        with IndexedWriter(prefix, "int32") as writer:
            writer.add_documents(rng.integers(0, TOKENS, (sizes + 1).sum()), sizes + 1)
        if samples_of(folder, length, count, weighted=False).samples_per_epoch == count:
            break
    with IndexedWriter(get_loss_mask_prefix(prefix), "uint8") as writer:
        writer.add_documents(rng.choice([0, 1, 2, 4], (sizes + 1).sum()).astype(np.uint8), sizes + 1)


def samples_of(folder: Path, length: int, count: int, *, weighted: bool = True) -> PackedSamples:
    """The corpus, packed."""
    reader = IndexedReader(folder / f"{length}-{count}")
    weights = LossWeights(reader) if weighted else None
    config = DataConfig.parse({"train": "-", "seq_length": length})
    return PackedSamples(
        DatasetPart(reader, 0, len(reader), None, "documents"), DatasetContext(config, 1, None, folder), weights=weights
    )


def packed(folder: Path, config: RunConfig, step: int, rank: int, ranks: int, closed: bool) -> StepBatch:
    """A step of the loader: an epoch of the corpus, which fills it."""
    length, size = config.data.seq_length, config.batch.global_
    return next(iter(BatchLoader(
        samples_of(folder, length, size), global_batch=size, seq_length=length, dp_rank=rank, dp_size=ranks,
        consumed_samples=step * size, prefetch=0,
    )))  # fmt: skip


def one_by_one(
    folder: Path, config: RunConfig, step: int, rank: int, ranks: int, closed: bool, *, count: int
) -> StepBatch:
    """The corpus's documents as they stand in the file, each in a row of its own, and nothing said of documents.

    Where a token sees what stands behind it, the rest of its row is another document.
    """
    length = config.data.seq_length
    prefix = folder / f"{length}-{count}"
    reader, weights = IndexedReader(prefix), IndexedReader(get_loss_mask_prefix(prefix)).tokens
    rows, rest = np.zeros((3, len(reader), length)), np.ones((len(reader), length), np.int64)
    for row, (start, size) in enumerate(zip(reader.pointers // 4, reader.lengths, strict=True)):
        read = reader.tokens[start : start + size]
        rows[:, row, : size - 1] = read[:-1], read[1:], weights[start + 1 : start + size]
        rest[row, : size - 1] = 0
    return StepBatch(
        tokens=rows[0].astype(np.int64), labels=rows[1].astype(np.int64), loss_weights=rows[2].astype(np.float32),
        position_ids=np.tile(np.arange(length), (len(reader), 1)), sample_ids=np.arange(len(reader)),
        document_ids=None if config.model.causal else rest,
    )  # fmt: skip


def sweep_packed(cases: Sequence[LayoutCase], folder: Path) -> list[RankFindings | None]:
    """On each of the ranks: every case in turn, on packed documents; the reference on single ones."""

    def single(case: LayoutCase) -> LayoutCase:
        documents = len(IndexedReader(folder / f"{case.length}-{case.batch}"))
        return replace(case.single, batch=documents, micro=documents)

    (count,) = {case.batch for case in cases}
    references = SingleProcessOutcomes(
        ((one, one.steps) for one in cases), single, partial(one_by_one, folder, count=count)
    )
    return compare_cases_with_outcomes(cases, references, partial(packed, folder))


def steps_of(case: LayoutCase) -> int:
    """Two; of delta nets one: the gradient of nine layers of them moves by 600 times what is changed in the weights
    (measured), and a document that stands elsewhere in its row is rounded otherwise."""
    return 1 if any("delta" in layer or "kda" in layer for layer in case.model.get("layers") or ()) else 2


def problems(cases: Sequence[LayoutCase], ranks: int) -> list[str]:
    """Of layouts on so many ranks, what is wrong."""
    cases = [replace(case, steps=steps_of(case)) for case in cases]
    found: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for length, count in {(case.length, case.batch) for case in cases}:
            make_corpus(Path(scratch), length, count)
        for count in sorted({case.batch for case in cases}):
            part = [case for case in cases if case.batch == count]
            results = merge_findings_by_case(part, run_ranks(sweep_packed, ranks, part, Path(scratch), timeout=3600))
            found += [problem for one in results if (problem := one.describe_problem(TOLERANCE))]
            worst = max(max(one.errors.values()) for one in results)
            print(
                f"{len(part)} layouts on {ranks} ranks, steps of {count}: errors up to 1e{math.ceil(math.log10(worst))}"
            )
    return found


def main() -> int:
    """All of them; 1 when one disagrees."""
    cases = plain_layouts()
    wrong = [problem for part in group_cases_by_rank_count(cases, 100) for problem in problems(part, part[0].ranks)]
    print("\n".join(wrong) or f"packed, {len(cases)} layouts agree with the documents one by one to {TOLERANCE:g}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
