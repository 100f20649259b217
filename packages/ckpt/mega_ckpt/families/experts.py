"""A mixture of experts in config.json and on disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from mega_ckpt.families.keys import Fixed, Key, MismatchError, Raw, layer_numbers
from mega_ckpt.families.layouts import OneSlab, Rule
from mega_ckpt.families.plain import MOE_TRAINING_FIELDS
from mega_common.config import Config
from mega_common.model_config import ModelConfig, MoeConfig

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Section(Protocol):
    """Some keys and the fields of `MoeConfig` that mean the same."""

    @property
    def keys(self) -> frozenset[str]:
        """Keys of config.json it answers for."""

    @property
    def fields(self) -> frozenset[str]:
        """Fields of `MoeConfig` it answers for."""

    def read(self, raw: Raw) -> dict[str, Any]:
        """Fields from keys; MismatchError when a value has no counterpart."""

    def write(self, model: Any) -> dict[str, Any]:
        """Keys from fields of the section; MismatchError when a value has no counterpart."""


class Layers(Protocol):
    """The keys that say which layers have experts."""

    @property
    def keys(self) -> frozenset[str]:
        """Keys of config.json it answers for."""

    def read(self, raw: Raw) -> list[int] | None:
        """`MoeConfig.layers`."""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Keys from the layers of `model`; MismatchError when they are no such pattern."""


@dataclass(frozen=True)
class Experts:
    """The section `moe`, which a model of the family must have.

    Attributes:
        entries: how the keys and the section's fields correspond.
        layers: the keys about which layers have experts.
    """

    entries: tuple[Section, ...]
    layers: Layers
    fields: frozenset[str] = frozenset({"moe"})

    @property
    def keys(self) -> frozenset[str]:
        """Those of all entries."""
        return self.layers.keys.union(*(entry.keys for entry in self.entries))

    def read(self, raw: Raw) -> dict[str, Any]:
        """The section."""
        section: dict[str, Any] = {"layers": self.layers.read(raw)}
        found = []
        for entry in self.entries:
            try:
                section |= entry.read(raw)
            except MismatchError as error:
                found.append(str(error))
        if found:
            raise MismatchError("; ".join(found))
        return {"moe": section}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """The section's keys."""
        if model.moe is None:
            raise MismatchError("moe is missing: this is a family of mixtures of experts")
        out = self.layers.write(model)
        for entry in self.entries:
            out |= entry.write(model.moe)
        answered = MOE_TRAINING_FIELDS.union({"layers"}, *(entry.fields for entry in self.entries))
        for name, field in MoeConfig.model_fields.items():
            if name not in answered and getattr(model.moe, name) != field.default:
                raise MismatchError(f"moe.{name} = {getattr(model.moe, name)!r} has no counterpart")
        return out


@dataclass(frozen=True)
class Everywhere:
    """Every layer has experts; no key speaks of it."""

    keys: frozenset[str] = frozenset()

    def read(self, raw: Raw) -> None:
        """All layers."""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Nothing, when the model agrees."""
        if len(expert_layers(model)) < model.num_layers:
            raise MismatchError("moe.layers must name every layer")
        return {}


@dataclass(frozen=True)
class InPattern:
    """The pattern of all layers' kinds says it, which another entry reads and writes."""

    keys: frozenset[str] = frozenset()

    def read(self, raw: Raw) -> None:
        """Nothing beside it."""

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Nothing beside it."""
        return {}


@dataclass(frozen=True)
class SparseSteps:
    """Every so many layers have experts, but for those in a list: Qwen."""

    keys: frozenset[str] = frozenset({"decoder_sparse_step", "mlp_only_layers"})

    def read(self, raw: Raw) -> list[int] | None:
        """The layers that both keys leave."""
        step, dense = raw.get("decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
        if step < 1:
            raise MismatchError(f"decoder_sparse_step = {step} must be at least 1")
        if step == 1 and not dense:
            return None
        return [layer for layer in layer_numbers(raw) if (layer + 1) % step == 0 and layer not in dense]

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """A list can say it all."""
        sparse = set(expert_layers(model))
        return {"decoder_sparse_step": 1, "mlp_only_layers": [n for n in range(model.num_layers) if n not in sparse]}


@dataclass(frozen=True)
class AfterDense:
    """The first few layers are dense, all others have experts, further predictors too: DeepSeek.

    Attributes:
        default: how many are dense where the key is absent.
        further: the key that tells the number of predictors.
    """

    default: int
    further: Key | None = None
    keys: frozenset[str] = frozenset({"first_k_dense_replace", "moe_layer_freq"})

    def read(self, raw: Raw) -> list[int] | None:
        """All layers but the first ones."""
        if raw.get("moe_layer_freq", 1) != 1:
            raise MismatchError(f"moe_layer_freq = {raw['moe_layer_freq']!r} is not supported (only 1)")
        dense = raw.get("first_k_dense_replace", self.default)
        further = self.further.read(raw)["mtp_layers"] if self.further is not None else 0
        return list(layer_numbers(raw, further)[dense:]) if dense else None

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """How many are dense."""
        layers = model.num_layers + model.mtp_layers
        dense = next((layer for layer in range(layers) if model.has_experts(layer)), layers)
        if not all(model.has_experts(layer) for layer in range(dense, layers)):
            raise MismatchError(f"moe.layers must be all layers from {dense} on")
        return {"first_k_dense_replace": dense}


def expert_layers(model: ModelConfig) -> list[int]:
    """The layers of `model` that have experts, further predictors left out."""
    return [layer for layer in range(model.num_layers) if model.has_experts(layer)]


def router(
    name: str, *, top_k: int, normalize: bool, experts: Any = ..., aux_loss: float = 0.001
) -> tuple[Section, ...]:
    """The keys that Mixtral, Qwen and GPT-OSS share.

    `name` is the key of how many experts there are; `top_k`, `experts` and `aux_loss` are what transformers takes for
    absent keys. With `normalize` the weights of a token's experts always sum to one, which elsewhere a key says.
    """
    return (
        Key(name, "num_experts", experts),
        Key("num_experts_per_tok", "top_k", top_k),
        Key("router_aux_loss_coef", "aux_loss", aux_loss),
        *([Fixed({"normalize": True})] if normalize else [Key("norm_topk_prob", "normalize", False)]),
    )


def expert_rules(module: str, names: tuple[str, str, str] = _PROJECTIONS) -> tuple[Rule, ...]:
    """A tensor for each expert: `module`.{e}.`name`.weight for each of the three projections."""
    return tuple(
        Rule(f"{module}.{{e}}.{name}.weight", (f"model.layers.{{i}}.mlp.experts.{part}.weight",), OneSlab())
        for name, part in zip(names, _PROJECTIONS, strict=True)
    )


@dataclass(frozen=True)
class SharedExperts:
    """DeepSeek's number of shared experts, which are one expert of so many times the width."""

    default: int
    keys: frozenset[str] = frozenset({"n_shared_experts"})
    fields: frozenset[str] = frozenset({"shared_ffn_hidden_size"})

    def read(self, raw: Raw) -> dict[str, Any]:
        """Their width together."""
        count = raw.get("n_shared_experts", self.default) or 0
        return {"shared_ffn_hidden_size": count * raw.get("moe_intermediate_size", 0)}

    def write(self, model: Config) -> dict[str, Any]:
        """How many there are."""
        assert isinstance(model, MoeConfig)
        count, rest = divmod(model.shared_ffn_hidden_size, model.ffn_hidden_size)
        if rest or not count:
            raise MismatchError(
                f"moe.shared_ffn_hidden_size must be a multiple of {model.ffn_hidden_size}, at least one"
            )
        return {"n_shared_experts": count}
