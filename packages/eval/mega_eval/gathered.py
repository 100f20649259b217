"""A model whose weights ZeRO-3 shares out, for inference: each layer's are gathered for as long as it computes.

All ranks are asked the same, in the same order, and compute the same, so that a gather finds all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mega_trainer.comm import all_gather
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.decoder import Decoder
from mega_trainer.parallel.param import info_of


class GatheredDecoder(Decoder):
    """Computes what `live` would, which is in training. Legend: B batch, S sequence, D model width, V vocabulary.

    Args:
        build: what layers are made from, on the meta device.
        live: the model after `shard_fully`.
    """

    def __init__(self, build: Builder, live: Decoder) -> None:
        super().__init__(build)
        self._live = (live,)  # no module of this one
        self._stubs = dict(self.named_parameters())

    @property
    def device(self) -> torch.device:
        """Where its weights are gathered."""
        return self._live[0].device

    def embed(self, *given: Any, **named: Any) -> Tensor:
        """The residual stream [B, S, D], as of any decoder."""
        with self._whole("embedding.", "inputs."):
            return super().embed(*given, **named)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream [B, S, D] behind the layers."""
        for index, layer in enumerate(self.layers):
            with self._whole(f"layers.{index}."):
                x = layer(x, context)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Logits [B, S, V], whole on every rank."""
        with self._whole("head.", "head_bias", "embedding." if self.matrix is None else "matrix"):
            return super().logits(x)

    @contextmanager
    def _whole(self, *parts: str) -> Iterator[None]:
        """Around what needs the weights whose names begin so."""
        used = [name for name in self._stubs if name.startswith(parts)]
        for name in used:
            self._put(name, nn.Parameter(self._gathered(self._live[0].get_parameter(name)), requires_grad=False))
        yield
        for name in used:
            self._put(name, self._stubs[name])

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        owner, _, last = name.rpartition(".")
        setattr(self.get_submodule(owner), last, parameter)

    def _gathered(self, parameter: nn.Parameter) -> Tensor:
        """All rows of a weight, of which each rank has as many but the last ones; in the type that the model computes in."""
        assert isinstance(parameter, DTensor)  # `live` is settled
        group, own = info_of(parameter).data, parameter.to_local().detach()
        rows = own.new_zeros(-(-parameter.shape[0] // group.size), *parameter.shape[1:], dtype=self.dtype)
        rows[: len(own)] = own
        return all_gather(rows, group, 0)[: parameter.shape[0]]
