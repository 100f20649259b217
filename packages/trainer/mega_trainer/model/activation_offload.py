"""Activation offload: activations in host memory between a forward and its backward (for other state, arXiv:2101.06840).

A tensor that autograd saves in an offloaded layer is copied to pinned memory while the forward continues. In the backward,
a layer's tensors are prefetched during the backward of the next layer. On a CPU the copies are synchronous.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mega_ckpt.host_staging import allocate_host_memory


class ActivationOffload:
    """Pool of host memory for the activations of the first `layers` layers of a pipeline stage, reused after each
    backward.

    Args:
        layers: number of offloaded layers of a stage.
        min_bytes: smaller tensors are not offloaded.
    """

    def __init__(self, layers: int, min_bytes: int) -> None:
        self.layers, self.min_bytes = layers, min_bytes
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin_layer(self, index: int, before: OffloadedLayer | None) -> OffloadedLayer:
        """Return the offload state for one forward of layer `index` of the stage; `before` is the state of the layer
        before.
        """
        return OffloadedLayer(self, before, keep=index >= self.layers)

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


class OffloadedLayer:
    """Tensors that one forward of a layer offloads to host memory; with `keep` it offloads none, but its backward
    prefetches the tensors of the layer before.
    """

    def __init__(self, offload: ActivationOffload, before: OffloadedLayer | None, *, keep: bool) -> None:
        self._offload, self._before, self._keep = offload, before, keep
        self._copies: weakref.WeakValueDictionary[int, _HostCopy] = weakref.WeakValueDictionary()

    def pack_saved_tensor(self, tensor: Tensor) -> Any:
        """Copy a saved tensor to host memory and return the object that autograd keeps in its place; weights and small
        tensors stay on the device.
        """
        storage = tensor.untyped_storage()
        weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
        if self._keep or weight or storage.nbytes() < self._offload.min_bytes:
            return _Kept(tensor)
        copy = self._copies.get(storage._cdata)
        if copy is None or copy.source() is not storage:  # the storage was freed, and its id reused
            copy = self._copies[storage._cdata] = _HostCopy(self._offload, storage)
        return _View(copy, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def unpack_saved_tensor(self, packed: _Kept | _View) -> Tensor:
        """Return the saved tensor on the device, and start to prefetch the offloaded tensors of the layer before, whose
        backward is next.
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

    def __init__(self, offload: ActivationOffload, storage: torch.UntypedStorage) -> None:
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
