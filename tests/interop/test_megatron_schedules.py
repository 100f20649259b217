"""What Megatron's settings of training compute: rates and batches at every step, the choice of experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron_oracle import BASE

from mega_ckpt.formats.megatron_args import read_megatron_args
from mega_common.model_config import ModelConfig
from mega_trainer.config.run_config import RunConfig
from mega_trainer.model.expert_router import ExpertRouter
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.expert_routing import MicroBatchRouting, RoutedTokens

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
        assert ours.batch.batch_size_after_samples(consumed) == theirs.get_current_global_batch_size(), step
        consumed += theirs.get_current_global_batch_size()
    for consumed in range(samples + 2):  # also where no step begins
        theirs.update(consumed, consistency_check=False)
        assert ours.batch.batch_size_after_samples(consumed) == theirs.get_current_global_batch_size()


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
    curve, decoupled = ours.build_lr_curve(), ours.build_decoupled_lr_curve()
    assert decoupled is not None
    for samples in range(0, 4 * STEPS + 8, 4):
        theirs.num_steps = samples
        assert curve(samples) == pytest.approx(theirs.get_lr({}), rel=1e-12)
        assert decoupled(samples) == pytest.approx(theirs.get_lr(group), rel=1e-12)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_a_balanced_choice_of_experts(top_k: int) -> None:
    """Of one sequence, whose tokens are all that Megatron's rank has; in training and after it."""
    from megatron.core.transformer.moe.router import TopKRouter

    torch.manual_seed(0)
    settings = {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": top_k, "num_experts": 8}
    moe = read_megatron_args({**BASE, **settings}, "args").moe
    assert moe is not None
    like = SimpleNamespace(topk=top_k, config=SimpleNamespace(moe_aux_loss_coeff=0.0), training=True)
    width = {"num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8}
    ours = ExpertRouter(
        LayerBuilder(ModelConfig.model_validate({**width, "init_std": 1.0, "moe": moe.model_dump()})), 0
    )
    initialize_weights(ours, 1)
    x = torch.randn(64, 16)
    logits, there = torch.nn.functional.linear(x, ours.weight), torch.ones(64, dtype=torch.bool)
    tokens = RoutedTokens(torch.zeros(64, dtype=torch.long), torch.arange(64), there, 1, 64)
    for like.training, routing in ((True, MicroBatchRouting(None, None, 1.0, 1.0)), (False, None)):
        scores, chosen_there = TopKRouter.sinkhorn_load_balancing(like, logits)
        chosen, weights, _ = ours(x, tokens, routing)
        assert torch.zeros_like(chosen_there).scatter(1, chosen, True).equal(chosen_there)
        torch.testing.assert_close(torch.zeros_like(scores).scatter(1, chosen, weights.detach()), scores)
