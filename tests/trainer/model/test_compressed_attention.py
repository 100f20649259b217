"""DeepSeek-V4's attention in packed documents, its counts and FLOPs, and experts that are chosen by token id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mega_ckpt.canonical_tensors import count_model_parameters
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.model.compressed_attention import CompressedAttention, SequenceTokens
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.expert_router import ExpertRouter, sqrt_softplus
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.plan.flops import compute_forward_flops_per_token, count_parameters_by_layer

INDEXER = {"num_heads": 8, "head_dim": 6, "top_k": 2, "interleaved": True}
FIELDS: dict[str, Any] = {
    "layers": ["csa+mlp", "hca+moe", "swa+moe", "csa+moe"], "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 4,
    "num_kv_heads": 1, "head_dim": 8, "vocab_size": 61, "rope": {"theta": 100.0, "fraction": 0.5, "interleaved": True},
    "compressed": {
        "q_lora_rank": 12, "window": 4, "output_groups": 2, "output_rank": 6, "csa_rate": 2, "hca_rate": 3, "indexer": INDEXER,
    },
    "moe": {"num_experts": 6, "top_k": 2, "ffn_hidden_size": 12, "score": "sqrtsoftplus", "selection_bias": True, "hash_layers": [1]},
}  # fmt: skip
CONFIG = ModelConfig.parse(FIELDS)


def random_decoder(config: ModelConfig = CONFIG) -> Decoder:
    model = Decoder(LayerBuilder(config, dtype=torch.float64)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


@pytest.mark.parametrize("chunk", [5, 512])
def test_packed_documents_are_computed_as_alone(chunk: int) -> None:
    """Of lengths that no rate divides, and shorter than any window; the two rows have different ones. Alone by all queries at once."""
    model, other, tokens = (
        random_decoder(),
        random_decoder(),
        torch.randint(61, (2, 17), generator=torch.Generator().manual_seed(1)),
    )
    rows = [[7, 1, 9], [2, 15]]
    documents = np.stack([np.repeat(np.arange(len(lengths)), lengths) for lengths in rows]).astype(np.int32)
    positions = np.stack([np.concatenate([np.arange(length) for length in lengths]) for lengths in rows])
    at, bounds = torch.from_numpy(positions), DocumentBounds.from_positions(positions, documents)
    for module in model.modules():
        if isinstance(module, CompressedAttention):
            module.chunk = chunk
    packed = model(
        model.embed_inputs(tokens, at), model.make_forward_context(at, tokens=tokens, sequence_bounds=bounds)
    )
    for row, lengths in enumerate(rows):
        for part, length in zip(torch.split(tokens[row], lengths), np.cumsum(lengths), strict=True):
            own = torch.arange(len(part))[None]
            alone = other(other.embed_inputs(part[None], own), other.make_forward_context(own, tokens=part[None]))
            torch.testing.assert_close(packed[row, length - len(part) : length], alone[0], rtol=0, atol=1e-12)


def test_windows_of_documents_begin_with_them_and_are_seen_when_they_have_ended() -> None:
    starts = torch.tensor([[0, 0, 0, 0, 0, 5, 5, 5, 8, 8]])
    sequence = SequenceTokens([range(10)], starts, torch.arange(10)[None])
    windows = sequence.windows_of(2)
    assert windows.begin[windows.whole].tolist() == [0, 2, 5, 8]
    seen = sequence.mask_entries(range(10), windows, 4)[0]
    assert [row.nonzero().flatten().tolist() for row in seen] == [[], [0], [0], [0, 1], [0, 1], [], [2], [2], [], [3]]


@pytest.mark.parametrize("top_k", [2, 20])
def test_parameters_and_flops_are_counted(top_k: int) -> None:
    config = ModelConfig.parse(
        {**FIELDS, "compressed": {**FIELDS["compressed"], "indexer": {**INDEXER, "top_k": top_k}}}
    )
    model, tokens = random_decoder(config), 16
    held, biases = sum(parameter.numel() for parameter in model.parameters()), 2 * 6  # of the choice in two layers
    assert count_parameters_by_layer(config).total == count_model_parameters(config) == held + biases
    positions = torch.arange(tokens)[None]
    with FlopCounterMode(display=False) as counted:
        context = model.make_forward_context(positions, tokens=positions)
        model.compute_logits(model(torch.zeros(1, tokens, 24, dtype=torch.float64), context))
    exact = compute_forward_flops_per_token(config, tokens, causal=False)
    unused = (
        0 if top_k == 2 else 2 * 2 * (8 * 6 * 12 + 4 * 6 * 24 + 8 * 24)
    )  # projections of an indexer that scores nothing
    assert counted.get_total_flops() == tokens * (sum(exact.values()) - unused)
    sparse = compute_forward_flops_per_token(config, tokens)["attention scores"]
    by_hand = [
        4 * 4 * 8 * sum(min(4, t) + min(t // rate, most) for t in range(1, tokens + 1)) / tokens
        for rate, most in ((2, top_k), (3, 99), (99, 0), (2, top_k))
    ]
    index = 2 * 2 * 4 * 8 * 7 if top_k == 2 else 0  # 4 of 8 entries, the mean over queries
    assert sparse == pytest.approx(sum(by_hand) + index)


def test_a_table_gives_each_token_id_its_experts() -> None:
    routers = [module for module in random_decoder().modules() if isinstance(module, ExpertRouter)]
    tables = [router.hash_table for router in routers]
    assert [table is None for table in tables] == [False, True, True]
    assert [router.selection is None for router in routers] == [True, False, False]
    table = tables[0]
    assert table is not None
    assert table.values.shape == (61, 2)
    assert (table.values[:, 0] != table.values[:, 1]).all()
    assert set(table.values.flatten().tolist()) == set(range(6))
    before = table.values.clone()
    table.values.zero_()
    table.reset_values()
    assert torch.equal(table.values, before)


def test_scores_of_very_unlikely_experts_have_finite_gradients() -> None:
    logits = torch.tensor([-200.0, -3.0, 0.0, 50.0], requires_grad=True)
    sqrt_softplus(logits).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[0] == 0


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"layers": ["csa+moe", "attention+moe"]}, "requires that the mixer of each layer is one of swa, csa, hca"),
        ({"compressed": {**FIELDS["compressed"], "output_groups": 3}}, "must divide num_attention_heads = 4"),
        ({"compressed": {**FIELDS["compressed"], "indexer": None}}, "is required: layers names csa layers"),
        ({"compressed": {**FIELDS["compressed"], "indexer": {**INDEXER, "kl_loss": 1.0}}}, "compressed attention has no loss"),
        ({"compressed": {**FIELDS["compressed"], "indexer": {**INDEXER, "head_dim": 2}}}, "must be at least the 4 rotated"),
        ({"compressed": {**FIELDS["compressed"], "indexer": {**INDEXER, "interleaved": False}}}, "must be rope.interleaved = true"),
        ({"local_rope": {"fraction": 1.0}}, "must be equal in rope and local_rope"),
        ({"rope": {**FIELDS["rope"], "scaling": "dynamic", "factor": 2.0}}, "scaling dynamic or longrope"),
        ({"sliding_window": 4}, "sliding_window: is not supported with compressed"),
        ({"position": "none"}, "requires causal attention, position: rope and norm: rmsnorm"),
        ({"moe": {**FIELDS["moe"], "hash_layers": [0]}}, "must be layers with experts"),
        ({"activation": "clamped_swiglu"}, "is required with activation: clamped_swiglu"),
    ],
)  # fmt: skip
def test_settings_that_conflict_are_named(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found.replace(".", r"\.").replace("(", r"\(")):
        ModelConfig.parse({**FIELDS, **changes})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_kv_heads", 2),
        ("value_head_dim", 4),
        ("value_scale", 0.5),
        ("value_norm", True),
        ("full_attention_layers", [0]),
    ],
)
def test_settings_of_other_attention_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*: .*with compressed"):
        ModelConfig.parse({**FIELDS, name: value})
