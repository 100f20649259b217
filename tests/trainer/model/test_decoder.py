"""A decoder's parts: what every rank holds tiles the canonical tensors; stages in a row are the whole; logits and loss."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from trainer.fake import decoders

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_common.model_config import ModelConfig
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.model.activation_checkpointing import RecomputePolicy
from mega_trainer.model.decoder import Decoder, PipelineStageLayers
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.parameter_info import get_parameter_info

BIASES = ("qkv_bias", "attention_out_bias", "mlp_bias")
LATENT = {"qk_nope_head_dim": 2, "qk_rope_head_dim": 4, "v_head_dim": 3}


def config(**fields: Any) -> ModelConfig:
    sizes = {"num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 21}
    return ModelConfig.model_validate({**sizes, "init_std": 0.2, **fields})


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelConfig, ParallelLayout]:
    heads = draw(st.sampled_from([2, 4, 12]))
    kv = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    tps = [tp for tp in (1, 2, 3, 4, 6) if heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)]
    own: dict[str, Any] = {"num_kv_heads": kv, "head_dim": 4}
    own |= {name: draw(st.booleans()) for name in ("qk_norm", "attention_sinks")}
    latent = {"kv_lora_rank": 5, "q_lora_rank": draw(st.sampled_from([None, 3])), **LATENT}
    fields = draw(st.sampled_from([{"position": "learned"}, {"mtp_layers": draw(st.integers(0, 2))}]))
    if "mtp_layers" in fields and draw(st.booleans()):
        own, tps = {"mla": latent}, [tp for tp in tps if heads % tp == 0]
    model = config(
        num_attention_heads=heads, vocab_size=draw(st.integers(3, 40)), tie_embeddings=draw(st.booleans()),
        norm=draw(st.sampled_from(["rmsnorm", "layernorm"])), activation=draw(st.sampled_from(["swiglu", "gelu"])),
        qk_norm_span=draw(st.sampled_from(["head", "all", "each"])), norm_position=draw(st.sampled_from(["pre", "post", "both"])),
        max_position=8, **own, **fields, **{bias: draw(st.booleans()) for bias in BIASES},
    )  # fmt: skip
    return model, ParallelLayout(tp=draw(st.sampled_from(tps)), pp=draw(st.integers(1, 4)))


@given(models())
@settings(deadline=None, max_examples=60)
def test_all_ranks_together_hold_the_canonical_tensors_and_count_each_element_once(drawn) -> None:
    model, layout = drawn
    seen: dict[str, torch.Tensor] = {}
    counted: Counter[str] = Counter()
    for decoder in decoders(model, layout):
        for parameter in decoder.parameters():
            info = get_parameter_info(parameter)
            for piece in info.pieces:
                whole = seen.setdefault(piece.name, torch.zeros(piece.global_shape, dtype=torch.bool))
                assert whole.shape == piece.global_shape
                whole[tuple(slice(o, o + n) for o, n in zip(piece.global_offset, piece.shape, strict=True))] = True
                if all(group.rank == 0 for group in info.replicas):
                    counted[piece.name] += math.prod(piece.shape)
    expected = canonical_tensors(model)
    assert {name: tuple(whole.shape) for name, whole in seen.items()} == {n: tuple(s) for n, s in expected.items()}
    assert all(whole.all() for whole in seen.values())
    assert counted == {name: math.prod(shape) for name, shape in expected.items()}  # what a norm over the model counts


def batch(model: ModelConfig, rows: int = 2, length: int = 6) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return {
        "tokens": torch.randint(0, model.vocab_size, (rows, length), generator=g),
        "labels": torch.randint(0, model.vocab_size, (rows, length), generator=g),
        "positions": torch.arange(length).expand(rows, -1),
    }


def build_decoder(
    model: ModelConfig, stage: PipelineStageLayers | None = None, recompute: RecomputePolicy | None = None
) -> Decoder:
    decoder = Decoder(LayerBuilder(model, dtype=torch.float64), stage, recompute)
    initialize_weights(decoder, 7)
    return decoder


def through(decoder: Decoder, data: dict[str, torch.Tensor], dropout: SeededDropout | None = None) -> torch.Tensor:
    context = decoder.make_forward_context(data["positions"], dropout=dropout)
    x: torch.Tensor = decoder(decoder.embed_inputs(data["tokens"], data["positions"], dropout), context)
    return x


@pytest.mark.parametrize("tied", [False, True])
def test_stages_in_a_row_are_the_whole(tied: bool) -> None:
    model = config(tie_embeddings=tied, position="learned")
    data = batch(model)
    whole = build_decoder(model)
    first, middle, last = (
        build_decoder(model, PipelineStageLayers(*s))
        for s in [(0, 1, True, False), (1, 4, False, False), (4, 4, False, True)]
    )
    x = through(first, data)
    context = first.make_forward_context(data["positions"])
    assert torch.equal(last.compute_logits(middle(x, context)), whole.compute_logits(through(whole, data)))
    assert len(last.layers) == 0
    assert (whole.matrix is None) == tied
    assert torch.equal(last.output_weight, whole.output_weight)


@pytest.mark.parametrize("softcap", [None, 0.2])
def test_loss_is_the_cross_entropy_of_the_logits(softcap: float | None) -> None:
    model, weights = config(logit_softcap=softcap), torch.tensor([[1.0, 0, 2, 1, 0, 0.5], [0, 0, 0, 1, 1, 1]])
    data, decoder = batch(model), build_decoder(model)
    x = through(decoder, data)
    total, each = decoder.compute_token_loss(x, data["labels"], weights)
    expected = F.cross_entropy(
        decoder.compute_logits(x).flatten(0, 1), data["labels"].flatten(), reduction="none"
    ).view(2, 6)
    torch.testing.assert_close(each, expected)
    torch.testing.assert_close(total, (expected * weights).sum())


@pytest.mark.parametrize("span", ["head", "all", "each"])
def test_zero_centred_norms_start_from_zero_and_compute_what_plain_ones_do(span: str) -> None:
    fields = {"norm_position": "both", "qk_norm": True, "norm": "layernorm", "qk_norm_span": span}
    plain, centred = build_decoder(config(**fields)), build_decoder(config(**fields, zero_centered_norm=True))
    data, norms = batch(plain.config), 0
    for mine, theirs in zip(plain.parameters(), centred.parameters(), strict=True):
        name = get_parameter_info(mine).pieces[0].name
        if name.endswith("norm.weight"):
            assert (mine == 1).all()
            assert (theirs == 0).all()
            norms += 1
            with torch.no_grad():
                mine.normal_()
                theirs.copy_(mine - 1)
    assert norms == 4 * 6 + 1
    assert torch.equal(plain.head.norm(torch.ones(3, 16).double()), centred.head.norm(torch.ones(3, 16).double()))
    torch.testing.assert_close(
        centred.compute_logits(through(centred, data)), plain.compute_logits(through(plain, data))
    )


def test_zero_centred_norms_round_once() -> None:
    """In bf16, 1 + weight is not rounded, nor the product before the end: as Gemma does it."""
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(50, 16, generator=g).bfloat16(), (torch.randn(16, generator=g) / 100).bfloat16()
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * (1 + weight.float())
    assert torch.equal(TorchKernels().rms_norm(x, weight, 1e-6, zero_centered=True), wide.bfloat16())


def test_embeddings_are_scaled_before_positions_are_added() -> None:
    fields = {"position": "learned", "max_position": 8}
    plain, scaled = build_decoder(config(**fields)), build_decoder(config(**fields, scale_embeddings=True))
    data = batch(plain.config)
    given = data["tokens"], data["positions"]
    at = torch.nn.functional.embedding(data["positions"], plain.inputs.positions)
    torch.testing.assert_close(scaled.embed_inputs(*given) - at, 4 * (plain.embed_inputs(*given) - at))


def test_layers_with_a_window_have_a_rotation_of_their_own() -> None:
    """Only a layer without a window sees far, and only it turns by `rope`."""
    fields = {"num_layers": 2, "sliding_window": 2, "full_attention_layers": [1]}
    one, other = (build_decoder(config(**fields, local_rope={"theta": theta})) for theta in (50.0, 5000.0))
    data = batch(one.config)
    x = one.embed_inputs(data["tokens"], data["positions"])
    first, second = (m.make_forward_context(data["positions"]) for m in (one, other))
    assert not torch.allclose(one.layers[0](x, first), one.layers[0](x, second))
    assert torch.equal(one.layers[1](x, first), one.layers[1](x, second))
    far = x.clone()
    far[:, 0] += 1
    assert torch.equal(one.layers[0](far, first)[:, 2:], one.layers[0](x, first)[:, 2:])
    assert not torch.equal(one.layers[1](far, first)[:, 2:], one.layers[1](x, first)[:, 2:])


def test_later_tokens_and_other_documents_do_not_matter() -> None:
    model = config()
    data, decoder = batch(model), build_decoder(model)
    outline = DocumentBounds.from_positions(data["positions"].numpy(), np.array([[0, 0, 0, 1, 1, 1]] * 2))
    other = {**data, "tokens": data["tokens"].clone()}
    other["tokens"][:, 2] += 1
    other["tokens"] %= model.vocab_size

    def logits(given: dict[str, torch.Tensor]) -> torch.Tensor:
        context = decoder.make_forward_context(given["positions"], sequence_bounds=outline)
        return decoder.compute_logits(decoder(decoder.embed_inputs(given["tokens"], given["positions"]), context))

    before, after = logits(data), logits(other)
    changed = (before != after).any(-1)
    assert changed.tolist() == [[False, False, True, False, False, False]] * 2


def test_recomputation_of_layers_happens_in_training_alone_and_changes_nothing() -> None:
    model = config(attention_dropout=0.2, residual_dropout=0.2)
    data, dropout = batch(model), SeededDropout(3, [5, 6], [range(6)])
    gradients = []
    for recompute in (None, RecomputePolicy("full"), RecomputePolicy("full", layers=2)):
        decoder = build_decoder(model, recompute=recompute)
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            x = through(decoder, data, dropout)
        x.square().sum().backward()
        gradients.append(([p.grad for p in decoder.layers.parameters()], sum(kept)))
    (plain, most), (all_again, least), (some_again, between) = gradients
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, all_again, some_again, strict=True))
    assert least <= between < most


def test_dropout_is_off_without_its_context() -> None:
    model = config(embedding_dropout=0.5, attention_dropout=0.5, residual_dropout=0.5)
    data, decoder = batch(model), build_decoder(model)
    assert torch.equal(through(decoder, data), through(decoder, data))
    assert not torch.equal(through(decoder, data, SeededDropout(1, [0, 1], [range(6)])), through(decoder, data))
    assert not torch.equal(
        through(decoder, data, SeededDropout(1, [0, 1], [range(6)])),
        through(decoder, data, SeededDropout(1, [2, 3], [range(6)])),
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fields", [{"position": "learned"}, {"mtp_layers": 2}])
def test_each_parameter_belongs_to_one_unit(tied: bool, fields: dict[str, Any]) -> None:
    for stage in (
        PipelineStageLayers(0, 4),
        PipelineStageLayers(0, 2, True, False),
        PipelineStageLayers(2, 4, False, True),
        PipelineStageLayers(4, 4, False, True),
    ):
        decoder = build_decoder(config(tie_embeddings=tied, **fields), stage)
        held = [parameter for unit in decoder.list_parameter_units() for parameter in unit.parameters]
        assert len(held) == len(set(held))
        assert set(held) == set(decoder.parameters())
