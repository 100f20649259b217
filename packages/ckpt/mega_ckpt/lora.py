"""The canonical tensors of an adapter of low rank: named as PEFT names them, after its `base_model.model.`.

    model.layers.0.self_attn.q_proj.lora_A.weight [r, D]      model.layers.0.self_attn.q_proj.lora_B.weight [N, r]

A layer's experts are stacked on axis 0, gate above up where there is a gate: `mlp.experts.gate_up_proj` has A [E, r, D] and
B [E, 2 F, r], `mlp.experts.down_proj` A [E, r, F] and B [E, D, r]. With `lora.dora` a projection also has a
`lora_magnitude_vector` [N].

Legend: D model width, N a projection's output width, F feed-forward width, E experts, r rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mega_ckpt.names import Tensors, tensors_of
from mega_ckpt.pieces import Shape
from mega_common.errors import ConfigError
from mega_common.lora import LoraConfig, meant
from mega_common.model_config import ModelConfig

A, B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
# Of attention, feed-forward blocks and experts; no router, and nothing of a recurrent mixer.
_PROJECTION = re.compile(
    r"(?P<module>model\.layers\.(?P<layer>\d+)\.(self_attn|mlp)\..*(?<!latent)_proj(_with_mqa)?)\.weight"
)
_STACKED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<part>gate|up)_proj")


@dataclass(frozen=True)
class Adapted:
    """A projection with an adapter.

    Attributes:
        rank, scale: r, and what B A is multiplied by.
        weights: the canonical tensors that it changes, one below the other.
        out, into: their output width, of all, and their input width.
        experts: how many are stacked; None for a plain matrix.
        dropout: share of the input that the adapter does not see in training.
        dora: whether it has a magnitude for each output, too.
    """

    rank: int
    scale: float
    weights: tuple[str, ...]
    out: int
    into: int
    experts: int | None = None
    dropout: float = 0.0
    dora: bool = False

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of A and B, and of the magnitude if there is one."""
        stack = () if self.experts is None else (self.experts,)
        pair = (*stack, self.rank, self.into), (*stack, self.out, self.rank)
        return (*pair, (self.out,)) if self.dora else pair


def adapted(model: ModelConfig, lora: LoraConfig) -> dict[str, Adapted]:
    """The projections of `model` that `lora` is for, by canonical name without `.weight`, in the order of the forward.

    Raises:
        ConfigError: naming a pattern that is for no projection, or experts, which have neither dropout nor magnitudes.
    """
    modules = projections(model)
    for key, patterns in (("modules", lora.modules), ("ranks", lora.ranks), ("alphas", lora.alphas)):
        for pattern in patterns:
            if not any(meant(module, [pattern]) for module in modules):
                kinds = sorted({module.rpartition(".")[2] for module in modules})
                raise ConfigError(
                    f"lora.{key}: {pattern!r} is for no projection of the model", hint=f"it has {', '.join(kinds)}"
                )
    out = {}
    for module, weights in modules.items():
        rank = lora.rank_of(module)
        if rank is not None:
            shapes = list(weights.values())
            *stack, _, into = shapes[0]
            rows = sum(shape[-2] for shape in shapes)
            experts = stack[0] if stack else None
            if experts is not None and (lora.dropout or lora.dora):
                key = "dropout" if lora.dropout else "dora"
                raise ConfigError(
                    f"lora.{key} = {getattr(lora, key)}: {module} has none, as in PEFT",
                    hint=f"leave out lora.{key}, or the experts in lora.modules",
                )
            scale = lora.scale_of(module)
            out[module] = Adapted(rank, scale, tuple(weights), rows, into, experts, lora.dropout, lora.dora)
    return out


def projections(model: ModelConfig) -> dict[str, Tensors]:
    """What may have an adapter, by canonical name without `.weight`: the tensors, with shapes, that it would change."""
    out: dict[str, Tensors] = {}
    for name, shape in tensors_of(model).items():
        found = _PROJECTION.fullmatch(name)
        if found is None or int(found["layer"]) >= model.num_layers:
            continue
        stacked = _STACKED.fullmatch(found["module"])
        fused = stacked is not None and model.gated
        module = f"{stacked['experts']}.gate_up_proj" if stacked and fused else found["module"]
        out.setdefault(module, {})[name] = shape
    return out


def packed_tensors(model: ModelConfig, lora: LoraConfig | None, trains: Callable[[str], bool]) -> frozenset[str]:
    """The tensors that `lora.quantize` keeps in few bits: of every projection, adapted or not, that is not trained whole."""
    if lora is None or lora.quantize is None:
        return frozenset()
    return frozenset(name for weights in projections(model).values() for name in weights if not trains(name))


def adapter_tensors(modules: Mapping[str, Adapted]) -> Tensors:
    """Every tensor of an adapter by canonical name, with its shape."""
    return {
        module + suffix: shape
        for module, of in modules.items()
        for suffix, shape in zip((A, B, MAGNITUDE), of.shapes, strict=False)
    }
