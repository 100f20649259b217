"""The `model.moe:` section: experts, their router and load balancing.

Defaults of Megatron-DeepSpeed differ from Megatron-LM: experts in every second layer, top_k 1, and a capacity.
"""

from __future__ import annotations

from typing import Any

from mega_cli.megatron_args.hybrid_layers import compute_layer_pattern_mask, has_hybrid_layers
from mega_cli.megatron_args.run_draft import DEFAULT, RunYamlDraft

SCOPES = {"aux_loss": "batch", "seq_aux_loss": "sequence"}
BALANCING = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")


def has_megatron_moe_flags(draft: RunYamlDraft) -> bool:
    """Return whether Megatron's flags give the model experts; Megatron-DeepSpeed's one expert means none."""
    return draft.is_megatron_setting_unknown("num_experts") or any(count > 1 for count in draft["num_experts"])


def translate_moe_flags(draft: RunYamlDraft, width: int | None) -> None:
    """Add the `model.moe` section of a run.yaml to `draft`, from Megatron-LM flags.
    `width` is the dense layers' feed-forward width, the default of an expert's.
    """
    put, counts = draft.set_key, set(draft["num_experts"])
    put(
        "model.moe.num_experts",
        counts.pop() if len(counts) == 1 else None,
        "num_experts",
        ask="mega requires one number for all layers",
    )
    top: int | None = 1 if draft.is_megatron_deepspeed and "moe_router_topk" not in draft else draft["moe_router_topk"]
    put("model.moe.top_k", top, "moe_router_topk", because="" if "moe_router_topk" in draft else _default_origin(draft))
    why = "" if "moe_ffn_hidden_size" in draft else "Megatron's default: the model's ffn_hidden_size"
    own = draft.get_megatron_setting("moe_ffn_hidden_size", width)
    put("model.moe.ffn_hidden_size", own, "moe_ffn_hidden_size", because=why)
    if draft.is_megatron_deepspeed:
        return _deepspeed(draft, top)
    _layers(draft)
    if draft.is_megatron_setting_enabled("moe_latent_size"):
        put("model.moe.latent_size", draft["moe_latent_size"], "moe_latent_size")
    _shared(draft, own)
    if draft[BALANCING[0]] == ["sinkhorn"]:
        return _sinkhorn(draft, top)
    _scores(draft)
    _groups(draft)
    if draft["moe_router_enable_expert_bias"]:
        put("model.moe.selection_bias", True, "moe_router_enable_expert_bias")
        put("model.moe.bias_rate", draft["moe_router_bias_update_rate"], "moe_router_bias_update_rate")
    _balance(draft)
    _auxiliary(draft)
    return None


def _default_origin(draft: RunYamlDraft) -> str:
    return "Megatron-DeepSpeed's default" if draft.is_megatron_deepspeed else DEFAULT


def _deepspeed(draft: RunYamlDraft, top: int | None) -> None:
    put, every, layers = draft.set_key, draft["expert_interval"], draft.run["model"]["num_layers"]
    if every != 1:
        listed = list(range(every - 1, layers, every)) if layers and every else None
        why = "" if "expert_interval" in draft else "Megatron-DeepSpeed's default: every second layer"
        put("model.moe.layers", listed, "expert_interval", because=why, ask="follows from the number of layers")
    put("model.moe.score", "softmax", because="as DeepSpeed always does")
    put("model.moe.normalize", top != 1, because="as DeepSpeed does with this top_k")
    put("model.moe.router_bias", False, because="as DeepSpeed always does")
    loss = draft.get_megatron_setting(BALANCING[1], [0.1])
    put(
        "model.moe.aux_loss",
        loss[0] if loss else None,
        BALANCING[1],
        because="" if BALANCING[1] in draft else _default_origin(draft),
    )
    put("model.moe.aux_loss_scope", "batch", because="as DeepSpeed does, of each rank's micro-batch")
    if not draft["disable_moe_token_dropping"]:
        put("model.moe.capacity_factor", draft["moe_train_capacity_factor"], "moe_train_capacity_factor")
        text = "mega drops the last tokens of each sequence, DeepSpeed random tokens of a rank's micro-batch"
        draft.add_note("changes meaning", text, *[name for name in ("moe_train_capacity_factor",) if name in draft])
    draft.add_note(
        "no equivalent",
        "an expert in addition to a dense feed-forward block (residual MoE) is not supported",
        "mlp_type",
    )
    if draft["mlp_type"] == "standard":
        draft.add_note("not needed", "this is the only kind in mega", "mlp_type")


def _sinkhorn(draft: RunYamlDraft, top: int | None) -> None:
    """Write Sinkhorn routing, which balances by itself and takes the weights from the plain scores."""
    draft.set_key("model.moe.sinkhorn", True, BALANCING[0])
    draft.set_key(
        "model.moe.score", "sigmoid" if top == 1 else "softmax", because="as sinkhorn routing does with this top_k"
    )
    draft.set_key("model.moe.normalize", False, because="as sinkhorn routing does")
    draft.set_key("model.moe.router_bias", draft["add_bias_linear"], "add_bias_linear")
    _auxiliary(draft)
    text = "mega balances each sequence, Megatron the tokens of a rank's micro-batch"
    draft.add_note("changes meaning", text, BALANCING[0])


def _auxiliary(draft: RunYamlDraft) -> None:
    draft.set_key("model.moe.z_loss", draft.get_megatron_setting("moe_z_loss_coeff", 0.0), "moe_z_loss_coeff")
    capacity = "moe_expert_capacity_factor" if "moe_expert_capacity_factor" in draft else "moe_train_capacity_factor"
    if draft.is_megatron_setting_unknown(capacity) or (capacity in draft and draft[capacity] > 0):
        _capacity(draft, capacity)


def _shared(draft: RunYamlDraft, width: int | None) -> None:
    key, size, count = "model.moe.shared_ffn_hidden_size", "moe_shared_expert_intermediate_size", "num_shared_experts"
    if draft.is_megatron_setting_enabled(size):
        draft.set_key(key, draft[size], size)
    elif draft.is_megatron_setting_enabled(count):
        draft.set_key(key, width and draft[count] and width * draft[count], count, "moe_ffn_hidden_size")
    else:
        return
    if draft["moe_shared_expert_gate"] or (
        draft["enable_shared_expert"] and not draft.is_megatron_setting_enabled(count)
    ):
        draft.set_key("model.moe.shared_gate", True, "moe_shared_expert_gate", "enable_shared_expert")


def _layers(draft: RunYamlDraft) -> None:
    """Write the MoE layers; Megatron's MTP layers have the kind of the last layer."""
    key, dest = "model.moe.layers", "moe_layer_freq"
    if has_hybrid_layers(draft):
        return draft.add_note("not needed", "the hybrid layer pattern sets it", dest)
    kinds = compute_layer_pattern_mask(draft, key, dest, lambda layer, n: layer % n == 0)
    if kinds is not None and all(kinds):
        draft.add_note("translated", f"experts in all layers, the default of {key}", dest)
    elif kinds is not None:
        kinds += kinds[-1:] * (draft["mtp_num_layers"] or 0)
        draft.set_key(key, [layer for layer, has in enumerate(kinds) if has], dest)
    return None


def _scores(draft: RunYamlDraft) -> None:
    """Write the score function: a softmax over the chosen experts equals a normalised one over all."""
    put, score, before = draft.set_key, draft["moe_router_score_function"], draft["moe_router_pre_softmax"]
    if score not in ("softmax", "sigmoid"):
        put("model.moe.score", None, "moe_router_score_function", ask=f"the score function {score} is not supported")
    elif score == "softmax":
        put("model.moe.score", "softmax", "moe_router_score_function")
        put("model.moe.normalize", not before, "moe_router_pre_softmax")
    else:
        put("model.moe.score", "sigmoid", "moe_router_score_function")
        put("model.moe.normalize", draft["moe_router_topk"] != 1, because="as Megatron's sigmoid scores with top_k > 1")
        draft.add_note("not needed", "it only has an effect with softmax scores", "moe_router_pre_softmax")
    put("model.moe.router_bias", draft["add_bias_linear"], "add_bias_linear")
    if draft.is_megatron_setting_enabled("moe_router_topk_scaling_factor"):
        put("model.moe.scaling", draft["moe_router_topk_scaling_factor"], "moe_router_topk_scaling_factor")


def _groups(draft: RunYamlDraft) -> None:
    """Write the expert groups; Megatron's score of a group is the sum of its best top_k / top_groups experts."""
    flags = ("moe_router_num_groups", "moe_router_group_topk")
    groups, top = (draft[name] for name in flags)
    if not any(map(draft.is_megatron_setting_unknown, flags)) and ((groups or 1) == 1 or not top):
        return
    draft.set_key("model.moe.groups", groups, flags[0])
    draft.set_key("model.moe.top_groups", top, flags[1])
    if not top or not draft["moe_router_topk"]:
        return
    counted = draft["moe_router_topk"] // top
    draft.set_key(
        "model.moe.group_score",
        "max" if counted == 1 else "top2",
        because="the best top_k / top_groups experts of a group",
    )
    if counted not in (1, 2):
        text = f"Megatron's group score is the sum of the best {counted} experts; mega supports the best one or two"
        draft.add_note("no equivalent", text, flags[1])
    elif counted == 2 and draft["moe_router_score_function"] == "softmax" and not draft["moe_router_pre_softmax"]:
        text = "with the softmax after the top-k, Megatron sums logits; mega sums probabilities"
        draft.add_note("changes meaning", text, flags[1])


def _balance(draft: RunYamlDraft) -> None:
    """Write the first nonzero balancing loss that mega has too."""
    kinds: list[str] = draft[BALANCING[0]]
    losses: list[Any] = draft[BALANCING[1]]
    if draft.is_megatron_setting_unknown(BALANCING[1]):
        return draft.set_key("model.moe.aux_loss", None, BALANCING[1])
    if draft.is_megatron_setting_unknown(BALANCING[0]):
        return draft.set_key("model.moe.aux_loss", None, BALANCING[0])
    weighted = {kind: loss for kind, loss in zip(kinds, losses, strict=False) if loss}
    kind = next((kind for kind in weighted if kind in SCOPES), None)
    draft.set_key("model.moe.aux_loss", weighted.get(kind or "", 0.0), *reversed(BALANCING))
    others = [
        other for other in kinds if other != "none" and (other not in SCOPES or other in weighted.keys() - {kind})
    ]
    if kind is not None:
        draft.set_key("model.moe.aux_loss_scope", SCOPES[kind], BALANCING[0])
        if differences := _differences(draft, kind):
            draft.add_note("changes meaning", "; ".join(differences), BALANCING[0], BALANCING[1])
    if others:
        missing = f"load balancing by {' and '.join(others)} is not supported"
        draft.add_note("no equivalent", missing + (f" in addition to {kind}" if kind else ""), BALANCING[0])
    return None


def _differences(draft: RunYamlDraft, kind: str) -> list[str]:
    """Note where the same loss is computed differently."""
    found = []
    if kind == "aux_loss":
        found.append("mega balances a micro-batch over all data ranks, Megatron over each data rank")
    if draft["moe_router_enable_expert_bias"] or draft["moe_router_group_topk"]:
        found.append("mega counts the selected experts, Megatron the experts with the highest scores")
    return found


def _capacity(draft: RunYamlDraft, dest: str) -> None:
    draft.set_key("model.moe.capacity_factor", draft[dest], dest)
    policy = draft["moe_token_drop_policy"]
    dropped = "tokens with the lowest weights" if policy == "probs" else "the last tokens"
    text = f"mega drops the last tokens of each sequence, only in training; Megatron {dropped} of a rank's micro-batch"
    draft.add_note("changes meaning", text, dest, "moe_token_drop_policy")
