"""Tensor names of other trainers (LitGPT, torchtitan), which are read and not written.

Sources: LitGPT 0.5 (model.py, scripts/convert_lit_checkpoint.py), torchtitan 0.3 (models/llama3, qwen3:
state_dict_adapter.py); older releases of torchtitan have Meta's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mega_ckpt.families.disk_layouts import LAYER, PLAIN, QKV, DiskLayout, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.moe_entries import build_per_expert_tensor_rules
from mega_ckpt.tensor_pieces import TensorShape

_META_HEAD = "output.weight"


@dataclass(frozen=True)
class RotaryPairsLayout:
    """Disk layout of query or key rows with adjacent rotary pairs, as in Meta's Llama code.
    In canonical tensors the rows of a pair are half a head apart.
    """

    splits_on_first_axis: bool = False

    def disk_shape(self, parts: Sequence[TensorShape]) -> TensorShape:
        """Return the disk shape: the rows of all heads (`parts`) together."""
        return (sum(part[0] for part in parts), *parts[0][1:])

    def canonical_views(self, disk: Tensor, parts: Sequence[TensorShape]) -> list[Tensor]:
        """Return each head's rows in canonical order, as copies and not views: the layout is read-only."""
        heads = torch.split(disk, [part[0] for part in parts])
        return [head.view(-1, 2, *head.shape[1:]).transpose(0, 1).reshape(head.shape) for head in heads]


def _litgpt(qkv: str, per_head: str = "") -> tuple[TensorRule, ...]:
    block, both = "transformer.h.{i}", f"{LAYER}.post_feedforward_layernorm"
    return (
        *weight_bias_rules("transformer.wte", "model.embed_tokens"),
        *weight_bias_rules(f"{block}.norm_1", f"{LAYER}.input_layernorm"),
        *weight_bias_rules(f"{block}.attn.{qkv}", *QKV, per_head=per_head),
        *weight_bias_rules(f"{block}.attn.norm_q", f"{LAYER}.self_attn.q_norm"),
        *weight_bias_rules(f"{block}.attn.norm_k", f"{LAYER}.self_attn.k_norm"),
        *weight_bias_rules(f"{block}.attn.proj", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{block}.post_attention_norm", f"{LAYER}.post_attention_layernorm", requires=both),
        *weight_bias_rules(f"{block}.norm_2", f"{LAYER}.post_attention_layernorm", unless=both),
        *weight_bias_rules(f"{block}.norm_2", f"{LAYER}.pre_feedforward_layernorm"),
        *weight_bias_rules(f"{block}.mlp.fc_1", f"{LAYER}.mlp.gate_proj"),
        *weight_bias_rules(f"{block}.mlp.fc_2", f"{LAYER}.mlp.up_proj", requires=f"{LAYER}.mlp.gate_proj"),
        *weight_bias_rules(f"{block}.mlp.fc", f"{LAYER}.mlp.up_proj", unless=f"{LAYER}.mlp.gate_proj"),
        *weight_bias_rules(f"{block}.mlp.proj", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules(f"{block}.mlp.gate", f"{LAYER}.mlp.gate"),
        *build_per_expert_tensor_rules(f"{block}.mlp.experts", ("fc_1", "fc_2", "proj")),
        *weight_bias_rules(f"{block}.post_mlp_norm", both),
        *weight_bias_rules("transformer.ln_f", "model.norm"),
    )


def _titan(projections: str, experts: Sequence[str], *, pairs: bool) -> tuple[TensorRule, ...]:
    rotated: DiskLayout = RotaryPairsLayout() if pairs else PLAIN
    block, attention, moe = "layers.{i}", "layers.{i}.attention", f"{LAYER}.mlp.experts"
    return (
        *weight_bias_rules("tok_embeddings", "model.embed_tokens"),
        *weight_bias_rules(f"{block}.attention_norm", f"{LAYER}.input_layernorm"),
        *weight_bias_rules(f"{attention}.{projections}wq", QKV[0], layout=rotated, per_head="query"),
        *weight_bias_rules(f"{attention}.{projections}wk", QKV[1], layout=rotated, per_head="kv"),
        *weight_bias_rules(f"{attention}.{projections}wv", QKV[2]),
        *weight_bias_rules(f"{attention}.q_norm", f"{LAYER}.self_attn.q_norm"),
        *weight_bias_rules(f"{attention}.k_norm", f"{LAYER}.self_attn.k_norm"),
        *weight_bias_rules(f"{attention}.wo", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{block}.ffn_norm", f"{LAYER}.post_attention_layernorm"),
        *weight_bias_rules(f"{block}.feed_forward.w1", f"{LAYER}.mlp.gate_proj"),
        *weight_bias_rules(f"{block}.feed_forward.w3", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{block}.feed_forward.w2", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules(f"{block}.moe.router.gate", f"{LAYER}.mlp.gate"),
        *(TensorRule(f"{block}.moe.{disk}", (f"{moe}.{name}_proj.weight",)) for disk, name in zip(experts, ("gate", "up", "down"), strict=True)),
        *weight_bias_rules("norm", "model.norm"),
    )  # fmt: skip


@dataclass(frozen=True)
class ForeignTensorNaming:
    """Tensor names of another trainer (LitGPT or torchtitan) for models of HuggingFace families.

    Attributes:
        marker_suffix: end of a tensor name that identifies the trainer's folders.
        rules: names and layouts of its tensors.
        families: names of the families that it applies to; empty for all.
    """

    marker_suffix: str
    rules: tuple[TensorRule, ...]
    families: frozenset[str] = frozenset()

    def matches_names(self, family: ModelFamily, names: Iterable[str]) -> bool:
        """Return whether `names`, the tensor names in a folder with a model of `family`, are this trainer's."""
        return (not self.families or family.name in self.families) and any(
            name.endswith(self.marker_suffix) for name in names
        )

    def apply_tensor_naming(self, family: ModelFamily, names: Iterable[str]) -> ModelFamily:
        """Return `family` with this trainer's tensor names and layouts."""
        head = _META_HEAD if any(name.endswith(_META_HEAD) for name in names) else "lm_head.weight"
        return replace(
            family, prefix="", head=head, rules=(*self.rules, TensorRule(head, ("lm_head.weight",))), fused=()
        )


_EXPERTS = tuple(f"routed_experts.inner_experts.{name}" for name in ("w1_EFD", "w3_EFD", "w2_EDF"))
_OLD_EXPERTS = tuple(f"experts.{name}" for name in ("w1", "w3", "w2"))
_META, _QWEN = frozenset({"llama"}), frozenset({"qwen3", "qwen3_moe"})

TRAINER_NAMINGS = (
    ForeignTensorNaming("transformer.h.0.attn.qkv.weight", _litgpt("qkv")),
    ForeignTensorNaming("transformer.h.0.attn.attn.weight", _litgpt("attn", per_head="kv")),
    *(
        ForeignTensorNaming(f"layers.0.attention.{projections}wq.weight", _titan(projections, experts, pairs=families is _META), families)
        for projections, experts in (("qkv_linear.", _EXPERTS), ("", _OLD_EXPERTS))
        for families in (_META, _QWEN)
    ),
)  # fmt: skip


def adapt_family_to_tensor_naming(family: ModelFamily, names: Iterable[str]) -> ModelFamily:
    """Return `family` with the tensor names of another trainer (LitGPT or torchtitan), if a folder has them.
    The folder's tensor names are `names`. The family is unchanged if they do not follow such a naming.
    """
    names = list(names)
    naming = next((naming for naming in TRAINER_NAMINGS if naming.matches_names(family, names)), None)
    return naming.apply_tensor_naming(family, names) if naming else family
