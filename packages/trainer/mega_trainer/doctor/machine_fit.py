"""Machine file for `mega plan`, fitted to the speeds that an examination has measured."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mega_common.errors import ConfigError
from mega_trainer.doctor.check_result import CheckResult
from mega_trainer.plan.machine import GpuGeneration, MachineSpec, load_default_efficiencies, load_machine

GENERATIONS: Mapping[int, GpuGeneration] = {8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell"}
MAX_SHARE = 1.0


def fit_machine_spec(results: Sequence[CheckResult], device: torch.device, machine: str | None) -> MachineSpec:
    """Return the specification of this machine with its measured speeds, for the planner.
    It is a machine of the planner's table with measured efficiencies, or, for an unknown one, figures that are the
    measured speeds themselves, which it achieves in full.

    Figures that were not measured, such as links of one GPU, keep the values of the table, or of its generation.

    Raises:
        ConfigError: for an unknown machine of which the speed of GEMMs or memory was not measured.
    """
    measured = _measured_speeds(results)
    spec = load_machine(machine) if machine is not None else _unknown_machine(measured, device)
    shares = spec.achieved_efficiency
    peak = spec.get_reference_flops("bf16", shares.power) / 1e12
    peaks = {
        "bf16": peak, "attention": peak, "memory": spec.memory_gb_s, "link": spec.link_gb_s,
    }  # fmt: skip
    fitted: dict[str, float] = {
        name: min(MAX_SHARE, round(measured[name] / peak, 4)) for name, peak in peaks.items() if name in measured
    }
    if "attention" in fitted:
        fitted["flash2"] = fitted["attention"]
    if "kernel" in measured:
        fitted["kernel"] = measured["kernel"] / 1e6
    if "hop" in measured:
        fitted["hop"] = measured["hop"] / 1e6
    return spec.model_copy(update={"efficiency": shares.model_copy(update=fitted)})


def _measured_speeds(results: Sequence[CheckResult]) -> dict[str, float]:
    """Return the measured figures by field of `MachineEfficiency`: TFLOP/s, GB/s, and microseconds; of collectives those
    of all ranks.
    """
    values = {(result.part, result.name): result.value for result in results if result.value is not None}
    found: dict[str, float] = {}
    for (part, name), value in values.items():
        head, _, group = name.partition(" in ")
        if part == "speed":
            key = {"GEMM": "bf16", "attention": "attention", "memory": "memory", "smallest kernel": "kernel"}
            found |= {field: value for start, field in key.items() if name.startswith(start)}
        elif part == "collectives" and group.startswith("world") and head in ("all-gather", "latency"):
            size = int(group.split()[-1])
            found["link" if head == "all-gather" else "hop"] = value if head == "all-gather" else value / (2 * size)
    return found


def _unknown_machine(measured: Mapping[str, float], device: torch.device) -> MachineSpec:
    """Return a machine whose figures are the measured ones; without a measured link, that of memory."""
    if missing := [name for name in ("bf16", "memory") if name not in measured]:
        raise ConfigError(
            f"--fit requires the measured speeds of GEMMs and memory, and {' and '.join(missing)} failed or did not run",
            hint="let the examination end, or name the machine with --machine",
        )
    gpu = device.type == "cuda"
    generation = GENERATIONS.get(torch.cuda.get_device_capability(device)[0], "blackwell") if gpu else "ampere"
    name = torch.cuda.get_device_name(device) if gpu else "CPU"
    total = torch.cuda.get_device_properties(device).total_memory if gpu else _host_memory_bytes()
    link = measured.get("link", measured["memory"])
    shares: dict[str, Any] = dict.fromkeys(("bf16", "memory", "link", "network"), MAX_SHARE)
    return MachineSpec(
        gpu=name, generation=generation, memory_gb=round(total / 1e9, 2), memory_gb_s=round(measured["memory"], 2),
        link_gb_s=round(link, 3), networks_gb_s={"measured": round(link, 3)},
        ranks_per_node=torch.cuda.device_count() if gpu else os.cpu_count() or 1,
        tflops={"bf16": round(measured["bf16"], 4), "fp32": round(measured["bf16"], 4)},
        efficiency=load_default_efficiencies()[generation].model_copy(update=shares),
    )  # fmt: skip


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
