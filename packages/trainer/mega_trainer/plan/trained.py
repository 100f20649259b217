"""What of a model a run trains: all of it, what it does not freeze, or adapters of low rank beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mega_ckpt.lora import Adapted, adapted, adapter_tensors
from mega_ckpt.names import tensors_of
from mega_common.lora import LoraConfig, is_trained
from mega_common.model_config import ModelConfig
from mega_trainer.plan.flops import Parameters, count_parameters
from mega_trainer.plan.shape import RunShape


@dataclass(frozen=True)
class Trained:
    """Of one run.

    Attributes:
        count: what is trained, adapters with it.
        shares: of each layer's own parameters, and those of layers that predict further tokens.
        head: whether the output matrix is.
        adapters: those of each layer.
    """

    count: Parameters
    shares: tuple[float, ...]
    head: bool
    adapters: Mapping[int, tuple[Adapted, ...]]

    @classmethod
    def of(cls, model: ModelConfig, run: RunShape, whole: Parameters) -> Trained:
        """What that run trains of a model of `whole` parameters."""
        if not run.freeze and run.lora is None:
            return cls(whole, (1.0,) * len(whole.layers), True, {})
        lora, own = lora_of(run), tensors_of(model)
        found = {} if lora is None else adapted(model, lora)
        both = {**own, **adapter_tensors(found)}
        moving = {name: shape for name, shape in both.items() if is_trained(name, run.freeze, lora)}
        mine = count_parameters(model, {name: shape for name, shape in moving.items() if name in own})
        shares = tuple(layer.total / all_.total for layer, all_ in zip(mine.layers, whole.layers, strict=True))
        head = "model.embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"
        adapters: dict[int, tuple[Adapted, ...]] = {}
        for name, adapter in found.items():
            layer = _layer(name)
            adapters[layer] = (*adapters.get(layer, ()), adapter)
        return cls(count_parameters(model, moving), shares, head in moving, adapters)

    def flops(self, model: ModelConfig, whole: Parameters) -> float:
        """Operations of a token that a step has more than one that trains all of the model: adapters' products, less those for the
        gradients of frozen weights.
        """
        active = [layer.total - layer.experts * (1 - whole.top_k / whole.num_experts) for layer in whole.layers]
        frozen = sum((1 - share) * each for share, each in zip(self.shares, active, strict=True))
        frozen += (not self.head) * model.vocab_size * model.hidden_size
        added = sum(
            (of.into + of.out) * of.rank * (whole.top_k if of.experts else 1)
            for adapters in self.adapters.values()
            for of in adapters
        )
        return 6.0 * added - 2.0 * frozen


def lora_of(run: RunShape) -> LoraConfig | None:
    """The adapter of a run."""
    return None if run.lora is None else LoraConfig.model_validate_json(run.lora)


def _layer(name: str) -> int:
    found = re.match(r"model\.layers\.(\d+)\.", name)
    assert found is not None
    return int(found[1])
