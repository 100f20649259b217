"""Software and devices of this machine: versions, compiler, chosen kernels, and access between GPUs."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from mega_common.progress_logging import format_with_decimal_unit
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.device import select_rank_device
from mega_trainer.doctor.check_result import CheckResult, CheckVerdict
from mega_trainer.job.environment import describe_environment
from mega_trainer.kernels.leaf_compiler import should_compile
from mega_trainer.plan.machine import find_machine_name
from mega_trainer.run.build_components import choose_kernels

PART = "environment"
COMPILERS = ("cc", "gcc", "clang")
SHARED_MEMORY = Path("/dev/shm")
MODELS = {  # whose kernels are chosen
    "Llama": {"num_layers": 1, "hidden_size": 256, "ffn_hidden_size": 256, "num_attention_heads": 2, "vocab_size": 8},
    "soft caps": {
        "num_layers": 1, "hidden_size": 256, "ffn_hidden_size": 256, "num_attention_heads": 2, "vocab_size": 8,
        "attention_softcap": 50.0,
    },
}  # fmt: skip


def detect_machine_name(device: torch.device) -> str | None:
    """Return the name of this machine in the planner's table; None if it is unknown, or the device a CPU."""
    if device.type != "cuda":
        return None
    return find_machine_name(torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory)


def check_environment(device_name: str) -> Iterator[CheckResult]:
    """Yield check results about the software and settings of this machine.
    They show what is installed and chosen; failures are what makes a run slow or impossible.
    """
    device = select_rank_device(device_name, 0)
    found, machine = describe_environment(), detect_machine_name(device)
    yield CheckResult(PART, "machine", "ok", f"{found['machine']}, {found['cpus']} CPUs", machine or "not in the table")
    for package, version in found["versions"].items():
        yield CheckResult(PART, package, "ok", version)
    yield from _check_compiler(device)
    for name, model in MODELS.items():
        config = RunConfig.parse({"model": model, "data": {"train": "none"}, "device": device_name})
        yield CheckResult(PART, f"kernels, {name}", "ok", str(choose_kernels(config, device)).removeprefix("kernels: "))
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        yield CheckResult(
            PART, f"free in {SHARED_MEMORY}", "ok", f"{format_with_decimal_unit(free)}B", value=free, unit="B"
        )
    if device.type == "cuda":
        yield from _check_gpus()


def _check_compiler(device: torch.device) -> Iterator[CheckResult]:
    """Yield the C compiler, which GPUs need for compiled kernels, and whether `compile: auto` compiles."""
    path = next(filter(None, map(shutil.which, COMPILERS)), None)
    needed = device.type == "cuda"
    verdict: CheckVerdict = "failed" if needed and path is None else "ok"
    yield CheckResult(PART, "C compiler", verdict, path or "none", "one of " + ", ".join(COMPILERS) if needed else "")
    compiles = should_compile("auto", device)
    verdict = "failed" if needed and not compiles else "ok"
    words = "compiled kernels" if compiles else "plain kernels"
    yield CheckResult(PART, "compile: auto", verdict, words, "compiled kernels" if needed else "")


def _check_gpus() -> Iterator[CheckResult]:
    """Yield the cuDNN version, and whether every GPU reaches every other directly."""
    yield CheckResult(PART, "cudnn", "ok", str(torch.backends.cudnn.version()))  # type: ignore[no-untyped-call]
    pairs = list(itertools.permutations(range(torch.cuda.device_count()), 2))
    far = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if pairs:
        words = f"{len(pairs) - len(far)} of {len(pairs)} pairs"
        yield CheckResult(PART, "direct access between GPUs", "failed" if far else "ok", words, "all pairs")
