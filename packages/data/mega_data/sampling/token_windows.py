"""Token windows of one data set in three orders. A window is S + 1 tokens: S inputs, S labels.

`ShuffledTokenWindows`, the default, and `StableTokenWindows` are pure functions of (seed, content, k) and independent of
the total, so a longer run begins exactly like a shorter one. The first reads documents in an order drawn by the seed;
the second in file order, with one read per sample and no index to build. `MegatronTokenWindows` is bit-identical to
Megatron's GPT data set, whose order depends on the requested number of samples.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import DataError
from mega_data.sampling.document_order import DocumentOrder, find_token_range, permute_index, splitmix64
from mega_data.sampling.index_cache import Arrays, load_or_build_arrays
from mega_data.token_files.indexed_reader import IndexedReader, Tokens


class StableTokenWindows:
    """Token windows of S + 1 tokens (sequence length S) of a data set, in file order.
    They cover the T tokens of the sequences [first, last). The cuts differ from epoch to epoch.

    The tokens form a circle. An epoch draws a starting point, lays T // S windows of S + 1 tokens end to end from there
    (neighbors share one token, the label of one and the first input of the next), and visits them in a drawn order. So
    every token is a label once per epoch, except the T % S tokens before the starting point, which differs between
    epochs, as do the cuts between windows. Documents stay in file order, and windows cross their ends. With fewer than
    S + 1 tokens, a window repeats the circle.

    The draws are keyed by (seed, content of the data set, range, epoch), not by its path or its position in the blend,
    so moved files give the same order.

    Raises:
        DataError: if the range has no token.
    """

    order = "stable"

    def __init__(self, reader: IndexedReader, first: int, last: int, *, seq_length: int, seed: int) -> None:
        self._begin, end = find_token_range(reader, first, last)
        self._reader, self._first, self._last = reader, first, last
        self._seq_length, self._seed, self._count = seq_length, seed, end - self._begin
        self._per_epoch = max(1, self._count // seq_length)

    @property
    def samples_per_epoch(self) -> float:
        """Number of token windows in an epoch, at least 1."""
        return self._per_epoch

    @cached_property
    def content_key(self) -> str:
        """Text that names everything the token windows depend on; equal texts mean equal windows."""
        content = f"data={self._reader.fingerprint} range={self._first}:{self._last}"
        return f"{self.order} seed={self._seed} seq={self._seq_length} {content}"

    def locate_window(self, k: int) -> int:
        """Return the position of the first token of window `k` in the circle that the data set's tokens form."""
        return compute_window_start(k, self._count, self._seq_length, self.content_key)

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        """Return the tokens of window `k`, int64 [sequence length + 1]."""
        at, left, parts = self.locate_window(k), self._seq_length + 1, []
        while left:
            parts += self._read_tokens(at, min(left, self._count - at))
            left -= min(left, self._count - at)
            at = 0
        return np.concatenate(parts, dtype=np.int64)

    def _read_tokens(self, at: int, count: int) -> list[Tokens]:
        """Return the tokens [at, at + count) of the circular order, in parts."""
        return [self._reader.tokens[self._begin + at : self._begin + at + count]]


class ShuffledTokenWindows(StableTokenWindows):
    """Token windows of S + 1 tokens (sequence length S) over documents in a drawn order.
    The order is drawn by seed, content and range. The cuts differ from epoch to epoch.

    The order is a permutation by `permute_index`, equal in all epochs, whose windows and their order differ. The
    positions of documents follow from the permutation and their lengths. The index stores the start of every 16th
    document, 8 bytes each (half a byte per document: 0.5 GB for 1e9, through a memory map that the ranks of a machine
    share); it is built by one pass over the lengths when the first sample is read. A sample reads up to 16 lengths
    besides those of its own documents, and each document from its position in the file: on disks with slow seeks,
    shuffle the file once (`mega data shuffle`) and read it in order `stable`.
    """

    order = "shuffled"

    def __init__(
        self, reader: IndexedReader, first: int, last: int, *, seq_length: int, seed: int, cache: Path
    ) -> None:
        super().__init__(reader, first, last, seq_length=seq_length, seed=seed)
        self._cache = cache

    @cached_property
    def _document_order(self) -> DocumentOrder:
        return DocumentOrder(self._reader, self._first, self._last, seed=self._seed, cache=self._cache)

    def _read_tokens(self, at: int, count: int) -> list[Tokens]:
        return list(self._document_order.read_tokens(at, count))


class MegatronTokenWindows:
    """Token windows of a data set in the order that Megatron draws for `num_samples` samples.
    They cover the sequences [first, last).

    Raises:
        DataError: if the range has no token; if a sample past the end is read.
    """

    def __init__(
        self, reader: IndexedReader, first: int, last: int, *, seq_length: int, seed: int, num_samples: int, cache: Path
    ) -> None:
        begin, end = find_token_range(reader, first, last)
        self._reader, self.samples_per_epoch = reader, (end - begin) / seq_length
        self.content_key = (
            f"megatron seed={seed} seq={seq_length} samples={num_samples} data={reader.fingerprint}"
            f" range={first}:{last}"
        )
        arrays = load_or_build_arrays(
            cache,
            self.content_key,
            lambda: build_megatron_indices(reader.lengths, first, last, seq_length, num_samples, seed),
        )
        self._documents, self._samples, self._shuffle = (arrays[name] for name in ("document", "sample", "shuffle"))

    def __len__(self) -> int:
        """Return the number of token windows: whole epochs, so at least `num_samples`."""
        return int(self._shuffle.size)

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        """Return the tokens of window `k`, int64 [sequence length + 1]."""
        if k >= len(self):
            raise DataError(
                f"{self._reader.prefix}: data.order = megatron is fixed for {len(self)} samples, and sample {k} was read",
                hint="start the run with its final number of steps, or set data.order: stable",
            )
        at = int(self._shuffle[k])
        (first, begin), (last, end) = self._samples[at : at + 2].tolist()
        parts = []
        for row in range(first, last + 1):
            offset = begin if row == first else 0
            length = end + 1 - offset if row == last else None
            parts.append(self._reader.read_sequence(int(self._documents[row]), offset, length))
        return np.concatenate(parts, dtype=np.int64)


def compute_window_start(k: int, count: int, width: int, content_key: str) -> int:
    """Return the pseudorandom start of token window `k` of `width` positions in a circle of `count` positions.
    The draws are keyed by `content_key`.

    The start of window `k` follows from pseudorandom draws keyed by `content_key`.
    """
    per_epoch = max(1, count // width)
    epoch, window = divmod(k, per_epoch)
    key = xxhash.xxh3_64_intdigest(f"{content_key} epoch={epoch}".encode())
    return (splitmix64(key) + permute_index(window, per_epoch, key) * width) % count


def build_megatron_indices(
    lengths: npt.NDArray[np.int32], first: int, last: int, seq_length: int, num_samples: int, seed: int
) -> Arrays:
    """Return Megatron's document, sample and shuffle indices over sequences of a data set.
    They are the sequences [first, last), with these sequence `lengths`.

    Returns:
        document: int32 [E * (last - first)], sequence numbers of E epochs.
        sample: int32 [N + 1, 2] (int64 for values of 2^31 or more), row in `document` and offset of the start of sample i.
        shuffle: uint32 [N] (int64 from 2^32 - 2 on), number of the k-th sample in reading order.
    """
    per_epoch = int(lengths[first:last].sum(dtype=np.int64))
    epochs = max(1, -(-(num_samples * seq_length + 1) // per_epoch))
    total = (epochs * per_epoch - 1) // seq_length
    before_last = ((epochs - 1) * per_epoch - 1) // seq_length
    # The last epoch is shuffled by itself when the run uses less than 80 % of it.
    separate_last = epochs > 1 and num_samples - before_last < int(0.80 * ((per_epoch - 1) // seq_length))
    random = np.random.RandomState(seed)

    groups = [epochs - 1, 1] if separate_last else [epochs]
    sequences = np.arange(first, last, dtype=np.int32)
    document = np.concatenate([_shuffle_in_place(np.tile(sequences, count), random) for count in groups])

    sizes = lengths[document]
    ends = np.cumsum(sizes, dtype=np.int64)
    positions = np.arange(total + 1, dtype=np.int64) * seq_length
    rows = np.searchsorted(ends, positions, side="right")
    rows[0] = 0  # Megatron begins in the first sequence even if that is empty
    largest = max(document.size, int(lengths.max()))
    sample = np.empty((total + 1, 2), np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    sample[:, 0] = rows
    sample[:, 1] = positions - (ends[rows] - sizes[rows])

    kind = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    cuts = [0, before_last, total] if separate_last else [0, total]
    spans = [np.arange(a, b, dtype=kind) for a, b in pairwise(cuts)]
    shuffle = np.concatenate([_shuffle_in_place(span, random) for span in spans])
    return {"document": document, "sample": sample, "shuffle": shuffle}


def _shuffle_in_place(values: npt.NDArray[Any], random: np.random.RandomState) -> npt.NDArray[Any]:
    random.shuffle(values)
    return values
