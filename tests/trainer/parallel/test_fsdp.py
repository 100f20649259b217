"""ZeRO-3 computes what the other levels compute, and what it saves does not tell the level."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from parity.cases import case
from ranks import run_ranks

from mega_ckpt.checkpoint import Checkpoint
from mega_ckpt.store import save_sharded_checkpoint
from mega_ckpt.tensor_pieces import TensorPiece, merge_sharded_tensors
from mega_common.errors import ConfigError
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.distributed.process_groups import ProcessGroupCache, build_parallel_groups
from mega_trainer.objectives.training_objective import TrainingObjective
from mega_trainer.parallel import fsdp
from mega_trainer.parallel.fsdp import slice_piece_rows
from mega_trainer.run.train_step import evaluate_losses
from mega_trainer.verify.case_comparison import compare_cases_with_one_process, compare_outcomes, merge_findings_by_case
from mega_trainer.verify.case_trainer import CaseOutcome, CaseTrainer, NamedTensors
from mega_trainer.verify.layout_case import LayoutCase, RunYamlLayoutCase
from mega_trainer.verify.restore_comparison import find_differing_tensors, overwrite_training_state
from mega_trainer.verify.synthetic_batches import make_synthetic_batch

MODEL = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_kv_heads": 2,
    "vocab_size": 37,
}  # fmt: skip


def settings(zero: int, *, precision: str, parallel: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "data": {"train": [{"path": "none"}], "seq_length": 12},
        "batch": {"micro": 1, "global": 4},
        "precision": precision,
        "debug": {"ordered_reductions": True},
        "parallel": {**(parallel or {}), "zero": zero},
        **changes,
    }


TIED = {**MODEL, "tie_embeddings": True, "num_kv_heads": 1, "vocab_size": 9}
CASES = [
    RunYamlLayoutCase.from_settings(
        settings(3, precision="fp64", parallel=parallel, model=model, recompute=recompute), 4
    )
    for model in (MODEL, TIED)
    for parallel, recompute in [
        ({}, {}),  # of the 37 or 9 rows of the vocabulary the last rank has fewer, or none
        ({"tp": 2}, {}),
        ({"tp": 2, "sp": True}, {"kind": "full"}),
    ]
]


HYBRID = [
    RunYamlLayoutCase.from_settings(
        settings(3, precision="fp64", parallel=parallel, model=model, optimizer={"clip_grad": 0.1}), 4
    )
    for model, parallel in [(MODEL, {"zero3_shard": 2}), (TIED, {"zero3_shard": 2}), (MODEL, {"zero3_shard": 4})]
]


@pytest.mark.parametrize("cases", [CASES, HYBRID], ids=["one copy", "several copies"])
def test_it_computes_what_one_process_computes(cases: list[RunYamlLayoutCase]) -> None:
    results = merge_findings_by_case(cases, run_ranks(compare_cases_with_one_process, 4, cases, timeout=200))
    problems = [result.describe_problem(1e-10) for result in results]
    assert not any(problems), problems


def saved_by_levels(folder: Path) -> dict[str, Any]:
    """Checkpoints of levels 2 and 3 after the same steps, with an evaluation between; and the losses after a resume."""
    out: dict[str, Any] = {}
    maker = ProcessGroupCache()
    for precision, parallel in (("fp32", {}), ("bf16", {}), ("bf16", {"tp": 2})):
        name = f"{precision} {parallel}"

        def case(level: int, precision: str = precision, parallel: dict[str, Any] = parallel) -> RunYamlLayoutCase:
            return RunYamlLayoutCase.from_settings(settings(level, precision=precision, parallel=parallel), 4)

        for level in (2, 3):
            it = CaseTrainer.build(case(level), dist.get_rank(), maker)
            losses = [it.step().loss for _ in range(2)]
            batch = list(
                split_micro_batches(
                    make_synthetic_batch(it.config, 9, it.groups.dp.rank, it.groups.dp.size, True),
                    it.config,
                    torch.device("cpu"),
                )
            )
            losses += evaluate_losses(it.executor, [batch], TrainingObjective(it.groups, 0).validation_totals)
            save_sharded_checkpoint(
                folder / name / str(level),
                2,
                it.state.checkpoint_tensors(),
                model=it.config.model,
                state=it.state.checkpoint_state(),
            )
            losses.append(it.step().loss)
            out[f"{name} {level}"] = losses
        for level, other in ((2, 3), (3, 2)):
            it = CaseTrainer.build(case(level), dist.get_rank(), maker)
            it.state.restore_checkpoint(next((folder / name / str(other)).glob("step-*")), None)
            out[f"{name} {level} resumed"] = it.step().loss
    return out


def test_levels_2_and_3_save_alike_and_resume_each_other(tmp_path: Path) -> None:
    found, *_ = run_ranks(saved_by_levels, 4, tmp_path, timeout=200)
    for name in {key.rsplit(" ", 1)[0] for key in found if key.endswith("2")}:
        assert found[f"{name} 3"] == found[f"{name} 2"], name
        for level in (2, 3):
            assert found[f"{name} {level} resumed"] == found[f"{name} {level}"][-1], name
        two, three = (Checkpoint.open_folder(next((tmp_path / name / level).glob("step-*"))) for level in "23")
        assert two.tensor_keys() == three.tensor_keys()
        for key in two.tensor_keys():
            assert torch.equal(two.read_tensor(key), three.read_tensor(key)), key


def shares() -> tuple[int, int]:
    it = CaseTrainer.build(
        RunYamlLayoutCase.from_settings(settings(3, precision="bf16"), 2), dist.get_rank(), ProcessGroupCache()
    )
    held = sum(shard.weights.numel() for buffer in it.optimizer.buffers for shard in buffer.shards)
    return held, sum(parameter.numel() for parameter in it.state.stages[0].parameters())


def test_each_rank_holds_its_share() -> None:
    for held, whole in run_ranks(shares, 2, timeout=60):
        assert held <= whole // 2 + MODEL["vocab_size"] * MODEL["hidden_size"]
        assert held < 0.55 * whole


HALVES = {"zero3_shard": 2}


def held_after_a_step(settings: dict[str, Any]) -> dict[str, Any]:
    it = CaseTrainer.build(RunYamlLayoutCase.from_settings(settings, 4), dist.get_rank(), ProcessGroupCache())
    it.step()
    tensors = it.state.checkpoint_tensors().items()
    return {name: [(box.offset, box.tensor.tolist()) for box in sharded.boxes] for name, sharded in tensors}


def test_copies_stay_alike() -> None:
    several = settings(3, precision="bf16", parallel=HALVES, batch={"micro": 1, "global": 8}, debug={})
    zero, one, two, three = run_ranks(held_after_a_step, 4, several, timeout=60)
    assert zero == two
    assert one == three
    assert zero != one


def gone_on(
    cases: Sequence[tuple[RunYamlLayoutCase, RunYamlLayoutCase]], folder: Path
) -> list[tuple[list[str], dict[str, float]]]:
    """Of each pair: what is not, bit for bit, what the first saved; errors of going on, against the first going on."""
    out, maker = [], ProcessGroupCache()
    for number, (before, after) in enumerate(cases):
        first, second = (CaseTrainer.build(case, dist.get_rank(), maker) for case in (before, after))
        saved = everywhere(first.run(2).tensors)
        state = first.state
        path = save_sharded_checkpoint(
            folder / str(number),
            2,
            state.checkpoint_tensors(),
            model=first.config.model,
            state=state.checkpoint_state(),
        )
        overwrite_training_state(second)
        second.state.restore_checkpoint(path, None)
        broken = find_differing_tensors(second.state.checkpoint_tensors(), saved)
        straight, mine = first.run(2), second.run(2)
        reference = CaseOutcome(straight.losses, straight.norms, {}, everywhere(straight.tensors))
        mine.gradients = {}
        out.append((broken, compare_outcomes(mine, reference)))
    return out


def everywhere(mine: NamedTensors) -> NamedTensors:
    """What all ranks hold."""
    parts = [mine] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return merge_sharded_tensors(parts)


def test_copies_go_on_from_level_1_and_level_1_from_copies(tmp_path: Path) -> None:
    several, flat = (
        RunYamlLayoutCase.from_settings(
            settings(level, precision="fp64", parallel=parallel, optimizer={"clip_grad": 0.1}), 4
        )
        for level, parallel in ((3, HALVES), (1, {}))
    )
    for found in run_ranks(gone_on, 4, [(several, flat), (flat, several)], tmp_path, timeout=60):
        for broken, errors in found:
            assert not broken
            assert max(errors.values()) < 1e-10, errors


class Nobody(ProcessGroupCache):
    """Makes nothing."""

    def get_process_group(self, ranks: Sequence[int]) -> None:
        """No group."""


def test_neighbors_of_one_tensor_rank_share_a_copy() -> None:
    everyone = [
        build_parallel_groups(ParallelLayout(tp=2, dp=4), rank, heads=[4], shard=2, maker=Nobody()) for rank in range(8)
    ]
    for rank, groups in enumerate(everyone):
        assert groups.shard.ranks == ((0, 2), (1, 3), (4, 6), (5, 7))[rank // 4 * 2 + rank % 2]
        assert groups.replicate.ranks == (rank % 4, rank % 4 + 4)
        assert groups.shard.ranks[groups.shard.rank] == groups.replicate.ranks[groups.replicate.rank] == rank


def test_without_a_size_all_data_ranks_share_one_copy() -> None:
    groups = build_parallel_groups(ParallelLayout(tp=2, dp=4), 3, heads=[4], maker=Nobody())
    assert groups.shard is groups.dp_cp
    assert groups.replicate.size == 1


@pytest.mark.parametrize(
    ("size", "ranks", "way_out"),
    [(3, 4, "one of [2, 4]"), (8, 4, "one of [2, 4]"), (2, 1, "remove parallel.zero3_shard")],
)
def test_a_size_that_does_not_divide_the_data_ranks_is_refused(size: int, ranks: int, way_out: str) -> None:
    config = RunConfig.parse(settings(3, precision="bf16", parallel={"zero3_shard": size}))
    with pytest.raises(ConfigError) as error:
        config.check_world_size(ranks)
    assert f"parallel.zero3_shard = {size}: must divide the {ranks} data ranks" in str(error.value)
    assert way_out in str(error.value)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_size_means_nothing_where_weights_are_whole(zero: int) -> None:
    for key, value in (("zero3_shard", 2), ("zero3_layers", 2), ("zero3_gather", "step")):
        with pytest.raises(ConfigError, match=rf"parallel\.{key} = {value!r}: .* parallel\.zero=3"):
            RunConfig.parse(settings(zero, precision="bf16", parallel={key: value}))


def most_units_with_matrices(one: LayoutCase) -> int:
    """Most units that have gradients of layers' matrices at a time in the weight halves of a step."""
    trainer, most = CaseTrainer.build(one, dist.get_rank(), ProcessGroupCache()), 0
    real = fsdp._SplitBackwardReduction._reduce_completed

    def count(self: fsdp._SplitBackwardReduction, parameter: torch.Tensor) -> None:
        nonlocal most
        units = fsdp._param_groups(unit[0] for unit in self._units[1:])
        leaves = [[leaf for leaf in fsdp._gathered_leaves(unit) if leaf.dim() > 1] for unit in units]
        most = max(most, sum(any(leaf.grad is not None for leaf in own) for own in leaves))
        real(self, parameter)

    with mock.patch.object(fsdp._SplitBackwardReduction, "_reduce_completed", count):
        trainer.step()
    return most


def test_the_weight_half_of_a_backward_reduces_unit_by_unit() -> None:
    """Not all of a stage's gradients at its end, for which a rank would need the memory of whole weights."""
    one = case("dense", 4, layers=8, parallel={"pp": 2, "zero": 3, "schedule": "zb-h1", "zero3_layers": 1}, micro=2)
    assert run_ranks(most_units_with_matrices, 4, one, timeout=60) == [1] * 4


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_cut_rows_tile_the_pieces(ranks: int, blocks: list[int]) -> None:
    rows, pieces, start = sum(blocks), [], 0
    for index, size in enumerate(blocks):
        pieces.append(TensorPiece(f"w{index}", (3 * size, 2), (size, 0), (start, 0), (size, 2)))
        start += size
    local = torch.arange(2 * rows).view(rows, 2)
    share, seen = -(-rows // ranks), []
    for rank in range(ranks):
        mine = local[share * rank : share * (rank + 1)]
        for piece in slice_piece_rows(pieces, share * rank, share * (rank + 1)):
            (origin,) = [whole for whole in pieces if whole.name == piece.name]
            first = piece.global_offset[0] - origin.global_offset[0]
            assert torch.equal(piece.local_view(mine), origin.local_view(local)[first : first + piece.shape[0]])
            seen += piece.local_view(mine)[:, 0].tolist()
    assert seen == local[:, 0].tolist()


def test_what_cannot_be_combined_is_refused() -> None:
    change = {"lora": {"rank": 2, "quantize": "nf4"}, "init_from": "nowhere"}
    with pytest.raises(ConfigError, match=r"parallel\.zero = 3: is not supported with lora\.quantize = nf4"):
        RunConfig.parse({**settings(3, precision="bf16"), **change})


# Each schedule, with what differs between stages: a part alone at an end, tied embeddings on two ranks and on one, MTP
# layers, experts, copies of the weights, layers gathered together, frozen layers, adapters.
PIPELINES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense", {"zero3_gather": "step", "pipeline_layout": [0, 4]}, {}),
    ("tied", {"schedule": "zb-h1"}, {"recompute": {"kind": "full"}}),
    ("tied", {"schedule": "zbv", "virtual_stages": 2}, {"optimizer": "muon"}),
    ("tied", {"schedule": "zbv", "virtual_stages": 2, "zero3_gather": "step"}, {}),
    ("mla", {"schedule": "zbv", "virtual_stages": 2}, {"offload": {"activations": 1, "min_bytes": 0}}),
    ("mla", {"virtual_stages": 2, "zero3_layers": 2}, {}),
    ("moe", {"ep": 2, "schedule": "zb-h1"}, {"optimizer": "muon"}),
    ("moe", {"ep": 2, "zero3_gather": "step"}, {"recompute": {"kind": "selective"}}),
    ("t5", {"schedule": "zb-h1"}, {}),
    ("vision", {"schedule": "zb-h1"}, {}),
    ("gqa", {"schedule": "zbv", "virtual_stages": 2}, {"freeze": ["model.layers.0.*", "model.embed_tokens.*"]}),
]


@pytest.mark.parametrize(
    ("copies", "chosen"),
    [(1, PIPELINES[::2]), (2, PIPELINES[1:2]), *(pytest.param(*more, marks=pytest.mark.long) for more in [(1, PIPELINES), (2, PIPELINES[1:7:2])])],
    ids=["some", "some, two copies", "all", "more, two copies"],
)  # fmt: skip
def test_a_pipeline_of_sharded_stages_computes_what_one_process_computes(
    copies: int, chosen: list[tuple[str, dict[str, Any], dict[str, Any]]]
) -> None:
    shard = {"zero3_shard": 2} if copies > 1 else {}
    cases = [
        case(name, 4 * copies, layers=4, parallel={"pp": 2, "zero": 3, **shard, **parallel}, micro=2, batch=8 * copies,
             **more)
        for name, parallel, more in chosen
    ]  # fmt: skip
    results = merge_findings_by_case(cases, run_ranks(compare_cases_with_one_process, 4 * copies, cases, timeout=280))
    problems = [problem for result in results if (problem := result.describe_problem(1e-10))]
    assert not problems, problems
