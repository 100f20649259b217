"""A model with tied embeddings as one whose output layer is a tensor of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mega_ckpt.names import EMBEDDING, HEAD, tensors_of
from mega_ckpt.pieces import Shape

if TYPE_CHECKING:
    from mega_ckpt.source import Source


class UntiedSource:
    """A `Source`: a base with tied embeddings, whose `lm_head.weight` is read from the embedding."""

    def __init__(self, base: Source) -> None:
        self.base = base
        self.model = base.model.model_copy(update={"tie_embeddings": False})

    def keys(self) -> Sequence[str]:
        """Return the base's tensors and the output layer, in the order of the forward pass."""
        held = {*self.base.keys(), HEAD}
        return [name for name in tensors_of(self.model) if name in held]

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        return self.base.shape(_stored(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.base.dtype(_stored(name))

    def read(self, name: str) -> Tensor:
        """Return a whole tensor."""
        return self.base.read(_stored(name))

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """Return a rectangle of a tensor."""
        return self.base.read_slice(_stored(name), offset, shape)

    def buffers(self) -> Sequence[str]:
        """Return the names of the base's buffers."""
        return self.base.buffers()

    def read_buffer(self, name: str) -> Tensor:
        """Return a buffer of the base."""
        return self.base.read_buffer(name)

    def assets(self) -> Mapping[str, Path | bytes]:
        """Return the base's assets."""
        return self.base.assets()


def _stored(name: str) -> str:
    return EMBEDDING if name == HEAD else name
