"""The gated delta net against transformers', and what recurrent mixers send between context ranks against theory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mega_common.model_config import ModelConfig
from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.distributed.comm import CommGroup, CommTrafficCounter
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.model.forward_context import ForwardContext, SequenceMask
from mega_trainer.model.gated_delta_net import GatedDeltaNet
from mega_trainer.model.kimi_delta_attention import KimiDeltaAttention
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.lightning_attention import LightningAttention
from mega_trainer.model.mamba import MambaMixer
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.parameter_info import get_parameter_info

D, G, H, K, V = 12, 2, 6, 4, 5
DELTA = {"num_key_heads": G, "num_value_heads": H, "key_head_dim": K, "value_head_dim": V, "chunk_size": 8}
MAMBA = {"num_heads": 4, "head_dim": 3, "state_size": 2, "num_groups": 2, "conv_kernel": 3}
CONFIG = ModelConfig.parse(
    {
        "hidden_size": D, "ffn_hidden_size": D, "num_attention_heads": 2, "vocab_size": 8, "init_std": 0.3, "norm_eps": 1e-6,
        "layers": ["delta", "mamba", "kda", "lightning"], "delta": DELTA, "mamba": MAMBA,
        "kda": {"num_heads": 4, "head_dim": K}, "lightning": {"num_heads": 4, "head_dim": 3},
    }
)  # fmt: skip


def context(length: int, documents: np.ndarray | None = None) -> ForwardContext:
    begins = None if documents is None else DocumentBounds.from_positions(documents, documents).document_starts
    return ForwardContext(SequenceMask(length, torch.device("cpu"), begins))


def build_layer() -> GatedDeltaNet:
    layer = GatedDeltaNet(LayerBuilder(CONFIG), 0)
    initialize_weights(layer, 1)
    with torch.no_grad():
        layer.norm.weight.uniform_(0.5, 1.5)
        layer.dt_bias.uniform_(-1, 1)
    return layer


def weights(layer: nn.Module) -> dict[str, Tensor]:
    """Tensors by what their canonical names end in."""
    pieces = [(piece, p.detach()) for p in layer.parameters() for piece in get_parameter_info(p).pieces]
    return {piece.name.removeprefix("model.layers.0.linear_attn."): piece.local_view(p) for piece, p in pieces}


def transformers(layer: GatedDeltaNet) -> nn.Module:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=D, linear_num_key_heads=G, linear_num_value_heads=H, linear_key_head_dim=K, linear_value_head_dim=V,
        linear_conv_kernel_dim=4, num_hidden_layers=1, layer_types=["linear_attention"], rms_norm_eps=1e-6,
    )  # fmt: skip
    held, theirs = weights(layer), Qwen3NextGatedDeltaNet(config, 0)

    def by_key_head(parts: str) -> Tensor:
        return torch.cat([held[f"in_proj.{part}.weight"].unflatten(0, (G, -1)) for part in parts], 1).flatten(0, 1)

    state = {name: held[name] for name in ("A_log", "dt_bias", "norm.weight", "out_proj.weight")}
    state |= {"in_proj_qkvz.weight": by_key_head("qkvz"), "in_proj_ba.weight": by_key_head("ba")}
    state["conv1d.weight"] = torch.cat([held[f"conv1d.{part}.weight"] for part in "qkv"])[:, None]
    theirs.load_state_dict(state)
    return theirs


def test_each_document_is_what_transformers_makes_of_it() -> None:
    layer, documents = build_layer(), np.repeat([[0, 1, 2, 3]], [13, 1, 30, 6], axis=1)
    x = torch.randn(1, 50, D, generator=torch.Generator().manual_seed(0))
    theirs = transformers(layer)
    mine = layer(x, context(50, documents))
    expected = torch.cat([theirs(part) for part in x.split([13, 1, 30, 6], 1)], 1)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
    assert (mine - theirs(x))[:, 13:].abs().max() > 1e-3  # which documents matter


def test_gradients_are_those_of_transformers() -> None:
    layer, x = build_layer(), torch.randn(2, 20, D, generator=torch.Generator().manual_seed(0), requires_grad=True)
    theirs = transformers(layer)
    found = []
    for y in (layer(x, context(20)), theirs(x)):
        found.append(torch.autograd.grad(y.sin().sum(), x, retain_graph=True)[0])
        y.sin().sum().backward()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    for mine, their in ((layer.a_log, theirs.A_log), (layer.norm.weight, theirs.norm.weight)):
        torch.testing.assert_close(mine.grad, their.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "index", "steps"),
    [(GatedDeltaNet, 0, 2), (MambaMixer, 1, 1), (KimiDeltaAttention, 2, 1 + K), (LightningAttention, 3, 0)],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_context_ranks_send_what_theory_says_and_the_less_of_two(
    kind: Any, index: int, steps: int, dtype: torch.dtype
) -> None:
    counted = set()
    for size, tokens in ((2, 2), (2, 64)):
        log = CommTrafficCounter()
        cp = CommGroup("cp", tuple(range(size)), 0, log=log)
        layer = kind(LayerBuilder(CONFIG, replace(ParallelGroups(), cp=cp), dtype=dtype), index)
        x = torch.zeros(2, tokens, D, dtype=dtype)
        projected = layer.projection(x)
        seen = projected[..., : layer.recurrence.convolved_channels]
        gathered, exchanged = (
            layer.recurrence.state_passing_bytes(seen),
            layer.recurrence.head_exchange_bytes(seen, steps),
        )
        layer(x, context(size * tokens))
        name = "all_gather" if gathered <= exchanged else "all_to_all"
        assert {key: entry[1] for key, entry in log.counts.items()} == {("cp", name): min(gathered, exchanged)}
        counted.add(name)
    assert len(counted) == 2
