"""Which number formats a run computes in."""

from __future__ import annotations

import torch
from mega_common.errors import ConfigError

from mega_trainer.config import RunConfig

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def pick_device(name: str, local_rank: int = 0) -> torch.device:
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


def dtype_of(config: RunConfig) -> torch.dtype:
    """The type of weights and activations; gradients and main weights are fp32, or fp64 in an fp64 run."""
    return DTYPES[config.precision]
