"""Lion and SGD: against their published formulas and torch's, and in every layout."""

from __future__ import annotations

import pytest
import torch
from extension_cases import SIZES, find_differences

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.optim.elementwise import LionUpdate, SgdUpdate
from mega_trainer.verify.layout_case import LayoutCase

STEPS = 4
RUN = {
    "model": {**SIZES, "num_layers": 2}, "data": {"train": "data/train", "seq_length": 16}, "train": {"steps": 2},
    "output": "runs/x",
}  # fmt: skip


@pytest.mark.parametrize(("momentum", "nesterov", "decay"), [(0.0, False, 0.1), (0.9, False, 0.1), (0.8, True, 0.0)])
def test_sgd_is_that_of_torch(momentum: float, nesterov: bool, decay: float) -> None:
    theirs = torch.nn.Parameter(torch.randn(7, dtype=torch.float64))
    ours, rule = theirs.detach().clone(), SgdUpdate(momentum, nesterov=nesterov)
    state = {name: torch.zeros_like(ours) for name in rule.state}
    optimizer = torch.optim.SGD([theirs], lr=0.3, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    for step in range(1, STEPS + 1):
        theirs.grad = torch.randn_like(theirs)
        rule.update(ours, theirs.grad, state, lr=0.3, weight_decay=decay, step=step)
        optimizer.step()
        torch.testing.assert_close(ours, theirs.detach())


def test_lion_is_algorithm_2_of_its_paper() -> None:
    weight = torch.randn(7, dtype=torch.float64)
    ours, momentum, state = (
        weight.clone(),
        torch.zeros(7, dtype=torch.float64),
        {"exp_avg": torch.zeros(7, dtype=torch.float64)},
    )
    for step in range(1, STEPS + 1):
        gradient = torch.randn(7, dtype=torch.float64)
        update = torch.sign(0.9 * momentum + 0.1 * gradient)
        weight = weight - 0.02 * (update + 0.3 * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
        LionUpdate((0.9, 0.99)).update(ours, gradient, state, lr=0.02, weight_decay=0.3, step=step)
        torch.testing.assert_close(ours, weight)
        torch.testing.assert_close(state["exp_avg"], momentum)


def test_every_layout_computes_what_one_process_computes() -> None:
    layouts = [{"zero": 1}, {"tp": 2, "zero": 2}, {"zero": 3}, {"pp": 2, "zero": 1}]
    runs = [{"name": "sgd"}, {"name": "sgd", "offload": True, "sgd": {"nesterov": True}}, {"name": "lion", "lr": 1e-4}]
    cases = [
        LayoutCase("optimizer", {**SIZES, "num_layers": 2}, 4, parallel=layout, micro=2, sections={"optimizer": run})
        for layout in layouts
        for run in runs
    ]
    assert not find_differences(cases)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"name": "sgd", "sgd": {"nesterov": True, "momentum": 0.0}},
            "optimizer.sgd.nesterov = true: requires momentum",
        ),
        ({"name": "lyon"}, "optimizer.name = 'lyon'"),
        ({"name": "lion", "options": {"beta": 1}}, "optimizer.options"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse({**RUN, "optimizer": settings})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "moments"),
    [
        ({}, 2),
        ({"name": "muon"}, 2),
        ({"name": "lion"}, 1),
        ({"name": "adamw8bit"}, 2 * 65 / 256),
        ({"name": "sgd"}, 1),
        ({"name": "sgd", "sgd": {"momentum": 0}}, 0),
    ],
)
def test_memory_counts_the_states_of_the_optimizer(settings: dict[str, object], moments: int) -> None:
    assert RunConfig.parse({**RUN, "optimizer": settings}).optimizer.moments == moments
