"""Weights with more tokens in their vocabulary: a new token's rows of embedding and output layer are the mean of the old ones.

So a new token is at first as likely as the others are on average, and moves nothing far (J. Hewitt, "Initializing new word
embeddings for pretrained language models", 2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mega_ckpt.names import EMBEDDING, HEAD
from mega_ckpt.pieces import Shape, cut
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

if TYPE_CHECKING:
    from mega_ckpt.source import Source

BLOCK = 1 << 22  # elements that are added up at once


class ExtendedSource:
    """A `Source`: a base whose vocabulary has `size` tokens, the new ones behind the others.

    Raises:
        CheckpointError: from the constructor, when the base has more already.
    """

    def __init__(self, base: Source, size: int) -> None:
        self._base, self._old = base, base.model.vocab_size
        if size < self._old:
            raise CheckpointError(f"a vocabulary of {size} tokens is smaller than the model's, which has {self._old}")
        self.model: ModelConfig = base.model.model_copy(update={"vocab_size": size})
        self._mean = cache(self._mean_of)

    def keys(self) -> Sequence[str]:
        """Those of the base."""
        return self._base.keys()

    def shape(self, name: str) -> Shape:
        """That of the base, or with the new rows."""
        shape = self._base.shape(name)
        return (self.model.vocab_size, *shape[1:]) if name in (EMBEDDING, HEAD) else shape

    def dtype(self, name: str) -> torch.dtype:
        """That of the base."""
        return self._base.dtype(name)

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        shape = self.shape(name)
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A rectangle of it."""
        new = offset[0] + shape[0] - self._old if name in (EMBEDDING, HEAD) else 0
        if new <= 0:
            return self._base.read_slice(name, offset, shape)
        rows = self._mean(name)[offset[1] : offset[1] + shape[1]].expand(min(new, shape[0]), -1)
        if new >= shape[0]:
            return rows.clone()
        return torch.cat([self._base.read_slice(name, offset, (shape[0] - new, shape[1])), rows])

    def _mean_of(self, name: str) -> Tensor:
        """The mean row [D]; added up in fp64."""
        total = torch.zeros(self._base.shape(name)[1], dtype=torch.float64)
        for offset, shape in cut(self._base.shape(name), BLOCK):
            total[offset[1] : offset[1] + shape[1]] += self._base.read_slice(name, offset, shape).double().sum(0)
        return (total / self._old).to(self.dtype(name))

    def buffers(self) -> Sequence[str]:
        """Those of the base."""
        return self._base.buffers()

    def read_buffer(self, name: str) -> Tensor:
        """One of them."""
        return self._base.read_buffer(name)

    def assets(self) -> Mapping[str, Path | bytes]:
        """Those of the base."""
        return self._base.assets()
