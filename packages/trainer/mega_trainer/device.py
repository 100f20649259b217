"""The device of a rank, and how numbers get there without the host's waiting for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from mega_common.errors import ConfigError
from mega_trainer.config import RunConfig
from mega_trainer.plan.machine import machine_of


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


def machine_here(config: RunConfig) -> str | None:
    """The machine that a run names, or is on, by its GPU; None where neither is known, or no time is predicted for the model."""
    if config.model.has_encoder:
        return None
    if config.machine is not None or config.device == "cpu" or not torch.cuda.is_available():
        return config.machine
    return machine_of(torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory)


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """While the block runs, torch has the same bits each time where it can, and raises an error where it cannot."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(on)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, for which the host waits: a rank whose device waits for other ranks stands here (`watch`)."""
    return tensor.cpu()


def to_device(values: Tensor | Sequence[float], device: torch.device) -> Tensor:
    """A tensor in host memory, or numbers as fp64, on `device`.

    From pinned memory: a copy from any other waits until the device has done all that it was given.
    """
    host = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
    if device.type in ("cpu", "meta"):
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
