"""Text from a model: prompts of any lengths together, or one that streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from mega_common.errors import ConfigError, DataError
from mega_common.log import ProgressBar
from mega_eval.draft import Drafter, ModelDrafter, NgramDrafter
from mega_eval.engine import Engine, Request, Scored
from mega_eval.pictured import Pictured
from mega_eval.sampling import Sampling
from mega_eval.text import Finish, Limits, Text
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.vision.images import Images

Prompt = str | Sequence[int] | Pictured  # text, or its tokens as they are, or text with images
# guesses by repetition of the text, by the model's own layers for further tokens, none, or those of a smaller model
Draft = Literal["ngrams", "mtp", "none"] | Decoder

FEW = 4  # texts


@dataclass
class Completion:
    """What followed a prompt.

    Attributes:
        text: without stop string and special tokens.
        tokens: all tokens that were generated.
        finish: what ended it: an end token, a stop string or the limit.
        scored: the tokens with their log-probabilities, where these were asked for.
    """

    text: str
    tokens: list[int]
    finish: Finish
    scored: list[Scored] = field(default_factory=list)


def generate(
    model: Decoder,
    tokenizer: Text,
    prompts: Sequence[Prompt],
    limits: Limits,
    sampling: Sampling | None = None,
    *,
    batch_size: int = 8,
    logprobs: int | None = None,
    grammar: str | None = None,
    draft: Draft | None = None,
) -> list[Completion]:
    """Continue each prompt. What follows one does not depend on the others, but for the rounding of matrix products.

    Args:
        model: in eval mode.
        tokenizer: the model's.
        prompts: each is a sample of its own.
        limits: what ends a continuation.
        sampling: how tokens are drawn; by default the likeliest are taken.
        batch_size: most prompts continued together.
        logprobs, grammar: as in `Request`.
        draft: guesses tokens, which changes none; None: as `usual_drafter` says.

    Raises:
        DataError: when a prompt has no tokens, a token that the model does not know, or is too long.
        ConfigError: when a draft model has another vocabulary.
    """
    read = [_read(model, tokenizer, number, prompt) for number, prompt in enumerate(prompts)]
    engine = _engine(model, tokenizer, [row for row, _ in read], limits, batch_size, draft)
    found = [Completion("", [], "length") for _ in read]
    for number, (row, images) in enumerate(read):
        with _naming(number, prompts[number]):
            engine.add(Request(row, limits, sampling or Sampling(), number, logprobs, grammar=grammar, images=images))
    with ProgressBar("generating", total=len(read), unit="prompts") as bar:
        while engine.waiting or engine.running:
            for event in engine.step():
                one = found[event.request]
                one.text += event.text
                one.tokens += event.tokens
                one.scored += event.scored
                if event.finish is not None:
                    one.finish = event.finish
                    bar.advance(1)
    return found


def stream(
    model: Decoder,
    tokenizer: Text,
    prompt: Prompt,
    limits: Limits,
    sampling: Sampling | None = None,
    *,
    grammar: str | None = None,
    draft: Draft | None = None,
) -> Iterator[str]:
    """Continue one prompt, yielding text as it becomes certain: the pieces of what `generate` would return.

    Raises:
        DataError, ConfigError: as `generate` does.
    """
    row, images = _read(model, tokenizer, 0, prompt)
    engine = _engine(model, tokenizer, [row], limits, 1, draft)
    with _naming(0, prompt):
        engine.add(Request(row, limits, sampling or Sampling(), grammar=grammar, images=images))
    while engine.waiting or engine.running:
        yield from (event.text for event in engine.step() if event.text)


def _engine(
    model: Decoder, tokenizer: Text, rows: Sequence[Sequence[int]], limits: Limits, batch_size: int, draft: Draft | None
) -> Engine:
    """One with room for the longest of these rows as often as they run together."""
    batch_size = min(batch_size, len(rows))
    room = (max(map(len, rows), default=0) + limits.max_new_tokens) * batch_size
    drafter = drafter_of(draft, model, tokenizer, room, batch_size)
    return Engine(model, tokenizer, cache_tokens=room, batch_size=batch_size, drafter=drafter)


def drafter_of(
    draft: Draft | None, model: Decoder, tokenizer: Text, cache_tokens: int, batch_size: int
) -> Drafter | Literal["mtp"] | None:
    """What guesses for an `Engine` of `model` that is as large.

    Raises:
        ConfigError: when a draft model has another vocabulary.
    """
    if draft is None:
        return usual_drafter(model)
    if not isinstance(draft, Decoder):
        named: dict[str, Drafter | Literal["mtp"]] = {"ngrams": NgramDrafter(), "mtp": "mtp"}
        return named.get(draft)
    if draft.config.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {draft.config.vocab_size}, the model one of {model.config.vocab_size}",
            hint="a draft model has to have the model's own tokenizer",
        )
    return ModelDrafter(Engine(draft, tokenizer, cache_tokens=cache_tokens, batch_size=batch_size))


def usual_drafter(model: Decoder) -> Drafter | None:
    """What guesses where nobody says: repetition on a CPU, which computes `FEW` texts' guesses in little more time than none.

    Not in half precision, where likeliest tokens are so often equally likely that the rounding of larger products would show.
    """
    return NgramDrafter(FEW) if model.device.type == "cpu" and model.dtype.itemsize >= 4 else None


def _read(model: Decoder, tokenizer: Text, number: int, prompt: Prompt) -> tuple[list[int], Images | None]:
    """The tokens of a prompt, and its images."""
    if isinstance(prompt, Pictured):
        with _naming(number, prompt):
            return prompt.read(model, tokenizer)
    return tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt), None


@contextmanager
def _naming(number: int, prompt: Prompt) -> Iterator[None]:
    """Say which prompt an error is about."""
    try:
        yield
    except DataError as error:
        shown = (prompt.text if isinstance(prompt, Pictured) else prompt)[:30]
        raise DataError(f"prompt {number + 1} ({shown!r}): {error.message}", hint=error.hint) from None
