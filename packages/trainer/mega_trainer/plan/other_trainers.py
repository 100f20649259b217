"""Trainers other than mega as `mega plan --like` plans them: the layouts that each can run, and its memory and time in them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_trainer.plan.layer_cost import TrainerProfile
from mega_trainer.plan.other_trainer_memory import (
    TRAINERS,
    TrainerMemoryOptions,
    TrainerName,
    make_memory_options,
    predict_other_trainer_memory,
)
from mega_trainer.plan.training_layout import RecomputeKind, TrainingLayout

# Memory of a GPU / predicted memory, below which more layouts of nanotron's sweep ran out of memory than ran
# (benchmarks/plan_search.py): a fragmented allocator ends them. A search leaves them out.
SEARCH_MARGIN = 1.085


@dataclass(frozen=True)
class OtherTrainer:
    """A trainer other than mega: the choices that it leaves for a layout, and its use of time and memory.

    None of them keeps activations or optimizer states in host memory here, or exchanges experts between pipeline stages.

    Attributes:
        name: name as for `--like`.
        schedules: pipeline schedules; `1f1b` with virtual stages if `interleaves`.
        zero: ZeRO levels without a pipeline; with one, level 3 only if it is the only level.
        recompute: kinds of recomputation.
        selects_experts: selective recomputation of norms and activations is only for layers with experts.
        context: kinds of context parallelism; none without it.
        experts: whether it splits experts over ranks.
        profile: properties for the prediction of step times.
        memory: memory options that its layout leaves open.
    """

    name: TrainerName
    schedules: tuple[str, ...]
    interleaves: bool
    zero: tuple[int, ...]
    recompute: tuple[RecomputeKind, ...]
    context: tuple[Literal["ring", "allgather", "alltoall"], ...]
    experts: bool
    profile: TrainerProfile
    memory: TrainerMemoryOptions = field(default_factory=TrainerMemoryOptions)
    selects_experts: bool = False

    def supports_layout(self, model: ModelConfig, run: TrainingLayout) -> bool:
        """Return whether the trainer can run the layout `run`, by its schedules, ZeRO levels and other limits.

        Megatron-LM has equal stages where `pp` divides the layers.
        """
        uneven = model.num_layers % run.pp == 0 and model.num_layers % (run.pp * run.virtual_stages) > 0
        zero = self.zero if run.pp == 1 or len(self.zero) == 1 else tuple(level for level in self.zero if level < 3)
        return (
            run.schedule in self.schedules
            and not (uneven and self.profile.split == "even")
            and (run.virtual_stages == 1 or run.schedule != "1f1b" or self.interleaves)
            and run.zero in zero
            and run.zero3_gather == "micro_batch"
            and run.recompute in self.recompute
            and not (self.selects_experts and run.recompute == "selective" and model.moe is None)
            and (run.cp == 1 or run.cp_kind in self.context)
            and (run.ep == 1 or self.experts)
            and not run.overlap_expert_exchange
            and run.offload == 0
            and not run.offload_optimizer
        )

    def predict_memory(self, model: ModelConfig, run: TrainingLayout) -> list[dict[str, int]]:
        """Return the peak bytes by kind of one rank in each pipeline rank; ZeRO-3 of any trainer as FSDP2 allocates."""
        options = replace(self.memory, recomputed=make_memory_options(run).recomputed)
        return predict_other_trainer_memory(model, run, "fsdp2" if run.zero == 3 else self.name, options)


# Times of kernels and collectives: benchmarks/published.py, and constants of trainers in benchmarks/results/plan_time.json.
OTHER_TRAINERS: dict[TrainerName, OtherTrainer] = {
    # Transformer Engine's kernels, collectives of tensor parallelism beside GEMMs, gradients summed in bf16; ZeRO-3 by its FSDP.
    # Of `recompute_modules`, `moe_act` is of experts, and `layernorm` of norms that no linear layer contains, as a dense one's do
    # (megatron/core/transformer/transformer_config.py and transformer_layer.py, 2025).
    "megatron": OtherTrainer(
        "megatron", ("1f1b",), True, (1, 3), ("none", "selective", "full"), ("ring", "allgather", "alltoall"), True,
        TrainerProfile(passes=1.38, tp_waited=2, dispatch="expert", gradient_bytes=2, split="even", copies_shards=False),
        TrainerMemoryOptions(gradients=2), selects_experts=True,
    ),
    # nothing compiled; 25 MiB buckets of torch's DDP. Its loss casts logits to fp32, subtracts, exponentiates, sums and divides
    # in kernels of their own; bf16 gradients of each backward are added to fp32 ones; ZeRO-1 all-reduces after the backward.
    "nanotron": OtherTrainer(
        "nanotron", ("1f1b",), False, (0, 1), ("none", "full"), (), False,
        TrainerProfile(
            attention="flash2", passes=2.52, tp_waited=6, bucket_bytes=25 << 20, split="shares", overlaps_reduction=False,
            loss_bytes=52, wgrad_bytes=12,
        ),
    ),
    "fsdp2": OtherTrainer(
        "fsdp2", ("1f1b", "zbv"), True, (3,), ("none", "selective", "full"), ("ring", "allgather"), True,
        TrainerProfile(attention="flash2", passes=1.33, tp_waited=10),
    ),
}  # fmt: skip


def get_other_trainer(name: str) -> OtherTrainer:
    """Return the trainer that the option `--like` names.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in OTHER_TRAINERS:
        raise ConfigError(
            f"--like must be one of {', '.join(TRAINERS)}, found {name!r}", hint=f"--like {next(iter(TRAINERS))}"
        )
    return OTHER_TRAINERS[name]
