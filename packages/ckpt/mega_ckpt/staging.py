"""Host memory that boxes are copied to, so that training can go on while they are written."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import torch

from mega_ckpt.pieces import Box, Sharded

ALIGNMENT = 64


class Staging:
    """One buffer, made at the first copy and used again by later ones; pinned where boxes live on a CUDA device."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Mapping[str, Sharded]) -> dict[str, Sharded]:
        """Copy all boxes; what an earlier call returned is overwritten."""
        on_device = any(box.tensor.is_cuda for sharded in tensors.values() for box in sharded.boxes)
        need = room(tensors)
        if self._buffer.numel() < need:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # let go of the old one before asking for the new
            self._buffer = host_memory(need, pinned=on_device)
        out = {key: Sharded(sharded.shape, []) for key, sharded in tensors.items()}
        for key, box, place in laid_out(tensors, self._buffer):
            place.copy_(box.tensor.detach(), non_blocking=True)
            out[key].boxes.append(Box(box.offset, place))
        if on_device:
            torch.cuda.current_stream().synchronize()
        return out


def room(tensors: Mapping[str, Sharded]) -> int:
    """Bytes of a buffer that `laid_out` cuts."""
    return sum(_room(box.tensor) for sharded in tensors.values() for box in sharded.boxes)


def laid_out(tensors: Mapping[str, Sharded], buffer: torch.Tensor) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """All boxes, with their keys, and for each a part of a buffer, uint8 [at least `room`], as a tensor like the box's."""
    start = 0
    for key, sharded in tensors.items():
        for box in sharded.boxes:
            place = buffer[start : start + box.tensor.nbytes]
            yield key, box, place.view(box.tensor.dtype).view(box.tensor.shape)
            start += _room(box.tensor)


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """So many bytes [nbytes] and no more: torch rounds what it pins up to a power of two. Pinned until they are freed."""
    memory = torch.empty(nbytes, dtype=torch.uint8)
    if pinned and nbytes:
        runtime, place = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
        if status := int(runtime.cudaHostRegister(place, nbytes, 0)):
            raise MemoryError(f"{nbytes} bytes of host memory cannot be pinned (CUDA error {status})")
        weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, place).atexit = False
    return memory
