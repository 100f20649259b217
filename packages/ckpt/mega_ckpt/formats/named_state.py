"""Weights and Adam's moments by the names of the weights, as other trainers' folders have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mega_ckpt.formats.disk import Stored
from mega_ckpt.formats.pickles import Inert
from mega_ckpt.formats.torch_archive import StoredTensor


@dataclass(frozen=True)
class NamedState:
    """What a folder holds.

    Attributes:
        weights: by name.
        moments: by kind (`exp_avg`, `exp_avg_sq`) and the name of the weight; empty where there are none, or nobody knows whose they are.
        steps: updates that the moments have seen, if it says so.
        samples: read until then, if it says so.
        lacks: why there are no moments, where there are none.
    """

    weights: Mapping[str, Stored]
    moments: Mapping[str, Mapping[str, Stored]] = field(default_factory=dict)
    steps: int | None = None
    samples: int | None = None
    lacks: str = "there are no moments of Adam by the names of the weights"

    def renamed(self, name: Callable[[str], str]) -> NamedState:
        """The same by other names."""
        moments = {kind: {name(key): one for key, one in held.items()} for kind, held in self.moments.items()}
        weights = {name(key): one for key, one in self.weights.items()}
        return replace(self, weights=weights, moments=moments)


def plain(path: Path, one: StoredTensor) -> Stored:
    """A tensor that lies in a file by itself."""
    return Stored(path, one.dtype, one.shape, one.read)


def number(value: Any) -> int | None:
    """A whole number, which may be stored as a tensor of one element, or as the value of an enumeration."""
    if isinstance(value, Inert) and len(value.args) == 1:
        (value,) = value.args
    if isinstance(value, StoredTensor | Stored):
        value = value.read().reshape(-1)[:1].sum().item()
    return int(value) if isinstance(value, int | float) else None
