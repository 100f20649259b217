"""Samples of consecutive sentences, as BERT and T5 train on, in an order of our own or in that of Megatron's data sets.

Megatron shuffles them with a 64-bit Mersenne Twister, which numpy lacks.
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
from mega_data.kinds.masked_lm_samples import Random, make_megatron_random_generator, make_sample_random_generator
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.sampling.document_order import permute_index
from mega_data.sampling.index_cache import Arrays, load_or_build_arrays

SIZE, LAG = 312, 156
UPPER, LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
MATRIX = np.uint64(0xB5026F5AA96619E9)
ONE = np.uint64(1)
TWISTER_BLOCK = 256 * LAG  # numbers generated at a time

Words = npt.NDArray[np.uint64]


def mt19937_64(seed: int) -> Iterator[Words]:
    """Yield the numbers of C++'s `std::mt19937_64(seed)` (Nishimura, 2000) in blocks, uint64 [TWISTER_BLOCK] each."""
    state = np.empty(SIZE + TWISTER_BLOCK, np.uint64)
    word = seed & 0xFFFFFFFFFFFFFFFF
    for i in range(SIZE):
        state[i] = word
        word = (6364136223846793005 * (word ^ word >> 62) + i + 1) & 0xFFFFFFFFFFFFFFFF
    while True:
        for at in range(
            0, TWISTER_BLOCK, LAG
        ):  # a number depends on the one LAG before it, so LAG are computed at once
            old = state[at : at + LAG] & UPPER | state[at + 1 : at + LAG + 1] & LOWER
            state[at + SIZE : at + SIZE + LAG] = state[at + LAG : at + SIZE] ^ old >> ONE ^ (old & ONE) * MATRIX
        yield _temper(state[SIZE:])
        state[:SIZE] = state[TWISTER_BLOCK:]


def _temper(x: Words) -> Words:
    x = x ^ x >> np.uint64(29) & np.uint64(0x5555555555555555)
    x = x ^ x << np.uint64(17) & np.uint64(0x71D67FFFEDA60000)
    x = x ^ x << np.uint64(37) & np.uint64(0xFFF7EEE000000000)
    return x ^ x >> np.uint64(43)


def mt19937_permutation(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return range(count) shuffled by `std::mt19937_64(seed)`: Fisher-Yates from the last position down, int64."""
    order = np.arange(count)
    view = order.data
    last = count - 1
    for block in mt19937_64(seed):
        positions = np.arange(last, max(last - TWISTER_BLOCK, 0), -1)
        drawn = block[: positions.size] % (positions + 1).astype(np.uint64)
        for i, j in zip(positions.tolist(), drawn.tolist(), strict=True):
            view[i], view[j] = view[j], view[i]
        last -= TWISTER_BLOCK
        if last <= 0:
            break
    return order


MAX_SENTENCE = 512  # tokens; Megatron leaves out documents with longer sentences
BLOCK = 1 << 16  # numbers drawn, and documents cut, at a time

Ints = npt.NDArray[np.int64]


class SentenceDocuments:
    """Documents of one data set's share of a split, whose sequences are sentences, to cut samples from.
    Documents have at least `least` sentences each.

    With `longest`, documents of several sentences with a sentence of more tokens than that are left out as well.

    Attributes:
        starts: int64 [D], the first sentence of each document.
        ends: int64 [D], one past its last.
        sums: int64 [sentences + 1], tokens before each sentence of the data set.

    Raises:
        DataError: if no document is left.
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
                f"{part.reader.prefix}: none of its {used.size} documents has at least {least} sentences"
                + (f" of at most {longest} tokens" if longest else ""),
                hint="preprocess the data with --split-sentences, so that each sentence is a sequence of the data set",
            )
        self.starts, self.ends, self._least = starts[used], ends[used], least
        self.sums = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def find_sample_ends(self, tokens: int) -> Ints:
        """Return, for each sentence, one past the last sentence of a sample of about `tokens` tokens that begins at it.
        The result is int64 [sentences].

        A sample ends when it has `tokens` tokens and enough sentences, if it leaves at least two sentences; else with
        its document. Entries of sentences outside of the documents are undefined.
        """
        count = self.sums.size - 1
        ends = np.zeros(count, np.int64)
        ends[self.starts] = self.ends
        np.maximum.accumulate(ends, out=ends)
        closes = np.searchsorted(self.sums, self.sums[:-1] + tokens)
        np.maximum(closes, np.arange(self._least, count + self._least), out=closes)
        return np.where(closes > ends - 2, ends, closes)

    def cut_full_samples(self, tokens: int) -> Ints:
        """Return the sentence ranges (first, end) of samples of about `tokens` tokens, cut from all documents in file order.
        They are the samples of one epoch, int64 [samples, 2].
        """
        closes, rows = self.find_sample_ends(tokens), []
        begins, ends = self.starts, self.ends
        while begins.size:  # the next sample of every document that has one
            until = closes[begins]
            rows.append(np.stack([begins, until], axis=1))
            begins, ends = until[until < ends], ends[until < ends]
        samples = np.concatenate(rows)
        return samples[np.argsort(samples[:, 0])]

    def cut_megatron_samples(self, tokens: int, short_probability: float, seed: int, num_samples: int) -> Ints:
        """Return the samples that Megatron's `build_mapping` cuts, in reading order: (first sentence, end, length) [N, 3].
        They are whole epochs, at least `num_samples` samples.

        Returns:
            int64 [N, 3]: first sentence, one past the last, and the number of tokens to reach, `tokens` or fewer.
        """
        samples = array("q")
        lengths, closes = _draw_lengths(tokens, short_probability, seed), self.find_sample_ends(tokens).data
        with ProgressBar("cutting samples", total=num_samples, unit="samples") as bar:
            while len(samples) < 3 * num_samples:
                for at in range(0, self.starts.size, BLOCK):
                    before = len(samples)
                    self._cut_documents(slice(at, at + BLOCK), tokens, closes, lengths, samples)
                    bar.advance((len(samples) - before) // 3)
        rows = np.frombuffer(samples, np.int64).reshape(-1, 3) if samples else np.empty((0, 3), np.int64)
        return rows[mt19937_permutation(len(rows), seed + 1)]

    def _cut_documents(
        self, documents: slice, tokens: int, closes: memoryview, lengths: Iterator[int], samples: array[int]
    ) -> None:
        """Append one epoch of some documents to `samples`.

        A length is drawn at the begin of each sample, and an unused one at the end of each document.
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
                samples.extend((begin, until, length))
                begin, length = until, next(lengths)


def _draw_lengths(tokens: int, short_probability: float, seed: int) -> Iterator[int]:
    """Yield the target length of each sample: `tokens`, or with `short_probability` a drawn length of at least 2."""
    one_in = int(1 / short_probability + 0.5) if short_probability else 0
    random = np.random.RandomState(seed)
    while True:
        drawn = random.randint(0, 1 << 32, BLOCK, np.uint32).astype(np.int64)
        short = drawn % one_in == 0 if one_in else np.zeros(BLOCK, np.bool_)
        yield from np.where(short, 2 + drawn % (tokens - 1), tokens).tolist()


class SentenceRange(NamedTuple):
    """Sentences [first, last) that make a sample, the number of tokens to trim them to, and the sample's generator."""

    first: int
    last: int
    length: int
    random: Random


class SentenceRanges(Protocol):
    """Interface of sentence ranges: range k gives the sentences of sample k of one data set, read lazily."""

    @property
    def content_key(self) -> str:
        """Text that names everything the sentence ranges depend on; equal texts mean equal ranges."""

    @property
    def samples_per_epoch(self) -> float:
        """Number of sentence ranges in one pass over the data set."""

    def __getitem__(self, k: int, /) -> SentenceRange: ...


@dataclass(frozen=True)
class MegatronSentenceRanges:
    """Sentence ranges bit-identical to Megatron's masked-word data sets (BERT, T5).
    The order depends on the number of samples.

    `tokens` is the length of a sample without special tokens, `least` its minimum number of sentences.

    Raises:
        DataError: if no document can be used; if a sample past the end is read.
    """

    part: DatasetPart
    setting: DatasetContext
    num_samples: int
    tokens: int
    least: int
    short_probability: float

    @cached_property
    def content_key(self) -> str:
        """Text that names everything the sentence ranges depend on; equal texts mean equal ranges."""
        return (
            f"megatron sentences={self.least} seed={self.setting.seed} tokens={self.tokens}"
            f" short={self.short_probability} samples={self.num_samples} {_describe_part(self.part)}"
        )

    @property
    def samples_per_epoch(self) -> float:
        """Approximate number of sentence ranges in one pass over the data set.
        It is approximate because samples end with sentences.
        """
        return self.part.num_tokens / self.tokens

    @cached_property
    def _rows(self) -> npt.NDArray[np.int64]:
        return load_or_build_arrays(self.setting.cache, self.content_key, self._build_rows)["rows"]

    def _build_rows(self) -> Arrays:
        documents = SentenceDocuments(self.part, least=self.least, longest=MAX_SENTENCE)
        rows = documents.cut_megatron_samples(self.tokens, self.short_probability, self.setting.seed, self.num_samples)
        return {"rows": rows}

    def __getitem__(self, k: int, /) -> SentenceRange:
        if k >= len(self._rows):
            raise DataError(
                f"{self.part.reader.prefix}: data.order = megatron is fixed for {len(self._rows)} samples, and sample"
                f" {k} was read",
                hint="start the run with its final number of steps, or set data.order: shuffled",
            )
        first, last, length = self._rows[k].tolist()
        return SentenceRange(first, last, length, make_megatron_random_generator(self.setting.seed, k))


@dataclass(frozen=True)
class SeededSentenceRanges:
    """Sentence ranges as a pure function of seed, content and sample number.
    Megatron's depend on the number of samples instead. Every epoch has each range once, in a drawn order.

    The cuts of a document are equal in all epochs, for samples of the full length; whether a sample is then trimmed to
    a shorter length is drawn for each sample.

    Raises:
        DataError: if no document can be used.
    """

    part: DatasetPart
    setting: DatasetContext
    tokens: int
    least: int
    short_probability: float

    @cached_property
    def content_key(self) -> str:
        """Text that names everything the sentence ranges depend on; equal texts mean equal ranges."""
        return f"drawn short={self.short_probability} seed={self.setting.seed} {self._content_identity}"

    @property
    def _content_identity(self) -> str:
        return f"sentences={self.least} tokens={self.tokens} {_describe_part(self.part)}"

    @property
    def samples_per_epoch(self) -> float:
        """Number of sentence ranges in one pass over the data set."""
        return len(self._rows)

    @cached_property
    def _rows(self) -> npt.NDArray[np.int64]:
        return load_or_build_arrays(self.setting.cache, self._content_identity, self._build_rows)["rows"]

    def _build_rows(self) -> Arrays:
        return {"rows": SentenceDocuments(self.part, least=self.least).cut_full_samples(self.tokens)}

    def __getitem__(self, k: int, /) -> SentenceRange:
        epoch, number = divmod(k, len(self._rows))
        key = xxhash.xxh3_64_intdigest(f"{self.content_key} epoch={epoch}".encode())
        first, last = self._rows[permute_index(number, len(self._rows), key)].tolist()
        random = make_sample_random_generator(self.content_key, k)
        short = random.random_sample() < self.short_probability
        return SentenceRange(first, last, random.randint(2, self.tokens + 1) if short else self.tokens, random)


def _describe_part(part: DatasetPart) -> str:
    return f"data={part.reader.fingerprint} range={part.first}:{part.last}"
