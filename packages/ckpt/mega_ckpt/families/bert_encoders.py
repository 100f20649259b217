"""Encoders. BERT (arXiv:1810.04805), and Megatron's with pre-norms and no embedding norm (arXiv:1909.08053). RoBERTa
(arXiv:1907.11692): BERT without sentence pairs, positions after the padding position; XLM-RoBERTa (arXiv:1911.02116),
CamemBERT (arXiv:1911.03894) and data2vec's text encoder (arXiv:2202.03555) have its architecture, XLM-RoBERTa-XL
(arXiv:2105.00572) and efficient pre-training's RoBERTa (arXiv:1904.01038) with pre-norms. ERNIE (arXiv:1904.09223) is BERT. ModernBERT
(arXiv:2412.13663): pre-norms except before the first attention, bidirectional windows in two of three layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.canonical_tensors import HEAD
from mega_ckpt.families.config_entries import (
    CORE_SIZES,
    GELUS,
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    MultiHeadEntry,
    layer_indices,
)
from mega_ckpt.families.disk_layouts import LAYER, QKV, DiskTensor, TensorRule, weight_bias_rules
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.rope_entries import GlobalLocalRopeEntry, RopeEntry
from mega_ckpt.families.window_entries import (
    build_sliding_window_fields,
    build_window_layer_types,
    get_transformers_layer_types,
)
from mega_common.encoder_config import MaskedLmConfig
from mega_common.model_config import ModelConfig
from mega_common.strict_config import StrictConfig

OUTPUT_BIAS = "lm_head.bias"

_OLD_NAMES = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}


@dataclass(frozen=True)
class EncoderFamily(ModelFamily):
    """A family of BERT-like encoders whose folders contain the heads of the transformers class that saved them.

    Attributes:
        bias_copy: name of the second copy of the output's bias on disk; empty if there is none.
        dense_classifier: the pooler belongs to the classifier of texts, as in RoBERTa.
    """

    bias_copy: str = ""
    dense_classifier: bool = False
    has_task_heads: bool = True

    def normalize_model(self, model: ModelConfig) -> ModelConfig:
        """Return `model` without redundant settings, and with tied embeddings if it has a task head."""
        model = super().normalize_model(model)
        return model.model_copy(update={"tie_embeddings": True}) if model.task_head else model

    def restrict_to_stored(self, model: ModelConfig, names: Iterable[str]) -> ModelConfig:
        """Return the configuration `model` with only the encoder heads whose tensors are in `names`.
        The class that config.json names is not considered. Without names, the model is unchanged.
        """
        if model.task_head or not (names := set(names)):
            return model
        head = model.masked_lm or MaskedLmConfig()
        every = model.model_copy(update={"masked_lm": head, "pooler": True, "sentence_pairs": True})
        stored = {
            slab.name
            for name, disk in self.disk_tensor_table(every, names).items()
            if name in names
            for slab in disk.slabs
        }
        has_plain_head = not head.dense and (model.tie_embeddings or HEAD in stored)
        return model.model_copy(
            update={
                "tie_embeddings": model.tie_embeddings or HEAD not in stored,
                "masked_lm": head if "lm_head.dense.weight" in stored or has_plain_head else None,
                "pooler": "model.pooler.weight" in stored,
                "sentence_pairs": "pair_head.weight" in stored,
            }
        )

    def disk_tensor_table(self, model: ModelConfig, names: Iterable[str] | None = None) -> dict[str, DiskTensor]:
        """Return {name on disk: DiskTensor} of the tensors of an encoder model.
        If `names` come from the oldest folders, norms are named gamma and beta as in TensorFlow.
        """
        names = None if names is None else set(names)
        table = super().disk_tensor_table(model, names)
        if self.dense_classifier and model.pooler and model.task_head:
            table = {disk.name: disk for disk in map(_with_dense_classifier, table.values())}
        if names is None:
            table.pop(self.bias_copy, None)
        elif any(name.endswith(".LayerNorm.gamma") for name in names):
            table = {disk.name: disk for disk in map(_with_tensorflow_name, table.values())}
        return table

    def duplicate_tensors(self, model: ModelConfig) -> dict[str, str]:
        """Return {disk name: canonical name} of the disk tensors that repeat another one.
        The second copy of the output bias is included.
        """
        biased = self.bias_copy and model.masked_lm and model.masked_lm.bias
        return super().duplicate_tensors(model) | ({self.bias_copy: OUTPUT_BIAS} if biased else {})


def _with_dense_classifier(disk: DiskTensor) -> DiskTensor:
    _, pooler, rest = disk.name.partition("pooler.dense.")
    if pooler:
        return replace(disk, name=f"classifier.dense.{rest}")
    return replace(disk, name=disk.name.replace("classifier.", "classifier.out_proj.", 1))


def _with_tensorflow_name(disk: DiskTensor) -> DiskTensor:
    old = next((disk.name.removesuffix(new) + old for new, old in _OLD_NAMES.items() if disk.name.endswith(new)), None)
    return disk if old is None else replace(disk, name=old)


@dataclass(frozen=True)
class EncoderHeadsEntry:
    """Translation to and from config.json of the heads of an encoder (masked language model, pooler, sentence pairs).
    The heads follow from the class name in config.json.

    Attributes:
        name: prefix of the names of the family's classes.
        activation: activation of the masked-language-model head; empty: the model's.
        has_pairs: the class for pre-training has the sentence-pair head.
    """

    name: str
    activation: str = ""
    has_pairs: bool = True
    handled_config_keys: frozenset[str] = frozenset()  # `architectures` is every family's
    handled_model_fields: frozenset[str] = frozenset({"masked_lm", "pooler", "sentence_pairs"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return `masked_lm`, `pooler` and `sentence_pairs` of an encoder, by the class in config.json's `architectures`."""
        (kind, *_) = raw.get("architectures") or [f"{self.name}ForMaskedLM"]
        pairs = self.has_pairs and str(kind).endswith("ForPreTraining")
        head = {"activation": self.activation or GELUS.get(raw.get("hidden_act", "gelu"))}
        return {"masked_lm": head, "pooler": pairs, "sentence_pairs": pairs}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return `architectures` with the class that has the model's heads; ConfigMismatchError if transformers has none."""
        expected = {"activation": self.activation or model.activation, "dense": True, "dense_bias": True, "bias": True}
        if model.sentence_pairs and not self.has_pairs:
            raise ConfigMismatchError("sentence_pairs must be False")
        if model.masked_lm and model.masked_lm.model_dump() != expected:
            raise ConfigMismatchError(f"masked_lm must be {expected}, not {model.masked_lm.model_dump()}")
        return {"architectures": [get_transformers_encoder_class(self.name, model)]}


def get_transformers_encoder_class(name: str, model: ModelConfig) -> str:
    """Return the name of the transformers class that has the heads of the encoder `model`.
    It is `name` followed by Model, ForMaskedLM or ForPreTraining.
    """
    if model.masked_lm is None:
        return f"{name}Model"
    return f"{name}ForPreTraining" if model.sentence_pairs else f"{name}ForMaskedLM"


@dataclass(frozen=True)
class OffsetPositionsEntry:
    """Translation to and from config.json of RoBERTa's learned positions, which start at pad_token_id + 1.
    The position table has pad_token_id + 1 unused rows, and `rows` rows if their key is absent.
    """

    rows: int = 512
    handled_config_keys: frozenset[str] = frozenset({"max_position_embeddings", "pad_token_id"})
    handled_model_fields: frozenset[str] = frozenset({"max_position", "position_offset"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of RoBERTa's learned positions from config.json.
        `max_position` is the number of usable position rows; `position_offset` is the number of unused rows before
        them. Raises ConfigMismatchError if no row is usable.
        """
        pad, rows = raw.get("pad_token_id", 1), raw.get("max_position_embeddings", self.rows)
        if not isinstance(pad, int) or not isinstance(rows, int) or rows <= pad + 1:
            raise ConfigMismatchError(
                f"max_position_embeddings = {rows!r} must be more than pad_token_id + 1, with pad_token_id = {pad!r}"
            )
        return {"max_position": rows - pad - 1, "position_offset": pad + 1}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return `max_position_embeddings`, unused rows included, and `pad_token_id`; ConfigMismatchError without unused rows."""
        if not model.position_offset:
            raise ConfigMismatchError("position_offset must be more than 0")
        return {
            "max_position_embeddings": model.max_position + model.position_offset,
            "pad_token_id": model.position_offset - 1,
        }


@dataclass(frozen=True)
class LocalAttentionEntry:
    """Translation to and from config.json of ModernBERT's sliding windows, which span `local_attention` keys.
    Half of them are on each side of the query. Every n-th layer has full attention instead.
    """

    handled_config_keys: frozenset[str] = frozenset({"local_attention", "layer_types", "global_attn_every_n_layers"})
    handled_model_fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return ModernBERT's `full_attention_layers` and `sliding_window`, which counts the query's own position."""
        layers, every = layer_indices(raw), raw.get("global_attn_every_n_layers", 3)
        kinds = raw.get("layer_types") or build_window_layer_types([layer % every == 0 for layer in layers])
        return build_sliding_window_fields(kinds, raw.get("local_attention", 128) // 2 + 1, layers)

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys `local_attention` and `layer_types`, which lists all layers."""
        size = 128 if model.sliding_window is None else 2 * (model.sliding_window - 1)
        return {"local_attention": size, "layer_types": get_transformers_layer_types(model)}


@dataclass(frozen=True)
class TokenTypesEntry(KeyEntry):
    """Translation to and from config.json of the number of segment types, which have embeddings always."""

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `token_types`; ConfigMismatchError for 0."""
        fields = super().fields_from_config(raw)
        if fields["token_types"] == 0:
            raise ConfigMismatchError(f"{self.key} = 0 is not supported")
        return fields

    def config_from_fields(self, model: StrictConfig) -> dict[str, Any]:
        """Return the config.json key of the number of segment types; ConfigMismatchError for 0."""
        (value,) = (out := super().config_from_fields(model)).values()
        if value == 0:
            raise ConfigMismatchError("token_types must be at least 1")
        return out


def bert_config_entries(
    name: str,
    *,
    norm_position: str,
    positions: ConfigEntry | None = None,
    activation: str = "",
    embedding_norm: bool | None = None,
) -> tuple[ConfigEntry, ...]:
    """Return the config entries of BERT and models like it.
    `activation` belongs to the masked-language-model head, if it differs from the model's; by default models with
    post-norms have an embedding norm.
    """
    return (
        *CORE_SIZES,
        positions or KeyEntry("max_position_embeddings", "max_position", 512),
        TokenTypesEntry("type_vocab_size", "token_types", 2),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("hidden_act", "activation", "gelu", GELUS),
        KeyEntry("layer_norm_eps", "norm_eps", 1e-12),
        KeyEntry("hidden_dropout_prob", "embedding_dropout residual_dropout", 0.1),
        KeyEntry("attention_probs_dropout_prob", "attention_dropout", 0.1),
        MultiHeadEntry(),
        EncoderHeadsEntry(name, activation),
        # an untied output of transformers has another bias, and ignores this one
        AllowedValuesEntry({"is_decoder": (False,), "position_embedding_type": ("absolute",), "sliding_window": (None,), "layer_types": (None,),
              "tie_word_embeddings": (True,)}),
        FixedFieldsEntry(
            {"causal": False, "tie_embeddings": True, "norm": "layernorm", "position": "learned", "qkv_bias": True, "attention_out_bias": True,
             "mlp_bias": True, "qk_norm": False, "norm_position": norm_position, "embedding_norm": norm_position == "sum" if embedding_norm is None else embedding_norm}
        ),
    )  # fmt: skip


def bert_tensor_rules(body: str, norms: Mapping[str, str], head: Mapping[str, str]) -> tuple[TensorRule, ...]:
    """Return the rules between disk names and canonical names of tensors that BERT-like models share.
    `body` is the prefix of their disk names, `norms` maps disk names of the norms to canonical ones, `head` has the
    disk names in the masked-language-model head.
    """
    layer = f"{body}.encoder.layer.{{i}}"
    return (
        TensorRule(f"{body}.embeddings.word_embeddings.weight", ("model.embed_tokens.weight",)),
        TensorRule(f"{body}.embeddings.position_embeddings.weight", ("model.embed_positions.weight",)),
        TensorRule(f"{body}.embeddings.token_type_embeddings.weight", ("model.embed_types.weight",)),
        *(rule for name, here in norms.items() for rule in weight_bias_rules(f"{body}.{name}", here)),
        *(
            rule
            for name, short in (("query", "q"), ("key", "k"), ("value", "v"))
            for rule in weight_bias_rules(f"{layer}.attention.self.{name}", f"{LAYER}.self_attn.{short}_proj")
        ),
        *weight_bias_rules(f"{layer}.attention.output.dense", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{layer}.intermediate.dense", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{layer}.output.dense", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules(f"{body}.pooler.dense", "model.pooler"),
        *weight_bias_rules("cls.seq_relationship", "pair_head"),
        *weight_bias_rules("classifier", "score"),
        *weight_bias_rules(head["dense"], "lm_head.dense"),
        *weight_bias_rules(head["norm"], "lm_head.norm"),
        TensorRule(head["bias"], (OUTPUT_BIAS,)),
        TensorRule(head["matrix"], ("lm_head.weight",)),
    )


POST_NORMS = {
    "embeddings.LayerNorm": "model.embed_norm",
    "encoder.layer.{i}.attention.output.LayerNorm": f"{LAYER}.post_attention_layernorm",
    "encoder.layer.{i}.output.LayerNorm": f"{LAYER}.post_feedforward_layernorm",
}
BERT_HEAD = {
    "dense": "cls.predictions.transform.dense", "norm": "cls.predictions.transform.LayerNorm", "bias": "cls.predictions.bias",
    "matrix": "cls.predictions.decoder.weight",
}  # fmt: skip
CARRIED_BERT = frozenset({"classifier_dropout", "gradient_checkpointing", "layer_norm_type", "directionality"}) | {
    f"pooler_{key}" for key in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")
}


_BUFFERS = r"(bert\.)?embeddings\.position_ids"
_PRE_NORMS = {
    "encoder.layer.{i}.attention.ln": f"{LAYER}.input_layernorm",
    "encoder.layer.{i}.ln": f"{LAYER}.post_attention_layernorm",
    "encoder.ln": "model.norm",
}

BERT = EncoderFamily(
    name="bert",
    architecture="BertForPreTraining",
    prefix="bert.",
    head=BERT_HEAD["matrix"],
    bias_copy="cls.predictions.decoder.bias",
    buffers=_BUFFERS,
    entries=bert_config_entries("Bert", norm_position="sum"),
    rules=bert_tensor_rules("bert", POST_NORMS, BERT_HEAD),
    carried=CARRIED_BERT,
)

MEGATRON_BERT = EncoderFamily(
    name="megatron-bert",
    architecture="MegatronBertForPreTraining",
    prefix="bert.",
    head=BERT_HEAD["matrix"],
    bias_copy="cls.predictions.decoder.bias",
    buffers=_BUFFERS,
    entries=bert_config_entries("MegatronBert", norm_position="pre"),
    rules=bert_tensor_rules("bert", _PRE_NORMS, BERT_HEAD),
    carried=CARRIED_BERT,
)

ERNIE = replace(
    BERT,
    name="ernie",
    architecture="ErnieForPreTraining",
    prefix="ernie.",
    buffers=_BUFFERS.replace("bert", "ernie"),
    entries=(
        *bert_config_entries("Ernie", norm_position="sum"),
        AllowedValuesEntry({"use_task_id": (False,)}),
    ),
    rules=bert_tensor_rules("ernie", POST_NORMS, BERT_HEAD),
    carried=CARRIED_BERT | {"task_type_vocab_size"},
)

_HEAD = {
    "dense": "lm_head.dense",
    "norm": "lm_head.layer_norm",
    "bias": "lm_head.bias",
    "matrix": "lm_head.decoder.weight",
}


def _roberta(
    name: str, classes: str, body: str = "roberta", pre_norms: Mapping[str, str] | None = None
) -> EncoderFamily:
    """Return a family of RoBERTa's architecture: `classes` is the start of its class names, `body` of its disk names.
    `pre_norms` are the disk names of the norms of a variant with pre-norms.
    """
    embedding_norm = "embeddings.LayerNorm" in (POST_NORMS if pre_norms is None else pre_norms)
    return EncoderFamily(
        name=name,
        architecture=f"{classes}ForMaskedLM",
        prefix=f"{body}.",
        head=_HEAD["matrix"],
        bias_copy="lm_head.decoder.bias",
        dense_classifier=True,
        buffers=rf"({body}\.)?embeddings\.position_ids",
        entries=bert_config_entries(
            classes, norm_position="pre" if pre_norms else "sum", positions=OffsetPositionsEntry(), activation="gelu",
            embedding_norm=embedding_norm,
        ),
        rules=bert_tensor_rules(body, pre_norms or POST_NORMS, _HEAD),
        carried=CARRIED_BERT,
    )  # fmt: skip


ROBERTA = _roberta("roberta", "Roberta")
XLM_ROBERTA = _roberta("xlm-roberta", "XLMRoberta")
CAMEMBERT = _roberta("camembert", "Camembert")
DATA2VEC_TEXT = _roberta("data2vec-text", "Data2VecText", "data2vec_text")
ROBERTA_PRE_LAYER_NORM = _roberta(
    "roberta-prelayernorm", "RobertaPreLayerNorm", "roberta_prelayernorm", {
        "embeddings.LayerNorm": "model.embed_norm",
        "encoder.layer.{i}.attention.LayerNorm": f"{LAYER}.input_layernorm",
        "encoder.layer.{i}.intermediate.LayerNorm": f"{LAYER}.post_attention_layernorm",
        "LayerNorm": "model.norm",
    },
)  # fmt: skip
_XL = _roberta(
    "xlm-roberta-xl", "XLMRobertaXL", "roberta", {
        "encoder.layer.{i}.attention.self_attn_layer_norm": f"{LAYER}.input_layernorm",
        "encoder.layer.{i}.LayerNorm": f"{LAYER}.post_attention_layernorm",
        "encoder.LayerNorm": "model.norm",
    },
)  # fmt: skip
_XL_DEFAULTS = {"layer_norm_eps": 1e-5, "type_vocab_size": 1}
XLM_ROBERTA_XL = replace(
    _XL,
    entries=tuple(
        replace(entry, default=_XL_DEFAULTS[entry.key])
        if isinstance(entry, KeyEntry) and entry.key in _XL_DEFAULTS
        else replace(entry, rows=514)
        if isinstance(entry, OffsetPositionsEntry)
        else entry
        for entry in _XL.entries
    ),
)


HEAD_ACTIVATIONS = {**GELUS, "silu": "silu"}


@dataclass(frozen=True)
class _ModernBertHeadEntry:
    """ModernBERT's masked-language-model head; its keys are named after classifiers."""

    handled_config_keys: frozenset[str] = frozenset({"classifier_activation", "classifier_bias", "decoder_bias"})
    handled_model_fields: frozenset[str] = frozenset({"masked_lm", "pooler", "sentence_pairs"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` field `masked_lm` of ModernBERT from config.json.
        It is independent of the class in config.json: `restrict_to_stored` checks the tensors.
        """
        activation = raw.get("classifier_activation", "gelu")
        is_classifier = str(raw.get("architectures")).endswith("ForSequenceClassification']")
        if is_classifier and raw.get("classifier_pooling", "cls") != "cls":
            raise ConfigMismatchError("classifier_pooling must be 'cls' in a classifier")
        if activation not in HEAD_ACTIVATIONS:
            raise ConfigMismatchError(
                f"classifier_activation = {activation!r} is not supported (only {', '.join(HEAD_ACTIVATIONS)})"
            )
        biases = {"dense_bias": raw.get("classifier_bias", False), "bias": raw.get("decoder_bias", True)}
        return {"masked_lm": {"activation": HEAD_ACTIVATIONS[activation], **biases}}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of ModernBERT's masked-language-model head, and `architectures`."""
        if model.pooler:
            raise ConfigMismatchError("pooler must be False")
        head = model.masked_lm or MaskedLmConfig(dense_bias=False)
        if not head.dense:
            raise ConfigMismatchError("masked_lm.dense must be True")
        if model.task_head:
            head = head.model_copy(update={"bias": True})  # of the output layer, which the class does not have
        return {
            "architectures": [get_transformers_encoder_class("ModernBert", model)],
            "classifier_activation": next(key for key, value in HEAD_ACTIVATIONS.items() if value == head.activation),
            "classifier_bias": head.dense_bias,
            "decoder_bias": head.bias,
            **({"classifier_pooling": "cls"} if model.task_head else {}),
        }


MODERNBERT = EncoderFamily(
    name="modernbert",
    architecture="ModernBertForMaskedLM",
    head="decoder.weight",
    entries=(
        *CORE_SIZES,
        KeyEntry("max_position_embeddings", "max_position", 8192),
        KeyEntry("initializer_range", "init_std", 0.02),
        KeyEntry("hidden_activation", "activation", "gelu",
            {"gelu": "geglu_erf", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu", "silu": "swiglu"}),
        KeyEntry("norm_eps", "norm_eps", 1e-5),
        KeyEntry("norm_bias", "norm_bias", False),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        KeyEntry("mlp_bias", "mlp_bias", False),
        KeyEntry("attention_dropout", "attention_dropout", 0.0),
        KeyEntry("embedding_dropout", "embedding_dropout", 0.0),
        KeyEntry("tie_word_embeddings", "tie_embeddings", True),
        GlobalLocalRopeEntry(
            RopeEntry(theta=160_000.0, theta_key="global_rope_theta", scalings=frozenset({"none"})),
            RopeEntry(scalings=frozenset({"none"})),
            local_key="local_rope_theta",
        ),
        LocalAttentionEntry(),
        MultiHeadEntry(),
        _ModernBertHeadEntry(),
        AllowedValuesEntry({"position_embedding_type": ("absolute",), "sliding_window": (None,)}),
        FixedFieldsEntry({"causal": False, "norm": "layernorm", "position": "rope", "norm_position": "pre", "first_norm": False,
               "embedding_norm": True, "qk_norm": False, "token_types": 0}),
    ),
    rules=(
        TensorRule("model.embeddings.tok_embeddings.weight", ("model.embed_tokens.weight",)),
        *weight_bias_rules("model.embeddings.norm", "model.embed_norm"),
        *weight_bias_rules(f"{LAYER}.attn_norm", f"{LAYER}.input_layernorm"),
        *weight_bias_rules(f"{LAYER}.attn.Wqkv", *QKV),
        *weight_bias_rules(f"{LAYER}.attn.Wo", f"{LAYER}.self_attn.o_proj"),
        *weight_bias_rules(f"{LAYER}.mlp_norm", f"{LAYER}.post_attention_layernorm"),
        *weight_bias_rules(f"{LAYER}.mlp.Wi", f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.up_proj"),
        *weight_bias_rules(f"{LAYER}.mlp.Wo", f"{LAYER}.mlp.down_proj"),
        *weight_bias_rules("model.final_norm", "model.norm"),
        *weight_bias_rules("classifier", "score"),
        *weight_bias_rules("head.dense", "lm_head.dense"),
        *weight_bias_rules("head.norm", "lm_head.norm"),
        TensorRule("decoder.bias", (OUTPUT_BIAS,)),
        TensorRule("decoder.weight", ("lm_head.weight",)),
    ),
    carried=frozenset(
        {"classifier_dropout", "classifier_pooling", "deterministic_flash_attn", "initializer_cutoff_factor",
         "layer_norm_eps", "mlp_dropout", "reference_compile", "repad_logits_with_grad", "sparse_pred_ignore_index",
         "sparse_prediction"}
    ),
)  # fmt: skip
