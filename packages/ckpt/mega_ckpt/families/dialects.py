"""What other trainers call the tensors of these families, where that is not what HuggingFace calls them. They are read, not written.

Facts: LitGPT 0.5 (model.py, scripts/convert_lit_checkpoint.py), torchtitan 0.3 (models/llama3, qwen3: state_dict_adapter.py), whose
older releases have Meta's own names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mega_ckpt.families.base import Family
from mega_ckpt.families.experts import expert_rules
from mega_ckpt.families.layouts import PLAIN, Layout, Rule
from mega_ckpt.pieces import Shape

_LAYER = "model.layers.{i}"
_META_HEAD = "output.weight"
_QKV = tuple(f"{_LAYER}.self_attn.{name}_proj" for name in "qkv")


@dataclass(frozen=True)
class Pairs:
    """Rows of queries or keys whose rotary pairs are neighbours, as Meta has them; here a pair is half a head apart."""

    by_slab: bool = False

    def shape(self, parts: Sequence[Shape]) -> Shape:
        """That of all heads together."""
        return (sum(part[0] for part in parts), *parts[0][1:])

    def views(self, disk: Tensor, parts: Sequence[Shape]) -> list[Tensor]:
        """A copy of each head's rows: these are read only."""
        heads = torch.split(disk, [part[0] for part in parts])
        return [head.view(-1, 2, *head.shape[1:]).transpose(0, 1).reshape(head.shape) for head in heads]


def _named(
    disk: str, *parts: str, layout: Layout = PLAIN, by: str = "", beside: str = "", unless: str = ""
) -> tuple[Rule, ...]:
    """The rules of a module's weight and bias; `beside` and `unless` go by weights."""
    beside, unless = (f"{name}.weight" if name else "" for name in (beside, unless))
    return tuple(
        Rule(f"{disk}.{kind}", tuple(f"{part}.{kind}" for part in parts), layout, by, beside, unless)
        for kind in ("weight", "bias")
    )


def _litgpt(qkv: str, by: str = "") -> tuple[Rule, ...]:
    block, both = "transformer.h.{i}", f"{_LAYER}.post_feedforward_layernorm"
    return (
        *_named("transformer.wte", "model.embed_tokens"),
        *_named(f"{block}.norm_1", f"{_LAYER}.input_layernorm"),
        *_named(f"{block}.attn.{qkv}", *_QKV, by=by),
        *_named(f"{block}.attn.norm_q", f"{_LAYER}.self_attn.q_norm"),
        *_named(f"{block}.attn.norm_k", f"{_LAYER}.self_attn.k_norm"),
        *_named(f"{block}.attn.proj", f"{_LAYER}.self_attn.o_proj"),
        *_named(f"{block}.post_attention_norm", f"{_LAYER}.post_attention_layernorm", beside=both),
        *_named(f"{block}.norm_2", f"{_LAYER}.post_attention_layernorm", unless=both),
        *_named(f"{block}.norm_2", f"{_LAYER}.pre_feedforward_layernorm"),
        *_named(f"{block}.mlp.fc_1", f"{_LAYER}.mlp.gate_proj"),
        *_named(f"{block}.mlp.fc_2", f"{_LAYER}.mlp.up_proj", beside=f"{_LAYER}.mlp.gate_proj"),
        *_named(f"{block}.mlp.fc", f"{_LAYER}.mlp.up_proj", unless=f"{_LAYER}.mlp.gate_proj"),
        *_named(f"{block}.mlp.proj", f"{_LAYER}.mlp.down_proj"),
        *_named(f"{block}.mlp.gate", f"{_LAYER}.mlp.gate"),
        *expert_rules(f"{block}.mlp.experts", ("fc_1", "fc_2", "proj")),
        *_named(f"{block}.post_mlp_norm", both),
        *_named("transformer.ln_f", "model.norm"),
    )


def _titan(projections: str, experts: Sequence[str], *, pairs: bool) -> tuple[Rule, ...]:
    rotated: Layout = Pairs() if pairs else PLAIN
    block, attention, moe = "layers.{i}", "layers.{i}.attention", f"{_LAYER}.mlp.experts"
    return (
        *_named("tok_embeddings", "model.embed_tokens"),
        *_named(f"{block}.attention_norm", f"{_LAYER}.input_layernorm"),
        *_named(f"{attention}.{projections}wq", _QKV[0], layout=rotated, by="query"),
        *_named(f"{attention}.{projections}wk", _QKV[1], layout=rotated, by="kv"),
        *_named(f"{attention}.{projections}wv", _QKV[2]),
        *_named(f"{attention}.q_norm", f"{_LAYER}.self_attn.q_norm"),
        *_named(f"{attention}.k_norm", f"{_LAYER}.self_attn.k_norm"),
        *_named(f"{attention}.wo", f"{_LAYER}.self_attn.o_proj"),
        *_named(f"{block}.ffn_norm", f"{_LAYER}.post_attention_layernorm"),
        *_named(f"{block}.feed_forward.w1", f"{_LAYER}.mlp.gate_proj"),
        *_named(f"{block}.feed_forward.w3", f"{_LAYER}.mlp.up_proj"),
        *_named(f"{block}.feed_forward.w2", f"{_LAYER}.mlp.down_proj"),
        *_named(f"{block}.moe.router.gate", f"{_LAYER}.mlp.gate"),
        *(Rule(f"{block}.moe.{disk}", (f"{moe}.{name}_proj.weight",)) for disk, name in zip(experts, ("gate", "up", "down"), strict=True)),
        *_named("norm", "model.norm"),
    )  # fmt: skip


@dataclass(frozen=True)
class Dialect:
    """What a trainer calls the tensors.

    Attributes:
        mark: a name that only its folders have, at the end of a tensor's name.
        rules: where tensors are.
        families: that it is for; empty for all.
    """

    mark: str
    rules: tuple[Rule, ...]
    families: frozenset[str] = frozenset()

    def speaks(self, family: Family, names: Iterable[str]) -> bool:
        """Whether the names of a folder of that family are these."""
        return (not self.families or family.name in self.families) and any(name.endswith(self.mark) for name in names)

    def of(self, family: Family, names: Iterable[str]) -> Family:
        """The family by these names."""
        head = _META_HEAD if any(name.endswith(_META_HEAD) for name in names) else "lm_head.weight"
        return replace(family, prefix="", head=head, rules=(*self.rules, Rule(head, ("lm_head.weight",))), fused=())


_EXPERTS = tuple(f"routed_experts.inner_experts.{name}" for name in ("w1_EFD", "w3_EFD", "w2_EDF"))
_OLD_EXPERTS = tuple(f"experts.{name}" for name in ("w1", "w3", "w2"))
_META, _QWEN = frozenset({"llama"}), frozenset({"qwen3", "qwen3_moe"})

DIALECTS = (
    Dialect("transformer.h.0.attn.qkv.weight", _litgpt("qkv")),
    Dialect("transformer.h.0.attn.attn.weight", _litgpt("attn", by="kv")),
    *(
        Dialect(f"layers.0.attention.{projections}wq.weight", _titan(projections, experts, pairs=families is _META), families)
        for projections, experts in (("qkv_linear.", _EXPERTS), ("", _OLD_EXPERTS))
        for families in (_META, _QWEN)
    ),
)  # fmt: skip


def spoken(family: Family, names: Iterable[str]) -> Family:
    """The family by the names that a folder has."""
    names = list(names)
    return next((dialect.of(family, names) for dialect in DIALECTS if dialect.speaks(family, names)), family)
