"""Device of a rank, and copies to and from it that do not make the host wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mega_common.errors import ConfigError


def select_rank_device(name: str, local_rank: int) -> torch.device:
    """Return the device of this rank: `auto` takes the GPU numbered `local_rank` when there is one, else the CPU.

    Raises:
        ConfigError: when `name` is cuda and no GPU is available.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device = 'cuda' requires a GPU, found none", hint="set device=auto or device=cpu")
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


@contextmanager
def deterministic_mode(enabled: bool) -> Iterator[None]:
    """Turn torch's deterministic algorithms on or off while the `with` block runs.
    If on, operations without a reproducible implementation raise an error.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to host memory and wait for the copy.
    A rank whose device waits for other ranks blocks here, as `job.hang_watchdog` reports.
    """
    return tensor.cpu()


def to_device(values: Tensor | Sequence[float], device: torch.device) -> Tensor:
    """Copy a host tensor, or numbers as fp64, to `device` without making the host wait for earlier work.

    Copied from pinned memory: a copy from pageable memory waits for all previous work of the device.
    """
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
    if device.type in ("cpu", "meta"):
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
