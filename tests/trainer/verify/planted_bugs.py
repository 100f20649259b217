"""Bugs of sharding in one layer, planted in the ranks that a verification starts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch import Tensor

from mega_trainer.distributed.comm import CommGroup
from mega_trainer.model import recurrent_mixer
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.recurrent_mixer import ALONE
from mega_trainer.parallel.parameter_info import get_parameter_info
from mega_trainer.parallel.tensor_parallel import RowParallelLinear


def forgotten_reduction() -> AbstractContextManager[Any]:
    """The feed-forward block of layer 1 does not sum over tensor ranks."""
    real = RowParallelLinear.forward

    def forward(self: RowParallelLinear, x: Tensor, *more: Any) -> Tensor:
        if get_parameter_info(self.weight).pieces[0].name != "model.layers.1.mlp.down_proj.weight":
            return real(self, x, *more)
        y: Tensor = self.linear(x, self.weight, None)
        return y

    return mock.patch.object(RowParallelLinear, "forward", forward)


def norm_counted_twice() -> AbstractContextManager[Any]:
    """The gradient of a norm of layer 0, which every tensor rank has in full, is summed over them."""
    real = LayerBuilder.build_replicated

    def build(self: LayerBuilder, name: str, shape: tuple[int, ...], **options: Any) -> Any:
        wrong = {"partial_grad": True} if name == "model.layers.0.post_attention_layernorm.weight" else {}
        return real(self, name, shape, **{**options, **wrong})

    return mock.patch.object(LayerBuilder, "build_replicated", build)


def state_not_passed() -> AbstractContextManager[Any]:
    """Recurrent layers of a context rank begin each of its spans with an empty state."""
    real = recurrent_mixer.pass_recurrent_states

    def pass_states(maps: Tensor, added: Tensor, initial: Tensor | None, group: CommGroup) -> Any:
        if group.size == 1:
            return real(maps, added, initial, group)
        maps, added = (x.reshape(2 * len(x), -1, *x.shape[2:]) for x in (maps, added))
        states, last = real(maps, added, initial, ALONE)
        return states.reshape(len(added) // 2, -1, *states.shape[2:]), last

    return mock.patch.object(recurrent_mixer, "pass_recurrent_states", pass_states)


def error_of_the_tensor_ranks() -> AbstractContextManager[Any]:
    """A row-parallel projection raises an error on tensor rank 1."""
    real = RowParallelLinear.forward

    def forward(self: RowParallelLinear, x: Tensor, *more: Any) -> Tensor:
        if self.group.rank == 1:
            raise RuntimeError("shapes differ")
        return real(self, x, *more)

    return mock.patch.object(RowParallelLinear, "forward", forward)
