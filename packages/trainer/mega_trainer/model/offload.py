"""Activations in host memory between a forward and its backward (arXiv:2101.06840 does so for other state).

A tensor that autograd saves in an offloaded layer is copied to pinned memory beside the forward's work. In the backward, a
layer's tensors are asked for while the layer after it is at work. On a CPU the same copies are made, at once.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mega_ckpt.staging import host_memory


class Offload:
    """Host memory for the first `layers` layers of a stage, used again when a backward is done with it.

    Args:
        layers: how many of a stage's layers.
        min_bytes: smaller tensors stay where they are.
    """

    def __init__(self, layers: int, min_bytes: int) -> None:
        self.layers, self.min_bytes = layers, min_bytes
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def layer(self, index: int, before: OffloadedLayer | None) -> OffloadedLayer:
        """For one forward of the stage's layer `index`, given the same of the layer before it."""
        return OffloadedLayer(self, before, here=index >= self.layers)

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Memory to copy to, uint8 [nbytes]."""
        free = self._free[nbytes]
        return free.pop() if free else host_memory(nbytes, pinned=device.type == "cuda")

    def give_back(self, memory: Tensor) -> None:
        """Let others have it: copies from and to it are all made on one stream, so in order."""
        self._free[memory.numel()].append(memory)

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The stream of the copies, which from now on waits for what has been asked of the device so far."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]


class OffloadedLayer:
    """One forward of one layer: which of its tensors are in host memory. `here`: none, but those before it may be."""

    def __init__(self, offload: Offload, before: OffloadedLayer | None, *, here: bool) -> None:
        self._offload, self._before, self._here = offload, before, here
        self._copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()

    def pack(self, tensor: Tensor) -> Any:
        """What to keep of a saved tensor."""
        storage = tensor.untyped_storage()
        weight = isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)
        if self._here or weight or storage.nbytes() < self._offload.min_bytes:
            return _Kept(tensor)
        copy = self._copies.get(storage._cdata)
        if copy is None or copy.source() is not storage:  # that memory has been freed, and used again
            copy = self._copies[storage._cdata] = _Copy(self._offload, storage)
        return _View(copy, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def unpack(self, packed: _Kept | _View) -> Tensor:
        """The tensor. The backward is here now, so the layer before is next."""
        if self._before is not None:
            self._before.fetch()
        if isinstance(packed, _Kept):
            return packed.tensor
        made = torch.empty(0, dtype=packed.dtype, device=packed.copy.device)
        return made.set_(packed.copy.fetched(), packed.offset, packed.shape, packed.stride)

    def fetch(self) -> None:
        """Begin to bring back what is still wanted."""
        for copy in list(self._copies.values()):
            copy.fetch()


@dataclass(frozen=True)
class _Kept:
    tensor: Tensor


@dataclass(frozen=True)
class _View:
    copy: _Copy
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class _Copy:
    """A storage in host memory, for as long as some view of it is kept."""

    def __init__(self, offload: Offload, storage: torch.UntypedStorage) -> None:
        self._offload, self.device, self.source = offload, storage.device, weakref.ref(storage)
        self._host = offload.take(storage.nbytes(), self.device)
        self._back: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        weakref.finalize(self, offload.give_back, self._host).atexit = False
        source = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        stream = offload.stream(self.device)
        with _on(stream):
            self._host.copy_(source, non_blocking=True)
        if stream is not None:
            source.record_stream(stream)

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._back is not None:
            return
        self._back = torch.empty(self._host.numel(), dtype=torch.uint8, device=self.device)
        stream = self._offload.stream(self.device)
        with _on(stream):
            self._back.copy_(self._host, non_blocking=True)
        if stream is not None:
            self._back.record_stream(stream)
            self._arrived = stream.record_event()

    def fetched(self) -> torch.UntypedStorage:
        """The storage, for work that is asked of the device from now on."""
        self.fetch()
        assert self._back is not None
        if self._arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
        return self._back.untyped_storage()


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
