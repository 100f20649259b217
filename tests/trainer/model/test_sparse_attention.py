"""Sparse attention by a lightning indexer: its loss against its definition, and what trains what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mega_common.errors import ConfigError
from mega_common.layer_kinds import INDEXER
from mega_common.model_config import ModelConfig
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.expert_routing import MicroBatchRouting
from mega_trainer.parallel.parameter_info import get_parameter_info

S, HEADS, SIZE, TOP = 12, 14, 6, 4  # so many heads that no score is exactly 0, where ties would be
MLA = {"q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
SIZES = {"num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 4, "vocab_size": 61}
INDEX = {"num_heads": HEADS, "head_dim": SIZE, "top_k": TOP}


def parse(**fields: Any) -> ModelConfig:
    return ModelConfig.parse({**SIZES, "mla": {**MLA, **fields}})


def decoder(**indexer: Any) -> Decoder:
    """A decoder of equal weights, whatever the settings of its indexer."""
    built = Decoder(LayerBuilder(parse(indexer={**INDEX, **indexer}), dtype=torch.float64, device=torch.device("cpu")))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return built


def gradients(built: Decoder, mask: Tensor | None = None) -> tuple[dict[str, Tensor | None], MicroBatchRouting]:
    """Gradients by tensor of the sum of the hidden states, plus the loss of the indexers."""
    routing = MicroBatchRouting(mask, None, 0.5, 1.0)
    x = torch.randn(2, S, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    built(x, built.make_forward_context(torch.arange(S)[None], routing=routing)).square().sum().backward()
    named = {get_parameter_info(p).pieces[0].name: p.grad for p in built.parameters()}
    return named, routing


@pytest.mark.parametrize("dense", [False, True])
def test_its_loss_trains_the_indexer_alone_and_nothing_else_does(dense: bool) -> None:
    without, _ = gradients(decoder(dense=dense))
    with_loss, routing = gradients(decoder(dense=dense, kl_loss=0.7))
    assert sorted(routing.indexer_losses) == [0, 1]
    assert all(loss > 0 for loss in routing.indexer_losses.values())
    for name, gradient in with_loss.items():
        if INDEXER in name:
            assert without[name] is None
            assert gradient is not None
            assert gradient.abs().sum() > 0, name
        elif gradient is not None:
            torch.testing.assert_close(gradient, without[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dense", [False, True])
def test_the_loss_is_the_divergence_of_softmaxed_scores_from_the_mean_of_the_heads(dense: bool) -> None:
    """Of the first layer, head by head and query by query, over the tokens of which a loss depends."""
    built = decoder(dense=dense, kl_loss=0.7)
    mask = torch.ones(2, S, dtype=torch.bool)
    mask[1, 7:] = False
    found = gradients(built, mask)[1].indexer_losses[0]
    x = torch.randn(2, S, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    context, branch = built.make_forward_context(torch.arange(S)[None]), built.layers[0].mixer
    normed = branch.add_and_norm(x)[1]
    layer = branch.work
    with torch.no_grad():
        parts = layer.project_latents(normed, context)
        k, _ = layer.expand_latent(parts.latent, parts.k_rot, None)
        index_query, weights, index_key = layer.indexer(normed, parts.query_latent, context.rotation)
    q, total = torch.cat([parts.q, parts.q_rot], -1), 0.0
    for row in range(2):
        for s in range(int(mask[row].sum())):
            scores = sum(
                weights[row, s, h] * torch.relu(index_key[row, : s + 1] @ index_query[row, s, h] / SIZE**0.5)
                for h in range(HEADS)
            )
            chosen = torch.arange(s + 1) if dense else scores.topk(min(TOP, s + 1)).indices
            heads = [(k[row, chosen, h] @ q[row, s, h] / 10**0.5).softmax(0) for h in range(4)]
            share = sum(heads) / 4
            total += (share * (share.log() - scores[chosen].log_softmax(0))).sum() / mask[row].sum()
    torch.testing.assert_close(found, total * 0.5 * 0.7)


def test_a_query_sees_its_best_tokens_alone() -> None:
    """The output at a query does not change with a token that is not among its best, and does with one that is."""
    built = decoder()
    scores = torch.tensor([[[1.0, 9.0, 9.0, 9.0, 9.0], [3.0, 2.0, 9.0, 9.0, 9.0], [0.0, 2.0, 1.0, 9.0, 9.0],
                            [5.0, 1.0, 2.0, 0.0, 9.0], [1.0, 2.0, 3.0, 4.0, 0.0]]])  # fmt: skip
    seen = torch.ones(5, 5, dtype=torch.bool).tril()[None]
    indexer = built.layers[0].mixer.work.indexer
    indexer.config = indexer.config.model_copy(update={"top_k": 2})
    chosen = [row.nonzero().flatten().tolist() for row in indexer.select(scores, seen)[0]]
    assert chosen == [[0], [0, 1], [1, 2], [0, 2], [2, 3]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mla": {**MLA, "q_lora_rank": None, "indexer": INDEX}}, "q_lora_rank"),
        ({"mla": {**MLA, "indexer": {**INDEX, "head_dim": 3}}}, "qk_rope_head_dim = 4"),
        ({"mla": {**MLA, "indexer": INDEX}, "attention_softcap": 2.0}, "attention_softcap is not supported|leave out"),
        ({"mla": {**MLA, "indexer": INDEX}, "attention_dropout": 0.1}, "attention_dropout"),
        ({"mla": {**MLA, "indexer": INDEX}, "sliding_window": 8}, "sliding_window"),
        ({"mla": {**MLA, "indexer": INDEX}, "position": "none"}, "must be rope with mla.indexer"),
    ],
)
def test_settings_that_an_indexer_does_not_have(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.parse({**SIZES, **fields})
