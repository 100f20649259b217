"""SOAP: against the authors' algorithm step by step, and in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from extension_cases import SIZES, find_differences
from parity.cases import case
from ranks import run_ranks

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.optim.soap import SoapMatrixState
from mega_trainer.plan.memory_advice import make_training_layout
from mega_trainer.plan.memory_prediction import predict_memory
from mega_trainer.verify.case_comparison import merge_rank_findings
from mega_trainer.verify.case_trainer import CaseTrainer, make_case_process_groups
from mega_trainer.verify.layout_case import LayoutCase
from mega_trainer.verify.restore_comparison import restore_in_other_layouts

BETAS, EPS, GRAM_BETA = (0.9, 0.95), 1e-8, 0.8


def reference(gradients: list[torch.Tensor], frequency: int) -> list[torch.Tensor]:
    """Algorithm 3 of the paper, with eigenvectors as full factors and moments of a dense vector: updates by step."""
    m, n = gradients[0].shape

    def shifted(gram: torch.Tensor) -> torch.Tensor:
        shift = [0.01 * gram.trace().item() / len(gram) * (1 - i / (len(gram) - 1)) for i in range(len(gram))]
        return gram + torch.diag(torch.tensor(shift, dtype=gram.dtype))

    left, right = torch.zeros(m, m, dtype=torch.float64), torch.zeros(n, n, dtype=torch.float64)
    first, second, out = torch.zeros(m, n, dtype=torch.float64), torch.zeros(m * n, dtype=torch.float64), []
    basis = None
    for step, grad in enumerate(gradients):
        before = basis
        left = GRAM_BETA * left + (1 - GRAM_BETA) * grad @ grad.T
        right = GRAM_BETA * right + (1 - GRAM_BETA) * grad.T @ grad
        if before is None:
            basis = [torch.linalg.eigh(shifted(gram))[1].flip(1) for gram in (left, right)]
            out.append(torch.zeros_like(grad))
            continue
        kron = torch.kron(before[0], before[1])  # [m n, m n]: row-major vectors into the basis by its transpose
        first = BETAS[0] * first + (1 - BETAS[0]) * grad
        second = BETAS[1] * second + (1 - BETAS[1]) * (kron.T @ grad.flatten()) ** 2
        corrected = (kron.T @ first.flatten()) / (1 - BETAS[0] ** step)
        direction = corrected / ((second / (1 - BETAS[1] ** step)).sqrt() + EPS / (1 - BETAS[1] ** step) ** 0.5)
        out.append((kron @ direction).view(m, n))
        if step % frequency == 0:
            moved, basis = second.view(m, n), []
            for axis, (gram, old) in enumerate(zip(map(shifted, (left, right)), before, strict=True)):
                order = torch.diagonal(old.T @ gram @ old).argsort(descending=True)
                moved = moved.index_select(axis, order)
                basis.append(torch.linalg.qr(gram @ old[:, order])[0])
            second = moved.flatten()
    return out


@pytest.mark.parametrize("frequency", [1, 3])
def test_updates_are_those_of_the_paper(frequency: int) -> None:
    draw = torch.Generator().manual_seed(3)
    gradients = [torch.randn(2, 4, 6, dtype=torch.float64, generator=draw) for _ in range(8)]
    state = SoapMatrixState("w", (2, 4, 6), gradients[0].new_empty(0), 100)
    expected = [reference([grad[index] for grad in gradients], frequency) for index in range(2)]
    for step, grad in enumerate(gradients):
        update = state.compute_update(grad, step + 1, betas=BETAS, eps=EPS, gram_beta=GRAM_BETA, frequency=frequency)
        for index in range(2):
            torch.testing.assert_close(update[index], expected[index][step], rtol=1e-9, atol=1e-9)


def test_a_wide_side_is_not_rotated() -> None:
    state = SoapMatrixState("w", (4, 12), torch.empty(0), max_width=8)
    assert set(state.tensors()) == {"soap_exp_avg", "soap_exp_avg_sq", "soap_left", "soap_left_basis"}
    grad = torch.randn(4, 12)
    for step in (1, 2):
        update = state.compute_update(grad, step, betas=BETAS, eps=EPS, gram_beta=GRAM_BETA, frequency=1)
    rotated = state.left_basis.T @ update
    assert update.abs().max() > 0.1
    torch.testing.assert_close(rotated.abs(), torch.full_like(rotated, 1.0), rtol=0.2, atol=0.2)


def test_every_layout_computes_what_one_process_computes() -> None:
    """With the state, which is saved by matrix."""
    layouts = [{"zero": 0}, {"tp": 2, "sp": True, "zero": 2}, {"tp": 2, "zero": 3}, {"pp": 2, "zero": 1}]
    optimizer = {"name": "soap", "soap": {"frequency": 1}}
    cases = [
        LayoutCase("soap", {**SIZES, "num_layers": 2}, 4, parallel=layout, micro=2, sections={"optimizer": optimizer})
        for layout in layouts
    ]
    cases.append(case("gqa", 4, parallel={"tp": 4}, micro=2, sections={"optimizer": optimizer}))
    assert not find_differences(cases)


def test_a_checkpoint_resumes_in_another_layout(tmp_path: Path) -> None:
    before, after = (
        case("dense", 2, parallel=parallel, micro=2, sections={"optimizer": {"name": "soap"}})
        for parallel in ({"zero": 1}, {"tp": 2})
    )
    for found in zip(*run_ranks(restore_in_other_layouts, 2, [(before, after)], tmp_path), strict=True):
        for one in found:
            assert not one.differing
        assert not merge_rank_findings(after, [one.steps for one in found]).describe_problem(1e-10)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora": {"rank": 2}, "init_from": "base"}, "optimizer.name = 'soap': is not supported with lora"),
        ({"fault": {"hash_every": 5}}, "fault.hash_every = 5: is not supported with optimizer.name = soap"),
    ],
)
def test_what_it_cannot_do_is_refused(settings: dict[str, Any], said: str) -> None:
    run = {"model": {**SIZES, "num_layers": 2}, "data": {"train": "data/train"}, "optimizer": {"name": "soap"}}
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse({**run, **settings})
    assert said in str(caught.value)


def count_state_bytes(cases: list[LayoutCase]) -> list[int]:
    """Bytes of the optimizer's state on this rank in each case, without main weights."""
    maker = make_case_process_groups(cases)
    found = []
    for each in cases:
        optimizer = CaseTrainer.build(each, dist.get_rank(), maker).optimizer
        weights = [
            each for slot in optimizer.slots for each in (slot.shard.weights, slot.shard.grads, slot.main, slot.grads)
        ]
        kept, own = (sum(tensor.nbytes for tensor in each) for each in (optimizer.persistent_tensors(), weights))
        found.append(kept - own)
    return found


@pytest.mark.parametrize(("ranks", "layouts"), [(1, [{}]), (2, [{"zero": 0}, {"zero": 1}, {"tp": 2}, {"pp": 2}])])
def test_its_state_is_planned(ranks: int, layouts: list[dict[str, Any]]) -> None:
    """On the rank that has most, with sides of up to 64 rotated and experts as a stack of matrices."""
    optimizer = {"name": "soap", "soap": {"max_width": 64}}
    cases = [
        case(name, ranks, parallel=parallel, micro=2, sections={"optimizer": optimizer})
        for name in ("dense", "moe") for parallel in layouts
    ]  # fmt: skip
    held = run_ranks(count_state_bytes, ranks, cases)
    for index, each in enumerate(cases):
        config = RunConfig.parse(each.raw)
        planned = predict_memory(config.model, make_training_layout(config, ranks))
        assert max(rank["optimizer"] for rank in planned) == pytest.approx(max(own[index] for own in held), rel=0.01)
