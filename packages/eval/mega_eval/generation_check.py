"""Comparison of generation with training: log-probabilities of the inference engine and of a training batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mega_data.batch_loader import EncoderInput, StepBatch
from mega_eval.engine_requests import EngineRequest, GenerationEvent
from mega_eval.inference_engine import InferenceEngine
from mega_eval.live_model import build_inference_model
from mega_eval.text_stream import GenerationLimits
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.model.decoder import Decoder
from mega_trainer.verify.case_comparison import TOLERANCE
from mega_trainer.verify.case_trainer import CaseTrainer
from mega_trainer.verify.failure_location import (
    ActivationSlice,
    StepRecord,
    TensorDifference,
    compare_activations,
    list_recorded_modules,
)
from mega_trainer.verify.layout_case import LayoutCase
from mega_trainer.verify.verification import GenerationFindings

PROMPT, NEW = 12, 12  # tokens
CHUNK_TOKENS = 5  # of a prompt per forward pass, so that the cache is also read while the prompt is computed
CACHE_TOKENS = 256


class _TokenNumbers:
    """Tokenizer of a model without one: a token's text is its number."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text."""
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        return "".join(f"{token} " for token in ids)


def compare_generation_with_training(case: LayoutCase) -> GenerationFindings | str:
    """Compare log-probabilities of generated text with a training forward's, or return why a model has no comparison.

    Generation computes the prompt in chunks and new tokens one by one, with a cache. If it differs, the first activation
    that differs is found in a second generation.

    Returns:
        The largest difference and a description, or the reason why the model has no such comparison.
    """
    config = case.config
    if not config.model.causal:
        return "an encoder does not generate text"
    if config.model.retro is not None:
        return "generation with retrieved neighbors is not supported"
    if config.model.moe is not None and config.model.moe.capacity_factor is not None:
        return "experts with a capacity drop tokens of a batch, which generation does not"
    trainer = CaseTrainer.build(case)
    trainer.run(1)
    prompt = np.random.default_rng(3).integers(0, config.model.vocab_size - 1, PROMPT).tolist()
    model, encoder = build_inference_model(trainer.executor, config), config.model.encoder
    scores, new = _generate_text(model, prompt)
    start, source = (prompt, None) if encoder is None else ([encoder.start_token], prompt)
    wanted = _training_log_probs(trainer, config, [*start, *new], source)[-len(scores) :]
    errors = (scores - wanted).abs().nan_to_num(nan=torch.inf)
    error, difference = errors.max().item(), None
    if error > TOLERANCE and source is None:
        with record_activations(trainer.executor.first_local_stage) as training:
            _training_log_probs(trainer, config, [*start, *new], source)
        with record_activations(model) as generation:
            _generate_text(model, prompt, fused_cpu_layers=False)
        difference = compare_activations(training, [generation])
    if error > TOLERANCE and difference is None:
        token = int(errors.argmax())
        found, expected = scores[token].item(), wanted[token].item()
        difference = TensorDifference("log-probability", "of a token", None, (token,), expected, found, error)
    if difference is not None:
        difference = replace(difference, reference="in training")
    name = f"{len(scores)} tokens in chunks of {CHUNK_TOKENS} and token by token against training"
    return GenerationFindings(error, name, difference)


def _generate_text(
    model: Decoder, prompt: list[int], *, fused_cpu_layers: bool = True
) -> tuple[torch.Tensor, list[int]]:
    """Return fp64 log-probabilities of the prompt's tokens but the first and of the new tokens; and the new tokens.

    Those of the prompt are left out if it is an encoder's input.
    """
    engine = InferenceEngine(
        model, _TokenNumbers(), cache_tokens=CACHE_TOKENS, batch_size=1, chunk_tokens=CHUNK_TOKENS,
        fused_cpu_layers=fused_cpu_layers,
    )  # fmt: skip
    of_prompt = model.config.encoder is None
    engine.add_request(EngineRequest(prompt, GenerationLimits(NEW), logprobs=1, prompt_logprobs=of_prompt))
    events: list[GenerationEvent] = []
    while engine.num_waiting or engine.num_running:
        events += engine.step()
    scores = [one.logprob for event in events for one in event.prompt or [] if one is not None]
    scores += [one.logprob for event in events for one in event.scored]
    return torch.tensor(scores, dtype=torch.float64), [token for event in events for token in event.tokens]


@contextmanager
def record_activations(model: Decoder) -> Iterator[StepRecord]:
    """Context manager whose record has, after the block, a model's activations for the tokens of one sequence.

    These are the outputs of its mixers, feed-forward blocks and layers, by name; the forward passes in the block may
    compute the tokens in chunks, in order.
    """
    parts: dict[str, list[torch.Tensor]] = {}

    def add_hook(name: str, module: nn.Module) -> RemovableHandle:
        def keep_output(module: nn.Module, inputs: Any, output: Any) -> None:
            parts.setdefault(name, []).append(output.detach().flatten(0, 1))

        return module.register_forward_hook(keep_output)

    record, handles = StepRecord(), [add_hook(name, module) for name, _, module in list_recorded_modules(model)]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
    for name, outputs in parts.items():
        values = torch.cat(outputs)[None]
        record.activations[name] = [ActivationSlice((0,), tuple(range(values.shape[1])), values)]


def _training_log_probs(
    trainer: CaseTrainer, config: RunConfig, tokens: Sequence[int], source: Sequence[int] | None
) -> torch.Tensor:
    """Return the log-probability of each token but the first, fp64, as the training forward computes it."""
    row = np.array([tokens])
    length = len(tokens) - 1
    batch = StepBatch(
        tokens=row[:, :-1],
        labels=row[:, 1:],
        loss_weights=np.ones((1, length), np.float32),
        position_ids=np.arange(length)[None],
        document_ids=None,
        sample_ids=np.zeros(1, np.int64),
        images=[] if config.model.vision is None else [None],
        source=None if source is None else EncoderInput(np.array([source]), np.array([len(source)])),
        token_types=np.zeros((1, length), np.int64) if config.model.token_types else None,
    )
    with torch.no_grad(), trainer.executor.evaluation_mode():
        trainer.executor.run_operations(list(split_micro_batches(batch, config, torch.device("cpu"))), 1.0)
    return -trainer.executor.losses[0][0].double()
