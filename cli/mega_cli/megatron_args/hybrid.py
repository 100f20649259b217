"""Layers of several kinds: the patterns of Megatron's hybrids, and gated delta nets among layers of a transformer."""

from __future__ import annotations

from typing import Any

from mega_ckpt.families.keys import MismatchError
from mega_ckpt.formats.megatron_hybrid import NORM_EPS, Pattern, mamba_section, pattern_of
from mega_cli.megatron_args.draft import Draft
from mega_cli.megatron_args.patterns import layers_of_kind
from mega_cli.megatron_args.shell import MARK

PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
SHARES = ("hybrid_attention_ratio", "hybrid_mlp_ratio")
VARIANT = "experimental_attention_variant"
DELTA = ("gdn", "gated_delta_net")
MAMBA = {
    "num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "num_groups": "mamba_num_groups",
    "state_size": "mamba_state_dim",
}  # fmt: skip
SIZES = {
    "num_key_heads": "linear_num_key_heads", "num_value_heads": "linear_num_value_heads",
    "key_head_dim": "linear_key_head_dim", "value_head_dim": "linear_value_head_dim", "conv_kernel": "linear_conv_kernel_dim",
}  # fmt: skip


def is_hybrid(draft: Draft) -> bool:
    """Whether the layers are of kinds that a pattern, or shares, say."""
    return any(draft.wants(dest) for dest in (*PATTERNS, *SHARES, "is_hybrid_model"))


def without_experts(draft: Draft) -> bool:
    """Whether a pattern names no layer with experts, whatever other flags say of them."""
    pattern = pattern_of_flags(draft)
    return pattern is not None and not any("E" in letters for letters in (pattern.letters, *pattern.further))


def pattern_of_flags(draft: Draft) -> Pattern | None:
    """What the flags say of the kinds of layers; None where that is nothing, not known, or wrong, which is then refused."""
    named = ("is_hybrid_model", *PATTERNS, *SHARES, "num_layers", "mtp_num_layers", "mtp_hybrid_override_pattern")
    if not is_hybrid(draft) or any(draft.unknown(dest) or MARK.search(str(draft[dest])) for dest in named):
        return None
    try:
        pattern = pattern_of({dest: draft[dest] for dest in named})
    except MismatchError as error:
        draft.refuse(next(dest for dest in (*PATTERNS, "is_hybrid_model", *SHARES) if draft[dest]), str(error))
        return None
    layers = draft["num_layers"]
    if pattern and layers and layers != len(pattern.letters):
        draft.refuse("num_layers", f"must be {len(pattern.letters)}, as many as the pattern has letters")
    return pattern


def hybrid_section(draft: Draft) -> None:
    """Write `model.layers` and `model.mamba` of a hybrid."""
    pattern, put = pattern_of_flags(draft), draft.put
    flags = (*PATTERNS, *SHARES, "mtp_hybrid_override_pattern")
    if pattern is None:
        return put("model.layers", None, *flags, ask="follows from the number of layers")
    put("model.layers", pattern.layers if pattern.further else pattern.letters, *flags)
    draft.tell("translated", "model.layers", "is_hybrid_model")
    if any(word in str(draft["spec"]) for word in ("mamba_stack_spec", "hybrid_stack_spec")):
        draft.tell("not needed", "layers of these kinds are the only ones here", "spec")
    if pattern.further and not draft["mtp_num_layers"]:
        put("model.mtp_layers", len(pattern.further), *PATTERNS)
        put("model.mtp_loss", draft["mtp_loss_scaling_factor"], "mtp_loss_scaling_factor")
    if "M" in pattern.letters:
        _mamba(draft)
    if "G" in pattern.letters:
        _delta(draft)
    return None


def _mamba(draft: Draft) -> None:
    found: dict[str, Any] = mamba_section({dest: draft[dest] for dest in (*MAMBA.values(), "hidden_size")})
    for name, dest in MAMBA.items():
        default = name == "num_heads" and dest not in draft
        why = "Megatron's default: 2 x hidden_size / the width of a head" if default else ""
        draft.put(f"model.mamba.{name}", found[name] or None, dest, because=why)
    draft.put("model.mamba.chunk_size", found["chunk_size"])
    draft.put("model.mamba.norm_eps", NORM_EPS, because="that of Megatron's Mamba-2, whatever --norm-epsilon says")


def _delta(draft: Draft) -> None:
    for name, dest in SIZES.items():
        draft.put(f"model.delta.{name}", draft[dest], dest)


def attention_variant(draft: Draft) -> None:
    """Write `model.attention_gate`, and `model.layers` and `model.delta` where some layers are gated delta nets."""
    if draft["attention_output_gate"]:
        draft.put("model.attention_gate", True, "attention_output_gate")
    if draft[VARIANT] not in DELTA:
        return
    mixers = layers_of_kind(draft, "model.layers", "linear_attention_freq", lambda layer, n: (layer + 1) % n != 0)
    if mixers is None:
        return
    moe = draft.run["model"].get("moe")
    sparse = moe.pop("layers", None) if moe else []
    kinds = ["moe" if sparse is None or layer in sparse else "mlp" for layer in range(len(mixers))]
    layers = [f"{'delta' if delta else 'attention'}+{feed}" for delta, feed in zip(mixers, kinds, strict=True)]
    draft.put("model.layers", layers, VARIANT, "linear_attention_freq")
    _delta(draft)
