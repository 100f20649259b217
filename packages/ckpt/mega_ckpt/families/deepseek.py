"""DeepSeek V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437): latent attention, many small experts, shared ones beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import DECODER
from mega_ckpt.families.experts import AfterDense, Experts, Section, SharedExperts, expert_rules
from mega_ckpt.families.keys import Entry, Fixed, Key, MismatchError, Only, Raw
from mega_ckpt.families.layouts import Rule
from mega_ckpt.families.rope import Rope
from mega_ckpt.families.windows import SameWindow
from mega_common.config import Config
from mega_common.model_config import MlaConfig, ModelConfig, MoeConfig

_MLP = "model.layers.{i}.mlp"
_FURTHER = Key("num_nextn_predict_layers num_mtp_layers", "mtp_layers", 1)
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class Latent:
    """The section `mla`, and what follows from it. The norms of its latents always have transformers' default epsilon."""

    keys: frozenset[str] = frozenset({*_LATENT, "head_dim", "qk_head_dim", "num_key_value_heads"})
    fields: frozenset[str] = frozenset({"mla", "num_kv_heads", "head_dim"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The widths; those that repeat others must agree."""
        absent = [key for key in _LATENT if key not in raw]
        if absent:
            raise MismatchError(f"{', '.join(absent)}: missing")
        rotated, heads = raw["qk_rope_head_dim"], raw.get("num_attention_heads")
        known = {"head_dim": rotated, "qk_head_dim": raw["qk_nope_head_dim"] + rotated, "num_key_value_heads": heads}
        for key, value in known.items():
            if raw.get(key, value) not in (value, None):
                raise MismatchError(f"{key} = {raw[key]!r} must be {value}")
        return {"mla": {key: raw[key] for key in _LATENT}}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The widths."""
        if model.mla is None:
            raise MismatchError("mla is missing: this is a family of latent attention")
        if model.mla != MlaConfig(**{key: getattr(model.mla, key) for key in _LATENT}):
            raise MismatchError(f"mla = {model.mla!r} has fields without a counterpart")
        return {key: getattr(model.mla, key) for key in _LATENT} | {"num_key_value_heads": model.num_attention_heads}


@dataclass(frozen=True)
class Groups:
    """Groups of experts, of which a token may use some. V2 uses them only if its method says so.

    Attributes:
        methods: names of the method without and with groups; the same where there is one method.
        score: what a group is chosen by.
        defaults: groups, and groups of a token, where the keys are absent.
    """

    methods: tuple[str, str]
    score: str
    defaults: tuple[int | None, int | None] = (None, None)
    keys: frozenset[str] = frozenset({"n_group", "topk_group", "topk_method"})
    fields: frozenset[str] = frozenset({"groups", "top_groups", "group_score"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Both numbers; one group where the method has none."""
        method = raw.get("topk_method") or self.methods[0]
        if method not in self.methods:
            raise MismatchError(f"topk_method = {method!r} is not supported (only {' or '.join(self.methods)})")
        if method != self.methods[1]:
            return {"groups": 1, "top_groups": 1, "group_score": self.score}
        groups, top = raw.get("n_group", self.defaults[0]), raw.get("topk_group", self.defaults[1])
        return {"groups": groups or 1, "top_groups": top or 1, "group_score": self.score}

    def write(self, model: Config) -> dict[str, Any]:
        """Both numbers and the method."""
        assert isinstance(model, MoeConfig)
        if model.groups > 1 and model.group_score != self.score:
            raise MismatchError(f"moe.group_score must be {self.score!r}, not {model.group_score!r}")
        return {
            "n_group": model.groups,
            "topk_group": model.top_groups,
            "topk_method": self.methods[model.groups > 1],
        }


def deepseek(version: str, moe: tuple[Section, ...], layers: AfterDense, *more: Entry) -> Family:
    """A version of DeepSeek: `moe` is what it says of its router, `layers` which layers have experts."""
    return Family(
        name=f"deepseek_{version.lower()}",
        architecture=f"Deepseek{version}ForCausalLM",
        entries=(
            *DECODER,
            Rope(scalings=frozenset({"none", "yarn"}), interleaved=True),
            Latent(),
            Key("attention_bias", "qkv_bias attention_out_bias", False),
            Experts(
                (
                    Key("n_routed_experts num_local_experts num_experts", "num_experts"),
                    Key("moe_intermediate_size", "ffn_hidden_size"),
                    Key("aux_loss_alpha", "aux_loss", 0.001),
                    *moe,
                ),
                layers,
            ),
            SameWindow(knows=False),
            Fixed({"qk_norm": False}),
            *more,
        ),
        rules=(
            *expert_rules(f"{_MLP}.experts"),
            *(
                Rule(f"{_MLP}.shared_experts.{part}.{kind}", (f"{_MLP}.shared_expert.{part}.{kind}",))
                for part in ("gate_proj", "up_proj", "down_proj")
                for kind in ("weight", "bias")
            ),
        ),
        carried=frozenset({"ep_size", "seq_aux"}),
    )


DEEPSEEK_V2 = deepseek(
    "V2",
    (
        Key("num_experts_per_tok", "top_k"),
        Key("routed_scaling_factor", "scaling", 1.0),
        SharedExperts(2),
        Groups(("greedy", "group_limited_greedy"), "max"),
        Only({"norm_topk_prob": (False,), "scoring_func": ("softmax",)}),
        Fixed({"normalize": False, "score": "softmax", "selection_bias": False}),
    ),
    AfterDense(0),
    Key("mlp_bias", "mlp_bias", False),
)

DEEPSEEK_V3 = deepseek(
    "V3",
    (
        Key("num_experts_per_tok", "top_k", 8),
        Key("routed_scaling_factor", "scaling", 2.5),
        SharedExperts(1),
        Groups(("noaux_tc", "noaux_tc"), "top2", (8, 4)),
        Key("norm_topk_prob", "normalize", True),
        Only({"scoring_func": ("sigmoid",)}),
        Fixed({"score": "sigmoid", "selection_bias": True}),
    ),
    AfterDense(3, further=_FURTHER),
    _FURTHER,
    Only({"rope_interleave": (True,)}),
    Fixed({"mlp_bias": False}),
)
