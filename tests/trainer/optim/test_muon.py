from __future__ import annotations

import pytest
import torch

from mega_trainer.optim.muon import orthogonalize, update_scale


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
    update = update_scale(rows, columns) * (u @ vh)
    assert update.square().mean().sqrt().item() == pytest.approx(0.2)
