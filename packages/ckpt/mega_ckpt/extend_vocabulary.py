"""Vocabulary extension: the rows of new tokens in embedding and output layer are the mean of the old rows.

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

from mega_ckpt.canonical_tensors import EMBEDDING, HEAD
from mega_ckpt.tensor_pieces import TensorShape, split_box
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

if TYPE_CHECKING:
    from mega_ckpt.source import WeightSource

TOKENIZER = "tokenizer.json"
BLOCK = 1 << 22  # elements that are added up at once


class ExtendedVocabularySource:
    """A `WeightSource` of a base whose vocabulary is extended to `size` tokens, the new ones after the old.

    Args:
        base: the weights as they are.
        size: rows of the embedding and the output layer.
        first: the first new token's row, where the base has rows that are for none; default: the one behind its last.
        files: assets that take the place of the base's.

    Raises:
        CheckpointError: from the constructor, when the base has more already.
    """

    def __init__(
        self, base: WeightSource, size: int, *, first: int | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        held = base.model.vocab_size
        if size < held:
            raise CheckpointError(f"a vocabulary of {size} tokens is smaller than the model's, which has {held}")
        self._base, self._old, self._files = base, held if first is None else first, files or {}
        self.model: ModelConfig = base.model.model_copy(update={"vocab_size": size})
        self._mean = cache(self._compute_mean_row)

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical names, in the order of the forward pass."""
        return self._base.tensor_names()

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the shape of a tensor, with the new rows."""
        shape = self._base.tensor_shape(name)
        return (self.model.vocab_size, *shape[1:]) if name in (EMBEDDING, HEAD) else shape

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor."""
        return self._base.tensor_dtype(name)

    def read_tensor(self, name: str) -> Tensor:
        """Read a whole tensor."""
        shape = self.tensor_shape(name)
        return self.read_tensor_slice(name, (0,) * len(shape), shape)

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]`."""
        new = offset[0] + shape[0] - self._old if name in (EMBEDDING, HEAD) else 0
        if new <= 0:
            return self._base.read_tensor_slice(name, offset, shape)
        rows = self._mean(name)[offset[1] : offset[1] + shape[1]].expand(min(new, shape[0]), -1)
        if new >= shape[0]:
            return rows.clone()
        return torch.cat([self._base.read_tensor_slice(name, offset, (shape[0] - new, shape[1])), rows])

    def _compute_mean_row(self, name: str) -> Tensor:
        """Return the mean row [D], accumulated in fp64."""
        total = torch.zeros(self._base.tensor_shape(name)[1], dtype=torch.float64)
        for offset, shape in split_box((self._old, len(total)), BLOCK):
            total[offset[1] : offset[1] + shape[1]] += self._base.read_tensor_slice(name, offset, shape).double().sum(0)
        return (total / self._old).to(self.tensor_dtype(name))

    def buffer_names(self) -> Sequence[str]:
        """Return the names of the buffers (tensors that are not weights)."""
        return self._base.buffer_names()

    def read_buffer(self, name: str) -> Tensor:
        """Read one buffer."""
        return self._base.read_buffer(name)

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return the base's asset files, replaced by `files` where given."""
        return {**self._base.asset_files(), **self._files}


def extend_to_size(base: WeightSource, size: int) -> WeightSource:
    """Return the base with its vocabulary extended to `size` tokens if it has fewer."""
    return base if base.model.vocab_size >= size else ExtendedVocabularySource(base, size)


def add_tokens(base: WeightSource, tokens: Sequence[str], size: int | None = None) -> ExtendedVocabularySource:
    """Return the base with new tokens in its tokenizer (matched verbatim in text) and new rows in its vocabulary.

    They take the ids behind those that the tokenizer has; `size` makes the vocabulary larger than that needs.

    Raises:
        CheckpointError: when there is no tokenizer.json, it has one of the tokens, or `size` is too small.
    """
    from tokenizers import AddedToken, Tokenizer

    file = base.asset_files().get(TOKENIZER)
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
    return ExtendedVocabularySource(base, size or max(need, base.model.vocab_size), first=min(ids), files=files)
