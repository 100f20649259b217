"""Megatron's functions of the consumed samples: what mega makes of the same settings is the same at every step."""

from __future__ import annotations

from typing import Any

import pytest

from mega_trainer.config import RunConfig

pytest.importorskip("megatron.core", reason="the reference implementation")

LR, DECOUPLED, STEPS = 1e-3, 5e-3, 40


def config(**sections: Any) -> RunConfig:
    model = {
        "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2, "vocab_size": 40,
    }  # fmt: skip
    return RunConfig.parse({"model": model, "data": {"train": "none"}, "train": {"steps": STEPS}, **sections})


@pytest.mark.parametrize(
    ("start", "increment", "size", "samples"),
    [(16, 16, 128, 5000), (8, 24, 128, 977), (32, 96, 128, 1), (4, 4, 44, 7777)],
)
def test_a_growing_batch(start: int, increment: int, size: int, samples: int) -> None:
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    theirs = RampupBatchsizeNumMicroBatchesCalculator(size, 4, 1, False, 1, start, increment, samples)
    ours = config(
        batch={"micro": 4, "global": size, "rampup": {"start": start, "increment": increment, "samples": samples}}
    )
    consumed = 0
    for step in range(400):
        theirs.update(consumed, consistency_check=True)
        assert ours.batch.at(consumed) == theirs.get_current_global_batch_size(), step
        consumed += theirs.get_current_global_batch_size()
    for consumed in range(samples + 2):  # also where no step begins
        theirs.update(consumed, consistency_check=False)
        assert ours.batch.at(consumed) == theirs.get_current_global_batch_size()


@pytest.mark.parametrize("name", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("decoupled_min", [None, 2e-4])
def test_learning_rates(name: str, warmup: int, decoupled_min: float | None) -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    schedule = {"name": name, "warmup_steps": warmup, "warmup_init": 1e-5, "min_lr": 1e-4}
    ours = config(
        batch={"global": 4},
        optimizer={"lr": LR, "decoupled_lr": DECOUPLED},
        lr_schedule={**schedule, "decoupled_min_lr": decoupled_min},
    )
    group: dict[str, Any] = {"max_lr": DECOUPLED} | ({} if decoupled_min is None else {"min_lr": decoupled_min})
    theirs = OptimizerParamScheduler(
        type("Optimizer", (), {"param_groups": []})(), init_lr=1e-5, max_lr=LR, min_lr=1e-4,
        lr_warmup_steps=4 * warmup, lr_decay_steps=4 * STEPS, lr_decay_style=name,
        start_wd=0.0, end_wd=0.0, wd_incr_steps=1, wd_incr_style="constant",
    )  # fmt: skip
    curve, decoupled = ours.lr_curve(), ours.decoupled_lr_curve()
    assert decoupled is not None
    for samples in range(0, 4 * STEPS + 8, 4):
        theirs.num_steps = samples
        assert curve(samples) == pytest.approx(theirs.get_lr({}), rel=1e-12)
        assert decoupled(samples) == pytest.approx(theirs.get_lr(group), rel=1e-12)
