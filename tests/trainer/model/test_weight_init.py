"""Every layout starts from the same model, whatever part of it a rank holds and however it is drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from trainer.fake import decoders

from mega_ckpt.tensor_pieces import TensorBox, TensorPiece, boxes_by_name, copy_overlap
from mega_common.model_config import ModelConfig
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.model import weight_init
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.parameter_info import NormalInit, get_parameter_info

MODEL = ModelConfig(
    num_layers=3, hidden_size=12, ffn_hidden_size=16, num_attention_heads=4, num_kv_heads=2, vocab_size=23,
    qkv_bias=True, tie_embeddings=True, init_std=0.5,
)  # fmt: skip
LAYOUTS = [
    ParallelLayout(tp=2),
    ParallelLayout(tp=4),
    ParallelLayout(pp=3),
    ParallelLayout(tp=2, pp=2),
    ParallelLayout(tp=2, dp=2),
    ParallelLayout(tp=4, pp=3),
]


def started(layout: ParallelLayout, seed: int = 5, **options: Any) -> list[Decoder]:
    held = list(decoders(MODEL, layout, **options))
    for decoder in held:
        initialize_weights(decoder, seed)
    return held


def wholes(ranks: list[Decoder]) -> dict[str, torch.Tensor]:
    """The model's tensors, put together from all ranks; copies must agree."""
    out: dict[str, torch.Tensor] = {}
    for decoder in ranks:
        for name, held in boxes_by_name(
            (p.detach(), get_parameter_info(p).pieces) for p in decoder.parameters()
        ).items():
            whole = out.setdefault(name, torch.full(held.shape, float("nan")))
            for box in held.boxes:
                part = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.tensor.shape, strict=True))]
                assert part.isnan().all() or torch.equal(part, box.tensor)
                copy_overlap(TensorBox((0,) * whole.dim(), whole), box)
    assert not any(whole.isnan().any() for whole in out.values())
    return out


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tile", [(1, 1), (40, 5), (1 << 17, 512)])
def test_every_layout_starts_from_the_same_model(layout: ParallelLayout, tile: tuple[int, int], monkeypatch) -> None:
    monkeypatch.setattr(weight_init, "TILE_ELEMENTS", tile[0])
    monkeypatch.setattr(weight_init, "TILE_COLUMNS", tile[1])
    one, many = wholes(started(ParallelLayout())), wholes(started(layout))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_padding_is_zero() -> None:
    last = started(ParallelLayout(tp=4))[-1]
    assert last.embedding.weight.shape[0] == 6
    assert (last.embedding.weight[5:] == 0).all()
    assert (last.embedding.weight[:5] != 0).any()


def test_a_tensor_depends_on_seed_and_name() -> None:
    one, again, other = (wholes(started(ParallelLayout(), seed)) for seed in (5, 5, 6))
    for name, tensor in one.items():
        assert torch.equal(tensor, again[name])
        drawn = name.endswith("weight") and "norm" not in name
        assert torch.equal(tensor, other[name]) != drawn
    assert not torch.equal(one["model.layers.0.mlp.up_proj.weight"], one["model.layers.1.mlp.up_proj.weight"])


def test_low_precision_starts_from_the_rounded_model() -> None:
    exact, low = wholes(started(ParallelLayout())), started(ParallelLayout(), dtype=torch.bfloat16)[0]
    assert torch.equal(low.embedding.weight, exact["model.embed_tokens.weight"].bfloat16())


def test_spread() -> None:
    model = wholes(started(ParallelLayout()))
    for name, std in [("mlp.up_proj", 0.5), ("mlp.down_proj", 0.5 / 6**0.5), ("self_attn.o_proj", 0.5 / 6**0.5)]:
        drawn = torch.cat([model[f"model.layers.{layer}.{name}.weight"].flatten() for layer in range(3)])
        assert drawn.std().item() == pytest.approx(std, rel=0.12)
    assert (model["model.layers.0.input_layernorm.weight"] == 1).all()
    assert (model["model.layers.0.self_attn.q_proj.bias"] == 0).all()


def test_tiles_of_a_tensor_are_independent_normal_draws(monkeypatch) -> None:
    """Of streams whose seeds follow one another."""
    monkeypatch.setattr(weight_init, "TILE_ELEMENTS", 1024)
    shape = (4, 256, 1024)
    values = torch.empty(shape)
    weight_init._draw_tiles(values, TensorPiece.whole_tensor("experts", shape), 1, NormalInit(0.02))
    tiles = torch.stack([tile.flatten() for expert in values for row in expert.split(2) for tile in row.split(512, 1)])
    assert len(tiles) == 4 * 256
    assert values.mean().abs() < 5 * 0.02 / values.numel() ** 0.5
    assert values.std().item() == pytest.approx(0.02, rel=5e-3)
    assert (values.abs() > 3 * 0.02).float().mean().item() == pytest.approx(0.0027, rel=0.1)
    means = tiles.mean(1)
    assert means.std().item() == pytest.approx(0.02 / 1024**0.5, rel=0.1)
    assert torch.corrcoef(tiles).fill_diagonal_(0).abs().max() < 6 / 1024**0.5


@pytest.mark.parametrize("layout", [ParallelLayout(tp=4), ParallelLayout(tp=2, pp=2)], ids=str)
def test_a_rank_draws_little_more_than_it_keeps(layout: ParallelLayout, monkeypatch) -> None:
    """Of what is split by rows and of what is split by columns."""
    monkeypatch.setattr(weight_init, "TILE_ELEMENTS", 4)
    monkeypatch.setattr(weight_init, "TILE_COLUMNS", 2)
    drawn: list[int] = []
    real = torch.Tensor.normal_

    def normal(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        drawn.append(self.numel())
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "normal_", normal)
    model = MODEL.model_copy(update={"num_layers": 4, "num_kv_heads": 4, "vocab_size": 24})
    for decoder in decoders(model, layout):
        drawn.clear()
        initialize_weights(decoder, 1)
        kept = sum(p.numel() for p in decoder.parameters() if get_parameter_info(p).std is not None)
        assert kept <= sum(drawn) < 1.2 * kept
