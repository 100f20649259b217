"""Text from a model: batched prompts of any lengths, stop strings, text that streams without broken characters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from mega_common.errors import CheckpointError, ConfigError, DataError
from mega_common.log import ProgressBar
from mega_eval.cache import Batch
from mega_eval.load import check_length
from mega_eval.sampling import Sampling, choose
from mega_trainer.model.decoder import Decoder

CONTEXT = 16  # tokens that are decoded again with new ones, for decoders to which a token's neighbours matter
WINDOW = 64  # tokens to decode at most, but for the rest of a character


class Text(Protocol):
    """What generation needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Tokens of a text."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of tokens."""


@dataclass(frozen=True)
class Limits:
    """When a continuation ends.

    Attributes:
        max_new_tokens: at the latest after so many.
        stop: at the first of these strings, which is left out.
        ends: at any of these tokens, which is left out of the text.
    """

    max_new_tokens: int = 256
    stop: Sequence[str] = ()
    ends: Collection[int] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens = {self.max_new_tokens}: must be at least 1")
        if "" in self.stop:
            raise ConfigError("a stop string is empty, which every text contains")


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
    finish: Literal["end", "stop", "length"]


class TextStream:
    """Turns tokens into text as they come. Characters appear when their last byte has; `decode` is the tokenizer's."""

    def __init__(self, tokenizer: Text, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-CONTEXT:])
        self._told = len(self._decode())

    def add(self, token: int) -> str:
        """The text that is complete with this token and was not before."""
        self._tokens.append(token)
        text = self._decode()
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new, self._told = whole[self._told :], max(self._told, len(whole))
        if len(self._tokens) > WINDOW and whole == text:
            self._tokens = self._tokens[-CONTEXT:]
            self._told = len(self._decode())
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=True)


@dataclass
class Row:
    """One prompt and what has followed it so far. `sample` is its number, which its random draws depend on."""

    tokenizer: Text
    limits: Limits
    sample: int
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: Literal["end", "stop", "length"] | None = None

    def __post_init__(self) -> None:
        self._stream = TextStream(self.tokenizer, self.prompt)
        self._held = ""  # the end of the text so far that may be the begin of a stop string

    def add(self, token: int) -> str:
        """Take the next token; returns the text that is certain now."""
        self.tokens.append(token)
        if token in self.limits.ends:
            self.finish = "end"
        else:
            self._held += self._stream.add(token)
            if len(self.tokens) == self.limits.max_new_tokens:
                self.finish = "length"
        new = self._release()
        self.text += new
        return new

    def _release(self) -> str:
        found = [at for at in map(self._held.find, self.limits.stop) if at >= 0]
        if found:
            self.finish = "stop"
            return self._held[: min(found)]
        held = 0 if self.finish else max((_overlap(self._held, stop) for stop in self.limits.stop), default=0)
        at = len(self._held) - held
        new, self._held = self._held[:at], self._held[at:]
        return new

    def completion(self) -> Completion:
        """The finished row."""
        assert self.finish is not None
        return Completion(self.text, self.tokens, self.finish)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


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
    rows = [_row(model, tokenizer, prompt, limits, sample) for sample, prompt in enumerate(prompts)]
    if model.config.rope.scaling == "dynamic":
        batch_size = 1  # its frequencies depend on the longest row of the batch
    by_length = sorted(rows, key=lambda row: len(row.prompt))
    _check_longest(model, by_length[-1:])
    with ProgressBar("generating", total=len(rows), unit="prompts") as bar:
        for start in range(0, len(rows), batch_size):
            batch = by_length[start : start + batch_size]
            for _ in _steps(model, batch, sampling or Sampling()):
                pass
            bar.advance(len(batch))
    return [row.completion() for row in rows]


def stream(
    model: Decoder, tokenizer: Text, prompt: str, limits: Limits, sampling: Sampling | None = None
) -> Iterator[str]:
    """Continue one prompt, yielding text as it becomes certain: the pieces of what `generate` would return.

    Raises:
        DataError: as `generate` does.
    """
    row = _row(model, tokenizer, prompt, limits, 0)
    _check_longest(model, [row])
    for (new,) in _steps(model, [row], sampling or Sampling()):
        if new:
            yield new


def _row(model: Decoder, tokenizer: Text, prompt: str, limits: Limits, sample: int) -> Row:
    tokens, known = tokenizer.encode(prompt, add_special_tokens=True), model.config.vocab_size
    name = f"prompt {sample + 1} ({prompt[:30]!r})"
    if not tokens:
        raise DataError(f"{name}: has no tokens", hint="a model needs at least one to begin with")
    if max(tokens) >= known:
        raise DataError(
            f"{name}: token {max(tokens)} is outside the model's vocabulary of {known}",
            hint="the tokenizer is that of another model",
        )
    return Row(tokenizer, limits, sample, tokens)


def _check_longest(model: Decoder, rows: Sequence[Row]) -> None:
    for row in rows:
        size, new = len(row.prompt), row.limits.max_new_tokens
        what = f"prompt {row.sample + 1}: {size} tokens and {new} new ones"
        check_length(model.config, size + new - 1, what)  # the last token is never fed back


def _steps(model: Decoder, rows: Sequence[Row], sampling: Sampling) -> Iterator[list[str]]:
    """One token for each unfinished row at a time, until all are finished; yields the text that is new in each."""
    batch = Batch(model)
    logits = batch.start([row.prompt for row in rows])
    while True:
        if bool(logits.isnan().any()):
            raise CheckpointError(
                f"the model's output is not a number in {model.dtype}", hint="try a precision with a wider range"
            )
        tokens = choose(logits, sampling, [row.sample for row in rows], len(rows[0].tokens))
        yield [row.add(token) for row, token in zip(rows, tokens.tolist(), strict=True)]
        going = [index for index, row in enumerate(rows) if row.finish is None]
        if not going:
            return
        if len(going) < len(rows):
            batch.keep(going)
            rows, tokens = [rows[index] for index in going], tokens[going]
        logits = batch.feed(tokens[:, None])
