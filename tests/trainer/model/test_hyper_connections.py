"""Hyper-connections against transformers' DeepSeek-V4, in counts and FLOPs of the planner, and in generation."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mega_common.model_config import ModelConfig
from mega_eval.generate import generate_completions
from mega_eval.text_stream import GenerationLimits
from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.hyper_connections import CollapsedNorm, HyperConnection, expand_streams
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.plan.flops import compute_forward_flops_per_token, count_parameters_by_layer

STREAMS = 3
CONFIG = ModelConfig.parse({
    "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 4, "vocab_size": 61, "norm_eps": 1e-4,
    "hyper_connections": {"streams": STREAMS, "iterations": 5, "eps": 1e-3},
})  # fmt: skip


def random_decoder() -> Decoder:
    model = Decoder(LayerBuilder(CONFIG, dtype=torch.float64)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


class Numbers:
    """A tokenizer of no text."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: object, *, skip_special_tokens: bool = False) -> str:
        return ""


def test_a_layer_and_the_head_mix_streams_as_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    hyper = CONFIG.hyper_connections
    assert hyper is not None
    sizes = {
        "hidden_size": 24, "hc_mult": STREAMS, "hc_sinkhorn_iters": hyper.iterations, "hc_eps": hyper.eps, "rms_norm_eps": CONFIG.norm_eps,
    }  # fmt: skip
    config = modeling.DeepseekV4Config(**sizes)
    theirs, head = modeling.DeepseekV4HyperConnection(config), modeling.DeepseekV4HyperHead(config)
    build = LayerBuilder(CONFIG)
    ours, last = HyperConnection(build, "model.layers.0.attn_hc"), CollapsedNorm(build, torch.nn.Identity())
    torch.manual_seed(0)
    with torch.no_grad():
        for name in ("fn", "base", "scale"):
            for mine, other in ((ours, getattr(theirs, name)), (last, getattr(head, f"hc_{name}"))):
                getattr(mine, name).copy_(other.copy_(torch.randn(other.shape)))
        x, y = torch.randn(2, 5, STREAMS, 24), torch.randn(2, 5, 24)
        post, comb, collapsed = theirs(x)
        found = ours(x)
        torch.testing.assert_close(found, (collapsed, post, comb), rtol=1e-5, atol=1e-5)
        expected = post.unsqueeze(-1) * y.unsqueeze(-2) + comb.transpose(-1, -2) @ x
        torch.testing.assert_close(expand_streams(x, y, *found[1:]), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(last(x.flatten(-2)), head(x), rtol=1e-5, atol=1e-5)


def test_generation_with_a_cache_is_that_of_whole_rows() -> None:
    model, row = random_decoder(), [7, 3, 60, 1, 0, 22]
    (found,) = generate_completions(model, Numbers(), [row], GenerationLimits(12))
    for _ in range(12):
        positions = torch.arange(len(row))[None]
        x = model(model.embed_inputs(torch.tensor([row]), positions), model.make_forward_context(positions))
        row.append(int(model.compute_logits(x)[0, -1].argmax()))
    assert list(found.tokens) == row[6:]


def test_parameters_and_flops_are_counted() -> None:
    model, tokens = random_decoder(), 16
    assert count_parameters_by_layer(CONFIG).total == sum(parameter.numel() for parameter in model.parameters())
    positions = torch.arange(tokens)[None]
    with FlopCounterMode(display=False) as counted:
        context = model.make_forward_context(positions, sequence_bounds=DocumentBounds([tokens]))
        model.compute_logits(model(torch.zeros(1, tokens, 24, dtype=torch.float64), context))
    exact = compute_forward_flops_per_token(CONFIG, tokens, causal=False)
    assert counted.get_total_flops() == tokens * (sum(exact.values()) - exact["attention scores"])
