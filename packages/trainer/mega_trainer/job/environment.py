"""Environment of a run: library variables set for a rank before torch is imported (existing values stay), and a
description of the machine and the installed versions.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mega_trainer.config.run_config import RunConfig

STATUS_NOTE = (
    "MEGA_STATUS_NOTE"  # variable with the path of the file that holds the job's exit status, set by `launch.elastic`
)
PACKAGES = ("mega-trainer", "torch", "numpy", "triton", "transformer-engine", "flash-attn", "deep-ep")


def get_library_environment(config: RunConfig) -> dict[str, str]:
    """Return the environment variables of torch, NCCL and other libraries that mega sets for the ranks of a run.

    - `PYTORCH_CUDA_ALLOC_CONF`: expandable segments, which avoid fragmentation.
    - `TORCH_GLOO_LAZY_INIT`: host groups connect only to the ranks they communicate with, to limit open sockets.
    - `CUDA_DEVICE_MAX_CONNECTIONS`: 1 starts kernels in launch order, so that a collective of tensor or context ranks begins
      before the GEMMs that overlap with it occupy the GPU. ZeRO-3's all-gathers need several.
    - `CUBLAS_WORKSPACE_CONFIG`, `NCCL_ALGO`, `NVTE_ALLOW_NONDETERMINISTIC_ALGO`: reductions in a fixed order.
    """
    parallel = config.parallel
    chosen = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_GLOO_LAZY_INIT": "1"}
    if parallel.zero < 3 and max(parallel.tp, parallel.cp) > 1:
        chosen["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if config.deterministic:
        chosen |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    return chosen


def format_environment(config: RunConfig, environment: Mapping[str, str]) -> str:
    """Return a line with the values in `environment` of the variables that mega sets for libraries, noting other values."""
    chosen = get_library_environment(config)
    return ", ".join(
        f"{name}={environment.get(name, '(not set)')}" + ("" if environment.get(name) == value else f" (not {value})")
        for name, value in chosen.items()
    )


def describe_environment() -> dict[str, Any]:
    """Return the name (`host`), GPU or processor (`machine`), `cpus` and package `versions` of this machine, as a dict."""
    import torch

    gpus = torch.cuda.is_available()
    versions = {"python": platform.python_version(), **{name: found for name in PACKAGES if (found := _version(name))}}
    if gpus:
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        versions |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, nccl))}
    return {
        "host": socket.gethostname(),
        "machine": torch.cuda.get_device_name() if gpus else f"{platform.machine()}, no GPU",
        "cpus": os.cpu_count(),
        "versions": versions,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
