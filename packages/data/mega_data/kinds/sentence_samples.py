"""Sentence ranges of samples: sentences, token length and random stream of sample k, in Megatron's and in seeded order.

`cut_megatron_samples` cuts as Megatron's masked-word data sets do: epoch after epoch, each sample with a length of its own
to reach, all of them shuffled at the end. `cut_full_samples` cuts one epoch, each sample to its full length.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar
from mega_data.kinds.dataset_kind import DatasetContext
from mega_data.kinds.mersenne_twister import mt19937_permutation
from mega_data.kinds.word_masking import Random, create_megatron_stream, create_sample_stream
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.sampling.index_cache import Arrays, load_or_build_arrays
from mega_data.sampling.keyed_permutation import permute_index

LONG = 512  # tokens of a sentence that Megatron leaves its document out for
BLOCK = 1 << 16  # numbers drawn, and documents cut, at a time

Ints = npt.NDArray[np.int64]


class SentenceDocuments:
    """Documents of a data set part with at least `least` sentences, from which samples are cut.

    With `longest`, those of several sentences of which one has more tokens are left out too.

    Attributes:
        starts: int64 [D], the first sentence of each document.
        ends: int64 [D], one past its last.
        sums: int64 [sentences + 1], tokens before each sentence of the data set.

    Raises:
        DataError: when no document is left.
    """

    def __init__(self, part: DatasetPart, *, least: int, longest: int | None = None) -> None:
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

    def find_sample_ends(self, tokens: int) -> Ints:
        """Return the end (one past the last sentence) of a sample of `tokens` that begins at each sentence: int64
        [sentences].

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

    def cut_full_samples(self, tokens: int) -> Ints:
        """Return the first sentence, and one past the last, of each sample of one epoch: int64 [N, 2], in file order."""
        closes, rows = self.find_sample_ends(tokens), []
        begins, ends = self.starts, self.ends
        while begins.size:  # the next sample of every document that has one
            until = closes[begins]
            rows.append(np.stack([begins, until], axis=1))
            begins, ends = until[until < ends], ends[until < ends]
        found = np.concatenate(rows)
        return found[np.argsort(found[:, 0])]

    def cut_megatron_samples(self, tokens: int, short_probability: float, seed: int, num_samples: int) -> Ints:
        """Return the samples of Megatron's `build_mapping`: whole epochs, at least `num_samples`, in reading order.

        Returns:
            int64 [N, 3]: first sentence, one past the last, and the number of tokens to reach, `tokens` or fewer.
        """
        found = array("q")
        lengths, closes = _draw_lengths(tokens, short_probability, seed), self.find_sample_ends(tokens).data
        with ProgressBar("cutting samples", total=num_samples, unit="samples") as bar:
            while len(found) < 3 * num_samples:
                for at in range(0, self.starts.size, BLOCK):
                    before = len(found)
                    self._cut_documents(slice(at, at + BLOCK), tokens, closes, lengths, found)
                    bar.advance((len(found) - before) // 3)
        rows = np.frombuffer(found, np.int64).reshape(-1, 3) if found else np.empty((0, 3), np.int64)
        return rows[mt19937_permutation(len(rows), seed + 1)]

    def _cut_documents(
        self, documents: slice, tokens: int, closes: memoryview, lengths: Iterator[int], found: array[int]
    ) -> None:
        """Append one epoch of some documents. A length is drawn at each sample's begin, and an unused one at each
        document's end.
        """
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


def _draw_lengths(tokens: int, short_probability: float, seed: int) -> Iterator[int]:
    """Yield the target length of each sample: `tokens`, or with a probability fewer, at least 2."""
    one_in = int(1 / short_probability + 0.5) if short_probability else 0
    random = np.random.RandomState(seed)
    while True:
        drawn = random.randint(0, 1 << 32, BLOCK, np.uint32).astype(np.int64)
        short = drawn % one_in == 0 if one_in else np.zeros(BLOCK, np.bool_)
        yield from np.where(short, 2 + drawn % (tokens - 1), tokens).tolist()


class SentenceRange(NamedTuple):
    """Sentences [first, last) of a data set, the number of tokens to trim them to, and the sample's random stream."""

    first: int
    last: int
    length: int
    random: Random


class SentenceRanges(Protocol):
    """Sentence ranges of the samples of one data set, read lazily."""

    @property
    def identity(self) -> str:
        """Description of everything that range k depends on."""

    @property
    def samples_per_epoch(self) -> float:
        """Number of ranges in one pass over the data set."""

    def __getitem__(self, k: int, /) -> SentenceRange: ...


@dataclass(frozen=True)
class MegatronSentenceRanges:
    """Sentence ranges bit-identical to Megatron's masked-word data sets, whose order depends on the requested number of
    samples.

    `tokens` is the length of a sample without special tokens, `least` the fewest sentences it may have.

    Raises:
        DataError: when no document can be used; when a sample past the end is read.
    """

    part: DatasetPart
    setting: DatasetContext
    num_samples: int
    tokens: int
    least: int
    short_probability: float

    @cached_property
    def identity(self) -> str:
        """Description of everything that range k depends on."""
        return (
            f"megatron sentences={self.least} seed={self.setting.seed} tokens={self.tokens}"
            f" short={self.short_probability} samples={self.num_samples} {_describe_part(self.part)}"
        )

    @property
    def samples_per_epoch(self) -> float:
        """Approximate number of ranges in one pass over the data set, because samples end with sentences."""
        return self.part.num_tokens / self.tokens

    @cached_property
    def _rows(self) -> npt.NDArray[np.int64]:
        return load_or_build_arrays(self.setting.cache, self.identity, self._build_rows)["rows"]

    def _build_rows(self) -> Arrays:
        documents = SentenceDocuments(self.part, least=self.least, longest=LONG)
        rows = documents.cut_megatron_samples(self.tokens, self.short_probability, self.setting.seed, self.num_samples)
        return {"rows": rows}

    def __getitem__(self, k: int, /) -> SentenceRange:
        if k >= len(self._rows):
            raise DataError(
                f"{self.part.reader.prefix}: sample {k} of {len(self._rows)}: order megatron is made for the run's total",
                hint="a longer run needs a larger total from its start, or data.order: shuffled",
            )
        first, last, length = self._rows[k].tolist()
        return SentenceRange(first, last, length, create_megatron_stream(self.setting.seed, k))


@dataclass(frozen=True)
class SeededSentenceRanges:
    """Sentence ranges as a pure function of seed, content and k. Every epoch has each range once, in an order of its
    own.

    A document is cut in the same places each time, its samples to their full length if it has one; that one is to be
    shorter is drawn for each sample.

    Raises:
        DataError: when no document can be used.
    """

    part: DatasetPart
    setting: DatasetContext
    tokens: int
    least: int
    short_probability: float

    @cached_property
    def identity(self) -> str:
        """Description of everything that range k depends on."""
        return f"drawn short={self.short_probability} seed={self.setting.seed} {self._content_identity}"

    @property
    def _content_identity(self) -> str:
        return f"sentences={self.least} tokens={self.tokens} {_describe_part(self.part)}"

    @property
    def samples_per_epoch(self) -> float:
        """Number of ranges in one pass over the data set."""
        return len(self._rows)

    @cached_property
    def _rows(self) -> npt.NDArray[np.int64]:
        return load_or_build_arrays(self.setting.cache, self._content_identity, self._build_rows)["rows"]

    def _build_rows(self) -> Arrays:
        return {"rows": SentenceDocuments(self.part, least=self.least).cut_full_samples(self.tokens)}

    def __getitem__(self, k: int, /) -> SentenceRange:
        epoch, number = divmod(k, len(self._rows))
        key = xxhash.xxh3_64_intdigest(f"{self.identity} epoch={epoch}".encode())
        first, last = self._rows[permute_index(number, len(self._rows), key)].tolist()
        random = create_sample_stream(self.identity, k)
        short = random.random_sample() < self.short_probability
        return SentenceRange(first, last, random.randint(2, self.tokens + 1) if short else self.tokens, random)


def _describe_part(part: DatasetPart) -> str:
    return f"data={part.reader.fingerprint} range={part.first}:{part.last}"
