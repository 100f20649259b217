"""Activation checkpointing: saved activations of a stage's layers are kept, recomputed (arXiv:1604.06174) or offloaded.

Saved-tensor hooks of autograd replace the tensors that a layer's operations save. An output that is cheap to recompute,
such as a norm's, is dropped, since its input is saved anyway; `ActivationOffload` moves others to host memory.

Dropout masks are seeded by their use (`mega_trainer.distributed.rng`), so there is no generator state to restore.

Activation offload (for other state, arXiv:2101.06840): a tensor that autograd saves in an offloaded layer is copied to pinned
memory while the forward continues. In the backward, a layer's tensors are prefetched during the backward of the next layer.
On a CPU the copies are synchronous.
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
)  # frees half of a layer's memory for one or two passes over it


@dataclass(frozen=True)
class RecomputePolicy:
    """Policy of activation checkpointing: recompute nothing, the `modules` of each layer (selective), or whole layers
    (full).

    `layers` limits `full` to the first layers of each stage.
    """

    kind: Literal["none", "selective", "full"] = "none"
    layers: int | None = None
    modules: tuple[RecomputedModule, ...] = CHEAP

    def recomputes_module(self, module: RecomputedModule) -> bool:
        """Return whether the policy is selective and recomputes this kind of module in each layer."""
        return self.kind == "selective" and module in self.modules

    def recomputes_layer(self, layer: int) -> bool:
        """Return whether the policy recomputes a whole layer, given by its number in the pipeline stage."""
        return self.kind == "full" and (self.layers is None or layer < self.layers)


class SavedActivations:
    """Handling of the activations that a pipeline stage's layers save for the backward: kept, recomputed (`recompute`)
    or moved to host memory (`offload`).
    """

    def __init__(self, recompute: RecomputePolicy | None = None, offload: ActivationOffload | None = None) -> None:
        self.recompute, self.offload = recompute or RecomputePolicy(), offload
        self._open: _LayerHooks | None = None
        self._last: OffloadedLayer | None = None

    def run_layer(self, index: int, run: Callable[..., Result], *inputs: Any) -> Result:
        """Run layer `index` of the pipeline stage with activation checkpointing and offload, and return its outputs."""
        if index == 0:
            self._last = None  # a new forward begins
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
        """Return `function(*inputs)`; if the policy recomputes `module`, keep only the inputs for the backward, which
        calls the function again.
        """
        recompute = torch.is_grad_enabled() and self.recompute.recomputes_module(module)
        return checkpoint_function(function, *inputs) if recompute else function(*inputs)

    def recompute_output(self, module: RecomputedModule, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `function(*inputs)`, whose inputs stay in memory anyway; if the policy recomputes `module`, operations
        that use the output do not keep it for the backward.
        """
        y = function(*inputs)
        self.drop_output(module, y, function, *inputs)
        return y

    def drop_output(
        self, module: RecomputedModule, y: Tensor, function: Callable[..., Tensor], *inputs: Tensor
    ) -> None:
        """Do not keep y, which equals `function(*inputs)`, for the backward if the policy recomputes `module`."""
        if self._open is not None and self.recompute.recomputes_module(module):
            self._open.drop_output(y, function, *inputs)


def checkpoint_function(function: Callable[..., Result], *inputs: Any) -> Result:
    """Return `function(*inputs)` and keep only its inputs for the backward, which calls the function again (activation
    checkpointing).
    """
    y: Result = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return y


class _LayerHooks:
    """Saved-tensor hooks of one layer's forward."""

    def __init__(self, offloaded: OffloadedLayer | None) -> None:
        self._offloaded = offloaded
        self._dropped: dict[int, _RecomputedTensor] = {}

    def drop_output(self, y: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> None:
        inputs_saved = [self.pack_saved_tensor(x.detach()) for x in inputs]  # detached, to avoid a reference cycle
        self._dropped[y.untyped_storage()._cdata] = _RecomputedTensor(self, y, function, inputs_saved)

    def release_outputs(self) -> None:
        self._dropped.clear()  # from now on only the graph keeps them alive

    def pack_saved_tensor(self, tensor: Tensor) -> Any:
        dropped = self._dropped.get(tensor.untyped_storage()._cdata)
        if dropped is not None and dropped.matches_storage(tensor):
            return dropped, tensor.shape
        return tensor if self._offloaded is None else self._offloaded.pack_saved_tensor(tensor)

    def unpack_saved_tensor(self, packed: Any) -> Tensor:
        if isinstance(packed, tuple):
            dropped, shape = packed
            assert isinstance(dropped, _RecomputedTensor)
            tensor: Tensor = dropped.recompute_value().view(shape)
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
        """Return whether a tensor has the recorded storage, which must not have been freed and reused."""
        same_form = tensor.numel() == self._numel and tensor.dtype == self._dtype and tensor.is_contiguous()
        return same_form and self._storage() is tensor.untyped_storage()

    def recompute_value(self) -> Tensor:
        y = self._y()
        if y is None:
            with torch.no_grad():
                y = self._function(*map(self._layer.unpack_saved_tensor, self._inputs))
            self._y = weakref.ref(y)
        return y.detach()
