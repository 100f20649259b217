"""Requests to the inference engine, their state while they run, and the events that answer them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Literal, Protocol

import torch
from torch import Tensor

from mega_common.errors import DataError
from mega_common.model_config import ModelConfig
from mega_eval.grammar_matcher import GrammarMatcher
from mega_eval.model_loading import check_sequence_length
from mega_eval.paged_cache import EncoderMemory
from mega_eval.sampling import Sampling, TokenChoice, choose_tokens
from mega_eval.text_stream import Continuation, FinishCause, GenerationLimits
from mega_trainer.data.batch_images import BatchImages, check_bidirectional_prompt
from mega_trainer.distributed.device import to_device

SHORT_DRAFT = 2  # tokens; a CPU verifies them in little more time than it computes one
LONG_DRAFT = 8  # tokens, used when drafts are likely to be accepted
LONGEST_PAUSE = 16  # steps


@dataclass(frozen=True)
class EngineRequest:
    """Request to the inference engine: a prompt to continue, with its limits and sampling settings.

    Attributes:
        prompt: token ids.
        limits: end conditions of the text.
        sampling: sampling settings.
        sample: index of the sample; random draws depend on (seed, sample, step) alone.
        logprobs: number of alternatives reported with the log-probability of each token; None: no log-probabilities.
        prompt_logprobs: report log-probabilities of the prompt's tokens as well.
        grammar: JSON schema or Lark grammar that constrains the text.
        adapter: name of the LoRA adapter for this text, or None.
        images: images of the prompt's placeholders: `BatchImages` of one row, with computed features.
        drawn: number of the prompt's last tokens that were generated before; draws and penalties count them as such.
    """

    prompt: Sequence[int]
    limits: GenerationLimits = field(default_factory=GenerationLimits)
    sampling: Sampling = field(default_factory=Sampling)
    sample: int = 0
    logprobs: int | None = None
    prompt_logprobs: bool = False
    grammar: str | None = None
    drawn: int = 0
    images: BatchImages | None = None
    adapter: str | None = None

    def check_fits_engine(self, config: ModelConfig, adapters: Collection[str], capacity: int) -> None:
        """Raise DataError if the engine cannot process this request with the model and KV cache.
        It cannot process invalid tokens, an unknown adapter, or more tokens than the model or a KV cache of `capacity`
        tokens holds.

        Raises:
            DataError: with the reason.
        """
        tokens, vocab_size = self.prompt, config.vocab_size
        if not tokens:
            raise DataError("the prompt has no tokens", hint="give a prompt with text")
        if not 0 <= min(tokens) <= max(tokens) < vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < vocab_size)
            raise DataError(
                f"token {wrong} of the prompt is outside the model's vocabulary of {vocab_size}",
                hint="use the tokenizer of this model",
            )
        if self.adapter is not None and self.adapter not in adapters:
            raise DataError(f"the model has no adapter {self.adapter!r}")
        if config.encoder and self.prompt_logprobs:
            raise DataError("log-probabilities of the prompt are not supported with an encoder-decoder model")
        if config.vision and config.vision.bidirectional_prompt and self.prompt_logprobs and self.images:
            raise DataError(
                "log-probabilities of a prompt with images are not supported with a model whose prompts have bidirectional "
                "attention (vision.bidirectional_prompt)",
                hint="leave out the log-probabilities of the prompt",
            )
        if self.images:
            check_bidirectional_prompt(config, len(tokens) - self.drawn)
        size, new = len(tokens), self.limits.max_new_tokens
        what = f"{size} tokens and {new} new ones"
        if config.encoder:
            check_sequence_length(config, max(size, new), what)
            size = 1
        else:
            check_sequence_length(config, size + new - 1, what)  # the last token is never fed back
        if size + new - 1 > capacity:
            raise DataError(f"{what} are more than the capacity of the KV cache, {capacity} tokens")


@dataclass(frozen=True)
class ScoredToken:
    """Log-probability of a token and of the most likely alternatives.
    The alternatives are `top`; the log-probabilities are under the model's own distribution before penalties and
    temperature.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class GenerationEvent:
    """New text and tokens of one request after one step of the inference engine.

    Attributes:
        request: number of the request.
        text: new final text: whole characters, no part of a stop string.
        tokens: new tokens, several if draft tokens were accepted.
        scored: the new tokens with their log-probabilities, if requested; else empty.
        prompt: log-probabilities of the prompt's tokens, once, if requested; None for the first token.
        finish: cause of the end, in the last event.
        error: reason that the request failed; the event is its last, and other requests are not affected.
        stop: stop string, or token of `stop_tokens`, that ended the text.
    """

    request: int
    text: str
    tokens: list[int]
    scored: list[ScoredToken]
    prompt: list[ScoredToken | None] | None
    finish: FinishCause | None
    error: Exception | None = None
    stop: str | int | None = None


def score_tokens(logits: Tensor, tokens: Sequence[int], alternatives: int) -> list[ScoredToken]:
    """Return the log-probability of one token per row, and of the most likely tokens of the row.
    They are under logits [M, V] over the vocabulary; there are `alternatives` most likely tokens.
    """
    logprobs = logits.double().log_softmax(-1)
    own = logprobs.gather(-1, to_device(torch.tensor(tokens), logits.device)[:, None])
    values, top = logprobs.topk(min(alternatives, logprobs.shape[-1]))
    found = zip(tokens, own[:, 0].tolist(), top.tolist(), values.tolist(), strict=True)
    return [ScoredToken(token, one, list(zip(ids, likely, strict=True))) for token, one, ids, likely in found]


class Drafter(Protocol):
    """Interface of a source of draft tokens for speculative decoding."""

    def propose_drafts(self, requests: Sequence[EngineRequest]) -> list[list[int]]:
        """Return draft tokens for each request, for speculative decoding.
        They are at most as many as the request's `limits` allow; an empty list for a request without a draft.
        """


@dataclass
class AdaptiveDraftLength:
    """Adaptive number of draft tokens of one text for speculative decoding.
    It is the number for the next step, adapted to how many were accepted before.

    `SHORT_DRAFT` at first, `LONG_DRAFT` after a draft that was accepted whole. After the n-th rejected draft in a row
    there is none for n steps, so a text that repeats nothing pays for a draft in one of `LONGEST_PAUSE` steps.
    """

    _count: int = SHORT_DRAFT
    _pause: int = 0
    _left: int = 0

    def next_draft_length(self) -> int:
        """Advance to the next step and return its number of draft tokens, 0 during a pause after rejected drafts.
        Call it once per step of speculative decoding.
        """
        self._left = max(0, self._left - 1)
        return 0 if self._left else self._count

    def record_acceptance(self, drafted: int, accepted: int) -> None:
        """Record how many draft tokens the model accepted, which sets the length of later drafts.
        The model accepted the first `accepted` of `drafted` tokens.
        """
        if not drafted:
            return
        self._count = LONG_DRAFT if accepted == drafted else max(SHORT_DRAFT, accepted)
        self._pause = 0 if accepted else min(self._pause + 1, LONGEST_PAUSE)
        self._left = self._pause


@dataclass(eq=False)
class RequestState:
    """State of one request in the inference engine: its tokens, text, draft tokens and KV cache pages.

    Attributes:
        number, request, text, grammar: the request, the decoder of its text, and its grammar.
        tokens: prompt and new tokens; in an encoder-decoder model, tokens of the decoder.
        image_ranges: positions of images with bidirectional attention.
        drafts: draft tokens to verify in the next step, and in `draft_length` how many to draft.
        num_computed: number of tokens whose keys and values are in `pages`; full pages have `page_hashes`.
        first_length: number of tokens when the first key was computed.
        state_index: index of its recurrent states while it runs.
        cross_memory: keys and values of the encoded prompt in an encoder-decoder model.
        mtp_inputs: for each MTP layer, hidden states that it has not read yet.
        prompt_scores: log-probabilities of the prompt's tokens so far.
    """

    number: int
    request: EngineRequest
    text: Continuation
    tokens: list[int]
    grammar: GrammarMatcher | None
    image_ranges: list[range] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    draft_length: AdaptiveDraftLength = field(default_factory=AdaptiveDraftLength)
    num_computed: int = 0
    first_length: int = 0
    state_index: int | None = None
    pages: list[int] = field(default_factory=list)
    page_hashes: list[bytes] = field(default_factory=list)
    cross_memory: EncoderMemory | None = None
    mtp_inputs: list[Tensor] = field(default_factory=list)
    prompt_scores: list[ScoredToken | None] = field(default_factory=lambda: [None])

    @property
    def is_generating(self) -> bool:
        """True if the model has computed all tokens of the request but the last generated one."""
        return self.num_computed == len(self.tokens) - 1 and bool(self.text.tokens)

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens of the request that the model has yet to compute.
        Draft tokens of speculative decoding are included.
        """
        return len(self.tokens) + len(self.drafts) - self.num_computed

    def extend_to_image_end(self, count: int) -> int:
        """Return the number of tokens to compute next, raised to the end of an image that it would cut.
        `count` is the number before; only images with bidirectional attention matter.
        """
        end = self.num_computed + count
        return (
            next((block.stop for block in self.image_ranges if block.start < end < block.stop), end) - self.num_computed
        )

    def count_tokens_needing_logits(self, count: int) -> int:
        """Return the number of the next `count` tokens to compute that need logits; they are the last ones."""
        if self.request.prompt_logprobs and self.num_computed < len(self.request.prompt):
            return count
        return 1 + len(self.drafts) if count == self.num_pending_tokens else 0

    def list_token_choices(self) -> list[TokenChoice | Literal["later"] | None]:
        """Return the choices of the next token and the one after each draft token: None is greedy, `later` waits for a grammar.
        A grammar constrains tokens after draft tokens only once these are accepted.
        """
        request, new, grammar = self.request, self.text.tokens, self.grammar
        if request.sampling.is_greedy and grammar is None:
            return [None] * (1 + len(self.drafts))
        prompt_length = len(self.tokens) - len(new) - request.drawn
        prompt, generated = self.tokens[:prompt_length], self.tokens[prompt_length:]
        first = TokenChoice(
            request.sampling, prompt, generated, request.sample, None if grammar is None else grammar.mask_scores
        )
        after_drafts: Iterable[TokenChoice | Literal["later"]] = repeat("later", len(self.drafts))
        if grammar is None:
            counts = range(1, 1 + len(self.drafts))
            after_drafts = (replace(first, generated=[*generated, *self.drafts[:count]]) for count in counts)
        return [first, *after_drafts]

    def choose_token(self, logits: Tensor) -> int:
        """Return the next token chosen from logits [V], see `choose_tokens`."""
        (token,) = choose_tokens(logits[None], self.list_token_choices()[:1])
        return token

    def make_draft_request(self, count: int) -> EngineRequest:
        """Return the request that makes a draft model continue this request's text by at most `count` tokens.
        It has no grammar, adapter or log-probabilities.
        """
        request, new = self.request, len(self.text.tokens)
        return replace(
            request, prompt=self.tokens, limits=GenerationLimits(min(count, self.text.remaining_tokens - 1)), drawn=request.drawn + new,
            logprobs=None, prompt_logprobs=False, grammar=None, adapter=None,
        )  # fmt: skip
