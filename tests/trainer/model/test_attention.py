"""Attention against plain loops: grouped heads, masks, and the path with dropout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mega_common.model_config import ModelConfig, RopeConfig
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.kernels.attention_masks import (
    CAUSAL,
    AttentionMaskSpec,
    BandMask,
    PackedDocumentMask,
    materialize_dense_mask,
)
from mega_trainer.kernels.kernel_interface import RotaryAngles
from mega_trainer.model.attention import SelfAttention
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights

S, H, K, HEAD = 7, 4, 2, 6


def attention(**fields: Any) -> SelfAttention:
    config = ModelConfig(
        num_layers=1, hidden_size=8, ffn_hidden_size=8, num_attention_heads=H, num_kv_heads=K, head_dim=HEAD,
        vocab_size=8, init_std=0.5, **fields,
    )  # fmt: skip
    made = SelfAttention(LayerBuilder(config, dtype=torch.float64), 0)
    initialize_weights(made, 3)
    return made


@dataclass(frozen=True)
class Fixed:
    """Everyone sees what one mask says."""

    seen: torch.Tensor | AttentionMaskSpec

    def mask_for_window(self, window: int | None) -> torch.Tensor | AttentionMaskSpec:
        return self.seen


def by_loops(made: SelfAttention, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Each query of each head by itself."""
    q, k, v = made.qkv(x).split([H * HEAD, K * HEAD, K * HEAD], dim=-1)
    out = torch.zeros(*x.shape[:2], H, HEAD, dtype=x.dtype)
    for b in range(x.shape[0]):
        for h in range(H):
            mine, shared = slice(h * HEAD, (h + 1) * HEAD), slice(h * K // H * HEAD, (h * K // H + 1) * HEAD)
            for s in range(S):
                seen = mask[b % mask.shape[0], 0, s]
                scores = (k[b, seen][:, shared] @ q[b, s, mine]) * made.core.scale
                if made.core.softcap:
                    scores = made.core.softcap * torch.tanh(scores / made.core.softcap)
                weights = scores.exp()
                rest = 0.0 if made.core.sinks is None else made.core.sinks[h].exp()
                out[b, s, h] = weights / (weights.sum() + rest) @ v[b, seen][:, shared]
    result: torch.Tensor = made.out(out.flatten(-2))
    return result


CPU = torch.device("cpu")
MASKS: dict[str, AttentionMaskSpec] = {
    "causal": CAUSAL,
    "window": BandMask(left=2, right=0),
    "documents": PackedDocumentMask.from_lengths([2, 3, 2, 7], CAUSAL, CPU),
    "both": PackedDocumentMask.from_lengths([2, 3, 2, 7], BandMask(left=1, right=0), CPU),
}


SCORES: dict[str, dict[str, Any]] = {
    "plain": {}, "scale": {"attention_scale": 0.3}, "cap": {"attention_softcap": 0.5}, "sinks": {"attention_sinks": True},
    "all": {"attention_scale": 0.3, "attention_softcap": 0.5, "attention_sinks": True},
}  # fmt: skip


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("kind", MASKS)
def test_is_what_loops_compute_with_and_without_the_dropout_path(kind: str, scores: str) -> None:
    made, mask = attention(**SCORES[scores]), MASKS[kind]
    assert (made.core.scale == 1 / math.sqrt(HEAD)) == ("attention_scale" not in SCORES[scores])
    x = torch.randn(2, S, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = materialize_dense_mask(mask, x.shape, S, CPU)
    expected = by_loops(made, x, seen)
    torch.testing.assert_close(made(x, ForwardContext(Fixed(mask))), expected)
    torch.testing.assert_close(made(x, ForwardContext(Fixed(seen))), expected)  # as generation says it
    made.core.dropout = 1e-12  # takes the path of plain products, and drops nothing
    torch.testing.assert_close(
        made(x, ForwardContext(Fixed(mask), dropout=SeededDropout(0, [0, 1], [range(S)]))), expected
    )


def test_dropout_of_a_head_is_its_own_wherever_it_lives() -> None:
    """The upper half of the heads on another rank draws what it draws among all heads."""
    dropout, ones = SeededDropout(1, [4, 9], [range(S)]), torch.ones(2, H, S, S)
    whole = dropout.drop_attention_probs(ones, 0.3, 2, 0)
    assert torch.equal(dropout.drop_attention_probs(ones[:, 2:], 0.3, 2, 2), whole[:, 2:])
    assert 0.2 < (whole == 0).float().mean() < 0.4
    assert whole.max().item() == pytest.approx(1 / 0.7)
    for other in (SeededDropout(2, [4, 9], [range(S)]), SeededDropout(1, [4, 8], [range(S)])):
        assert not torch.equal(other.drop_attention_probs(ones, 0.3, 2, 0)[1], whole[1])
    assert not torch.equal(dropout.drop_attention_probs(ones, 0.3, 3, 0), whole)


def test_query_key_norm_makes_scale_irrelevant() -> None:
    made = attention(qk_norm=True)
    x = torch.randn(1, S, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = made(x, ForwardContext(Fixed(CAUSAL)))
    with torch.no_grad():
        made.qkv.weights[0][: (H + K) * HEAD] *= 100
    torch.testing.assert_close(made(x, ForwardContext(Fixed(CAUSAL))), before, rtol=1e-3, atol=1e-4)


def test_a_gate_partial_rotation_and_zero_centered_norms_are_those_of_qwen3_next() -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import (
        Qwen3NextAttention,
        Qwen3NextConfig,
        Qwen3NextRotaryEmbedding,
    )

    made = attention(
        attention_gate=True,
        qk_norm=True,
        zero_centered_norm=True,
        norm_eps=1e-6,
        rope=RopeConfig(theta=50, fraction=1 / 3),
    )
    config = Qwen3NextConfig(
        hidden_size=8, num_attention_heads=H, num_key_value_heads=K, head_dim=HEAD, attn_implementation="sdpa",
        rope_parameters={"rope_type": "default", "rope_theta": 50, "partial_rotary_factor": 1 / 3},
    )  # fmt: skip
    theirs, turned = Qwen3NextAttention(config, 0).double(), Qwen3NextRotaryEmbedding(config)
    with torch.no_grad():
        for norm in (made.q_norm, made.k_norm):
            assert norm is not None
            norm.weight.uniform_(-0.5, 0.5)
    gate, query, key, value = made.qkv.weights[0].split([H * HEAD, H * HEAD, K * HEAD, K * HEAD])
    by_head = torch.stack([query.unflatten(0, (H, HEAD)), gate.unflatten(0, (H, HEAD))], 1).flatten(0, 2)
    weights = {"q_proj": by_head, "k_proj": key, "v_proj": value, "o_proj": made.out.weight}
    weights |= {"q_norm": made.q_norm.weight, "k_norm": made.k_norm.weight}
    theirs.load_state_dict({f"{name}.weight": weight for name, weight in weights.items()})
    x = torch.randn(2, S, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.arange(S)[None]
    angles = tuple(part.double() for part in turned(x.float(), positions))
    rotation = RotaryAngles(*(part[:, :, None, :1] for part in angles))  # one pair of elements a head
    mine = made(x, ForwardContext(Fixed(CAUSAL), rotation))
    torch.testing.assert_close(
        mine, theirs(x, position_embeddings=angles, attention_mask=None)[0], rtol=1e-6, atol=1e-7
    )
