from __future__ import annotations

import numpy as np
import pytest
import torch
from engines import model_of
from tiny_models import VARIANTS, variant

from mega_eval.cpu_layers import LayerFunction, build_cpu_layer_function
from mega_eval.paged_cache import PagedCache, RequestTokenSpan
from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.model.attention import SelfAttention
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.feed_forward import FeedForward

DECODERS = [name for name in VARIANTS if variant(name).causal and variant(name).encoder is None]
PARTS = [(7, 0), (1, 0), (1, 4)]  # new tokens of two rows, step by step


@torch.inference_mode()
def outputs(model: Decoder, layers: LayerFunction) -> list[torch.Tensor]:
    """The stream behind the layers, step by step, with a cache of its own."""
    count = model.config.num_layers + model.config.mtp_layers
    cache, draw, found, done = PagedCache(count, 2, 2), np.random.default_rng(3), [], [0, 0]
    for counts in PARTS:
        spans, places, first = [], [], 0
        for row, count in enumerate(counts):
            if count:
                spans.append(RequestTokenSpan(slice(first, first + count), done[row] + count, [row], row))
                places += range(done[row], done[row] + count)
            first, done[row] = first + count, done[row] + count
        cache.begin_forward_pass(spans, torch.device("cpu"))
        positions = torch.tensor(places)[:, None]
        x = model.embed_inputs(torch.from_numpy(draw.integers(0, 61, (len(places), 1))), positions)
        context = model.make_forward_context(
            positions, sequence_bounds=DocumentBounds([place + 1 for place in places]), cache=cache
        )
        found.append(layers(x, context))
    return found


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_as_calls_of_kernels_give_the_bits_of_the_modules(name: str, dtype: torch.dtype) -> None:
    model = model_of(variant(name), dtype)
    for one, other in zip(outputs(model, build_cpu_layer_function(model)), outputs(model, model), strict=True):
        assert torch.equal(one, other)


def test_a_plain_decoder_is_asked_without_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(variant("grouped"))
    layers = build_cpu_layer_function(model)
    for kind in (SelfAttention, FeedForward):
        monkeypatch.setattr(kind, "forward", None)
    assert all(torch.isfinite(one).all() for one in outputs(model, layers))
