"""Every layout starts from the same model, whatever part of it a rank holds and however it is drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trainer.fake import decoders

from mega_ckpt.pieces import Box, boxes_of, copy_overlap
from mega_common.model_config import ModelConfig
from mega_trainer.layout import Layout
from mega_trainer.model import init
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.init import init_weights
from mega_trainer.parallel.param import info_of

MODEL = ModelConfig(
    num_layers=3, hidden_size=12, ffn_hidden_size=16, num_attention_heads=4, num_kv_heads=2, vocab_size=23,
    qkv_bias=True, tie_embeddings=True, init_std=0.5,
)  # fmt: skip
LAYOUTS = [Layout(tp=2), Layout(tp=4), Layout(pp=3), Layout(tp=2, pp=2), Layout(tp=2, dp=2), Layout(tp=4, pp=3)]


def started(layout: Layout, seed: int = 5, **options: Any) -> list[Decoder]:
    held = list(decoders(MODEL, layout, **options))
    for decoder in held:
        init_weights(decoder, seed)
    return held


def wholes(ranks: list[Decoder]) -> dict[str, torch.Tensor]:
    """The model's tensors, put together from all ranks; copies must agree."""
    out: dict[str, torch.Tensor] = {}
    for decoder in ranks:
        for name, held in boxes_of((p.detach(), info_of(p).pieces) for p in decoder.parameters()).items():
            whole = out.setdefault(name, torch.full(held.shape, float("nan")))
            for box in held.boxes:
                part = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.tensor.shape, strict=True))]
                assert part.isnan().all() or torch.equal(part, box.tensor)
                copy_overlap(Box((0,) * whole.dim(), whole), box)
    assert not any(whole.isnan().any() for whole in out.values())
    return out


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("block", [1, 40, 1 << 24])
def test_every_layout_starts_from_the_same_model(layout: Layout, block: int, monkeypatch) -> None:
    monkeypatch.setattr(init, "BLOCK_ELEMENTS", block)
    one, many = wholes(started(Layout())), wholes(started(layout))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_padding_is_zero() -> None:
    last = started(Layout(tp=4))[-1]
    assert last.embedding.weight.shape[0] == 6
    assert (last.embedding.weight[5:] == 0).all()
    assert (last.embedding.weight[:5] != 0).any()


def test_a_tensor_depends_on_seed_and_name() -> None:
    one, again, other = (wholes(started(Layout(), seed)) for seed in (5, 5, 6))
    for name, tensor in one.items():
        assert torch.equal(tensor, again[name])
        drawn = name.endswith("weight") and "norm" not in name
        assert torch.equal(tensor, other[name]) != drawn
    assert not torch.equal(one["model.layers.0.mlp.up_proj.weight"], one["model.layers.1.mlp.up_proj.weight"])


def test_low_precision_starts_from_the_rounded_model() -> None:
    exact, low = wholes(started(Layout())), started(Layout(), dtype=torch.bfloat16)[0]
    assert torch.equal(low.embedding.weight, exact["model.embed_tokens.weight"].bfloat16())


def test_spread() -> None:
    model = wholes(started(Layout()))
    for name, std in [("mlp.up_proj", 0.5), ("mlp.down_proj", 0.5 / 6**0.5), ("self_attn.o_proj", 0.5 / 6**0.5)]:
        drawn = torch.cat([model[f"model.layers.{layer}.{name}.weight"].flatten() for layer in range(3)])
        assert drawn.std().item() == pytest.approx(std, rel=0.12)
    assert (model["model.layers.0.input_layernorm.weight"] == 1).all()
    assert (model["model.layers.0.self_attn.q_proj.bias"] == 0).all()
