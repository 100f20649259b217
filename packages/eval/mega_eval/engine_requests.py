"""Requests to the inference engine, their state while they run, and the events that answer them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from mega_eval.drafters import AdaptiveDraftLength
from mega_eval.grammar_matcher import GrammarMatcher
from mega_eval.paged_cache import EncoderMemory
from mega_eval.sampling import Sampling
from mega_eval.text_stream import Continuation, FinishCause, GenerationLimits
from mega_trainer.data.batch_images import BatchImages


@dataclass(frozen=True)
class EngineRequest:
    """Prompt to continue, with its limits and sampling settings.

    Attributes:
        prompt: its tokens.
        limits: what ends it.
        sampling: how tokens are drawn.
        sample: number of the draw; random draws depend on (seed, sample, step) alone.
        logprobs: so many likeliest alternatives are told with each token; 0: its own probability alone; None: nothing.
        prompt_logprobs: tell those of the prompt's tokens, too.
        grammar: a JSON schema or a Lark grammar that the text has to obey.
        adapter: name of the one that the model has for this text; None: none.
        images: what stands at the prompt's placeholders, where it has any: `BatchImages` of one row, whose features are known.
        drawn: so many of the prompt's last tokens have been generated before: draws and penalties go on behind them.
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


@dataclass(frozen=True)
class ScoredToken:
    """Log-probability of a token and of the most likely alternatives, under the unmodified distribution of the model."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class EngineEvent:
    """New text and tokens of one request after one engine step.

    Attributes:
        request: its number.
        text: what is certain now: whole characters, no part of a stop string.
        tokens: the new tokens, several where guesses were right.
        scored: the same with their probabilities, where these were asked for; else empty.
        prompt: once, the prompt's tokens where they were asked for; None for the first, which nothing predicts.
        finish: what ended it, in the last event.
        error: why the request failed; the event is its last, and other requests are not affected.
    """

    request: int
    text: str
    tokens: list[int]
    scored: list[ScoredToken]
    prompt: list[ScoredToken | None] | None
    finish: FinishCause | None
    error: Exception | None = None


def score_token(logits: Tensor, token: int, alternatives: int) -> ScoredToken:
    """Return the log-probability of `token` by logits [V], and those of the most likely `alternatives`."""
    logprobs = logits.double().log_softmax(-1)
    values, tokens = logprobs.topk(min(alternatives, len(logprobs)))
    return ScoredToken(token, float(logprobs[token]), list(zip(tokens.tolist(), values.tolist(), strict=True)))


if TYPE_CHECKING:
    from mega_eval.inference_engine import EngineRequest, ScoredToken


@dataclass(eq=False)
class RequestState:
    """State of a request in the engine. The keys of its first `num_computed` tokens are in `pages`; full pages have
    `page_hashes`. `image_ranges` are images with bidirectional attention. `first_length` is the number of tokens when
    the first key was computed. `state_index` is its slot of recurrent states while it runs. With an encoder, `tokens`
    are the decoder's and `cross_memory` holds the keys and values of the prompt. `mtp_inputs` are hidden states that
    the MTP layers have not read yet.

    Images, whose tokens see one another, are at `image_ranges`. It had `first_length` tokens when the first of these keys was computed. While it runs its states have a `state_index`. Of a model with an
    encoder its tokens are the decoder's, and `cross_memory` what there is of the prompt. `mtp_inputs` is kept for layers that guess.
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
        """True if all tokens but the last are computed."""
        return self.num_computed == len(self.tokens) - 1 and bool(self.text.tokens)

    @property
    def num_pending_tokens(self) -> int:
        """Number of tokens to compute, draft tokens included."""
        return len(self.tokens) + len(self.drafts) - self.num_computed

    def align_to_images(self, count: int) -> int:
        """Return `count`, extended to the end of an image with bidirectional attention that it would cut."""
        end = self.num_computed + count
        return (
            next((block.stop for block in self.image_ranges if block.start < end < block.stop), end) - self.num_computed
        )

    def count_logits(self, count: int) -> int:
        """Return how many of the next `count` tokens, counted from the last, need logits."""
        if self.request.prompt_logprobs and self.num_computed < len(self.request.prompt):
            return count
        return 1 + len(self.drafts) if count == self.num_pending_tokens else 0

    def make_draft_request(self, count: int) -> EngineRequest:
        """Return the request for a drafter to continue this text by at most `count` tokens."""
        request, new = self.request, len(self.text.tokens)
        return replace(
            request, prompt=self.tokens, limits=GenerationLimits(min(count, self.text.remaining_tokens - 1)), drawn=request.drawn + new,
            logprobs=None, prompt_logprobs=False, grammar=None, adapter=None,
        )  # fmt: skip
