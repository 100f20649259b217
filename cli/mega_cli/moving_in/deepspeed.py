"""DeepSpeed's ds_config.json as a run.yaml. Facts: deepspeed.ai/docs/config-json, DeepSpeed 0.19 (runtime/config.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mega_cli.megatron_args.draft import Kind
from mega_cli.megatron_args.translate import Translation
from mega_cli.moving_in.given import Given, Reasons, batch

PARAMS, WARMUP = "optimizer.params.", "scheduler.params."
SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
CHECKPOINTING = ("partition_activations", "cpu_checkpointing", "number_checkpoints")
REASONS: Mapping[Kind, Reasons] = {
    "not needed": {
        "sums of gradients always run beside the backward, in buckets": "zero_optimization.overlap_comm"
        " zero_optimization.contiguous_gradients zero_optimization.reduce_scatter zero_optimization.*bucket_size"
        " zero_optimization.allgather_partitions zero_optimization.round_robin_gradients zero_optimization.sub_group_size"
        " zero_optimization.stage3_* zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        "a checkpoint always has whole weights under HuggingFace's names": "*gather_16bit_weights_on_model_save",
        "gradients are summed in fp32": "communication_data_type data_types.* prescale_gradients gradient_predivide_factor",
        "time and speed are in metrics.jsonl, and `mega report` draws them": "steps_per_print wall_clock_breakdown"
        " dump_state memory_breakdown flops_profiler.* comms_logger.*",
        "is DeepSpeed's own": "zero_optimization.cpu_offload_* aio.* checkpoint.* compression_training.* elasticity.*",
    },
    "no equivalent": {
        "weights stay on the device; the optimizer can be kept in host memory": "zero_optimization.offload_param.*",
        "host memory is the furthest": "zero_optimization.offload_optimizer.*",
        "trackers are set by `log`": "tensorboard.* wandb.* csv_monitor.* comet.*",
        "gradients are not compressed": "zero_optimization.zero_quantized_* sparse_gradients sparse_attention.*",
    },
}  # fmt: skip


def from_deepspeed(path: Path, ranks: int | None = None) -> Translation:
    """What DeepSpeed's file says of a run on so many ranks; model and data, of which it says nothing, are left to fill in.

    Raises:
        ConfigError: when it is no such file.
    """
    given = Given(path, "a file of DeepSpeed's settings")
    given.ask("model.from", "a folder of the hub or a checkpoint, which the program has loaded by itself")
    given.ask("data.train", "a token data set, as `mega data preprocess` makes it")
    micro, whole = given.number("train_micro_batch_size_per_gpu"), given.number("train_batch_size")
    batch(given, micro, given.number("gradient_accumulation_steps"), whole, ranks)
    _optimizer(given)
    _schedule(given)
    given.put("precision", _precision(given), "bf16.enabled, fp16.enabled")
    stage = given.number("zero_optimization.stage")
    given.put("parallel.zero", stage, "zero_optimization.stage")
    given.rows(
        {
            "parallel.tp": "tensor_parallel.autotp_size",
            "parallel.pp": "pipeline.stages",
            "parallel.zero3_shard": "zero_optimization.zero_hpz_partition_size",
        }
    )
    ulysses = given.number("sequence_parallel_size")
    given.put("parallel.cp", ulysses, "sequence_parallel_size")
    given.put("parallel.cp_kind", None if ulysses is None else "alltoall", "as Ulysses exchanges heads")
    saved = [given.get(f"activation_checkpointing.{key}") for key in CHECKPOINTING]
    if any(saved):
        given.put("recompute", "full", "activation_checkpointing")
    if given.get("gradient_clipping") is None:
        given.tell(
            "open",
            "is 0 where the file has none, as up to DeepSpeed 0.19.2; from 0.19.3 on it is 1",
            "gradient_clipping",
        )
    given.defaults({"optimizer.clip_grad": 0.0, "parallel.zero": 0}, "DeepSpeed's")
    return given.finish(REASONS, f"{ranks} ranks" if ranks else "")


def _optimizer(given: Given) -> None:
    name = given.get("optimizer.type")
    if name is not None and "adam" not in str(name).lower():
        given.tell("open", f"mega has adamw and muon, and not {name}", "optimizer.type")
    if name is not None and str(name).lower() == "adam" and given.get(f"{PARAMS}adam_w_mode") is False:
        given.tell(
            "changes meaning", "weight decay is AdamW's, apart from the gradient", "optimizer.params.adam_w_mode"
        )
    keys = ("lr", "betas", "eps", "weight_decay")
    given.rows({f"optimizer.{key}": f"{PARAMS}{key}" for key in keys} | {"optimizer.clip_grad": "gradient_clipping"})
    if name is not None:
        given.defaults({"optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.0}, "DeepSpeed's")
    device = given.get("zero_optimization.offload_optimizer.device", "zero_optimization.cpu_offload")
    if device in ("cpu", "nvme", True):
        given.put("optimizer.offload", True, "zero_optimization.offload_optimizer")


def _schedule(given: Given) -> None:
    name = given.get("scheduler.type")
    if name is None:
        return
    if name not in SCHEDULES:
        given.tell("open", f"mega has {', '.join(SCHEDULES.values())} and others, and not {name}", "scheduler.type")
        return
    given.put("lr_schedule.name", SCHEDULES[name], f"scheduler.type {name}")
    given.rows({
        "lr_schedule.warmup_steps": f"{WARMUP}warmup_num_steps", "lr_schedule.decay_steps": f"{WARMUP}total_num_steps",
        "optimizer.lr": f"{WARMUP}warmup_max_lr", "lr_schedule.warmup_init": f"{WARMUP}warmup_min_lr",
    })  # fmt: skip
    for ratio, key in (("warmup_min_ratio", "warmup_init"), ("cos_min_ratio", "min_lr")):
        if share := given.number(f"{WARMUP}{ratio}"):
            given.tell(
                "open", f"is {share:g} of the rate here: lr_schedule.{key} is a rate", f"scheduler.params.{ratio}"
            )
    if given.get(f"{WARMUP}warmup_type") not in (None, "linear"):
        given.tell("changes meaning", "the warm-up is linear here", "scheduler.params.warmup_type")


def _precision(given: Given) -> str:
    bf16, fp16 = given.get("bf16.enabled", "bfloat16.enabled"), given.get("fp16.enabled")
    power = given.number("fp16.initial_scale_power")
    if fp16 is True:
        given.put("fp16.initial_scale", None if power is None else 2.0**power, "fp16.initial_scale_power")
        given.rows({"fp16.growth_interval": "fp16.loss_scale_window", "fp16.min_scale": "fp16.min_loss_scale"})
    return "bf16" if bf16 is True else "fp16" if fp16 is True else "fp32"
