"""DeepSpeed's configuration file as a run.yaml: batch, layout, optimizer, precision, loss scale and schedule.

The engine advances a scheduler after a step, and the scheduler counts from -1: step k of a run (from 0) has the rate of the
scheduler's iteration k - 1, and step 0 has the lowest rate. So the logarithmic warm-up of N steps is log(k) / log(N), a
linear warm-up starts one step late, and the linear decay of WarmupDecayLR ends one step after total_num_steps.

Facts: deepspeed.ai/docs/config-json, DeepSpeed 0.19 (runtime/config.py, precision_config.py, torch_autocast.py,
runtime/lr_schedules.py, runtime/engine.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from pathlib import Path

from mega_cli.megatron_args.run_draft import NoteKind
from mega_cli.megatron_args.translate import RunYamlTranslation
from mega_cli.moving_in.batch_and_layout import (
    ModelParallelSizes,
    compute_data_parallel_size,
    set_batch_sizes,
    set_optimizer_offload,
    set_parallel_sizes,
    set_zero_stage,
)
from mega_cli.moving_in.settings_file import ForeignSettingsFile, Reasons

AUTOCAST = {
    "bfloat16": "bf16", "bf16": "bf16", "torch.bfloat16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16",
    "torch.float16": "fp16", "torch.half": "fp16", "float32": "fp32", "fp32": "fp32", "float": "fp32", "torch.float32": "fp32",
}  # fmt: skip
SAFE_MODULES = "torch_autocast.lower_precision_safe_modules"


def translate_deepspeed_precision(given: ForeignSettingsFile) -> None:
    """Set `precision` of run.yaml, and for fp16 the loss scale, from a DeepSpeed configuration file."""
    bf16, fp16 = given.take_value("bf16.enabled", "bfloat16.enabled"), given.take_value("fp16.enabled")
    if given.take_value("torch_autocast.enabled") is True:
        _put_autocast(given)
        return
    if bf16 is True and fp16 is True:
        given.refuse_combination("bf16.enabled and fp16.enabled are both true", "keep one of them")
    given.set_key(
        "precision", "bf16" if bf16 is True else "fp16" if fp16 is True else "fp32", "bf16.enabled, fp16.enabled"
    )
    if fp16 is True:
        _set_loss_scale(given)
    text = "main weights, moments and sums of gradients are kept in fp32"
    given.add_notes_on_matching_keys("changes meaning", text, "bf16.bf16_* bfloat16.bf16_* fp16.fp16_*")
    given.add_notes_on_matching_keys("not needed", "gradients are checked at every step", "bf16.check_grad_overflow")
    given.add_notes_on_matching_keys(
        "not needed", "gradients are accumulated during the backward", "bf16.immediate_grad_update"
    )
    given.add_notes_on_matching_keys("not needed", "inputs have the precision of the model", "fp16.auto_cast")


def _put_autocast(given: ForeignSettingsFile) -> None:
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


def _set_loss_scale(given: ForeignSettingsFile) -> None:
    """Set `fp16` from the loss scale; DeepSpeed's 0 means dynamic."""
    fixed = given.take_number("fp16.loss_scale")
    if fixed:
        if fixed < 0:
            given.refuse_value("fp16.loss_scale", "must be 0, for a dynamic loss scale, or positive")
        given.set_key("fp16.initial_scale", 2.0 ** round(log2(fixed)), "fp16.loss_scale")
        text = "is the initial loss scale, rounded to a power of two; mega's loss scale is always dynamic"
        given.add_note("changes meaning", text, f"fp16.loss_scale: {fixed:g}")
        given.add_notes_on_matching_keys("not needed", "has no effect with a fixed loss scale", "fp16.*")
        return
    power = given.take_number("fp16.initial_scale_power")
    given.set_key("fp16.initial_scale", None if power is None else 2.0**power, "fp16.initial_scale_power")
    given.copy_settings({"fp16.growth_interval": "fp16.loss_scale_window", "fp16.min_scale": "fp16.min_loss_scale"})
    tolerated = (given.take_integer("fp16.hysteresis") or 2) - 1
    if tolerated:
        text = f"is halved at every overflow; DeepSpeed tolerates {tolerated} before (fp16.hysteresis)"
        given.add_note("changes meaning", text, "loss scale")
    given.add_notes_on_matching_keys(
        "not needed", "every overflow halves the loss scale", "fp16.consecutive_hysteresis"
    )


SCHEDULER_PARAMS = "scheduler.params."
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "wsd", "WarmupCosineLR": "cosine"}
WARMUP_STEPS, DECAY_RATE, COSINE_FLOOR = 1000, 1e-3, 1e-4  # DeepSpeed's defaults


def translate_deepspeed_lr_schedule(given: ForeignSettingsFile, lr: float | None) -> None:
    """Set `lr_schedule` of run.yaml to the curve of a DeepSpeed file's scheduler, or leave it for the user to fill in.

    Args:
        lr: learning rate of the optimizer; None if the training program sets it.
    """
    name = given.take_value("scheduler.type")
    if name is None:
        text = "the file has no scheduler; if the training program creates one, write it here"
        given.add_note("open", text, "lr_schedule.name: constant")
        given.set_key("lr_schedule.name", "constant", "no scheduler")
        return
    keys = (
        "warmup_num_steps",
        "total_num_steps",
        "warmup_max_lr",
        "warmup_min_lr",
        "warmup_min_ratio",
        "cos_min_ratio",
    )
    auto = [f"{SCHEDULER_PARAMS}{key}" for key in keys if given.has_auto_value(f"{SCHEDULER_PARAMS}{key}")]
    if name not in SCHEDULES or auto:
        reason = f"{', '.join(auto)}: auto" if auto else f"{name} has no equivalent among mega's schedules"
        given.leave_open("lr_schedule.name", f"{reason}; write the schedule of the run")
        return
    _put_warmup(given)
    if name == "WarmupCosineLR":
        _put_cosine(given, lr)
    else:
        _set_warmup_rates(given, name)


def _put_warmup(given: ForeignSettingsFile) -> None:
    steps = given.take_integer(f"{SCHEDULER_PARAMS}warmup_num_steps")
    given.set_key("lr_schedule.warmup_steps", max(2, WARMUP_STEPS if steps is None else steps), "warmup_num_steps")
    if given.take_value(f"{SCHEDULER_PARAMS}warmup_type") == "linear":
        given.set_key("lr_schedule.warmup_delay_steps", 1, "DeepSpeed's first step is before its schedule")
    else:
        given.set_key("lr_schedule.warmup_shape", "log", "warmup_type, by default log")


def _set_warmup_rates(given: ForeignSettingsFile, name: str) -> None:
    """Set the rates of WarmupLR and WarmupDecayLR: the second decays to the lowest rate of its warm-up."""
    lowest, highest = (
        given.take_number(f"{SCHEDULER_PARAMS}warmup_min_lr"),
        given.take_number(f"{SCHEDULER_PARAMS}warmup_max_lr"),
    )
    if highest is None and name == "WarmupDecayLR":
        highest = DECAY_RATE
    given.set_key("optimizer.lr", highest, "warmup_max_lr")
    given.set_key("lr_schedule.warmup_init", lowest or None, "warmup_min_lr")
    given.set_key("lr_schedule.name", SCHEDULES[name], f"scheduler.type {name}")
    if name == "WarmupLR":
        return
    given.set_key("lr_schedule.min_lr", lowest or None, "warmup_min_lr")
    _set_decay_end(given, late=1)


def _put_cosine(given: ForeignSettingsFile, lr: float | None) -> None:
    shares = {
        "warmup_init": given.take_number(f"{SCHEDULER_PARAMS}warmup_min_ratio"),
        "min_lr": given.take_number(f"{SCHEDULER_PARAMS}cos_min_ratio"),
    }
    if lr is None:
        given.leave_open("lr_schedule.name", "its rates are fractions of optimizer.lr, which is not in the file")
        return
    given.set_key("lr_schedule.name", "cosine", "scheduler.type WarmupCosineLR")
    floor = COSINE_FLOOR if shares["min_lr"] is None else shares["min_lr"]
    given.set_key("lr_schedule.min_lr", lr * floor or None, "cos_min_ratio")
    if shares["warmup_init"]:
        given.set_key("lr_schedule.warmup_init", lr * shares["warmup_init"], "warmup_min_ratio")
        text = "is also the rate of the first step; DeepSpeed's first step has the rate 0"
        given.add_note("changes meaning", text, "lr_schedule.warmup_init")
    _set_decay_end(given, late=0)


def _set_decay_end(given: ForeignSettingsFile, *, late: int) -> None:
    """Set the end of the decay, and of WarmupDecayLR (`late` = 1) its length: it begins a step after the warm-up."""
    total, warmup = (
        given.take_integer(f"{SCHEDULER_PARAMS}total_num_steps"),
        given.get_run_yaml_value("lr_schedule.warmup_steps"),
    )
    if total is None or total <= warmup:
        reason = "is not in the file" if total is None else f"= {total} must be above the warm-up of {warmup} steps"
        given.leave_open("lr_schedule.decay_steps", f"scheduler.params.total_num_steps {reason}")
        return
    given.set_key("lr_schedule.decay_steps", total + late, "total_num_steps")
    given.set_key("lr_schedule.cooldown_steps", total - warmup if late else None, "total_num_steps - warmup_num_steps")


PARAMS = "optimizer.params."
ADAM = ("adam", "adamw", "fusedadam", "deepspeedcpuadam", "cpuadam")
DEFAULTS = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}  # of DeepSpeed's Adam
CHECKPOINTING = ("partition_activations", "cpu_checkpointing", "number_checkpoints")
REASONS: Mapping[NoteKind, Reasons] = {
    "not needed": {
        "gradient buckets are always reduced during the backward": "zero_optimization.overlap_comm"
        " zero_optimization.contiguous_gradients zero_optimization.reduce_scatter zero_optimization.*bucket_size"
        " zero_optimization.allgather_partitions zero_optimization.round_robin_gradients zero_optimization.sub_group_size"
        " zero_optimization.stage3_* zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        "a checkpoint always has whole weights under HuggingFace's names": "*gather_16bit_weights_on_model_save",
        "gradients are summed in fp32": "communication_data_type data_types.* prescale_gradients gradient_predivide_factor",
        "time and speed are in metrics.jsonl, and `mega report` draws them": "steps_per_print wall_clock_breakdown"
        " dump_state memory_breakdown flops_profiler.* comms_logger.*",
        "is specific to DeepSpeed": "zero_optimization.cpu_offload_* aio.* checkpoint.* compression_training.* elasticity.*",
    },
    "no equivalent": {
        "weights stay on the device; the optimizer can be kept in host memory": "zero_optimization.offload_param.*",
        "offload is supported to host memory only": "zero_optimization.offload_optimizer.*",
        "trackers are set by `log`": "tensorboard.* wandb.* csv_monitor.* comet.*",
        "gradients are not compressed": "zero_optimization.zero_quantized_* sparse_gradients sparse_attention.*",
    },
}  # fmt: skip


def translate_deepspeed(path: Path, ranks: int | None = None) -> RunYamlTranslation:
    """Translate a DeepSpeed configuration file of a run on `ranks` ranks to a run.yaml.
    Model, data and training length, which it lacks, are left for the user to fill in.

    Raises:
        ConfigError: if it is not such a file, or its batch does not match the ranks.
    """
    given = ForeignSettingsFile(path, "DeepSpeed's configuration (ds_config.json)")
    given.leave_open("model.from", "the folder of the model or checkpoint that the training program loads")
    given.leave_open("data.train", "a token data set, written by `mega data preprocess`")
    given.add_note("open", "is set by the training program; mega's default is 1000", "train.steps")
    _set_batch(given, ranks)
    translate_deepspeed_lr_schedule(given, _set_optimizer(given))
    translate_deepspeed_precision(given)
    set_zero_stage(given, "zero_optimization.stage")
    given.copy_settings({"parallel.zero3_shard": "zero_optimization.zero_hpz_partition_size"})
    saved = [given.take_value(f"activation_checkpointing.{key}") for key in CHECKPOINTING]
    if any(saved):
        given.set_key("recompute", "full", "activation_checkpointing")
    if given.take_value("gradient_clipping") is None and not given.has_auto_value("gradient_clipping"):
        given.add_note(
            "open",
            "is not in the file: 0 up to DeepSpeed 0.19.2 (set here), 1 from 0.19.3 on",
            "gradient_clipping",
        )
    given.set_missing_keys_to_defaults({"optimizer.clip_grad": 0.0, "parallel.zero": 0}, "DeepSpeed's")
    return given.finish_translation(REASONS, f"{ranks} ranks" if ranks else "")


def _set_batch(given: ForeignSettingsFile, ranks: int | None) -> None:
    """Set `batch` and the layout.

    DeepSpeed's train_batch_size counts all ranks except Ulysses and pipeline ranks as data ranks, including AutoTP's tensor
    ranks, although these read the same rows.
    """
    tp, ulysses = (
        given.take_integer("tensor_parallel.autotp_size") or 1,
        given.take_integer("sequence_parallel_size") or 1,
    )
    split = ModelParallelSizes(tp=tp, pp=given.take_integer("pipeline.stages") or 1, cp=ulysses)
    set_parallel_sizes(given, split, {"tp": "autotp_size", "pp": "pipeline.stages", "cp": "sequence_parallel_size"})
    given.set_key("parallel.cp_kind", "alltoall" if ulysses > 1 else None, "as Ulysses exchanges heads")
    data_ranks = given.take_integer("data_parallel_size")
    if data_ranks is not None and ranks is None:
        ranks = data_ranks * split.ranks_per_model
    data_ranks = compute_data_parallel_size(given, ranks, split)
    micro, whole = given.take_integer("train_micro_batch_size_per_gpu"), given.take_integer("train_batch_size")
    accumulation = given.take_integer("gradient_accumulation_steps")
    if whole is not None:
        _set_global_batch(given, whole, micro, accumulation, split, data_ranks)
        return
    if micro is None:
        given.add_note("open", "is set by the training program, as is batch.micro; mega's default is 1", "batch.global")
    set_batch_sizes(given, micro, None if micro is None else micro * (accumulation or 1), data_ranks)


def _set_global_batch(
    given: ForeignSettingsFile,
    whole: int,
    micro: int | None,
    accumulation: int | None,
    split: ModelParallelSizes,
    data_ranks: int | None,
) -> None:
    """Set `batch` if the file gives the global batch, where two of the three sizes determine the third."""
    if whole % split.tp:
        given.refuse_value("train_batch_size", f"must be a multiple of tensor_parallel.autotp_size = {split.tp}")
    if split.tp > 1:
        text = f"counts tensor ranks, which read the same rows: a step has {whole // split.tp} distinct rows"
        given.add_note("changes meaning", text, f"train_batch_size: {whole}")
    given.set_key("batch.global", whole // split.tp, "train_batch_size")
    if data_ranks is None:
        given.set_key("batch.micro", micro, "train_micro_batch_size_per_gpu")
        return
    counted = data_ranks * split.tp
    micro = micro or whole // counted // (accumulation or 1)
    steps = accumulation or whole // (micro or 1) // counted
    if micro * steps * counted != whole:
        rule = f"must be micro x accumulation x data ranks = {micro} x {steps} x {counted}"
        given.refuse_value("train_batch_size", rule, "set the number of ranks of that run with --nproc")
    given.set_key("batch.micro", micro, "train_micro_batch_size_per_gpu")


def _set_optimizer(given: ForeignSettingsFile) -> float | None:
    """Set `optimizer`, and return its learning rate if the file has it."""
    name = given.take_value("optimizer.type")
    if name is not None and str(name).lower() not in ADAM:
        given.note_untranslated_optimizer(name, "optimizer.type")
    if name is not None and str(name).lower() == "adam" and given.take_value(f"{PARAMS}adam_w_mode") is False:
        given.add_note(
            "changes meaning", "weight decay is decoupled from the gradient (AdamW)", "optimizer.params.adam_w_mode"
        )
    given.copy_settings(
        {f"optimizer.{key}": f"{PARAMS}{key}" for key in DEFAULTS} | {"optimizer.clip_grad": "gradient_clipping"}
    )
    for key in DEFAULTS:
        if given.has_auto_value(f"{PARAMS}{key}"):
            given.leave_open(f"optimizer.{key}", f"optimizer.params.{key} is auto: set by HuggingFace's arguments")
    if name is None:
        given.add_note("open", "is set by the training program; mega's defaults are used here", "optimizer")
    else:
        given.set_missing_keys_to_defaults(
            {f"optimizer.{key}": value for key, value in DEFAULTS.items()}, "DeepSpeed's"
        )
    set_optimizer_offload(given, "zero_optimization.offload_optimizer.device", "zero_optimization.cpu_offload")
    _account_for_adam(given)
    lr = given.get_run_yaml_value("optimizer.lr")
    return float(lr) if isinstance(lr, int | float) else None


def _account_for_adam(given: ForeignSettingsFile) -> None:
    """Note the settings of DeepSpeed's Adam that select its implementation, or another algorithm."""
    for key, plain in (("amsgrad", False), ("bias_correction", True)):
        if given.take_value(f"{PARAMS}{key}") is (not plain):
            given.add_note("no equivalent", "AdamW is used without it", f"{PARAMS}{key}: {not plain}")
    text = "mega has its own implementation of AdamW"
    patterns = ("adam_w_mode", "torch_adam", "fused", "foreach", "set_grad_none", "fp32_optimizer_states", "capturable")
    given.add_notes_on_matching_keys("not needed", text, " ".join(f"{PARAMS}{key}" for key in patterns))
