"""OLMo Hybrid (Ai2): gated delta nets with pre-norms in three of four layers, OLMo 3's attention with post-norms in the fourth.

On the hub the convolutions of queries, keys and values are three tensors. transformers 5.23 has one, which it saves in three
parts of equal size, whatever the sizes of queries and values are; both forms are read, and the first is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from mega_ckpt.families.config_entries import (
    ConfigDict,
    ConfigMismatchError,
    FixedFieldsEntry,
    KeyEntry,
    KeyValueHeadsEntry,
    exclude_entries_of_fields,
    layer_indices,
    llama_config_entries,
)
from mega_ckpt.families.disk_layouts import LAYER, DiskTensor, TensorRule, TensorSlice
from mega_ckpt.families.family import ModelFamily
from mega_ckpt.families.hybrid_entries import (
    CONV1D,
    NO_WINDOW,
    OptionalRopeEntry,
    check_layer_mixers,
    parse_layer_mixers,
    to_transformers_layer_types,
)
from mega_ckpt.families.rope_entries import RopeEntry
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.layer_kinds import GatedDeltaConfig
from mega_common.model_config import ModelConfig

_KEYS = {
    "linear_num_key_heads": "num_key_heads", "linear_num_value_heads": "num_value_heads", "linear_key_head_dim": "key_head_dim",
    "linear_value_head_dim": "value_head_dim", "linear_conv_kernel_dim": "conv_kernel",
    "linear_allow_neg_eigval": "negative_eigenvalues",
}  # fmt: skip
_NORM_EPS = 1e-5  # of the output norm, in transformers


@dataclass(frozen=True)
class OlmoHybridLayersEntry:
    """Translation to and from config.json of the mixer of each layer and the sizes of gated delta nets.
    By default every fourth layer has attention, and at least the last one; sizes follow from those of attention.
    """

    handled_config_keys: frozenset[str] = frozenset({"layer_types", *_KEYS})
    handled_model_fields: frozenset[str] = frozenset({"layers", "delta"})

    def fields_from_config(self, raw: ConfigDict) -> dict[str, Any]:
        """Return, from config.json, the `ModelConfig` fields `layers` ("mixer+mlp" of each layer) and `delta`."""
        layers, heads = layer_indices(raw), raw["num_attention_heads"]
        default = ["linear_attention" if i % 4 < 3 else "full_attention" for i in layers]
        if "full_attention" not in default:
            default[-1] = "full_attention"
        mixers = parse_layer_mixers(raw.get("layer_types") or default, "delta", layers, names=("linear_attention",))
        given = {name: raw[key] for key, name in _KEYS.items() if raw.get(key) is not None}
        keys = given.get("num_key_heads", heads)
        size = given.get("key_head_dim", int(0.75 * raw["hidden_size"] / keys))
        sizes = {"num_key_heads": keys, "num_value_heads": heads, "key_head_dim": size, "value_head_dim": 2 * size}
        section = {"negative_eigenvalues": True, "norm_eps": _NORM_EPS, **sizes, **given}
        return {"layers": [f"{mixer}+mlp" for mixer in mixers], "delta": section}

    def config_from_fields(self, model: ModelConfig) -> dict[str, Any]:
        """Return the keys of mixers and of gated delta nets; ConfigMismatchError unless a model without experts has both mixers.

        Raises:
            ConfigMismatchError: also for another epsilon of the output norm.
        """
        mixers = check_layer_mixers(model, "delta")
        if len(set(mixers)) < 2 or any(kind.feed_forward != "mlp" for kind in model.layer_kinds):
            raise ConfigMismatchError("layers must have delta+mlp and attention+mlp, both at least once")
        assert isinstance(model.delta, GatedDeltaConfig)
        if (model.delta.norm_eps or model.norm_eps) != _NORM_EPS:
            raise ConfigMismatchError(f"delta.norm_eps must be {_NORM_EPS}, not {model.delta.norm_eps}")
        return {
            "layer_types": to_transformers_layer_types(mixers),
            **{key: getattr(model.delta, name) for key, name in _KEYS.items()},
        }


@dataclass(frozen=True)
class NullableRopeEntry(OptionalRopeEntry):
    """Translation to and from config.json of rotary positions, which a model may lack.
    They are absent if `rope_theta` or `rope_type` is null, as on the hub.
    """

    @property
    def handled_config_keys(self) -> frozenset[str]:
        """Keys of config.json that this class translates or checks."""
        return self.rope.handled_config_keys

    def has_positions(self, raw: ConfigDict) -> bool:
        """Return whether a config.json has a base frequency and a type of rotary positions."""
        given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        theta = given.get("rope_theta", raw.get("rope_theta", self.rope.theta))
        return theta is not None and given.get("rope_type", "default") is not None

    def selection_keys(self, *, has_positions: bool) -> dict[str, Any]:
        """Return null rotary parameters for a model without positions, and no keys for one with positions."""
        return {} if has_positions else {"rope_parameters": {"rope_type": None, "rope_theta": None}}


@dataclass(frozen=True)
class ConvolutionThird(DiskTensor):
    """Disk tensor of a delta net's convolution: the channels of queries, keys or values, or a third of all.

    Attributes:
        whole: slices of all three.
        number: 0, 1 or 2.
    """

    whole: tuple[TensorSlice, ...]
    number: int

    def fit_to_shape(self, shape: TensorShape) -> DiskTensor:
        """Return this disk tensor, or the third of all channels that torch.chunk gives if only that has `shape`."""
        ends = [sum(part.shape[0] for part in self.whole[: number + 1]) for number in range(3)]
        size = -(-ends[-1] // 3)
        first, last = self.number * size, min((self.number + 1) * size, ends[-1])
        if shape == self.shape or shape[0] != last - first:
            return self
        slabs = []
        for part, end in zip(self.whole, ends, strict=True):
            start, stop = max(first, end - part.shape[0]), min(last, end)
            if start < stop:
                at = (start - end + part.shape[0], *part.offset[1:])
                slabs.append(TensorSlice(part.name, at, (stop - start, *part.shape[1:])))
        return replace(self, shape=shape, slabs=tuple(slabs))


@dataclass(frozen=True)
class OlmoHybridFamily(ModelFamily):
    """The family of OLMo Hybrid, whose convolutions have three tensors of one or the other size."""

    def disk_tensor_table(self, model: ModelConfig, names: Iterable[str] | None = None) -> dict[str, DiskTensor]:
        """Return {name on disk: DiskTensor} of the tensors of `model`; see `ModelFamily.disk_tensor_table`."""
        table = super().disk_tensor_table(model, names)
        for name in [name for name in table if name.endswith("linear_attn.q_conv1d.weight")]:
            parts = [table[name.replace(".q_", f".{part}_")] for part in "qkv"]
            whole = tuple(slab for part in parts for slab in part.slabs)
            for number, part in enumerate(parts):
                table[part.name] = ConvolutionThird(part.name, part.shape, part.slabs, part.layout, whole, number)
        return table


_DELTA = f"{LAYER}.linear_attn"
_PROJECTIONS = {"q": "q", "k": "k", "v": "v", "z": "g", "b": "b", "a": "a"}

OLMO_HYBRID = OlmoHybridFamily(
    name="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    entries=(
        *exclude_entries_of_fields(llama_config_entries(norm_eps=1e-6), "norm"),
        FixedFieldsEntry({"norm": "rmsnorm"}),
        KeyValueHeadsEntry(explicit_dim=False),
        NullableRopeEntry(RopeEntry()),
        OlmoHybridLayersEntry(),
        KeyEntry("attention_bias", "qkv_bias attention_out_bias", False),
        *NO_WINDOW,
        FixedFieldsEntry(
            {"norm_position": "post", "norm_positions": {"delta": "pre"}, "qk_norm": True, "qk_norm_span": "all", "mlp_bias": False}
        ),
    ),
    rules=(
        *(TensorRule(f"{_DELTA}.{disk}_proj.weight", (f"{_DELTA}.in_proj.{part}.weight",)) for part, disk in _PROJECTIONS.items()),
        *(TensorRule(f"{_DELTA}.{part}_conv1d.weight", (f"{_DELTA}.conv1d.{part}.weight",), CONV1D) for part in "qkv"),
        TensorRule(f"{_DELTA}.o_norm.weight", (f"{_DELTA}.norm.weight",)),
        TensorRule(f"{_DELTA}.o_proj.weight", (f"{_DELTA}.out_proj.weight",)),
    ),
    other_names=(("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm")),
    # of the start of training
    carried=frozenset(
        {"linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"}
    ),
    tokens=("pad_token_id", "eos_token_id"),
)  # fmt: skip
