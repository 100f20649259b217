"""Canonical tensors of a LoRA adapter, named as in PEFT without the prefix `base_model.model.`.

    model.layers.0.self_attn.q_proj.lora_A.weight [r, D]      model.layers.0.self_attn.q_proj.lora_B.weight [N, r]

A layer's experts are stacked on axis 0, and gate and up rows are concatenated: `mlp.experts.gate_up_proj` has A [E, r, D]
and B [E, 2 F, r], `mlp.experts.down_proj` A [E, r, F] and B [E, D, r]. With `lora.dora` a projection also has a
`lora_magnitude_vector` [N].

Legend: D model width, N a projection's output width, F feed-forward width, E experts, r rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mega_ckpt.canonical_tensors import TensorShapes, canonical_tensors
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.errors import ConfigError
from mega_common.layer_kinds import INDEXER
from mega_common.lora_config import LoraConfig, matches_module_pattern
from mega_common.model_config import ModelConfig

A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
# Projections of attention, feed-forward blocks and experts; not routers or recurrent mixers.
_PROJECTION = re.compile(
    r"(?P<module>model\.layers\.(?P<layer>\d+)\.(self_attn|mlp)\..*(?<!latent)_proj(_with_mqa)?)\.weight"
)
# Projections of compressed attention that are not plain linear layers of one input and output.
_UNADAPTED = ("compressor.kv_proj.weight", "compressor.gate_proj.weight", ".o_a_proj.weight")
_STACKED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<part>gate|up)_proj")


@dataclass(frozen=True)
class AdaptedModule:
    """A projection with a LoRA adapter: its canonical tensors, and the adapter's rank, scale and widths.

    Attributes:
        rank, scale: r, and the factor of B A.
        weights: the canonical tensors of the projection, whose rows are concatenated.
        out_features, in_features: total output width, and input width.
        num_experts: number of stacked experts; None for a matrix.
        dropout: dropout probability of the adapter's input.
        has_magnitude: the adapter has a DoRA magnitude per output.
    """

    rank: int
    scale: float
    weights: tuple[str, ...]
    out_features: int
    in_features: int
    num_experts: int | None = None
    dropout: float = 0.0
    has_magnitude: bool = False

    @property
    def tensor_shapes(self) -> tuple[TensorShape, ...]:
        """Shapes of the LoRA factors A and B, and of the DoRA magnitude if there is one."""
        stack = () if self.num_experts is None else (self.num_experts,)
        pair = (*stack, self.rank, self.in_features), (*stack, self.out_features, self.rank)
        return (*pair, (self.out_features,)) if self.has_magnitude else pair


def adapted_modules(model: ModelConfig, lora: LoraConfig) -> dict[str, AdaptedModule]:
    """Return the projections of `model` that the LoRA settings `lora` adapt, in the order of the forward pass.
    The result is {canonical name without `.weight`: AdaptedModule}.

    Raises:
        ConfigError: naming a pattern that matches no projection, or experts with dropout or DoRA.
    """
    modules = adaptable_projections(model)
    for key, patterns in (("modules", lora.modules), ("ranks", lora.ranks), ("alphas", lora.alphas)):
        for pattern in patterns:
            if not any(matches_module_pattern(module, [pattern]) for module in modules):
                kinds = sorted({module.rpartition(".")[2] for module in modules})
                raise ConfigError(
                    f"lora.{key}: {pattern!r} must match a projection of the model", hint=f"use {', '.join(kinds)}"
                )
    out = {}
    for module, weights in modules.items():
        rank = lora.get_adapter_rank(module)
        if rank is not None:
            shapes = list(weights.values())
            *stack, _, into = shapes[0]
            rows = sum(shape[-2] for shape in shapes)
            experts = stack[0] if stack else None
            if experts is not None and (lora.dropout or lora.dora):
                key = "dropout" if lora.dropout else "dora"
                raise ConfigError(
                    f"lora.{key} = {getattr(lora, key)} is not supported with experts ({module})",
                    hint=f"remove lora.{key}, or the experts from lora.modules",
                )
            scale = lora.get_adapter_scale(module)
            out[module] = AdaptedModule(rank, scale, tuple(weights), rows, into, experts, lora.dropout, lora.dora)
    return out


def adaptable_projections(model: ModelConfig) -> dict[str, TensorShapes]:
    """Return the projections of `model` that can have a LoRA adapter.
    The result is {canonical name without `.weight`: {tensor name: shape}}.
    """
    out: dict[str, TensorShapes] = {}
    for name, shape in canonical_tensors(model).items():
        found = _PROJECTION.fullmatch(name)
        if found is None or int(found["layer"]) >= model.num_layers or INDEXER in name or name.endswith(_UNADAPTED):
            continue
        stacked = _STACKED.fullmatch(found["module"])
        fused = stacked is not None and model.has_gated_mlp
        module = f"{stacked['experts']}.gate_up_proj" if stacked and fused else found["module"]
        out.setdefault(module, {})[name] = shape
    return out


def list_quantized_tensor_names(
    model: ModelConfig, lora: LoraConfig | None, is_trained: Callable[[str], bool]
) -> frozenset[str]:
    """Return the names of the projections' weights that `lora.quantize` stores quantized: all that are not trained.

    Without `lora.quantize` there are none.
    """
    if lora is None or lora.quantize is None:
        return frozenset()
    return frozenset(
        name for weights in adaptable_projections(model).values() for name in weights if not is_trained(name)
    )


def adapter_tensor_shapes(modules: Mapping[str, AdaptedModule]) -> TensorShapes:
    """Return {canonical name: shape} of every LoRA and DoRA tensor of the adapted `modules`."""
    return {
        module + suffix: shape
        for module, of in modules.items()
        for suffix, shape in zip((A, B, MAGNITUDE), of.tensor_shapes, strict=False)
    }
