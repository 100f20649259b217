"""A bit that changes on one rank is found, the rank is named, and nothing is saved after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from mega_ckpt.store import latest_checkpoint
from mega_common.errors import ConfigError, TrainingError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.job import corruption_check
from mega_trainer.job.corruption_check import CorruptionCheck, hash_tensor_bits
from mega_trainer.model.feed_forward import FeedForward
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.gradient_buckets import StepGradientBucket
from mega_trainer.parallel.parameter_info import get_quantized_weight, iterate_saved_buffers
from mega_trainer.run import build_components, training_loop
from mega_trainer.run import training_run as train_module

Settings = Callable[..., dict[str, Any]]
BAD, STEP = 1, 4  # the rank and the step of the fault


def flip(tensor: Tensor) -> None:
    """One bit of the first element."""
    tensor[:1].view(torch.int32).bitwise_xor_(1 << 20)


def run_with(raw: dict[str, Any], fault: str) -> str:
    """What ends a run on this rank in which one bit changes on one rank; or that it did not end before its last step."""
    rank, size, done = dist.get_rank(), dist.get_world_size(), [0]
    real_step, real_settle, real_assemble = (
        training_loop.train_step,
        StepGradientBucket.wait_for_reduce,
        train_module.build_training_state_and_executor,
    )

    def step(executor: Any, optimizer: Any, batches: Any, **more: Any) -> Any:
        done[0] += 1
        if rank == BAD and done[0] == STEP and fault.startswith(("weight", "moment")):
            _, values = optimizer.state_tensors()[0]
            flip(values[0][1] if fault.startswith("moment") else values[0][0].shard.weights)
        return real_step(executor, optimizer, batches, **more)

    def settle(bucket: Any) -> None:
        real_settle(bucket)
        if rank == BAD and done[0] == STEP and fault == "gradient":
            flip(bucket.grads)

    def assemble(*args: Any) -> Any:
        state, executor = real_assemble(*args)
        if rank == BAD and fault == "activation":  # a device that computes wrongly, from some step on
            mlp = next(module for module in state.stages[0].modules() if isinstance(module, FeedForward))
            mlp.register_forward_hook(lambda module, given, out: out * (1 + 2**-20) if done[0] >= STEP - 1 else out)
        return state, executor

    with (
        mock.patch.object(training_loop, "train_step", step),
        mock.patch.object(train_module, "build_training_state_and_executor", assemble),
        mock.patch("mega_trainer.parallel.gradient_buckets.StepGradientBucket.wait_for_reduce", settle),
    ):
        try:
            parsed = RunConfig.parse({**raw, "output": f"{raw['output']}-{fault}"})
            train_module.run_training(parsed, RankInfo(rank, size, rank))
        except TrainingError as error:
            return str(error)
    return "not found"


def sweep(raw: dict[str, Any], faults: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {fault: run_with({**raw, **more}, fault) for fault, more in faults.items()}


def test_a_flipped_bit_is_found_the_rank_named_and_nothing_saved(settings: Settings, tmp_path: Path) -> None:
    raw = settings(
        batch={"micro": 1, "global": 6}, parallel={"zero": 0}, train={"steps": 5}, checkpoint={"every": 5},
        fault={"hash_every": 2},
    )  # fmt: skip
    faults: dict[str, dict[str, Any]] = {
        "none": {"fault": {"hash_every": 1, "recompute_every": 1}, "parallel": {"zero": 1}},
        "weight": {}, "moment": {}, "gradient": {},
        "weight of zero 1": {"fault": {"hash_every": 1}, "parallel": {"zero": 1}},
        "moment of zero 1": {"fault": {"hash_every": 1}, "parallel": {"zero": 1}},
        "activation": {"fault": {"recompute_every": 2}, "parallel": {"zero": 1}},
    }  # fmt: skip
    for told in run_ranks(sweep, 3, raw, faults):
        assert told.pop("none") == "not found"
        for fault, name in (("weight of zero 1", "weight"), ("moment of zero 1", "exp_avg")):
            words = told.pop(fault)
            assert words.startswith(
                f"in step {STEP} bits changed in tensors that nothing has written to\n  rank {BAD} on "
            )
            assert name in words
        assert set(told) == {"weight", "moment", "gradient", "activation"}
        for fault, words in told.items():
            assert f"  rank {BAD} on " in words, (fault, words)
            assert "rank 0" not in words
            assert "where 2 other ranks agree" in words
            assert f"step {STEP}" in words
            assert latest_checkpoint(tmp_path / f"run-{fault}" / "checkpoints") is None
        assert "weight" in told["gradient"]
        assert "moment" not in told["weight"]
        assert "exp_avg" in told["moment"]
        assert "the gradient of" in told["activation"]


SPOTS = {  # element (a share of all) and bit
    "sign of the first": (0.0, 31), "lowest bit of the last": (1.0, 0), "exponent in the middle": (0.5, 30),
    "mantissa before the middle": (0.4, 11), "exponent near the begin": (0.1, 23),
}  # fmt: skip


def run_with_spot(raw: dict[str, Any], kind: str, spot: str) -> str:
    """Return what ends a run on this rank in which one bit of a slice of ZeRO's changes on one rank."""
    rank, size, done, real_step = dist.get_rank(), dist.get_world_size(), [0], training_loop.train_step
    share, bit = SPOTS[spot]

    def step(executor: Any, optimizer: Any, batches: Any, **more: Any) -> Any:
        done[0] += 1
        if rank == BAD and done[0] == STEP:
            slot, values = dict(optimizer.state_tensors())["exp_avg" if kind == "weights" else kind][0]
            held = slot.shard.weights if kind == "weights" else values[: len(slot.shard.weights)]
            bits = held.view(torch.int32)
            mask = torch.tensor(1 << bit).to(torch.int32) if bit < 31 else torch.tensor(-(1 << 31), dtype=torch.int32)
            bits[int(share * (len(bits) - 1))] ^= mask
        return real_step(executor, optimizer, batches, **more)

    with mock.patch.object(training_loop, "train_step", step):
        try:
            output = f"{raw['output']}-{kind}-{spot}".replace(" ", "-")
            train_module.run_training(RunConfig.parse({**raw, "output": output}), RankInfo(rank, size, rank))
        except TrainingError as error:
            return str(error)
    return "not found"


def sweep_spots(raw: dict[str, Any]) -> dict[str, str]:
    cases = [(("weights", "exp_avg", "exp_avg_sq")[number % 3], spot) for number, spot in enumerate(SPOTS)]
    return {f"{kind}-{spot}".replace(" ", "-"): run_with_spot(raw, kind, spot) for kind, spot in cases}


def test_of_two_ranks_the_one_whose_slice_changed_is_named(settings: Settings, tmp_path: Path) -> None:
    raw = settings(
        batch={"micro": 1, "global": 4}, parallel={"zero": 1}, train={"steps": 5}, checkpoint={"every": 5},
        fault={"hash_every": 1},
    )  # fmt: skip
    for found in run_ranks(sweep_spots, 2, raw):
        for case, words in found.items():
            assert words.startswith(
                f"in step {STEP} bits changed in tensors that nothing has written to\n  rank {BAD} on "
            ), case
            assert "rank 0" not in words
            assert latest_checkpoint(tmp_path / f"run-{case}" / "checkpoints") is None


def test_gradients_that_are_not_kept_are_not_compared(settings: Settings) -> None:
    with pytest.raises(ConfigError, match=r"fault\.recompute_every.*parallel\.zero = 2"):
        RunConfig.parse(settings(parallel={"zero": 2}, fault={"recompute_every": 2}))
    with pytest.raises(ConfigError, match=r"fault\.recompute_every.*deterministic"):
        RunConfig.parse(settings(device="cuda", fault={"recompute_every": 2}))


MOE = {
    "num_experts": 4,
    "top_k": 2,
    "ffn_hidden_size": 24,
    "selection_bias": True,
    "bias_rate": 0.01,
    "score": "sigmoid",
}
LORA = {"rank": 2, "quantize": "nf4"}
HELD: dict[str, dict[str, Any]] = {  # layouts and precisions of two ranks
    "zero 0": {"parallel": {"zero": 0}},
    "zero 1": {"parallel": {"zero": 1}},
    "zero 2 in bf16": {"parallel": {"zero": 2}, "precision": "bf16"},
    "zero 3": {"parallel": {"zero": 3}},
    "zero 3 in bf16": {"parallel": {"zero": 3}, "precision": "bf16"},
    "zero 1 in fp64": {"parallel": {"zero": 1}, "precision": "fp64"},
    "tensor parallel": {"parallel": {"tp": 2}, "precision": "bf16"},
    "pipeline": {"parallel": {"pp": 2}},
    "main weights in host memory": {"parallel": {"zero": 1}, "optimizer": {"offload": True}},
    "an average": {"parallel": {"zero": 1}, "train": {"ema": 0.1}},
    "muon": {"parallel": {"zero": 1}, "optimizer": {"name": "muon"}},
    "experts with a bias of the choice": {"parallel": {"zero": 1, "ep": 2}, "model": {"moe": MOE}},
    "packed weights": {"parallel": {"zero": 1}, "model": {"hidden_size": 64, "ffn_hidden_size": 64}, "lora": LORA, "init_from": "base"},
}  # fmt: skip
PLACES = (0.0, 0.4, 0.9, 1.0)


def places_of(state: Any, executor: Any) -> Iterator[tuple[str, Tensor, bool]]:
    """Return each element that the rank keeps from step to step: name, a view of one, and whether it is no padding."""
    slots = state.optimizer.slots
    for number, slot in {0: slots[0], len(slots) - 1: slots[-1]}.items():
        for kind, values in slot_tensors(state.optimizer, slot):
            for share in PLACES:
                place = round(share * (len(slot.shard.weights) - 1))
                used = any(part.shard_slice.start <= place < part.shard_slice.stop for part in slot.shard.parts)
                yield f"{kind} of slot {number} at {share}", values[place : place + 1], used
    for stage in executor.stages.values():
        for values, pieces in iterate_saved_buffers(stage):
            yield pieces[0].name, values.view(-1)[-1:], True
        for parameter in stage.parameters():
            if packed := get_quantized_weight(parameter):
                yield "packed", packed.packed.view(-1)[-1:], True
                yield "scales", packed.scales.view(-1)[:1], True


def slot_tensors(optimizer: Any, slot: Any) -> Iterator[tuple[str, Tensor]]:
    yield "weights", slot.shard.weights
    if slot.has_separate_main_weights and not slot.has_higher_precision:
        yield "main weights", slot.main
    for kind, pairs in optimizer.state_tensors():
        yield from ((kind, values) for other, values in pairs if other is slot)


def flips_not_found(cases: dict[str, dict[str, Any]]) -> list[str]:
    return [f"{name}: {line}" for name, raw in cases.items() for line in missed(raw)]


def missed(raw: dict[str, Any]) -> list[str]:
    """Flip the highest bit of each of `places_of` on one rank, one after the other; return those with a wrong result."""
    rank, config = dist.get_rank(), RunConfig.parse(raw)
    groups = build_components.connect_parallel_groups(config, RankInfo(rank, 2, rank))
    state, executor = train_module.build_training_state_and_executor(config, groups, torch.device("cpu"))
    for stage in executor.stages.values():
        initialize_weights(stage, config.train.seed)
    state.optimizer.load_main_from_model()
    integrity = CorruptionCheck(config.fault, executor, state.optimizer)
    wrong, everywhere = [], list(places_of(state, executor))
    count = torch.tensor(len(everywhere))
    dist.all_reduce(count, dist.ReduceOp.MAX)
    integrity.compare_replicas_after_step(1, saves=False)
    before = integrity._rest
    for number in range(int(count)):
        name, element, used = everywhere[min(number, len(everywhere) - 1)]
        integrity._rest = before
        if rank == BAD:
            flip_last_bit(element)
        try:
            integrity.check_unchanged_before_update(2)
            found = False
        except TrainingError:
            found = True
        if rank == BAD:
            flip_last_bit(element)
            if found < used or (found > used and name.startswith("weights")):
                wrong.append(f"{name}: {found}")
    return wrong


def flip_last_bit(element: Tensor) -> None:
    element.view(torch.uint8)[-1] ^= 0x80


def test_what_a_rank_keeps_is_looked_at_in_every_place_but_padding(settings: Settings) -> None:
    base = {"fault": {"hash_every": 1}, "batch": {"micro": 1, "global": 4}}
    model = settings()["model"]
    cases = {
        name: settings(**{**base, **more, "model": {**model, **more.get("model", {})}}) for name, more in HELD.items()
    }
    assert [line for lines in run_ranks(flips_not_found, 2, cases) for line in lines] == []


def test_hashes_of_offloaded_state_are_gathered_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of GPUs alone take no tensors in host memory; optimizer state that is offloaded is there."""
    seen = list[str]()

    def gather(rows: Tensor, group: CommGroup) -> Tensor:
        seen.append(rows.device.type)
        return torch.tensor([[0, 5], [1, 5], [2, 6]])

    monkeypatch.setattr(corruption_check, "all_gather", gather)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    offloaded = {"exp_avg from a to b": torch.ones(4)}
    found = list(
        corruption_check.find_corrupt_tensors(offloaded, (CommGroup("tp", (0, 1, 2), 2),), torch.device("meta"))
    )
    assert seen == ["meta"]
    assert len(found) == 1
    assert found[0].endswith("exp_avg from a to b, where 2 other ranks agree")


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip_bit(words: Tensor, place: int, bit: int) -> None:
    width = words.element_size() * 8
    mask = 1 << bit
    words[place] ^= mask - (1 << width) if bit == width - 1 and words.dtype != torch.uint8 else mask


def flips(*changes: tuple[float, float]) -> Callable[[Tensor], None]:
    """Flip a bit in each place; both as shares of the last place and of the highest bit."""

    def change(words: Tensor) -> None:
        for place, bit in changes:
            flip_bit(words, round(place * (len(words) - 1)), round(bit * (words.element_size() * 8 - 1)))

    return change


def swap(one: int, other: int) -> Callable[[Tensor], None]:
    def change(words: Tensor) -> None:
        words[[one, other]] = words[[other, one]]

    return change


def rolled(words: Tensor) -> None:
    words.copy_(words.roll(1))


CHANGES: dict[str, Callable[[Tensor], None]] = {
    "sign of the first": flips((0, 1)), "lowest bit of the first": flips((0, 0)), "sign of the last": flips((1, 1)),
    "lowest bit of the last": flips((1, 0)), "a bit in the middle": flips((0.5, 0.4)),
    "the same bit of the first and the last": flips((0, 0.5), (1, 0.5)),
    "the signs of two neighbors": flips((0, 1), (0.02, 1)), "the signs of the first and the last": flips((0, 1), (1, 1)),
    "the lowest bit of two": flips((0.3, 0), (0.8, 0)),
    "one bit of the corners of a rectangle": flips((0, 0.5), (0.1, 0.5), (0.5, 0.5), (0.6, 0.5)),
    "two neighbors swapped": swap(0, 1), "the first and the last swapped": swap(0, -1),
    "elements a chunk apart swapped": swap(3, 3 + 16), "all elements one place on": rolled,
}  # fmt: skip


@pytest.mark.parametrize("chunk", [16, corruption_check.CHUNK])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_bits_changes_the_hash(
    change: Callable[[Tensor], None], dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corruption_check, "CHUNK", chunk)
    values = (torch.arange(1, 51, dtype=torch.float64) * 1.7).to(dtype)
    before = hash_tensor_bits([values])
    change(values.view(INTEGERS[values.element_size()]))
    assert hash_tensor_bits([values]) != before


@pytest.mark.parametrize("value", [0.0, -0.0, float("nan"), float("inf")])
def test_padding_zeros_and_values_that_are_no_numbers_are_bits_too(value: float) -> None:
    values = torch.full((70,), value)
    before = hash_tensor_bits([values])
    flip_bit(values.view(torch.int32), 69, 31)
    assert hash_tensor_bits([values]) != before


def test_one_flip_of_any_bit_in_any_place_changes_the_hash() -> None:
    values = torch.randn(7, dtype=torch.float64)
    before, words = hash_tensor_bits([values]), values.view(torch.int64)
    for place in range(7):
        for bit in range(64):
            flip_bit(words, place, bit)
            assert hash_tensor_bits([values]) != before, (place, bit)
            flip_bit(words, place, bit)
    assert hash_tensor_bits([values]) == before


def test_the_layout_in_memory_and_other_tensors_do_not_matter() -> None:
    matrix = torch.randn(6, 9)
    shapes = [torch.tensor(2.0), matrix, matrix.t().contiguous().t(), matrix.view(-1), torch.randn(3).bfloat16()[1:]]
    single, matrix_hash, transposed, flat, odd = hash_tensor_bits(shapes)
    assert matrix_hash == transposed == flat == hash_tensor_bits([matrix])
    assert single == hash_tensor_bits([shapes[0]])
    assert odd == hash_tensor_bits([shapes[-1].clone()])
    assert hash_tensor_bits([matrix.t()]) != matrix_hash


def reference(words: list[int]) -> int:
    """The same hash of up to a chunk of words, in Python's integers."""
    total, ones = 0, (1 << 64) - 1
    for place, word in enumerate(words, 1):
        mixed = place * 0x9E3779B97F4A7C15 & ones
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & ones
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & ones
        total += word * ((mixed ^ mixed >> 31) | 1)
    return total & ones


@pytest.mark.parametrize("words", [[0], [1, 2, 3], [-1, 5, -(2**31)], [2**31 - 1] * 40])
def test_the_hash_is_that_of_the_formula(words: list[int]) -> None:
    assert hash_tensor_bits([torch.tensor(words, dtype=torch.int32)]).item() % 2**64 == reference(words)
