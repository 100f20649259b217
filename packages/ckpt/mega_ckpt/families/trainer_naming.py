"""Tensor names of other trainers (LitGPT, torchtitan) for these families where they differ from HuggingFace's. They are
read, not written.

Facts: LitGPT 0.5 (model.py, scripts/convert_lit_checkpoint.py), torchtitan 0.3 (models/llama3, qwen3: state_dict_adapter.py), whose
older releases have Meta's own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mega_ckpt.families.disk_layouts import PLAIN, DiskLayout, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.moe_entries import per_expert_rules
from mega_ckpt.tensor_pieces import TensorShape

_LAYER = "model.layers.{i}"
_META_HEAD = "output.weight"
_QKV = tuple(f"{_LAYER}.self_attn.{name}_proj" for name in "qkv")


@dataclass(frozen=True)
class RotaryPairsLayout:
    """Rows of queries or keys whose rotary pairs are adjacent, as in Meta's code; in canonical tensors a pair is half a
    head apart.
    """

    splits_on_first_axis: bool = False

    def disk_shape(self, parts: Sequence[TensorShape]) -> TensorShape:
        """Return the shape of all heads together."""
        return (sum(part[0] for part in parts), *parts[0][1:])

    def canonical_views(self, disk: Tensor, parts: Sequence[TensorShape]) -> list[Tensor]:
        """Return a copy of each head's rows: they are only read."""
        heads = torch.split(disk, [part[0] for part in parts])
        return [head.view(-1, 2, *head.shape[1:]).transpose(0, 1).reshape(head.shape) for head in heads]


def _module_rules(
    disk: str, *parts: str, layout: DiskLayout = PLAIN, by: str = "", beside: str = "", unless: str = ""
) -> tuple[TensorRule, ...]:
    """Return the rules of a module's weight and bias; `beside` and `unless` refer to weights."""
    beside, unless = (f"{name}.weight" if name else "" for name in (beside, unless))
    return tuple(
        TensorRule(f"{disk}.{kind}", tuple(f"{part}.{kind}" for part in parts), layout, by, beside, unless)
        for kind in ("weight", "bias")
    )


def _litgpt(qkv: str, by: str = "") -> tuple[TensorRule, ...]:
    block, both = "transformer.h.{i}", f"{_LAYER}.post_feedforward_layernorm"
    return (
        *_module_rules("transformer.wte", "model.embed_tokens"),
        *_module_rules(f"{block}.norm_1", f"{_LAYER}.input_layernorm"),
        *_module_rules(f"{block}.attn.{qkv}", *_QKV, by=by),
        *_module_rules(f"{block}.attn.norm_q", f"{_LAYER}.self_attn.q_norm"),
        *_module_rules(f"{block}.attn.norm_k", f"{_LAYER}.self_attn.k_norm"),
        *_module_rules(f"{block}.attn.proj", f"{_LAYER}.self_attn.o_proj"),
        *_module_rules(f"{block}.post_attention_norm", f"{_LAYER}.post_attention_layernorm", beside=both),
        *_module_rules(f"{block}.norm_2", f"{_LAYER}.post_attention_layernorm", unless=both),
        *_module_rules(f"{block}.norm_2", f"{_LAYER}.pre_feedforward_layernorm"),
        *_module_rules(f"{block}.mlp.fc_1", f"{_LAYER}.mlp.gate_proj"),
        *_module_rules(f"{block}.mlp.fc_2", f"{_LAYER}.mlp.up_proj", beside=f"{_LAYER}.mlp.gate_proj"),
        *_module_rules(f"{block}.mlp.fc", f"{_LAYER}.mlp.up_proj", unless=f"{_LAYER}.mlp.gate_proj"),
        *_module_rules(f"{block}.mlp.proj", f"{_LAYER}.mlp.down_proj"),
        *_module_rules(f"{block}.mlp.gate", f"{_LAYER}.mlp.gate"),
        *per_expert_rules(f"{block}.mlp.experts", ("fc_1", "fc_2", "proj")),
        *_module_rules(f"{block}.post_mlp_norm", both),
        *_module_rules("transformer.ln_f", "model.norm"),
    )


def _titan(projections: str, experts: Sequence[str], *, pairs: bool) -> tuple[TensorRule, ...]:
    rotated: DiskLayout = RotaryPairsLayout() if pairs else PLAIN
    block, attention, moe = "layers.{i}", "layers.{i}.attention", f"{_LAYER}.mlp.experts"
    return (
        *_module_rules("tok_embeddings", "model.embed_tokens"),
        *_module_rules(f"{block}.attention_norm", f"{_LAYER}.input_layernorm"),
        *_module_rules(f"{attention}.{projections}wq", _QKV[0], layout=rotated, by="query"),
        *_module_rules(f"{attention}.{projections}wk", _QKV[1], layout=rotated, by="kv"),
        *_module_rules(f"{attention}.{projections}wv", _QKV[2]),
        *_module_rules(f"{attention}.q_norm", f"{_LAYER}.self_attn.q_norm"),
        *_module_rules(f"{attention}.k_norm", f"{_LAYER}.self_attn.k_norm"),
        *_module_rules(f"{attention}.wo", f"{_LAYER}.self_attn.o_proj"),
        *_module_rules(f"{block}.ffn_norm", f"{_LAYER}.post_attention_layernorm"),
        *_module_rules(f"{block}.feed_forward.w1", f"{_LAYER}.mlp.gate_proj"),
        *_module_rules(f"{block}.feed_forward.w3", f"{_LAYER}.mlp.up_proj"),
        *_module_rules(f"{block}.feed_forward.w2", f"{_LAYER}.mlp.down_proj"),
        *_module_rules(f"{block}.moe.router.gate", f"{_LAYER}.mlp.gate"),
        *(TensorRule(f"{block}.moe.{disk}", (f"{moe}.{name}_proj.weight",)) for disk, name in zip(experts, ("gate", "up", "down"), strict=True)),
        *_module_rules("norm", "model.norm"),
    )  # fmt: skip


@dataclass(frozen=True)
class TrainerNaming:
    """Tensor names of one trainer.

    Attributes:
        marker_suffix: a name that only its folders have, at the end of a tensor's name.
        rules: where tensors are.
        families: that it is for; empty for all.
    """

    marker_suffix: str
    rules: tuple[TensorRule, ...]
    families: frozenset[str] = frozenset()

    def matches_names(self, family: ModelFamily, names: Iterable[str]) -> bool:
        """Return whether the tensor names of a folder of that family are this trainer's."""
        return (not self.families or family.name in self.families) and any(
            name.endswith(self.marker_suffix) for name in names
        )

    def adapt_family(self, family: ModelFamily, names: Iterable[str]) -> ModelFamily:
        """Return the family with this trainer's tensor names."""
        head = _META_HEAD if any(name.endswith(_META_HEAD) for name in names) else "lm_head.weight"
        return replace(
            family, prefix="", head=head, rules=(*self.rules, TensorRule(head, ("lm_head.weight",))), fused=()
        )


_EXPERTS = tuple(f"routed_experts.inner_experts.{name}" for name in ("w1_EFD", "w3_EFD", "w2_EDF"))
_OLD_EXPERTS = tuple(f"experts.{name}" for name in ("w1", "w3", "w2"))
_META, _QWEN = frozenset({"llama"}), frozenset({"qwen3", "qwen3_moe"})

DIALECTS = (
    TrainerNaming("transformer.h.0.attn.qkv.weight", _litgpt("qkv")),
    TrainerNaming("transformer.h.0.attn.attn.weight", _litgpt("attn", by="kv")),
    *(
        TrainerNaming(f"layers.0.attention.{projections}wq.weight", _titan(projections, experts, pairs=families is _META), families)
        for projections, experts in (("qkv_linear.", _EXPERTS), ("", _OLD_EXPERTS))
        for families in (_META, _QWEN)
    ),
)  # fmt: skip


def adapt_to_naming(family: ModelFamily, names: Iterable[str]) -> ModelFamily:
    """Return the family with the tensor names that a folder uses."""
    names = list(names)
    return next(
        (dialect.adapt_family(family, names) for dialect in DIALECTS if dialect.matches_names(family, names)), family
    )
