"""Options of PEFT's adapter_config.json: those that mega follows, those that change no result, and all others."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from mega_common.errors import CheckpointError

_MERGE = (
    "merge the adapter with PEFT (merge_and_unload, save_pretrained) where PEFT can, and give mega the merged folder"
)
_TYPES = ("LORA", "TRAINABLE_TOKENS")
# Followed, or read from the tensors themselves.
_FOLLOWED = frozenset([
    "peft_type", "r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "use_dora", "bias", "lora_bias", "init_lora_weights",
    "fan_in_fan_out", "target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern", "modules_to_save",
    "trainable_token_indices", "token_indices", "ensure_weight_tying", "lora_dropout",
])  # fmt: skip
# Only for initialization, training or bookkeeping.
_WITHOUT_EFFECT = frozenset([
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version", "runtime_config", "init_weights",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "megatron_core", "qalora_group_size",
    "merge_weights", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr",
])  # fmt: skip
_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_BIASES = ("none", "all", "lora_only", None)


def check_options(config: Mapping[str, Any], where: object) -> None:
    """Refuse an adapter whose options change its result in a way that mega does not compute.

    Raises:
        CheckpointError: naming the option and its value.
    """
    kind = config.get("peft_type", "LORA")
    if kind not in _TYPES:
        raise CheckpointError(
            f"{where}: peft_type = {kind!r} is not supported; mega reads {' and '.join(_TYPES)}", hint=_MERGE
        )
    for key, value in config.items():
        known = key in _FOLLOWED or key in _WITHOUT_EFFECT
        if not known and value is not None and value is not False and value not in ({}, [], ""):
            raise CheckpointError(f"{where}: {key} = {value!r} is not supported", hint=_MERGE)
    if config.get("bias") not in _BIASES:
        raise CheckpointError(f"{where}: bias = {config['bias']!r} is not supported", hint=_MERGE)
    init = config.get("init_lora_weights")
    if init not in _INITS:
        raise CheckpointError(
            f"{where}: init_lora_weights = {init!r} is not supported, because PEFT may change the base weights with it",
            hint="save with path_initial_model_for_weight_conversion, which makes it a plain LoRA adapter",
        )


def alpha_of(config: Mapping[str, Any], module: str) -> float:
    """Return alpha of a module, by its name in transformers: of the first pattern that matches, else lora_alpha."""
    patterns = config.get("alpha_pattern") or {}
    own = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return float(next(own, config.get("lora_alpha", 8)))


def scale_of(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of B A of a module."""
    return alpha_of(config, module) / (math.sqrt(rank) if config.get("use_rslora") else rank)
