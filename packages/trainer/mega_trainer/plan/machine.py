"""Machine specifications for planning: GPU peak rates and memory, interconnect within a node, and network between
nodes.

A machine is a file of `machines/`, with figures of its maker's data sheets, or a file of yours with the same fields. What
share of those figures work gets is no data sheet's: `efficiency.yaml` has it, for each generation of GPUs, fitted on
published runs by `benchmarks/plan_time.py`; a machine may have one of its own, fitted on a run there (`plan.fit`).

Collectives are rings, as NCCL has them for large messages: of n ranks each sends (n-1)/n of the data. Over nodes, a ring
passes each node once, and leaves it by the adapters of all its members there, side by side.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from mega_common.errors import ConfigError
from mega_common.strict_config import StrictConfig, load_yaml_mapping
from mega_trainer.plan.flops import find_peak_flops

GpuGeneration = Literal["ampere", "ada", "hopper", "blackwell"]
MEMORY_MARGIN = 0.15  # of a data sheet's, by which what a driver tells may differ: 79.1 GiB of 80 GB, 178 GiB of 192 GB
CONTEXT = 1.5e9  # bytes of a GPU that CUDA, its libraries and NCCL's channels take
SLACK = 1.04  # what torch's allocator holds over what tensors take at their peak: fitted by benchmarks/plan_memory.py
_HERE = files(__package__ or "mega_trainer.plan")


class MachineEfficiency(StrictConfig):
    """Achieved shares of data sheet figures; GEMMs and attention as shares of the dense peak of their type.

    Attributes:
        bf16, fp8: of products so large that reading their factors takes no time; it is added.
        grouped: of what products get, what many small ones side by side do, as those of experts.
        attention: fused for this generation of GPUs (FlashAttention-2 on Ampere, cuDNN's and FlashAttention-3 later), of bf16.
        flash2: FlashAttention-2's and what resembles it, of bf16.
        triton: by kernels written in Triton, of bf16.
        memory: of the bandwidth, by kernels that compute little.
        link, network: of a GPU's links to its node, and of its adapter, by large messages.
        exchange: of a GPU's adapter, by messages of each to all.
        hop: seconds of latency, a rank, of a ring.
        contention: of communication beside products, the share that these lose.
        kernel: seconds that a kernel takes at least.
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


class MachineSpec(StrictConfig):
    """GPUs of a machine and their interconnect. Rates in GB/s are of one GPU, one way; GB are 1e9 bytes."""

    gpu: str = Field(description="as torch.cuda.get_device_name calls it; peak rates are looked up by it")
    generation: GpuGeneration = Field(description="whose efficiency it has")
    memory_gb: PositiveFloat
    memory_gb_s: PositiveFloat = Field(description="bandwidth of a GPU's memory")
    link_gb_s: PositiveFloat = Field(description="from a GPU to the others of its node")
    networks_gb_s: dict[str, PositiveFloat] = Field(
        min_length=1,
        description="from a GPU to other nodes, by the name of the network; the first is meant if none is named",
    )
    ranks_per_node: PositiveInt
    host_gb_s: PositiveFloat = Field(32, description="between a GPU and host memory; PCIe 4.0 x16 if not given")
    price: PositiveFloat | None = Field(None, description="of an hour of one GPU, in any currency")
    tflops: dict[str, PositiveFloat] = Field(
        {}, description="dense peaks by type, of a GPU that is not known by its name"
    )
    efficiency: MachineEfficiency | None = Field(None, description="of this machine itself; default: its generation's")

    def get_peak_flops(self, precision: str) -> float:
        """Return the dense peak in FLOP/s; that of bf16 if the GPU has no fp8.

        Raises:
            ConfigError: when nothing tells it.
        """
        found = self._lookup_peak(precision) or self._lookup_peak("bf16")
        if found:
            return found
        raise ConfigError(
            f"machine: no peak rate of {self.gpu!r} is known", hint="give its dense peaks: tflops: {bf16: ...}"
        )

    def _lookup_peak(self, kind: str) -> float | None:
        """Return the dense peak of a type in FLOP/s, or None."""
        return self.tflops[kind] * 1e12 if kind in self.tflops else find_peak_flops(self.gpu, kind)

    def supports_precision(self, precision: str) -> bool:
        """Return whether the GPU has GEMMs of that type."""
        return self._lookup_peak(precision) is not None

    @property
    def usable_memory_bytes(self) -> float:
        """Bytes of a GPU that tensors can use."""
        return (self.memory_gb * 1e9 - CONTEXT) / SLACK

    @property
    def achieved_efficiency(self) -> MachineEfficiency:
        """Efficiency of this machine, or of its generation."""
        return self.efficiency or load_efficiency()[self.generation]

    @property
    def network_gb_s(self) -> float:
        """Bandwidth of the selected network in GB/s."""
        return next(iter(self.networks_gb_s.values()))


def list_machine_names() -> list[str]:
    """Return the names of the built-in machines."""
    return sorted(entry.name.removesuffix(".yaml") for entry in (_HERE / "machines").iterdir())


def find_machine_name(device: str, memory_bytes: int) -> str | None:
    """Return the built-in machine with this GPU (a name as from `torch.cuda.get_device_name`) and about that memory, or
    None.
    """
    words = set(re.split(r"[\s-]+", device.upper()))
    machines = {name: load_machine(name) for name in list_machine_names()}
    peak = find_peak_flops(device, "bf16")  # a PCIe card has its sibling's words
    alike = {
        name: abs(machine.memory_gb * 1e9 / memory_bytes - 1)
        for name, machine in machines.items()
        if machine.gpu in words and machine.get_peak_flops("bf16") == peak
    }
    name = min(alike, key=lambda name: alike[name], default=None)
    return name if name is not None and alike[name] < MEMORY_MARGIN else None


def load_machine(name: str) -> MachineSpec:
    """Load a machine by name, `h100`, or with one of its networks, `h100-ethernet`; or by the path of a file.

    Raises:
        ConfigError: for a name that is not known, or a file that describes no machine.
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
            f"--machine {name}: no such machine" + (f"; did you mean {near[0]}?" if near else ""),
            hint=f"one of {', '.join(known)}, each also with -ib or -ethernet behind it, or a YAML file",
        )
    machine = MachineSpec.parse(load_yaml_mapping(Path(str(_HERE / "machines" / f"{base}.yaml"))), source=base)
    if not network:
        return machine
    if network not in machine.networks_gb_s:
        raise ConfigError(
            f"--machine {name}: {base} has no network {network!r}", hint=f"one of {', '.join(machine.networks_gb_s)}"
        )
    return machine.model_copy(update={"networks_gb_s": {network: machine.networks_gb_s[network]}})


def load_efficiency() -> dict[str, MachineEfficiency]:
    """Load the efficiency of each GPU generation."""
    raw = load_yaml_mapping(Path(str(_HERE / "efficiency.yaml")))
    return {
        generation: MachineEfficiency.parse(figures, source="efficiency.yaml") for generation, figures in raw.items()
    }


@dataclass(frozen=True)
class RankPlacement:
    """Group of ranks: its size, and how many of its ranks are on one node."""

    size: int
    local: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the group spans."""
        return -(-self.size // self.local)


@dataclass(frozen=True)
class Interconnect:
    """Interconnect of the GPUs of a machine.

    Attributes:
        link: bytes a second from a GPU to those of its node, one way, as large messages get them.
        network: the same to other nodes.
        exchange: the same, when every rank sends to every other.
        hop: seconds from one rank of a ring to the next.
        node: ranks of a node.
        host: bytes a second between a GPU and host memory, one way.
    """

    link: float
    network: float
    exchange: float
    hop: float
    node: int
    host: float

    @classmethod
    def from_machine(cls, machine: MachineSpec, efficiency: MachineEfficiency) -> Interconnect:
        """Return the interconnect of a machine."""
        link, network = machine.link_gb_s * efficiency.link, machine.network_gb_s * efficiency.network
        exchange = machine.network_gb_s * efficiency.exchange
        host = machine.host_gb_s * efficiency.link
        return cls(link * 1e9, network * 1e9, exchange * 1e9, efficiency.hop, machine.ranks_per_node, host * 1e9)

    def make_rank_group(self, size: int, stride: int) -> RankPlacement:
        """Return a group of `size` ranks that are `stride` ranks apart, in a job whose ranks fill node by node."""
        return RankPlacement(size, min(size, max(1, self.node // stride)))

    def all_gather_seconds(self, total: float, ranks: RankPlacement) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `total` bytes."""
        if ranks.size == 1:
            return 0.0
        rate = self.link if ranks.local == ranks.size else min(self.link, ranks.local * self.network)
        return total * (ranks.size - 1) / ranks.size / rate + self.hop * ranks.size

    def all_reduce_seconds(self, total: float, ranks: RankPlacement) -> float:
        """Return the seconds of an all-reduce of `total` bytes: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather_seconds(total, ranks)

    def all_to_all_seconds(self, sent: float, ranks: RankPlacement) -> float:
        """Return the seconds of an even all-to-all in which each rank sends `sent` bytes, its own share included."""
        if ranks.size == 1:
            return 0.0
        near, far = (ranks.local - 1) / ranks.size, (ranks.size - ranks.local) / ranks.size
        return sent * max(near / self.link, far / self.exchange) + self.hop

    def send_seconds(self, size: float, stride: int) -> float:
        """Return the seconds of a message of `size` bytes to the rank that is `stride` ranks away."""
        return size / (self.link if stride < self.node else self.network) + self.hop
