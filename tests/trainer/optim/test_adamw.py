from __future__ import annotations

from functools import partial

import pytest
import torch

from mega_ckpt.tensor_pieces import TensorPiece
from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.optim.adamw import AdamWUpdateRule
from mega_trainer.optim.optimizer_slots import OptimizerOffloadTransfers, OptimizerSlot
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.parallel.gradient_buckets import SLICE_ELEMENTS
from mega_trainer.parallel.parameter_info import make_parameter
from mega_trainer.parallel.parameter_shards import GatheredShardLayout, ParameterShard, ParamGroupKey
from mega_trainer.parallel.zero_buffers import ZeroConfig, flatten_parameters

SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ALONE = CommGroup("dp")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slots(weights: torch.Tensor, grads: torch.Tensor, length: int, *, decay: bool = True) -> list[OptimizerSlot]:
    kind = ParamGroupKey(ALONE, (), (), decay, False, torch.float32)
    parts = zip(weights.clone().split(length), grads.clone().split(length), strict=True)
    return [
        OptimizerSlot(kind, True, ParameterShard(w, g, [], GatheredShardLayout(len(w), {})), w, g) for w, g in parts
    ]


def test_an_element_does_not_depend_on_where_slices_are_cut() -> None:
    weights, elements = random(6 * SLICE_ELEMENTS), 6 * SLICE_ELEMENTS
    results = []
    for length in (elements, elements // 2, SLICE_ELEMENTS):
        held = slots(weights, weights, length)
        rule = AdamWUpdateRule(held, **SETTINGS)
        for step in range(5):
            for slot, grads in zip(held, random(elements, seed=step).split(length), strict=True):
                slot.shard.grads.copy_(grads)
            rule.update_slots(OptimizerOffloadTransfers(), 1e-2)
        results.append(torch.cat([slot.main for slot in held]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_tensors_have_the_rates_that_patterns_of_their_names_give() -> None:
    """Each moves as in an optimizer of its own at that rate; what lies in one matrix has one."""
    names = ("model.vision_tower.a.weight", "model.layers.0.b.weight", "lm_head.weight")
    raw = {
        "model": {"num_layers": 1, "hidden_size": 4, "ffn_hidden_size": 4, "num_attention_heads": 1, "vocab_size": 4},
        "data": {"train": ["none"]}, "optimizer": {"lr_factors": {"model.*": 0.1, "model.vision_tower.*": 2}},
    }  # fmt: skip
    config, rates = RunConfig.parse(raw), (2.0, 0.1, 1.0)
    assert tuple(map(config.lr_factor_of, names)) == rates
    model = torch.nn.Module()
    for number, name in enumerate(names):
        weight = make_parameter(
            (8, 8),
            [TensorPiece.whole_tensor(name, (8, 8))],
            data=ALONE,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        model.register_parameter(str(number), weight)
    stage = flatten_parameters(model, ZeroConfig(shard_grads=False, lr_factor=config.lr_factor_of))
    for buffer in stage.buffers:
        for shard in buffer.shards:
            shard.weights.fill_(1.0)
            shard.grads.fill_(0.5)
    optimizer = ShardedOptimizer([stage], adamw=partial(AdamWUpdateRule, **SETTINGS))
    optimizer.apply_update(1e-2, 1.0)
    optimizer.wait_for_params()
    for weight, rate in zip(model.parameters(), rates, strict=True):
        (alone,) = held = slots(torch.ones(64), torch.full((64,), 0.5), 64)
        AdamWUpdateRule(held, **SETTINGS).update_slots(OptimizerOffloadTransfers(), 1e-2 * rate)
        assert torch.equal(weight.detach().flatten(), alone.main)
    fused = [TensorPiece(name, (4, 8), (0, 0), (4 * place, 0), (4, 8)) for place, name in enumerate(names[:2])]
    model.fused = make_parameter((8, 8), fused, data=ALONE, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"lr_factors must be equal for model.vision_tower.a.weight and model.layers.0.b.weight"
    ):
        flatten_parameters(model, ZeroConfig(shard_grads=False, lr_factor=config.lr_factor_of))


@pytest.mark.parametrize("decay", [True, False])
def test_it_is_the_paper_s(decay: bool) -> None:
    weights, expected = random(SLICE_ELEMENTS), random(SLICE_ELEMENTS).double()
    (slot,) = held = slots(weights, weights, SLICE_ELEMENTS, decay=decay)
    rule, first, second = AdamWUpdateRule(held, **SETTINGS), torch.zeros(SLICE_ELEMENTS), torch.zeros(SLICE_ELEMENTS)
    for step in range(1, 4):
        slot.shard.grads.copy_(random(SLICE_ELEMENTS, seed=step))
        rule.update_slots(OptimizerOffloadTransfers(), 1e-2)
        grads = random(SLICE_ELEMENTS, seed=step).double()
        first, second = 0.9 * first + 0.1 * grads, 0.95 * second + 0.05 * grads**2
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        expected = expected - 1e-2 * (update + (0.1 * expected if decay else 0.0))
    torch.testing.assert_close(slot.main.double(), expected, rtol=1e-5, atol=1e-6)
    assert rule.update_count == 3


def test_low_precision_has_main_weights_that_keep_small_updates() -> None:
    parameter = make_parameter(
        (4, 4), [TensorPiece.whole_tensor("w", (4, 4))], data=ALONE, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    model = torch.nn.Module()
    model.w = parameter
    with torch.no_grad():
        parameter.fill_(1.0)
    stage = flatten_parameters(model, ZeroConfig(shard_grads=False))
    optimizer = ShardedOptimizer([stage], adamw=lambda held: AdamWUpdateRule(held, **{**SETTINGS, "weight_decay": 0.0}))
    for _ in range(100):  # each moves by less than bf16 can tell from one
        stage.begin_step()
        with stage.backward_context(last=True):
            parameter.sum().backward()
        stage.finish_gradients()
        optimizer.apply_update(1e-4, 1.0)
    assert optimizer.checkpoint_tensors().keys() == {
        f"optimizer/{kind}/w" for kind in ("exp_avg", "exp_avg_sq", "main")
    }
    assert parameter.detach().float().mean().item() == pytest.approx(0.99, abs=4e-3)
    assert optimizer.slots[0].main[:16].mean().item() == pytest.approx(0.99, abs=1e-4)
