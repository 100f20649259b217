"""Gradients summed over data ranks: each ZeRO level gives the bits of the one below, whatever gradients are missing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from mega_ckpt.tensor_pieces import TensorPiece
from mega_trainer.distributed.comm import CommGroup, CommTrafficCounter, all_gather_into
from mega_trainer.distributed.process_groups import ProcessGroupCache
from mega_trainer.parallel import zero_buffers
from mega_trainer.parallel.gradient_buckets import SLICE_ELEMENTS, MicroBatchGradientBucket
from mega_trainer.parallel.parameter_info import make_parameter
from mega_trainer.parallel.zero_buffers import FlatBufferStage, ZeroConfig, flatten_parameters
from mega_trainer.verify.case_trainer import CaseTrainer
from mega_trainer.verify.layout_case import LayoutCase

WIDTHS = [3, 5, 4, 7]  # no multiple of the ranks: buckets are padded


class Toy(nn.Module):
    """y = x * sum of the chosen parameters, so that a micro-batch's gradient is x for these and missing for others."""

    def __init__(self, data: CommGroup, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            make_parameter(
                (n,), [TensorPiece.whole_tensor(f"w{n}", (n,))], data=data, dtype=dtype, device=torch.device("cpu")
            )
            for n in WIDTHS
        )

    def forward(self, x: float, chosen: list[int]) -> torch.Tensor:
        return sum((self.weights[index].sum() * x for index in chosen), torch.zeros(()))


def world(log: CommTrafficCounter | None = None) -> CommGroup:
    size = dist.get_world_size()
    return CommGroup("dp", tuple(range(size)), dist.get_rank(), dist.group.WORLD, ordered=True, log=log)


def whole_gradients(stage: FlatBufferStage) -> list[list[float]]:
    """Each parameter's reduced gradient, put together from the ranks' slices."""
    found = {}
    for buffer in stage.buffers:
        for shard in buffer.shards:
            parts = [shard.grads]
            if buffer.sharded:
                parts = [torch.empty_like(shard.grads) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, shard.grads)
            for parameter, place in shard.gathered.param_slices.items():
                found[parameter.numel()] = torch.cat(parts)[place].tolist()
    return [found[n] for n in WIDTHS]


SHARINGS = {
    "0": ZeroConfig(shard_grads=False, bucket_elements=6),
    "0, each backward": ZeroConfig(shard_grads=False, reduce_every_microbatch=True, bucket_elements=6),
    "1": ZeroConfig(shard_grads=True, bucket_elements=6),
    "2": ZeroConfig(shard_grads=True, reduce_every_microbatch=True, bucket_elements=6),
}


def lacking_gradients(reduce_dtype: torch.dtype | None = None) -> dict[str, list[list[list[float]]]]:
    """Two steps of three micro-batches in which ranks lack different gradients, and one parameter never has any."""
    rank, out = dist.get_rank(), {}
    for name, sharing in SHARINGS.items():
        toy = Toy(world())
        stage = flatten_parameters(toy, replace(sharing, reduce_dtype=reduce_dtype))
        out[name] = []
        for step in range(2):
            stage.begin_step()
            for micro in range(3):
                with stage.backward_context(last=micro == 2):
                    chosen = [index for index in range(3) if (index + rank + micro) % 3]
                    toy(1.0 + 10 * rank + 100 * micro + 1000 * step, chosen).backward()
            stage.finish_gradients()
            out[name].append(whole_gradients(stage))
    return out


def test_missing_gradients_are_zeros_and_stall_nothing() -> None:
    expected = []
    for step in range(2):
        sums = [0.0] * 4
        for rank in range(2):
            for micro in range(3):
                for index in range(3):
                    if (index + rank + micro) % 3:
                        sums[index] += 1.0 + 10 * rank + 100 * micro + 1000 * step
        expected.append([[total] * n for total, n in zip(sums, WIDTHS, strict=True)])
    for found in run_ranks(lacking_gradients, 2, timeout=60):
        assert found == dict.fromkeys(SHARINGS, expected)


def test_sums_in_bf16_round_what_is_sent_and_nothing_else() -> None:
    """Micro-batches are added in fp32 before the one sum over the ranks, and after the sums of each."""

    def bf16(value: float) -> float:
        return torch.tensor(value).bfloat16().item()

    def gradient(rank: int, micro: int, index: int, step: int) -> float:
        return (1.0 + 10 * rank + 100 * micro + 1000 * step) if (index + rank + micro) % 3 and index < 3 else 0.0

    once, each = [], []
    for step in range(2):
        parts = [[[gradient(rank, micro, i, step) for micro in range(3)] for rank in range(2)] for i in range(4)]
        sums = [bf16(sum(bf16(sum(micros)) for micros in ranks)) for ranks in parts]
        once.append([[total] * n for total, n in zip(sums, WIDTHS, strict=True)])
        sums = [sum(bf16(bf16(a) + bf16(b)) for a, b in zip(*ranks, strict=True)) for ranks in parts]
        each.append([[total] * n for total, n in zip(sums, WIDTHS, strict=True)])
    assert once != each
    for found in run_ranks(lacking_gradients, 2, torch.bfloat16, timeout=60):
        assert found == {name: each if sharing.reduce_every_microbatch else once for name, sharing in SHARINGS.items()}


def traffic() -> dict[str, Any]:
    """What passes in a step of three micro-batches, and how much of it has begun when the first layer's gradient comes."""
    out: dict[str, Any] = {}
    for name, sharing in SHARINGS.items():
        log = CommTrafficCounter()
        toy = Toy(world(log))
        stage = flatten_parameters(toy, sharing)
        begun = []
        toy.weights[0].register_hook(lambda grad, log=log, begun=begun: begun.append(calls(log)))
        stage.begin_step()
        for micro in range(3):
            with stage.backward_context(last=micro == 2):
                y = torch.zeros((), requires_grad=True)
                for weight in toy.weights:  # one after another, so that the backward goes from last to first
                    y = y + (weight * (1 + y)).sum()
                y.backward()
        stage.finish_gradients()
        out[name] = {"calls": dict(log.counts), "begun": begun}
    return out


def calls(log: CommTrafficCounter) -> int:
    return sum(count for count, _ in log.counts.values())


def test_buckets_are_reduced_once_a_step_or_once_a_backward_and_before_it_ends() -> None:
    found = run_ranks(traffic, 2, timeout=60)[0]
    padded = 2 * SLICE_ELEMENTS  # buckets of at least six elements, last parameter first: [7], [4, 5], [3]
    assert found["0"]["calls"] == {("dp", "all_reduce"): [3, 3 * 4 * padded]}
    assert found["1"]["calls"] == {("dp", "reduce_scatter"): [3, 3 * 4 * padded]}
    assert found["0, each backward"]["calls"] == {("dp", "all_reduce"): [9, 9 * 4 * padded]}
    assert found["2"]["calls"] == {("dp", "reduce_scatter"): [9, 9 * 4 * padded]}
    assert found["0"]["begun"] == found["1"]["begun"] == [0, 0, 2]
    assert found["2"]["begun"] == [2, 5, 8]


def test_only_the_slice_of_a_gradient_is_kept_between_backwards() -> None:
    stages = {level: flatten_parameters(Toy(CommGroup("dp", (0, 1))), SHARINGS[level]) for level in ("1", "2")}
    elements = {level: sum(kept_gradients(stage)) for level, stage in stages.items()}
    assert elements == {"1": 3 * 3 * SLICE_ELEMENTS, "2": 3 * SLICE_ELEMENTS}
    assert all(isinstance(b, MicroBatchGradientBucket) for buffer in stages["2"].buffers for b in buffer.buckets)


def kept_gradients(stage: FlatBufferStage) -> Iterator[int]:
    """Elements of every tensor that a stage's buckets hold."""
    for buffer in stage.buffers:
        for bucket in buffer.buckets:
            yield from (value.numel() for value in vars(bucket).values() if isinstance(value, torch.Tensor))


MODEL = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_kv_heads": 2, "vocab_size": 37,
}  # fmt: skip


def results(cases: list[LayoutCase]) -> list[Any]:
    """What each case computes on its ranks, as bits."""
    maker, out = ProcessGroupCache(), []
    for case in cases:
        done = CaseTrainer.build(case, dist.get_rank(), maker).run(2)
        out.append((done.losses, done.norms, weights_of(done.tensors)))
    return out


def weights_of(tensors: Any) -> dict[str, Any]:
    """The weights among a checkpoint's tensors, as numbers."""
    names = [name for name in tensors if name.startswith("weights/")]
    return {name: [(box.offset, box.tensor.tolist()) for box in tensors[name].boxes] for name in names}


LAYOUTS: list[dict[str, Any]] = [{"dp": 4}, {"dp": 2, "tp": 2, "sp": True}, {"dp": 2, "pp": 2}]
TWIN = {"reduce_every_microbatch": True}
ONE_MICROBATCH: list[Any] = [(0, {}, 1), (1, {}, 1), (2, {}, 1)]
TWO_MICROBATCHES: list[Any] = [(0, TWIN, 2), (1, TWIN, 2), (2, {}, 2)]


def case_of(parallel: dict[str, Any], zero: int, debug: dict[str, Any], microbatches: int) -> LayoutCase:
    ranks = parallel["dp"] * parallel.get("tp", 1) * parallel.get("pp", 1)
    return LayoutCase(
        "grads", MODEL, ranks, parallel={**parallel, "zero": zero}, micro=1, batch=parallel["dp"] * microbatches,
        length=12, precision="fp32", debug={"ordered_reductions": True, **debug},
    )  # fmt: skip


@pytest.fixture(scope="module")
def bits() -> Callable[..., list[Any]]:
    """Cases to what every rank computed, all in one start of the ranks."""
    keys = [(str(parallel), *map(str, case)) for parallel in LAYOUTS for case in [*ONE_MICROBATCH, *TWO_MICROBATCHES]]
    cases = [case_of(parallel, *case) for parallel in LAYOUTS for case in [*ONE_MICROBATCH, *TWO_MICROBATCHES]]
    keys.append((str(LAYOUTS[0]), "0", "{}", "2"))
    cases.append(case_of(LAYOUTS[0], 0, {}, 2))
    ranks = run_ranks(results, 4, cases, timeout=200)
    return lambda *key: [rank[keys.index(tuple(map(str, key)))] for rank in ranks]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
@pytest.mark.parametrize("group", [ONE_MICROBATCH, TWO_MICROBATCHES], ids=["one", "several"])
def test_levels_agree_in_bits(bits: Callable[..., list[Any]], parallel: dict[str, Any], group: list[Any]) -> None:
    plain, *others = [bits(parallel, *case) for case in group]
    for other in others:
        assert other == plain


def test_the_order_of_the_sum_is_what_the_twin_is_for(bits: Callable[..., list[Any]]) -> None:
    assert bits(LAYOUTS[0], 0, {}, 2) != bits(LAYOUTS[0], 0, TWIN, 2)


class Deferred:
    """A gather that arrives no sooner than it is waited for."""

    def __init__(self, events: list[str], *arguments: Any) -> None:
        self.events, self.arguments = events, arguments

    def wait(self) -> None:
        self.events.append("wait")
        all_gather_into(*self.arguments)


def late_gathers() -> dict[str, Any]:
    """Steps whose gathers arrive only when waited for, beside steps without any; and the order of events."""
    out: dict[str, Any] = {}
    maker, rank = ProcessGroupCache(), dist.get_rank()
    for level in (0, 1):
        events: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                zero_buffers, "all_gather_into", lambda *given, async_op, events=events: Deferred(events, *given)
            )
            trainer = CaseTrainer.build(replace(case_of({"dp": 2}, level, {}, 2), bucket=300), rank, maker)
            for index, layer in enumerate(trainer.state.stages[0].layers):
                layer.register_forward_hook(lambda *_, index=index, events=events: events.append(f"layer {index}"))
            losses = [trainer.step().loss for _ in range(2)]
            events.append("save")
            held = trainer.state.checkpoint_tensors()
        out[str(level)] = (losses, weights_of(held))
        out[f"{level} events"] = events
    return out


def test_each_layer_waits_for_its_own_weights_and_a_save_for_all() -> None:
    for found in run_ranks(late_gathers, 2, timeout=60):
        assert found["1"] == found["0"]
        first, later = ["layer 0", "layer 1"], ["wait", "layer 0", "wait", "layer 1", "wait"]
        assert [event for event, _ in groupby(found["1 events"])] == [*first * 2, *later, *first, "save", "wait"]
        assert found["0 events"] == [*first * 4, "save"]


def test_a_stage_that_is_no_longer_used_is_freed() -> None:
    toy = Toy(CommGroup("dp", (0,), 0))
    stage = flatten_parameters(toy, SHARINGS["1"])
    with stage.backward_context(last=True):
        toy(1.0, [0, 1]).backward()
    freed = weakref.ref(toy.weights[0])
    del toy, stage
    gc.collect()
    assert freed() is None
