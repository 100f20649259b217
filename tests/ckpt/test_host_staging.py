"""Host memory for copies: exactly as much as they need."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mega_ckpt.host_staging import HostStaging, allocate_host_memory
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox


def test_pinned_memory_is_as_long_as_asked_for_and_let_go_with_its_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own pinned allocator rounds up to a power of two: 26 GB become 32."""
    pinned: dict[int, int] = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda place, nbytes, flags: pinned.setdefault(place, nbytes) * 0,
        cudaHostUnregister=lambda place: pinned.pop(place),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = allocate_host_memory(1000, pinned=True)
    assert memory.untyped_storage().nbytes() == 1000
    assert pinned == {memory.data_ptr(): 1000}
    view = memory[:8].view(torch.float32)
    del memory
    gc.collect()
    assert pinned == {view.data_ptr(): 1000}
    del view
    gc.collect()
    assert not pinned


def test_memory_that_is_not_pinned_asks_nothing_of_a_device() -> None:
    assert allocate_host_memory(0, pinned=True).numel() == 0
    assert allocate_host_memory(10, pinned=False).numel() == 10


def test_copies_of_tensors_do_not_wait_for_each_other() -> None:
    class Copies(TorchDispatchMode):
        non_blocking = list[bool]()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == "aten::copy_":
                self.non_blocking.append(args[2])
            return func(*args, **(kwargs or {}))

    with Copies() as copies:
        HostStaging().copy_slices_to_host(
            {name: ShardedTensor((4,), [TensorBox((0,), torch.ones(4))]) for name in "ab"}
        )
    assert copies.non_blocking == [True, True]
