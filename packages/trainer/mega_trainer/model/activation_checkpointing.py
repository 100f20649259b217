"""Activation checkpointing: saved activations of a stage's layers are kept, recomputed (arXiv:1604.06174) or offloaded.

Autograd asks a layer, for each tensor that an operation saves, what to keep in its place. An output that is cheap to compute
again, such as a norm's, is left out, for its input is kept anyway; what `offload` is given goes to host memory.

Dropout is drawn by what it is for (`mega_trainer.distributed.rng`), so there is no state of a generator to restore.
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

from mega_trainer.model.activation_offload import ActivationOffload, OffloadedLayer

Result = TypeVar("Result")
RecomputedModule = Literal["norm", "activation", "attention", "mlp", "moe"]
CHEAP: tuple[RecomputedModule, ...] = (
    "norm",
    "activation",
)  # frees half of a layer for a pass or two over what is freed


@dataclass(frozen=True)
class RecomputePolicy:
    """Policy of activation checkpointing: none, the `modules` of each layer, or whole layers; `layers` limits `full` to
    the first layers of each stage.
    """

    kind: Literal["none", "selective", "full"] = "none"
    layers: int | None = None
    modules: tuple[RecomputedModule, ...] = CHEAP

    def recomputes_module(self, module: RecomputedModule) -> bool:
        """Return whether a module of each layer is recomputed by itself."""
        return self.kind == "selective" and module in self.modules

    def recomputes_layer(self, layer: int) -> bool:
        """Return whether that layer of a stage is recomputed as a whole."""
        return self.kind == "full" and (self.layers is None or layer < self.layers)


class SavedActivations:
    """Saved activations of a stage's layers, under `recompute` and `offload`."""

    def __init__(self, recompute: RecomputePolicy | None = None, offload: ActivationOffload | None = None) -> None:
        self.recompute, self.offload = recompute or RecomputePolicy(), offload
        self._open: _LayerHooks | None = None
        self._last: OffloadedLayer | None = None

    def run_layer(self, index: int, run: Callable[..., Result], *inputs: Any) -> Result:
        """Run the stage's layer `index` under the policy and return its outputs."""
        if index == 0:
            self._last = None  # another forward
        if not torch.is_grad_enabled():
            return run(*inputs)
        if self.recompute.recomputes_layer(index):
            return checkpoint_function(run, *inputs)
        with self._saved_tensor_hooks(index):
            return run(*inputs)

    @contextmanager
    def _saved_tensor_hooks(self, index: int) -> Iterator[None]:
        if self.offload is None and self.recompute.kind != "selective":
            yield
            return
        if self.offload is not None:
            self._last = self.offload.begin_layer(index, self._last)
        self._open = _LayerHooks(self._last)
        with saved_tensors_hooks(self._open.pack_saved_tensor, self._open.unpack_saved_tensor):
            try:
                yield
            finally:
                self._open.release_outputs()
                self._open = None

    def checkpoint_module(self, module: RecomputedModule, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Run a function; if its module is recomputed, only the inputs are kept."""
        again = torch.is_grad_enabled() and self.recompute.recomputes_module(module)
        return checkpoint_function(function, *inputs) if again else function(*inputs)

    def recompute_output(self, module: RecomputedModule, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Run a function of tensors that are kept anyway; if its module is recomputed, no later operation keeps its
        output.
        """
        y = function(*inputs)
        self.drop_output(module, y, function, *inputs)
        return y

    def drop_output(
        self, module: RecomputedModule, y: Tensor, function: Callable[..., Tensor], *inputs: Tensor
    ) -> None:
        """Drop an existing output y that equals `function(*inputs)`, if its module is recomputed."""
        if self._open is not None and self.recompute.recomputes_module(module):
            self._open.drop_output(y, function, *inputs)


def checkpoint_function(function: Callable[..., Result], *inputs: Any) -> Result:
    """Run a function and keep only its inputs; the backward computes it again."""
    y: Result = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return y


class _LayerHooks:
    """Saved-tensor hooks of one layer's forward."""

    def __init__(self, offloaded: OffloadedLayer | None) -> None:
        self._offloaded = offloaded
        self._again: dict[int, _RecomputedTensor] = {}

    def drop_output(self, y: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        kept = [
            self.pack_saved_tensor(x.detach()) for x in inputs
        ]  # detached, or what is kept would lead back to itself
        self._again[y.untyped_storage()._cdata] = _RecomputedTensor(self, y, function, kept)

    def release_outputs(self) -> None:
        self._again.clear()  # each is kept by what saves it, and no longer

    def pack_saved_tensor(self, tensor: Tensor) -> Any:
        again = self._again.get(tensor.untyped_storage()._cdata)
        if again is not None and again.matches_storage(tensor):
            return again, tensor.shape
        return tensor if self._offloaded is None else self._offloaded.pack_saved_tensor(tensor)

    def unpack_saved_tensor(self, packed: Any) -> Tensor:
        if isinstance(packed, tuple):
            again, shape = packed
            tensor: Tensor = again.recompute_value().view(shape)
        else:
            tensor = packed if self._offloaded is None else self._offloaded.unpack_saved_tensor(packed)
        return tensor


class _RecomputedTensor:
    """Contiguous tensor, alone in its storage, that is recomputed on demand, once for all concurrent users."""

    def __init__(self, layer: _LayerHooks, y: Tensor, function: Callable[..., Tensor], inputs: list[Any]) -> None:
        self._layer, self._function, self._inputs = layer, function, inputs
        self._numel, self._dtype = y.numel(), y.dtype
        self._y, self._storage = weakref.ref(y), weakref.ref(y.untyped_storage())

    def matches_storage(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the recorded memory, which has not been freed and reused since."""
        alike = tensor.numel() == self._numel and tensor.dtype == self._dtype and tensor.is_contiguous()
        return alike and self._storage() is tensor.untyped_storage()

    def recompute_value(self) -> Tensor:
        y = self._y()
        if y is None:
            with torch.no_grad():
                y = self._function(*map(self._layer.unpack_saved_tensor, self._inputs))
            self._y = weakref.ref(y)
        return y.detach()
