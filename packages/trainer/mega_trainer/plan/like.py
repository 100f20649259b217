"""The memory of a run as other trainers keep things: what published figures can be held against, and what changing over costs.

Each way of keeping was told apart by published peaks (`benchmarks/plan_memory.py`); bytes are those of tensors, without CUDA's
context and the allocator's slack (`Machine.room`). Legend: T tokens of a rank, D model width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_trainer.pipeline.schedules import peak_activations
from mega_trainer.plan.flops import Parameters, count_parameters
from mega_trainer.plan.memory import layers_of_stages
from mega_trainer.plan.pipeline_fill import make_planning_schedule
from mega_trainer.plan.shape import RunShape

Like = Literal["megatron", "nanotron", "fsdp2"]
LIKES: tuple[Like, ...] = ("megatron", "nanotron", "fsdp2")


@dataclass(frozen=True)
class Keeping:
    """What a trainer's options leave open.

    Attributes:
        gradients: bytes of an element.
        optimizer: bytes of an element: main weights and moments.
        logits: bytes of one at the loss, with what it becomes; 0 for what the trainer takes by default.
        again: parts of a layer that its backward computes again: `norm`, `activation`, `mlp`, and `mla_up_proj` for queries,
            keys and values that are unfolded from latents; `full` for all but a layer's input.
    """

    gradients: int = 4
    optimizer: int = 12
    logits: int = 0
    again: frozenset[str] = frozenset()


def keeping_of(run: RunShape) -> Keeping:
    """By what a run recomputes."""
    again = {"none": (), "selective": run.modules, "full": ("full",)}[run.recompute]
    return Keeping(again=frozenset(again))


def memory_like(model: ModelConfig, run: RunShape, like: Like, keeping: Keeping | None = None) -> list[dict[str, int]]:
    """Bytes of each kind on a rank of each pipeline rank at its peak, in pipeline order: `weights`, `gradients`, `optimizer`,
    `activations` and `work`, which is the loss and, under FSDP2, gathered weights.

    Raises:
        ConfigError: when the layers do not fit the stages; for a model with an encoder.
    """
    if model.has_encoder:
        raise ConfigError("what other trainers hold is not known for models with encoders", hint="leave out --like")
    keeping = keeping or keeping_of(run)
    if like == "fsdp2":
        return [_fsdp2(model, run, keeping)]
    return _pipelined(model, run, keeping, nanotron=like == "nanotron")


def _fsdp2(model: ModelConfig, run: RunShape, keeping: Keeping) -> dict[str, int]:
    """torchtitan: fp32 shards of weights, gradients and two moments; bf16 weights of a layer and the next one, of embedding and
    head throughout; logits whole, in bf16, and their gradients (in fp32, thrice, where nothing compiles the loss).

    Per-operation checkpointing keeps a layer's input, attention's output and every other product: of queries, values, the
    gate, and the last one.
    """
    count = count_parameters(model)
    tokens, width, shards = run.micro_batch * run.seq_length / run.cp, model.hidden_size, run.dp * run.cp
    kept = 2 * width
    if "full" not in keeping.again:
        kept += (
            2 * (3 * width + model.kv_heads * model.head_size + model.ffn_hidden_size) + 4 * model.num_attention_heads
        )
    gathered = 2 * (count.embedding + count.head + 2 * count.layers[0].total)
    return {
        "weights": round(4 * count.total / shards), "gradients": round(4 * count.total / shards),
        "optimizer": round(8 * count.total / shards), "activations": round(tokens * model.num_layers * kept),
        "work": round(gathered + tokens * model.vocab_size * (keeping.logits or 4)),
    }  # fmt: skip


def _pipelined(model: ModelConfig, run: RunShape, keeping: Keeping, *, nanotron: bool) -> list[dict[str, int]]:
    """Megatron and nanotron: weights in bf16, gradients whole, main weights and moments in fp32, shared under ZeRO-1.

    Logits are there in bf16, in fp32, and as exponentials, which become the gradient.
    """
    schedule = make_planning_schedule(
        run.schedule, pp=run.pp, microbatches=run.microbatches, virtual_stages=run.virtual_stages
    )
    flight, stages, count = peak_activations(schedule), layers_of_stages(model, run), count_parameters(model)
    tokens = run.micro_batch * run.seq_length / run.cp
    shared = (run.dp * run.cp, max(1, run.dp * run.cp * run.tp // (run.ep * run.expert_tp))) if run.zero else (1, 1)
    told = []
    for rank in range(run.pp):
        layers = [layer for stage in schedule.stages(rank) for layer in stages[stage]]
        held = _held(count, run, layers, first=rank == 0, last=rank == run.pp - 1)
        stage = (
            sum(_layer(model, run, index, keeping.again, nanotron=nanotron) for index in layers) / run.virtual_stages
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


def _held(count: Parameters, run: RunShape, layers: list[int], *, first: bool, last: bool) -> tuple[float, float]:
    """Parameters of a rank: those that all data ranks have, and experts."""
    ends = (count.embedding * first + count.head * last) / run.tp
    dense = sum(count.layers[i].split / run.tp + count.layers[i].whole for i in layers) + ends
    return dense, sum(count.layers[i].experts for i in layers) / (run.ep * run.expert_tp)


def _layer(model: ModelConfig, run: RunShape, index: int, again: frozenset[str], *, nanotron: bool) -> float:
    """Bytes of a token in one layer, without the parts of it that are computed again.

    nanotron keeps q and k before and after rotation, silu's output beside its product, and the inputs of column layers as they
    were gathered; Megatron gathers those again.
    """
    width, values = model.hidden_size, model.num_attention_heads * model.value_size
    if "full" in again:
        return 2 * width / run.tp
    query, keys = model.num_attention_heads * model.head_size, model.kv_heads * model.head_size
    moe = model.moe if model.has_experts(index) else None
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
