"""Host memory for copies of boxes, so that training can continue while they are written."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping

import torch

from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox

ALIGNMENT = 64


class HostStaging:
    """Staging area of a checkpoint save in host memory.
    It is one host buffer, allocated at the first copy and reused, and pinned if the tensors are on a CUDA device.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copy_slices_to_host(self, tensors: Mapping[str, ShardedTensor]) -> dict[str, ShardedTensor]:
        """Copy this rank's slices of sharded tensors to host memory and return the copies.
        The next call overwrites them.
        """
        need = compute_staging_buffer_size(tensors)
        if self._buffer.numel() < need:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old buffer before the new one is allocated
            self._buffer = allocate_host_memory(need, pinned=is_on_cuda(tensors))
        return copy_sharded_tensors_to_buffer(tensors, self._buffer)


def copy_sharded_tensors_to_buffer(
    tensors: Mapping[str, ShardedTensor], buffer: torch.Tensor
) -> dict[str, ShardedTensor]:
    """Copy this rank's slices of sharded tensors into `buffer` and return the copies.
    The buffer is uint8 [at least `compute_staging_buffer_size`] in host memory. The call waits for the device once, after all copies
    have started.
    """
    out = {key: ShardedTensor(sharded.shape, []) for key, sharded in tensors.items()}
    devices = set[torch.device]()
    for key, box, view in iterate_buffer_views(tensors, buffer):
        view.copy_(box.tensor.detach(), non_blocking=True)
        out[key].boxes.append(TensorBox(box.offset, view))
        devices.add(box.tensor.device)
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return out


def is_on_cuda(tensors: Mapping[str, ShardedTensor]) -> bool:
    """Return whether any slice of these sharded tensors is on a CUDA device."""
    return any(box.tensor.is_cuda for sharded in tensors.values() for box in sharded.boxes)


def compute_staging_buffer_size(tensors: Mapping[str, ShardedTensor]) -> int:
    """Return the size in bytes of a host buffer for a copy of this rank's slices of `tensors`, each aligned."""
    return sum(_aligned_bytes(box.tensor) for sharded in tensors.values() for box in sharded.boxes)


def iterate_buffer_views(
    tensors: Mapping[str, ShardedTensor], buffer: torch.Tensor
) -> Iterator[tuple[str, TensorBox, torch.Tensor]]:
    """Yield each slice of sharded tensors with its tensor's key and a view of `buffer` for it.
    The buffer is uint8 [at least `compute_staging_buffer_size`]; a view is shaped like the slice. Nothing is copied.
    """
    start = 0
    for key, sharded in tensors.items():
        for box in sharded.boxes:
            data = buffer[start : start + box.tensor.nbytes]
            yield key, box, data.view(box.tensor.dtype).view(box.tensor.shape)
            start += _aligned_bytes(box.tensor)


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def allocate_host_memory(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate exactly `nbytes` of host memory, uint8 [nbytes].
    By itself, torch would round pinned memory up to a power of two. With `pinned`, the memory stays pinned until it is
    freed.
    """
    memory = torch.empty(nbytes, dtype=torch.uint8)
    if pinned:
        pin_host_memory(memory)
    return memory


def pin_host_memory(memory: torch.Tensor) -> None:
    """Pin a tensor in host memory, which may be a mapped file, until it is freed.
    Copies between the tensor and a CUDA device then run at the speed of the bus and without the host.

    Raises:
        MemoryError: when CUDA refuses to pin it.
    """
    if memory.nbytes:
        runtime, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
        if status := int(runtime.cudaHostRegister(address, memory.nbytes, 0)):
            raise MemoryError(f"{memory.nbytes} bytes of host memory cannot be pinned (CUDA error {status})")
        weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, address).atexit = False
