"""How long a rank computes and talks for one layer of one micro-batch: from counted operations, by kind.

    product      FLOPs / (a share of the peak of its type) + its factors and result / bandwidth
    attention    FLOPs of the scores that are seen / (a share of the peak)
    elementwise  bytes / bandwidth, as the trainer's fused kernels move them: benchmarks/traffic.py counts the same
    tensor       collectives of tensor parallelism, waited for or beside products
    context      keys and values, or heads, of other context ranks
    expert       tokens on their way to experts and back

Legend: T tokens of a rank, D model width, F feed-forward width, E experts, V vocabulary. `benchmarks/predict.py` counts the
trainer's real operations instead, of one model on H100s, to say what a change of the code gains; this says it of any model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mega_common.layers import Layer, Mixer
from mega_common.model_config import ModelConfig
from mega_trainer.plan.collectives import Ranks, Wires
from mega_trainer.plan.layers import feed_width, kept_elements, mixing_flops, projections, state_elements, widest
from mega_trainer.plan.machine import Efficiency, Machine
from mega_trainer.plan.shape import RunShape
from mega_trainer.plan.trained import Trained

TILE = 128  # rows that a kernel works on at once: a product of fewer costs as much, attention sees half of one too many
HEAD_BYTES = 7  # that the loss moves for each logit, forward and backward, besides the products
BETWEEN_AGAIN = 0.7  # of work element by element, what norms and activations are, about
BLOCK_AGAIN = 0.6  # of a layer's products, what a feed-forward block's are that its backward computes again, about
KERNELS = 6  # of a layer's work element by element, each way
EXPERT_KERNELS = 20  # that route, sort and pack the rows of experts, each way


@dataclass(frozen=True)
class Habits:
    """How a trainer goes about what its layout leaves open. The defaults are this one's; others describe published runs.

    Attributes:
        attention: its kernel; `unfused` writes and reads all scores.
        passes: bytes of work element by element, as a multiple of those of fused kernels.
        tp_waited: of the ten collectives of a layer under tensor and sequence parallelism, those that nothing hides.
        dispatch: how often a token travels: once to each expert of its, to each rank that has some, or to each node.
        gradient_bytes: of an element of a gradient that is summed over data ranks.
        host: seconds that the host takes to start what a layer with experts does, forward and backward, where it reads how
            many rows each expert has, and so cannot run ahead; no layer takes less.
    """

    attention: Literal["fused", "flash2", "triton", "unfused"] = "fused"
    passes: float = 1.0
    tp_waited: int = 6
    dispatch: Literal["expert", "rank", "node"] = "rank"
    gradient_bytes: int = 4
    host: float = 0.0


class Pass(NamedTuple):
    """Seconds of a forward, and of both halves of a backward: the gradients of inputs, and of weights."""

    forward: float = 0.0
    inputs: float = 0.0
    weights: float = 0.0

    def plus(self, other: Pass) -> Pass:
        """Both, one after the other."""
        return Pass(self.forward + other.forward, self.inputs + other.inputs, self.weights + other.weights)

    @property
    def total(self) -> float:
        """Of all three."""
        return self.forward + self.inputs + self.weights


Work = dict[str, Pass]  # by kind


def added(works: Iterator[Work] | list[Work]) -> Work:
    """All of them, one after the other."""
    out: Work = {}
    for work in works:
        for kind, cost in work.items():
            out[kind] = out[kind].plus(cost) if kind in out else cost
    return out


def times(work: Work, count: float) -> Work:
    """That work, so often."""
    return {kind: Pass(*(count * seconds for seconds in cost)) for kind, cost in work.items()}


@dataclass(frozen=True)
class Rates:
    """What a GPU does in a second: products and attention in FLOP/s, memory in bytes."""

    product: Mapping[str, float]
    grouped: float
    attention: float
    memory: float
    kernel: float
    contention: float

    @classmethod
    def of(cls, machine: Machine, efficiency: Efficiency, habits: Habits) -> Rates:
        """Of a machine, and attention as a trainer does it."""
        peak = machine.peak("bf16")
        eager = machine.peak("fp32")
        product = {
            "bf16": efficiency.bf16 * peak, "fp16": efficiency.bf16 * peak, "fp8": efficiency.fp8 * machine.peak("fp8"),
            "fp32": eager, "fp64": eager / 2,
        }  # fmt: skip
        share = {"flash2": efficiency.flash2, "triton": efficiency.triton}.get(habits.attention, efficiency.attention)
        return cls(
            product,
            efficiency.grouped,
            share * peak,
            efficiency.memory * machine.memory_gb_s * 1e9,
            efficiency.kernel,
            efficiency.contention,
        )

    def hidden(self, talk: float, room: float) -> float:
        """What communication costs beside `room` seconds of other work: what does not fit, and what that work loses."""
        exposed = max(0.0, talk - room)
        return exposed + self.contention * (talk - exposed)


@dataclass(frozen=True)
class Bench:
    """One rank of a run on a machine, and what its work takes there."""

    model: ModelConfig
    run: RunShape
    wires: Wires
    rates: Rates
    habits: Habits
    trained: Trained

    @property
    def tokens(self) -> float:
        """T, of a micro-batch."""
        return self.run.micro_batch * self.run.seq_length / self.run.cp

    @property
    def element(self) -> int:
        """Bytes of an activation."""
        return {"fp64": 8, "fp32": 4}.get(self.run.precision, 2)

    def layer(self, index: int) -> Work:
        """Of one layer."""
        kind = self.model.kind(index)
        products = added([*self._products(kind), *self._experts(index)])
        forward, inputs, weights = products.get("products", Pass())
        products["products"] = Pass(forward, inputs, self.trained.shares[index] * weights)
        work = added([products, self._mixing(kind.mixer, index), self._elementwise(kind), *self._adapters(index)])
        again = self._again(work)
        talk = added([self._tensor(work, halves=sum(map(bool, kind))), self._context(work, kind.mixer)])
        whole = added([work, again, talk])
        waits = self.habits.host - sum(cost.total for cost in whole.values()) if self.model.has_experts(index) else 0.0
        return added([whole, {"host": Pass(waits / 3, 2 * waits / 3)}]) if waits > 0 else whole

    def _product(
        self, rows: float, columns: float, inner: float, count: float = 1, precision: str | None = None
    ) -> Pass:
        """Y = X W^T of [rows, inner] and [columns, inner], and its gradients; `count` such side by side."""
        kind = precision or self.run.precision
        flops = 2.0 * rows * columns * inner * count
        if count > 1:
            flops *= math.ceil(rows / TILE) * TILE / rows / self.rates.grouped
        start = count * self.rates.kernel  # of a kernel, whose first tiles and last wave leave most of the GPU idle
        size = 1 if kind == "fp8" else self.element
        x, w, y = rows * inner * count, columns * inner * count, rows * columns * count
        out = self.element

        def seconds(read: float, written: float) -> float:
            return start + flops / self.rates.product[kind] + (size * read + written) / self.rates.memory

        quantised = [0.0, 0.0]
        if kind == "fp8":  # X and dY are each read, and written in two orders; weights once a step
            quantised = [4 * x / self.rates.memory, 4 * y / self.rates.memory]
            if self.run.zero == 3:
                quantised[0] += 4 * w / self.rates.memory
        # what a weight's gradient is added to is read and written in fp32
        return Pass(
            seconds(x + w, out * y) + quantised[0], seconds(y + w, out * x) + quantised[1], seconds(x + y, 8 * w)
        )

    def _products(self, kind: Layer) -> Iterator[Work]:
        """Of a mixer's projections and of a feed-forward block that all tokens meet."""
        model, run = self.model, self.run
        split, latents = projections(model, kind.mixer)
        widths: dict[int, int] = {}
        for out, into in split[:-1]:
            widths[into] = widths.get(into, 0) + out
        for into, out in widths.items():
            yield {"products": self._product(self.tokens, out / run.tp, into)}
        for out, into in split[-1:]:
            yield {"products": self._product(self.tokens, out, into / run.tp)}
        for out, into in latents:
            yield {"products": self._product(self.tokens / (run.tp if run.sp else 1), out, into)}
        shared = model.moe.shared_ffn_hidden_size if model.moe else 0
        width = shared if kind.feed == "moe" else feed_width(model, kind.feed)
        if width:
            yield {"products": self._product(self.tokens, (1 + model.gated) * width / run.tp, model.hidden_size)}
            yield {"products": self._product(self.tokens, model.hidden_size, width / run.tp)}

    def _mixing(self, mixer: Mixer | None, index: int) -> Work:
        """Of attention's scores; or of a recurrence, about: at the rate of attention, and two of them backward."""
        if mixer == "attention":
            return self._attention(index)
        if mixer is None:
            return {"attention": Pass()}
        one = self.tokens * mixing_flops(self.model, mixer, None, self.run.seq_length) / self.run.tp
        return {"attention": Pass(one / self.rates.attention, 2 * one / self.rates.attention)}

    def _attention(self, index: int) -> Work:
        model, run = self.model, self.run
        window = min(model.window(index) or run.seq_length, run.seq_length)
        seen = window - window * (window - 1) / (2 * run.seq_length) + TILE / 2
        heads, q, v = model.num_attention_heads / run.tp, model.head_size, model.value_size
        unfused = self.habits.attention == "unfused"
        pairs = 2.0 * self.tokens * heads * (run.seq_length if unfused else seen)
        if unfused:  # a product for scores and one for values, and the softmax between them, all through memory
            rate, moved = (
                self.rates.product["bf16"],
                self.tokens * heads * run.seq_length * self.element / self.rates.memory,
            )
            return {"attention": Pass(pairs * (q + v) / rate + 6 * moved, pairs * 2 * (q + v) / rate + 8 * moved)}
        return {
            "attention": Pass(pairs * (q + v) / self.rates.attention, pairs * (3 * q + 2 * v) / self.rates.attention)
        }

    def _elementwise(self, kind: Layer) -> Work:
        """Norms with the sums before them, and what stands between the projections of a mixer and of a feed-forward block."""
        model, run, halves = self.model, self.run, sum(map(bool, kind))
        width = feed_width(model, kind.feed)
        residual = halves * 4 * model.hidden_size / (run.tp if run.sp else 1)
        residual += halves * 2 * model.hidden_size / (run.tp if run.sp else 1) if model.residual_dropout else 0
        there, back = self._between(kind.mixer)
        forward = residual + (there + (3 if model.gated else 2) * width) / run.tp
        backward = residual + (back + (5 if model.gated else 3) * width) / run.tp
        scale = self.tokens * self.element * self.habits.passes / self.rates.memory
        least = KERNELS * self.habits.passes * self.rates.kernel
        return {"elementwise": Pass(max(least, forward * scale), max(least, backward * scale))}

    def _between(self, mixer: Mixer | None) -> tuple[int, int]:
        """Elements that a mixer reads and writes for a token around its scores or states, forward and backward."""
        model = self.model
        if mixer == "attention":
            heads = model.num_attention_heads + model.kv_heads
            turned = 2 * heads * (model.head_size if model.position == "rope" else 0)
            gated = 3 * model.num_attention_heads * model.value_size if model.attention_gate else 0
            both = (3 if model.qk_norm else 1) * turned
            return both + gated, both + gated * 5 // 3
        if mixer is None:
            return 0, 0
        (rows, _), (_, inner) = projections(model, mixer)[0]
        convolved = rows - inner  # and a few numbers for each head
        return 3 * convolved + 4 * inner, 5 * convolved + 7 * inner  # convolution and recurrence, gated norm

    def _experts(self, index: int) -> Iterator[Work]:
        """Router, the products of experts under an even load, the order of their rows, and the way there and back."""
        model, run, moe = self.model, self.run, self.model.moe
        if moe is None or not model.has_experts(index):
            return
        width, mine = model.hidden_size, self.tokens / run.tp
        rows = mine * moe.top_k * run.expert_tp
        experts = moe.num_experts / run.ep
        each = rows / experts
        part = moe.ffn_hidden_size / run.expert_tp
        yield {"products": self._product(mine, moe.num_experts, width, precision="bf16")}
        yield {"products": self._product(each, (1 + model.gated) * part, width, experts)}
        yield {"products": self._product(each, width, part, experts)}
        ordered = 2 * (2 if run.ep > 1 else 1) * rows * width * self.element + 4 * 8 * mine * moe.num_experts
        ordered = max(ordered * self.habits.passes / self.rates.memory, EXPERT_KERNELS * self.rates.kernel)
        yield {"elementwise": Pass(ordered, ordered)}
        block = self.wires.ranks(run.ep * run.expert_tp, 1)
        if block.size > 1:
            way = 2 * self._exchange(mine * width * self.element, block)
            yield {"expert": Pass(way, way)}

    def _adapters(self, index: int) -> Iterator[Work]:
        """The products of adapters of low rank, of which those that see the same have the first in common, and their sums with what
        they are beside: read, added and written side by side; dY read and scaled.
        """
        shared: dict[tuple[int, bool], int] = {}
        for of in self.trained.adapters.get(index, ()):
            key = of.into, of.experts is not None
            rows = self._rows(of.experts is not None)
            shared[key] = shared.get(key, 0) + of.rank
            yield {"adapters": self._product(rows, of.out / self.run.tp, of.rank, precision="bf16")}
            moved = self.habits.passes * rows * of.out / self.run.tp * self.element / self.rates.memory
            yield {"adapters": Pass(4 * moved, 2 * moved)}
        for (into, experts), rank in shared.items():
            yield {"adapters": self._product(self._rows(experts), rank, into / self.run.tp, precision="bf16")}

    def _rows(self, experts: bool) -> float:
        """Of an adapter's input: tokens, or those of experts."""
        return self.tokens * self.model.moe.top_k / self.run.tp if experts and self.model.moe else self.tokens

    def _exchange(self, size: float, block: Ranks) -> float:
        """Seconds in which a rank's tokens, of `size` bytes, reach the ranks of their experts, or their results come back."""
        moe, run = self.model.moe, self.run
        assert moe is not None

        def met(places: float) -> float:
            """Of so many places that share the experts, how many have one of a token's."""
            return places * (1 - (1 - 1 / places) ** moe.top_k)

        if self.habits.dispatch == "node" and block.nodes > 1:  # over the network once to a node, and on from there
            near = self.wires.all_to_all(size * met(block.size), Ranks(block.local, block.local))
            return max(near, size * met(block.nodes) * (1 - 1 / block.nodes) / self.wires.exchange)
        times = moe.top_k if self.habits.dispatch == "expert" else met(run.ep)
        return self.wires.all_to_all(size * times * run.expert_tp, block)

    def _again(self, work: Work) -> Work:
        """What the backward computes a second time."""
        run = self.run
        if run.recompute == "full":
            return {"recomputed": Pass(0.0, sum(cost.forward for cost in work.values()))}
        if run.recompute == "none":
            return {}
        seconds = work["attention"].forward if "attention" in run.modules else 0.0
        if "norm" in run.modules or "activation" in run.modules:
            seconds += BETWEEN_AGAIN * work["elementwise"].forward
        if "mlp" in run.modules or "moe" in run.modules:
            seconds += BLOCK_AGAIN * work["products"].forward + work.get("expert", Pass()).forward
        return {"recomputed": Pass(0.0, seconds)}

    def _tensor(self, work: Work, halves: int) -> Work:
        """Four collectives forward, six backward, of both halves of a layer; without sequence parallelism four all-reduces,
        which are two each.
        """
        run = self.run
        if run.tp == 1:
            return {}
        one = self.wires.gather(self.tokens * self.model.hidden_size * self.element, self.wires.ranks(run.tp, 1))
        waited = self.habits.tp_waited if run.sp else max(self.habits.tp_waited, 6)
        beside = self.rates.hidden((10 - waited) * one, work["products"].total * (10 - waited) / 10)
        forward = min(waited, 4) + (2 if run.recompute == "full" else 0)
        share = halves / 2
        return {"tensor": Pass(share * forward * one, share * max(0, waited - 4) * one + beside)}

    def _context(self, work: Work, mixer: Mixer | None) -> Work:
        model, run = self.model, self.run
        if run.cp == 1 or mixer is None:
            return {}
        ranks = self.wires.ranks(run.cp, run.tp)
        if mixer != "attention":
            way = self._states(mixer, ranks)
            return {"context": Pass(way, way)}
        keys = model.kv_heads * (model.head_size + model.value_size) / min(run.tp, model.kv_heads)
        size = self.tokens * run.cp * keys * self.element
        if run.cp_kind == "alltoall":
            rows = self.tokens * self.element * (2 * model.num_attention_heads * model.head_size / run.tp + keys)
            way = self.wires.all_to_all(rows, ranks)
            return {"context": Pass(way, way)}
        one = self.wires.gather(size, ranks)
        if run.cp_kind == "allgather":
            return {"context": Pass(one, 2 * one)}
        seen = work["attention"]  # a ring passes them on while attention works on those before
        return {"context": Pass(self.rates.hidden(one, seen.forward), self.rates.hidden(2 * one, seen.inputs))}

    def _states(self, mixer: Mixer, ranks: Ranks) -> float:
        """Seconds in which states are passed, or heads exchanged: what is less, as `model.recurrence` chooses."""
        model, run = self.model, self.run
        (rows, _), _ = projections(model, mixer)[0]
        passed = run.micro_batch * 2 * run.cp * max(4, self.element) * state_elements(model, mixer) / run.tp
        exchanged = self.tokens * rows * self.element / run.tp  # without z, and with y, which is as wide
        if run.cp_kind == "alltoall" or exchanged < passed:
            return self.wires.all_to_all(exchanged, ranks)
        return self.wires.gather(passed, ranks)

    def offloaded(self, layers: int, beside: Work) -> Work:
        """What is waited for where activations of some layers go to host memory beside this work of their stage, and come back."""
        if not layers:
            return {}
        kept = kept_elements(self.model, self.run, widest(self.model))
        way = layers * self.tokens * self.element * kept / self.wires.host
        forward, backward = (sum(cost[part] for cost in beside.values()) for part in (0, 1))
        return {"offload": Pass(max(0.0, way - forward), max(0.0, way - backward))}

    def embedding(self) -> Work:
        """Rows read and written, and their gradients added to the table's."""
        moved = self.tokens * self.model.hidden_size / (self.run.tp if self.run.sp else 1) / self.rates.memory
        return {"elementwise": Pass(4 * moved, 18 * moved)}

    def head(self) -> Work:
        """Norm, logits and loss, whose forward makes the gradients too."""
        rows = self.model.vocab_size / self.run.tp
        forward, inputs, weights = self._product(self.tokens, rows, self.model.hidden_size, precision="bf16")
        three = forward + inputs + (weights if self.trained.head else 0.0)
        moved = HEAD_BYTES * self.habits.passes * self.tokens * rows / self.rates.memory
        return {"head": Pass(three + moved)}
