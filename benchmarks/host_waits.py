"""How often the host waits for its device in a training step, counted without a device.

    python benchmarks/host_waits.py

Rank 0 of some layouts takes a step on fake tensors of a device that is not there, over a process group that sends nothing.
A dispatch mode notes every read of a number, every operation whose shape depends on numbers, every copy to the host, and
every copy from host memory that is not pinned, which waits too. Not counted: what goes on inside of FSDP2 (ZeRO-3).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import record
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from mega_data.loader import StepBatch
from mega_trainer import build, step
from mega_trainer.batch import micro_batches
from mega_trainer.config import RunConfig
from mega_trainer.kernels import blocks
from mega_trainer.model import loss
from mega_trainer.model.builder import Builder
from mega_trainer.optim import clip
from mega_trainer.pipeline.run import Executor
from mega_trainer.ranks import Ranks
from mega_trainer.train import around_backward

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
    "data ranks, ZeRO-1": (4, {"zero": 1}),
    "data ranks, ZeRO-2": (4, {"zero": 2}),
    "tensor ranks": (4, {"tp": 2}),
    "tensor ranks, sequence parallel": (4, {"tp": 2, "sp": True}),
    "context ranks, all-gather": (4, {"cp": 2, "cp_kind": "allgather"}),
    "context ranks, all-to-all": (4, {"cp": 2, "cp_kind": "alltoall"}),
}


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
        frames = [frame for frame in traceback.extract_stack() if "mega_trainer" in frame.filename]
        place = frames[-1] if frames else traceback.extract_stack()[0]
        self.found.append(f"{what}: {place.filename.rpartition('mega_trainer/')[2]} {place.name}")


def _pinned(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy.pinned = True  # type: ignore[attr-defined]
    return copy


@contextmanager
def fake_gpu(ranks: int) -> Iterator[None]:
    """Fake tensors on a device of no machine, as rank 0 of a group that sends nothing. Once a process."""
    _setup_privateuseone_for_python_backend(GPU)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with ExitStack() as stack:
        for table in (clip.WIDTHS, blocks.TILE_ELEMENTS, loss.CHUNK_ELEMENTS):
            stack.enter_context(mock.patch.dict(table, {GPU: table["cuda"]}))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", _pinned))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield
    dist.destroy_process_group()


def count(name: str, *, documents: bool = True) -> dict[str, list[str]]:
    """What the host waits for in a training step after the first and in an evaluation, of one layout. Once a process."""
    ranks, parallel = LAYOUTS[name]
    raw = {
        "model": MODEL, "data": {"train": [{"path": "none"}], "seq_length": 32}, "parallel": parallel,
        "batch": {"micro": 1, "global": 8}, "precision": "bf16", "optimizer": {"clip_grad": 1.0},
    }  # fmt: skip
    config = RunConfig.parse(raw)
    with fake_gpu(ranks), HostWaits():
        device = torch.device(GPU, 0)
        groups = build.connect(config, Ranks(0, ranks))
        schedule = build.build_schedule(config, groups)
        builder = Builder(
            config.model, groups, sp=config.parallel.sp, cp_kind=config.parallel.cp_kind, dtype=build.dtype_of(config),
            device=device,
        )  # fmt: skip
        stages = build.build_stages(config, builder, schedule)
        shared = build.share_stages(config, stages)
        optimizer = build.build_optimizer(config, shared, groups)
        executor = Executor(schedule, stages, groups.pp, 0, partial(around_backward, shared))
        batch = samples(config.data.seq_length, 8 // groups.dp.size, documents=documents)

        def micro() -> Any:
            return list(micro_batches(batch, config, device, groups.cp))

        def train() -> None:
            step.train_step(executor, optimizer, micro(), tokens=[99.0, 98.0], lr=1e-3, clip=1.0, riders=lambda: [0.0])

        train()
        with HostWaits() as training:
            train()
        for stage in stages.values():
            stage.eval()
        with HostWaits() as evaluation:
            step.evaluate(executor, [micro(), micro()])
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


def main() -> None:
    context, rows = torch.multiprocessing.get_context("spawn"), {}
    for name in LAYOUTS:
        with context.Pool(1) as pool:
            rows[name] = {what: len(found) for what, found in pool.apply(count, (name,)).items()}
        print(f"{name:36} {rows[name]}")
    record.write("host_waits", rows, ["torch"])


if __name__ == "__main__":
    main()
