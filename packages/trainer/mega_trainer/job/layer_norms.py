"""Norms of gradients and weights by layer, for finding where a run goes wrong."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_common.model_config import ModelConfig
from mega_trainer.distributed.comm import CommGroup, all_reduce
from mega_trainer.distributed.device import to_host
from mega_trainer.optim.optimizer_slots import OptimizerSlot, checkpoint_boxes_by_name
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer


def compute_layer_norms(
    optimizer: ShardedOptimizer, model: ModelConfig, world: CommGroup, clip_factor: float
) -> dict[str, float]:
    """Return the metrics `layer_grad_norm/NAME`, before gradient clipping, and `layer_weight_norm/NAME` of trainable
    parameters, equal on all ranks.

    NAME is the number of a layer, or the name of another module, such as `embed_tokens`.

    Args:
        optimizer: after an update.
        clip_factor: factor by which clipping multiplied the gradients.
    """
    optimizer.wait_for_params()
    names = list(dict.fromkeys(map(_layer_name, canonical_tensors(model))))
    grads = _sum_squares(((slot, slot.shard.grads) for slot in optimizer.slots), names)
    weights = _sum_squares(((slot, slot.main) for slot in optimizer.slots), names)
    sums = torch.stack([grads / clip_factor**2, weights])
    all_reduce(sums, world)
    return {
        f"{kind}/{name}": value
        for kind, values in zip(("layer_grad_norm", "layer_weight_norm"), sums.sqrt().tolist(), strict=True)
        for name, value in zip(names, values, strict=True)
    }


def _layer_name(name: str) -> str:
    words = name.split(".")
    return words[words.index("layers") + 1] if "layers" in words else words[-2:][0]


def _sum_squares(pairs: Iterable[tuple[OptimizerSlot, Tensor]], names: list[str]) -> Tensor:
    """Return the sums of squares by name, fp64 [names], on the host, of the elements that this rank owns."""
    sums = torch.zeros(len(names), dtype=torch.float64)
    for name, sharded in checkpoint_boxes_by_name(pairs).items():
        for box in sharded.boxes:
            sums[names.index(_layer_name(name))] += to_host(box.tensor.detach().double().square().sum())
    return sums
