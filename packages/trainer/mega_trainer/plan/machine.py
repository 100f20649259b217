"""Machine specifications for planning: GPU peak rates and memory, interconnect within a node, and network between
nodes.

A machine is a file of `machines/`, with figures of the maker's data sheets, or your own file with the same fields. The
achieved shares of these figures are in `efficiency.yaml` for each generation of GPUs, fitted on published runs by
`benchmarks/plan_time.py`; a machine may have its own shares, fitted on a measured run (`machine_calibration`).

Collectives are modelled as rings, as NCCL uses for large messages: each of n ranks sends (n-1)/n of the data. Across nodes, a
ring passes each node once, and uses the network adapters of all its members there in parallel.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from mega_common.errors import ConfigError
from mega_common.strict_config import StrictConfig, load_yaml_mapping
from mega_trainer.plan.flops import find_peak_flops

GpuGeneration = Literal["ampere", "ada", "hopper", "blackwell", "cdna3", "cdna4"]
MEMORY_MARGIN = 0.15  # relative difference of data sheet and driver: 80 GB are 79.1 GiB, 192 GB are 178 GiB
# GPU of a generation for which its efficiencies stand, and its power limit in watts.
REFERENCE_GPUS: dict[GpuGeneration, tuple[str, float]] = {
    "ampere": ("A100", 400), "ada": ("L40S", 350), "hopper": ("H100", 700), "blackwell": ("GB200", 1200), "cdna3": ("MI300X", 750),
    "cdna4": ("MI355X", 1400),
}  # fmt: skip
# Least compute capability of a generation's GPUs; AMD's have none.
CAPABILITIES: dict[GpuGeneration, tuple[int, int]] = {
    "ampere": (8, 0),
    "ada": (8, 9),
    "hopper": (9, 0),
    "blackwell": (10, 0),
}
# Shares of its peak that an H20 reaches in bf16, whose power limit never lowers its clock: 142 of 148 TFLOP/s in cuBLAS's GEMMs
# (github.com/zzc0721/torch-performance-test-data/issues/77), 129 in cuDNN's attention (Dao-AILab/flash-attention/issues/1310).
MAX_GEMM_SHARE, MAX_ATTENTION_SHARE = 0.96, 0.87
_HERE = Path(str(files(__package__ or "mega_trainer.plan")))


class MachineEfficiency(StrictConfig):
    """Achieved fractions of a machine's data sheet figures.
    For GEMMs and attention, they are fractions of the dense peak FLOP/s of their data type; of a machine with `power_w`, those that
    the reference GPU of its generation achieves at its own limit (`MachineSpec.get_sustained_flops`).

    Attributes:
        bf16, fp8: GEMMs, without the time to read their operands, which is added.
        grouped: grouped GEMMs, as of experts, relative to single GEMMs.
        attention: attention kernels of this GPU generation (FlashAttention-2 on Ampere, later cuDNN and FlashAttention-3), in bf16.
        flash2: FlashAttention-2 and similar kernels, in bf16.
        triton: attention kernels written in Triton, in bf16.
        memory: memory bandwidth of elementwise kernels.
        link, network: bandwidth of a GPU's links in its node, and of its network adapter, for large messages.
        exchange: bandwidth of a GPU's network adapter in an all-to-all.
        hop: latency of a ring per rank, in seconds.
        contention: slowdown of GEMMs by concurrent communication, as a share of its time.
        kernel: minimum time of a kernel in seconds.
        nvfp4: GEMMs with 4-bit operands, as `fp8`.
        scan: chunked recurrences (Mamba-2, gated delta nets), as a fraction of the bf16 peak.
        tile: seconds in which a GEMM's tile loads its first operands and writes its results, which no other tile hides.
        power: exponent of the power limit, in which sustained rates grow: 0 if a kernel needs less than the limit, about 1 at
            a constant energy per operation.
    """

    bf16: float = Field(gt=0, le=1)
    fp8: float = Field(gt=0, le=1)
    grouped: float = Field(gt=0, le=1)
    attention: float = Field(gt=0, le=1)
    flash2: float = Field(gt=0, le=1)
    triton: float = Field(gt=0, le=1)
    memory: float = Field(gt=0, le=1)
    link: float = Field(gt=0, le=1)
    network: float = Field(gt=0, le=1)
    exchange: float = Field(gt=0, le=1)
    hop: float = Field(ge=0)
    contention: float = Field(ge=0, le=1)
    kernel: float = Field(ge=0)
    nvfp4: float = Field(0.4, gt=0, le=1)
    scan: float = Field(0.1, gt=0, le=1)
    tile: float = Field(1e-6, ge=0)
    power: float = Field(1.0, ge=0, le=2)


class MachineSpec(StrictConfig):
    """Specification of a machine: its GPUs and their interconnect.
    Rates in GB/s are for one GPU, one way; GB are 1e9 bytes.
    """

    gpu: str = Field(description="name as in torch.cuda.get_device_name, which determines peak rates")
    generation: GpuGeneration = Field(description="GPU generation, which determines the default efficiency")
    memory_gb: PositiveFloat
    memory_gib: PositiveFloat | None = Field(
        None, description="memory that the driver reports, in GiB; default: memory_gb"
    )
    memory_gb_s: PositiveFloat = Field(description="bandwidth of a GPU's memory")
    link_gb_s: PositiveFloat = Field(description="bandwidth from a GPU to the others of its node")
    networks_gb_s: dict[str, PositiveFloat] = Field(
        min_length=1,
        description="bandwidth from a GPU to other nodes, by network name; the first is the default",
    )
    ranks_per_node: PositiveInt
    host_gb_s: PositiveFloat = Field(32, description="bandwidth between a GPU and host memory; default: PCIe 4.0 x16")
    power_w: PositiveFloat | None = Field(
        None,
        description="power limit of a GPU in watts; default: the one under which a GPU of its peak has the efficiency",
    )
    price: PositiveFloat | None = Field(None, description="price of one GPU per hour, in any currency")
    tflops: dict[str, PositiveFloat] = Field({}, description="dense peaks by type, for a GPU that mega does not know")
    efficiency: MachineEfficiency | None = Field(
        None, description="efficiency of this machine; default: that of its generation"
    )

    def get_peak_flops(self, precision: str) -> float:
        """Return the dense peak of one GPU in FLOP/s for `precision`; of bf16 if the GPU does not support it.

        Raises:
            ConfigError: for an unknown GPU without `tflops`.
        """
        found = self._lookup_peak(precision) or self._lookup_peak("bf16")
        if found:
            return found
        raise ConfigError(
            f"machine: the peak rate of the GPU {self.gpu!r} is unknown",
            hint="set its dense peaks in the machine file: tflops: {bf16: ...}",
        )

    def _lookup_peak(self, kind: str) -> float | None:
        """Return the dense peak of a type in FLOP/s, or None."""
        return self.tflops[kind] * 1e12 if kind in self.tflops else find_peak_flops(self.gpu, kind)

    def get_reference_flops(self, precision: str, exponent: float) -> float:
        """Return the FLOP/s of which `MachineEfficiency` has shares: the peak, or a rate that follows the power limit.
        With a power limit it is the peak of the generation's reference GPU under this limit.

        A peak is of the highest clock. Long GEMMs run at a lower one, at which the GPU needs all the power that it may use: so
        their rate grows with the power limit, by `exponent`, and not with the peak.
        """
        peak = self.get_peak_flops(precision)
        if self.power_w is None:
            return peak
        name, watts = REFERENCE_GPUS[self.generation]
        reference_peak = find_peak_flops(name, "bf16")
        assert reference_peak is not None
        power: float = (self.power_w / watts) ** exponent
        return power * reference_peak / self.get_peak_flops("bf16") * peak

    def get_sustained_flops(
        self, precision: str, share: float, exponent: float, limit: float = MAX_GEMM_SHARE
    ) -> float:
        """Return the FLOP/s of kernels with a `share` of `get_reference_flops`.
        It is at most `limit` of the peak, which kernels reach at the highest clock, or `share` of it if that is more.
        """
        at_most = max(limit, share) * self.get_peak_flops(precision)
        return min(at_most, share * self.get_reference_flops(precision, exponent))

    def supports_precision(self, precision: str) -> bool:
        """Return whether the GPU has GEMMs in `precision`."""
        return self._lookup_peak(precision) is not None

    @property
    def usable_memory_bytes(self) -> float:
        """Bytes of one GPU's memory for tensors and everything else (`device_memory`), as its driver reports them."""
        return self.memory_gib * 2**30 if self.memory_gib else self.memory_gb * 1e9

    @property
    def achieved_efficiency(self) -> MachineEfficiency:
        """Achieved fractions of the data sheet's figures: the machine's own if set, else its GPU generation's defaults."""
        return self.efficiency or load_default_efficiencies()[self.generation]

    @property
    def network_gb_s(self) -> float:
        """Bandwidth of the selected network between nodes, in GB/s per GPU and direction."""
        return next(iter(self.networks_gb_s.values()))


def load_plan_table(name: str) -> dict[str, Any]:
    """Return the content of a packaged YAML file of the planner, such as `efficiency.yaml`."""
    return load_yaml_mapping(_HERE / name)


def list_machine_names() -> list[str]:
    """Return the names of the built-in machines, which `load_machine` loads."""
    return sorted(entry.name.removesuffix(".yaml") for entry in (_HERE / "machines").iterdir())


def find_machine_name(device: str, memory_bytes: int) -> str | None:
    """Return the name of the built-in machine with a given GPU and GPU memory, or None.
    `device` is a name as from `torch.cuda.get_device_name`; the memory is about `memory_bytes`.
    """
    words = set(re.split(r"[\s-]+", device.upper()))
    machines = {name: load_machine(name) for name in list_machine_names()}
    peak = find_peak_flops(device, "bf16")  # distinguishes SXM and PCIe cards with the same words in their names
    candidates = {
        name: abs(machine.memory_gb * 1e9 / memory_bytes - 1)
        for name, machine in machines.items()
        if machine.gpu in words and machine.get_peak_flops("bf16") == peak
    }
    name = min(candidates, key=lambda name: candidates[name], default=None)
    return name if name is not None and candidates[name] < MEMORY_MARGIN else None


def load_machine(name: str) -> MachineSpec:
    """Load the specification of a machine by name (`h100`), by name and network (`h100-ethernet`), or from a YAML file.

    Raises:
        ConfigError: for an unknown name, or an invalid file.
    """
    if name.endswith((".yaml", ".yml")):
        return MachineSpec.parse(load_yaml_mapping(Path(name)), source=name)
    known = list_machine_names()
    base, _, network = (name, "", "") if name in known else name.rpartition("-")
    if base == "a100":
        base = "a100-80"
    if name == "a100":
        base, network = "a100-80", ""
    if base not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise ConfigError(
            f"--machine {name} is unknown" + (f"; did you mean {near[0]}?" if near else ""),
            hint=f"use one of {', '.join(known)}, each optionally followed by -ib or -ethernet, or a YAML file",
        )
    machine = MachineSpec.parse(load_plan_table(f"machines/{base}.yaml"), source=base)
    if not network:
        return machine
    if network not in machine.networks_gb_s:
        raise ConfigError(
            f"--machine {name}: {base} has no network {network!r}",
            hint=f"use one of {', '.join(machine.networks_gb_s)}",
        )
    return machine.model_copy(update={"networks_gb_s": {network: machine.networks_gb_s[network]}})


def load_default_efficiencies() -> dict[str, MachineEfficiency]:
    """Return the default efficiency of each GPU generation, {generation: efficiency}.
    It is read from the packaged efficiency.yaml.
    """
    raw = load_plan_table("efficiency.yaml")
    return {
        generation: MachineEfficiency.parse(figures, source="efficiency.yaml") for generation, figures in raw.items()
    }


@dataclass(frozen=True)
class RankPlacement:
    """Placement of a group of ranks on nodes: its size, and how many of its ranks are on one node."""

    size: int
    local: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the group of ranks spans."""
        return -(-self.size // self.local)


@dataclass(frozen=True)
class Interconnect:
    """Achieved bandwidths and latency between the GPUs of a machine, for predicting communication times.

    Attributes:
        link: bytes per second from a GPU to the others of its node, one way, for large messages.
        network: bytes per second from a GPU to other nodes, one way, for large messages.
        exchange: bytes per second from a GPU to other nodes, one way, in an all-to-all.
        hop: seconds from one rank of a ring to the next.
        node: ranks of a node.
        host: bytes per second between a GPU and host memory, one way.
    """

    link: float
    network: float
    exchange: float
    hop: float
    node: int
    host: float

    @classmethod
    def from_machine(cls, machine: MachineSpec, efficiency: MachineEfficiency) -> Interconnect:
        """Return the interconnect of a machine, with its bandwidths reduced to what `efficiency` achieves."""
        link, network = machine.link_gb_s * efficiency.link, machine.network_gb_s * efficiency.network
        exchange = machine.network_gb_s * efficiency.exchange
        host = machine.host_gb_s * efficiency.link
        return cls(link * 1e9, network * 1e9, exchange * 1e9, efficiency.hop, machine.ranks_per_node, host * 1e9)

    def make_rank_group(self, size: int, stride: int) -> RankPlacement:
        """Return the placement of a group of ranks in a job whose ranks fill node by node.
        The group has `size` ranks that are `stride` ranks apart.
        """
        return RankPlacement(size, min(size, max(1, self.node // stride)))

    def all_gather_seconds(self, total: float, ranks: RankPlacement, calls: float = 1) -> float:
        """Return the seconds of an all-gather to, or a reduce-scatter from, `total` bytes over `ranks`, by `calls` calls."""
        if ranks.size == 1:
            return 0.0
        return total * (ranks.size - 1) / ranks.size / self._rank_rate(ranks) + calls * self.hop * ranks.size

    def all_reduce_seconds(self, total: float, ranks: RankPlacement, calls: int = 1) -> float:
        """Return the seconds of an all-reduce of `total` bytes over a group of ranks, in equal parts by `calls` calls.

        It is a ring's reduce-scatter and all-gather, or goes up and down a tree of nodes, each a chain of its ranks: NCCL takes
        the faster one. A tree's latency grows with the logarithm of the nodes.
        """
        if ranks.size == 1:
            return 0.0
        ring = self.all_gather_seconds(total, ranks, calls)
        tree = total / self._rank_rate(ranks) + calls * self.hop * (ranks.local + math.log2(ranks.num_nodes))
        return 2 * min(ring, tree)

    def _rank_rate(self, ranks: RankPlacement) -> float:
        """Return the bytes a second through each rank of a group: of its link, or its node's share of the network."""
        return self.link if ranks.local == ranks.size else min(self.link, ranks.local * self.network)

    def all_to_all_seconds(self, sent: float, ranks: RankPlacement) -> float:
        """Return the seconds of an even all-to-all over a group of ranks.
        Each of the `ranks` sends `sent` bytes, its own share included.
        """
        if ranks.size == 1:
            return 0.0
        near, far = (ranks.local - 1) / ranks.size, (ranks.size - ranks.local) / ranks.size
        return sent * max(near / self.link, far / self.exchange) + self.hop

    def send_seconds(self, size: float, stride: int) -> float:
        """Return the seconds to send a message of `size` bytes to the rank that is `stride` ranks away."""
        return size / (self.link if stride < self.node else self.network) + self.hop
