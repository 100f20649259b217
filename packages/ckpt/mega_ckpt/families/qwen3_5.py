"""Text part of Qwen3.5, dense and with experts: the layers of Qwen3-Next, with plain projections on disk.

On the hub it is a part of a model that sees images too: `text_config` in config.json, `model.language_model.` on disk.
"""

from __future__ import annotations

from mega_ckpt.families.common_entries import decoder_entries
from mega_ckpt.families.config_entries import FixedFieldsEntry
from mega_ckpt.families.disk_layouts import ConcatExpertsLayout, TensorRule
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.hybrid_entries import UnusedFieldsEntry
from mega_ckpt.families.moe_entries import per_expert_rules
from mega_ckpt.families.qwen3_next import QWEN_RULES, QwenLayersEntry, qwen_hybrid_entries, qwen_hybrid_experts

_DELTA = "model.layers.{i}.linear_attn"
_RULES = (
    TensorRule(f"{_DELTA}.in_proj_qkv.weight", tuple(f"{_DELTA}.in_proj.{part}.weight" for part in "qkv")),
    *(TensorRule(f"{_DELTA}.in_proj_{part}.weight", (f"{_DELTA}.in_proj.{part}.weight",)) for part in "zba"),
    *QWEN_RULES,
)
_CARRIED = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"})

QWEN3_5 = ModelFamily(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    entries=(*decoder_entries(), *qwen_hybrid_entries(4), QwenLayersEntry("mlp")),
    rules=_RULES,
    buffers=r"mtp\..*|model\.visual\..*",
    carried=_CARRIED,
    outer_model_type="qwen3_5",
)

_MLP = "model.layers.{i}.mlp.experts"
QWEN3_5_MOE = ModelFamily(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    entries=(
        *(entry for entry in decoder_entries() if "ffn_hidden_size" not in entry.covered_fields),
        UnusedFieldsEntry({"ffn_hidden_size": "moe_intermediate_size"}),
        *qwen_hybrid_entries(2),
        QwenLayersEntry("moe"),
        qwen_hybrid_experts(8, 256, FixedFieldsEntry({"normalize": True})),
    ),
    rules=(*_RULES, *per_expert_rules(_MLP)),
    fused=(
        *_RULES,
        TensorRule(
            f"{_MLP}.gate_up_proj", (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"), ConcatExpertsLayout()
        ),
        TensorRule(f"{_MLP}.down_proj", (f"{_MLP}.down_proj.weight",), ConcatExpertsLayout()),
    ),
    buffers=r"mtp\..*|model\.visual\..*",
    carried=_CARRIED,
    outer_model_type="qwen3_5_moe",
)
