"""How many bytes of tensors are alive, of those that are made while it is asked: on any device, the meta device too."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mega_trainer.kernels.leaves import Leaves

P = ParamSpec("P")
R = TypeVar("R")


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages from the operation that makes them until they are freed.

    Attributes:
        now, peak: bytes; `peak` since `mark`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._held: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._quiet = False

    def mark(self) -> None:
        """Begin to look for a new peak."""
        self.peak = self.now

    @property
    def sizes(self) -> list[int]:
        """Bytes of each storage that is alive."""
        return [size for _, size in self._held.values()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = set(_storages((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        if not self._quiet:
            self._count(storage for key, storage in _storages(out).items() if key not in known)
        return out

    def as_one(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What the function returns, as one kernel makes it: nothing else is counted."""
        self._quiet, known = True, set(_storages((args, kwargs)))
        out = function(*args, **kwargs)
        self._quiet = False
        self._count(storage for key, storage in _storages(out).items() if key not in known)
        return out

    def _count(self, storages: Iterable[torch.UntypedStorage]) -> None:
        for storage in storages:
            key, size = storage._cdata, storage.nbytes()
            if key not in self._held:
                self._held[key] = weakref.ref(storage, partial(self._gone, key)), size
                self.now += size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int, reference: Any) -> None:
        self.now -= self._held.pop(key)[1]


def _storages(tree: object) -> dict[int, torch.UntypedStorage]:
    found = [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return {storage._cdata: storage for storage in found}


class FusedLeaves(Leaves):
    """Leaves as a compiler makes them, one kernel each, while `live` counts."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self.live = live

    def __call__(self, leaf: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """See `Leaves`."""
        return self.live.as_one(leaf, *args, **kwargs)
