"""Which sentences sample k has, how long it is to become, and what it draws its random numbers with; in both orders."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import DataError
from mega_data.index_cache import cached_arrays
from mega_data.kinds.base import Setting
from mega_data.kinds.masking import Random, megatron_random, stable_random
from mega_data.kinds.sentences import LONG, Sentences
from mega_data.parts import Part
from mega_data.sample_index import permuted


class Cut(NamedTuple):
    """The sentences [first, last) of a data set, the number of tokens to cut them to, and the sample's random stream."""

    first: int
    last: int
    length: int
    random: Random


class Cuts(Protocol):
    """The cuts of one data set; `identity` tells what they depend on."""

    identity: str

    def __getitem__(self, k: int, /) -> Cut: ...


class MegatronCuts:
    """Bit-identical to Megatron's masked-word data sets, whose order depends on the number of samples asked for.

    Raises:
        DataError: when no document can be used; when a sample past the end is read.
    """

    def __init__(
        self, part: Part, setting: Setting, wanted: int, *, tokens: int, least: int, short_probability: float
    ) -> None:
        self._prefix, self._seed = part.reader.prefix, setting.seed
        self.identity = (
            f"megatron sentences={least} seed={setting.seed} tokens={tokens} short={short_probability}"
            f" samples={wanted} data={part.reader.fingerprint} range={part.first}:{part.last}"
        )

        def build() -> dict[str, npt.NDArray[np.int64]]:
            documents = Sentences(part, least=least, longest=LONG)
            return {"rows": documents.megatron_samples(tokens, short_probability, setting.seed, wanted)}

        self._rows = cached_arrays(setting.cache, self.identity, build)["rows"]

    def __getitem__(self, k: int, /) -> Cut:
        if k >= len(self._rows):
            raise DataError(
                f"{self._prefix}: sample {k} of {len(self._rows)}: order megatron is made for the run's total",
                hint="a longer run needs a larger total from its start, or data.order: stable",
            )
        first, last, length = self._rows[k].tolist()
        return Cut(first, last, length, megatron_random(self._seed, k))


class StableCuts:
    """A pure function of seed, content and k. Every epoch has each cut once, in an order of its own.

    A document is cut in the same places each time, its samples to their full length if it has one; that one is to be
    shorter is drawn for each sample.

    Raises:
        DataError: when no document can be used.
    """

    def __init__(self, part: Part, setting: Setting, *, tokens: int, least: int, short_probability: float) -> None:
        self._tokens, self._short = tokens, short_probability
        what = f"stable sentences={least} tokens={tokens}"
        where = f"data={part.reader.fingerprint} range={part.first}:{part.last}"
        self.identity = f"{what} short={short_probability} seed={setting.seed} {where}"
        self._rows = cached_arrays(
            setting.cache, f"{what} {where}", lambda: {"rows": Sentences(part, least=least).whole_samples(tokens)}
        )["rows"]

    def __getitem__(self, k: int, /) -> Cut:
        epoch, number = divmod(k, len(self._rows))
        key = xxhash.xxh3_64_intdigest(f"{self.identity} epoch={epoch}".encode())
        first, last = self._rows[permuted(number, len(self._rows), key)].tolist()
        random = stable_random(self.identity, k)
        length = int(random.randint(2, self._tokens + 1)) if random.random_sample() < self._short else self._tokens
        return Cut(first, last, length, random)


def cuts(part: Part, setting: Setting, wanted: int, *, tokens: int, least: int, short_probability: float) -> Cuts:
    """In the order of the run."""
    if setting.config.order == "megatron":
        return MegatronCuts(part, setting, wanted, tokens=tokens, least=least, short_probability=short_probability)
    return StableCuts(part, setting, tokens=tokens, least=least, short_probability=short_probability)
