"""Mixture of experts in config.json and on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from mega_ckpt.families.config_entries import (
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    layer_indices,
)
from mega_ckpt.families.disk_layouts import LAYER, TensorRule, UnstackedLayout
from mega_ckpt.families.model_equivalence import MOE_TRAINING_FIELDS
from mega_common.model_config import ModelConfig, MoeConfig
from mega_common.strict_config import StrictConfig

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class MoeFieldEntry(Protocol):
    """Interface of a two-way mapping between keys of config.json and fields of `MoeConfig`.
    `MoeConfig` is the section `moe` of `ModelConfig`.
    """

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that a mapping of mixture-of-experts settings translates or checks."""

    @property
    def handled_model_fields(self) -> frozenset[str]:
        """Fields of `MoeConfig` that a mapping of mixture-of-experts settings translates or checks."""

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return {field: value} of `MoeConfig` from a config.json; ConfigMismatchError for a value without a counterpart."""

    def config_from_fields(self, model: Any) -> dict[str, Any]:
        """Return {key: value} of config.json from a `MoeConfig`; ConfigMismatchError for a value without a counterpart."""


class MoeLayersEntry(Protocol):
    """Interface of a mapping between `MoeConfig.layers` and the config.json keys of layers with experts."""

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that select the layers with experts."""

    def fields_from_config(self, raw: ConfigDict) -> list[int] | None:
        """Return `MoeConfig.layers` from config.json: the indices of the layers with experts, or None for all layers."""

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys that select the layers of `model` with experts; ConfigMismatchError if none can."""


@dataclass(frozen=True)
class MoeSectionEntry:
    """Translation to and from config.json of the section `moe` of `ModelConfig`, which a model of the family must have.

    Attributes:
        entries: mapping between the keys and the section's fields.
        layers: the keys that select the layers with experts.
    """

    entries: tuple[MoeFieldEntry, ...]
    layers: MoeLayersEntry
    handled_model_fields: frozenset[str] = frozenset({"moe"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return self.layers.handled_config_keys.union(*(entry.handled_config_keys for entry in self.entries))

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` section `moe`: experts, router and the layers with experts.
        Raises ConfigMismatchError with the problems of all its entries.
        """
        section: dict[str, Any] = {"layers": self.layers.fields_from_config(raw)}
        found = []
        for entry in self.entries:
            try:
                section |= entry.fields_from_config(raw)
            except ConfigMismatchError as error:
                found.append(str(error))
        if found:
            raise ConfigMismatchError("; ".join(found))
        return {"moe": section}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys of experts, router and expert layers; ConfigMismatchError for a model without experts."""
        if model.moe is None:
            raise ConfigMismatchError("moe is missing (all models of this family have experts)")
        out = self.layers.config_from_fields(model)
        for entry in self.entries:
            out |= entry.config_from_fields(model.moe)
        covered = MOE_TRAINING_FIELDS.union({"layers"}, *(entry.handled_model_fields for entry in self.entries))
        for name, field in MoeConfig.model_fields.items():
            if name not in covered and getattr(model.moe, name) != field.default:
                raise ConfigMismatchError(f"moe.{name} = {getattr(model.moe, name)!r} has no key in config.json")
        return out


@dataclass(frozen=True)
class MoeInAllLayersEntry:
    """Mapping for families with experts in every layer, for which config.json has no key."""

    handled_config_keys: frozenset[str] = frozenset()

    def fields_from_config(self, raw: ConfigDict) -> None:
        """Return None for `MoeConfig.layers`, without reading config.json: all layers have experts."""

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return no config.json keys; ConfigMismatchError unless every layer of `model` has experts."""
        if len(moe_layer_indices(model)) < model.num_layers:
            raise ConfigMismatchError("moe.layers must be all layers")
        return {}


@dataclass(frozen=True)
class MoeInLayerPatternEntry:
    """Mapping for families whose pattern of layer kinds selects the layers with experts.
    Another config entry reads and writes the pattern.
    """

    handled_config_keys: frozenset[str] = frozenset()

    def fields_from_config(self, raw: ConfigDict) -> None:
        """Return None for `MoeConfig.layers`, because the pattern of layer kinds selects the layers with experts.
        Another config entry reads the pattern.
        """

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return no config.json keys, because the pattern of layer kinds selects the layers with experts.
        Another config entry writes the pattern.
        """
        return {}


@dataclass(frozen=True)
class QwenSparseStepConfigEntry:
    """Translation to and from config.json of Qwen's layers with experts: every n-th layer, except listed dense ones.
    The key `decoder_sparse_step` is n. The layers in `mlp_only_layers` have no experts; if the key is absent, those in `dense`.
    """

    dense: tuple[int, ...] = ()
    handled_config_keys: frozenset[str] = frozenset({"decoder_sparse_step", "mlp_only_layers"})

    def fields_from_config(self, raw: ConfigDict) -> list[int] | None:
        """Return the indices of the layers with experts; None if all have them. ConfigMismatchError for a step below 1."""
        step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers")
        dense = self.dense if dense is None else dense
        if step < 1:
            raise ConfigMismatchError(f"decoder_sparse_step = {step} must be at least 1")
        if step == 1 and not dense:
            return None
        return [layer for layer in layer_indices(raw) if (layer + 1) % step == 0 and layer not in dense]

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json keys `decoder_sparse_step` (always 1) and `mlp_only_layers` (all dense layers)."""
        sparse = set(moe_layer_indices(model))
        return {"decoder_sparse_step": 1, "mlp_only_layers": [n for n in range(model.num_layers) if n not in sparse]}


@dataclass(frozen=True)
class FirstKDenseConfigEntry:
    """Translation to and from config.json of DeepSeek's layers with experts: all but the first `first_k_dense_replace`.
    All others have experts, multi-token prediction (MTP) layers included.

    Attributes:
        default: number of dense layers if the key is absent.
        mtp_entry: the key of the number of MTP layers.
        key: key of the number of dense layers.
    """

    default: int
    mtp_entry: KeyEntry | None = None
    key: str = "first_k_dense_replace"

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset({self.key, "moe_layer_freq"})

    def fields_from_config(self, raw: ConfigDict) -> list[int] | None:
        """Return the indices of the layers with experts, all except the first dense ones; None if no layer is dense.
        Raises ConfigMismatchError for another `moe_layer_freq` than 1.
        """
        if raw.get("moe_layer_freq", 1) != 1:
            raise ConfigMismatchError(f"moe_layer_freq = {raw['moe_layer_freq']!r} is not supported (only 1)")
        dense = raw.get(self.key, self.default)
        mtp_layers = self.mtp_entry.fields_from_config(raw)["mtp_layers"] if self.mtp_entry is not None else 0
        return list(layer_indices(raw, mtp_layers)[dense:]) if dense else None

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the config.json key of the number of first dense layers; ConfigMismatchError if a later layer is dense."""
        layers = model.num_layers + model.mtp_layers
        dense = next((layer for layer in range(layers) if model.is_moe_layer(layer)), layers)
        if not all(model.is_moe_layer(layer) for layer in range(dense, layers)):
            raise ConfigMismatchError(f"moe.layers must be all layers from {dense} to the last")
        return {self.key: dense}


@dataclass(frozen=True)
class MlpLayerTypesEntry:
    """Translation to and from config.json of the layers with experts, as a list `mlp_layer_types` of "dense" or "sparse".
    Multi-token prediction (MTP) layers, which the list leaves out, have experts.

    Attributes:
        dense: number of dense layers at the start if there is no list.
        dense_key: key of that number; empty if the family has no such key.
        mtp_entry: the key of the number of MTP layers.
    """

    dense: int
    dense_key: str = ""
    mtp_entry: KeyEntry | None = None

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset({"mlp_layer_types", *self.dense_key.split()})

    def fields_from_config(self, raw: ConfigDict) -> list[int] | None:
        """Return the indices of the layers with experts from `mlp_layer_types` in config.json; None if all layers have them.
        Raises ConfigMismatchError if it is not a list of dense and sparse for all layers.
        """
        layers = layer_indices(raw)
        first = raw.get(self.dense_key, self.dense) if self.dense_key else self.dense
        kinds = raw.get("mlp_layer_types") or ["dense" if layer < first else "sparse" for layer in layers]
        if len(kinds) != len(layers) or not set(kinds) <= {"dense", "sparse"}:
            raise ConfigMismatchError(f"mlp_layer_types must have dense or sparse for each of {len(layers)} layers")
        if "dense" not in kinds:
            return None
        mtp_layers = self.mtp_entry.fields_from_config(raw)["mtp_layers"] if self.mtp_entry is not None else 0
        sparse = [layer for layer in layers if kinds[layer] == "sparse"]
        return [*sparse, *range(len(layers), len(layers) + mtp_layers)]

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the key `mlp_layer_types` of config.json with its value, with "dense" or "sparse" for each layer.
        The number of dense layers at the start, which other readers use, is added if all others have experts.
        """
        sparse = [model.is_moe_layer(layer) for layer in range(model.num_layers)]
        first = {self.dense_key: sparse.count(False)} if self.dense_key and sparse == sorted(sparse) else {}
        return {"mlp_layer_types": ["sparse" if each else "dense" for each in sparse], **first}


def moe_layer_indices(model: ModelConfig) -> list[int]:
    """Return the indices of the layers of `model` that have experts, multi-token prediction (MTP) layers left out."""
    return [layer for layer in range(model.num_layers) if model.is_moe_layer(layer)]


def build_router_config_entries(
    name: str, *, top_k: int, normalize: bool, experts: Any = ..., aux_loss: float = 0.001
) -> tuple[MoeFieldEntry, ...]:
    """Return the router's config entries that Mixtral, Qwen and GPT-OSS share.

    `name` is the key of the number of experts; `top_k`, `experts` and `aux_loss` are transformers' defaults for absent
    keys. With `normalize`, the weights of a token's experts always sum to one; else the key `norm_topk_prob` decides.
    """
    return (
        KeyEntry(name, "num_experts", experts),
        KeyEntry("num_experts_per_tok", "top_k", top_k),
        KeyEntry("router_aux_loss_coef", "aux_loss", aux_loss),
        *([FixedFieldsEntry({"normalize": True})] if normalize else [KeyEntry("norm_topk_prob", "normalize", False)]),
    )


def build_per_expert_tensor_rules(module: str, names: tuple[str, str, str] = _PROJECTIONS) -> tuple[TensorRule, ...]:
    """Return the tensor rules for experts with separate tensors on disk.
    The disk tensors are `module`.{e}.`name`.weight for expert e and each of the three projection `names`.
    """
    return tuple(
        TensorRule(
            f"{module}.{{e}}.{name}.weight", (f"model.layers.{{i}}.mlp.experts.{part}.weight",), UnstackedLayout()
        )
        for name, part in zip(names, _PROJECTIONS, strict=True)
    )


# Shared expert of Hunyuan's models on disk.
SHARED_MLP_RULES = tuple(
    TensorRule(f"{LAYER}.mlp.shared_mlp.{part}.weight", (f"{LAYER}.mlp.shared_expert.{part}.weight",))
    for part in _PROJECTIONS
)


@dataclass(frozen=True)
class SharedExpertsEntry:
    """Translation to and from config.json of the number of shared experts, which mega stores as one wide expert.

    Attributes:
        default: number of shared experts if the key is absent; `...` marks a required key.
        key: the number's key, and after spaces its aliases.
        may_be_absent: a model may have no shared experts.
        width_key: key of the width of an expert.
        width_default: that width if the key is absent.
    """

    default: Any
    key: str = "n_shared_experts"
    may_be_absent: bool = False
    width_key: str = "moe_intermediate_size"
    width_default: int = 0
    handled_model_fields: frozenset[str] = frozenset({"shared_ffn_hidden_size"})

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return frozenset(self.key.split())

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return the `MoeConfig` field `shared_ffn_hidden_size`, the total width of the shared experts, from config.json."""
        count = KeyEntry(self.key, "count", self.default).fields_from_config(raw)["count"] or 0
        return {"shared_ffn_hidden_size": count * raw.get(self.width_key, self.width_default)}

    def config_from_fields(self, model: StrictConfig) -> dict[str, Any]:
        """Return the key of the number of shared experts; ConfigMismatchError unless an expert's width divides the shared one.
        Raises ConfigMismatchError for 0 experts, too, unless the family allows that.
        """
        assert isinstance(model, MoeConfig)
        count, rest = divmod(model.shared_ffn_hidden_size, model.ffn_hidden_size)
        if rest or not (count or self.may_be_absent):
            raise ConfigMismatchError(
                f"moe.shared_ffn_hidden_size must be a positive multiple of moe.ffn_hidden_size = {model.ffn_hidden_size}"
            )
        return {self.key.split()[0]: count}
