"""Text generation: batches of prompts of any lengths, or one streamed prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from mega_common.errors import ConfigError, DataError
from mega_common.progress_logging import ProgressBar
from mega_eval.drafters import Drafter, ModelDrafter, NgramDrafter
from mega_eval.image_prompts import ImagePrompt
from mega_eval.inference_engine import EngineRequest, InferenceEngine, ScoredToken
from mega_eval.sampling import Sampling
from mega_eval.text_stream import FinishCause, GenerationLimits, TextTokenizer
from mega_trainer.data.batch_images import BatchImages
from mega_trainer.model.decoder import Decoder

GenerationPrompt = str | Sequence[int] | ImagePrompt  # text, or its tokens as they are, or text with images
# guesses by repetition of the text, by the model's own layers for further tokens, none, or those of a smaller model
DraftSource = Literal["ngrams", "mtp", "none"] | Decoder

FEW = 4  # texts


@dataclass
class Completion:
    """Generated continuation of a prompt.

    Attributes:
        text: without stop string and special tokens.
        tokens: all tokens that were generated.
        finish: what ended it: an end token, a stop string or the limit.
        scored: the tokens with their log-probabilities, where these were asked for.
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
    """Continue each prompt; completions do not depend on the other prompts, except for rounding in GEMMs.

    Args:
        model: in eval mode.
        tokenizer: the model's.
        prompts: each is a sample of its own.
        limits: what ends a continuation.
        sampling: how tokens are drawn; by default the likeliest are taken.
        batch_size: most prompts continued together.
        logprobs, grammar: as in `Request`.
        draft: guesses tokens, which changes none; None: as `choose_default_drafter` says.

    Raises:
        DataError: when a prompt has no tokens, a token that the model does not know, or is too long.
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
    """Continue one prompt and yield text as it becomes final: the pieces of the text that `generate_completions`
    returns.

    Raises:
        DataError, ConfigError: as `generate` does.
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
) -> InferenceEngine:
    """Return an engine with cache room for the longest of these rows times the batch size."""
    batch_size = min(batch_size, len(rows))
    room = (max(map(len, rows), default=0) + limits.max_new_tokens) * batch_size
    drafter = make_drafter(draft, model, tokenizer, room, batch_size)
    return InferenceEngine(model, tokenizer, cache_tokens=room, batch_size=batch_size, drafter=drafter)


def make_drafter(
    draft: DraftSource | None, model: Decoder, tokenizer: TextTokenizer, cache_tokens: int, batch_size: int
) -> Drafter | Literal["mtp"] | None:
    """Return the drafter for an engine of `model` with this cache size.

    Raises:
        ConfigError: when a draft model has another vocabulary.
    """
    if draft is None:
        return choose_default_drafter(model)
    if not isinstance(draft, Decoder):
        named: dict[str, Drafter | Literal["mtp"]] = {"ngrams": NgramDrafter(), "mtp": "mtp"}
        return named.get(draft)
    if draft.config.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {draft.config.vocab_size}, the model one of {model.config.vocab_size}",
            hint="a draft model has to have the model's own tokenizer",
        )
    return ModelDrafter(InferenceEngine(draft, tokenizer, cache_tokens=cache_tokens, batch_size=batch_size))


def choose_default_drafter(model: Decoder) -> Drafter | None:
    """Return the default drafter: n-gram lookup on a CPU, where verifying drafts of `FEW` texts costs little; else
    None.

    Not in half precision, where likeliest tokens are so often equally likely that the rounding of larger products would show.
    """
    return NgramDrafter(FEW) if model.device.type == "cpu" and model.dtype.itemsize >= 4 else None


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
