"""Declaration of a model family: how its config.json is read and written, and how its tensors are named on disk."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mega_ckpt.canonical_tensors import EMBEDDING, HEAD, canonical_tensors
from mega_ckpt.families.config_entries import (
    AllowedValuesEntry,
    ConfigDict,
    ConfigEntry,
    ConfigMismatchError,
    FixedFieldsEntry,
    read_entry_fields,
    split_words,
)
from mega_ckpt.families.disk_layouts import DiskTensor, TensorRule, expand_tensor_rules
from mega_ckpt.families.model_equivalence import ATTENTION_FIELDS, TRAINING_FIELDS, drop_redundant_model_fields
from mega_ckpt.families.rope_entries import find_unused_rope_keys
from mega_common.encoder_config import TaskHeadConfig
from mega_common.errors import CheckpointError, ConfigError
from mega_common.layer_kinds import COMPRESSED_MIXERS, expand_layer_pattern
from mega_common.model_config import ModelConfig
from mega_common.strict_config import format_setting_value

# Keys that do not affect what the model computes from its weights. They are carried, not translated. (Quantization is
# handled where weights are read.)
CARRIED = split_words(
    """_attn_implementation _name_or_path architectures auto_map bad_words_ids begin_suppress_tokens bos_token_id
    chunk_size_feed_forward cls_token_id compression_config decoder_start_token_id diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label initializer_factor label2id length_penalty max_length min_length
    model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences output_attentions
    output_hidden_states output_past output_router_logits output_scores pad_token_id prefix pretraining_tp problem_type
    quantization quantization_config remove_invalid_values
    repetition_penalty return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
    tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p unk_token_id
    use_bfloat16 use_cache"""
)

# Ends of the class names in transformers of models with a task head.
TASK_CLASSES = {"sequence": "ForSequenceClassification", "token": "ForTokenClassification", "embedding": ""}

# Keys that transformers reads in the configuration of any family, and the values that change nothing.
_COMMON = AllowedValuesEntry(
    {
        "add_cross_attention": (False,),
        "attention_chunk_size": (None,),
        "cross_attention_hidden_size": (None,),
        "is_causal": (True, None),
        "is_decoder": (False, True),
        "is_encoder_decoder": (False,),
        "kv_sharing_modes": (None,),
        "per_layer_config": ({}, None),
        "pruned_heads": ({}, None),
        "tie_encoder_decoder": (False,),
    }
)


@dataclass(frozen=True)
class ModelFamily:
    """Declaration of a HuggingFace model family: mappings of config.json, tensor names and layouts.
    The mappings are used both to read and to write.

    Attributes:
        name: `model_type` in config.json.
        architecture: the class that transformers loads it with.
        entries: mapping between config.json and `ModelConfig`.
        prefix: prefix of the body's tensor names; absent in folders saved without the head.
        head: the output projection's name on disk.
        rules: names and layouts of tensors on disk; a tensor without a rule has its canonical name there.
        buffers: pattern of disk tensors that are buffers (masks, frequencies): carried, not translated.
        constants: {pattern of names: value} of scalars that transformers stores and mega has built in; `{i}` runs over layers.
        carried: keys of config.json that change nothing, in addition to `CARRIED`.
        outer_model_type: `model_type` of a vision-language model with this text model: its config.json has the text
            model's in `text_config`, and its tensors have other names.
        inner_prefix: beginning of the tensor names of the text model, and its replacement in that vision-language model.
        fused: rules of folders with one stacked tensor per projection of all experts; `rules` are of those with one
            tensor per expert.
        other_names: (part of a name, its replacement) of tensors that some folders have under another name.
        tokens: special tokens whose default in transformers is outside a small vocabulary; written as null if the model
            has none.
        aliases: further `model_type`s with the same config.json and tensors.
        supports_peft: PEFT adapters are read and written; false if tensors are not named after transformers' modules.
        has_task_heads: encoders whose classes for classification mega reads and writes.
    """

    name: str
    architecture: str
    entries: tuple[ConfigEntry, ...]
    prefix: str = "model."
    head: str = "lm_head.weight"
    rules: tuple[TensorRule, ...] = ()
    buffers: str = r"(.*\.)?rotary_emb\.inv_freq"
    constants: Mapping[str, float] = field(default_factory=dict)
    carried: frozenset[str] = frozenset()
    outer_model_type: str = ""
    inner_prefix: tuple[str, str] = ("model.", "model.language_model.")
    fused: tuple[TensorRule, ...] = ()
    other_names: tuple[tuple[str, str], ...] = ()
    tokens: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    supports_peft: bool = True
    has_task_heads: bool = False

    def read_config_json(self, raw: ConfigDict, source: str = "config.json") -> ModelConfig:
        """Return the model configuration that a config.json describes; a CheckpointError for a setting that mega cannot express.

        Raises:
            CheckpointError: naming every key that is missing or has a value that `ModelConfig` cannot express. Unknown
                keys are ignored (see `unread_keys`).
        """
        raw = self.select_text_config(raw)
        covered = frozenset[str]().union(*(entry.handled_config_keys for entry in self.entries))
        common = AllowedValuesEntry({key: values for key, values in _COMMON.values.items() if key not in covered})
        fields, found = read_entry_fields((*self.entries, common), raw)
        if found:
            raise CheckpointError(
                f"{source}: this model is not supported: {'; '.join(found)}",
                hint="add the key to config.json, or download the file again"
                if all(text.endswith("is missing") for text in found)
                else "correct the value if it is a mistake: a setting that changes what the model computes is never ignored",
            )
        fields |= self._read_task_head(raw)
        try:
            return ModelConfig.parse(fields, source=source)
        except ConfigError as error:
            raise CheckpointError(error.message, hint=error.hint) from None

    def _read_task_head(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `ModelConfig` fields of the head that the class in `architectures` has, none for a language model; a
        decoder with one label is a reward model.
        """
        kind = str((raw.get("architectures") or [""])[0])
        names = [str(name) for name in (raw.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}).values()]
        base = self.architecture.partition("For")[0]
        if kind == f"{base}Model" and self.is_decoder and raw.get("tie_word_embeddings") is False:
            return {"task_head": {"kind": "embedding"}}
        level = next((level for level, suffix in TASK_CLASSES.items() if suffix and kind.endswith(suffix)), None)
        if level is None:
            return {}
        if level == "sequence" and len(names) == 1 and self.is_decoder:
            return {"score": True}
        named = names != [f"LABEL_{number}" for number in range(len(names))]
        return {"task_head": {"kind": level, "labels": len(names), "names": names if named else []}}

    @property
    def is_decoder(self) -> bool:
        """True for a family of decoders, whose heads for scores and labels read the last token."""
        return self.architecture.endswith("ForCausalLM")

    def _write_task_head(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of config.json that name the class and the labels of a reward or task head."""
        head = model.task_head or TaskHeadConfig(labels=1)
        base = self.architecture.partition("For")[0]
        if head.kind == "embedding":
            return {"architectures": [f"{base}Model"]}
        names = head.names or [f"LABEL_{number}" for number in range(head.labels)]
        return {
            "architectures": [base + TASK_CLASSES[head.kind]],
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
        }

    def unread_keys(self, raw: ConfigDict) -> list[str]:
        """Return the keys of a config.json that no code of the model family reads.
        That code is the family's published transformers class and its modelling code. Keys with null are left out.

        They do not affect what the family's model computes; they are carried, and reported.
        """
        read, raw = self.known_config_keys, self.select_text_config(raw)
        unread = sorted(key for key, value in raw.items() if key not in read and value is not None)
        return unread + [key for key in find_unused_rope_keys(raw) if key.partition(".")[2] not in read]

    def select_text_config(self, raw: ConfigDict) -> ConfigDict:
        """Return the part of a config.json that describes a text model of this family.
        It is `text_config` if the config.json is a vision-language model's, else the whole.
        """
        inner = raw.get("text_config") if raw.get("model_type") == self.outer_model_type else None
        if not isinstance(inner, Mapping):
            return raw
        return {**inner, **{key: raw[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if key in raw}}

    @property
    def known_config_keys(self) -> frozenset[str]:
        """Keys of config.json that are translated or change nothing.
        They are all keys that transformers' class or code of the family reads.
        """
        return CARRIED.union(
            self.carried, _COMMON.handled_config_keys, *(entry.handled_config_keys for entry in self.entries)
        )

    def unsupported_settings(self, model: ModelConfig) -> list[str]:
        """Return descriptions of the settings of `model` that this family's config.json cannot express.
        The result is empty if it can express the model.
        """
        found, model = [], self.normalize_model(model)
        for entry in self.entries:
            try:
                entry.config_from_fields(model)
            except ConfigMismatchError as error:
                found.append(str(error))
        covered = TRAINING_FIELDS.union(*(entry.handled_model_fields for entry in self.entries))
        covered |= {"task_head"} | ({"score"} if self.is_decoder else set())
        if model.task_head and not (self.is_decoder or self.has_task_heads):
            found.append("task_head has no key in config.json")
        if model.task_head and model.task_head.pooling is not None and model.task_head.kind != "embedding":
            default = model.model_copy(update={"task_head": model.task_head.model_copy(update={"pooling": None})})
            if default.text_pooling != model.text_pooling:
                found.append(f"task_head.pooling must be {default.text_pooling}, not {model.text_pooling}")
        for name, info in ModelConfig.model_fields.items():
            if name not in covered and getattr(model, name) != info.get_default(call_default_factory=True):
                found.append(f"{name} = {format_setting_value(getattr(model, name)):.120} has no key in config.json")
        return found

    def write_config_json(self, model: ModelConfig) -> dict[str, Any]:
        """Return the content of a HuggingFace config.json for `model`.
        The family must be able to express the model (`unsupported_settings` is empty).
        """
        out: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.name}
        for entry in self.entries:
            out |= entry.config_from_fields(self.normalize_model(model))
        return out | (self._write_task_head(model) if model.score or model.task_head else {})

    def normalize_model(self, model: ModelConfig) -> ModelConfig:
        """Return the configuration `model` without redundant settings.
        Attention settings of a model without attention get the family's fixed values.
        """
        model = drop_redundant_model_fields(model)
        if any(kind.mixer in ("attention", *COMPRESSED_MIXERS) for kind in model.layer_kinds):
            return model
        fixed = {
            name: value
            for entry in self.entries
            if isinstance(entry, FixedFieldsEntry)
            for name, value in entry.values.items()
        }
        unused = ATTENTION_FIELDS | ({"position"} if model.position == "none" else set())
        return model.model_copy(update={name: value for name, value in fixed.items() if name in unused})

    def disk_tensor_table(self, model: ModelConfig, names: Iterable[str] | None = None) -> dict[str, DiskTensor]:
        """Return {name on disk: DiskTensor} of the tensors of `model` as the family's HuggingFace folders store them.

        `names` are the disk tensors of a folder. They decide the form of its names: with or without the prefix, stacked
        experts, tied embeddings stored once or twice. Without them, it is the form that is written.
        """
        names = set(names) if names is not None else None
        layers = model.num_layers + model.mtp_layers
        fused = self.fused and names is not None and any(name.endswith(".experts.gate_up_proj") for name in names)
        table = expand_tensor_rules(
            self.fused if fused else self.rules, canonical_tensors(model), layers, _head_counts(model)
        )
        for copy, name in self.duplicate_tensors(model).items():
            if copy != self.head if names is None else copy in names:
                original = next(disk for disk in table.values() if disk.slabs[0].name == name)
                table[copy] = replace(original, name=copy)
                if names is not None and not names & self._name_variants(original.name):
                    del table[original.name]  # a shared tensor may be stored under either name alone
        for usual, other in self.other_names if names is not None else ():
            renamed = (replace(disk, name=disk.name.replace(usual, other)) for disk in table.values())
            pairs = zip(table.values(), renamed, strict=True)
            table = {
                disk.name: disk for disk in (new if self._is_stored(new.name, names) else old for old, new in pairs)
            }
        if names is not None and not any(name.startswith((self.prefix, self.inner_prefix[1])) for name in names):
            table = {disk.name: disk for disk in (_with_prefix(disk, self.prefix, "") for disk in table.values())}
        if names is not None and any(name.startswith(self.inner_prefix[1]) for name in names):
            table = {disk.name: disk for disk in (_with_prefix(disk, *self.inner_prefix) for disk in table.values())}
        return table

    def _name_variants(self, name: str) -> set[str]:
        """Return the names that a disk tensor has in a folder of the family: with its prefix, without, or within a
        larger model.
        """
        bare = name.removeprefix(self.prefix)
        return {name, bare, self.inner_prefix[1] + name.removeprefix(self.inner_prefix[0])}

    def duplicate_tensors(self, model: ModelConfig) -> dict[str, str]:
        """Return {disk name: canonical name} of disk tensors that repeat another one.
        They are a stored tied head, and the embedding and head of multi-token prediction (MTP) layers.
        """
        head = EMBEDDING if model.tie_embeddings else HEAD
        found = {self.head: EMBEDDING} if model.tie_embeddings else {}
        for index in range(model.num_layers, model.num_layers + model.mtp_layers):
            found[f"{self.prefix}layers.{index}.embed_tokens.weight"] = EMBEDDING
            found[f"{self.prefix}layers.{index}.shared_head.head.weight"] = head
        return found

    def restrict_to_stored(self, model: ModelConfig, names: Iterable[str]) -> ModelConfig:
        """Return `model` without its multi-token prediction (MTP) layers if a folder stores none of them.
        `names` are the tensor names of the folder.
        """
        first = f"{self.prefix}layers.{model.num_layers}."
        if not model.mtp_layers or any(name.startswith(first) for name in names):
            return model
        moe = model.moe and model.moe.model_copy(update={"layers": _layers_below(model.num_layers, model.moe.layers)})
        layers = model.layers and expand_layer_pattern(model.layers)[: model.num_layers]
        return model.model_copy(update={"mtp_layers": 0, "moe": moe, "layers": layers})

    def constant_tensors(self, model: ModelConfig) -> dict[str, float]:
        """Return {disk name: value} of the scalars that a folder of the family has besides the tensors of `model`."""
        layers = range(model.num_layers)
        return {name.replace("{i}", str(i)): value for i in layers for name, value in self.constants.items()}

    @property
    def has_per_expert_tensors(self) -> bool:
        """True if every expert has its own disk tensors; False if experts are stacked."""
        return any("{e}" in rule.disk for rule in self.rules)

    def _is_stored(self, name: str, names: Collection[str] | None) -> bool:
        """Return whether a tensor has this name among `names`, with or without the prefix."""
        return names is not None and (name in names or name.removeprefix(self.prefix) in names)

    def is_buffer_tensor(self, name: str) -> bool:
        """Return whether a disk tensor is a buffer (a mask or rotary frequencies), not a weight of the model."""
        return re.fullmatch(self.buffers, name) is not None


def _head_counts(model: ModelConfig) -> dict[str, int]:
    """Return the number of heads of each kind that rules refer to."""
    delta = model.delta.num_key_heads if model.delta else 0
    lightning = model.lightning.num_heads if model.lightning else 0
    heads = {"kv": model.key_value_heads, "query": model.num_attention_heads}
    return {**heads, "delta": delta, "lightning": lightning, "quarter": 4}


def _layers_below(bound: int, layers: list[int] | None) -> list[int] | None:
    return layers and [layer for layer in layers if layer < bound]


def _with_prefix(disk: DiskTensor, prefix: str, other: str) -> DiskTensor:
    name = disk.name
    return replace(disk, name=other + name.removeprefix(prefix)) if name.startswith(prefix) else disk
