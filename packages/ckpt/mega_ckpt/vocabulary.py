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

TOKENIZER = "tokenizer.json"
BLOCK = 1 << 22  # elements that are added up at once


class ExtendedSource:
    """A `Source`: a base whose vocabulary has `size` tokens, the new ones behind the others.

    Args:
        base: the weights as they are.
        size: rows of the embedding and the output layer.
        first: the first new token's row, where the base has rows that are for none; default: the one behind its last.
        files: assets that take the place of the base's.

    Raises:
        CheckpointError: from the constructor, when the base has more already.
    """

    def __init__(
        self, base: Source, size: int, *, first: int | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        held = base.model.vocab_size
        if size < held:
            raise CheckpointError(f"a vocabulary of {size} tokens is smaller than the model's, which has {held}")
        self._base, self._old, self._files = base, held if first is None else first, files or {}
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
        for offset, shape in cut((self._old, len(total)), BLOCK):
            total[offset[1] : offset[1] + shape[1]] += self._base.read_slice(name, offset, shape).double().sum(0)
        return (total / self._old).to(self.dtype(name))

    def buffers(self) -> Sequence[str]:
        """Those of the base."""
        return self._base.buffers()

    def read_buffer(self, name: str) -> Tensor:
        """One of them."""
        return self._base.read_buffer(name)

    def assets(self) -> Mapping[str, Path | bytes]:
        """Those of the base, but for `files`."""
        return {**self._base.assets(), **self._files}


def with_rows(base: Source, size: int) -> Source:
    """A base whose vocabulary has `size` tokens, where it has fewer."""
    return base if base.model.vocab_size >= size else ExtendedSource(base, size)


def with_tokens(base: Source, tokens: Sequence[str], size: int | None = None) -> ExtendedSource:
    """A base whose tokenizer has further tokens, found in a text as they are written, and whose vocabulary has their rows.

    They take the ids behind those that the tokenizer has; `size` makes the vocabulary larger than that needs.

    Raises:
        CheckpointError: when there is no tokenizer.json, it has one of the tokens, or `size` is too small.
    """
    from tokenizers import AddedToken, Tokenizer

    file = base.assets().get(TOKENIZER)
    if file is None:
        raise CheckpointError(
            f"the model has no {TOKENIZER} to add tokens to", hint="--vocab-size makes room for them in the weights"
        )
    tokenizer = Tokenizer.from_str((file if isinstance(file, bytes) else file.read_bytes()).decode())
    held = tokenizer.get_vocab(with_added_tokens=True)
    for token in tokens:
        if token in held:
            raise CheckpointError(f"the tokenizer has {token!r} already, as token {held[token]}", hint="leave it out")
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    made = tokenizer.get_vocab(with_added_tokens=True)
    ids = [made[token] for token in tokens]
    if min(ids) <= max(held.values()):
        raise CheckpointError(f"the tokenizer's ids have gaps, of which new tokens would take {min(ids)}")
    if (need := max(ids) + 1) > (size or need):
        raise CheckpointError(f"a vocabulary of {size} tokens has no place for token {need - 1}")
    if min(ids) > base.model.vocab_size:
        raise CheckpointError(
            f"the tokenizer has ids up to {max(held.values())}, past the model's {base.model.vocab_size}"
        )
    files = {TOKENIZER: tokenizer.to_str(pretty=True).encode()}
    return ExtendedSource(base, size or max(need, base.model.vocab_size), first=min(ids), files=files)
