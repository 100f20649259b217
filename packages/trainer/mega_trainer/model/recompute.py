"""What the layers of a stage keep of a forward for its backward: as it is, computed again (arXiv:1604.06174), or elsewhere.

Autograd asks a layer, for each tensor that an operation saves, what to keep in its place. An output that is cheap to compute
again, such as a norm's, is left out, for its input is kept anyway; what `offload` is given goes to host memory.

Dropout is drawn by what it is for (`mega_trainer.rng`), so there is no state of a generator to restore.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mega_trainer.model.offload import Offload, OffloadedLayer

Result = TypeVar("Result")
Module = Literal["norm", "activation", "attention", "mlp", "moe"]
CHEAP: tuple[Module, ...] = ("norm", "activation")  # frees half of a layer for a pass or two over what is freed


@dataclass(frozen=True)
class Recompute:
    """Nothing, the `modules` of each layer, or whole layers; `layers` bounds `full` to the first so many of each stage."""

    kind: Literal["none", "selective", "full"] = "none"
    layers: int | None = None
    modules: tuple[Module, ...] = CHEAP

    def covers(self, module: Module) -> bool:
        """Whether a module of each layer is computed again by itself."""
        return self.kind == "selective" and module in self.modules

    def whole(self, layer: int) -> bool:
        """Whether all of that layer of a stage is."""
        return self.kind == "full" and (self.layers is None or layer < self.layers)


class SavedActivations:
    """What a stage's layers keep, under `recompute` and `offload`."""

    def __init__(self, recompute: Recompute | None = None, offload: Offload | None = None) -> None:
        self.recompute, self.offload = recompute or Recompute(), offload
        self._open: _Layer | None = None
        self._last: OffloadedLayer | None = None

    def layer(self, index: int, run: Callable[..., Result], *inputs: Any) -> Result:
        """What the stage's layer `index` makes of its inputs."""
        if index == 0:
            self._last = None  # another forward
        if not torch.is_grad_enabled():
            return run(*inputs)
        if self.recompute.whole(index):
            return recomputed(run, *inputs)
        with self._opened(index):
            return run(*inputs)

    @contextmanager
    def _opened(self, index: int) -> Iterator[None]:
        if self.offload is None and self.recompute.kind != "selective":
            yield
            return
        if self.offload is not None:
            self._last = self.offload.layer(index, self._last)
        self._open = _Layer(self._last)
        with saved_tensors_hooks(self._open.pack, self._open.unpack):
            try:
                yield
            finally:
                self._open.close()
                self._open = None

    def whole(self, module: Module, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """A function of its inputs, of which, if the module is recomputed, these alone are kept."""
        again = torch.is_grad_enabled() and self.recompute.covers(module)
        return recomputed(function, *inputs) if again else function(*inputs)

    def again(self, module: Module, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """A function of tensors that are kept anyway: if the module is recomputed, no later operation keeps its output."""
        y = function(*inputs)
        self.forget(module, y, function, *inputs)
        return y

    def forget(self, module: Module, y: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        """The same for a y that is there already, and equal to `function(*inputs)`."""
        if self._open is not None and self.recompute.covers(module):
            self._open.forget(y, function, *inputs)


def recomputed(function: Callable[..., Result], *inputs: Any) -> Result:
    """The function of its inputs, which is all that is kept of it: the backward computes it again."""
    y: Result = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return y


class _Layer:
    """One layer's forward: what stands for each tensor that autograd saves in it."""

    def __init__(self, offloaded: OffloadedLayer | None) -> None:
        self._offloaded = offloaded
        self._again: dict[int, _Again] = {}

    def forget(self, y: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        kept = [self.pack(x.detach()) for x in inputs]  # detached, or what is kept would lead back to itself
        self._again[y.untyped_storage()._cdata] = _Again(self, y, function, kept)

    def close(self) -> None:
        self._again.clear()  # each is kept by what saves it, and no longer

    def pack(self, tensor: Tensor) -> Any:
        again = self._again.get(tensor.untyped_storage()._cdata)
        if again is not None and again.stands_for(tensor):
            return again, tensor.shape
        return tensor if self._offloaded is None else self._offloaded.pack(tensor)

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, tuple):
            again, shape = packed
            tensor: Tensor = again.value().view(shape)
        else:
            tensor = packed if self._offloaded is None else self._offloaded.unpack(packed)
        return tensor


class _Again:
    """A contiguous tensor, alone in its storage, that is computed when it is asked for: once for all who use it at a time."""

    def __init__(self, layer: _Layer, y: Tensor, function: Callable[..., Tensor], inputs: list[Any]) -> None:
        self._layer, self._function, self._inputs = layer, function, inputs
        self._numel, self._dtype = y.numel(), y.dtype
        self._y, self._storage = weakref.ref(y), weakref.ref(y.untyped_storage())

    def stands_for(self, tensor: Tensor) -> bool:
        """Whether it is the same memory, and has not been freed and used again since."""
        alike = tensor.numel() == self._numel and tensor.dtype == self._dtype and tensor.is_contiguous()
        return alike and self._storage() is tensor.untyped_storage()

    def value(self) -> Tensor:
        y = self._y()
        if y is None:
            with torch.no_grad():
                y = self._function(*map(self._layer.unpack, self._inputs))
            self._y = weakref.ref(y)
        return y.detach()
