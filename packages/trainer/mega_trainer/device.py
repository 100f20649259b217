"""The device of a rank, and how numbers get there without the host's waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mega_common.errors import ConfigError


def pick_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank: `auto` takes a GPU when there is one.

    Raises:
        ConfigError: when CUDA was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ConfigError("device = 'cuda': torch sees no CUDA device here", hint="set device=auto or device=cpu")
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def to_device(values: Tensor | Sequence[float], device: torch.device) -> Tensor:
    """A tensor in host memory, or numbers as fp64, on `device`.

    From pinned memory: a copy from any other waits until the device has done all that it was given.
    """
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
