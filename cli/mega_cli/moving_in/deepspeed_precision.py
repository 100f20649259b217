"""Precision and loss scale of DeepSpeed's file. Facts: DeepSpeed 0.19 (runtime/config.py, precision_config.py, torch_autocast.py)."""

from __future__ import annotations

from math import log2

from mega_cli.moving_in.settings_file import SettingsFile

AUTOCAST = {
    "bfloat16": "bf16", "bf16": "bf16", "torch.bfloat16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16",
    "torch.float16": "fp16", "torch.half": "fp16", "float32": "fp32", "fp32": "fp32", "float": "fp32", "torch.float32": "fp32",
}  # fmt: skip
SAFE_MODULES = "torch_autocast.lower_precision_safe_modules"


def set_deepspeed_precision(given: SettingsFile) -> None:
    """Set `precision` of run.yaml, and for fp16 the loss scale, from a DeepSpeed configuration file."""
    bf16, fp16 = given.take_value("bf16.enabled", "bfloat16.enabled"), given.take_value("fp16.enabled")
    if given.take_value("torch_autocast.enabled") is True:
        _put_autocast(given)
        return
    given.set_key(
        "precision", "bf16" if bf16 is True else "fp16" if fp16 is True else "fp32", "bf16.enabled, fp16.enabled"
    )
    if fp16 is True:
        _set_loss_scale(given)
    text = "main weights, moments and sums of gradients are kept in fp32"
    given.note_matching("changes meaning", text, "bf16.bf16_* bfloat16.bf16_* fp16.fp16_*")
    given.note_matching("not needed", "gradients are checked at every step", "bf16.check_grad_overflow")
    given.note_matching("not needed", "gradients are accumulated during the backward", "bf16.immediate_grad_update")
    given.note_matching("not needed", "inputs have the precision of the model", "fp16.auto_cast")


def _put_autocast(given: SettingsFile) -> None:
    """Set the precision of `torch_autocast`, which keeps weights in fp32 as mega keeps its main weights."""
    dtype = given.take_value("torch_autocast.dtype")
    precision = AUTOCAST.get(str(dtype).lower())
    if precision is None:
        problem = (
            "torch_autocast.dtype must be bfloat16 or float16" if dtype is not None else "torch_autocast has no dtype"
        )
        given.leave_open(
            "precision",
            f"{problem}; torch's default on a GPU is float16 (fp16), DeepSpeed's documentation says bfloat16",
        )
    given.set_key("precision", precision, "torch_autocast.dtype")
    modules = given.take_value(SAFE_MODULES)
    if modules is not None:
        text = "mega selects the layers in low precision; norms, softmax and losses are in fp32"
        given.add_note("changes meaning", text, f"{SAFE_MODULES}: {modules}")


def _set_loss_scale(given: SettingsFile) -> None:
    """Set `fp16` from the loss scale; DeepSpeed's 0 means dynamic."""
    fixed = given.take_number("fp16.loss_scale")
    if fixed:
        if fixed < 0:
            given.refuse_value("fp16.loss_scale", "must be 0, for a dynamic loss scale, or positive")
        given.set_key("fp16.initial_scale", 2.0 ** round(log2(fixed)), "fp16.loss_scale")
        text = "is the initial loss scale, rounded to a power of two; mega's loss scale is always dynamic"
        given.add_note("changes meaning", text, f"fp16.loss_scale: {fixed:g}")
        given.note_matching("not needed", "has no effect with a fixed loss scale", "fp16.*")
        return
    power = given.take_number("fp16.initial_scale_power")
    given.set_key("fp16.initial_scale", None if power is None else 2.0**power, "fp16.initial_scale_power")
    given.copy_settings({"fp16.growth_interval": "fp16.loss_scale_window", "fp16.min_scale": "fp16.min_loss_scale"})
    tolerated = (given.take_integer("fp16.hysteresis") or 2) - 1
    if tolerated:
        text = f"is halved at every overflow; DeepSpeed tolerates {tolerated} before (fp16.hysteresis)"
        given.add_note("changes meaning", text, "loss scale")
    given.note_matching("not needed", "every overflow halves the loss scale", "fp16.consecutive_hysteresis")
