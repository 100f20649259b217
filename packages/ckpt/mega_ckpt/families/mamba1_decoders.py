"""Decoders of Mamba-1 layers (arXiv:2312.00752). Mamba-1 in every layer: Mamba, and Falcon-Mamba (arXiv:2410.05355) with norms
of dt, B and C. Jamba (AI21, arXiv:2403.19887): attention in every n-th layer, experts in every m-th, no positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import (
    DECODER,
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    exclude_entries_of_fields,
    layer_indices,
    split_words,
)
from mega_ckpt.families.disk_layouts import LAYER, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.hybrid_entries import (
    CONV1D,
    NO_WINDOW,
    UnusedFieldsEntry,
    check_layer_mixers,
    parse_layer_mixers,
)
from mega_ckpt.families.mamba_decoders import BACKBONE, FEED_FORWARD_RULES, MambaLayersEntry
from mega_ckpt.families.moe_entries import (
    MoeFieldEntry,
    MoeInLayerPatternEntry,
    MoeSectionEntry,
    build_per_expert_tensor_rules,
    build_router_config_entries,
)
from mega_common.layer_kinds import Mamba1Config
from mega_common.model_config import ModelConfig

_MIXER = f"{LAYER}.mamba1"


@dataclass(frozen=True)
class Mamba1SectionEntry:
    """Translation to and from config.json of the section `mamba1` of `ModelConfig`, the sizes of Mamba-1 layers.
    A model without Mamba layers may lack it.

    Attributes:
        entries: mapping between the keys and the section's fields.
        prefix: prefix of the key `expand`, the ratio of channels to the model's width.
        rank: key of the rank of the step sizes; "auto" is a sixteenth of the model's width.
        norms: the family's norms of dt, B and C.
    """

    entries: tuple[MoeFieldEntry, ...]
    prefix: str = ""
    rank: str = "time_step_rank"
    norms: str = "none"
    handled_model_fields: frozenset[str] = frozenset({"mamba1"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        keys = {f"{self.prefix}expand", self.rank}
        return frozenset(keys).union(*(entry.handled_config_keys for entry in self.entries))

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` section `mamba1`, the sizes of Mamba-1 layers, from config.json."""
        width, rank = raw.get("hidden_size", 0), raw.get(self.rank, "auto")
        section = {
            "inner_size": int(raw.get(f"{self.prefix}expand", 2) * width),
            "dt_rank": math.ceil(width / 16) if rank == "auto" else int(rank),
            "norms": self.norms,
        }
        for entry in self.entries:
            section |= entry.fields_from_config(raw)
        return {"mamba1": section}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of Mamba-1 sizes; those of a valid placeholder for a model without Mamba layers.
        Raises ConfigMismatchError for sizes, norms or an epsilon that no key expresses.
        """
        width = model.hidden_size
        placeholder = {"inner_size": 2 * width, "dt_rank": 1, "norms": self.norms}
        section = model.mamba1 or Mamba1Config.model_validate(placeholder)
        expand, rest = divmod(section.inner_size, width)
        if rest:
            raise ConfigMismatchError(f"mamba1.inner_size must be a multiple of hidden_size = {width}")
        if section.norms != self.norms:
            raise ConfigMismatchError(f"mamba1.norms must be {self.norms!r}, not {section.norms!r}")
        own_eps = any("norm_eps" in entry.handled_model_fields for entry in self.entries) or self.norms == "none"
        if not own_eps and section.norm_eps not in (None, model.norm_eps):
            raise ConfigMismatchError(f"mamba1.norm_eps must be norm_eps = {model.norm_eps}, not {section.norm_eps}")
        out: dict[str, Any] = {f"{self.prefix}expand": expand, self.rank: section.dt_rank}
        for entry in self.entries:
            out |= entry.config_from_fields(section)
        return out


@dataclass(frozen=True)
class MixerNormEpsEntry:
    """Translation to and from config.json of Falcon-Mamba's `mixer_rms_eps`, the epsilon of the norms of dt, B and C."""

    handled_config_keys: frozenset[str] = frozenset({"mixer_rms_eps"})
    handled_model_fields: frozenset[str] = frozenset({"norm_eps"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `Mamba1Config` field `norm_eps` from config.json."""
        return {"norm_eps": raw.get("mixer_rms_eps", 1e-6)}

    def config_from_fields(self, model: Mamba1Config) -> dict[str, Any]:
        """Return the key `mixer_rms_eps`; ConfigMismatchError if `mamba1` has no epsilon of its own."""
        if model.norm_eps is None:
            raise ConfigMismatchError("mamba1.norm_eps must be set: mixer_rms_eps is independent of layer_norm_epsilon")
        return {"mixer_rms_eps": model.norm_eps}


def mamba1_tensor_rules(module: str) -> tuple[TensorRule, ...]:
    """Return the tensor rules of Mamba-1 layers with one projection of x|z; `module` is the Mamba module's disk name."""
    unfused = ["x_proj.weight", "dt_proj.weight", "dt_proj.bias", "A_log", "D", "out_proj.weight", "out_proj.bias"]
    return (
        *weight_bias_rules(f"{module}.in_proj", *(f"{_MIXER}.in_proj.{part}" for part in "xz")),
        TensorRule(f"{module}.conv1d.weight", (f"{_MIXER}.conv1d.x.weight",), CONV1D),
        TensorRule(f"{module}.conv1d.bias", (f"{_MIXER}.conv1d.x.bias",)),
        *(TensorRule(f"{module}.{name}", (f"{_MIXER}.{name}",)) for name in unfused),
        *(
            TensorRule(f"{module}.{part.lower()}_layernorm.weight", (f"{_MIXER}.{part}_norm.weight",))
            for part in ("dt", "B", "C")
        ),
    )


def _backbone_entries(norms: str, *more: MoeFieldEntry) -> tuple[ConfigEntry, ...]:
    """Return the config entries of a decoder with Mamba-1 in every layer."""
    sizes = (
        KeyEntry("state_size", "state_size", 16),
        KeyEntry("conv_kernel", "conv_kernel", 4),
        KeyEntry("use_conv_bias", "conv_bias", True),
        KeyEntry("use_bias", "bias", False),
    )
    return (
        KeyEntry("vocab_size", "vocab_size"),
        KeyEntry("hidden_size", "hidden_size"),
        MambaLayersEntry("mamba1", 32),
        Mamba1SectionEntry((*sizes, *more), norms=norms),
        KeyEntry("layer_norm_epsilon", "norm_eps", 1e-5),
        KeyEntry("initializer_range", "init_std", 0.1),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        AllowedValuesEntry({"hidden_act": ("silu", "swish")}),
        *NO_WINDOW,
        UnusedFieldsEntry({"num_attention_heads": 1, "ffn_hidden_size": "hidden_size", "max_position": 4096}),
        FixedFieldsEntry({"norm": "rmsnorm", "position": "none"}),
    )


_BACKBONE_RULES = (
    TensorRule("backbone.embeddings.weight", ("model.embed_tokens.weight",)),
    TensorRule(f"{BACKBONE}.norm.weight", (f"{LAYER}.input_layernorm.weight",)),
    *mamba1_tensor_rules(f"{BACKBONE}.mixer"),
    TensorRule("backbone.norm_f.weight", ("model.norm.weight",)),
)
# Initialization of time steps, the precision of the residual stream, the choice of code, and the width that follows from `expand`.
_CARRIED = split_words(
    """rescale_prenorm_residual residual_in_fp32 time_step_min time_step_max time_step_floor time_step_scale time_step_init_scheme
    intermediate_size use_mambapy use_falcon_mambapy use_associative_scan rms_norm ssm_cfg fused_add_norm d_model d_inner n_layer
    pad_vocab_size_multiple num_attention_heads head_dim max_position_embeddings"""
)

MAMBA1 = ModelFamily(
    name="mamba",
    architecture="MambaForCausalLM",
    entries=_backbone_entries("none"),
    prefix="backbone.",
    rules=_BACKBONE_RULES,
    carried=_CARRIED,
)

FALCON_MAMBA = ModelFamily(
    name="falcon_mamba",
    architecture="FalconMambaForCausalLM",
    entries=_backbone_entries("plain", MixerNormEpsEntry()),
    prefix="backbone.",
    rules=_BACKBONE_RULES,
    carried=_CARRIED,
)


_EXPERTS = MoeSectionEntry(
    (
        *build_router_config_entries("num_experts num_local_experts", top_k=2, normalize=True, experts=16)[:-1],
        FixedFieldsEntry({"normalize": False}),
        KeyEntry("intermediate_size", "ffn_hidden_size"),
    ),
    MoeInLayerPatternEntry(),
)


@dataclass(frozen=True)
class JambaLayersEntry:
    """Translation to and from config.json of the layers of Jamba with attention and with experts.
    Both are every n-th layer from an offset; `num_experts` = 1 leaves all layers without experts.
    """

    handled_config_keys: frozenset[str] = _EXPERTS.handled_config_keys | split_words(
        "attn_layer_period attn_layer_offset expert_layer_period expert_layer_offset layers_block_type layer_types layers_num_experts"
    )
    handled_model_fields: frozenset[str] = frozenset({"layers", "moe"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `layers` ("mixer+feed") and, with experts, `moe`.
        Raises ConfigMismatchError if a list of layers conflicts with periods and offsets.
        """
        layers = layer_indices(raw)
        attends, routes = _every(raw, "attn_layer", 8, 4), _every(raw, "expert_layer", 2, 1)
        mixers = ["attention" if attends(layer) else "mamba1" for layer in layers]
        section = _EXPERTS.fields_from_config(raw)
        experts = [section["moe"]["num_experts"] if routes(layer) else 1 for layer in layers]
        kinds = raw.get("layers_block_type") or raw.get("layer_types")
        if kinds and parse_layer_mixers(kinds, "mamba1", layers) != mixers:
            raise ConfigMismatchError("layer_types conflicts with attn_layer_period and attn_layer_offset")
        if raw.get("layers_num_experts", experts) != experts:
            raise ConfigMismatchError("layers_num_experts conflicts with expert_layer_period and expert_layer_offset")
        names = [f"{mixer}+{'moe' if count > 1 else 'mlp'}" for mixer, count in zip(mixers, experts, strict=True)]
        return {"layers": names, **(section if max(experts, default=1) > 1 else {})}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of attention layers and experts; ConfigMismatchError unless both are every n-th layer.

        Raises:
            ConfigMismatchError: also if there is only one expert, or experts are not as wide as the MLP.
        """
        attends = [mixer == "attention" for mixer in check_layer_mixers(model, "mamba1")]
        routes = [kind.feed_forward == "moe" for kind in model.layer_kinds[: model.num_layers]]
        out = _find_every("attn_layer", attends)
        if model.moe is None:
            return {**out, "num_experts": 1}
        if model.moe.num_experts == 1:
            raise ConfigMismatchError("moe.num_experts must be more than 1")
        if model.moe.ffn_hidden_size != model.ffn_hidden_size:
            raise ConfigMismatchError(f"moe.ffn_hidden_size must be ffn_hidden_size = {model.ffn_hidden_size}")
        return {**out, **_find_every("expert_layer", routes), **_EXPERTS.config_from_fields(model)}


def _every(raw: ConfigDict, name: str, period: int, offset: int) -> Any:
    """Return the function that says whether a layer is selected by `{name}_period` and `{name}_offset` of config.json."""
    period, offset = raw.get(f"{name}_period", period), raw.get(f"{name}_offset", offset)
    if not 0 <= offset < period:
        raise ConfigMismatchError(f"{name}_offset = {offset} must be at least 0 and below {name}_period = {period}")
    return lambda layer: layer % period == offset


def _find_every(name: str, selected: Sequence[bool]) -> dict[str, int]:
    """Return `{name}_period` and `{name}_offset` of config.json that select these layers.
    With fewer than two, the period is the number of layers, and one more without any.
    """
    chosen = [layer for layer, each in enumerate(selected) if each]
    offset = chosen[0] if chosen else len(selected)
    period = chosen[1] - chosen[0] if len(chosen) > 1 else max(len(selected), offset + 1)
    if chosen != list(range(offset, len(selected), period)) or offset >= period:
        raise ConfigMismatchError(
            f"layers {chosen} must be every n-th layer, as {name}_period and {name}_offset select them"
        )
    return {f"{name}_period": period, f"{name}_offset": offset}


JAMBA = ModelFamily(
    name="jamba",
    architecture="JambaForCausalLM",
    entries=(
        *exclude_entries_of_fields(DECODER, "position"),
        FixedFieldsEntry({"norm": "rmsnorm", "position": "none"}),
        KeyValueHeadsEntry(kv_default=8, explicit_dim=False),
        JambaLayersEntry(),
        Mamba1SectionEntry(
            (
                KeyEntry("mamba_d_state", "state_size", 16),
                KeyEntry("mamba_d_conv", "conv_kernel", 4),
                KeyEntry("mamba_conv_bias", "conv_bias", True),
                KeyEntry("mamba_proj_bias", "bias", False),
            ),
            prefix="mamba_",
            rank="mamba_dt_rank",
            norms="weight",
        ),
        *NO_WINDOW,
        FixedFieldsEntry({"qk_norm": False, "qkv_bias": False, "attention_out_bias": False, "mlp_bias": False}),
    ),
    rules=(
        *mamba1_tensor_rules(f"{LAYER}.mamba"),
        *FEED_FORWARD_RULES,
        TensorRule(f"{LAYER}.feed_forward.router.weight", (f"{LAYER}.mlp.gate.weight",)),
        *build_per_expert_tensor_rules(f"{LAYER}.feed_forward.experts"),
    ),
    carried=split_words("num_logits_to_keep use_mamba_kernels use_mambapy use_associative_scan mamba_inner_layernorms"),
)
