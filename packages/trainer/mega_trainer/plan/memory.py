"""How many bytes each rank needs, told before any device is touched.

Activations are counted as in "Reducing activation recomputation in large transformer models" (arXiv:2205.05198),
product by product, so that the count also holds for gated blocks, grouped heads and experts.

Legend: D model width, F feed-forward width, H heads, Q head size, K key/value heads, S sequence, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mega_common.model_config import ModelConfig
from mega_trainer.pipeline.schedules import make_schedule, peak_held
from mega_trainer.pipeline.stages import stage_layers
from mega_trainer.plan.flops import RecomputeKind, count_parameters, feed_forward_width

UNIT_ELEMENTS = 350_000  # a gather among many ranks costs its latency: 1,024 take two layers of 8B, 8 take one
_ELEMENT = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}


@dataclass(frozen=True)
class RunShape:
    """How a model is split and fed.

    Attributes:
        seq_length: tokens of a sample, before context parallelism splits them.
        micro_batch: samples of a microbatch.
        microbatches: microbatches of a step, per data-parallel rank.
        zero: what data-parallel ranks share: 1 optimizer states, 2 also gradients, 3 also weights.
        zero3_shard: data and context ranks that share one copy at level 3; None for all.
        zero3_layers: that are gathered together at level 3; None for as many as make a message worth while.
        fused_attention: the attention kernel keeps no scores.
        modules: of each layer that `selective` recomputes.
        recompute_layers: of each stage, the first ones, that `full` recomputes; None for all.
        offload: layers of each stage, the first ones, whose activations wait in host memory.
        offload_optimizer: what the optimizer works on lies in host memory.
        eight_bits: the layers whose linear weights are kept quantised for a step, too, in two forms.
    """

    seq_length: int
    micro_batch: int = 1
    microbatches: int = 1
    tp: int = 1
    sp: bool = False
    pp: int = 1
    virtual_stages: int = 1
    schedule: str = "1f1b"
    pipeline_layout: tuple[int, ...] | None = None
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    dp: int = 1
    zero: int = 0
    zero3_shard: int | None = None
    zero3_layers: int | None = None
    precision: str = "bf16"
    recompute: RecomputeKind = "none"
    fused_attention: bool = True
    modules: tuple[str, ...] = ("norm", "activation")
    recompute_layers: int | None = None
    offload: int = 0
    offload_optimizer: bool = False
    eight_bits: range = range(0)

    def recomputes(self, module: str) -> bool:
        """Whether a module of each layer is computed again by itself."""
        return self.recompute == "selective" and module in self.modules

    @property
    def sharers(self) -> int:
        """Ranks that share one copy of the weights at level 3."""
        return self.zero3_shard or self.dp * self.cp


def unit_layers(model: ModelConfig, run: RunShape) -> int:
    """Layers that level 3 gathers together, experts apart: so many that a rank's part of them is of `UNIT_ELEMENTS`."""
    layers = count_parameters(model).layers
    mean = sum(layer.split / run.tp + layer.whole for layer in layers) / len(layers)
    return run.zero3_layers or math.ceil(UNIT_ELEMENTS * run.sharers / mean)


def memory(model: ModelConfig, run: RunShape) -> list[dict[str, int]]:
    """Bytes of each kind on a rank of each pipeline rank, in pipeline order.

    Kinds: `weights`, `gradients`, `optimizer` (two moments of Adam and, under a 16-bit precision, fp32 weights),
    `activations`. ZeRO-3 keeps fp32 weights alone, and what it gathers of the others, and the gradients that it has not
    yet scattered, are counted where they are most. fp8 keeps what bf16 keeps, and weights in eight bits. Not counted: what
    libraries and the allocator need for themselves, buffers of messages, the eight-bit factors of the product at hand, and
    the uneven parts of vocabulary and experts.

    Raises:
        ConfigError: when the layers do not fit the stages, or the schedule is unknown.
    """
    stages = stage_layers(model.num_layers, run.pp, run.virtual_stages, run.pipeline_layout)
    schedule = make_schedule(run.schedule, pp=run.pp, microbatches=run.microbatches, virtual_stages=run.virtual_stages)
    table = _embedding_bytes(model, run)
    behind = range(model.num_layers, model.num_layers + model.mtp_layers)
    layer = [activation_bytes(model, run, index) for index in range(behind.stop)]
    put_off = [put_off_bytes(model, run, index) for index in range(behind.stop)]
    activations = [
        sum(_kept_bytes(model, run, place, layer[index]) for place, index in enumerate(part)) for part in stages
    ]
    waiting = [sum(put_off[index] for index in part) for part in stages]
    activations[-1] += _head_bytes(model, run) * (1 + len(behind))
    # of a layer behind the head its norms' inputs, their outputs side by side, and the layer
    activations[-1] += sum(4 * _residual_bytes(model, run) + layer[index] for index in behind)
    waiting[0] += table
    waiting[-1] += table + sum(table + put_off[index] for index in behind)
    ranks = []
    for rank in range(run.pp):
        mine = schedule.stages(rank)
        layers = [index for stage in mine for index in stages[stage]]
        held = peak_held(schedule, rank, activations, waiting)
        # one layer at a time is computed again, and then holds everything; of offloaded ones the next is on its way, too
        held += max((layer[index] for index in layers), default=0.0) * (2 if run.offload else run.recompute == "full")
        last = len(stages) - 1 in mine
        states = _states(model, run, [*layers, *(behind if last else ())], first=0 in mine, last=last)
        ranks.append({**states, "activations": round(held)})
    return ranks


def _kept_bytes(model: ModelConfig, run: RunShape, place: int, layer: float) -> float:
    """Of a layer at that place of its stage, whose forward makes `layer` bytes, what stays on the device."""
    bound = run.recompute_layers
    if run.recompute == "full" and (bound is None or place < bound):
        return _residual_bytes(model, run)
    return 0.0 if place < run.offload else layer


def activation_bytes(model: ModelConfig, run: RunShape, layer: int = 0) -> float:
    """Bytes that one layer keeps of one microbatch from forward to backward, on one rank; of experts an even load.

    For a GPT with dropout and without fused attention these are the paper's S B D (34 + 5 H S / D) bytes.
    """
    width, element, keys = model.hidden_size, _ELEMENT[run.precision], run.seq_length
    outputs = 0 if run.recomputes("norm") else 1 if model.shared_norm else 2
    norms = 2 + outputs
    inputs = norms * width * element + (
        2 * width if model.residual_dropout else 0
    )  # of norms and blocks; dropout masks
    heads, latents = _attention_widths(model)
    split = element * heads
    per_score = element + (1 + element if model.attention_dropout else 0)
    if not run.recomputes("attention"):
        # fused, a logarithm of each row
        split += model.num_attention_heads * (4 if run.fused_attention else keys * per_score)
    if model.qk_norm:
        split += element * (heads // 2)  # before and after their norms; values lie among what came with them
    routed, moe = 0.0, model.moe
    experts = moe is not None and model.has_experts(layer)
    if moe and experts:
        # each of a token's rows at its experts; logits and scores in fp32
        routed = element * moe.top_k * width * run.expert_tp + 2 * 4 * moe.num_experts
    if run.recomputes("moe" if experts else "mlp"):
        routed = 0.0
    else:
        # gate, up and what is made of them
        parts = (2 if model.gated else 1) + (not run.recomputes("activation"))
        split += element * parts * feed_forward_width(model, layer)
    inputs += element * latents
    return _tokens(run) * (inputs / (run.tp if run.sp else 1) + element * latents + (split + routed) / run.tp)


def _attention_widths(model: ModelConfig) -> tuple[int, int]:
    """Elements a token of q, k, v and the input of the output projection, and of latents.

    Latents are kept before their norms and, of the whole sequence, after; values lie among the keys they came with.
    """
    query, values = model.num_attention_heads * model.head_size, model.num_attention_heads * model.value_size
    mla = model.mla
    if mla is None:
        return 2 * query + 2 * model.kv_heads * model.head_size, 0
    unfolded = model.num_attention_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return 2 * query + unfolded + values, (mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim


def put_off_bytes(model: ModelConfig, run: RunShape, layer: int = 0) -> float:
    """Bytes that one layer keeps of one microbatch where the products for its weight gradients are put off.

    They are the inputs of its linear layers and the gradients of their outputs; sequence parallelism splits neither
    output of a row layer, whose gradient is gathered for the product.
    """
    split, latents = _attention_widths(model)
    split += (3 if model.gated else 2) * feed_forward_width(model, layer)
    if model.moe and model.has_experts(layer):
        split += 2 * model.hidden_size * model.moe.top_k * run.expert_tp  # a row's input and the gradient of its output
    inputs, outputs = 2 * model.hidden_size / (run.tp if run.sp else 1), 2 * (model.hidden_size + latents)
    return _tokens(run) * _ELEMENT[run.precision] * (inputs + outputs + split / run.tp)


def _residual_bytes(model: ModelConfig, run: RunShape) -> float:
    return _tokens(run) * _ELEMENT[run.precision] * model.hidden_size / (run.tp if run.sp else 1)


def _head_bytes(model: ModelConfig, run: RunShape) -> float:
    """The final norm's input and output, and the gradients that the head computes in its forward."""
    return 3 * _residual_bytes(model, run) + _embedding_bytes(model, run)


def _embedding_bytes(model: ModelConfig, run: RunShape) -> float:
    """A gradient of the token table or of the head, before it is added to the others."""
    return _ELEMENT[run.precision] * model.vocab_size * model.hidden_size / run.tp


def _tokens(run: RunShape) -> float:
    return run.micro_batch * run.seq_length / run.cp


def _states(model: ModelConfig, run: RunShape, layers: Sequence[int], *, first: bool, last: bool) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer of a pipeline rank with those layers and ends."""
    count = count_parameters(model)
    block = run.ep * run.expert_tp  # ranks that hold all experts
    dense = [count.layers[index].split / run.tp + count.layers[index].whole for index in layers]
    experts = [count.layers[index].experts / block for index in layers]
    ends = count.embedding / run.tp if first else 0
    if last:
        copied = not first and (model.tie_embeddings or model.mtp_layers > 0)
        ends += count.final_norm + (count.head + model.vocab_size * model.hidden_size * copied) / run.tp
    element = _ELEMENT[run.precision]
    wide = max(4, element)
    sharded = run.zero == 3 and run.dp * run.cp > 1  # these weights are the ones that the optimizer works on
    copy = 4 if element == 2 and not sharded else 0
    sizes = {"weights": (wide if sharded else element, 3), "gradients": (wide, 2), "optimizer": (2 * wide + copy, 1)}
    table = {}
    for kind, (size, level) in sizes.items():
        shared = run.zero >= level
        parts = (run.sharers, max(1, run.dp * run.cp * run.tp // block)) if shared else (1, 1)
        table[kind] = size * ((sum(dense) + ends) / parts[0] + sum(experts) / parts[1])
    if sharded:
        unit = max(dense, default=0) * min(len(layers), unit_layers(model, run)) + max(experts, default=0)
        # embedding and head stay from forward to backward, beside a unit and the next one; gradients are widened to be summed
        table["weights"] += element * (ends + 2 * unit)
        table["gradients"] += element * (ends + unit) + wide * max(ends, unit)
    else:
        eight = [count.layers[index] for index in layers if index in run.eight_bits]
        table["weights"] += 2 * sum(layer.split / run.tp + layer.experts / block for layer in eight)
    if run.offload_optimizer:
        table["optimizer"] = 0.0
    return {kind: round(size) for kind, size in table.items()}
