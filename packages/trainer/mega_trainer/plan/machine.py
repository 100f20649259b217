"""Machines that a run may be planned for: what a GPU can do, what joins those of a node, and what joins nodes.

A machine is a file of `machines/`, with figures of its maker's data sheets, or a file of yours with the same fields. What
share of those figures work gets is no data sheet's: `efficiency.yaml` has it, for each generation of GPUs, fitted on
published runs by `benchmarks/plan_time.py`; a machine may have one of its own, fitted on a run there (`plan.fit`).
"""

from __future__ import annotations

import difflib
import re
from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from mega_common.config import Config, load_yaml
from mega_common.errors import ConfigError
from mega_trainer.plan.flops import peak_flops

Generation = Literal["ampere", "ada", "hopper", "blackwell"]
MEMORY_MARGIN = 0.15  # of a data sheet's, by which what a driver tells may differ: 79.1 GiB of 80 GB, 178 GiB of 192 GB
CONTEXT = 1.5e9  # bytes of a GPU that CUDA, its libraries and NCCL's channels take
SLACK = 1.04  # what torch's allocator holds over what tensors take at their peak: fitted by benchmarks/plan_memory.py
_HERE = files(__package__ or "mega_trainer.plan")


class Efficiency(Config):
    """Shares of the figures of a data sheet that work gets. Products and attention: of the dense peak of their type.

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


class Machine(Config):
    """GPUs and what joins them. Rates in GB/s are of one GPU, one way; GB are 1e9 bytes."""

    gpu: str = Field(description="as torch.cuda.get_device_name calls it; peak rates are looked up by it")
    generation: Generation = Field(description="whose efficiency it has")
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
    efficiency: Efficiency | None = Field(None, description="of this machine itself; default: its generation's")

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP/s; of bf16 where the GPU has no fp8.

        Raises:
            ConfigError: when nothing tells it.
        """
        found = self._rate(precision) or self._rate("bf16")
        if found:
            return found
        raise ConfigError(
            f"machine: no peak rate of {self.gpu!r} is known", hint="give its dense peaks: tflops: {bf16: ...}"
        )

    def _rate(self, kind: str) -> float | None:
        return self.tflops[kind] * 1e12 if kind in self.tflops else peak_flops(self.gpu, kind)

    def has(self, precision: str) -> bool:
        """Whether it has products of that type."""
        return self._rate(precision) is not None

    @property
    def room(self) -> float:
        """Bytes of a GPU that tensors can have."""
        return (self.memory_gb * 1e9 - CONTEXT) / SLACK

    @property
    def reached(self) -> Efficiency:
        """What work gets of these figures."""
        return self.efficiency or load_efficiency()[self.generation]

    @property
    def network_gb_s(self) -> float:
        """Of the network that was chosen."""
        return next(iter(self.networks_gb_s.values()))


def machine_names() -> list[str]:
    """Of the machines that are described here."""
    return sorted(entry.name.removesuffix(".yaml") for entry in (_HERE / "machines").iterdir())


def machine_of(device: str, memory_bytes: int) -> str | None:
    """The name of the machine that is described here whose GPU is called so, as `torch.cuda.get_device_name` does, and has
    about that memory; None where none is.
    """
    words = set(re.split(r"[\s-]+", device.upper()))
    machines = {name: load_machine(name) for name in machine_names()}
    peak = peak_flops(device, "bf16")  # a PCIe card has its sibling's words
    alike = {
        name: abs(machine.memory_gb * 1e9 / memory_bytes - 1)
        for name, machine in machines.items()
        if machine.gpu in words and machine.peak("bf16") == peak
    }
    name = min(alike, key=lambda name: alike[name], default=None)
    return name if name is not None and alike[name] < MEMORY_MARGIN else None


def load_machine(name: str) -> Machine:
    """A machine by name, `h100`, or with one of its networks, `h100-ethernet`; or by the path of a file.

    Raises:
        ConfigError: for a name that is not known, or a file that describes no machine.
    """
    if name.endswith((".yaml", ".yml")):
        return Machine.parse(load_yaml(Path(name)), source=name)
    known = machine_names()
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
    machine = Machine.parse(load_yaml(Path(str(_HERE / "machines" / f"{base}.yaml"))), source=base)
    if not network:
        return machine
    if network not in machine.networks_gb_s:
        raise ConfigError(
            f"--machine {name}: {base} has no network {network!r}", hint=f"one of {', '.join(machine.networks_gb_s)}"
        )
    return machine.model_copy(update={"networks_gb_s": {network: machine.networks_gb_s[network]}})


def load_efficiency() -> dict[str, Efficiency]:
    """What GPUs of each generation reach."""
    raw = load_yaml(Path(str(_HERE / "efficiency.yaml")))
    return {generation: Efficiency.parse(figures, source="efficiency.yaml") for generation, figures in raw.items()}
