"""Memory of a GPU outside of tensors: the CUDA context, communicators, and what torch's allocator reserves in addition."""

from __future__ import annotations

from collections.abc import Mapping

from mega_trainer.plan.training_layout import TrainingLayout

CONTEXT_BYTES = 700 << 20  # CUDA's context with the kernels of torch, cuBLAS and cuDNN, and cuBLAS's workspace
COMMUNICATOR_BYTES = 256 << 20  # buffers of NCCL's channels for a communicator of several ranks
SLACK = 1.04  # reserved memory of torch's allocator / peak of tensors: fitted by benchmarks/plan_memory.py


def count_communicators(run: TrainingLayout) -> int:
    """Return the number of communicators of several ranks that a rank of the run belongs to.
    They are the world's, one of each degree of parallelism, and one for the replicas of its experts.
    """
    data = run.dp * run.cp
    block = run.ep * run.expert_tp
    world = data * run.tp * run.pp
    sizes = [world, run.tp, run.pp, run.cp, data, block, world // run.pp // block if block > 1 else 1]
    return sum(size > 1 for size in sizes)


def add_non_tensor_memory(run: TrainingLayout, tensors: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of device memory of a rank by kind, including memory outside of tensors.
    The kinds are the ones in `tensors`, and on a GPU also `allocator` (reserved by torch beyond tensors),
    `communicators` and `context`. Their sum is what the GPU's memory must hold.
    """
    if run.device == "cpu":
        return dict(tensors)
    return {
        **tensors,
        "allocator": round((SLACK - 1) * sum(tensors.values())),
        "communicators": count_communicators(run) * COMMUNICATOR_BYTES,
        "context": CONTEXT_BYTES,
    }
