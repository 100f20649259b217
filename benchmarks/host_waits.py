"""How often the host waits for its device in a training step, counted without a device.

    python benchmarks/host_waits.py

Rank 0 of some layouts takes a step on fake tensors of a device that is not there, over a process group that sends nothing.
A dispatch mode notes every read of a number, every operation whose shape depends on numbers, every copy to the host, and
every copy from host memory that is not pinned, which waits too, also inside of FSDP2 (ZeRO-3); an event that the host would
wait for ends the count.
NVSHMEM's exchange has nothing to do. Experts on several ranks without `parallel.dispatch_bound` are not here: their host
waits once a layer and micro-batch.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import record
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from mega_data.batch_loader import StepBatch
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.kernels import blockwise_attention, grouped_gemm
from mega_trainer.model import vocab_parallel_loss
from mega_trainer.objectives.training_objective import TrainingObjective
from mega_trainer.optim import gradient_clipping
from mega_trainer.parallel import nvshmem_dispatch
from mega_trainer.run import build_components, train_step
from mega_trainer.run.train_step import evaluate_losses
from mega_trainer.run.training_run import build_training_state_and_executor

GPU = "gpu"  # what the device that is not there is called
READS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}
)
MODEL = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_kv_heads": 2,
    "vocab_size": 64, "mtp_layers": 1,
}  # fmt: skip
LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "data ranks, ZeRO-2": (2, {"zero": 2}),
    "tensor ranks, sequence parallel": (2, {"tp": 2, "sp": True}),
    "context ranks, all-gather": (2, {"cp": 2, "cp_kind": "allgather"}),
    "context ranks, all-to-all": (2, {"cp": 2, "cp_kind": "alltoall"}),
    "context ranks, ring": (2, {"cp": 2}),
    "ZeRO-3": (2, {"zero": 3, "zero3_layers": 1}),
    "ZeRO-3, copies": (4, {"zero": 3, "zero3_shard": 2}),
    "pipeline ranks": (2, {"pp": 2}),
    "pipeline ranks, zero bubble": (2, {"pp": 2, "schedule": "zb-h1"}),
    "experts, all on each rank": (2, {}),
    "experts, spread, with a bound": (4, {"ep": 4, "dispatch_bound": 1.5}),
    "experts, spread and split, with a bound": (
        4,
        {"tp": 2, "sp": True, "ep": 2, "expert_tp": 2, "dispatch_bound": 2.0},
    ),
    "experts, spread and split, by NVSHMEM": (
        4,
        {"tp": 2, "sp": True, "ep": 2, "expert_tp": 2, "dispatch": "nvshmem", "dispatch_bound": 2.0},
    ),
}
EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 16, "shared_ffn_hidden_size": 16, "aux_loss": 0.01}


class HostWaits(TorchDispatchMode):
    """Notes what makes the host wait, and the line of the trainer that asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        if name in READS and first is not None and first.device.type == GPU:
            self._note(name)
        if name == "_local_scalar_dense":
            return 1.0 if args[0].is_floating_point() else 1
        if name == "_to_copy" and first is not None:
            there = torch.device(kwargs.get("device") or first.device).type
            if (first.device.type, there) == ("cpu", GPU):
                if not getattr(first, "pinned", False):
                    self._note("copy from memory that is not pinned")
                return torch.empty(first.shape, dtype=kwargs.get("dtype") or first.dtype, device=GPU)
            if (first.device.type, there) == (GPU, "cpu"):
                self._note("copy to the host")
        return func(*args, **kwargs)

    def _note(self, what: str) -> None:
        stack = [frame for frame in traceback.extract_stack() if "mega_trainer/" in frame.filename]
        frames = [frame for frame in stack if not frame.filename.endswith("mega_trainer/distributed/device.py")]
        place = frames[-1] if frames else traceback.extract_stack()[0]
        self.found.append(f"{what}: {place.filename.rpartition('mega_trainer/')[2]} {place.name}")


def _pinned(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy.pinned = True  # type: ignore[attr-defined]
    return copy


class _Event:
    """Of a stream, for other streams alone."""

    def record(self, stream: object = None) -> _Event:
        return self


class _Stream:
    """Has nothing to do."""

    def __init__(self, priority: int = 0) -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def wait_stream(self, stream: _Stream) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


def _mesh(group: dist.ProcessGroup, device: str, real: Callable[..., DeviceMesh] = DeviceMesh.from_group) -> DeviceMesh:
    """Ranks are numbers, and not fake ones."""
    with unset_fake_temporarily(), _disable_current_modes():
        return real(group, device)


@contextmanager
def fake_gpu(ranks: int) -> Iterator[None]:
    """Fake tensors on a device of no machine, as rank 0 of a group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with ExitStack() as stack:
        for table in (gradient_clipping.WIDTHS, blockwise_attention.TILE_ELEMENTS, vocab_parallel_loss.CHUNK_ELEMENTS):
            stack.enter_context(mock.patch.dict(table, {GPU: table["cuda"]}))
        stack.enter_context(
            mock.patch.object(gradient_clipping, "ROWS", 2)
        )  # the same calls, and fewer operations in each
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", _pinned))
        stack.enter_context(
            mock.patch.object(train_step, "compute_routing_metrics", return_value={})
        )  # every number here is one
        stack.enter_context(mock.patch.object(grouped_gemm, "_has_grouped_kernel", return_value=True))  # as CUDA
        stack.enter_context(mock.patch.object(grouped_gemm, "_zeroes_empty_groups", return_value=False))
        stack.enter_context(
            mock.patch.object(nvshmem_dispatch, "all_to_all_by_gloo", return_value=SimpleNamespace(wait=lambda: None))
        )
        stack.enter_context(mock.patch.object(DeviceMesh, "from_group", _mesh))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", return_value=[]))  # it knows no such device
        streams = {"Stream": _Stream, "Event": _Event, "stream": nullcontext, "current_stream": _Stream}
        for name, stand_in in {**streams, "current_device": lambda: 0}.items():
            stack.enter_context(mock.patch.object(getattr(torch, GPU), name, stand_in, create=True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield
    dist.destroy_process_group()


def count(name: str, *, documents: bool = True) -> dict[str, list[str]]:
    """What the host waits for in a training step after the first and in an evaluation, of one layout."""
    ranks, parallel = LAYOUTS[name]
    dp = ranks // math.prod(parallel.get(degree, 1) for degree in ("tp", "pp", "cp"))
    raw = {
        "model": {**MODEL, "moe": EXPERTS} if name.startswith("experts") else MODEL,
        "data": {"train": [{"path": "none"}], "seq_length": 32}, "parallel": parallel,
        "batch": {"micro": 1, "global": 2 * dp}, "precision": "bf16", "optimizer": {"clip_grad": 1.0},
    }  # fmt: skip
    config = RunConfig.parse(raw)
    with fake_gpu(ranks), HostWaits():
        device = torch.device(GPU, 0)
        groups = build_components.connect_parallel_groups(config, RankInfo(0, ranks))
        state, executor = build_training_state_and_executor(config, groups, device)
        batch = samples(config.data.seq_length, 2, documents=documents)

        def micro() -> Any:
            return list(split_micro_batches(batch, config, device, groups.cp))

        def train() -> None:
            train_step.train_step(executor, state.optimizer, micro(), tokens=[99.0, 98.0], lr=1e-3, clip=1.0)

        train()
        with HostWaits() as training:
            train()
        for stage in state.stages.values():
            stage.eval()
        with HostWaits() as evaluation:
            evaluate_losses(executor, [micro(), micro()], TrainingObjective(groups, 0).validation_totals)
    return {"training step": training.found, "evaluation": evaluation.found}


def samples(length: int, number: int, *, documents: bool) -> StepBatch:
    """Samples of two documents each."""
    tokens, places = np.zeros((number, length + 1), np.int64), np.arange(length)
    ids = np.tile((places >= length // 3).astype(np.int32), (number, 1))
    positions = np.where(places >= length // 3, places - length // 3, places) if documents else places
    return StepBatch(
        tokens[:, 1:], tokens[:, :-1], np.ones((number, length), bool), np.tile(positions, (number, 1)),
        ids if documents else None, np.arange(number),
    )  # fmt: skip


def count_all(names: Iterable[str]) -> dict[str, dict[str, list[str]]]:
    """`count` of each of these layouts. Once a process: the device's name is for good."""
    _setup_privateuseone_for_python_backend(GPU)
    return {name: count(name) for name in names}


def main() -> None:
    rows = {name: {what: len(waits) for what, waits in found.items()} for name, found in count_all(LAYOUTS).items()}
    for name, row in rows.items():
        print(f"{name:36} {row}")
    record.write("host_waits", rows, ["torch"])


if __name__ == "__main__":
    main()
