"""Text generation: batches of prompts of any lengths, or one streamed prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from mega_common.errors import ConfigError, DataError
from mega_common.progress_logging import ProgressBar
from mega_eval.drafters import DraftSource, make_drafter
from mega_eval.engine_requests import EngineRequest, ScoredToken
from mega_eval.image_prompts import ImagePrompt
from mega_eval.inference_engine import InferenceEngine
from mega_eval.sampling import Sampling
from mega_eval.text_stream import FinishCause, GenerationLimits, TextTokenizer
from mega_eval.transformers_engine import TransformersEngine
from mega_trainer.data.batch_images import BatchImages
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.transformers_decoder import TransformersDecoder

GenerationPrompt = str | Sequence[int] | ImagePrompt  # text, token ids, or text with images


@dataclass
class Completion:
    """Generated continuation of a prompt: text, tokens and cause of the end.

    Attributes:
        text: decoded text without stop string and special tokens.
        tokens: all tokens that were generated.
        finish: cause of the end: an end token, a stop string or the limit.
        scored: the tokens with their log-probabilities, if requested.
    """

    text: str
    tokens: list[int]
    finish: FinishCause
    scored: list[ScoredToken] = field(default_factory=list)


def generate_completions(
    model: Decoder,
    tokenizer: TextTokenizer,
    prompts: Sequence[GenerationPrompt],
    limits: GenerationLimits,
    sampling: Sampling | None = None,
    *,
    batch_size: int = 8,
    logprobs: int | None = None,
    grammar: str | None = None,
    draft: DraftSource | None = None,
) -> list[Completion]:
    """Return a continuation of each prompt; it does not depend on the other prompts, except for rounding in GEMMs.

    Args:
        model: decoder in eval mode.
        tokenizer: tokenizer of the model.
        prompts: one sample each.
        limits: end conditions of a continuation.
        sampling: sampling settings; greedy by default.
        batch_size: maximum number of prompts that run at once.
        logprobs, grammar: as in `EngineRequest`.
        draft: source of draft tokens (speculative decoding), which does not change the text; None:
            `choose_default_drafter`.

    Raises:
        DataError: when a prompt is empty, too long, or has a token outside the model's vocabulary.
        ConfigError: when a draft model has another vocabulary.
    """
    read = [_encode_prompt(model, tokenizer, number, prompt) for number, prompt in enumerate(prompts)]
    engine = _make_engine(model, tokenizer, [row for row, _ in read], limits, batch_size, draft)
    found = [Completion("", [], "length") for _ in read]
    for number, (row, images) in enumerate(read):
        with _name_prompt_in_errors(number, prompts[number]):
            engine.add_request(
                EngineRequest(row, limits, sampling or Sampling(), number, logprobs, grammar=grammar, images=images)
            )
    with ProgressBar("generating", total=len(read), unit="prompts") as bar:
        while engine.num_waiting or engine.num_running:
            for event in engine.step():
                one = found[event.request]
                one.text += event.text
                one.tokens += event.tokens
                one.scored += event.scored
                if event.finish is not None:
                    one.finish = event.finish
                    bar.advance(1)
    return found


def stream_completion(
    model: Decoder,
    tokenizer: TextTokenizer,
    prompt: GenerationPrompt,
    limits: GenerationLimits,
    sampling: Sampling | None = None,
    *,
    grammar: str | None = None,
    draft: DraftSource | None = None,
) -> Iterator[str]:
    """Continue one prompt and yield text as it becomes final.
    The joined text is the text that `generate_completions` returns.

    Raises:
        DataError, ConfigError: as `generate_completions`.
    """
    row, images = _encode_prompt(model, tokenizer, 0, prompt)
    engine = _make_engine(model, tokenizer, [row], limits, 1, draft)
    with _name_prompt_in_errors(0, prompt):
        engine.add_request(EngineRequest(row, limits, sampling or Sampling(), grammar=grammar, images=images))
    while engine.num_waiting or engine.num_running:
        yield from (event.text for event in engine.step() if event.text)


def _make_engine(
    model: Decoder,
    tokenizer: TextTokenizer,
    rows: Sequence[Sequence[int]],
    limits: GenerationLimits,
    batch_size: int,
    draft: DraftSource | None,
) -> InferenceEngine | TransformersEngine:
    """Return an engine with cache room for the longest of these rows times the batch size."""
    if isinstance(model, TransformersDecoder):
        if draft not in (None, "none"):
            raise ConfigError(
                "draft is not supported with a model of implementation: transformers", hint="leave out --draft"
            )
        return TransformersEngine(model, tokenizer)
    batch_size = min(batch_size, len(rows))
    cache_tokens = (max(map(len, rows), default=0) + limits.max_new_tokens) * batch_size
    drafter = make_drafter(draft, model, tokenizer, cache_tokens, batch_size)
    return InferenceEngine(model, tokenizer, cache_tokens=cache_tokens, batch_size=batch_size, drafter=drafter)


def _encode_prompt(
    model: Decoder, tokenizer: TextTokenizer, number: int, prompt: GenerationPrompt
) -> tuple[list[int], BatchImages | None]:
    """Return the tokens of a prompt, and its images."""
    if isinstance(prompt, ImagePrompt):
        with _name_prompt_in_errors(number, prompt):
            return prompt.encode_prompt(model, tokenizer)
    return tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt), None


@contextmanager
def _name_prompt_in_errors(number: int, prompt: GenerationPrompt) -> Iterator[None]:
    """Prefix the prompt to the message of errors raised inside the `with` block."""
    try:
        yield
    except DataError as error:
        shown = (prompt.text if isinstance(prompt, ImagePrompt) else prompt)[:30]
        raise DataError(f"prompt {number + 1} ({shown!r}): {error.message}", hint=error.hint) from None
