"""Encoder-decoders: logits, losses and gradients of T5 are those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from encoder_decoders import KINDS, published
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from mega_data.batch_loader import EncoderInput, StepBatch
from mega_eval.model_loading import load_inference_model
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import MicroBatch, split_micro_batches
from mega_trainer.model.encoder_decoder import EncoderDecoderModel
from mega_trainer.model.relative_position_bias import bucket_distances


def batch_of(model: EncoderDecoderModel, lengths: list[int]) -> MicroBatch:
    """Random tokens for encoders of at most 17 tokens, the first `lengths` of them no padding, and decoders of 9."""
    rng = np.random.default_rng(3)
    count, tokens = len(lengths), rng.integers(1, 61, (len(lengths), 9 + 17 + 9))
    config = RunConfig.parse(
        {
            "model": model.config.model_dump(exclude_unset=True), "batch": {"micro": count, "global": count},
            "data": {"train": ["none"], "seq_length": 17, "kind": "t5"}, "precision": "fp32",
        },
        source="test",
    )  # fmt: skip
    whole = StepBatch(
        tokens=tokens[:, :9], labels=tokens[:, 26:], loss_weights=np.ones((count, 9), np.float32),
        position_ids=np.tile(np.arange(9), (count, 1)), document_ids=None, sample_ids=np.arange(count),
        source=EncoderInput(tokens[:, 9:26], np.array(lengths)),
    )  # fmt: skip
    return next(split_micro_batches(whole, config, torch.device("cpu")))


def logits(model: EncoderDecoderModel, batch: MicroBatch) -> Tensor:
    """[B, S, V]."""
    context = model.make_batch_context(batch, lambda *_: None)
    return model.compute_logits(model(model.embed_micro_batch(batch, context), context))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[17, 17], [17, 4, 11]], ids=["full", "padded"])
def test_logits_and_loss_are_those_of_transformers(kind: str, lengths: list[int], tmp_path: Path) -> None:
    theirs = published(tmp_path, **KINDS[kind])
    model = load_inference_model(tmp_path, kinds=("encoder-decoder",))
    assert isinstance(model, EncoderDecoderModel)
    batch = batch_of(model, lengths)
    assert batch.source is not None
    seen = torch.arange(17) < torch.tensor(lengths)[:, None]
    with torch.no_grad():
        found = theirs(
            input_ids=batch.source.tokens,
            attention_mask=seen.long(),
            decoder_input_ids=batch.tokens,
            labels=batch.labels,
        )
        torch.testing.assert_close(logits(model, batch), found.logits, rtol=1e-5, atol=1e-5)
        total, _, _ = model.run_stage(None, batch, model.make_batch_context(batch, lambda *_: None))
    torch.testing.assert_close(total / batch.labels.numel(), found.loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_are_those_of_transformers(causal: bool) -> None:
    distances = torch.arange(-300, 300)
    for count, most in ((32, 128), (8, 12), (16, 20)):
        theirs = T5Attention._relative_position_bucket(distances, not causal, count, most)
        assert torch.equal(bucket_distances(distances, count, most, causal=causal), theirs)
