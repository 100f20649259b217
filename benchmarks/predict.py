"""Tokens a second and GPU of Llama-3-8B that `traffic.py`'s counts foretell: predictions, by a simple model of H100s.

What a GPU computes is counted. Communication is modelled: large collectives at 350 GB/s within a machine of eight and at
300 GB/s over machines (eight rails; 45 GB/s for each GPU's own), 5.4 ms of latency a ring of 1,024, a fifth of what is hidden lost by the products
beside it; 1 ms for the one wait of the host in a step (`host_waits.py` counts them).

Legend: P parameters of the whole model; a unit is the weights that are gathered at once, of one layer or several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_trainer.parallel.zero_buffers import ZeroConfig
from mega_trainer.plan.training_layout import TrainingLayout
from mega_trainer.plan.zero3_memory import count_zero3_unit_layers

MODEL = ModelConfig.parse(load_model_preset("llama3-8b"))
LAYERS, D, VOCAB = 32, 4096, 128_256
NVLINK, RAILS, ONE_RAIL = 350e9, 300e9, 45e9
HOP, HOST_WAIT, CONTENTION = 5.4e-3 / 1023, 1e-3, 0.2
BACKWARD = 0.7  # of a micro-batch's time

Regions = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Compute:
    """Seconds of one GPU, of a micro-batch or of a step, from the regions that were counted.

    Attributes:
        tokens: of a micro-batch.
        regions: as `traffic.py` writes them.
        parameters: that were counted: one layer, embedding, head.
        bandwidth: of memory, bytes a second.
        kind: which layers: nothing, or ", fp8 rowwise" and the like.
    """

    tokens: int
    regions: Regions
    parameters: int
    bandwidth: float
    kind: str = ""

    def seconds(self, region: str) -> float:
        """Of one region, once."""
        return self.regions[region]["ms"] / 1e3

    @property
    def whole(self) -> int:
        """P: the counted parameters with all layers."""
        return self.parameters + (LAYERS - 1) * (self.parameters - 2 * VOCAB * D - D)

    def micro(self, mark: str = ", later micro-batches") -> float:
        """Forward and backward of a micro-batch, with what becomes of its gradients where the GPU keeps them."""
        layer = f"layer{self.kind}{mark}"
        found = LAYERS * self.seconds(layer) + sum(self.seconds(p + mark) for p in ("embedding", "head and loss"))
        if f"{layer}: gradient buckets" in self.regions:
            found += LAYERS * self.seconds(f"{layer}: gradient buckets")
            found += sum(self.seconds(f"{p}{mark}: gradient buckets") for p in ("embedding", "head and loss"))
        return found

    def attention(self, kind: str) -> float:
        """All layers', plain or of another kind."""
        return LAYERS * self.seconds(f"attention, {kind}")

    def once(self, ranks: int) -> float:
        """What a step costs once: norm and update of a share of the model, and the host's wait."""
        share = self.whole / ranks / self.parameters
        return share * (self.seconds("gradient norm") + self.seconds("update")) + HOST_WAIT

    @property
    def weights(self) -> float:
        """What is made of all layers' weights once a step, where a rank keeps them."""
        made = f"layer{self.kind}: weights"
        return LAYERS * self.seconds(made) if made in self.regions else 0.0


def gather(size: float, ranks: int) -> float:
    """Seconds of an all-gather to, or a reduce-scatter of, `size` bytes."""
    return size * (ranks - 1) / ranks / (NVLINK if ranks <= 8 else RAILS) + (HOP if ranks > 8 else 1e-5) * ranks


def hidden(comm: float, room: float) -> float:
    """What communication costs beside `room` seconds of products."""
    exposed = max(0.0, comm - room)
    return exposed + CONTENTION * (comm - exposed)


def rate(compute: Compute, micro: float, microbatches: int, once: float, split: int = 1) -> float:
    """Tokens a second and GPU: `micro` seconds a micro-batch that `split` GPUs share, `once` a step."""
    return compute.tokens * microbatches / split / (microbatches * micro + once)


def zero3(compute: Compute, ranks: int, batch: int, more: float = 0.0) -> float:
    """FSDP2: weights gathered for each way, copied out of the buffer (4 bytes each way), gradients widened into it (6)."""
    layers = count_zero3_unit_layers(MODEL, TrainingLayout(compute.tokens, dp=ranks, zero=3))
    units, unit = LAYERS / layers, 2 * layers * compute.whole / LAYERS
    forward = units * gather(unit, ranks)
    backward = forward + units * gather(2 * unit, ranks)
    busy = compute.micro(", gathered weights") + more
    comm = hidden(forward, (1 - BACKWARD) * busy) + hidden(backward, BACKWARD * busy)
    micro = busy + 14 * compute.whole / compute.bandwidth + comm
    return rate(compute, micro, batch // ranks, compute.once(ranks))


def copies_in_machines(compute: Compute, ranks: int, batch: int) -> float:
    """ZeRO-3 within each machine (`zero3_shard: 8`): gathers stay there; the last backward hides the sums over the copies."""
    unit, busy = 2 * compute.whole / LAYERS, compute.micro(", gathered weights")
    gathers = LAYERS * (2 * gather(unit, 8) + gather(2 * unit, 8))
    sums = 2 * 4 * compute.whole / 8 / ONE_RAIL + LAYERS * HOP * ranks / 8
    micro = busy + 14 * compute.whole / compute.bandwidth + hidden(gathers, busy)
    return rate(compute, micro, batch // ranks, compute.once(8) + hidden(sums, BACKWARD * busy))


def zero2(compute: Compute, ranks: int, batch: int) -> float:
    """A sum of every bucket in fp32 each micro-batch, added to a slice; the new weights hide in the next forward."""
    size = ZeroConfig(shard_grads=True).min_bucket_elements(ranks)
    buckets = compute.whole / size
    sums, weights = buckets * gather(4 * size, ranks), buckets * gather(2 * size, ranks)
    busy = compute.micro("")
    micro = busy + 12 * compute.whole / ranks / compute.bandwidth + hidden(sums, BACKWARD * busy)
    once = compute.once(ranks) + compute.weights + hidden(weights, (1 - BACKWARD) * busy)
    return rate(compute, micro, batch // ranks, once)


def tensor_parallel(compute: Compute, ranks: int, batch: int, *, overlap: bool = False) -> float:
    """tp 2 with sp and ZeRO-1: of ten collectives of a layer six are waited for, or with `tp_comm_overlap` none."""
    dp = ranks // 2
    share, size = compute.whole / 2, ZeroConfig(shard_grads=True).min_bucket_elements(dp)
    one = LAYERS * (2 * compute.tokens * D / 2 / NVLINK + 1.5e-5)
    sums, weights = (share / size * gather(width * size, dp) for width in (4, 2))
    half = compute.micro() / 2
    collectives = hidden(10 * one, half) if overlap else 6 * one + hidden(4 * one, half)
    once = (
        compute.once(ranks)
        + compute.weights / 2
        + hidden(sums, BACKWARD * half)
        + hidden(weights, (1 - BACKWARD) * half)
    )
    return rate(compute, half + collectives, batch // dp, once, split=2)


def ring(compute: Compute, batch: int) -> float:
    """Eight GPUs, cp 2 as a ring, ZeRO-2."""
    busy = (compute.micro("") - compute.attention("plain")) / 2 + compute.attention("ring of 2")
    micro = busy + 12 * compute.whole / 8 / compute.bandwidth + CONTENTION * gather(4 * compute.whole, 8)
    return rate(compute, micro, batch // 4, compute.once(8) + compute.weights, split=2)


def predictions(compute: Compute) -> dict[str, float]:
    """Tokens a second and GPU of what users run."""
    documents = compute.attention("eight documents") - compute.attention("plain")
    return {
        "one GPU's compute, a share of 1/8 of the optimizer": rate(
            compute, compute.micro(), 16, compute.once(8) + compute.weights
        ),
        "8 GPUs, ZeRO-3": zero3(compute, 8, 128),
        "8 GPUs, tp 2, sp, ZeRO-1": tensor_parallel(compute, 8, 128),
        "8 GPUs, tp 2, sp, tp_comm_overlap, ZeRO-1": tensor_parallel(compute, 8, 128, overlap=True),
        "8 GPUs, cp 2 ring, ZeRO-2": ring(compute, 128),
        "8 GPUs, ZeRO-3, eight documents": zero3(compute, 8, 128, documents),
        "1,024 GPUs, ZeRO-3": zero3(compute, 1024, 2048),
        "1,024 GPUs, ZeRO-3, zero3_shard 8": copies_in_machines(compute, 1024, 2048),
        "1,024 GPUs, ZeRO-2": zero2(compute, 1024, 2048),
        "1,024 GPUs, tp 2, sp, ZeRO-1": tensor_parallel(compute, 1024, 2048),
    }
