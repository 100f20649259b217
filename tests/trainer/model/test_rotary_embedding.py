"""Rotation angles against transformers, for every way of stretching the context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega_common.model_config import ModelConfig, RopeConfig
from mega_trainer.kernels.kernel_interface import RotaryAngles
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.model.rotary_embedding import RotaryEmbedding, rotary_frequencies

KERNELS = TorchKernels()
SHORT, LONG = [1.0 + n / 10 for n in range(16)], [2.0 + n for n in range(16)]
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # ours, transformers'
    "none": ({}, {"rope_type": "default"}),
    "linear": ({"scaling": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": ({"scaling": "dynamic", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}),
    "llama3": (
        {"scaling": "llama3", "factor": 8.0, "original_max_position": 64},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "yarn": (
        {"scaling": "yarn", "factor": 4.0, "original_max_position": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "yarn with mscale": (
        {
            "scaling": "yarn", "factor": 40.0, "original_max_position": 64, "beta_fast": 16.0, "beta_slow": 2.0,
            "mscale": 0.7, "mscale_all_dim": 1.3,
        },
        {
            "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
            "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 1.3,
        },
    ),
    "yarn with fractions": (
        {"scaling": "yarn", "factor": 4.0, "original_max_position": 64, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    ),
    "long": (
        {"scaling": "longrope", "original_max_position": 128, "short_factor": SHORT, "long_factor": LONG},
        {
            "rope_type": "longrope", "original_max_position_embeddings": 128, "short_factor": SHORT, "long_factor": LONG,
        },
    ),
    "long with factors": (
        {
            "scaling": "longrope", "original_max_position": 128, "short_factor": SHORT, "long_factor": LONG,
            "factor": 8.0,
        },
        {
            "rope_type": "longrope", "original_max_position_embeddings": 128, "short_factor": SHORT, "long_factor": LONG,
            "factor": 8.0,
        },
    ),
    "long with attention": (
        {
            "scaling": "longrope", "original_max_position": 128, "short_factor": SHORT, "long_factor": LONG,
            "attention_factor": 1.3,
        },
        {
            "rope_type": "longrope", "original_max_position_embeddings": 128, "short_factor": SHORT, "long_factor": LONG,
            "attention_factor": 1.3,
        },
    ),
}  # fmt: skip


def config(**rope: Any) -> ModelConfig:
    return ModelConfig(
        num_layers=1, hidden_size=64, ffn_hidden_size=8, num_attention_heads=2, vocab_size=8, max_position=256,
        rope=RopeConfig(theta=1000.0, **rope),
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [100, 700])
def test_frequencies_are_those_of_transformers(kind: str, length: int) -> None:
    pytest.importorskip("transformers", reason="the oracle")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    mine, theirs = KINDS[kind]
    oracle = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=64, num_attention_heads=2, max_position_embeddings=256,
            rope_parameters={"rope_theta": 1000.0, **theirs},
        )
    )  # fmt: skip
    positions = torch.arange(length)[None]
    cos, sin = oracle(torch.zeros(1, length, 64), positions)
    found = RotaryEmbedding.from_model_config(config(**mine), config(**mine).rope).compute_rotation(
        positions, torch.float32
    )
    torch.testing.assert_close(found.cos[:, :, 0], cos[..., :16], rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(found.sin[:, :, 0], sin[..., :16], rtol=1e-5, atol=5e-5)


def test_a_rotation_depends_on_the_distance_alone() -> None:
    turn = RotaryEmbedding.from_model_config(config(), config().rope).compute_rotation(
        torch.tensor([[0, 3, 10, 13]]), torch.float64
    )
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 32, generator=g, dtype=torch.float64).expand(1, 4, 1, 32) for _ in range(2))
    q, k = KERNELS.apply_rotary(q, turn), KERNELS.apply_rotary(k, turn)
    scores = torch.einsum("bqhd,bkhd->bqk", q, k)[0]
    torch.testing.assert_close(scores[1, 0], scores[3, 2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[2, 0], scores[3, 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "long"])
def test_a_row_turns_as_it_would_alone(kind: str) -> None:
    """Whatever stands beside it in a batch, and however long that is."""
    made, length = config(**KINDS[kind][0]), 300
    short, long = torch.arange(length).clamp(max=99), torch.arange(length)
    both = RotaryEmbedding.from_model_config(made, made.rope).compute_rotation(
        torch.stack([short, long]), torch.float32
    )
    for row, positions in enumerate([short, long]):
        alone = RotaryEmbedding.from_model_config(made, made.rope).compute_rotation(positions[None], torch.float32)
        assert torch.equal(both.cos[row], alone.cos[0])
    assert not torch.equal(both.cos[0, :50], both.cos[1, :50])


def test_only_a_fraction_of_a_head_is_rotated() -> None:
    x = torch.ones(1, 5, 2, 32)
    turn = RotaryEmbedding.from_model_config(config(fraction=0.25), config(fraction=0.25).rope).compute_rotation(
        torch.arange(5)[None], torch.float32
    )
    y = KERNELS.apply_rotary(x, turn)
    assert turn.cos.shape[-1] == 4
    assert torch.equal(y[..., 8:], x[..., 8:])
    assert not torch.equal(y[:, 1:, :, :8], x[:, 1:, :, :8])
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


def test_by_hand() -> None:
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).view(1, 1, 1, 4)
    angle = torch.tensor([0.5, 0.25]).view(1, 1, 1, 2)
    y = KERNELS.apply_rotary(x, RotaryAngles(angle.cos(), angle.sin())).flatten()
    cos, sin = angle.flatten().cos(), angle.flatten().sin()
    torch.testing.assert_close(y, torch.stack([cos[0], -2 * sin[1], sin[0], 2 * cos[1]]))


def test_neighbors_turn_as_the_halves_they_would_be() -> None:
    """Weights whose rows are reordered from halves to pairs give the same scores, partly rotated heads too."""
    plain, paired = config(fraction=0.5), config(fraction=0.5, interleaved=True)
    q, k = torch.randn(2, 1, 7, 2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = [*torch.arange(16).view(2, 8).t().flatten().tolist(), *range(16, 32)]
    halves, pairs = (
        RotaryEmbedding.from_model_config(c, c.rope).compute_rotation(torch.arange(7)[None], torch.float64)
        for c in (plain, paired)
    )
    expected = torch.einsum("bqhd,bkhd->bhqk", KERNELS.apply_rotary(q, halves), KERNELS.apply_rotary(k, halves))
    found = torch.einsum(
        "bqhd,bkhd->bhqk", KERNELS.apply_rotary(q[..., order], pairs), KERNELS.apply_rotary(k[..., order], pairs)
    )
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(
        torch.einsum("bqhd,bkhd->bhqk", KERNELS.apply_rotary(q, pairs), KERNELS.apply_rotary(k, pairs)), expected
    )


def test_dynamic_grows_only_past_the_length_the_model_was_made_for() -> None:
    rope = RopeConfig(scaling="dynamic", factor=2.0)
    plain, _ = rotary_frequencies(RopeConfig(), 32, 256, 256)
    for length, same in [(100, True), (256, True), (257, False)]:
        assert torch.equal(rotary_frequencies(rope, 32, 256, length)[0], plain) == same


def test_a_part_of_a_sequence_is_rotated_as_in_the_whole() -> None:
    rope = RopeConfig(scaling="dynamic", factor=2.0)
    config = ModelConfig(
        num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1, vocab_size=8, rope=rope, max_position=8
    )
    positions = torch.arange(16)[None]
    whole = RotaryEmbedding.from_model_config(config, rope).compute_rotation(positions, torch.float32)
    part = RotaryEmbedding.from_model_config(config, rope).compute_rotation(positions[:, :4], torch.float32, [16])
    assert torch.equal(part.cos, whole.cos[:, :4])
    assert not torch.equal(
        RotaryEmbedding.from_model_config(config, rope).compute_rotation(positions[:, :4], torch.float32).cos, part.cos
    )
