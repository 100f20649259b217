from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from mega_ckpt.store import save_sharded_checkpoint
from mega_ckpt.tensor_pieces import TensorBox, copy_overlap
from mega_trainer.distributed.process_groups import ProcessGroupCache
from mega_trainer.optim.muon import muon_update_scale, orthogonalize
from mega_trainer.verify.case_comparison import (
    compare_cases_with_one_process,
    compute_largest_tensor_error,
    merge_findings_by_case,
)
from mega_trainer.verify.case_trainer import CaseTrainer
from mega_trainer.verify.layout_case import RunYamlLayoutCase


def random(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("shape", [(8, 8), (16, 48), (48, 16), (3, 24, 12)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_singular_values_come_near_one_and_directions_stay(shape, dtype) -> None:
    # singular values from 1/4 to 4, as spread as five rounds are made for
    u, _, vh = torch.linalg.svd(random(*shape), full_matrices=False)
    spread = torch.logspace(-2, 2, u.shape[-1], base=2, dtype=torch.float64)
    result = orthogonalize((u * spread) @ vh, dtype=dtype)
    assert result.shape == shape
    assert result.dtype == torch.float64
    values = torch.linalg.svdvals(result)
    assert values.min() > 0.6
    assert values.max() < 1.3
    core = u.mT @ result @ vh.mT  # diagonal, since the directions are those of the matrix
    off = core - torch.diag_embed(core.diagonal(dim1=-2, dim2=-1))
    assert off.abs().max() < (0.1 if dtype == torch.bfloat16 else 1e-4)


def test_it_is_the_polynomial_of_each_singular_value() -> None:
    matrix = random(5, 9)
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    torch.testing.assert_close(orthogonalize(matrix, dtype=torch.float64), (u * values) @ vh, atol=1e-5, rtol=1e-5)


def test_a_batch_is_its_matrices() -> None:
    batch = random(2, 3, 6, 10)
    apart = torch.stack([torch.stack([orthogonalize(m, dtype=torch.float64) for m in row]) for row in batch])
    torch.testing.assert_close(orthogonalize(batch, dtype=torch.float64), apart, atol=1e-12, rtol=1e-12)


def test_tall_is_wide_transposed() -> None:
    matrix = random(12, 5)
    wide = orthogonalize(matrix.mT, dtype=torch.float64)
    assert torch.equal(orthogonalize(matrix, dtype=torch.float64), wide.mT)


def test_size_does_not_matter_and_zeros_stay() -> None:
    matrix = random(6, 6)
    torch.testing.assert_close(
        orthogonalize(1000 * matrix, dtype=torch.float64), orthogonalize(matrix, dtype=torch.float64), atol=1e-5, rtol=0
    )
    assert torch.equal(orthogonalize(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_the_scale_gives_the_updates_of_adamw() -> None:
    rows, columns = 24, 96
    u, _, vh = torch.linalg.svd(random(rows, columns), full_matrices=False)
    update = muon_update_scale(rows, columns) * (u @ vh)
    assert update.square().mean().sqrt().item() == pytest.approx(0.2)


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_kv_heads": 2,
            "vocab_size": 37,
        },
        "data": {"train": [{"path": "none"}], "seq_length": 12},
        "batch": {"micro": 1, "global": 4},
        "optimizer": {"name": "muon", "muon": {"lr_factor": 2.0, "weight_decay": 0.3}, "clip_grad": 0.0},
        "precision": "fp64",
        **changes,
    }  # fmt: skip


def whole_tensors(trainer: CaseTrainer, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors by canonical name, of a trainer in one process."""
    held = (
        trainer.state.checkpoint_tensors()
        | {f"gradients/{n}": held for n, held in trainer.optimizer.gradients_by_name().items()}
    ).items()
    out = {}
    for name, sharded in held:
        if name.startswith(prefix):
            out[name.removeprefix(prefix)] = tensor = torch.zeros(sharded.shape, dtype=torch.float64)
            for box in sharded.boxes:
                copy_overlap(TensorBox((0,) * tensor.dim(), tensor), box)
    return out


def test_each_canonical_matrix_of_the_layers_moves_by_its_own_orthogonal_one() -> None:
    muon = CaseTrainer.build(RunYamlLayoutCase.from_settings(settings()))
    adamw = CaseTrainer.build(RunYamlLayoutCase.from_settings(settings(optimizer={"clip_grad": 0.0})))
    weights, momentum, lr = whole_tensors(muon, "weights/"), {}, 1e-2
    for number in range(2):
        for trainer in (muon, adamw):
            trainer.step(number)
        grads, after = whole_tensors(muon, "gradients/"), whole_tensors(muon, "weights/")
        hidden = {name for name in weights if name.startswith("model.layers.") and weights[name].dim() == 2}
        assert len(hidden) == 2 * 7
        for name in hidden:
            momentum[name] = 0.95 * momentum.get(name, 0.0) + grads[name]
            direction = orthogonalize(grads[name] + 0.95 * momentum[name], dtype=torch.float64)
            step = 2 * lr * (muon_update_scale(*direction.shape) * direction + 0.3 * weights[name])
            torch.testing.assert_close(after[name], weights[name] - step, rtol=1e-11, atol=1e-13)
        weights = after
        if number == 0:  # the rest is AdamW's
            for name, value in whole_tensors(adamw, "weights/").items():
                assert torch.equal(value, after[name]) == (name not in hidden)
    saved = whole_tensors(muon, "optimizer/muon_momentum/")
    assert saved.keys() == hidden
    assert whole_tensors(muon, "optimizer/exp_avg/").keys() == weights.keys() - hidden
    for name in hidden:
        torch.testing.assert_close(saved[name], momentum[name], rtol=1e-12, atol=0)


LAYOUTS = [
    {"zero": 0},
    {"zero": 2},
    {"zero": 3},
    {"zero": 3, "zero3_shard": 2},
    {"zero": 3, "tp": 2},
    {"zero": 1, "tp": 2, "sp": True},
    {"zero": 2, "tp": 2, "pp": 2},
    {"tp": 4},
]


def test_the_update_does_not_depend_on_the_layout() -> None:
    cases = [RunYamlLayoutCase.from_settings(settings(parallel=parallel), 4) for parallel in LAYOUTS]
    results = merge_findings_by_case(cases, run_ranks(compare_cases_with_one_process, 4, cases, timeout=120))
    problems = [result.describe_problem(1e-10) for result in results]
    assert not any(problems), problems


def save_two_steps(folder: Path) -> None:
    trainer = CaseTrainer.build(
        RunYamlLayoutCase.from_settings(settings(parallel={"tp": 2}), 2), dist.get_rank(), ProcessGroupCache()
    )
    trainer.run(2)
    save_sharded_checkpoint(
        folder,
        2,
        trainer.state.checkpoint_tensors(),
        model=trainer.config.model,
        state=trainer.state.checkpoint_state(),
    )


def test_the_momentum_goes_into_checkpoints_by_name(tmp_path: Path) -> None:
    run_ranks(save_two_steps, 2, tmp_path, timeout=60)
    straight, resumed = (
        CaseTrainer.build(RunYamlLayoutCase.from_settings(settings())),
        CaseTrainer.build(RunYamlLayoutCase.from_settings(settings())),
    )
    straight.run(2)
    (folder,) = tmp_path.glob("step-*")
    resumed.state.restore_checkpoint(folder, None)
    for trainer in (straight, resumed):
        trainer.step(2)
    assert compute_largest_tensor_error(resumed.state.checkpoint_tensors(), straight.state.checkpoint_tensors()) < 1e-10
