"""Objectives of Axolotl and TRL as `objective`: preference pairs and reward models. Other objectives are rejected.

Facts: TRL 1.16 (DPOConfig, KTOConfig, RewardConfig, CPOConfig), Axolotl 0.18 (core/builders/rl.py, core/builders/causal.py).
"""

from __future__ import annotations

import re
from typing import Any

from mega_cli.moving_in.dialects import ToolDefaults
from mega_cli.moving_in.settings_file import SettingsFile

KINDS = ("dpo", "ipo", "kto", "simpo")
HINT = "mega supports cross entropy, dpo, ipo, kto, simpo, reward models and distillation: docs/objectives.md"
BETA, GAMMA, CPO_ALPHA = 0.1, 0.5, 1.0  # TRL's defaults; SimPO's of TRL are not the paper's
LEARNING_RATES = {"cross_entropy": 2e-5, "reward": 1e-4}  # TRL's; of preference pairs 1e-6
PLAIN_LOSSES = (None, "nll", "chunked_nll")
# Settings that change the objective, and their neutral values.
OTHERS: dict[str, tuple[Any, ...]] = {
    "process_reward_model": (False,), "kd_trainer": (False,), "diffusion": (False,), "use_eaft": (False,), "stage": ("sft", "pt"),
    "num_generations": (), "reward_funcs": (), "reward_model_path": (), "teacher_model_name_or_path": (), "lmbda": (),
    "orpo_alpha": (), "rpo_alpha": (), "ld_alpha": (), "dpo_loss_weights": (), "loss_weights": (), "use_weighting": (False,),
    "dpo_use_weighting": (False,), "dpo_use_logits_to_keep": (False,), "dpo_norm_loss": (False,), "reference_free": (False,),
    "sync_ref_model": (False,), "f_divergence_type": ("reverse_kl",), "trainer_cls": (),
}  # fmt: skip

# Settings that only trainers of other objectives have: TRL's online and offline RL, distillation, process rewards, TPO, BCO.
FOREIGN = (
    "temperature", "missing_eos_penalty", "total_episodes", "num_ppo_epochs", "min_density_ratio", "step_separator",
    "train_on_last_step_only", "tpo_alpha", "num_value_samples", "seq_kd", "generation_batch_size", "max_new_tokens",
)  # fmt: skip

PLUGINS = re.compile(r"diffusion|\bkd\b|distill|grpo|nemo_gym|ebft|\brl\b", re.IGNORECASE)


def set_objective_section(given: SettingsFile, dialect: ToolDefaults) -> str:
    """Set `objective` of run.yaml and its data settings from a settings file with HuggingFace's names, and return the
    objective's kind.

    Raises:
        ConfigError: for an unsupported objective.
    """
    for key, neutral in OTHERS.items():
        value = given.take_value(key)
        if value is not None and value not in neutral:
            given.refuse_value(key, "selects an objective, or a variant, that is not supported", HINT)
    if foreign := next((key for key in FOREIGN if given.has_key(key)), None):
        given.refuse_value(foreign, "belongs to an objective that is not supported", HINT)
    if PLUGINS.search(str(given.peek_value("plugins"))):
        given.refuse_value("plugins", "selects an objective that is not supported", HINT)
    kind = _axolotl_kind(given) if dialect.program == "Axolotl" else _trl_kind(given)
    if kind == "cross_entropy":
        return kind
    given.set_key("data.kind", "pairs", f"an objective of preference pairs: {kind}")
    if kind is None:
        text = "beta belongs to several objectives, and the file does not set which one: dpo, kto or another"
        given.leave_open("objective.kind", text)
        return "dpo"
    given.set_key("objective.kind", kind, "the file's objective")
    if kind == "reward":
        given.set_key("model.score", True, "a reward model")
        given.set_key("objective.center", given.take_number("center_rewards_coefficient"), "center_rewards_coefficient")
    else:
        _put_preference(given, kind)
    return kind


def _axolotl_kind(given: SettingsFile) -> str:
    kind = given.take_value("rl")
    if kind is None:
        return "reward" if given.take_value("reward_model") is True else "cross_entropy"
    if kind not in KINDS:
        given.refuse_value("rl", "is an objective that is not supported", HINT)
    loss = _single_loss(given, "dpo_loss_type")
    if kind == "dpo" and loss not in (None, "sigmoid"):
        kind = loss if loss == "ipo" else given.refuse_value("dpo_loss_type", "is a loss that is not supported", HINT)
    return str(kind)


def _trl_kind(given: SettingsFile) -> str | None:
    """Return the kind of objective of TRL's settings, or None if they belong to several."""
    loss, raw = _single_loss(given, "loss_type"), given.peek_value("loss_type")
    if given.has_key("desirable_weight", "undesirable_weight") or loss == "kto":
        return "kto" if loss in (None, "kto") else given.refuse_value("loss_type", f"({raw}) is not supported", HINT)
    if given.has_key("simpo_gamma", "cpo_alpha"):
        return (
            "simpo" if loss == "simpo" else given.refuse_combination("CPO is an objective that is not supported", HINT)
        )
    if given.has_key("center_rewards_coefficient"):
        return "reward"
    if loss in ("sigmoid", "ipo"):
        return "dpo" if loss == "sigmoid" else "ipo"
    if loss not in PLAIN_LOSSES:
        given.refuse_value("loss_type", "is a loss that is not supported", HINT)
    if given.has_key("precompute_ref_log_probs", "ref_model_mixup_alpha", "discopop_tau"):
        return "dpo"
    return None if given.has_key("beta") else "cross_entropy"


def _single_loss(given: SettingsFile, key: str) -> Any:
    """Return the loss of a key, given as a name or a list of one name."""
    value = given.take_value(key)
    if not isinstance(value, list):
        return value
    if len(value) != 1:
        given.refuse_value(key, "is a sum of losses, which is not supported", HINT)
    return value[0]


def _put_preference(given: SettingsFile, kind: str) -> None:
    beta = given.take_number("trl.beta", "rl_beta", "beta")
    given.set_key("objective.beta", BETA if beta is None else beta, "beta")
    smoothing = given.take_number("dpo_label_smoothing", "label_smoothing")
    if kind in ("dpo", "simpo"):
        given.set_key("objective.label_smoothing", smoothing or None, "label_smoothing")
    if kind == "kto":
        for name in ("desirable_weight", "undesirable_weight"):
            given.set_key(f"objective.{name}", given.take_number(f"kto_{name}", name), name)
        text = "estimates its divergence over all samples of a step, and TRL over one micro-batch of all ranks; rated answers"
        text += " (prompt, completion, label) are read as they are"
        given.add_note("changes meaning", text, "objective.kind: kto")
    if kind == "simpo":
        gamma, alpha = given.take_number("simpo_gamma"), given.take_number("cpo_alpha")
        given.set_key("objective.gamma", GAMMA if gamma is None else gamma, "simpo_gamma")
        alpha = CPO_ALPHA if alpha is None else alpha
        if alpha:
            text = f"= {alpha:g}: TRL adds the cross entropy of the chosen answers to the loss, mega's simpo does not"
            given.add_note("no equivalent", text, "cpo_alpha")
