"""Hybrid models: layer patterns of Megatron, and gated delta nets between transformer layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mega_cli.megatron_args.arithmetic import parse_megatron_layer_freq
from mega_cli.megatron_args.run_draft import RunYamlDraft
from mega_cli.megatron_args.shell_words import MARK, explain_unknown_flag_value, format_unknown_placeholders
from mega_common.layer_kinds import NORM_EPS, HybridLayerPattern, build_hybrid_pattern, build_mamba_section


def compute_layer_pattern_mask(
    draft: RunYamlDraft, key: str, dest: str, every: Callable[[int, int], bool], further: int = 0
) -> list[bool] | None:
    """Return, for each layer, True if it has the kind that a Megatron layer pattern selects; None if unknown.
    The pattern is in Megatron setting `dest`; `every(layer, n)` decides if the pattern is a number n. `key` is
    run.yaml's key, for notes.

    The `further` layers after the last one are included. An invalid pattern is recorded as a problem, and without a
    number of layers `key` is left to be filled in.
    """
    if not draft[dest] or MARK.search(draft[dest]):
        draft.set_key(key, None, dest, ask=explain_unknown_flag_value(draft[dest] or "a pattern of layers"))
        return None
    layers, pattern = draft.run["model"]["num_layers"], parse_megatron_layer_freq(draft[dest])
    layers = layers and layers + further
    if isinstance(pattern, int) and pattern > 0:
        if pattern > 1 and not layers:
            draft.set_key(key, None, dest, ask="follows from the number of layers")
            return None
        return [every(layer, pattern) for layer in range(layers or 0)]
    if isinstance(pattern, list) and len(pattern) == (layers or len(pattern)):
        return [bool(kind) for kind in pattern]
    draft.add_problem(dest, f"must be a number, or a list of {layers} zeros and ones such as [0]*1+[1]*3")
    return None


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


def has_hybrid_layers(draft: RunYamlDraft) -> bool:
    """Return whether Megatron's flags describe a hybrid model, such as Mamba with attention.
    A layer pattern or ratio among the flags makes the model a hybrid.
    """
    return any(draft.is_megatron_setting_enabled(dest) for dest in (*PATTERNS, *SHARES, "is_hybrid_model"))


def is_hybrid_pattern_without_moe(draft: RunYamlDraft) -> bool:
    """Return whether the model has a hybrid layer pattern without MoE layers, whatever other flags say."""
    pattern = get_megatron_hybrid_pattern(draft)
    return pattern is not None and not any("E" in letters for letters in (pattern.letters, *pattern.mtp_letters))


def get_megatron_hybrid_pattern(draft: RunYamlDraft) -> HybridLayerPattern | None:
    """Return the hybrid layer pattern of Megatron's flags; None if absent, unknown, or invalid (a problem in `draft`)."""
    named = ("is_hybrid_model", *PATTERNS, *SHARES, "num_layers", "mtp_num_layers", "mtp_hybrid_override_pattern")
    if not has_hybrid_layers(draft) or any(
        draft.is_megatron_setting_unknown(dest) or MARK.search(str(draft[dest])) for dest in named
    ):
        return None
    try:
        pattern = build_hybrid_pattern({dest: draft[dest] for dest in named})
    except ValueError as error:
        draft.add_problem(next(dest for dest in (*PATTERNS, "is_hybrid_model", *SHARES) if draft[dest]), str(error))
        return None
    layers = draft["num_layers"]
    if pattern and layers and layers != len(pattern.letters):
        draft.add_problem("num_layers", f"must be {len(pattern.letters)}, the number of letters of the pattern")
    return pattern


def translate_hybrid_layer_flags(draft: RunYamlDraft) -> None:
    """Add the layers of a hybrid model to `draft`, from Megatron-LM flags.
    They are run.yaml's `model.layers` and `model.mamba` or `model.delta`.
    """
    pattern, put = get_megatron_hybrid_pattern(draft), draft.set_key
    flags = (*PATTERNS, *SHARES, "mtp_hybrid_override_pattern")
    if pattern is None:
        return put("model.layers", None, *flags, ask="follows from the number of layers")
    put("model.layers", pattern.layer_kind_names if pattern.mtp_letters else pattern.letters, *flags)
    draft.add_note("translated", "model.layers", "is_hybrid_model")
    if any(word in str(draft["spec"]) for word in ("mamba_stack_spec", "hybrid_stack_spec")):
        draft.add_note("not needed", "mega has only these kinds of layers", "spec")
    if pattern.mtp_letters and not draft["mtp_num_layers"]:
        put("model.mtp_layers", len(pattern.mtp_letters), *PATTERNS)
        put("model.mtp_loss", draft["mtp_loss_scaling_factor"], "mtp_loss_scaling_factor")
    if "M" in pattern.letters:
        _mamba(draft)
    if "G" in pattern.letters:
        _delta(draft)
    return None


def _mamba(draft: RunYamlDraft) -> None:
    found: dict[str, Any] = build_mamba_section({dest: draft[dest] for dest in (*MAMBA.values(), "hidden_size")})
    for name, dest in MAMBA.items():
        default = name == "num_heads" and dest not in draft
        why = "Megatron's default: 2 x hidden_size / head_dim" if default else ""
        draft.set_key(f"model.mamba.{name}", found[name] or None, dest, because=why)
    draft.set_key("model.mamba.chunk_size", found["chunk_size"])
    draft.set_key(
        "model.mamba.norm_eps", NORM_EPS, because="fixed in Megatron's Mamba-2, independent of --norm-epsilon"
    )


def _delta(draft: RunYamlDraft) -> None:
    for name, dest in SIZES.items():
        draft.set_key(f"model.delta.{name}", draft[dest], dest)


def translate_attention_variant_flags(draft: RunYamlDraft) -> None:
    """Add the attention gate and gated delta net layers of a model to `draft`, from Megatron-LM flags.
    They are run.yaml's `model.attention_gate`, and `model.layers` and `model.delta` if some layers are gated delta
    nets.
    """
    if draft["attention_output_gate"] and draft["multi_latent_attention"]:
        draft.add_problem("attention_output_gate", "is not supported with --multi-latent-attention")
    elif draft["attention_output_gate"]:
        draft.set_key("model.attention_gate", True, "attention_output_gate")
    if draft[VARIANT] not in DELTA:
        return
    mixers = compute_layer_pattern_mask(
        draft, "model.layers", "linear_attention_freq", lambda layer, n: (layer + 1) % n != 0
    )
    if mixers is None:
        return
    moe = draft.run["model"].get("moe")
    sparse = moe.pop("layers", None) if moe else []
    kinds = ["moe" if sparse is None or layer in sparse else "mlp" for layer in range(len(mixers))]
    layers = [f"{'delta' if delta else 'attention'}+{feed}" for delta, feed in zip(mixers, kinds, strict=True)]
    draft.set_key("model.layers", layers, VARIANT, "linear_attention_freq")
    _delta(draft)


FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
VIRTUAL = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")
LAYOUT = "pipeline_model_parallel_layout"


def translate_pipeline_layout_flags(draft: RunYamlDraft) -> None:
    """Add the layout of pipeline stages to `draft`, if Megatron-LM flags give it.
    The keys of run.yaml are `parallel.virtual_stages` and `parallel.pipeline_layout`.
    """
    layers, pp = draft.run["model"]["num_layers"], draft["pipeline_model_parallel_size"]
    if pp == 1:
        return
    if not layers or not pp or any(draft.is_megatron_setting_unknown(dest) for dest in (FIRST, LAST, *VIRTUAL)):
        _open(draft)
        return
    if draft[LAYOUT]:
        _explicit(draft, pp, layers)
        return
    pattern = get_megatron_hybrid_pattern(draft)
    if pattern and len(pattern.stages) > 1:
        _group_stages(draft, list(pattern.stages), pp, layers, *PATTERNS)
        return
    virtual = draft[VIRTUAL[0]] or 1
    if per_stage := draft[VIRTUAL[1]]:
        virtual = (layers + draft[EMBEDDING] + draft[LOSS]) // pp // per_stage
    if virtual > 1:
        draft.set_key("parallel.virtual_stages", virtual, *VIRTUAL)
    if any(draft[name] for name in (FIRST, LAST, EMBEDDING, LOSS)):
        layout = compute_megatron_layers_per_stage(
            layers, pp, virtual, first=draft[FIRST], last=draft[LAST], embedding=draft[EMBEDDING], loss=draft[LOSS]
        )
        _put_layout(draft, layout, layers, FIRST, LAST, EMBEDDING, LOSS)


def _open(draft: RunYamlDraft) -> None:
    ask = "follows from the numbers of layers and of pipeline ranks"
    for key, dests in (("virtual_stages", VIRTUAL), ("pipeline_layout", (FIRST, LAST, EMBEDDING, LOSS, LAYOUT))):
        if any(dest in draft for dest in dests):
            draft.set_key(f"parallel.{key}", None, *dests, ask=ask)


def compute_megatron_layers_per_stage(
    layers: int, pp: int, virtual: int, *, first: int | None, last: int | None, embedding: bool, loss: bool
) -> list[int]:
    """Return the number of decoder layers of each of pp x virtual pipeline stages by Megatron's rules.
    Stage s belongs to rank s % pp. `first` and `last` are the layers of the first and the last rank; the others are
    distributed evenly. Without them, all stages are even, with `embedding` and `loss` counted as one layer each.
    """
    if first is None and last is None:
        counts = [(layers + embedding + loss) // (pp * virtual)] * (pp * virtual)
        counts[0] -= embedding
        counts[-1] -= loss
        return counts
    between = pp - (first is not None) - (last is not None)
    ranks = [(layers - (first or 0) - (last or 0)) // max(1, between)] * pp
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    return [count // virtual for _ in range(virtual) for count in ranks]


def parse_megatron_pipeline_layout(text: str) -> list[int]:
    """Return the number of decoder layers of each pipeline stage in a Megatron layout such as `Ett|(tt|)*6t|L`.
    In the layout, `t` is a layer, `|` ends a stage, and `*` repeats.
    """
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    return [stage.count("t") for stage in text.split("|")]


def _explicit(draft: RunYamlDraft, pp: int, layers: int) -> None:
    if MARK.search(draft[LAYOUT]):
        draft.set_key("parallel.pipeline_layout", None, LAYOUT, instead=format_unknown_placeholders(draft[LAYOUT]))
        return
    _group_stages(draft, parse_megatron_pipeline_layout(draft[LAYOUT]), pp, layers, LAYOUT)


def _group_stages(draft: RunYamlDraft, layout: list[int], pp: int, layers: int, *flags: str) -> None:
    """Write an explicit layout; its number of stages is a multiple of the pipeline ranks."""
    if len(layout) % pp == 0 and len(layout) > pp:
        draft.set_key("parallel.virtual_stages", len(layout) // pp, *flags)
    _put_layout(draft, layout, layers, *flags)


def _put_layout(draft: RunYamlDraft, layout: list[int], layers: int, *flags: str) -> None:
    if min(layout) < 0 or 0 in layout[1:-1] or sum(layout) != layers:
        draft.add_note(
            "no equivalent",
            f"stages of {layout} layers are not supported; mega distributes the {layers} layers evenly",
            *flags,
        )
    else:
        draft.set_key("parallel.pipeline_layout", layout, *flags)
