"""Predicted memory of a run in other trainers, for comparison with published figures and for migration.

Each way of keeping was told apart by published peaks (`benchmarks/plan_memory.py`); bytes are those of tensors, without CUDA's
context and the allocator's slack (`MachineSpec.room`). Legend: T tokens of a rank, D model width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_trainer.pipeline.schedules import peak_activations
from mega_trainer.plan.flops import ParameterCounts, count_parameters_by_layer
from mega_trainer.plan.memory_prediction import split_layers_into_stages
from mega_trainer.plan.pipeline_fill import make_planning_schedule
from mega_trainer.plan.run_shape import RunShape

TrainerName = Literal["megatron", "nanotron", "fsdp2"]
LIKES: tuple[TrainerName, ...] = ("megatron", "nanotron", "fsdp2")


@dataclass(frozen=True)
class TrainerMemoryOptions:
    """Memory options of a trainer that its layout leaves open.

    Attributes:
        gradients: bytes of an element.
        optimizer: bytes of an element: main weights and moments.
        logits: bytes of one at the loss, with what it becomes; 0 for what the trainer takes by default.
        recomputed: parts of a layer that its backward computes again: `norm`, `activation`, `mlp`, and `mla_up_proj` for queries,
            keys and values that are unfolded from latents; `full` for all but a layer's input.
    """

    gradients: int = 4
    optimizer: int = 12
    logits: int = 0
    recomputed: frozenset[str] = frozenset()


def make_memory_options(run: RunShape) -> TrainerMemoryOptions:
    """Return the options that follow from the recompute settings of a run."""
    again = {"none": (), "selective": run.modules, "full": ("full",)}[run.recompute]
    return TrainerMemoryOptions(recomputed=frozenset(again))


def predict_other_trainer_memory(
    model: ModelConfig, run: RunShape, like: TrainerName, keeping: TrainerMemoryOptions | None = None
) -> list[dict[str, int]]:
    """Return bytes by kind on a rank of each pipeline rank at its peak, in pipeline order: `weights`, `gradients`,
    `optimizer`, `activations` and `work`, which is the loss and, under FSDP2, gathered weights.

    Raises:
        ConfigError: when the layers do not fit the stages; for a model with an encoder.
    """
    if model.has_encoder:
        raise ConfigError("what other trainers hold is not known for models with encoders", hint="leave out --like")
    keeping = keeping or make_memory_options(run)
    if like == "fsdp2":
        return [_fsdp2(model, run, keeping)]
    return _pipelined(model, run, keeping, nanotron=like == "nanotron")


def _fsdp2(model: ModelConfig, run: RunShape, keeping: TrainerMemoryOptions) -> dict[str, int]:
    """Return the memory in torchtitan: fp32 shards of weights, gradients and two moments; bf16 weights of a layer and
    the next one, of embedding and head throughout; whole logits in bf16, and their gradients (in fp32, three times,
    without a compiled loss).

    Per-operation checkpointing keeps a layer's input, attention's output and every other product: of queries, values, the
    gate, and the last one.
    """
    count = count_parameters_by_layer(model)
    tokens, width, shards = run.micro_batch * run.seq_length / run.cp, model.hidden_size, run.dp * run.cp
    kept = 2 * width
    if "full" not in keeping.recomputed:
        kept += (
            2 * (3 * width + model.key_value_heads * model.query_key_head_dim + model.ffn_hidden_size)
            + 4 * model.num_attention_heads
        )
    gathered = 2 * (count.embedding + count.head + 2 * count.layers[0].total)
    return {
        "weights": round(4 * count.total / shards), "gradients": round(4 * count.total / shards),
        "optimizer": round(8 * count.total / shards), "activations": round(tokens * model.num_layers * kept),
        "work": round(gathered + tokens * model.vocab_size * (keeping.logits or 4)),
    }  # fmt: skip


def _pipelined(
    model: ModelConfig, run: RunShape, keeping: TrainerMemoryOptions, *, nanotron: bool
) -> list[dict[str, int]]:
    """Return the memory in Megatron and nanotron: bf16 weights, whole gradients, fp32 main weights and moments, sharded
    under ZeRO-1.

    Logits are there in bf16, in fp32, and as exponentials, which become the gradient.
    """
    schedule = make_planning_schedule(
        run.schedule, pp=run.pp, microbatches=run.microbatches, virtual_stages=run.virtual_stages
    )
    flight, stages, count = (
        peak_activations(schedule),
        split_layers_into_stages(model, run),
        count_parameters_by_layer(model),
    )
    tokens = run.micro_batch * run.seq_length / run.cp
    shared = (run.dp * run.cp, max(1, run.dp * run.cp * run.tp // (run.ep * run.expert_tp))) if run.zero else (1, 1)
    told = []
    for rank in range(run.pp):
        layers = [layer for stage in schedule.stages_of_rank(rank) for layer in stages[stage]]
        held = _count_held(count, run, layers, first=rank == 0, last=rank == run.pp - 1)
        stage = (
            sum(_layer_bytes(model, run, index, keeping.recomputed, nanotron=nanotron) for index in layers)
            / run.virtual_stages
        )
        loss = tokens * model.vocab_size / run.tp * (keeping.logits or 10) * (rank == run.pp - 1)
        told.append(
            {
                "weights": round(2 * sum(held)), "gradients": round(keeping.gradients * sum(held)),
                "optimizer": round(keeping.optimizer * sum(n / ranks for n, ranks in zip(held, shared, strict=True))),
                "activations": round(flight[rank] * tokens * stage), "work": round(loss),
            }
        )  # fmt: skip
    return told


def _count_held(
    count: ParameterCounts, run: RunShape, layers: list[int], *, first: bool, last: bool
) -> tuple[float, float]:
    """Return the parameters of a rank: those replicated over data ranks, and experts."""
    ends = (count.embedding * first + count.head * last) / run.tp
    dense = sum(count.layers[i].split / run.tp + count.layers[i].whole for i in layers) + ends
    return dense, sum(count.layers[i].experts for i in layers) / (run.ep * run.expert_tp)


def _layer_bytes(model: ModelConfig, run: RunShape, index: int, again: frozenset[str], *, nanotron: bool) -> float:
    """Return the bytes per token of one layer's saved activations, without recomputed parts.

    nanotron keeps q and k before and after rotation, silu's output beside its product, and the inputs of column layers as they
    were gathered; Megatron gathers those again.
    """
    width, values = model.hidden_size, model.num_attention_heads * model.attention_value_dim
    if "full" in again:
        return 2 * width / run.tp
    query, keys = model.num_attention_heads * model.query_key_head_dim, model.key_value_heads * model.query_key_head_dim
    moe = model.moe if model.is_moe_layer(index) else None
    wide = model.ffn_hidden_size if moe is None else moe.shared_ffn_hidden_size + moe.top_k * moe.ffn_hidden_size
    norms = 0 if "norm" in again else 2 * width
    stream = (2 * width + (0 if nanotron else norms)) / run.tp + (norms if nanotron else 0)
    if model.mla:
        keys = query
    heads = (2 if nanotron else 1) * (query + keys) + 2 * values
    if "mla_up_proj" in again:
        heads -= query + keys + values
    feed = (4 if nanotron else 3) * wide + (2 * moe.top_k * width if moe else 0)
    if "activation" in again:
        feed -= moe.top_k * moe.ffn_hidden_size if moe else wide
    if moe is None and "mlp" in again:
        feed = 0
    return 2 * (stream + (heads + feed) / run.tp) + 4 * model.num_attention_heads / run.tp
