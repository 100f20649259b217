"""The text part of Qwen3.5, dense and with experts: Qwen3-Next's layers, with plain projections on disk.

On the hub it is a part of a model that sees images too: `text_config` in config.json, `model.language_model.` on disk.
"""

from __future__ import annotations

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import decoder
from mega_ckpt.families.experts import expert_rules
from mega_ckpt.families.hybrid import Unused
from mega_ckpt.families.keys import Fixed
from mega_ckpt.families.layouts import Halves, Rule
from mega_ckpt.families.qwen3_next import QWEN_RULES, QwenLayers, qwen_entries, qwen_experts

_DELTA = "model.layers.{i}.linear_attn"
_RULES = (
    Rule(f"{_DELTA}.in_proj_qkv.weight", tuple(f"{_DELTA}.in_proj.{part}.weight" for part in "qkv")),
    *(Rule(f"{_DELTA}.in_proj_{part}.weight", (f"{_DELTA}.in_proj.{part}.weight",)) for part in "zba"),
    *QWEN_RULES,
)
_CARRIED = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers"})

QWEN3_5 = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    entries=(*decoder(), *qwen_entries(4), QwenLayers("mlp")),
    rules=_RULES,
    buffers=r"mtp\..*|model\.visual\..*",
    carried=_CARRIED,
    whole="qwen3_5",
)

_MLP = "model.layers.{i}.mlp.experts"
QWEN3_5_MOE = Family(
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    entries=(
        *(entry for entry in decoder() if "ffn_hidden_size" not in entry.fields),
        Unused({"ffn_hidden_size": "moe_intermediate_size"}),
        *qwen_entries(2),
        QwenLayers("moe"),
        qwen_experts(8, 256, Fixed({"normalize": True})),
    ),
    rules=(*_RULES, *expert_rules(_MLP)),
    fused=(
        *_RULES,
        Rule(f"{_MLP}.gate_up_proj", (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"), Halves()),
        Rule(f"{_MLP}.down_proj", (f"{_MLP}.down_proj.weight",), Halves()),
    ),
    buffers=r"mtp\..*|model\.visual\..*",
    carried=_CARRIED,
    whole="qwen3_5_moe",
)
