"""Which tokens sample k of one data set holds, in the two orders. A sample is S + 1 tokens: S inputs, S labels.

`StableSamples`, the default, is a pure function of (seed, content, k): it has no index to build, to cache or to wait
for, and knows no total, so a longer run begins exactly like a shorter one. `MegatronSamples` is bit-identical to
Megatron's GPT data set, whose order depends on the number of samples asked for.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import DataError
from mega_data.index_cache import Arrays, cached_arrays
from mega_data.indexed import IndexedReader
from mega_data.permutation import mix, permuted


class StableSamples:
    """Sample k of the sequences [first, last) of a data set of T tokens in that range.

    An epoch lays T // S windows of S + 1 tokens end to end (neighbours share one token, the label of one and the first
    input of the next) around the tokens taken as a circle, from a starting point drawn for the epoch, and visits them
    in an order drawn for the epoch. So every token is a label once per epoch, but for the T % S tokens before the
    starting point: another place each time, as are the cuts between windows. Documents stay in the order of the file
    and a window runs across their ends. Fewer than S + 1 tokens go around the circle more than once.

    The draws are keyed by (seed, content of the data set, range, epoch): not by a path, so moving files changes
    nothing, and not by the place in the blend.

    Raises:
        DataError: when the range holds no token.
    """

    def __init__(self, reader: IndexedReader, first: int, last: int, *, seq_length: int, seed: int) -> None:
        begin, end = token_range(reader, first, last)
        self._tokens = reader.tokens[begin:end]
        self._seq_length = seq_length
        self._per_epoch = max(1, (end - begin) // seq_length)
        self.samples_per_epoch = float(self._per_epoch)
        self.identity = f"stable seed={seed} seq={seq_length} data={reader.fingerprint} range={first}:{last}"

    def start(self, k: int) -> int:
        """Position of the first token of sample `k` within the range."""
        epoch, window = divmod(k, self._per_epoch)
        key = xxhash.xxh3_64_intdigest(f"{self.identity} epoch={epoch}".encode())
        return (mix(key) + permuted(window, self._per_epoch, key) * self._seq_length) % self._tokens.size

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        """int64 [S + 1]."""
        start = self.start(k)
        end = start + self._seq_length + 1
        if end <= self._tokens.size:
            return self._tokens[start:end].astype(np.int64)
        return self._tokens.take(np.arange(start, end), mode="wrap").astype(np.int64)


class MegatronSamples:
    """Sample k of the sequences [first, last) in the order Megatron draws for `num_samples` samples.

    Raises:
        DataError: when the range holds no token; when a sample past the end is read.
    """

    def __init__(
        self, reader: IndexedReader, first: int, last: int, *, seq_length: int, seed: int, num_samples: int, cache: Path
    ) -> None:
        begin, end = token_range(reader, first, last)
        self._reader, self.samples_per_epoch = reader, (end - begin) / seq_length
        self.identity = (
            f"megatron seed={seed} seq={seq_length} samples={num_samples} data={reader.fingerprint}"
            f" range={first}:{last}"
        )
        arrays = cached_arrays(
            cache, self.identity, lambda: megatron_indices(reader.lengths, first, last, seq_length, num_samples, seed)
        )
        self._documents, self._samples, self._shuffle = (arrays[name] for name in ("document", "sample", "shuffle"))

    def __len__(self) -> int:
        """Number of samples: whole epochs, so at least as many as were asked for."""
        return int(self._shuffle.size)

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        """int64 [S + 1]."""
        if k >= len(self):
            raise DataError(
                f"{self._reader.prefix}: sample {k} of {len(self)}: order megatron is made for the run's total",
                hint="a longer run needs a larger total from its start, or data.order: stable",
            )
        at = int(self._shuffle[k])
        (first, begin), (last, end) = self._samples[at : at + 2].tolist()
        parts = []
        for row in range(first, last + 1):
            offset = begin if row == first else 0
            length = end + 1 - offset if row == last else None
            parts.append(self._reader.read(int(self._documents[row]), offset, length))
        return np.concatenate(parts, dtype=np.int64)


def megatron_indices(
    lengths: npt.NDArray[np.int32], first: int, last: int, seq_length: int, num_samples: int, seed: int
) -> Arrays:
    """Megatron's three indices over the sequences [first, last) of a data set with these `lengths`.

    Returns:
        document: int32 [E * (last - first)], sequence numbers, E epochs of them.
        sample: int32 [N + 1, 2] (int64 when 31 bits do not do), row in `document` and offset where sample i begins.
        shuffle: uint32 [N] (int64 from 2^32 - 2 on), which of them is the k-th to be read.
    """
    per_epoch = int(lengths[first:last].sum(dtype=np.int64))
    epochs = max(1, -(-(num_samples * seq_length + 1) // per_epoch))
    total = (epochs * per_epoch - 1) // seq_length
    before_last = ((epochs - 1) * per_epoch - 1) // seq_length
    # The last epoch is shuffled by itself when the run uses less than 80 % of it.
    apart = epochs > 1 and num_samples - before_last < int(0.80 * ((per_epoch - 1) // seq_length))
    random = np.random.RandomState(seed)

    groups = [epochs - 1, 1] if apart else [epochs]
    sequences = np.arange(first, last, dtype=np.int32)
    document = np.concatenate([_shuffled(np.tile(sequences, count), random) for count in groups])

    sizes = lengths[document]
    ends = np.cumsum(sizes, dtype=np.int64)
    positions = np.arange(total + 1, dtype=np.int64) * seq_length
    rows = np.searchsorted(ends, positions, side="right")
    rows[0] = 0  # their walk begins in the first sequence even if that is empty
    largest = max(document.size, int(lengths.max()))
    sample = np.empty((total + 1, 2), np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    sample[:, 0] = rows
    sample[:, 1] = positions - (ends[rows] - sizes[rows])

    kind = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    cuts = [0, before_last, total] if apart else [0, total]
    spans = [np.arange(a, b, dtype=kind) for a, b in pairwise(cuts)]
    shuffle = np.concatenate([_shuffled(span, random) for span in spans])
    return {"document": document, "sample": sample, "shuffle": shuffle}


def _shuffled(values: npt.NDArray[Any], random: np.random.RandomState) -> npt.NDArray[Any]:
    random.shuffle(values)
    return values


def token_range(reader: IndexedReader, first: int, last: int) -> tuple[int, int]:
    """Where the tokens of the sequences [first, last) begin and end, in tokens.

    Raises:
        DataError: when there are none.
    """
    bounds = [
        int(reader.pointers[i]) // reader.dtype.itemsize if i < len(reader) else reader.num_tokens
        for i in (first, last)
    ]
    if bounds[0] >= bounds[1]:
        raise DataError(f"{reader.prefix}: no token in its sequences {first} to {last} (it has {len(reader)})")
    return bounds[0], bounds[1]
