"""Samples of whole sentences, for data sets whose sequences are sentences and whose documents are ranges of them.

`megatron_samples` cuts as Megatron's masked-word data sets do: epoch after epoch, each sample with a length of its own
to reach, all of them shuffled at the end. `whole_samples` cuts one epoch, each sample to its full length.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_common.log import ProgressBar
from mega_data.kinds.mersenne import shuffled
from mega_data.order.parts import Part

LONG = 512  # tokens of a sentence that Megatron leaves its document out for
BLOCK = 1 << 16  # numbers drawn, and documents cut, at a time

Ints = npt.NDArray[np.int64]


class Sentences:
    """The documents of a part from which samples are cut: those of `least` sentences and more.

    With `longest`, those of several sentences of which one has more tokens are left out too.

    Attributes:
        starts: int64 [D], the first sentence of each document.
        ends: int64 [D], one past its last.
        sums: int64 [sentences + 1], tokens before each sentence of the data set.

    Raises:
        DataError: when no document is left.
    """

    def __init__(self, part: Part, *, least: int, longest: int | None = None) -> None:
        lengths, bounds = part.reader.lengths, part.reader.document_index
        low, high = np.searchsorted(bounds, part.first), np.searchsorted(bounds, part.last, side="right")
        starts, ends = bounds[low : high - 1], bounds[low + 1 : high]
        used = ends - starts >= least
        if longest is not None:
            long = np.concatenate([[0], np.cumsum(lengths > longest)])
            used &= (ends - starts == 1) | (long[ends] == long[starts])
        if not used.any():
            raise DataError(
                f"{part.reader.prefix}: none of {used.size} documents has {least} sentences or more"
                + (f", of {longest} tokens or fewer" if longest else ""),
                hint="a sentence is a sequence of the data set; mega data preprocess --split-sentences makes such",
            )
        self.starts, self.ends, self._least = starts[used], ends[used], least
        self.sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def closes(self, tokens: int) -> Ints:
        """One past the last sentence of a sample of `tokens` that begins at each sentence: int64 [sentences].

        It ends where it has the tokens and enough sentences and leaves two or more, else with its document. Entries
        of sentences outside of the documents mean nothing.
        """
        count = self.sums.size - 1
        ends = np.zeros(count, np.int64)
        ends[self.starts] = self.ends
        np.maximum.accumulate(ends, out=ends)
        closes = np.searchsorted(self.sums, self.sums[:-1] + tokens)
        np.maximum(closes, np.arange(self._least, count + self._least), out=closes)
        return np.where(closes > ends - 2, ends, closes)

    def whole_samples(self, tokens: int) -> Ints:
        """First sentence, and one past the last, of each sample of one epoch: int64 [N, 2], in the order of the file."""
        closes, rows = self.closes(tokens), []
        begins, ends = self.starts, self.ends
        while begins.size:  # the next sample of every document that has one
            until = closes[begins]
            rows.append(np.stack([begins, until], axis=1))
            begins, ends = until[until < ends], ends[until < ends]
        found = np.concatenate(rows)
        return found[np.argsort(found[:, 0])]

    def megatron_samples(self, tokens: int, short_probability: float, seed: int, num_samples: int) -> Ints:
        """Megatron's `build_mapping`: whole epochs of samples, at least `num_samples`, in the order they are read.

        Returns:
            int64 [N, 3]: first sentence, one past the last, and the number of tokens to reach, `tokens` or fewer.
        """
        found = array("q")
        lengths, closes = _drawn_lengths(tokens, short_probability, seed), self.closes(tokens).data
        with ProgressBar("cutting samples", total=num_samples, unit="samples") as bar:
            while len(found) < 3 * num_samples:
                for at in range(0, self.starts.size, BLOCK):
                    before = len(found)
                    self._cut(slice(at, at + BLOCK), tokens, closes, lengths, found)
                    bar.advance((len(found) - before) // 3)
        rows = np.frombuffer(found, np.int64).reshape(-1, 3) if found else np.empty((0, 3), np.int64)
        return rows[shuffled(len(rows), seed + 1)]

    def _cut(
        self, documents: slice, tokens: int, closes: memoryview, lengths: Iterator[int], found: array[int]
    ) -> None:
        """One epoch of some documents. A length is drawn at each begin, and one that nothing has at each document's end."""
        sums, least = self.sums.data, self._least
        for begin, end in zip(self.starts[documents].tolist(), self.ends[documents].tolist(), strict=True):
            length = next(lengths)
            while begin < end:
                if length == tokens:
                    until = closes[begin]
                else:
                    until = max(bisect_left(sums, sums[begin] + length, begin), begin + least)
                    until = end if until > end - 2 else until
                found.extend((begin, until, length))
                begin, length = until, next(lengths)


def _drawn_lengths(tokens: int, short_probability: float, seed: int) -> Iterator[int]:
    """How many tokens one sample after another is to reach: `tokens`, or with a probability fewer, 2 at least."""
    one_in = int(1 / short_probability + 0.5) if short_probability else 0
    random = np.random.RandomState(seed)
    while True:
        drawn = random.randint(0, 1 << 32, BLOCK, np.uint32).astype(np.int64)
        short = drawn % one_in == 0 if one_in else np.zeros(BLOCK, np.bool_)
        yield from np.where(short, 2 + drawn % (tokens - 1), tokens).tolist()
