"""Predicted compute and communication time of a rank for one layer of one micro-batch, by kind.

    product      FLOPs of GEMMs / (a share of the peak of their dtype) + their operands and results / bandwidth
    attention    FLOPs of unmasked scores / (a share of the peak)
    elementwise  bytes / bandwidth, as moved by the trainer's fused kernels (benchmarks/traffic.py counts these)
    tensor       collectives of tensor parallelism, exposed or overlapped with GEMMs
    context      keys and values, or heads, of other context ranks
    expert       dispatch of tokens to experts, and combine

This predicts any model on any machine. `benchmarks/predict.py` instead counts the trainer's real operations for one model on
H100s, to show the gain of a code change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from mega_common.layer_kinds import COMPRESSED_MIXERS, LayerKind, MixerKind
from mega_common.model_config import ModelConfig
from mega_trainer.plan.kernel_throughput import TILE, AttentionKernel, GpuThroughput
from mega_trainer.plan.layer_flops import (
    active_ffn_width,
    altup_shapes,
    compute_mixer_core_flops,
    count_computed_keys,
    expert_input_width,
    layer_input_shapes,
    list_mixer_projection_shapes,
    max_active_ffn_width,
    recurrence_bytes,
    recurrent_state_elements,
    saved_activation_elements,
)
from mega_trainer.plan.machine import Interconnect, RankPlacement
from mega_trainer.plan.trainable_parameters import TrainableParameters
from mega_trainer.plan.training_layout import TrainingLayout

OPERAND_BYTES = {"fp8": 1, "nvfp4": 0.5625}  # of an operand's element, with its share of a block's scale
# Moved per element to quantise an operand along its rows, and, for a weight gradient, along its columns: nvfp4 after a rotation.
QUANTISED_BYTES = {"fp8": (3.0, 1.0), "nvfp4": (2.5625, 4.4375)}
HEAD_BYTES = 7  # bytes that the loss moves per logit, forward and backward, in addition to its GEMMs
NORM_ACTIVATION_SHARE = 0.7  # approximate share of norms and activations in elementwise work
FFN_SHARE = 0.6  # approximate share of recomputed feed-forward GEMMs in a layer's GEMMs
KERNELS = 6  # elementwise kernels of a layer, in each direction
SCAN_KERNELS = (5, 14)  # kernels of Mamba-2's chunked recurrence, forward and backward
BIAS_PASSES = 2  # of experts' outputs in each direction: a bias is added, its gradient is summed over rows
EXPERT_KERNELS = 20  # kernels that route, sort and pack the rows of experts, in each direction


@dataclass(frozen=True)
class TrainerProfile:
    """Properties of a training program that step-time prediction needs and that the layout leaves open.
    The defaults describe mega; others describe published runs.

    Attributes:
        attention: attention kernel; `unfused` writes and reads all scores.
        passes: bytes moved by elementwise work, as a multiple of those of fused kernels.
        tp_waited: number of exposed collectives among the ten of a layer under tensor and sequence parallelism.
        dispatch: destinations of a token: each of its experts and then the ranks that share the expert, each rank with such
            experts, or each such node.
        gradient_bytes: bytes per element of gradients reduced over data ranks.
        bucket_bytes: bytes of a gradient bucket that is reduced at once; None: as mega's, large enough for many ranks.
        host: minimum seconds of a layer with experts, forward and backward: the time in which the host launches its
            kernels, if it reads the number of rows of each expert and so cannot run ahead of the GPU.
        stall: seconds of a layer with experts in which the GPU is idle after the host has read those numbers.
        graphs: share of a layer's launches that CUDA graphs replay, which take no time of the host.
        looped: seconds of starting the GEMM of an expert, if experts' GEMMs are launched one by one; 0: in one grouped kernel.
        hides_dispatch: compute of another micro-batch runs beside dispatch and combine.
        split: how layers are split into pipeline stages: to balance their work, evenly, or by shares of the FLOPs
            (`memory_prediction`).
        overlaps_reduction: gradients are reduced over data ranks beside the last backward under ZeRO-1, and weights are gathered
            beside the next forward; otherwise both are waited for, and gradients are all-reduced.
        loss_bytes: bytes that the loss moves per logit, in addition to its GEMMs; None: those of a fused loss.
        wgrad_bytes: bytes moved per weight and micro-batch to accumulate its gradient.
        copies_shards: ZeRO-3 copies weights out of, and gradients into, the buffers of its collectives.
    """

    attention: AttentionKernel = "fused"
    passes: float = 1.0
    tp_waited: int = 6
    dispatch: Literal["expert", "rank", "node"] = "rank"
    gradient_bytes: int = 4
    bucket_bytes: int | None = None
    host: float = 0.0
    stall: float = 0.0
    graphs: float = 0.0
    looped: float = 0.0
    hides_dispatch: bool = False
    split: Literal["balanced", "even", "shares"] = "balanced"
    overlaps_reduction: bool = True
    loss_bytes: float | None = None
    wgrad_bytes: int = 8
    copies_shards: bool = True


class PassSeconds(NamedTuple):
    """Seconds of a forward pass, and of the two halves of a backward pass: gradients of inputs, and of weights."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0

    def add_seconds(self, other: PassSeconds) -> PassSeconds:
        """Return the sum of two passes' seconds, separately for forward, input gradients and weight gradients."""
        return PassSeconds(self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights)

    @property
    def total(self) -> float:
        """Total seconds of a forward and its backward."""
        return self.forward + self.inputs + self.weights


PassWork = dict[str, PassSeconds]  # seconds by kind of work


def sum_pass_work(works: Iterator[PassWork] | list[PassWork]) -> PassWork:
    """Return the sum of seconds by kind of work, such as GEMMs, over several parts of a model."""
    out: PassWork = {}
    for work in works:
        for kind, cost in work.items():
            out[kind] = out[kind].add_seconds(cost) if kind in out else cost
    return out


def multiply_pass_work(work: PassWork, count: float) -> PassWork:
    """Return the work (seconds by kind) of `count` repetitions of `work`."""
    return {kind: PassSeconds(*(count * seconds for seconds in cost)) for kind, cost in work.items()}


@dataclass(frozen=True)
class LayerCostModel:
    """Cost model of one rank's work in a run on a machine: seconds of forward and backward of each part of the model."""

    model: ModelConfig
    run: TrainingLayout
    interconnect: Interconnect
    rates: GpuThroughput
    profile: TrainerProfile
    trained: TrainableParameters

    @property
    def micro_batch_tokens(self) -> float:
        """Tokens of a micro-batch on one rank, after context parallelism splits the sequence."""
        return self.run.micro_batch * self.run.seq_length / self.run.cp

    @property
    def bytes_per_activation(self) -> int:
        """Bytes of one activation element in the run's precision."""
        return {"fp64": 8, "fp32": 4}.get(self.run.precision, 2)

    def predict_layer_seconds(self, index: int) -> PassWork:
        """Return the seconds of layer number `index` for one micro-batch, by kind of work."""
        return replace(self, model=self.model.get_layer_config(index))._predict_layer(index)

    def _predict_layer(self, index: int) -> PassWork:
        """Return `predict_layer_seconds`; `model` is the configuration of this layer."""
        kind, share = self.model.get_layer_kind(index), self.trained.shares[index]
        products = sum_pass_work([*self._dense_gemms(kind), *self._expert_work(index)])
        forward, inputs, weights = products.get("products", PassSeconds())
        products["products"] = PassSeconds(forward, inputs, share * weights)
        work = sum_pass_work(
            [products, *self._mixer_work(kind, index), self._elementwise_work(kind), *self._adapter_work(index)]
        )
        recomputed = self._recompute_work(work)
        communication = sum_pass_work(
            [
                self._tensor_parallel_work(work, halves=sum(map(bool, kind)), frozen=1 - share),
                *(self._context_parallel_work(work, mixer) for mixer in kind.mixers),
            ]
        )
        whole = self._hide_dispatch(sum_pass_work([work, recomputed, communication]))
        if not self.model.is_moe_layer(index):
            return whole
        launched = self.profile.host * (1 - self.profile.graphs) - sum(cost.total for cost in whole.values())
        waits = max(launched, self.profile.stall)
        return sum_pass_work([whole, {"host": PassSeconds(waits / 3, 2 * waits / 3)}]) if waits > 0 else whole

    def _hide_dispatch(self, work: PassWork) -> PassWork:
        """Return the work of a layer with the part of its expert exchange that another micro-batch's compute hides."""
        if not self.profile.hides_dispatch or "expert" not in work:
            return work
        exchange = work["expert"].total
        beside = sum(cost.total for kind, cost in work.items() if kind != "expert")
        exposed = self.rates.exposed_seconds(exchange, beside) / 2
        return {**work, "expert": PassSeconds(exposed, exposed)}

    def _gemm(
        self, rows: float, columns: float, inner: float, count: float = 1, precision: str | None = None
    ) -> PassSeconds:
        """Return the seconds of Y = X W^T of [rows, inner] and [columns, inner], and of its gradients; `count` such
        GEMMs are grouped.
        """
        kind = precision or self.run.precision
        start = count * self.rates.kernel  # the first tiles and the last wave of a kernel leave most of the GPU idle
        size = OPERAND_BYTES.get(kind, self.bytes_per_activation)
        x, w, y = rows * inner * count, columns * inner * count, rows * columns * count
        out = self.bytes_per_activation

        together, slower = (count, 1.0) if count == 1 else (count, 1 / self.rates.grouped)
        if count > 1 and self.profile.looped:
            together, slower, start = 1, slower * count, start + count * self.profile.looped

        def gemm_seconds(shape: tuple[float, float, float], read: float, written: float) -> float:
            product = slower * self.rates.gemm_compute_seconds(shape, kind, together)
            return start + product + (size * read + written) / self.rates.memory

        by_row, by_column = (moved / self.rates.memory for moved in QUANTISED_BYTES.get(kind, (0, 0)))
        kept = w * (by_row + by_column) if self.run.zero == 3 else 0.0  # else weights are quantised once a step
        # the buffer that accumulates a weight gradient is read and written
        return PassSeconds(
            gemm_seconds((rows, columns, inner), x + w, out * y) + by_row * x + kept,
            gemm_seconds((rows, inner, columns), y + w, out * x) + by_row * y,
            gemm_seconds((columns, inner, rows), x + y, self.profile.wgrad_bytes * w) + by_column * (x + y),
        )

    def _dense_gemms(self, kind: LayerKind) -> Iterator[PassWork]:
        """Yield the GEMMs of a mixer's projections and of a dense feed-forward block."""
        model, run = self.model, self.run
        for mixer in kind.mixers:
            yield from self._projection_gemms(mixer)
        for out, into in (*layer_input_shapes(model), *altup_shapes(model)):
            yield {"products": self._gemm(self.micro_batch_tokens / (run.tp if run.sp else 1), out, into)}
        shared = model.moe.shared_ffn_hidden_size if model.moe else 0
        width = shared if kind.feed_forward == "moe" else active_ffn_width(model, kind.feed_forward)
        if width:
            yield {
                "products": self._gemm(
                    self.micro_batch_tokens, (1 + model.has_gated_mlp) * width / run.tp, model.hidden_size
                )
            }
            yield {"products": self._gemm(self.micro_batch_tokens, model.hidden_size, width / run.tp)}

    def _projection_gemms(self, mixer: MixerKind) -> Iterator[PassWork]:
        """Yield the GEMMs of a mixer's projections."""
        run, (split, latents) = self.run, list_mixer_projection_shapes(self.model, mixer)
        widths: dict[int, int] = {}
        for out, into in split[:-1]:
            widths[into] = widths.get(into, 0) + out
        for into, out in widths.items():
            yield {"products": self._gemm(self.micro_batch_tokens, out / run.tp, into)}
        for out, into in split[-1:]:
            yield {"products": self._gemm(self.micro_batch_tokens, out, into / run.tp)}
        for out, into in latents:
            yield {"products": self._gemm(self.micro_batch_tokens / (run.tp if run.sp else 1), out, into)}

    def _mixer_work(self, kind: LayerKind, index: int) -> Iterator[PassWork]:
        """Yield the work of attention scores and of a chunked recurrence, which its backward computes again before its
        two gradients.
        """
        for mixer in kind.mixers:
            if mixer in COMPRESSED_MIXERS:
                yield self._compressed_attention_work(mixer)
            else:
                yield self._attention_work(index) if mixer == "attention" else self._recurrence_work(mixer)

    def _recurrence_work(self, mixer: MixerKind) -> PassWork:
        """Return the work of a chunked recurrence."""
        mine = self.micro_batch_tokens / self.run.tp
        one = mine * compute_mixer_core_flops(self.model, mixer, None, self.run.seq_length) / self.rates.scan
        there, back = (moved * mine / self.rates.memory for moved in recurrence_bytes(self.model, mixer))
        start, again = (count * self.rates.kernel for count in (SCAN_KERNELS if there else (0, 0)))
        return {"recurrence": PassSeconds(one + there + start, 3 * one + back + again)}

    def _attention_work(self, index: int) -> PassWork:
        """Return the work of attention scores."""
        model, run = self.model, self.run
        length = min(run.document_length or run.seq_length, run.seq_length)
        window = min(model.get_attention_window(index) or length, length)
        visible = window - window * (window - 1) / (2 * (window if model.chunked_window else length)) + TILE / 2
        heads, q, v = model.num_attention_heads / run.tp, model.query_key_head_dim, model.attention_value_dim
        indexed = model.mla is not None and model.mla.indexer is not None
        unfused = indexed or self.profile.attention == "unfused"  # a mask of selected tokens has no fused kernel
        pairs = 2.0 * self.micro_batch_tokens * heads * visible
        if unfused:
            return self._unfused_attention_work(run.seq_length, q + v, self._index_seconds(run.seq_length))
        size, seconds = (q + v) / 2, self.rates.attention_seconds
        return {"attention": PassSeconds(seconds(pairs * (q + v), size), seconds(pairs * (3 * q + 2 * v), size))}

    def _unfused_attention_work(self, keys: float, widths: int, indexing: float) -> PassWork:
        """Return the work of GEMMs of scores and of values, and of the softmax between them, all through memory.
        `widths` is the sum of a key's and a value's width, `indexing` the seconds of an indexer.
        """
        scores = self.micro_batch_tokens * self.model.num_attention_heads / self.run.tp * keys
        product = 2 * scores * widths / self.rates.product["bf16"]
        moved = scores * self.bytes_per_activation / self.rates.memory
        return {"attention": PassSeconds(product + 6 * moved + indexing, 2 * product + 8 * moved + 2 * indexing)}

    def _compressed_attention_work(self, mixer: MixerKind) -> PassWork:
        """Return the work of attention to tokens and compressed entries, with masks; an indexer has no backward."""
        section = self.model.compressed
        assert section is not None
        keys, index = count_computed_keys(section, mixer, self.run.seq_length)
        work = self._unfused_attention_work(keys, 2 * self.model.query_key_head_dim, 0.0)["attention"]
        return {"attention": work.add_seconds(PassSeconds(self._index_seconds(index) if index else 0.0))}

    def _index_seconds(self, keys: float) -> float:
        """Return the seconds of the index scores of all tokens and `keys`; 0 without an indexer."""
        indexer = self.model.indexer
        if indexer is None:
            return 0.0
        scores = self.micro_batch_tokens * keys * indexer.num_heads / self.run.tp
        return 2 * scores * (indexer.head_dim + 1) / self.rates.product["bf16"] + 3 * 4 * scores / self.rates.memory

    def _elementwise_work(self, kind: LayerKind) -> PassWork:
        """Return the work of norms with residual sums, and of elementwise operations between projections."""
        model, run, halves = self.model, self.run, sum(map(bool, kind))
        width = active_ffn_width(model, kind.feed_forward)
        residual = halves * 4 * model.stream_width / (1 + model.has_shortcuts) / (run.tp if run.sp else 1)
        residual += halves * 2 * model.hidden_size / (run.tp if run.sp else 1) if model.residual_dropout else 0
        there, back = (sum(moved) for moved in zip((0, 0), *map(self._mixer_elements, kind.mixers), strict=True))
        forward = residual + (there + (3 if model.has_gated_mlp else 2) * width) / run.tp
        backward = residual + (back + (5 if model.has_gated_mlp else 3) * width) / run.tp
        scale = self.micro_batch_tokens * self.bytes_per_activation * self.profile.passes / self.rates.memory
        least = KERNELS * self.profile.passes * self.rates.kernel
        return {"elementwise": PassSeconds(max(least, forward * scale), max(least, backward * scale))}

    def _mixer_elements(self, mixer: MixerKind) -> tuple[int, int]:
        """Return the elements per token that a mixer reads and writes around its scores or states, forward and
        backward.
        """
        model = self.model
        if mixer == "attention":
            heads = model.num_attention_heads + model.key_value_heads
            rotated = 2 * heads * (model.query_key_head_dim if model.position == "rope" else 0)
            has_gate = model.attention_gate or model.softplus_gate is not None
            gated = 3 * model.num_attention_heads * model.attention_value_dim if has_gate else 0
            normed = (3 if model.qk_norm else 1) * rotated
            return normed + gated, normed + gated * 5 // 3
        shapes, latents = list_mixer_projection_shapes(model, mixer)
        if mixer in COMPRESSED_MIXERS:  # norm and rotation of queries, rotation of the output, means over windows
            queries = model.num_attention_heads * model.query_key_head_dim
            moved = 10 * queries + 4 * sum(out for out, _ in latents[1:])
            return moved, moved
        if mixer in model.mixers:  # its inputs and outputs, read and written once
            moved = 2 * sum(out for out, _ in shapes)
            return moved, 2 * moved
        rows, inner = sum(out for out, _ in shapes[:-1]), shapes[-1][1]
        convolved = rows - inner  # plus a few elements per head, which are ignored
        return 3 * convolved + 4 * inner, 5 * convolved + 7 * inner  # convolution and recurrence, gated norm

    def _expert_work(self, index: int) -> Iterator[PassWork]:
        """Yield the work of experts: router, grouped GEMMs under an even load, permutation of rows, dispatch and
        combine.
        """
        model, run, moe = self.model, self.run, self.model.moe
        if moe is None or not model.is_moe_layer(index):
            return
        width, mine = expert_input_width(model), self.micro_batch_tokens / run.tp
        rows = mine * moe.mean_active_experts * run.expert_tp
        experts = moe.num_experts / run.ep
        each = rows / experts
        part = moe.ffn_hidden_size / run.expert_tp
        yield {"products": self._gemm(mine, moe.num_router_outputs, model.hidden_size, precision="bf16")}
        if moe.latent_size:  # down before the dispatch and up after the combine
            yield {"products": self._gemm(mine, width, model.hidden_size)}
            yield {"products": self._gemm(mine, model.hidden_size, width)}
        yield {"products": self._gemm(each, (1 + model.has_gated_mlp) * part, width, experts)}
        yield {"products": self._gemm(each, width, part, experts)}
        ordered = (
            2 * (2 if run.ep > 1 else 1) * rows * width * self.bytes_per_activation
            + 4 * 8 * mine * moe.num_router_outputs
        )
        if model.mlp_bias:  # which grouped GEMMs do not add
            ordered += BIAS_PASSES * rows * ((1 + model.has_gated_mlp) * part + width) * self.bytes_per_activation
        ordered = max(ordered * self.profile.passes / self.rates.memory, EXPERT_KERNELS * self.rates.kernel)
        yield {"elementwise": PassSeconds(ordered, ordered)}
        block = self.interconnect.make_rank_group(run.ep * run.expert_tp, 1)
        if block.size > 1:
            way = 2 * self._dispatch_seconds(mine * width * self.bytes_per_activation, block)
            yield {"expert": PassSeconds(way, way)}

    def _adapter_work(self, index: int) -> Iterator[PassWork]:
        """Yield the work of LoRA adapters: GEMMs, of which adapters with a common input share the first, and the
        additions to the base outputs.
        """
        shared: dict[tuple[int, bool], int] = {}
        for of in self.trained.adapters.get(index, ()):
            key = of.in_features, of.num_experts is not None
            rows = self._adapter_rows(of.num_experts is not None)
            shared[key] = shared.get(key, 0) + of.rank
            yield {"adapters": self._gemm(rows, of.out_features / self.run.tp, of.rank, precision="bf16")}
            moved = (
                self.profile.passes
                * rows
                * of.out_features
                / self.run.tp
                * self.bytes_per_activation
                / self.rates.memory
            )
            yield {"adapters": PassSeconds(4 * moved, 2 * moved)}
        for (into, experts), rank in shared.items():
            yield {"adapters": self._gemm(self._adapter_rows(experts), rank, into / self.run.tp, precision="bf16")}

    def _adapter_rows(self, experts: bool) -> float:
        """Return the number of rows of an adapter's input: tokens, or rows of experts."""
        return (
            self.micro_batch_tokens * self.model.moe.top_k / self.run.tp
            if experts and self.model.moe
            else self.micro_batch_tokens
        )

    def _dispatch_seconds(self, size: float, block: RankPlacement) -> float:
        """Return the seconds of dispatching a rank's tokens, of `size` bytes, to their experts, or of combining the
        results.
        """
        moe, run = self.model.moe, self.run
        assert moe is not None

        def expected_hits(targets: float) -> float:
            """Return how many of these ranks or nodes are expected to hold an expert of a token."""
            return targets * (1 - (1 - 1 / targets) ** moe.top_k)

        if self.profile.dispatch == "node" and block.num_nodes > 1:  # once to each node, then forwarded within the node
            near = self.interconnect.all_to_all_seconds(
                size * expected_hits(block.size), RankPlacement(block.local, block.local)
            )
            return max(
                near, size * expected_hits(block.num_nodes) * (1 - 1 / block.num_nodes) / self.interconnect.exchange
            )
        if self.profile.dispatch == "expert":  # an all-to-all, and an all-gather by the ranks that share an expert
            sent, parts = size * moe.top_k, self.interconnect.make_rank_group(run.expert_tp, 1)
            exchanged = self.interconnect.all_to_all_seconds(
                sent, self.interconnect.make_rank_group(run.ep, run.expert_tp)
            )
            return exchanged + self.interconnect.all_gather_seconds(sent * run.expert_tp, parts)
        return self.interconnect.all_to_all_seconds(size * expected_hits(run.ep) * run.expert_tp, block)

    def _recompute_work(self, work: PassWork) -> PassWork:
        """Return the work that the backward recomputes."""
        run = self.run
        if run.recompute == "full":
            return {"recomputed": PassSeconds(0.0, sum(cost.forward for cost in work.values()))}
        if run.recompute == "none":
            return {}
        mixed = sum(work.get(kind, PassSeconds()).forward for kind in ("attention", "recurrence"))
        seconds = mixed if "attention" in run.modules else 0.0
        if "norm" in run.modules or "activation" in run.modules:
            seconds += NORM_ACTIVATION_SHARE * work["elementwise"].forward
        if "mlp" in run.modules or "moe" in run.modules:
            seconds += FFN_SHARE * work["products"].forward + work.get("expert", PassSeconds()).forward
        return {"recomputed": PassSeconds(0.0, seconds)}

    def _tensor_parallel_work(self, work: PassWork, halves: int, frozen: float) -> PassWork:
        """Return the tensor-parallel communication: four collectives forward and six backward for both halves of a
        layer; without sequence parallelism four all-reduces, which are two each. With `tp_comm_overlap` all of them run
        beside GEMMs, also those that full recomputation repeats.

        The share `frozen` of the weights needs no inputs again for weight gradients, whose GEMMs hide no input gradients.
        """
        run = self.run
        if run.tp == 1:
            return {}
        one = self.interconnect.all_gather_seconds(
            self.micro_batch_tokens * self.model.hidden_size * self.bytes_per_activation,
            self.interconnect.make_rank_group(run.tp, 1),
        )
        every = 10 - 2 * frozen * run.sp
        waited: float = self.profile.tp_waited if run.sp else max(self.profile.tp_waited, 6)
        waited = min(every, waited + 2 * frozen if waited >= 6 else waited)
        waited, again = (0, 0) if run.tp_comm_overlap else (waited, 2 if run.recompute == "full" else 0)
        overlapped = self.rates.exposed_seconds(
            (every - waited) * one, work["products"].total * (every - waited) / every
        )
        forward = min(waited, 4) + again
        share = halves / 2
        return {"tensor": PassSeconds(share * forward * one, share * max(0, waited - 4) * one + overlapped)}

    def _context_parallel_work(self, work: PassWork, mixer: MixerKind) -> PassWork:
        """Return the communication of context parallelism."""
        model, run = self.model, self.run
        if run.cp == 1:
            return {}
        ranks = self.interconnect.make_rank_group(run.cp, run.tp)
        if mixer in COMPRESSED_MIXERS:  # all ranks gather keys and projections of tokens
            narrow = sum(out for out, _ in list_mixer_projection_shapes(model, mixer)[1][1:])
            size = self.micro_batch_tokens * run.cp * narrow * self.bytes_per_activation
            way = self.interconnect.all_gather_seconds(size, ranks)
            return {"context": PassSeconds(way, way)}
        if mixer != "attention":
            way = self._state_exchange_seconds(mixer, ranks)
            return {"context": PassSeconds(way, way)}
        keys = (
            model.key_value_heads
            * (model.query_key_head_dim + model.attention_value_dim)
            / min(run.tp, model.key_value_heads)
        )
        size = self.micro_batch_tokens * run.cp * keys * self.bytes_per_activation
        if run.cp_kind == "alltoall":
            rows = (
                self.micro_batch_tokens
                * self.bytes_per_activation
                * (2 * model.num_attention_heads * model.query_key_head_dim / run.tp + keys)
            )
            way = self.interconnect.all_to_all_seconds(rows, ranks)
            return {"context": PassSeconds(way, way)}
        one = self.interconnect.all_gather_seconds(size, ranks)
        if run.cp_kind == "allgather":
            return {"context": PassSeconds(one, 2 * one)}
        attention = work["attention"]  # a ring sends the next keys and values while attention computes
        exposed = self.rates.exposed_seconds
        return {"context": PassSeconds(exposed(one, attention.forward), exposed(2 * one, attention.inputs))}

    def _state_exchange_seconds(self, mixer: MixerKind, ranks: RankPlacement) -> float:
        """Return the seconds of passing recurrent states or exchanging heads, whichever is less, as `model.recurrence`
        chooses.
        """
        model, run = self.model, self.run
        rows = sum(out for out, _ in list_mixer_projection_shapes(model, mixer)[0][:-1])
        passed = (
            run.micro_batch
            * 2
            * run.cp
            * max(4, self.bytes_per_activation)
            * recurrent_state_elements(model, mixer)
            / run.tp
        )
        exchanged = (
            self.micro_batch_tokens * rows * self.bytes_per_activation / run.tp
        )  # without z, with y of equal width
        if mixer != "mamba1" and (run.cp_kind == "alltoall" or exchanged < passed):
            return self.interconnect.all_to_all_seconds(exchanged, ranks)
        return self.interconnect.all_gather_seconds(passed, ranks)

    def compute_offload_wait(self, layers: int, work: PassWork) -> PassWork:
        """Return the exposed seconds of copying activations of some layers to host memory and back.
        The copies of `layers` layers overlap with their computation `work`.
        """
        if not layers:
            return {}
        kept = saved_activation_elements(self.model, self.run, max_active_ffn_width(self.model))
        way = layers * self.micro_batch_tokens * self.bytes_per_activation * kept / self.interconnect.host
        forward, backward = (sum(cost[part] for cost in work.values()) for part in (0, 1))
        return {"offload": PassSeconds(max(0.0, way - forward), max(0.0, way - backward))}

    def predict_embedding_seconds(self) -> PassWork:
        """Return the seconds of the token embedding for one micro-batch.
        They are for rows read and written, and their gradients added to the table.
        """
        moved = (
            self.micro_batch_tokens * self.model.hidden_size / (self.run.tp if self.run.sp else 1) / self.rates.memory
        )
        return {"elementwise": PassSeconds(4 * moved, 18 * moved)}

    def predict_head_seconds(self) -> PassWork:
        """Return the seconds of output head and loss for one micro-batch, with their gradients, all counted as forward."""
        rows = self.model.vocab_size / self.run.tp
        forward, inputs, weights = self._gemm(self.micro_batch_tokens, rows, self.model.hidden_size, precision="bf16")
        three = forward + inputs + (weights if self.trained.head else 0.0)
        if altup := self.model.altup:  # projections to and from the streams
            others = self._gemm(
                self.micro_batch_tokens, 2 * (altup.streams - 1) * self.model.hidden_size, self.model.hidden_size
            )
            three += others.total / (self.run.tp if self.run.sp else 1)
        each = self.profile.loss_bytes or HEAD_BYTES * self.profile.passes
        moved = each * self.micro_batch_tokens * rows / self.rates.memory
        return {"head": PassSeconds(three + moved)}
