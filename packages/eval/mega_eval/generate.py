"""Text from a model: prompts of any lengths together, or one that streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mega_common.errors import DataError
from mega_common.log import ProgressBar
from mega_eval.engine import Engine, Request
from mega_eval.sampling import Sampling
from mega_eval.text import Finish, Limits, Text
from mega_trainer.model.decoder import Decoder


@dataclass(frozen=True)
class Completion:
    """What followed a prompt.

    Attributes:
        text: without stop string and special tokens.
        tokens: all tokens that were generated.
        finish: what ended it: an end token, a stop string or the limit.
    """

    text: str
    tokens: list[int]
    finish: Finish


def generate(
    model: Decoder,
    tokenizer: Text,
    prompts: Sequence[str],
    limits: Limits,
    sampling: Sampling | None = None,
    *,
    batch_size: int = 8,
) -> list[Completion]:
    """Continue each prompt. What follows one does not depend on the others, but for the rounding of matrix products.

    Raises:
        DataError: when a prompt has no tokens, a token that the model does not know, or is too long.
    """
    rows = [tokenizer.encode(prompt, add_special_tokens=True) for prompt in prompts]
    engine = engine_for(model, tokenizer, rows, limits, batch_size)
    texts = [""] * len(rows)
    tokens: list[list[int]] = [[] for _ in rows]
    finishes: list[Finish] = ["length"] * len(rows)
    for number, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        with _naming(f"prompt {number + 1} ({prompt[:30]!r})"):
            engine.add(Request(row, limits, sampling or Sampling(), sample=number))
    with ProgressBar("generating", total=len(rows), unit="prompts") as bar:
        while engine.waiting or engine.running:
            for event in engine.step():
                texts[event.request] += event.text
                tokens[event.request] += event.tokens
                if event.finish is not None:
                    finishes[event.request] = event.finish
                    bar.advance(1)
    return [Completion(*one) for one in zip(texts, tokens, finishes, strict=True)]


def stream(
    model: Decoder, tokenizer: Text, prompt: str, limits: Limits, sampling: Sampling | None = None
) -> Iterator[str]:
    """Continue one prompt, yielding text as it becomes certain: the pieces of what `generate` would return.

    Raises:
        DataError: as `generate` does.
    """
    row = tokenizer.encode(prompt, add_special_tokens=True)
    engine = engine_for(model, tokenizer, [row], limits, 1)
    with _naming(f"prompt 1 ({prompt[:30]!r})"):
        engine.add(Request(row, limits, sampling or Sampling()))
    while engine.waiting or engine.running:
        yield from (event.text for event in engine.step() if event.text)


def engine_for(
    model: Decoder, tokenizer: Text, rows: Sequence[Sequence[int]], limits: Limits, batch_size: int
) -> Engine:
    """One with room for the longest of these rows as often as they run together."""
    longest = max(map(len, rows), default=0) + limits.max_new_tokens
    batch_size = min(batch_size, len(rows))
    return Engine(model, tokenizer, cache_tokens=longest * batch_size, batch_size=batch_size)


@contextmanager
def _naming(prompt: str) -> Iterator[None]:
    """Say which prompt an error is about."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{prompt}: {error.message}", hint=error.hint) from None
