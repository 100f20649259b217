"""Encoders one setting away from BERT. DistilBERT (arXiv:1910.01108): BERT without segments and pooler. ELECTRA
(arXiv:2003.10555) and RoFormer (arXiv:2104.09864): embeddings that may be narrower than the layers; RoFormer has rotary positions.
Embedding models with rotary positions and post-norms: Nomic (arXiv:2402.01613) with SwiGLU, GTE (arXiv:2407.19669) with
GeGLU, Jina v3 (arXiv:2409.10173). MPNet (arXiv:2004.09297): learned positions and a bias by distance. EuroBERT (arXiv:2503.05500): Llama with bidirectional attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.families.bert_encoders import (
    BERT_HEAD,
    CARRIED_BERT,
    OUTPUT_BIAS,
    POST_NORMS,
    EncoderFamily,
    EncoderHeadsEntry,
    TokenTypesEntry,
    bert_config_entries,
    bert_tensor_rules,
    get_transformers_encoder_class,
)
from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    MultiHeadEntry,
    exclude_entries_of_fields,
    llama_config_entries,
)
from mega_ckpt.families.disk_layouts import LAYER, QKV, TensorRule, weight_bias_rules
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.families.window_entries import UniformWindowEntry
from mega_common.encoder_config import MaskedLmConfig, RelativePositionConfig
from mega_common.model_config import ModelConfig, RopeConfig

_ATTENTION, _MLP = f"{LAYER}.self_attn", f"{LAYER}.mlp"
_NORM_1, _NORM_2 = f"{LAYER}.post_attention_layernorm", f"{LAYER}.post_feedforward_layernorm"
_BIASES = {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}
_POST_NORM = {"causal": False, "norm": "layernorm", "norm_position": "sum", "embedding_norm": True, "qk_norm": False}


@dataclass(frozen=True)
class ClassifierActivationEntry:
    """Translation to and from config.json of the activation of a classifier's dense layer.
    It follows from the class in config.json.
    """

    activation: str
    handled_config_keys: frozenset[str] = frozenset()
    handled_model_fields: frozenset[str] = frozenset({"pooler_activation"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `pooler_activation` of a classifier, and no field of another model."""
        (kind, *_) = raw.get("architectures") or [""]
        return {"pooler_activation": self.activation} if str(kind).endswith("ForSequenceClassification") else {}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return no keys; ConfigMismatchError for a classifier with another activation than the family's, or another pooler."""
        if model.pooler and not model.task_head:
            raise ConfigMismatchError("pooler must be False")
        if model.pooler and model.pooler_activation != self.activation:
            raise ConfigMismatchError(f"pooler_activation must be {self.activation!r}, not {model.pooler_activation!r}")
        return {}


def _replace_entries(entries: Iterable[ConfigEntry], *changed: ConfigEntry) -> tuple[ConfigEntry, ...]:
    """Return the entries with those in `changed` in place of the ones for the same fields."""
    fields = frozenset[str]().union(*(entry.handled_model_fields for entry in changed))
    return (*exclude_entries_of_fields(entries, *fields), *changed)


def _module_rules(modules: Mapping[str, str | tuple[str, ...]]) -> tuple[TensorRule, ...]:
    """Return the rules of {module on disk: canonical modules in it}."""
    named = {disk: (parts,) if isinstance(parts, str) else parts for disk, parts in modules.items()}
    return tuple(rule for disk, parts in named.items() for rule in weight_bias_rules(disk, *parts))


def _outer_rules(body: str, head: Mapping[str, str]) -> tuple[TensorRule, ...]:
    """Return BERT's tensor rules for embeddings and heads, without those of layers."""
    return tuple(rule for rule in bert_tensor_rules(body, {}, head) if "{i}" not in rule.disk)


def _with_fixed(entries: Iterable[ConfigEntry], fields: Mapping[str, Any]) -> tuple[ConfigEntry, ...]:
    """Return BERT's entries with other constant `fields`."""
    return tuple(
        replace(entry, values={**entry.values, **fields}) if isinstance(entry, FixedFieldsEntry) else entry
        for entry in entries
    )


_DISTIL = "distilbert.transformer.layer.{i}"
DISTILBERT = EncoderFamily(
    name="distilbert",
    architecture="DistilBertForMaskedLM",
    prefix="distilbert.",
    head="vocab_projector.weight",
    buffers=r"(distilbert\.)?embeddings\.position_ids",
    entries=(
        KeyEntry("vocab_size", "vocab_size", 30522),
        KeyEntry("dim hidden_size", "hidden_size", 768),
        KeyEntry("hidden_dim", "ffn_hidden_size", 3072),
        KeyEntry("n_layers num_hidden_layers", "num_layers", 6),
        KeyEntry("n_heads num_attention_heads", "num_attention_heads", 12),
        KeyEntry("max_position_embeddings", "max_position", 512),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("activation", "activation", "gelu", {"gelu": "gelu"}),
        KeyEntry("dropout", "embedding_dropout residual_dropout", 0.1),
        KeyEntry("attention_dropout", "attention_dropout", 0.1),
        MultiHeadEntry(),
        EncoderHeadsEntry("DistilBert", "gelu", has_pairs=False),
        ClassifierActivationEntry("relu"),
        AllowedValuesEntry({"sliding_window": (None,), "layer_types": (None,), "tie_word_embeddings": (True,)}),
        FixedFieldsEntry({**_POST_NORM, **_BIASES, "norm_eps": 1e-12, "position": "learned", "tie_embeddings": True}),
    ),
    rules=(
        TensorRule("distilbert.embeddings.word_embeddings.weight", ("model.embed_tokens.weight",)),
        TensorRule("distilbert.embeddings.position_embeddings.weight", ("model.embed_positions.weight",)),
        *_module_rules({
            "distilbert.embeddings.LayerNorm": "model.embed_norm",
            **{f"{_DISTIL}.attention.{x}_lin": f"{_ATTENTION}.{x}_proj" for x in "qkv"},
            f"{_DISTIL}.attention.out_lin": f"{_ATTENTION}.o_proj",
            f"{_DISTIL}.sa_layer_norm": _NORM_1,
            f"{_DISTIL}.ffn.lin1": f"{_MLP}.up_proj",
            f"{_DISTIL}.ffn.lin2": f"{_MLP}.down_proj",
            f"{_DISTIL}.output_layer_norm": _NORM_2,
            "pre_classifier": "model.pooler",
            "classifier": "score",
            "vocab_transform": "lm_head.dense",
            "vocab_layer_norm": "lm_head.norm",
        }),
        TensorRule("vocab_projector.bias", (OUTPUT_BIAS,)),
        TensorRule("vocab_projector.weight", ("lm_head.weight",)),
    ),
    carried=frozenset({"sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout"}),
)  # fmt: skip


@dataclass(frozen=True)
class EmbeddingSizeEntry:
    """Translation to and from config.json of the width of embeddings; as wide as the layers, they need no projection.

    Attributes:
        default: width if the key is absent; None: that of the layers.
    """

    default: int | None
    handled_config_keys: frozenset[str] = frozenset({"embedding_size"})
    handled_model_fields: frozenset[str] = frozenset({"embedding_size"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `embedding_size`, which is None if the embeddings are as wide as the layers."""
        size = raw.get("embedding_size", self.default)
        return {"embedding_size": None if size == raw.get("hidden_size") else size}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `embedding_size` of config.json with its value."""
        return {"embedding_size": model.embedding_width}


def _narrow_rules(body: str, head: Mapping[str, str]) -> tuple[TensorRule, ...]:
    """Return BERT's tensor rules, and those of a projection of narrow embeddings."""
    return (
        *bert_tensor_rules(body, POST_NORMS, head),
        *_module_rules({f"{body}.embeddings_project": "model.embed_proj"}),
    )


# Keys of a class for multiple choice.
_SUMMARY = {
    f"summary_{key}" for key in ("activation", "first_dropout", "last_dropout", "proj_to_labels", "type", "use_proj")
}
_GENERATOR_HEAD = {
    "dense": "generator_predictions.dense", "norm": "generator_predictions.LayerNorm", "bias": "generator_lm_head.bias",
    "matrix": "generator_lm_head.weight",
}  # fmt: skip
ELECTRA = EncoderFamily(
    name="electra",
    architecture="ElectraForMaskedLM",
    prefix="electra.",
    head=_GENERATOR_HEAD["matrix"],
    dense_classifier=True,
    # the second: the discriminator's head, which predicts the tokens that a generator replaced
    buffers=r"(electra\.)?embeddings\.position_ids|discriminator_predictions\..*",
    entries=_replace_entries(
        bert_config_entries("Electra", norm_position="sum"),
        EncoderHeadsEntry("Electra", "gelu", has_pairs=False),
        EmbeddingSizeEntry(128),
        ClassifierActivationEntry("gelu"),
    ),
    rules=_narrow_rules("electra", _GENERATOR_HEAD),
    carried=CARRIED_BERT | _SUMMARY,
)

ROFORMER = EncoderFamily(
    name="roformer",
    architecture="RoFormerForMaskedLM",
    prefix="roformer.",
    head=BERT_HEAD["matrix"],
    bias_copy="cls.predictions.decoder.bias",
    dense_classifier=True,
    buffers=r"(roformer\.)?encoder\.embed_positions\.weight",  # sines and cosines
    entries=(
        *_with_fixed(
            _replace_entries(
                bert_config_entries("RoFormer", norm_position="sum"),
                EncoderHeadsEntry("RoFormer", "gelu", has_pairs=False),
                KeyEntry("max_position_embeddings", "max_position", 1536),
                KeyEntry("hidden_act", "activation", "gelu", {"gelu": "gelu"}),
                EmbeddingSizeEntry(None),
                ClassifierActivationEntry("gelu"),
            ),
            {"position": "rope", "rope": RopeConfig(interleaved=True)},
        ),
        AllowedValuesEntry({"rotary_value": (False,)}),
    ),
    rules=_narrow_rules("roformer", BERT_HEAD),
    carried=CARRIED_BERT | _SUMMARY,
)

NOMIC_BERT = EncoderFamily(
    name="nomic_bert",
    architecture="NomicBertForMaskedLM",
    prefix="nomic_bert.",
    head=BERT_HEAD["matrix"],
    bias_copy="cls.predictions.decoder.bias",
    entries=_with_fixed(
        _replace_entries(
            bert_config_entries("NomicBert", norm_position="sum"),
            EncoderHeadsEntry("NomicBert", "silu", has_pairs=False),
            KeyEntry("max_position_embeddings", "max_position", 2048),
            KeyEntry("hidden_act", "activation", "silu", {"silu": "swiglu"}),
            KeyEntry("hidden_dropout_prob", "embedding_dropout residual_dropout", 0.0),
            KeyEntry("attention_probs_dropout_prob", "attention_dropout", 0.0),
            KeyValueHeadsEntry(),
            RopeEntry(theta=1000.0),
        ),
        {"position": "rope", **dict.fromkeys(_BIASES, False)},
    ),
    rules=(
        *_module_rules({
            "nomic_bert.emb_ln": "model.embed_norm",
            "nomic_bert.encoder.layers.{i}.attn.Wqkv": QKV,
            "nomic_bert.encoder.layers.{i}.attn.out_proj": f"{_ATTENTION}.o_proj",
            "nomic_bert.encoder.layers.{i}.norm1": _NORM_1,
            "nomic_bert.encoder.layers.{i}.mlp.fc11": f"{_MLP}.up_proj",
            "nomic_bert.encoder.layers.{i}.mlp.fc12": f"{_MLP}.gate_proj",
            "nomic_bert.encoder.layers.{i}.mlp.fc2": f"{_MLP}.down_proj",
            "nomic_bert.encoder.layers.{i}.norm2": _NORM_2,
        }),
        *_outer_rules("nomic_bert", {**BERT_HEAD, "norm": "cls.predictions.transform.layer_norm"}),
    ),
    carried=CARRIED_BERT,
)  # fmt: skip

_HEAD = {
    "dense": "lm_head.dense",
    "norm": "lm_head.layer_norm",
    "bias": "lm_head.bias",
    "matrix": "lm_head.decoder.weight",
}
JINA_EMBEDDINGS_V3 = EncoderFamily(
    name="jina_embeddings_v3",
    architecture="JinaEmbeddingsV3ForMaskedLM",
    prefix="roberta.",
    head=_HEAD["matrix"],
    bias_copy="lm_head.decoder.bias",
    dense_classifier=True,
    entries=_with_fixed(
        _replace_entries(
            bert_config_entries("JinaEmbeddingsV3", norm_position="sum"),
            EncoderHeadsEntry("JinaEmbeddingsV3", "gelu", has_pairs=False),
            KeyEntry("max_position_embeddings", "max_position", 8194),
            TokenTypesEntry("type_vocab_size", "token_types", 1),
            KeyEntry("layer_norm_eps", "norm_eps", 1e-5),
            RopeEntry(theta=20_000.0),
        ),
        {"position": "rope"},
    ),
    rules=(
        *_module_rules({
            "roberta.emb_ln": "model.embed_norm",
            "roberta.encoder.layers.{i}.mixer.Wqkv": QKV,
            "roberta.encoder.layers.{i}.mixer.out_proj": f"{_ATTENTION}.o_proj",
            "roberta.encoder.layers.{i}.norm1": _NORM_1,
            "roberta.encoder.layers.{i}.mlp.fc1": f"{_MLP}.up_proj",
            "roberta.encoder.layers.{i}.mlp.fc2": f"{_MLP}.down_proj",
            "roberta.encoder.layers.{i}.norm2": _NORM_2,
        }),
        *_outer_rules("roberta", _HEAD),
    ),
    carried=CARRIED_BERT,
)  # fmt: skip


@dataclass(frozen=True)
class FixedPositionOffsetEntry:
    """Translation to and from config.json of MPNet's learned positions, which always start at row 2."""

    handled_config_keys: frozenset[str] = frozenset({"max_position_embeddings"})
    handled_model_fields: frozenset[str] = frozenset({"max_position", "position_offset"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields `max_position`, two less than the rows in config.json, and `position_offset`, 2."""
        return {"max_position": raw.get("max_position_embeddings", 512) - 2, "position_offset": 2}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json key of the number of rows; ConfigMismatchError for another offset."""
        if model.position_offset != 2:
            raise ConfigMismatchError(f"position_offset must be 2, not {model.position_offset}")
        return {"max_position_embeddings": model.max_position + 2}


_BUCKETS = RelativePositionConfig()  # 32 buckets up to a distance of 128
MPNET = EncoderFamily(
    name="mpnet",
    architecture="MPNetForMaskedLM",
    prefix="mpnet.",
    head=_HEAD["matrix"],
    bias_copy="lm_head.decoder.bias",
    dense_classifier=True,
    buffers=r"(mpnet\.)?embeddings\.position_ids",
    entries=(
        *_with_fixed(
            _replace_entries(
                exclude_entries_of_fields(bert_config_entries("MPNet", norm_position="sum"), "token_types"),
                EncoderHeadsEntry("MPNet", "gelu", has_pairs=False),
                FixedPositionOffsetEntry(),
            ),
            {"relative_bias": True, "relative": _BUCKETS, "token_types": 0},
        ),
        # transformers uses 32 buckets whatever the number of rows
        AllowedValuesEntry({"relative_attention_num_buckets": (_BUCKETS.buckets,)}),
    ),
    rules=(
        *_module_rules({
            **{f"mpnet.encoder.layer.{{i}}.attention.attn.{x}": f"{_ATTENTION}.{x}_proj" for x in "qkvo"},
            "mpnet.encoder.layer.{i}.attention.LayerNorm": _NORM_1,
        }),
        *(rule for rule in bert_tensor_rules("mpnet", POST_NORMS, _HEAD) if ".attention." not in rule.disk),
        TensorRule("mpnet.encoder.relative_attention_bias.weight", ("model.relative_bias.weight",)),
    ),
    carried=CARRIED_BERT,
)  # fmt: skip

GTE = EncoderFamily(
    name="gte",
    architecture="GteForMaskedLM",
    prefix="gte.",
    inner_prefix=("gte.", "new."),  # of folders that transformers did not write
    head=_HEAD["matrix"],
    entries=_with_fixed(
        _replace_entries(
            bert_config_entries("Gte", norm_position="sum"),
            EncoderHeadsEntry("Gte", "gelu", has_pairs=False),
            KeyEntry("max_position_embeddings", "max_position", 8192),
            KeyEntry("type_vocab_size", "token_types", 1),
            KeyEntry("hidden_act", "activation", "gelu", {"gelu": "geglu_erf", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}),
            KeyEntry("attention_probs_dropout_prob", "attention_dropout", 0.0),
            RopeEntry(theta=160_000.0),
        ),
        {"position": "rope", "mlp_bias": False, "mlp_out_bias": True},
    ),
    rules=(
        *_module_rules({
            "gte.embeddings.LayerNorm": "model.embed_norm",
            "gte.encoder.layer.{i}.attention.qkv_proj": QKV,
            "gte.encoder.layer.{i}.attention.o_proj": f"{_ATTENTION}.o_proj",
            "gte.encoder.layer.{i}.attn_ln": _NORM_1,
            "gte.encoder.layer.{i}.mlp.up_gate_proj": (f"{_MLP}.up_proj", f"{_MLP}.gate_proj"),
            "gte.encoder.layer.{i}.mlp.down_proj": f"{_MLP}.down_proj",
            "gte.encoder.layer.{i}.mlp_ln": _NORM_2,
        }),
        *_outer_rules("gte", {**_HEAD, "norm": "lm_head.norm", "bias": "lm_head.decoder.bias"}),
    ),
    carried=CARRIED_BERT,
)  # fmt: skip


@dataclass(frozen=True)
class EuroBertHeadsConfigEntry:
    """Translation to and from config.json of EuroBERT's heads: an output layer without a transform, or a classifier.
    The bias of the output layer is the MLP's. A classifier has a dense layer with GELU, on the first token
    (`classifier_pooling`: bos).
    """

    handled_config_keys: frozenset[str] = frozenset({"classifier_pooling"})
    handled_model_fields: frozenset[str] = frozenset({"masked_lm", "pooler", "pooler_activation", "sentence_pairs"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the fields of EuroBERT's heads; ConfigMismatchError for a classifier that is not on the first token."""
        (kind, *_) = raw.get("architectures") or [""]
        classifies, pooling = str(kind).endswith("ForSequenceClassification"), raw.get("classifier_pooling", "late")
        if classifies and pooling != "bos":
            raise ConfigMismatchError(f"classifier_pooling = {pooling!r} is not supported (only 'bos')")
        head = {"dense": False, "dense_bias": False, "bias": bool(raw.get("mlp_bias", False))}
        return {"masked_lm": head, **({"pooler_activation": "gelu"} if classifies else {})}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return `architectures` (the class without a task head) and, with a pooler, `classifier_pooling` of config.json.
        Raises ConfigMismatchError for other heads.
        """
        expected = MaskedLmConfig(dense=False, dense_bias=False, bias=model.mlp_bias)
        if model.masked_lm not in (None, expected):
            raise ConfigMismatchError(f"masked_lm must be {expected}, not {model.masked_lm}")
        if model.pooler and not model.task_head:
            raise ConfigMismatchError("pooler must be False")
        if model.pooler and model.pooler_activation != "gelu":
            raise ConfigMismatchError(f"pooler_activation must be 'gelu', not {model.pooler_activation!r}")
        pooling = {"classifier_pooling": "bos"} if model.pooler else {}
        return {"architectures": [get_transformers_encoder_class("EuroBert", model)], **pooling}


EUROBERT = EncoderFamily(
    name="eurobert",
    architecture="EuroBertForMaskedLM",
    entries=(
        *llama_config_entries(norm_eps=1e-5),
        KeyValueHeadsEntry(divisible=True),
        RopeEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyEntry("mlp_bias", "mlp_bias", False),
        UniformWindowEntry(supports_windows=False),
        EuroBertHeadsConfigEntry(),
        FixedFieldsEntry({"causal": False, "qk_norm": False}),
    ),
    rules=_module_rules({"dense": "model.pooler", "classifier": "score"}),
    carried=frozenset({"mask_token_id"}),
)
