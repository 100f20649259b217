"""Norms of gradients and weights by layer, for finding where a run goes wrong."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mega_ckpt.names import tensors_of
from mega_common.model_config import ModelConfig
from mega_trainer.comm import Group, all_reduce
from mega_trainer.optim.slots import Slot, share_of_slots
from mega_trainer.optim.zero import Optimizer


def layer_norms(optimizer: Optimizer, model: ModelConfig, world: Group, clipped: float) -> dict[str, float]:
    """Of what is trained: `layer_grad_norm/NAME` before the clip, and `layer_weight_norm/NAME`; the same on all ranks.

    A layer's NAME is its number; other parts have that of their module, such as `embed_tokens`.

    Args:
        optimizer: after an update.
        clipped: what that has multiplied the gradients with.
    """
    optimizer.settle()
    names = list(dict.fromkeys(map(_layer_of, tensors_of(model))))
    grads = _squares(((slot, slot.shard.grads) for slot in optimizer.slots), names)
    weights = _squares(((slot, slot.main) for slot in optimizer.slots), names)
    sums = torch.stack([grads / clipped**2, weights])
    all_reduce(sums, world)
    return {
        f"{kind}/{name}": value
        for kind, values in zip(("layer_grad_norm", "layer_weight_norm"), sums.sqrt().tolist(), strict=True)
        for name, value in zip(names, values, strict=True)
    }


def _layer_of(name: str) -> str:
    words = name.split(".")
    return words[words.index("layers") + 1] if "layers" in words else words[-2]


def _squares(pairs: Iterable[tuple[Slot, Tensor]], names: list[str]) -> Tensor:
    """fp64 [names], on the host: of the elements that this rank tells of, which no other does."""
    sums = torch.zeros(len(names), dtype=torch.float64)
    for name, held in share_of_slots(pairs).items():
        for box in held.boxes:
            sums[names.index(_layer_of(name))] += box.tensor.detach().double().square().sum().cpu()
    return sums
