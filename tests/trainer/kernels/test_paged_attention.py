from __future__ import annotations

from typing import Any

import pytest
import torch

from mega_common.encoder_config import RelativePositionConfig
from mega_trainer.kernels.attention_masks import ALL, VisiblePagedKeys
from mega_trainer.kernels.kernel_interface import AttentionScoreTransform
from mega_trainer.kernels.paged_attention import CPU_GATHER_BYTES, choose_paged_attention, supports_paged_attention
from mega_trainer.kernels.torch_kernels import TorchKernels, reference_attention
from mega_trainer.model.relative_position_bias import BucketedPositionBias, LinearPositionBias

HEADS, SIZE, PAGE = 4, 8, 4
LENGTHS, TABLE = (1, 9, 4, 12), torch.tensor([[7, 0, 0], [2, 5, 1], [6, 0, 0], [3, 8, 4]], dtype=torch.int32)
GENERATOR = torch.Generator().manual_seed(0)
SLOPES = LinearPositionBias(torch.tensor([0.5, 0.25, 0.1, 0.7], dtype=torch.float64))
BUCKETS = BucketedPositionBias(
    torch.randn(8, HEADS, generator=GENERATOR, dtype=torch.float64), RelativePositionConfig(buckets=8, max_distance=10), True
)  # fmt: skip
SINKS = torch.randn(HEADS, generator=GENERATOR, dtype=torch.float64)


def slots_of(row: int, first: int) -> torch.Tensor:
    """Return the cache slots of a row's keys from a position on."""
    return (TABLE[row, :, None] * PAGE + torch.arange(PAGE)).flatten()[first : LENGTHS[row]]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("window", "terms"),
    [
        (None, {}),
        (3, {}),
        (None, {"softcap": 2.0}),
        (5, {"sinks": SINKS}),
        (None, {"softcap": 2.0, "sinks": SINKS}),
        (None, {"bias": SLOPES}),
        (3, {"bias": BUCKETS}),
    ],
    ids=["all", "window", "soft cap", "sinks and window", "soft cap and sinks", "ALiBi", "buckets and window"],
)
def test_rows_attend_together_as_each_does_alone(kv_heads: int, window: int | None, terms: dict[str, Any]) -> None:
    """Slots outside of the rows are NaN, as memory that was never written may be."""
    first = [0 if window is None else max(0, length - window) for length in LENGTHS]
    used = torch.cat([slots_of(row, 0) for row in range(len(LENGTHS))])
    q = torch.randn(len(LENGTHS), HEADS, SIZE, generator=GENERATOR, dtype=torch.float64)
    keys, values = torch.full((2, 9 * PAGE, kv_heads, SIZE), float("nan"), dtype=torch.float64)
    for held in (keys, values):
        held[used] = torch.randn(len(used), kv_heads, SIZE, generator=GENERATOR, dtype=torch.float64)
    rows = VisiblePagedKeys.from_bounds(TABLE, first, LENGTHS, PAGE, window=window)
    bias = terms.get("bias")
    others = {name: value for name, value in terms.items() if name != "bias"}

    def transform(count: int) -> AttentionScoreTransform:
        how = AttentionScoreTransform(0.3, **others)
        return how if bias is None else bias.add_to_scores(how, 1, count)

    for latents in (False, True):
        own_values = keys if latents else values
        found = TorchKernels().paged_attention(q, keys, own_values, rows, transform(rows.longest), "gathered")
        for row, start in enumerate(first):
            slots = slots_of(row, start)
            alone = reference_attention(
                q[row][None, None], keys[slots][None], own_values[slots][None], ALL, transform(len(slots))
            )
            torch.testing.assert_close(found[row], alone[0, 0], rtol=1e-12, atol=1e-12)


def test_the_choice_goes_by_the_cost_of_copies() -> None:
    how = AttentionScoreTransform(0.3)
    most = CPU_GATHER_BYTES // (2 * SIZE * 4)  # keys of a row, one head in fp32
    for length, count, expected in [(most, 2, "gathered"), (most + 1, 2, "rows"), (3, 1, "rows")]:
        table = torch.zeros(count, length // PAGE + 1, dtype=torch.int32)
        rows = VisiblePagedKeys.from_bounds(table, [0] * count, [length] * count, PAGE)
        q, keys, values = torch.zeros(count, HEADS, SIZE), torch.zeros(PAGE, 1, SIZE), torch.zeros(PAGE, 1, SIZE)
        assert choose_paged_attention(q, keys, values, rows, how) == expected
        assert not supports_paged_attention("flash", q, keys, values, rows, how)  # a CPU
    assert not supports_paged_attention("gathered", q, keys, values, rows, SLOPES.add_to_scores(
        AttentionScoreTransform(0.3, sinks=SINKS), 1, 3
    ))  # fmt: skip
