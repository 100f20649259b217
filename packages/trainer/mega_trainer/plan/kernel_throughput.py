"""Achieved throughput of a GPU's kernels by the shape of their work: GEMMs, attention, recurrences, and bytes moved.

    GEMM [m, k] x [k, n]  FLOPs / rate x (1 + K0 / k) + operands and result / bandwidth + start of a kernel
    attention             FLOPs of unmasked scores / rate, of which a share is exponentials: the same for heads of any size

K0 is the inner dimension that takes as long as a tile's start and end, which no product hides (`MachineEfficiency.tile`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mega_trainer.plan.machine import MAX_ATTENTION_SHARE, GpuGeneration, MachineEfficiency, MachineSpec

AttentionKernel = Literal["fused", "flash2", "triton", "unfused"]
TILE = 128  # rows of a kernel's tile; attention computes half a tile of masked scores
TILE_ELEMENTS = 128 * 256  # results of a GEMM's tile
TILES = ((128, 256, 1.0), (128, 128, 1.1))  # rows and columns of tiles to choose from, and the time of a result in them
HEAD_SIZE = 128  # elements of a head for which the rates of attention stand
# Multiprocessors of the largest GPU of a generation, which the data sheets' peaks are of.
MULTIPROCESSORS: dict[GpuGeneration, int] = {
    "ampere": 108, "ada": 142, "hopper": 132, "blackwell": 148, "cdna3": 304, "cdna4": 256,
}  # fmt: skip
# Exponentials' share of attention's time for heads of 128: 16 a clock and multiprocessor (arXiv:2407.08608), beside GEMMs.
EXPONENTIALS: dict[GpuGeneration, float] = {
    "ampere": 0.2, "ada": 0.2, "hopper": 0.3, "blackwell": 0.4, "cdna3": 0.3, "cdna4": 0.4,
}  # fmt: skip


@dataclass(frozen=True)
class GpuThroughput:
    """Achieved throughput of a GPU: GEMMs, attention and recurrences in FLOP/s, memory in bytes per second.

    Attributes:
        product: of long GEMMs by precision.
        tile_depth: inner dimension of a GEMM, by precision, that takes as long as the start and end of its tiles.
        multiprocessors: number of them, each of which computes one tile of a GEMM at a time.
        grouped: grouped GEMMs relative to single ones.
        attention: of heads of 128 elements.
        exponentials: share of attention's time at that head size that is the softmax.
        scan: of chunked recurrences.
        memory: bytes per second of elementwise kernels.
        kernel: minimum seconds of a kernel.
        contention: slowdown of GEMMs by concurrent communication, as a share of its time.
    """

    product: Mapping[str, float]
    tile_depth: Mapping[str, float]
    multiprocessors: int
    grouped: float
    attention: float
    exponentials: float
    scan: float
    memory: float
    kernel: float
    contention: float

    @classmethod
    def from_machine(
        cls, machine: MachineSpec, efficiency: MachineEfficiency, attention: AttentionKernel
    ) -> GpuThroughput:
        """Return the throughput of a machine's GPU with a trainer's attention kernel.
        It includes these efficiencies and the GPU's power limit.
        """
        eager = machine.get_peak_flops("fp32")
        shares = {"bf16": efficiency.bf16, "fp8": efficiency.fp8, "nvfp4": efficiency.nvfp4}
        product = {kind: machine.get_sustained_flops(kind, share, efficiency.power) for kind, share in shares.items()}
        double = machine.get_peak_flops("fp64") if machine.supports_precision("fp64") else eager / 64
        product |= {"fp16": product["bf16"], "fp32": eager, "fp64": double}
        one = MULTIPROCESSORS[machine.generation] * 2 * TILE_ELEMENTS
        own = {"flash2": efficiency.flash2, "triton": efficiency.triton}.get(attention, efficiency.attention)
        return cls(
            product,
            {kind: efficiency.tile * rate / one for kind, rate in product.items()},
            MULTIPROCESSORS[machine.generation],
            efficiency.grouped,
            machine.get_sustained_flops("bf16", own, efficiency.power, MAX_ATTENTION_SHARE),
            EXPONENTIALS[machine.generation],
            efficiency.scan * machine.get_peak_flops("bf16"),
            efficiency.memory * machine.memory_gb_s * 1e9,
            efficiency.kernel,
            efficiency.contention,
        )

    def gemm_compute_seconds(self, shape: tuple[float, float, float], precision: str, count: float = 1) -> float:
        """Return the seconds of a GEMM, without the time to read its operands.
        `shape` has its rows, columns and inner dimension; `count` GEMMs run in one kernel.
        """
        rows, columns, inner = shape
        flops = 2.0 * rows * columns * inner * count * self._wave_loss(rows, columns, count)
        return flops * (1 + self.tile_depth[precision] / inner) / self.product[precision]

    def _wave_loss(self, rows: float, columns: float, count: float) -> float:
        """Return the time of a GEMM's tiles / the time if they filled all multiprocessors, with the best tile; less than a wave
        is split along the inner dimension.
        """
        losses = []
        for height, width, slower in TILES:
            tiles = count * math.ceil(rows / height) * math.ceil(columns / width)
            waves = tiles / self.multiprocessors
            whole = tiles * height * width / (count * rows * columns)
            losses.append(slower * whole * (math.ceil(waves) / waves if waves > 1 else 1.0))
        return min(losses)

    def attention_seconds(self, flops: float, head_size: float) -> float:
        """Return the seconds of attention's FLOPs with heads of this size, the mean of keys and values."""
        softmax = self.exponentials * HEAD_SIZE / head_size
        return flops / self.attention * (1 - self.exponentials + softmax)

    def exposed_seconds(self, communication: float, work: float) -> float:
        """Return the seconds that `communication` seconds add to the `work` seconds of computation that they overlap.
        They are the exposed part and the slowdown of the computation.
        """
        exposed = max(0.0, communication - work)
        return exposed + self.contention * (communication - exposed)
