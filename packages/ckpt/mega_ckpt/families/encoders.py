"""What the encoders share: BERT's keys and names, the heads that a folder may or may not have, windows to both sides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.families.base import Family
from mega_ckpt.families.common import OwnHeads
from mega_ckpt.families.keys import Entry, Fixed, Key, MismatchError, Only, Raw, layer_numbers
from mega_ckpt.families.layouts import DiskTensor, Rule
from mega_ckpt.families.windows import kinds_of, layer_kinds, window_fields
from mega_common.model_config import MaskedLmConfig, ModelConfig

LAYER = "model.layers.{i}"
OUTPUT_BIAS = "lm_head.bias"
GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_OLD_NAMES = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}


@dataclass(frozen=True)
class EncoderFamily(Family):
    """A family whose folders have the heads of the class that saved them.

    Attributes:
        bias_copy: where the output's bias is stored a second time, if it is.
    """

    bias_copy: str = ""

    def as_held(self, model: ModelConfig, names: Iterable[str]) -> ModelConfig:
        """`model` with the heads that are among these disk tensors, if any are told, whatever the class in config.json."""
        if not (names := set(names)):
            return model
        head = model.masked_lm or MaskedLmConfig()
        every = model.model_copy(update={"masked_lm": head, "pooler": True, "sentence_pairs": True})
        held = {slab.name for name, disk in self.table(every, names).items() if name in names for slab in disk.slabs}
        return model.model_copy(
            update={
                "masked_lm": head if "lm_head.dense.weight" in held else None,
                "pooler": "model.pooler.weight" in held,
                "sentence_pairs": "pair_head.weight" in held,
            }
        )

    def table(self, model: ModelConfig, names: Iterable[str] | None = None) -> dict[str, DiskTensor]:
        """See `Family.table`; norms of the first folders have TensorFlow's names."""
        names = None if names is None else set(names)
        table = super().table(model, names)
        if names is None:
            table.pop(self.bias_copy, None)
        elif any(name.endswith(".LayerNorm.gamma") for name in names):
            table = {disk.name: disk for disk in map(_with_old_name, table.values())}
        return table

    def copies(self, model: ModelConfig) -> dict[str, str]:
        """See `Family.copies`."""
        biased = self.bias_copy and model.masked_lm and model.masked_lm.bias
        return super().copies(model) | ({self.bias_copy: OUTPUT_BIAS} if biased else {})


def _with_old_name(disk: DiskTensor) -> DiskTensor:
    old = next((disk.name.removesuffix(new) + old for new, old in _OLD_NAMES.items() if disk.name.endswith(new)), None)
    return disk if old is None else replace(disk, name=old)


@dataclass(frozen=True)
class Heads:
    """What a folder has behind its layers. By config.json that is what its class has; `as_held` then looks.

    Attributes:
        name: what the names of the family's classes begin with.
        activation: that of the masked tokens' head, where it is not the model's own.
    """

    name: str
    activation: str = ""
    keys: frozenset[str] = frozenset()  # `architectures` is every family's
    fields: frozenset[str] = frozenset({"masked_lm", "pooler", "sentence_pairs"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Those of the class."""
        (kind, *_) = raw.get("architectures") or [f"{self.name}ForMaskedLM"]
        pairs = str(kind).endswith("ForPreTraining")
        head = {"activation": self.activation or GELUS.get(raw.get("hidden_act", "gelu"))}
        return {"masked_lm": head, "pooler": pairs, "sentence_pairs": pairs}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The class."""
        wanted = {"activation": self.activation or model.activation, "dense_bias": True, "bias": True}
        if model.masked_lm and model.masked_lm.model_dump() != wanted:
            raise MismatchError(f"masked_lm must be {wanted}, not {model.masked_lm.model_dump()}")
        return {"architectures": [class_of(self.name, model)]}


def class_of(name: str, model: ModelConfig) -> str:
    """The class of transformers that has the heads of `model`."""
    if model.masked_lm is None:
        return f"{name}Model"
    return f"{name}ForPreTraining" if model.sentence_pairs else f"{name}ForMaskedLM"


@dataclass(frozen=True)
class OffsetPositions:
    """RoBERTa's positions, which begin behind that of padding: a table of as many rows more."""

    keys: frozenset[str] = frozenset({"max_position_embeddings", "pad_token_id"})
    fields: frozenset[str] = frozenset({"max_position", "position_offset"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The rows that are left."""
        pad, rows = raw.get("pad_token_id", 1), raw.get("max_position_embeddings", 512)
        if not isinstance(pad, int) or not isinstance(rows, int) or rows <= pad + 1:
            raise MismatchError(f"max_position_embeddings = {rows!r} must be more than pad_token_id + 1, with {pad!r}")
        return {"max_position": rows - pad - 1, "position_offset": pad + 1}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """All rows."""
        if not model.position_offset:
            raise MismatchError("position_offset must be more than 0")
        return {
            "max_position_embeddings": model.max_position + model.position_offset,
            "pad_token_id": model.position_offset - 1,
        }


@dataclass(frozen=True)
class LocalAttention:
    """ModernBERT's windows: half of `local_attention` keys to each side, but in every so many layers."""

    keys: frozenset[str] = frozenset({"local_attention", "layer_types", "global_attn_every_n_layers"})
    fields: frozenset[str] = frozenset({"sliding_window", "full_attention_layers"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """The window, its own key counted as always, and the layers without."""
        layers, every = layer_numbers(raw), raw.get("global_attn_every_n_layers", 3)
        kinds = raw.get("layer_types") or kinds_of([layer % every == 0 for layer in layers])
        return window_fields(kinds, raw.get("local_attention", 128) // 2 + 1, layers)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The kinds of all layers, in both forms where the older one can say them."""
        size = 128 if model.sliding_window is None else 2 * (model.sliding_window - 1)
        return {"local_attention": size, "layer_types": layer_kinds(model)}


def bert_entries(
    name: str, *, norm_position: str, positions: Entry | None = None, activation: str = ""
) -> tuple[Entry, ...]:
    """The keys of BERT and everything shaped like it; `activation` is that of the head, where the model's does not count."""
    return (
        Key("vocab_size", "vocab_size"),
        Key("hidden_size", "hidden_size"),
        Key("intermediate_size", "ffn_hidden_size"),
        Key("num_hidden_layers", "num_layers"),
        Key("num_attention_heads", "num_attention_heads"),
        positions or Key("max_position_embeddings", "max_position", 512),
        Key("type_vocab_size", "token_types", 2),
        Key("initializer_range", "init_std", 0.02),
        Key("hidden_act", "activation", "gelu", GELUS),
        Key("layer_norm_eps", "norm_eps", 1e-12),
        Key("hidden_dropout_prob", "embedding_dropout residual_dropout", 0.1),
        Key("attention_probs_dropout_prob", "attention_dropout", 0.1),
        OwnHeads(),
        Heads(name, activation),
        # an untied output has a bias of its own in transformers, beside the one that then does nothing
        Only({"is_decoder": (False,), "position_embedding_type": ("absolute",), "sliding_window": (None,), "layer_types": (None,),
              "tie_word_embeddings": (True,)}),
        Fixed(
            {"causal": False, "tie_embeddings": True, "norm": "layernorm", "position": "learned", "qkv_bias": True, "attention_out_bias": True,
             "mlp_bias": True, "qk_norm": False, "norm_position": norm_position, "embedding_norm": norm_position == "sum"}
        ),
    )  # fmt: skip


def both(disk: str, *names: str) -> tuple[Rule, ...]:
    """The weight and the bias of a layer."""
    return tuple(Rule(f"{disk}.{kind}", tuple(f"{name}.{kind}" for name in names)) for kind in ("weight", "bias"))


def bert_rules(body: str, norms: Mapping[str, str], head: Mapping[str, str]) -> tuple[Rule, ...]:
    """The names that BERT and those like it share: `body` is their prefix, `norms` are the names of a layer's, of the
    embeddings' and of the last, `head` those of what guesses masked tokens.
    """
    layer = f"{body}.encoder.layer.{{i}}"
    return (
        Rule(f"{body}.embeddings.word_embeddings.weight", ("model.embed_tokens.weight",)),
        Rule(f"{body}.embeddings.position_embeddings.weight", ("model.embed_positions.weight",)),
        Rule(f"{body}.embeddings.token_type_embeddings.weight", ("model.embed_types.weight",)),
        *(rule for name, here in norms.items() for rule in both(f"{body}.{name}", here)),
        *(
            rule
            for name, short in (("query", "q"), ("key", "k"), ("value", "v"))
            for rule in both(f"{layer}.attention.self.{name}", f"{LAYER}.self_attn.{short}_proj")
        ),
        *both(f"{layer}.attention.output.dense", f"{LAYER}.self_attn.o_proj"),
        *both(f"{layer}.intermediate.dense", f"{LAYER}.mlp.up_proj"),
        *both(f"{layer}.output.dense", f"{LAYER}.mlp.down_proj"),
        *both(f"{body}.pooler.dense", "model.pooler"),
        *both("cls.seq_relationship", "pair_head"),
        *both(head["dense"], "lm_head.dense"),
        *both(head["norm"], "lm_head.norm"),
        Rule(head["bias"], (OUTPUT_BIAS,)),
        Rule(head["matrix"], ("lm_head.weight",)),
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
