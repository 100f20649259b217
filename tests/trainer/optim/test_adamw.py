from __future__ import annotations

from functools import partial

import pytest
import torch

from mega_ckpt.pieces import Piece
from mega_common.errors import ConfigError
from mega_trainer.comm import Group
from mega_trainer.config import RunConfig
from mega_trainer.optim.adamw import AdamW
from mega_trainer.optim.slots import Slot, Transfers
from mega_trainer.optim.zero import Optimizer
from mega_trainer.parallel.buckets import SLICE_ELEMENTS
from mega_trainer.parallel.grads import Sharing, flatten
from mega_trainer.parallel.param import make_parameter
from mega_trainer.parallel.shared import Kind, Shard

SETTINGS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ALONE = Group("dp")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def slots(weights: torch.Tensor, grads: torch.Tensor, length: int, *, decay: bool = True) -> list[Slot]:
    kind = Kind(ALONE, (), (), decay, False, torch.float32)
    parts = zip(weights.clone().split(length), grads.clone().split(length), strict=True)
    return [Slot(kind, True, Shard(w, g, []), w, g) for w, g in parts]


def test_an_element_does_not_depend_on_where_slices_are_cut() -> None:
    weights, elements = random(6 * SLICE_ELEMENTS), 6 * SLICE_ELEMENTS
    results = []
    for length in (elements, elements // 2, SLICE_ELEMENTS):
        held = slots(weights, weights, length)
        rule = AdamW(held, **SETTINGS)
        for step in range(5):
            for slot, grads in zip(held, random(elements, seed=step).split(length), strict=True):
                slot.shard.grads.copy_(grads)
            rule.step(Transfers(), 1e-2)
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
    assert tuple(map(config.lr_factor, names)) == rates
    model = torch.nn.Module()
    for number, name in enumerate(names):
        weight = make_parameter(
            (8, 8), [Piece.whole(name, (8, 8))], data=ALONE, dtype=torch.float32, device=torch.device("cpu")
        )
        model.register_parameter(str(number), weight)
    stage = flatten(model, Sharing(slices=False, lr_factor=config.lr_factor))
    for buffer in stage.buffers:
        for shard in buffer.shards:
            shard.weights.fill_(1.0)
            shard.grads.fill_(0.5)
    optimizer = Optimizer([stage], adamw=partial(AdamW, **SETTINGS))
    optimizer.update(1e-2, 1.0)
    optimizer.settle()
    for weight, rate in zip(model.parameters(), rates, strict=True):
        (alone,) = held = slots(torch.ones(64), torch.full((64,), 0.5), 64)
        AdamW(held, **SETTINGS).step(Transfers(), 1e-2 * rate)
        assert torch.equal(weight.detach().flatten(), alone.main)
    fused = [Piece(name, (4, 8), (0, 0), (4 * place, 0), (4, 8)) for place, name in enumerate(names[:2])]
    model.fused = make_parameter((8, 8), fused, data=ALONE, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"vision_tower.a.weight and model.layers.0.b.weight have different optimizer.lr_f"
    ):
        flatten(model, Sharing(slices=False, lr_factor=config.lr_factor))


@pytest.mark.parametrize("decay", [True, False])
def test_it_is_the_paper_s(decay: bool) -> None:
    weights, expected = random(SLICE_ELEMENTS), random(SLICE_ELEMENTS).double()
    (slot,) = held = slots(weights, weights, SLICE_ELEMENTS, decay=decay)
    rule, first, second = AdamW(held, **SETTINGS), torch.zeros(SLICE_ELEMENTS), torch.zeros(SLICE_ELEMENTS)
    for step in range(1, 4):
        slot.shard.grads.copy_(random(SLICE_ELEMENTS, seed=step))
        rule.step(Transfers(), 1e-2)
        grads = random(SLICE_ELEMENTS, seed=step).double()
        first, second = 0.9 * first + 0.1 * grads, 0.95 * second + 0.05 * grads**2
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        expected = expected - 1e-2 * (update + (0.1 * expected if decay else 0.0))
    torch.testing.assert_close(slot.main.double(), expected, rtol=1e-5, atol=1e-6)
    assert rule.steps == 3


def test_low_precision_has_main_weights_that_keep_small_updates() -> None:
    parameter = make_parameter(
        (4, 4), [Piece.whole("w", (4, 4))], data=ALONE, dtype=torch.bfloat16, device=torch.device("cpu")
    )
    model = torch.nn.Module()
    model.w = parameter
    with torch.no_grad():
        parameter.fill_(1.0)
    stage = flatten(model, Sharing(slices=False))
    optimizer = Optimizer([stage], adamw=lambda held: AdamW(held, **{**SETTINGS, "weight_decay": 0.0}))
    for _ in range(100):  # each moves by less than bf16 can tell from one
        stage.begin_step()
        with stage.backward(last=True):
            parameter.sum().backward()
        stage.finish()
        optimizer.update(1e-4, 1.0)
    assert optimizer.tensors().keys() == {f"optimizer/{kind}/w" for kind in ("exp_avg", "exp_avg_sq", "main")}
    assert parameter.detach().float().mean().item() == pytest.approx(0.99, abs=4e-3)
    assert optimizer.slots[0].main[:16].mean().item() == pytest.approx(0.99, abs=1e-4)
