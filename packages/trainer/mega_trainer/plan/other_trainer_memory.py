"""Predicted memory of a run in other trainers, for comparison with published figures and for migration.

The formulas were checked against published peaks (`benchmarks/plan_memory.py`). They count bytes of tensors, without CUDA's
context, communicators and the allocator's slack (`device_memory`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_trainer.pipeline.schedules import peak_in_flight_microbatches
from mega_trainer.plan.flops import ParameterCounts, count_parameters_by_layer
from mega_trainer.plan.layer_flops import active_ffn_width, expert_input_width
from mega_trainer.plan.memory_prediction import (
    split_layers_by_shares,
    split_layers_evenly,
    split_layers_into_stages,
)
from mega_trainer.plan.pipeline_fill import make_planning_schedule
from mega_trainer.plan.training_layout import TrainingLayout

TrainerName = Literal["megatron", "nanotron", "fsdp2"]
# Elements per token and layer that nanotron reserves beside the tensors counted here, in hidden sizes: copies of a rank's share, and
# gathered tensors that it cannot free yet. Fitted on the reserved memory of 1,746 layouts (benchmarks/plan_search.py --sweep).
NANOTRON_COPIES, NANOTRON_GATHERED = 4, 1.6
TRAINERS: tuple[TrainerName, ...] = ("megatron", "nanotron", "fsdp2")


@dataclass(frozen=True)
class TrainerMemoryOptions:
    """Memory options of a training program other than mega (such as Megatron-LM) that its layout leaves open.

    Attributes:
        gradients: bytes per element of the gradients.
        optimizer: bytes per element of the optimizer states: main weights and moments.
        logits: bytes per logit in the loss, copies included; 0 for the trainer's default.
        recomputed: parts of a layer that its backward recomputes: `norm`, `activation`, `mlp`, and `mla_up_proj` for queries,
            keys and values projected from latents; `full` for everything but a layer's input.
    """

    gradients: int = 4
    optimizer: int = 12
    logits: int = 0
    recomputed: frozenset[str] = frozenset()


def make_memory_options(run: TrainingLayout) -> TrainerMemoryOptions:
    """Return the memory options of a trainer that follow from the recompute settings of the training layout."""
    recomputed = {"none": (), "selective": run.modules, "full": ("full",)}[run.recompute]
    return TrainerMemoryOptions(recomputed=frozenset(recomputed))


def predict_other_trainer_memory(
    model: ModelConfig, run: TrainingLayout, like: TrainerName, options: TrainerMemoryOptions | None = None
) -> list[dict[str, int]]:
    """Return the peak bytes by kind that another trainer needs on one rank in each pipeline rank.

    `like` is the trainer. The kinds are `weights`, `gradients`, `optimizer`, `activations` and `work`, which is the
    loss and, under FSDP2, gathered weights.

    Raises:
        ConfigError: when the layers do not fit the stages; for a model with an encoder.
    """
    if model.has_encoder:
        raise ConfigError("--like is not supported for models with encoders", hint="leave out --like")
    options = options or make_memory_options(run)
    if like == "fsdp2":
        return _fsdp2(model, run, options)
    return _pipelined(model, run, options, nanotron=like == "nanotron")


def _fsdp2(model: ModelConfig, run: TrainingLayout, options: TrainerMemoryOptions) -> list[dict[str, int]]:
    """Return the memory in torchtitan by pipeline rank: fp32 shards of weights, gradients and two moments, after tensor,
    pipeline and expert parallelism have split the model; the activations of `_fsdp2_layer_bytes`; logits in bf16, and their
    gradients (in fp32, three times, without a compiled loss).

    Without a pipeline, bf16 weights of a layer and the next one are gathered, and of embedding and head throughout. In a
    pipeline, weights stay gathered between micro-batches and gradients are summed unsharded in fp32 until the last one.
    """
    schedule = make_planning_schedule(
        run.schedule, pp=run.pp, microbatches=run.microbatches, virtual_stages=run.virtual_stages
    )
    flight, stages, count = (
        peak_in_flight_microbatches(schedule),
        split_layers_into_stages(model, run),
        count_parameters_by_layer(model),
    )
    shards = run.zero3_shard_ranks, max(1, run.zero3_shard_ranks * run.tp // (run.ep * run.expert_tp))
    tokens, ranks_bytes = run.micro_batch * run.seq_length / run.cp, []
    for rank in range(run.pp):
        first, last = rank == 0, rank == run.pp - 1
        layers = [layer for stage in schedule.stages_of_rank(rank) for layer in stages[stage]]
        held = _count_held(count, run, layers, first=first, last=last)
        shard = sum(n / ranks for n, ranks in zip(held, shards, strict=True))
        gathered, summed = _fsdp2_unsharded(count, run, layers, first=first, last=last)
        stage = sum(_fsdp2_layer_bytes(model, run, index, options.recomputed) for index in layers) / run.virtual_stages
        again = max((_layer_bytes(model, run, index, frozenset(), nanotron=False) for index in layers), default=0.0)
        loss = model.vocab_size / run.tp * (options.logits or 4) * last
        ranks_bytes.append(
            {
                "weights": round(4 * shard), "gradients": round(4 * shard + 4 * summed), "optimizer": round(8 * shard),
                "activations": round(flight[rank] * tokens * stage),
                "work": round(2 * gathered + tokens * max(loss, again if options.recomputed else 0.0)),
            }
        )  # fmt: skip
    return ranks_bytes


def _fsdp2_unsharded(
    count: ParameterCounts, run: TrainingLayout, layers: list[int], *, first: bool, last: bool
) -> tuple[float, float]:
    """Return how many parameters of a rank are gathered at the peak, and of how many the gradients are summed unsharded."""
    if run.pp > 1:
        held = sum(_count_held(count, run, layers, first=first, last=last))
        return held, held if run.microbatches > 1 and run.zero3_shard_ranks > 1 else 0.0
    largest = max(sum(_count_held(count, run, [index], first=False, last=False)) for index in layers)
    return (count.embedding + count.head) / run.tp + 2 * largest, 0.0


def _fsdp2_layer_bytes(model: ModelConfig, run: TrainingLayout, index: int, again: frozenset[str]) -> float:
    """Return the bytes per token of one layer's saved activations in torchtitan, split by tensor parallelism with sequences.

    Per-operation checkpointing saves a layer's input, the attention output and the outputs of every second GEMM: queries,
    values, gate and down projection.
    """
    if not again:
        return _layer_bytes(model, run, index, again, nanotron=False)
    kept = 2.0 * model.hidden_size
    if "full" not in again:
        wide = active_ffn_width(model, model.get_layer_kind(index).feed_forward)
        values = model.key_value_heads * model.query_key_head_dim
        kept += 2 * (3 * model.hidden_size + values + wide) + 4 * model.num_attention_heads
    return kept / run.tp


def _pipelined(
    model: ModelConfig, run: TrainingLayout, options: TrainerMemoryOptions, *, nanotron: bool
) -> list[dict[str, int]]:
    """Return the memory in Megatron and nanotron: bf16 weights, whole gradients, fp32 main weights and moments, sharded
    under ZeRO-1.

    Logits are held in bf16, in fp32, and as exponentials, which become the gradient. In nanotron the backward of a layer holds
    gradients of its feed-forward block, autograd keeps bf16 gradients of a whole
    backward before they are added to the fp32 ones, and without ZeRO torch's DDP keeps them a second time in buckets.
    """
    schedule = make_planning_schedule(
        run.schedule, pp=run.pp, microbatches=run.microbatches, virtual_stages=run.virtual_stages
    )
    flight, count = peak_in_flight_microbatches(schedule), count_parameters_by_layer(model)
    stages = split_layers_by_shares(model, run) if nanotron else split_layers_evenly(model, run)
    tokens = run.micro_batch * run.seq_length / run.cp
    shared = (run.dp * run.cp, max(1, run.dp * run.cp * run.tp // (run.ep * run.expert_tp))) if run.zero else (1, 1)
    ranks_bytes = []
    for rank in range(run.pp):
        layers = [layer for stage in schedule.stages_of_rank(rank) for layer in stages[stage]]
        held = _count_held(count, run, layers, first=rank == 0, last=rank == run.pp - 1)
        stage = (
            sum(_layer_bytes(model, run, index, options.recomputed, nanotron=nanotron) for index in layers)
            / run.virtual_stages
        )
        work = tokens * model.vocab_size / run.tp * (options.logits or 10) * (rank == run.pp - 1)
        gradients = options.gradients
        if nanotron:
            gradients += 2 * (run.zero == 0 and run.dp > 1)
            late = 2 * sum(held) - tokens * stage  # gradients of a backward, when its activations are freed
            # of up and gate projections together, of each, and of the activation's output and the product
            work = max(work, late, tokens * 12 * model.ffn_hidden_size / run.tp)
        ranks_bytes.append(
            {
                "weights": round(2 * sum(held)), "gradients": round(gradients * sum(held)),
                "optimizer": round(options.optimizer * sum(n / ranks for n, ranks in zip(held, shared, strict=True))),
                "activations": round(flight[rank] * tokens * stage), "work": round(work),
            }
        )  # fmt: skip
    return ranks_bytes


def _count_held(
    count: ParameterCounts, run: TrainingLayout, layers: list[int], *, first: bool, last: bool
) -> tuple[float, float]:
    """Return the parameters of a rank: those replicated over data ranks, and experts."""
    tied = 0 if first else count.embedding  # a last stage of its own has a copy of a tied table
    ends = (count.embedding * first + (count.head or tied) * last) / run.tp
    dense = sum(count.layers[i].split / run.tp + count.layers[i].whole for i in layers) + ends
    return dense, sum(count.layers[i].experts for i in layers) / (run.ep * run.expert_tp)


def _layer_bytes(
    model: ModelConfig, run: TrainingLayout, index: int, again: frozenset[str], *, nanotron: bool
) -> float:
    """Return the bytes per token of one layer's saved activations, without recomputed parts.

    nanotron saves the outputs of silu and of its multiplication. Without a pipeline its host runs ahead of its collectives, so the
    allocator cannot yet reuse the gathered inputs and whole outputs of linear layers, four widths; between none and all of them
    were seen. In a pipeline it waits for messages, and keeps none.
    """
    width, values = model.hidden_size, model.num_attention_heads * model.attention_value_dim
    if "full" in again:
        return 2 * width / run.tp
    query, keys = model.num_attention_heads * model.query_key_head_dim, model.key_value_heads * model.query_key_head_dim
    moe = model.moe if model.is_moe_layer(index) else None
    wide = model.ffn_hidden_size if moe is None else moe.shared_ffn_hidden_size + moe.top_k * moe.ffn_hidden_size
    norms = 0 if "norm" in again else 2 * width
    stream = (2 * width + norms) / run.tp
    if nanotron:
        stream += NANOTRON_COPIES * width / run.tp
        stream += NANOTRON_GATHERED * width * (1 - 1 / run.tp) if run.pp == 1 else 0.0
    if model.mla:
        keys = query
    heads = query + keys + 2 * values
    if "mla_up_proj" in again:
        heads -= query + keys + values
    feed = (4 if nanotron else 3) * wide + (2 * moe.top_k * expert_input_width(model) if moe else 0)
    if "activation" in again:
        feed -= moe.top_k * moe.ffn_hidden_size if moe else wide
    if moe is None and "mlp" in again:
        feed = 0
    return 2 * (stream + (heads + feed) / run.tp) + 4 * model.num_attention_heads / run.tp
