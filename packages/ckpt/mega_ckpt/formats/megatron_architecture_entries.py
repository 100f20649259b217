"""Megatron's settings of models that are not plain decoders: BERT and T5, distinguished from GPT by tensor names
(`infer_args_from_names`), and hybrids of `MambaModel` and `HybridModel`, with half a transformer layer per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mega_ckpt.families.config_entries import ConfigMismatchError, HfConfigDict, split_words
from mega_ckpt.formats.megatron_entries import MultiKeyEntry
from mega_common.hybrid_pattern import NORM_EPS, build_hybrid_pattern, build_mamba_section
from mega_common.layer_kinds import LETTERS, MambaConfig
from mega_common.model_config import ModelConfig


@dataclass(frozen=True)
class BertEntry(MultiKeyEntry):
    """BERT, from `is_encoder`."""

    covered_keys: frozenset[str] = frozenset({"is_encoder", "bert_binary_head"})
    covered_fields: frozenset[str] = frozenset({"causal", "token_types", "masked_lm", "pooler", "sentence_pairs"})

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return the fields; the sentence-order head implies two segment types."""
        if not raw.get("is_encoder"):
            return {}
        pairs = bool(raw.get("bert_binary_head", True))
        types = 2 if pairs else 0
        return {"causal": False, "token_types": types, "masked_lm": {}, "pooler": pairs, "sentence_pairs": pairs}

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return the switch."""
        return {} if model.causal else {"is_encoder": True, "bert_binary_head": model.sentence_pairs}


@dataclass(frozen=True)
class T5Entry(MultiKeyEntry):
    """T5: `is_encoder_decoder`, and the layers of both stacks; the output layer has a bias per token if it is tied to
    the embedding. The decoder start token is not a setting of Megatron; mega's own files store it.
    """

    covered_keys: frozenset[str] = split_words(
        """is_encoder_decoder encoder_num_layers decoder_num_layers decoder_start_token_id
        relative_attention_num_buckets relative_attention_max_distance"""
    )
    covered_fields: frozenset[str] = frozenset({"num_layers", "encoder", "relative"})

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return no fields for a model with one stack."""
        if not raw.get("is_encoder_decoder"):
            return {}
        encoder, decoder = raw["encoder_num_layers"], raw["decoder_num_layers"]
        tied, start = not raw.get("untie_embeddings_and_output_weights"), raw.get("decoder_start_token_id", 0)
        out = {
            "num_layers": encoder + decoder,
            "encoder": {"num_layers": encoder, "head_bias": tied, "start_token": start},
        }
        if raw.get("position_embedding_type") != "relative":
            return out
        most, buckets = raw.get("relative_attention_max_distance", 128), raw.get("relative_attention_num_buckets", 32)
        return {**out, "position": "relative", "relative": {"buckets": buckets, "max_distance": most}}

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return the numbers; the decoder's layers are Megatron's `num_layers`."""
        encoder = model.encoder
        if encoder is None:
            return {}
        if model.key_value_heads != model.num_attention_heads:
            raise ConfigMismatchError(f"num_kv_heads must be {model.num_attention_heads}: its T5 has no others")
        if encoder.head_bias != model.tie_embeddings:
            raise ConfigMismatchError(f"encoder.head_bias must be {model.tie_embeddings}, as tie_embeddings")
        if model.position == "relative" and model.relative.every_layer:
            raise ConfigMismatchError("relative.every_layer must be False")
        decoder = model.num_layers - encoder.num_layers
        return {
            "is_encoder_decoder": True, "num_layers": decoder, "encoder_num_layers": encoder.num_layers,
            "decoder_num_layers": decoder, "decoder_start_token_id": encoder.start_token,
            "relative_attention_num_buckets": model.relative.buckets,
            "relative_attention_max_distance": model.relative.max_distance,
        }  # fmt: skip


_CORE = "Megatron-Core 0.16"  # whose checkpoints these are
_LETTER = {kind: letter for letter, kind in LETTERS.items()}


@dataclass(frozen=True)
class HybridLayersEntry(MultiKeyEntry):
    """Layer kinds of a hybrid model, and sizes of its Mamba-2 layers."""

    covered_keys: frozenset[str] = split_words(
        """is_hybrid_model hybrid_layer_pattern hybrid_override_pattern hybrid_attention_ratio hybrid_mlp_ratio
        mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads"""
    )
    covered_fields: frozenset[str] = frozenset({"layers", "mamba"})

    def read_config_keys(self, raw: HfConfigDict) -> dict[str, Any]:
        """Return no fields for a model of transformer layers."""
        try:
            pattern = build_hybrid_pattern(raw)
        except ValueError as error:
            raise ConfigMismatchError(str(error)) from None
        if pattern is None:
            return {}
        if "G" in pattern.letters:
            raise ConfigMismatchError(f"hybrid_layer_pattern: the MambaModel of {_CORE} has M, *, - and E, and no G")
        if pattern.mtp_letters:
            raise ConfigMismatchError(f"hybrid_layer_pattern: no MambaModel of {_CORE} predicts further tokens (/)")
        out: dict[str, Any] = {"num_layers": len(pattern.letters), "layers": pattern.layer_kind_names}
        return {**out, "mamba": build_mamba_section(raw)} if "M" in pattern.letters else out

    def write_config_keys(self, model: ModelConfig) -> dict[str, Any]:
        """Return the pattern, under the name that every version reads, and the sizes."""
        if model.layers is None:
            return {"is_hybrid_model": False}
        halves = [[half for half in kind if half] for kind in model.layer_kinds[: model.num_layers]]
        if not all(len(half) == 1 for half in halves) or model.delta is not None:
            raise ConfigMismatchError(
                f"layers must each be mamba, attention, mlp or moe, and only one of them: others are not in {_CORE}"
            )
        if model.mtp_layers:
            raise ConfigMismatchError(f"mtp_layers of a hybrid must be 0: {_CORE} has none")
        mamba = model.mamba or MambaConfig(num_heads=1, head_dim=64)
        usual = mamba.model_copy(update={"conv_kernel": 4, "conv_bias": True, "bias": False, "dt_limit": (0.0, None)})
        if mamba != usual or (mamba.norm_eps or model.norm_eps) != NORM_EPS:
            rule = "conv_kernel 4, conv_bias, no bias, no dt_limit and norm_eps 1e-5"
            raise ConfigMismatchError(f"mamba must have {rule}")
        return {
            "is_hybrid_model": True,
            "hybrid_override_pattern": "".join(_LETTER[half] for (half,) in halves),
            "hybrid_attention_ratio": 0.0,
            "hybrid_mlp_ratio": 0.0,
            "mamba_state_dim": mamba.state_size,
            "mamba_head_dim": mamba.head_dim,
            "mamba_num_groups": mamba.num_groups,
            "mamba_num_heads": mamba.num_heads,
        }
