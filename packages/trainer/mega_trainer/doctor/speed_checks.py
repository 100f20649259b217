"""Speeds of one device: GEMMs, attention, memory and copies to the host, against the machine table of `mega plan`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from mega_trainer.doctor.check_result import CheckResult, make_speed_check_result
from mega_trainer.plan.machine import MAX_ATTENTION_SHARE, MachineSpec

REPEATS = 5  # of each measurement, of which the fastest counts
PART = "speed"
GEMM_SIZE, GEMM_SIZE_CPU = 8192, 768
COPY_BYTES, COPY_BYTES_CPU = 1 << 30, 1 << 26
HEADS, HEAD_DIM, TOKENS, TOKENS_CPU = 32, 128, 8192, 512


def measure_speeds(device: torch.device, machine: MachineSpec | None) -> Iterator[CheckResult]:
    """Yield the speeds of GEMMs, attention, memory, host copies and kernel launches on `device`, against `machine`."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    expected = {} if machine is None else _expected_speeds(machine)
    measured = {
        f"GEMM, {str(dtype)[6:]}": (measure_gemm_tflops(device, dtype), expected.get("bf16"), "TFLOP/s"),
        "attention, causal": (measure_attention_tflops(device, dtype), expected.get("attention"), "TFLOP/s"),
        "memory, copy": (measure_memory_bandwidth(device), expected.get("memory"), "GB/s"),
    }
    if device.type == "cuda":
        measured["device to host, pinned"] = measure_host_copy_bandwidth(device), expected.get("host"), "GB/s"
    for name, (value, wanted, unit) in measured.items():
        yield make_speed_check_result(PART, name, value, wanted, unit)
    micros = 1e6 * measure_kernel_launch_seconds(device)
    yield CheckResult(PART, "smallest kernel", "no expectation", f"{micros:.4g} us", value=micros, unit="us")


def _expected_speeds(machine: MachineSpec) -> dict[str, float]:
    """Return the speeds that a machine of this kind achieves, by field of its efficiency."""
    shares = machine.achieved_efficiency
    gemm = machine.get_sustained_flops("bf16", shares.bf16, shares.power)
    attention = machine.get_sustained_flops("bf16", shares.attention, shares.power, MAX_ATTENTION_SHARE)
    return {
        "bf16": gemm / 1e12, "attention": attention / 1e12,
        "memory": machine.memory_gb_s * shares.memory, "host": machine.host_gb_s * shares.link,
    }  # fmt: skip


def time_fastest_call(call: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the seconds of the fastest of `repeats` calls after a warm-up call, including their work on the device."""
    call()
    times = []
    for _ in range(repeats):
        wait_for_device(device)
        begin = time.perf_counter()
        call()
        wait_for_device(device)
        times.append(time.perf_counter() - begin)
    return min(times)


def wait_for_device(device: torch.device) -> None:
    """Wait until all work of a CUDA device is done.
    On a CPU there is nothing to wait for.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_gemm_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the TFLOP/s of a large square GEMM."""
    size = GEMM_SIZE if device.type == "cuda" else GEMM_SIZE_CPU
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / time_fastest_call(lambda: a @ b, device) / 1e12


def measure_attention_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the TFLOP/s of the forward of causal attention; only the unmasked half of the products is counted."""
    tokens, heads = (TOKENS, HEADS) if device.type == "cuda" else (TOKENS_CPU, 8)
    q, k, v = (torch.randn(1, heads, tokens, HEAD_DIM, device=device, dtype=dtype) for _ in range(3))
    flops = 2 * 2 * heads * tokens * tokens * HEAD_DIM / 2
    return flops / time_fastest_call(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), device) / 1e12


def measure_memory_bandwidth(device: torch.device) -> float:
    """Return the GB/s of memory, reads and writes together, in a copy on the device."""
    size = COPY_BYTES if device.type == "cuda" else COPY_BYTES_CPU
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * size / time_fastest_call(lambda: target.copy_(source), device) / 1e9


def measure_host_copy_bandwidth(device: torch.device) -> float:
    """Return the GB/s of a copy from the device to pinned host memory."""
    source = torch.ones(COPY_BYTES, device=device, dtype=torch.uint8)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    return COPY_BYTES / time_fastest_call(lambda: target.copy_(source, non_blocking=True), device) / 1e9


def measure_kernel_launch_seconds(device: torch.device) -> float:
    """Return the seconds per kernel of 200 one-element kernels that are launched one after another."""
    one, count = torch.zeros(1, device=device), 200

    def add_many() -> None:
        for _ in range(count):
            one.add_(1.0)

    return time_fastest_call(add_many, device) / count
