"""Activation checkpointing: saved activations of a stage's layers are kept, recomputed (arXiv:1604.06174) or offloaded.

Saved-tensor hooks of autograd replace the tensors that a layer's operations save. An output that is cheap to recompute,
such as a norm's, is dropped, since its input is saved anyway; `ActivationOffloadPool` moves others to host memory.

Dropout masks are seeded by their use (`mega_trainer.distributed.rng`), so there is no generator state to restore.

Activation offload (for other state, arXiv:2101.06840): a tensor that autograd saves in an offloaded layer is copied to pinned
memory while the forward continues. In the backward, a layer's tensors are prefetched during the backward of the next layer.
On a CPU the copies are synchronous.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from mega_ckpt.host_staging import allocate_host_memory


class ActivationOffloadPool:
    """Pool of host memory for offloaded activations of the first layers of a pipeline stage.
    It is for the first `layers` layers and reused after each backward.

    Args:
        layers: number of offloaded layers of a stage.
        min_bytes: smaller tensors are not offloaded.
    """

    def __init__(self, layers: int, min_bytes: int) -> None:
        self.layers, self.min_bytes = layers, min_bytes
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin_layer(self, index: int, before: OffloadedActivations | None) -> OffloadedActivations:
        """Return the activation offload state for one forward of a layer.
        `index` is the number of the layer in the stage; `before` is the state of the preceding layer.
        """
        return OffloadedActivations(self, before, keep=index >= self.layers)

    def acquire_buffer(self, nbytes: int, device: torch.device) -> Tensor:
        """Return host memory for a copy of an activation, uint8 [nbytes], pinned for a GPU."""
        free = self._free[nbytes]
        return free.pop() if free else allocate_host_memory(nbytes, pinned=device.type == "cuda")

    def release_buffer(self, memory: Tensor) -> None:
        """Return host memory to the pool for reuse; safe because all copies run in order on one stream."""
        self._free[memory.numel()].append(memory)

    def sync_copy_stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the CUDA stream for copies, which waits for the work enqueued on the device so far; None on a CPU."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]


class OffloadedActivations:
    """Activation tensors that one forward of a layer offloads to host memory.
    With `keep` it offloads none, but its backward prefetches the tensors of the preceding layer.
    """

    def __init__(self, offload: ActivationOffloadPool, before: OffloadedActivations | None, *, keep: bool) -> None:
        self._offload, self._before, self._keep = offload, before, keep
        self._copies: weakref.WeakValueDictionary[int, _HostCopy] = weakref.WeakValueDictionary()

    def pack_saved_tensor(self, tensor: Tensor) -> Any:
        """Copy a saved tensor to host memory, unless it is small or a weight; return the object that autograd keeps."""
        storage = tensor.untyped_storage()
        weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
        if self._keep or weight or storage.nbytes() < self._offload.min_bytes:
            return _Kept(tensor)
        copy = self._copies.get(storage._cdata)
        if copy is None or copy.source() is not storage:  # the storage was freed, and its id reused
            copy = self._copies[storage._cdata] = _HostCopy(self._offload, storage)
        return _View(copy, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def unpack_saved_tensor(self, packed: _Kept | _View) -> Tensor:
        """Return a saved tensor on the device, copied back from host memory if it was offloaded.
        Start to prefetch the offloaded tensors of the layer before, whose backward is next.
        """
        if self._before is not None:
            self._before.prefetch_copies()
        if isinstance(packed, _Kept):
            return packed.tensor
        tensor = torch.empty(0, dtype=packed.dtype, device=packed.copy.device)
        return tensor.set_(packed.copy.wait_for_storage(), packed.offset, packed.shape, packed.stride)

    def prefetch_copies(self) -> None:
        """Start to copy all offloaded tensors of this layer that are still in use back to the device."""
        for copy in list(self._copies.values()):
            copy.start_copy_back()


@dataclass(frozen=True)
class _Kept:
    tensor: Tensor


@dataclass(frozen=True)
class _View:
    copy: _HostCopy
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _HostCopy:
    """Copy of a storage in host memory, alive as long as a view of it."""

    def __init__(self, offload: ActivationOffloadPool, storage: torch.UntypedStorage) -> None:
        self._offload, self.device, self.source = offload, storage.device, weakref.ref(storage)
        self._host = offload.acquire_buffer(storage.nbytes(), self.device)
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        weakref.finalize(self, offload.release_buffer, self._host).atexit = False
        source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        stream = offload.sync_copy_stream(self.device)
        with _on_stream(stream):
            self._host.copy_(source, non_blocking=True)
        if stream is not None:
            source.record_stream(stream)

    def start_copy_back(self) -> None:
        """Start to copy the storage back to the device."""
        if self._back is not None:
            return
        self._back = torch.empty(self._host.numel(), dtype=torch.uint8, device=self.device)
        stream = self._offload.sync_copy_stream(self.device)
        with _on_stream(stream):
            self._back.copy_(self._host, non_blocking=True)
        if stream is not None:
            self._back.record_stream(stream)
            self._arrived = stream.record_event()

    def wait_for_storage(self) -> torch.UntypedStorage:
        """Return the storage, which work enqueued on the device from now on may read."""
        self.start_copy_back()
        assert self._back is not None
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
        return self._back.untyped_storage()


def _on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


Result = TypeVar("Result")
RecomputedModule = Literal["norm", "activation", "attention", "mlp", "moe"]
CHEAP: tuple[RecomputedModule, ...] = (
    "norm",
    "activation",
)  # frees half of a layer's memory for one or two passes over it


@dataclass(frozen=True)
class RecomputePolicy:
    """Policy of activation checkpointing: none, some `modules` of each layer (selective), or whole layers (full).

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


class ActivationCheckpointer:
    """Handler of a pipeline stage's saved activations: kept, recomputed (`recompute`) or offloaded (`offload`)."""

    def __init__(self, recompute: RecomputePolicy | None = None, offload: ActivationOffloadPool | None = None) -> None:
        self.recompute, self.offload = recompute or RecomputePolicy(), offload
        self._open: _LayerHooks | None = None
        self._last: OffloadedActivations | None = None

    def run_layer(self, index: int, run: Callable[..., Result], *inputs: Any) -> Result:
        """Run layer `index` of the stage, with activation checkpointing or offload in training; return its outputs."""
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
        """Return `function(*inputs)`, with activation checkpointing if the policy recomputes `module`.
        Then only the inputs are kept for the backward, which calls the function again.
        """
        recompute = torch.is_grad_enabled() and self.recompute.recomputes_module(module)
        return checkpoint_function(function, *inputs) if recompute else function(*inputs)

    def recompute_output(self, module: RecomputedModule, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `function(*inputs)`, whose output is recomputed for the backward if the policy recomputes `module`.
        The inputs stay in memory anyway; operations that use the output then do not keep it for the backward.
        """
        y = function(*inputs)
        self.drop_output(module, y, function, *inputs)
        return y

    def drop_output(
        self, module: RecomputedModule, y: Tensor, function: Callable[..., Tensor], *inputs: Tensor
    ) -> None:
        """Free y = `function(*inputs)` until the backward recomputes it, if the policy recomputes `module`."""
        # the open layer may be that of a forward in another thread, beside which this backward runs
        own = self._open is not None and self._open.thread == threading.get_ident()
        if self._open is not None and own and self.recompute.recomputes_module(module):
            self._open.drop_output(y, function, *inputs)


def checkpoint_function(function: Callable[..., Result], *inputs: Any) -> Result:
    """Return `function(*inputs)`, keeping only the inputs; the backward calls it again, and restores no RNG state.
    Dropout of mega needs none: its masks are seeded by their use.
    """
    y: Result = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return y


class _LayerHooks:
    """Saved-tensor hooks of one layer's forward."""

    def __init__(self, offloaded: OffloadedActivations | None) -> None:
        self._offloaded, self.thread = offloaded, threading.get_ident()
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
