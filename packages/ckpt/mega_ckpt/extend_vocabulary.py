"""Vocabulary extension: the rows of new tokens in embedding and output layer are the mean of the old rows.

A new token then has about the average probability, and changes the distribution little (J. Hewitt, "Initializing new
word embeddings for pretrained language models", 2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import EMBEDDING, HEAD, LAYER_EMBEDDING
from mega_ckpt.tensor_pieces import TensorShape, split_slice_by_elements
from mega_ckpt.weight_source import DerivedWeightSource, WeightSource
from mega_common.errors import CheckpointError

TOKENIZER = "tokenizer.json"
BLOCK = 1 << 22  # elements that are summed at once

TABLES = (EMBEDDING, LAYER_EMBEDDING, HEAD)  # tensors with a row for each token


class ExtendedVocabularySource(DerivedWeightSource):
    """Weights of a base model whose vocabulary is extended to `size` tokens, as a `WeightSource`.
    Rows of new tokens follow the old ones and are their mean.

    Args:
        base: the original weights.
        size: rows of the embedding and the output layer.
        first: row of the first new token, if the base has unused rows; default: the row after the last one.
        files: assets that replace those of the base.

    Raises:
        CheckpointError: from the constructor, when the base has a larger vocabulary.
    """

    def __init__(
        self, base: WeightSource, size: int, *, first: int | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        old_size = base.model.vocab_size
        if size < old_size:
            raise CheckpointError(
                f"--vocab-size must be at least {old_size}, the vocabulary size of the model, found {size}",
                hint="rows of the embedding can be added, not removed",
            )
        super().__init__(base, base.model.model_copy(update={"vocab_size": size}))
        self._old, self._files = old_size if first is None else first, files or {}
        # a table of inputs of layers with fewer rows has none for the new tokens either
        self._tables = [name for name in TABLES if name != LAYER_EMBEDDING or not base.model.per_layer_vocab_size]
        self._mean = cache(self._compute_mean_row)

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the shape of a tensor of the model with the extended vocabulary.
        The embedding and the output layer have `size` rows; other tensors have the base model's shape.
        """
        shape = self.base.tensor_shape(name)
        return (self.model.vocab_size, *shape[1:]) if name in self._tables else shape

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` of a tensor of the model with the extended vocabulary.
        The tensor is `name`, with the rows of new tokens.
        """
        new = offset[0] + shape[0] - self._old if name in self._tables else 0
        if new <= 0:
            return self.base.read_tensor_slice(name, offset, shape)
        rows = self._mean(name)[offset[1] : offset[1] + shape[1]].expand(min(new, shape[0]), -1)
        if new >= shape[0]:
            return rows.clone()
        return torch.cat([self.base.read_tensor_slice(name, offset, (shape[0] - new, shape[1])), rows])

    def _compute_mean_row(self, name: str) -> Tensor:
        """Return the mean row [D], accumulated in fp64."""
        total = torch.zeros(self.base.tensor_shape(name)[1], dtype=torch.float64)
        for offset, shape in split_slice_by_elements((self._old, len(total)), BLOCK):
            total[offset[1] : offset[1] + shape[1]] += self.base.read_tensor_slice(name, offset, shape).double().sum(0)
        return (total / self._old).to(self.tensor_dtype(name))

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return the files other than weights of the model with the extended vocabulary.
        They are the base model's, replaced by the constructor argument `files` where given.
        """
        return {**self.base.asset_files(), **self._files}


def extend_vocabulary_to_size(base: WeightSource, size: int) -> WeightSource:
    """Return `base` with its vocabulary extended to at least `size` tokens, whose new rows are the mean of the old ones.
    It is `base` itself if `base` has as many already.
    """
    return base if base.model.vocab_size >= size else ExtendedVocabularySource(base, size)


def add_tokens(base: WeightSource, tokens: Sequence[str], size: int | None = None) -> ExtendedVocabularySource:
    """Return the weights of `base` with `tokens` added to its tokenizer and as rows of its embedding and output layer.
    The new `tokens` are matched verbatim in text.

    They get the ids after those of the tokenizer; `size` is the size of the new vocabulary, by default the smallest.

    Raises:
        CheckpointError: when tokenizer.json is missing or has one of the tokens, or `size` is too small.
    """
    from tokenizers import AddedToken, Tokenizer

    file = base.asset_files().get(TOKENIZER)
    if file is None:
        raise CheckpointError(
            f"adding tokens requires a {TOKENIZER}, which the model does not have",
            hint="extend the weights alone with --vocab-size",
        )
    tokenizer = Tokenizer.from_str((file if isinstance(file, bytes) else file.read_bytes()).decode())
    old_ids = tokenizer.get_vocab(with_added_tokens=True)
    for token in tokens:
        if token in old_ids:
            raise CheckpointError(
                f"the tokenizer has {token!r} already, with id {old_ids[token]}", hint="leave the token out"
            )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    new_ids = tokenizer.get_vocab(with_added_tokens=True)
    ids = [new_ids[token] for token in tokens]
    if min(ids) <= max(old_ids.values()):
        raise CheckpointError(f"the ids of the tokenizer must have no gaps, but id {min(ids)} is unused")
    if (need := max(ids) + 1) > (size or need):
        raise CheckpointError(
            f"the vocabulary size must be at least {need} for these tokens, not {size}", hint=f"--vocab-size {need}"
        )
    if min(ids) > base.model.vocab_size:
        raise CheckpointError(
            f"the tokenizer has ids up to {max(old_ids.values())}, but the vocabulary of the model has only "
            f"{base.model.vocab_size}",
            hint="use the tokenizer of the model",
        )
    files = {TOKENIZER: tokenizer.to_str(pretty=True).encode()}
    return ExtendedVocabularySource(base, size or max(need, base.model.vocab_size), first=min(ids), files=files)
