"""Which sentences sample k has, how long it is to become, and what it draws its random numbers with; in both orders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import DataError
from mega_data.kinds.base import Setting
from mega_data.kinds.masking import Random, drawn_random, megatron_random
from mega_data.kinds.sentences import LONG, Sentences
from mega_data.order.index_cache import Arrays, cached_arrays
from mega_data.order.parts import Part
from mega_data.order.permutation import permuted


class Cut(NamedTuple):
    """The sentences [first, last) of a data set, the number of tokens to cut them to, and the sample's random stream."""

    first: int
    last: int
    length: int
    random: Random


class Cuts(Protocol):
    """The cuts of one data set; nothing of it is read before it is asked for."""

    @property
    def identity(self) -> str:
        """All that cut k depends on."""

    @property
    def samples_per_epoch(self) -> float:
        """Cuts that come to one pass over the data set."""

    def __getitem__(self, k: int, /) -> Cut: ...


@dataclass(frozen=True)
class MegatronCuts:
    """Bit-identical to Megatron's masked-word data sets, whose order depends on the number of samples asked for.

    `tokens` is the length of a sample without special tokens, `least` the fewest sentences it may have.

    Raises:
        DataError: when no document can be used; when a sample past the end is read.
    """

    part: Part
    setting: Setting
    wanted: int
    tokens: int
    least: int
    short_probability: float

    @cached_property
    def identity(self) -> str:
        """See `Cuts`."""
        return (
            f"megatron sentences={self.least} seed={self.setting.seed} tokens={self.tokens}"
            f" short={self.short_probability} samples={self.wanted} {_where(self.part)}"
        )

    @property
    def samples_per_epoch(self) -> float:
        """See `Cuts`: about, for samples end with sentences."""
        return self.part.tokens / self.tokens

    @cached_property
    def _rows(self) -> npt.NDArray[np.int64]:
        return cached_arrays(self.setting.cache, self.identity, self._cut)["rows"]

    def _cut(self) -> Arrays:
        documents = Sentences(self.part, least=self.least, longest=LONG)
        rows = documents.megatron_samples(self.tokens, self.short_probability, self.setting.seed, self.wanted)
        return {"rows": rows}

    def __getitem__(self, k: int, /) -> Cut:
        if k >= len(self._rows):
            raise DataError(
                f"{self.part.reader.prefix}: sample {k} of {len(self._rows)}: order megatron is made for the run's total",
                hint="a longer run needs a larger total from its start, or data.order: shuffled",
            )
        first, last, length = self._rows[k].tolist()
        return Cut(first, last, length, megatron_random(self.setting.seed, k))


@dataclass(frozen=True)
class DrawnCuts:
    """A pure function of seed, content and k. Every epoch has each cut once, in an order of its own.

    A document is cut in the same places each time, its samples to their full length if it has one; that one is to be
    shorter is drawn for each sample.

    Raises:
        DataError: when no document can be used.
    """

    part: Part
    setting: Setting
    tokens: int
    least: int
    short_probability: float

    @cached_property
    def identity(self) -> str:
        """See `Cuts`."""
        return f"drawn short={self.short_probability} seed={self.setting.seed} {self._what}"

    @property
    def _what(self) -> str:
        return f"sentences={self.least} tokens={self.tokens} {_where(self.part)}"

    @property
    def samples_per_epoch(self) -> float:
        """See `Cuts`."""
        return len(self._rows)

    @cached_property
    def _rows(self) -> npt.NDArray[np.int64]:
        return cached_arrays(self.setting.cache, self._what, self._cut)["rows"]

    def _cut(self) -> Arrays:
        return {"rows": Sentences(self.part, least=self.least).whole_samples(self.tokens)}

    def __getitem__(self, k: int, /) -> Cut:
        epoch, number = divmod(k, len(self._rows))
        key = xxhash.xxh3_64_intdigest(f"{self.identity} epoch={epoch}".encode())
        first, last = self._rows[permuted(number, len(self._rows), key)].tolist()
        random = drawn_random(self.identity, k)
        short = random.random_sample() < self.short_probability
        return Cut(first, last, random.randint(2, self.tokens + 1) if short else self.tokens, random)


def _where(part: Part) -> str:
    return f"data={part.reader.fingerprint} range={part.first}:{part.last}"
