"""Trainable parameters of a run: all of the model, its unfrozen part, or LoRA adapters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.lora_tensors import AdaptedModule, adapted_modules, adapter_tensor_shapes
from mega_common.lora_config import LoraConfig, is_trainable_tensor
from mega_common.model_config import ModelConfig
from mega_trainer.plan.flops import ParameterCounts, count_parameters_by_layer
from mega_trainer.plan.training_layout import TrainingLayout


@dataclass(frozen=True)
class TrainableParameters:
    """Trainable parameters of one run, which may freeze weights or train only LoRA adapters.

    Attributes:
        count: trainable parameters, adapters included.
        shares: trainable share of the base parameters of each layer, MTP layers included.
        head: True if the output matrix is trainable.
        adapters: LoRA adapters by layer.
    """

    count: ParameterCounts
    shares: tuple[float, ...]
    head: bool
    adapters: Mapping[int, tuple[AdaptedModule, ...]]

    @classmethod
    def from_training_layout(
        cls, model: ModelConfig, run: TrainingLayout, whole: ParameterCounts
    ) -> TrainableParameters:
        """Return the trainable parameters of a run in layout `run`, whose model has the parameters `whole`."""
        if not run.freeze and run.lora is None:
            return cls(whole, (1.0,) * len(whole.layers), True, {})
        lora, own = parse_run_lora(run), canonical_tensors(model)
        found = {} if lora is None else adapted_modules(model, lora)
        both = {**own, **adapter_tensor_shapes(found)}
        moving = {name: shape for name, shape in both.items() if is_trainable_tensor(name, run.freeze, lora)}
        mine = count_parameters_by_layer(model, {name: shape for name, shape in moving.items() if name in own})
        shares = tuple(layer.total / all_.total for layer, all_ in zip(mine.layers, whole.layers, strict=True))
        head = "model.embed_tokens.weight" if model.tie_embeddings else "lm_head.weight"
        adapters: dict[int, tuple[AdaptedModule, ...]] = {}
        for name, adapter in found.items():
            layer = _layer_index(name)
            adapters[layer] = (*adapters.get(layer, ()), adapter)
        return cls(count_parameters_by_layer(model, moving), shares, head in moving, adapters)

    def extra_flops(self, model: ModelConfig, whole: ParameterCounts) -> float:
        """Return the FLOPs per token that adapters add, minus those that frozen weights save; it may be negative."""
        active = [layer.total - layer.experts * (1 - whole.top_k / whole.num_experts) for layer in whole.layers]
        frozen = sum((1 - share) * each for share, each in zip(self.shares, active, strict=True))
        frozen += (not self.head) * model.vocab_size * model.embedding_width
        added = sum(
            (of.in_features + of.out_features) * of.rank * (whole.top_k if of.num_experts else 1)
            for adapters in self.adapters.values()
            for of in adapters
        )
        return 6.0 * added - 2.0 * frozen


def parse_run_lora(run: TrainingLayout) -> LoraConfig | None:
    """Return the LoRA configuration in a training layout, or None without LoRA."""
    return None if run.lora is None else LoraConfig.model_validate_json(run.lora)


def _layer_index(name: str) -> int:
    """Return the layer index in a tensor name."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    assert found is not None
    return int(found[1])
