"""Sequences packed into rows of one length by best fit, without attention between them, and divided among data ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_data.batch_loader import StepBatch, assign_samples_to_ranks
from mega_data.kinds.packed_documents import assign_bins_best_fit

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedRows:
    """Sequences packed into rows of S positions.
    A sequence of L tokens takes L - 1 positions, as its last token is only a label.

    Attributes:
        tokens, labels: int64 [R, S]; 0 at padding.
        positions: int64 [R, S], within each sequence.
        documents: int32 [R, S], number of the sequence in its row; 0 at padding.
        positions_of_sequences: row of each sequence, and its positions in it.
    """

    tokens: Ints
    labels: Ints
    positions: Ints
    documents: npt.NDArray[np.int32]
    positions_of_sequences: list[tuple[int, slice]]

    @classmethod
    def pack_sequences(cls, sequences: Sequence[Sequence[int]], length: int, multiple: int) -> PackedRows:
        """Pack sequences into rows of `length` positions, as few rows as best-fit packing needs.
        The number of rows is rounded up to a multiple of `multiple` with empty rows.

        Raises:
            DataError: when a sequence is longer than a row, or has fewer than two tokens.
        """
        sizes = np.array([len(sequence) - 1 for sequence in sequences], np.int64)
        wrong = np.flatnonzero((sizes < 1) | (sizes > length))
        if wrong.size or not sizes.size:
            found = f"{sizes[wrong[0]] + 1} in sequence {wrong[0]}" if wrong.size else "no sequence"
            raise DataError(
                f"each sequence must have from 2 to data.seq_length + 1 = {length + 1} tokens, found {found}"
            )
        bins = assign_bins_best_fit(sizes, length)
        count = -(-int(bins.max() + 1) // multiple) * multiple
        tokens, labels, positions = (np.zeros((count, length), np.int64) for _ in range(3))
        documents, ends, positions_of_sequences = np.zeros((count, length), np.int32), np.zeros(count, np.int64), []
        for sequence, row, size in zip(sequences, bins.tolist(), sizes.tolist(), strict=True):
            here = slice(int(ends[row]), int(ends[row]) + size)
            tokens[row, here], labels[row, here] = sequence[:-1], sequence[1:]
            positions[row, here], documents[row, here] = np.arange(size), documents[row, here.start - 1] + 1
            positions_of_sequences.append((row, here))
            ends[row] = here.stop
        for row, end in enumerate(ends.tolist()):
            positions[row, end:] = np.arange(length - end)
        return cls(tokens, labels, positions, documents, positions_of_sequences)

    def rows_of_rank(self, rank: int, ranks: int) -> Ints:
        """Return the indices, int64 [R / ranks], of the packed rows that one data-parallel rank computes.
        Data rank `rank` of `ranks` gets as many rows as each other rank, with balanced attention work.
        """
        work = np.array([(np.bincount(row) ** 2).sum() for row in self.documents])
        own: Ints = assign_samples_to_ranks(work, ranks)[rank]
        return own

    def make_step_batch(self, rows: Ints, weights: npt.NDArray[np.floating]) -> StepBatch:
        """Return selected packed rows as a batch of an optimizer step.
        `rows` are the indices of the rows; the loss weights of their labels are taken from `weights` [all R rows, S].
        """
        return StepBatch(
            self.tokens[rows], self.labels[rows], weights[rows], self.positions[rows], self.documents[rows], rows
        )
