"""DeepSpeed's ds_config.json as a run.yaml. Facts: deepspeed.ai/docs/config-json, DeepSpeed 0.19 (runtime/config.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mega_cli.megatron_args.run_draft import NoteKind
from mega_cli.megatron_args.translate import ScriptTranslation
from mega_cli.moving_in.batch_and_layout import (
    ModelParallelSplit,
    count_data_ranks,
    set_batch_sizes,
    set_parallel_sizes,
)
from mega_cli.moving_in.deepspeed_precision import set_deepspeed_precision
from mega_cli.moving_in.deepspeed_schedule import set_deepspeed_schedule
from mega_cli.moving_in.optimizer_offload import set_optimizer_offload
from mega_cli.moving_in.settings_file import Reasons, SettingsFile

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


def translate_deepspeed(path: Path, ranks: int | None = None) -> ScriptTranslation:
    """Translate a DeepSpeed configuration file of a run on `ranks` ranks to a run.yaml; model, data and length, which
    it lacks, are left open.

    Raises:
        ConfigError: if it is not such a file, or its batch does not match the ranks.
    """
    given = SettingsFile(path, "a file of DeepSpeed's settings")
    given.leave_open("model.from", "the folder of the model or checkpoint that the training program loads")
    given.leave_open("data.train", "a token data set, written by `mega data preprocess`")
    given.add_note("open", "is set by the training program; mega's default is 1000", "train.steps")
    _set_batch(given, ranks)
    set_deepspeed_schedule(given, _set_optimizer(given))
    set_deepspeed_precision(given)
    stage = given.take_number("zero_optimization.stage")
    given.set_key("parallel.zero", stage, "zero_optimization.stage")
    given.copy_settings({"parallel.zero3_shard": "zero_optimization.zero_hpz_partition_size"})
    saved = [given.take_value(f"activation_checkpointing.{key}") for key in CHECKPOINTING]
    if any(saved):
        given.set_key("recompute", "full", "activation_checkpointing")
    if given.take_value("gradient_clipping") is None and not given.is_automatic("gradient_clipping"):
        given.add_note(
            "open",
            "is not in the file: 0 up to DeepSpeed 0.19.2 (set here), 1 from 0.19.3 on",
            "gradient_clipping",
        )
    given.write_defaults({"optimizer.clip_grad": 0.0, "parallel.zero": 0}, "DeepSpeed's")
    return given.finish_run(REASONS, f"{ranks} ranks" if ranks else "")


def _set_batch(given: SettingsFile, ranks: int | None) -> None:
    """Set `batch` and the layout.

    DeepSpeed's train_batch_size counts all ranks except Ulysses and pipeline ranks as data ranks, including AutoTP's tensor
    ranks, although these read the same rows.
    """
    tp, ulysses = (
        given.take_integer("tensor_parallel.autotp_size") or 1,
        given.take_integer("sequence_parallel_size") or 1,
    )
    split = ModelParallelSplit(tp=tp, pp=given.take_integer("pipeline.stages") or 1, cp=ulysses)
    set_parallel_sizes(given, split, {"tp": "autotp_size", "pp": "pipeline.stages", "cp": "sequence_parallel_size"})
    given.set_key("parallel.cp_kind", "alltoall" if ulysses > 1 else None, "as Ulysses exchanges heads")
    data_ranks = given.take_integer("data_parallel_size")
    if data_ranks is not None and ranks is None:
        ranks = data_ranks * split.ranks_per_model
    data_ranks = count_data_ranks(given, ranks, split)
    micro, whole = given.take_integer("train_micro_batch_size_per_gpu"), given.take_integer("train_batch_size")
    accumulation = given.take_integer("gradient_accumulation_steps")
    if whole is not None:
        _set_global_batch(given, whole, micro, accumulation, split, data_ranks)
        return
    if micro is None:
        given.add_note("open", "is set by the training program, as is batch.micro; mega's default is 1", "batch.global")
    set_batch_sizes(given, micro, None if micro is None else micro * (accumulation or 1), data_ranks)


def _set_global_batch(
    given: SettingsFile,
    whole: int,
    micro: int | None,
    accumulation: int | None,
    split: ModelParallelSplit,
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


def _set_optimizer(given: SettingsFile) -> float | None:
    """Set `optimizer`, and return its learning rate if the file has it."""
    name = given.take_value("optimizer.type")
    if name is not None and str(name).lower() not in ADAM:
        given.note_optimizer(name, "optimizer.type")
    if name is not None and str(name).lower() == "adam" and given.take_value(f"{PARAMS}adam_w_mode") is False:
        given.add_note(
            "changes meaning", "weight decay is decoupled from the gradient (AdamW)", "optimizer.params.adam_w_mode"
        )
    given.copy_settings(
        {f"optimizer.{key}": f"{PARAMS}{key}" for key in DEFAULTS} | {"optimizer.clip_grad": "gradient_clipping"}
    )
    for key in DEFAULTS:
        if given.is_automatic(f"{PARAMS}{key}"):
            given.leave_open(f"optimizer.{key}", f"optimizer.params.{key} is auto: set by HuggingFace's arguments")
    if name is None:
        given.add_note("open", "is set by the training program; mega's defaults are used here", "optimizer")
    else:
        given.write_defaults({f"optimizer.{key}": value for key, value in DEFAULTS.items()}, "DeepSpeed's")
    set_optimizer_offload(given, "zero_optimization.offload_optimizer.device", "zero_optimization.cpu_offload")
    _account_for_adam(given)
    lr = given.current_value("optimizer.lr")
    return float(lr) if isinstance(lr, int | float) else None


def _account_for_adam(given: SettingsFile) -> None:
    """Note the settings of DeepSpeed's Adam that select its implementation, or another algorithm."""
    for key, plain in (("amsgrad", False), ("bias_correction", True)):
        if given.take_value(f"{PARAMS}{key}") is (not plain):
            given.add_note("no equivalent", "AdamW is used without it", f"{PARAMS}{key}: {not plain}")
    text = "mega has its own implementation of AdamW"
    patterns = ("adam_w_mode", "torch_adam", "fused", "foreach", "set_grad_none", "fp32_optimizer_states", "capturable")
    given.note_matching("not needed", text, " ".join(f"{PARAMS}{key}" for key in patterns))
