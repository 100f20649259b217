"""Layout of a run of transformers, Accelerate or Axolotl: model parallelism, and sharding over data ranks."""

from __future__ import annotations

from typing import Any

from mega_cli.moving_in.batch_and_layout import ModelParallelSplit, set_parallel_sizes
from mega_cli.moving_in.optimizer_offload import WEIGHTS_STAY, set_fsdp_offload, set_optimizer_offload
from mega_cli.moving_in.settings_file import SettingsFile

SHARDING = {
    "FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0,
    "4": 3, "5": 2, "full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2, "no_shard": 0,
    "True": 3, "true": 3, "False": 2, "false": 2,
}  # fmt: skip
CONFIG = "parallelism_config."
FSDP_OFFLOAD = (
    "fsdp_config.fsdp_offload_params", "fsdp_config.offload_params", "fsdp_config.cpu_offload", "fsdp_config.fsdp_cpu_offload",
)  # fmt: skip
MEGATRON = "megatron_lm_config.megatron_lm_"


def _parallel_size(given: SettingsFile, name: str, *others: str) -> int:
    """Return a size that Accelerate's parallelism_config or one of the other keys gives, by default 1."""
    return given.take_integer(*others, f"{CONFIG}{name}_size", f"{CONFIG}{CONFIG[:-1]}_{name}_size") or 1


def read_model_parallel_sizes(given: SettingsFile) -> ModelParallelSplit:
    """Read the tensor, pipeline and context parallel sizes of a settings file, set `parallel` of run.yaml to them, and
    return them.
    """
    tp = _parallel_size(
        given, "tp", "tensor_parallel_size", f"{MEGATRON}tp_degree", "deepspeed.tensor_parallel.autotp_size"
    )
    cp = _parallel_size(given, "cp", "context_parallel_size", "sequence_parallel_degree")
    ulysses = _parallel_size(given, "sp", "deepspeed.sequence_parallel_size")
    split = ModelParallelSplit(tp=tp, pp=given.take_integer(f"{MEGATRON}pp_degree") or 1, cp=cp * ulysses)
    set_parallel_sizes(
        given, split, {"tp": "tensor parallel size", "pp": "pp_degree", "cp": "context and sequence parallel size"}
    )
    given.set_key("parallel.cp_kind", "alltoall" if ulysses > 1 and cp == 1 else None, "as Ulysses exchanges heads")
    return split


def read_world_size(given: SettingsFile, ranks: int | None, split: ModelParallelSplit) -> int | None:
    """Return the number of ranks: `ranks` of the command, else the file's `num_processes`, else its data-parallel
    sizes; also set `parallel.zero` if the file shards.

    Raises:
        ConfigError: if the sizes in the file are for another number of ranks.
    """
    processes = given.take_integer("num_processes")
    ranks = processes if ranks is None else ranks
    shard, copies = (
        _parallel_size(given, "dp_shard", "dp_shard_size"),
        _parallel_size(given, "dp_replicate", "dp_replicate_size"),
    )
    sized = shard * copies * split.ranks_per_model
    if shard * copies > 1:
        if ranks is not None and ranks != sized:
            shown = f"{shard} x {copies} data ranks x {split.ranks_per_model} ranks per model"
            given.refuse_combination(
                f"its parallel sizes require {sized} ranks ({shown}), found {ranks}", f"use --nproc {sized}"
            )
        ranks = sized
    if shard > 1:
        given.set_key("parallel.zero", 3, "dp_shard_size")
        given.set_key("parallel.zero3_shard", shard if copies > 1 else None, "dp_shard_size")
    return ranks


def set_zero_level(given: SettingsFile) -> None:
    """Set `parallel.zero` and `optimizer.offload` of run.yaml from the FSDP and DeepSpeed settings of a settings file."""
    kind = given.take_value("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward", "fsdp")
    kind = _fsdp_kind(given, kind)
    kind = given.take_value("fsdp_config.reshard_after_forward") if kind is None else kind
    if kind is not None:
        zero = 3 if kind is True else SHARDING.get(str(kind).split()[0], 3)
        given.set_key("parallel.zero", zero, f"FSDP: {kind}")
    given.set_key("parallel.zero", given.take_integer("deepspeed_config.zero_stage"), "deepspeed_config.zero_stage")
    given.set_key("parallel.zero", given.take_integer("deepspeed.zero_optimization.stage"), "DeepSpeed's stage")
    set_fsdp_offload(given, *FSDP_OFFLOAD)
    set_optimizer_offload(
        given,
        "deepspeed_config.offload_optimizer_device",
        "deepspeed.zero_optimization.offload_optimizer.device",
        f"{MEGATRON}optimizer_cpu_offload",
    )
    if str(given.take_value("deepspeed_config.offload_param_device")).lower() in ("cpu", "nvme"):
        given.add_note("no equivalent", "weights stay on the device", "deepspeed_config.offload_param_device")


def _fsdp_kind(given: SettingsFile, value: Any) -> Any:
    """Return the sharding strategy in FSDP's value, which may have several words: full_shard auto_wrap offload."""
    words = value.split() if isinstance(value, str) else value if isinstance(value, list) else [value]
    if "offload" in words:
        given.set_key("optimizer.offload", True, "fsdp: offload")
        given.add_note("changes meaning", WEIGHTS_STAY, "fsdp: offload")
    return next((word for word in words if word not in ("auto_wrap", "offload")), None)


def include_deepspeed_file(given: SettingsFile) -> None:
    """Add the settings of the DeepSpeed configuration file that a settings file names, if any, and a note on it."""
    other = given.take_value("deepspeed", "deepspeed_config.deepspeed_config_file")
    if other is None:
        return
    if given.include_file(str(other), "deepspeed.", "a file of DeepSpeed's settings"):
        text = f"its sizes and stage are read; for the rest see mega train --from-deepspeed {other}"
    else:
        text = f"{other} does not exist: if it sets autotp_size or sequence_parallel_size, divide batch.global by them"
    given.add_note("open", text, "deepspeed")
