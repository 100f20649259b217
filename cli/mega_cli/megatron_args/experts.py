"""The `model.moe:` section: experts, their router, and what keeps their loads even.

Megatron-DeepSpeed has other experts than Megatron-LM: in every second layer, one for each token, and a capacity.
"""

from __future__ import annotations

from typing import Any

from mega_cli.megatron_args.draft import DEFAULT, Draft
from mega_cli.megatron_args.hybrid import is_hybrid
from mega_cli.megatron_args.patterns import layers_of_kind

SCOPES = {"aux_loss": "batch", "seq_aux_loss": "sequence"}
BALANCING = ("moe_router_load_balancing_type", "moe_aux_loss_coeff")


def has_experts(draft: Draft) -> bool:
    """Whether the model has experts; one alone is Megatron-DeepSpeed's word for none."""
    return draft.unknown("num_experts") or any(count > 1 for count in draft["num_experts"])


def experts_section(draft: Draft, width: int | None) -> None:
    """Write the keys of `model.moe:`; `width` is the model's own feed-forward width."""
    put, counts = draft.put, set(draft["num_experts"])
    put(
        "model.moe.num_experts",
        counts.pop() if len(counts) == 1 else None,
        "num_experts",
        ask="one number for all layers",
    )
    top: int | None = 1 if draft.deepspeed and "moe_router_topk" not in draft else draft["moe_router_topk"]
    put("model.moe.top_k", top, "moe_router_topk", because="" if "moe_router_topk" in draft else _default(draft))
    why = "" if "moe_ffn_hidden_size" in draft else "Megatron's default: that of the model"
    own = draft.get("moe_ffn_hidden_size", width)
    put("model.moe.ffn_hidden_size", own, "moe_ffn_hidden_size", because=why)
    if draft.deepspeed:
        return _deepspeed(draft, top)
    _layers(draft)
    if draft.wants("moe_latent_size"):
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


def _default(draft: Draft) -> str:
    return "Megatron-DeepSpeed's default" if draft.deepspeed else DEFAULT


def _deepspeed(draft: Draft, top: int | None) -> None:
    put, every, layers = draft.put, draft["expert_interval"], draft.run["model"]["num_layers"]
    if every != 1:
        listed = list(range(every - 1, layers, every)) if layers and every else None
        why = "" if "expert_interval" in draft else "Megatron-DeepSpeed's default: every second layer"
        put("model.moe.layers", listed, "expert_interval", because=why, ask="follows from the number of layers")
    put("model.moe.score", "softmax", because="as DeepSpeed always does")
    put("model.moe.normalize", top != 1, because="as DeepSpeed does with this top_k")
    put("model.moe.router_bias", False, because="as DeepSpeed always does")
    loss = draft.get(BALANCING[1], [0.1])
    put(
        "model.moe.aux_loss",
        loss[0] if loss else None,
        BALANCING[1],
        because="" if BALANCING[1] in draft else _default(draft),
    )
    put("model.moe.aux_loss_scope", "batch", because="as DeepSpeed does, of each rank's micro-batch")
    if not draft["disable_moe_token_dropping"]:
        put("model.moe.capacity_factor", draft["moe_train_capacity_factor"], "moe_train_capacity_factor")
        text = "mega drops what comes last in each sequence, DeepSpeed what chance says in a rank's micro-batch"
        draft.tell("changes meaning", text, *[name for name in ("moe_train_capacity_factor",) if name in draft])
    draft.tell("no equivalent", "an expert beside a layer's own feed-forward block is missing", "mlp_type")
    if draft["mlp_type"] == "standard":
        draft.tell("not needed", "this is the only kind here", "mlp_type")


def _sinkhorn(draft: Draft, top: int | None) -> None:
    """A choice that is balanced by itself; the weights are the scores as they are."""
    draft.put("model.moe.sinkhorn", True, BALANCING[0])
    draft.put(
        "model.moe.score", "sigmoid" if top == 1 else "softmax", because="as sinkhorn routing does with this top_k"
    )
    draft.put("model.moe.normalize", False, because="as sinkhorn routing does")
    draft.put("model.moe.router_bias", draft["add_bias_linear"], "add_bias_linear")
    _auxiliary(draft)
    text = "mega balances each sequence, Megatron the tokens of a rank's micro-batch"
    draft.tell("changes meaning", text, BALANCING[0])


def _auxiliary(draft: Draft) -> None:
    draft.put("model.moe.z_loss", draft.get("moe_z_loss_coeff", 0.0), "moe_z_loss_coeff")
    capacity = "moe_expert_capacity_factor" if "moe_expert_capacity_factor" in draft else "moe_train_capacity_factor"
    if draft.unknown(capacity) or (capacity in draft and draft[capacity] > 0):
        _capacity(draft, capacity)


def _shared(draft: Draft, width: int | None) -> None:
    key, size, count = "model.moe.shared_ffn_hidden_size", "moe_shared_expert_intermediate_size", "num_shared_experts"
    if draft.wants(size):
        draft.put(key, draft[size], size)
    elif draft.wants(count):
        draft.put(key, width and draft[count] and width * draft[count], count, "moe_ffn_hidden_size")
    else:
        return
    if draft["moe_shared_expert_gate"] or (draft["enable_shared_expert"] and not draft.wants(count)):
        draft.put("model.moe.shared_gate", True, "moe_shared_expert_gate", "enable_shared_expert")


def _layers(draft: Draft) -> None:
    """Megatron's layers that predict further tokens are of the kind of the last layer."""
    key, dest = "model.moe.layers", "moe_layer_freq"
    if is_hybrid(draft):
        return draft.tell("not needed", "the pattern of layers says it", dest)
    kinds = layers_of_kind(draft, key, dest, lambda layer, n: layer % n == 0)
    if kinds is not None and all(kinds):
        draft.tell("translated", f"experts in all layers, the default of {key}", dest)
    elif kinds is not None:
        kinds += kinds[-1:] * (draft["mtp_num_layers"] or 0)
        draft.put(key, [layer for layer, has in enumerate(kinds) if has], dest)
    return None


def _scores(draft: Draft) -> None:
    """A softmax over the chosen experts alone is one over all of them, normalised."""
    put, score, before = draft.put, draft["moe_router_score_function"], draft["moe_router_pre_softmax"]
    if score not in ("softmax", "sigmoid"):
        put("model.moe.score", None, "moe_router_score_function", ask=f"scores by {score} are missing")
    elif score == "softmax":
        put("model.moe.score", "softmax", "moe_router_score_function")
        put("model.moe.normalize", not before, "moe_router_pre_softmax")
    else:
        put("model.moe.score", "sigmoid", "moe_router_score_function")
        put("model.moe.normalize", draft["moe_router_topk"] != 1, because="as Megatron's sigmoid scores with top_k > 1")
        draft.tell("not needed", "it has no effect on other scores than softmax", "moe_router_pre_softmax")
    put("model.moe.router_bias", draft["add_bias_linear"], "add_bias_linear")
    if draft.wants("moe_router_topk_scaling_factor"):
        put("model.moe.scaling", draft["moe_router_topk_scaling_factor"], "moe_router_topk_scaling_factor")


def _groups(draft: Draft) -> None:
    """Megatron's score of a group is the sum of its best top_k / top_groups experts."""
    flags = ("moe_router_num_groups", "moe_router_group_topk")
    groups, top = (draft[name] for name in flags)
    if not any(map(draft.unknown, flags)) and ((groups or 1) == 1 or not top):
        return
    draft.put("model.moe.groups", groups, flags[0])
    draft.put("model.moe.top_groups", top, flags[1])
    if not top or not draft["moe_router_topk"]:
        return
    counted = draft["moe_router_topk"] // top
    draft.put(
        "model.moe.group_score", "max" if counted == 1 else "top2", because="the best top_k / top_groups of a group"
    )
    if counted not in (1, 2):
        text = f"Megatron's score of a group is the sum of its best {counted} experts; mega's of its best one or two"
        draft.tell("no equivalent", text, flags[1])
    elif counted == 2 and draft["moe_router_score_function"] == "softmax" and not draft["moe_router_pre_softmax"]:
        text = "Megatron adds up logits where the softmax comes after the choice; mega adds up probabilities"
        draft.tell("changes meaning", text, flags[1])


def _balance(draft: Draft) -> None:
    """The first balancing loss with a weight that mega has too."""
    kinds: list[str] = draft[BALANCING[0]]
    losses: list[Any] = draft[BALANCING[1]]
    if draft.unknown(BALANCING[1]):
        return draft.put("model.moe.aux_loss", None, BALANCING[1])
    if draft.unknown(BALANCING[0]):
        return draft.put("model.moe.aux_loss", None, BALANCING[0])
    weighted = {kind: loss for kind, loss in zip(kinds, losses, strict=False) if loss}
    kind = next((kind for kind in weighted if kind in SCOPES), None)
    draft.put("model.moe.aux_loss", weighted.get(kind or "", 0.0), *reversed(BALANCING))
    others = [
        other for other in kinds if other != "none" and (other not in SCOPES or other in weighted.keys() - {kind})
    ]
    if kind is not None:
        draft.put("model.moe.aux_loss_scope", SCOPES[kind], BALANCING[0])
        if differences := _differences(draft, kind):
            draft.tell("changes meaning", "; ".join(differences), BALANCING[0], BALANCING[1])
    if others:
        missing = f"balancing by {' and '.join(others)} is missing"
        draft.tell("no equivalent", missing + (f" beside {kind}" if kind else ""), BALANCING[0])
    return None


def _differences(draft: Draft, kind: str) -> list[str]:
    """What the same loss counts in another way."""
    found = []
    if kind == "aux_loss":
        found.append("mega counts a micro-batch of all data ranks together, Megatron that of each data rank")
    if draft["moe_router_enable_expert_bias"] or draft["moe_router_group_topk"]:
        found.append("mega counts the experts that are chosen, Megatron those of the highest scores")
    return found


def _capacity(draft: Draft, dest: str) -> None:
    draft.put("model.moe.capacity_factor", draft[dest], dest)
    policy = draft["moe_token_drop_policy"]
    dropped = "what has the lowest weights" if policy == "probs" else "what comes last"
    text = f"mega drops what comes last in each sequence, in training alone; Megatron {dropped} in a rank's micro-batch"
    draft.tell("changes meaning", text, dest, "moe_token_drop_policy")
