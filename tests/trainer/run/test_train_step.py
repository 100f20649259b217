"""A step under a loss scale: the same update as without one, or none and a smaller scale."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from mega_ckpt.store import save_sharded_checkpoint
from mega_common.errors import TrainingError
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.distributed.process_groups import ProcessGroupCache
from mega_trainer.job.step_result import StepScalars
from mega_trainer.objectives.training_objective import count_local_tokens, count_step_tokens
from mega_trainer.optim.gradient_clipping import LossScale
from mega_trainer.run.train_step import StepHooks, train_step
from mega_trainer.verify.case_trainer import CaseOutcome, CaseTrainer
from mega_trainer.verify.layout_case import RunYamlLayoutCase
from mega_trainer.verify.synthetic_batches import make_synthetic_batch

MODEL = {
    "model": {
        "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_kv_heads": 2,
        "vocab_size": 37,
    },
    "data": {"train": [{"path": "none"}], "seq_length": 12},
    "batch": {"micro": 1, "global": 4},
}  # fmt: skip


def trainer(precision: str, **settings: Any) -> CaseTrainer:
    return CaseTrainer.build(RunYamlLayoutCase.from_settings({**MODEL, "precision": precision, **settings}))


def bits(outcome: CaseOutcome) -> dict[str, Any]:
    weights = {
        name: [box.tensor.tolist() for box in held.boxes] for name, held in outcome.tensors_by_kind()["weights"].items()
    }
    return {"losses": outcome.losses, "norms": outcome.norms, "weights": weights}


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_power_of_two_changes_no_bits(precision: str) -> None:
    plain, scaled = trainer(precision), trainer(precision)
    scaled.state.loss_scale = LossScale(2.0**10)
    assert bits(scaled.run()) == bits(plain.run())


def test_fp16_learns_what_fp32_learns() -> None:
    half, full = trainer("fp16"), trainer("fp32")
    for _ in range(5):  # the same batch, over and over
        found, expected = half.step(0), full.step(0)
        assert found.updated
        assert found.loss == pytest.approx(expected.loss, rel=2e-3)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=2e-2)
    assert found.loss_scale == 65536.0
    assert expected.loss_scale is None


def weights_of(it: CaseTrainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in it.state.stages[0].parameters()]


def test_an_overflow_skips_the_update_and_halves_the_scale_until_it_fits() -> None:
    it = trainer("fp16", fp16={"initial_scale": 2.0**30}, train={"on_nan": "stop"})
    before, skipped = weights_of(it), 0
    while not (result := it.step(0)).updated:  # the guard stops on numbers that are not finite, but not on these
        assert result.overflowed
        assert not math.isfinite(result.grad_norm)
        skipped += 1
        assert it.state.loss_scale is not None
        assert it.state.loss_scale.value == 2.0 ** (30 - skipped)
        assert all(torch.equal(a, b) for a, b in zip(before, weights_of(it), strict=True))
    assert skipped > 3
    assert it.optimizer.update_count == 1
    assert it.state.step == skipped + 1
    assert not all(torch.equal(a, b) for a, b in zip(before, weights_of(it), strict=True))


def test_an_overflow_at_the_smallest_scale_is_a_number_that_is_not_finite() -> None:
    it = trainer("fp16", fp16={"initial_scale": 2.0**31, "min_scale": 2.0**30})
    it.step(0)
    with pytest.raises(TrainingError, match="not updated"):
        it.step(0)


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    it = trainer("fp16")
    with torch.no_grad():
        it.state.stages[0].head.norm.weight.fill_(math.inf)
    with pytest.raises(TrainingError, match="loss nan"):
        it.step(0)
    assert it.state.loss_scale is not None
    assert it.state.loss_scale.value == 65536.0


def test_the_scale_grows_and_goes_into_the_checkpoint_and_back(tmp_path: Path) -> None:
    settings = {"fp16": {"initial_scale": 1024.0, "growth_interval": 2}}
    it = trainer("fp16", **settings)
    for number in range(3):
        it.step(number)
    assert it.state.loss_scale == LossScale(2048.0, 2, good_steps=1)
    folder = save_sharded_checkpoint(
        tmp_path, 3, it.state.checkpoint_tensors(), model=it.config.model, state=it.state.checkpoint_state()
    )
    again = trainer("fp16", **settings)
    again.state.restore_checkpoint(folder, None)
    assert again.state.loss_scale == it.state.loss_scale
    other = trainer("fp32")
    assert other.state.loss_scale is None


def overflows() -> list[tuple[bool, float | None]]:
    """Which steps overflow where the ranks hold different stages and different data."""
    out, maker = [], ProcessGroupCache()
    for parallel in ({"pp": 2}, {"tp": 2}, {"zero": 2}):
        raw = {**MODEL, "precision": "fp16", "fp16": {"initial_scale": 2.0**19}, "parallel": parallel}
        it = CaseTrainer.build(RunYamlLayoutCase.from_settings(raw, 2), dist.get_rank(), maker)
        out += [(it.step(number).overflowed, it.state.loss_scale and it.state.loss_scale.value) for number in range(6)]
    return out


def test_all_ranks_skip_together() -> None:
    first, second = run_ranks(overflows, 2, timeout=60)
    assert first == second
    assert {overflowed for overflowed, _ in first} == {True, False}


@dataclass(frozen=True)
class Scalars(StepHooks):
    """Adds given scalars to a step."""

    scalars: StepScalars

    def local_scalars(self) -> StepScalars:
        return self.scalars


def ridden() -> list[tuple[StepScalars, list[float]]]:
    """Return the summed scalars of a step, and the tokens of the next step as all ranks count them, in several layouts."""
    out, maker = [], ProcessGroupCache()
    for parallel in ({"tp": 2, "pp": 2}, {"cp": 2, "tp": 2}, {"zero": 3}):
        it = CaseTrainer.build(
            RunYamlLayoutCase.from_settings({**MODEL, "parallel": parallel}, 4), dist.get_rank(), maker
        )
        now, following = (
            make_synthetic_batch(it.config, number, it.groups.dp.rank, it.groups.dp.size, True) for number in (0, 1)
        )
        result = train_step(
            it.executor, it.optimizer, list(split_micro_batches(now, it.config, torch.device("cpu"), it.groups.cp)),
            tokens=count_step_tokens(now, 0, it.groups), lr=0.0, clip=1.0,
            hooks=Scalars(StepScalars(stop_requested=dist.get_rank() == 3, next_tokens=count_local_tokens(following, 0, it.groups))),
        )  # fmt: skip
        out.append((result.scalars, count_step_tokens(following, 0, it.groups)))
    return out


def test_votes_and_the_next_steps_tokens_ride_with_a_step() -> None:
    for found in run_ranks(ridden, 4, timeout=60):
        assert [summed for summed, _ in found] == [StepScalars(1.0, next_tokens=tokens) for _, tokens in found]
