"""Tokens a second and GPU of Llama-3-8B that `traffic.py`'s counts foretell: predictions, by a simple model of H100s.

What a GPU computes is counted. Communication is modelled: large collectives at 350 GB/s within a machine of eight and at
300 GB/s over machines (eight rails), 5.4 ms of latency a ring of 1,024, a fifth of what is hidden lost by the products
beside it; 1 ms for each time that the host waits for the device, 30 us for each hop of a sum over the hosts.

Legend: P parameters of the whole model; a unit is a layer's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LAYERS, D, VOCAB = 32, 4096, 128_256
NVLINK, RAILS, ONE_RAIL = 350e9, 300e9, 45e9
HOP, HOST_HOP, HOST_WAIT, CONTENTION = 5.4e-3 / 1023, 30e-6, 1e-3, 0.2
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
        host_waits, host_sums: of a step: waits for the device, and sums over the hosts.
        bucket: elements of a gradient bucket, by the number of ranks that share it.
    """

    tokens: int
    regions: Regions
    parameters: int
    bandwidth: float
    host_waits: int
    host_sums: int
    bucket: Mapping[int, int]
    precision: str = ""

    def seconds(self, region: str) -> float:
        """Of one region, once."""
        return self.regions[region]["ms"] / 1e3

    @property
    def whole(self) -> int:
        """P: the counted parameters with all layers."""
        return self.parameters + (LAYERS - 1) * (self.parameters - 2 * VOCAB * D - D)

    def of_model(self, suffix: str) -> float:
        """Embedding, every layer and head: what `suffix` names of each."""
        layer = self.seconds(f"layer{self.precision}{suffix}")
        return LAYERS * layer + sum(self.seconds(part + suffix) for part in ("embedding", "head and loss"))

    @property
    def micro(self) -> float:
        """Forward and backward of a micro-batch, without what becomes of its gradients."""
        return self.of_model("")

    def attention(self, kind: str) -> float:
        """All layers', plain or of another kind."""
        return LAYERS * self.seconds(f"attention, {kind}")

    def buckets(self, microbatches: int) -> float:
        """What becomes of the gradients of a step's micro-batches, on a GPU that has all of the model."""
        first, later = (self.of_model(mark + ": gradient buckets") for mark in ("", ", later micro-batches"))
        return first + (microbatches - 1) * later

    def optimizer(self, ranks: int) -> float:
        """Norm and update of a share of the model."""
        share = self.whole / ranks / self.parameters
        return share * (self.seconds("gradient norm") + self.seconds("update"))

    def once(self, ranks: int) -> float:
        """What a step costs once: optimizer, and the host's waits."""
        sums = self.host_sums * 2 * (ranks - 1) * HOST_HOP
        return self.optimizer(ranks) + self.host_waits * HOST_WAIT + sums


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
    unit = 2 * compute.whole / LAYERS
    forward = LAYERS * gather(unit, ranks)
    backward = forward + LAYERS * gather(2 * unit, ranks)
    busy = compute.micro + more
    comm = hidden(forward, (1 - BACKWARD) * busy) + hidden(backward, BACKWARD * busy)
    micro = busy + 14 * compute.whole / compute.bandwidth + comm
    return rate(compute, micro, batch // ranks, compute.once(ranks))


def zero2(compute: Compute, ranks: int, batch: int) -> float:
    """A sum of every bucket in fp32 each micro-batch, added to a slice; the new weights hide in the next forward."""
    size = compute.bucket[ranks]
    buckets = compute.whole / size
    sums, weights = buckets * gather(4 * size, ranks), buckets * gather(2 * size, ranks)
    widened = compute.of_model(": gradient buckets") + 12 * compute.whole / ranks / compute.bandwidth
    micro = compute.micro + widened + hidden(sums, BACKWARD * compute.micro)
    return rate(compute, micro, batch // ranks, compute.once(ranks) + hidden(weights, (1 - BACKWARD) * compute.micro))


def tensor_parallel(compute: Compute, ranks: int, batch: int) -> float:
    """tp 2 with sp and ZeRO-1: of ten collectives of a layer eight are waited for."""
    dp, n = ranks // 2, batch // (ranks // 2)
    share, size = compute.whole / 2, compute.bucket[ranks // 2]
    collectives = LAYERS * 8 * (2 * compute.tokens * D / 2 / NVLINK + 1.5e-5)
    sums, weights = (share / size * gather(width * size, dp) for width in (4, 2))
    half = compute.micro / 2
    once = compute.once(ranks) + hidden(sums, BACKWARD * half) + hidden(weights, (1 - BACKWARD) * half)
    micro = half + collectives + compute.buckets(n) / 2 / n
    return rate(compute, micro, n, once, split=2)


def ring(compute: Compute, batch: int) -> float:
    """Eight GPUs, cp 2 as a ring, ZeRO-2."""
    micro = (compute.micro - compute.attention("plain")) / 2 + compute.attention("ring of 2")
    micro += compute.of_model(": gradient buckets") + CONTENTION * gather(4 * compute.whole, 8)
    return rate(compute, micro, batch // 4, compute.once(8), split=2)


def predictions(compute: Compute) -> dict[str, float]:
    """Tokens a second and GPU of what users run."""
    documents = compute.attention("eight documents") - compute.attention("plain")
    alone = rate(compute, compute.micro, 16, compute.buckets(16) + compute.once(8))
    return {
        "one GPU's compute": alone,
        "8 GPUs, ZeRO-3": zero3(compute, 8, 128),
        "8 GPUs, tp 2, sp, ZeRO-1": tensor_parallel(compute, 8, 128),
        "8 GPUs, cp 2 ring, ZeRO-2": ring(compute, 128),
        "8 GPUs, ZeRO-3, eight documents": zero3(compute, 8, 128, documents),
        "1,024 GPUs, ZeRO-3": zero3(compute, 1024, 2048),
        "1,024 GPUs, ZeRO-2": zero2(compute, 1024, 2048),
        "1,024 GPUs, tp 2, sp, ZeRO-1": tensor_parallel(compute, 1024, 2048),
    }
