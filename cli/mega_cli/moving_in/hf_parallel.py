"""Layout of a run of transformers, Accelerate or Axolotl: the ranks that share a model, and how the others shard it."""

from __future__ import annotations

from mega_cli.moving_in.batch import RankSplit, put_split
from mega_cli.moving_in.given import Given

SHARDING = {
    "FULL_SHARD": 3, "HYBRID_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0,
    "4": 3, "5": 2, "full_shard": 3, "hybrid_shard": 3, "shard_grad_op": 2, "hybrid_shard_zero2": 2, "no_shard": 0,
    "True": 3, "true": 3, "False": 2, "false": 2,
}  # fmt: skip
CONFIG = "parallelism_config."
MEGATRON = "megatron_lm_config.megatron_lm_"


def _size(given: Given, name: str, *others: str) -> int:
    """Return a size that Accelerate's parallelism_config or one of the other keys gives, by default 1."""
    return given.whole(*others, f"{CONFIG}{name}_size", f"{CONFIG}{CONFIG[:-1]}_{name}_size") or 1


def read_split(given: Given) -> RankSplit:
    """Read the ranks that share a model, and set `parallel` to them."""
    tp = _size(given, "tp", "tensor_parallel_size", f"{MEGATRON}tp_degree", "deepspeed.tensor_parallel.autotp_size")
    cp = _size(given, "cp", "context_parallel_size", "sequence_parallel_degree")
    ulysses = _size(given, "sp", "deepspeed.sequence_parallel_size")
    split = RankSplit(tp=tp, pp=given.whole(f"{MEGATRON}pp_degree") or 1, cp=cp * ulysses)
    put_split(
        given, split, {"tp": "tensor parallel size", "pp": "pp_degree", "cp": "context and sequence parallel size"}
    )
    given.put("parallel.cp_kind", "alltoall" if ulysses > 1 and cp == 1 else None, "as Ulysses exchanges heads")
    return split


def read_ranks(given: Given, ranks: int | None, split: RankSplit) -> int | None:
    """Return the number of ranks: that of the command, of `num_processes`, or of the sizes of data parallelism.

    Raises:
        ConfigError: when the sizes in the file are those of another number of ranks.
    """
    processes = given.whole("num_processes")
    ranks = processes if ranks is None else ranks
    shard, copies = _size(given, "dp_shard", "dp_shard_size"), _size(given, "dp_replicate", "dp_replicate_size")
    sized = shard * copies * split.ranks
    if shard * copies > 1:
        if ranks is not None and ranks != sized:
            shown = f"{shard} x {copies} data ranks x {split.ranks} that share a model"
            given.refuse_run(f"its parallel sizes are those of {sized} ranks ({shown}), not of {ranks}", "see --nproc")
        ranks = sized
    if shard > 1:
        given.put("parallel.zero", 3, "dp_shard_size")
        given.put("parallel.zero3_shard", shard if copies > 1 else None, "dp_shard_size")
    return ranks


def put_sharding(given: Given) -> None:
    """Set `parallel.zero` from FSDP's and DeepSpeed's settings."""
    kind = given.get("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward", "fsdp")
    kind = next(iter(kind), None) if isinstance(kind, list) else kind
    kind = given.get("fsdp_config.reshard_after_forward") if kind is None else kind
    if kind is not None:
        zero = 3 if kind is True else SHARDING.get(str(kind).split()[0], 3)
        given.put("parallel.zero", zero, f"FSDP: {kind}")
    given.put("parallel.zero", given.whole("deepspeed_config.zero_stage"), "deepspeed_config.zero_stage")
    given.put("parallel.zero", given.whole("deepspeed.zero_optimization.stage"), "DeepSpeed's stage")


def include_deepspeed(given: Given) -> None:
    """Read the sizes of DeepSpeed's file where the settings name one, and name the file."""
    other = given.get("deepspeed", "deepspeed_config.deepspeed_config_file")
    if other is None:
        return
    if given.include(str(other), "deepspeed.", "a file of DeepSpeed's settings"):
        text = f"its sizes and stage are read; see the rest with mega train --from-deepspeed {other}"
    else:
        text = f"{other} is not there: ranks that share a model by it (autotp_size, sequence_parallel_size) divide batch.global"
    given.tell("open", text, "deepspeed")
