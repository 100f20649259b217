"""Continuous batching: requests enter and leave between forward passes, and each pass serves all running requests.

A step computes the next tokens of all running rows as one batch: one token of each row that generates, and parts of the
prompts of those that have just come (chunked prefill). What a row computes does not depend on the others, but for the
rounding of matrix products. Keys and values lie in pages (`cache`, `pages`); rows that begin alike share full pages. When
no page is left, the youngest row gives back its own and waits to be computed again.

Legend: N tokens of a step, V vocabulary, D model width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor

from mega_common.errors import CheckpointError, DataError, MegaError
from mega_common.progress_logging import logger
from mega_eval.cpu_layers import flatten_layers
from mega_eval.drafters import Drafter
from mega_eval.engine_requests import EngineEvent as EngineEvent
from mega_eval.engine_requests import EngineRequest as EngineRequest
from mega_eval.engine_requests import RequestState, score_token
from mega_eval.engine_requests import ScoredToken as ScoredToken
from mega_eval.grammar_matcher import GrammarCache
from mega_eval.image_prompts import find_image_ranges
from mega_eval.image_prompts import gather_token_images as seen_columns
from mega_eval.model_loading import check_sequence_length
from mega_eval.mtp_drafter import MtpDrafter
from mega_eval.page_allocator import PAGE, PageAllocator, hash_full_pages
from mega_eval.paged_cache import PagedCache, RowSpan
from mega_eval.sampling import apply_penalties, compute_probabilities, draw_token, select_most_likely
from mega_eval.text_stream import Continuation, TextTokenizer
from mega_trainer.data.micro_batch import SequenceBounds
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import EncoderDecoderModel
from mega_trainer.parallel.lora_layers import AdapterSelection


class InferenceEngine:
    """Engine that runs generation requests on one model. Not thread-safe: one thread drives it.

    Args:
        model: in eval mode.
        tokenizer: the model's.
        cache_tokens: room for so many tokens of all requests together.
        batch_size: most requests that run at once.
        chunk_tokens: most tokens of a forward pass, but for those of rows that generate.
        drafter: guesses the next tokens; not asked for models with LongRoPE, whose keys depend on the length, and for those
                with a state, which no wrong guess may change, nor for those with an encoder, whose texts are short. `mtp`:
                the model's own layers for further tokens.
        adapters: tells the model's layers which rows have which of its adapters.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: TextTokenizer,
        *,
        cache_tokens: int,
        batch_size: int,
        chunk_tokens: int = 512,
        drafter: Drafter | Literal["mtp"] | None = None,
        adapters: AdapterSelection | None = None,
    ) -> None:
        self._model, self._tokenizer, self._adapters = model, tokenizer, adapters or AdapterSelection([])
        self._layers, self._batch_size, self._chunk = flatten_layers(model), batch_size, chunk_tokens
        self._pages = PageAllocator(-(-cache_tokens // PAGE))
        self._cache = PagedCache(model.config.num_layers + len(model.predictors), self._pages.count, batch_size)
        self._places = list(range(batch_size))  # of states, those that no row has
        self.grammars = GrammarCache(tokenizer)
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []
        self._number = 0
        ropes = [rope for rope in (model.config.rope, model.config.local_rope) if rope]
        self._bounds = [rope.original_max_position or 0 for rope in ropes if rope.scaling == "longrope"]
        recurrent, encodes = model.config.is_recurrent, model.config.encoder is not None
        asked = None if self._bounds or recurrent or encodes else drafter
        self._drafter = MtpDrafter(model, self._cache) if asked == "mtp" else asked
        # keys that are turned by angles which depend on the length of their row are of no use to another, nor are keys
        # without the states of those tokens
        self._shares = (
            not recurrent and not encodes and not any(rope.scaling in ("dynamic", "longrope") for rope in ropes)
        )

    @property
    def num_waiting(self) -> int:
        """Number of requests that have not started, or have to be recomputed."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of requests that have started."""
        return len(self._running)

    @property
    def num_pages(self) -> int:
        """Number of cache pages, of `PAGE` tokens each."""
        return self._pages.count

    @property
    def num_free_pages(self) -> int:
        """Number of cache pages that no request uses."""
        return self._pages.num_free_pages

    def add_request(self, request: EngineRequest) -> int:
        """Add a request to the queue and return its number.

        Raises:
            DataError: when it has no tokens, a token that the model does not know, an adapter that it has not, a bad
                grammar, or is too long.
        """
        self._check_request(request)
        before = () if self._model.config.encoder else request.prompt  # what an encoder reads is not gone on with
        text = Continuation(self._tokenizer, request.limits, before)
        grammar = (
            None if request.grammar is None else self.grammars.get_grammar_matcher(request.grammar, request.limits.ends)
        )
        vision = self._model.config.vision
        blocks = [] if vision is None or request.images is None else find_image_ranges(request.prompt, vision)
        self._waiting.append(RequestState(self._number, request, text, self._initial_tokens(request), grammar, blocks))
        self._number += 1
        return self._number - 1

    def _initial_tokens(self, request: EngineRequest) -> list[int]:
        """Return the first tokens of the row: the prompt, or the start token if an encoder reads the prompt."""
        encoder = self._model.config.encoder
        return [encoder.start_token] if encoder else list(request.prompt)

    def cancel_request(self, request: int) -> None:
        """Drop a request and free its pages at once; a request that has finished or is unknown is ignored."""
        for row in [row for row in (*self._waiting, *self._running) if row.number == request]:
            (self._waiting if row in self._waiting else self._running).remove(row)
            self._release_row(row)

    def step(self, *, isolate: bool = False) -> list[EngineEvent]:
        """Run one forward pass and return its events; the list is empty when idle or while prompts are computed.

        Args:
            isolate: report a request that fails by an event with an error, instead of raising that. The request is
                dropped in both cases, and all others continue.

        Raises:
            CheckpointError: when the model's output is not a number.
        """
        events = self._admit_requests()
        self._draft_tokens()
        if work := self._schedule_step():
            x, logits = self._forward(work)
            likeliest = select_most_likely(logits)
            end, done = 0, [row.num_computed for row, _ in work]
            for row, count in work:
                own = slice(end, end := end + row.count_logits(count))
                events += self._isolate_failure(
                    row, partial(self._process_outputs, row, count, logits[own], likeliest[own])
                )
            if isinstance(self._drafter, MtpDrafter):
                self._drafter.record_hidden_states(work, done, x)
        if not isolate and (failed := next((event.error for event in events if event.error), None)):
            raise failed
        return events

    def drop_all_requests(self) -> None:
        """Drop all requests and the cached pages, after a step that failed."""
        self._waiting.clear()
        self._running.clear()
        self._pages, self._places = PageAllocator(self._pages.count), list(range(self._batch_size))

    def _isolate_failure(self, row: RequestState, act: Callable[[], list[EngineEvent]]) -> list[EngineEvent]:
        """Return the events of `act`; if it raises, drop the row and return the event of its failure."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - no error in one request may end the others
            if not isinstance(error, MegaError):
                logger.exception("request %d of the engine failed", row.number)
            self.cancel_request(row.number)
            return [EngineEvent(row.number, "", [], [], None, None, error)]

    def _process_outputs(
        self, row: RequestState, count: int, logits: Tensor, likeliest: Sequence[int]
    ) -> list[EngineEvent]:
        """Record `count` computed tokens of a row, and choose the next token once its prompt is complete."""
        if -1 in likeliest:
            raise CheckpointError(
                f"the model's output is not a number in {self._model.dtype}", hint="try a precision with a wider range"
            )
        if count < row.num_pending_tokens:
            self._record_computed(row, count, logits)
            return []
        self._record_computed(row, count - len(row.drafts), logits)
        known = 1 + len(row.drafts)
        return [self._accept_tokens(row, logits[-known:], likeliest[-known:])]

    def _check_request(self, request: EngineRequest) -> None:
        """Refuse a request with invalid tokens, an unknown adapter, or more tokens than the model or the cache can
        hold.
        """
        tokens, known = request.prompt, self._model.config.vocab_size
        if not tokens:
            raise DataError("the prompt has no tokens", hint="a model needs at least one to begin with")
        if not 0 <= min(tokens) <= max(tokens) < known:
            wrong = next(token for token in tokens if not 0 <= token < known)
            raise DataError(
                f"token {wrong} is outside the model's vocabulary of {known}",
                hint="the tokenizer is that of another model",
            )
        if request.adapter is not None and request.adapter not in self._adapters.names:
            raise DataError(f"the model has no adapter {request.adapter!r}")
        if self._model.config.encoder and request.prompt_logprobs:
            raise DataError("the model has an encoder, and tells no probabilities of what that reads")
        size, new = len(tokens), request.limits.max_new_tokens
        what = f"{size} tokens and {new} new ones"
        if self._model.config.encoder:
            check_sequence_length(self._model.config, max(size, new), what)
            size = 1
        else:
            check_sequence_length(self._model.config, size + new - 1, what)  # the last token is never fed back
        if size + new - 1 > self.num_pages * PAGE:
            raise DataError(f"{what} are more than the {self.num_pages * PAGE} that the cache has room for")

    def _admit_requests(self) -> list[EngineEvent]:
        """Start the requests that have waited longest while all of their tokens fit; return events of failures."""
        failed: list[EngineEvent] = []
        while self._waiting and len(self._running) < self._batch_size:
            row = self._waiting[0]
            self._share_prefix_pages(row)
            if _count_pages(len(row.tokens)) - len(row.pages) > self._pages.num_free_pages:
                self._release_row(row)
                break
            row.first_length, row.state_index = len(row.tokens), self._places.pop()
            self._running.append(self._waiting.popleft())
            failed += self._isolate_failure(row, partial(self._run_encoder, row))
        return failed

    def _run_encoder(self, row: RequestState) -> list[EngineEvent]:
        """Compute the encoder output for a row's prompt if the model has an encoder."""
        if isinstance(self._model, EncoderDecoderModel) and row.cross_memory is None:
            row.cross_memory = self._model.encode_keys_values(
                torch.tensor([row.request.prompt], device=self._model.device)
            )
        return []

    def _share_prefix_pages(self, row: RequestState) -> None:
        """Give the row the cached pages of rows with an identical prefix; at least its last token has to be computed."""
        if not self._shares or row.request.prompt_logprobs or row.request.images:
            return
        names = hash_full_pages(row.tokens[:-1], of=row.request.adapter)
        row.pages = self._pages.share_cached_pages(names)
        row.num_computed, row.page_hashes = len(row.pages) * PAGE, names[: len(row.pages)]

    def _release_row(self, row: RequestState) -> None:
        """Free all pages of a row and its state slot."""
        self._pages.release_pages(row.pages)
        self._places += [] if row.state_index is None else [row.state_index]
        row.state_index = None
        row.num_computed, row.pages, row.page_hashes, row.drafts, row.mtp_inputs = 0, [], [], [], []

    def _draft_tokens(self) -> None:
        """Request draft tokens for the rows that generate."""
        if self._drafter is None:
            return
        rows = [row for row in self._running if row.is_generating and row.text.remaining_tokens > 1]
        asked = [
            (row, row.make_draft_request(count)) for row in rows if (count := row.draft_length.next_draft_length())
        ]
        if not asked:
            return
        if isinstance(self._drafter, MtpDrafter):
            found = self._drafter.propose_drafts([row for row, _ in asked])
        else:
            found = self._drafter.propose_drafts([request for _, request in asked])
        for (row, request), drafts in zip(asked, found, strict=True):
            row.drafts = drafts[: request.limits.max_new_tokens]

    def _schedule_step(self) -> list[tuple[RequestState, int]]:
        """Return the rows of this step and their token counts: generating rows first, then prompt chunks that fit
        (chunked prefill).

        Those with one token come first, as the cache likes it.
        """
        room = max(1, self._chunk - sum(row.num_pending_tokens for row in self._running if row.is_generating))
        work = []
        for row in list(self._running):
            if row not in self._running:  # its pages went to an older one
                continue
            if self._exceeds_rope_bound(row):
                row.num_computed, row.first_length = 0, len(row.tokens)
            count = (
                row.num_pending_tokens if row.is_generating else row.align_to_images(min(row.num_pending_tokens, room))
            )
            if count and self._reserve_pages(row, row.num_computed + count):
                work.append((row, count))
                room -= 0 if row.is_generating else min(count, room)
        return sorted(work, key=lambda one: one[1] > 1)

    def _reserve_pages(self, row: RequestState, total: int) -> bool:
        """Reserve pages for `total` tokens, preempting younger rows if necessary; return False if the row itself is
        preempted.
        """
        needed = _count_pages(total) - len(row.pages)
        while needed > self._pages.num_free_pages:
            youngest = self._running.pop()
            self._release_row(youngest)
            self._waiting.appendleft(youngest)
            if youngest is row:
                return False
        row.pages += self._pages.allocate_pages(needed, row.pages[-1] if row.pages else None)
        return True

    @torch.inference_mode()
    def _forward(self, work: Sequence[tuple[RequestState, int]]) -> tuple[Tensor, Tensor]:
        """Return the final hidden states [N, 1, D], and the logits [M, V] after the last `RequestState.count_logits`
        tokens of each row.
        """
        model, device = self._model, self._model.device
        spans: list[RowSpan] = []
        tokens: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        wanted: list[int] = []
        for row, count in work:
            first, total = len(tokens), row.num_computed + count
            spans.append(
                RowSpan(
                    slice(first, first + count),
                    total,
                    row.pages,
                    row.state_index or 0,
                    row.image_ranges,
                    row.cross_memory or {},
                )
            )
            tokens += (row.tokens[row.num_computed : total] + row.drafts)[:count]
            positions += range(row.num_computed, total)
            lengths += self._rope_lengths(row, count)
            wanted += range(first + count - row.count_logits(count), first + count)
        self._cache.begin_forward_pass(spans, device)
        if self._adapters.names:
            self._adapters.select_adapters([row.request.adapter for row, count in work for _ in range(count)], device)
        # each token is a batch row of its own: what concerns its neighbours is up to the cache
        columns = torch.tensor(positions, device=device)[:, None]
        images = seen_columns([(row.request.images, row.num_computed, count) for row, count in work], device)
        turned = columns if images is None or images.positions is None else images.positions
        context = model.make_forward_context(turned, sequence_bounds=SequenceBounds(lengths), cache=self._cache)
        x = self._layers(
            model.embed_inputs(torch.tensor(tokens, device=device)[:, None], columns, images=images), context
        )
        return x, model.compute_logits(x[torch.tensor(wanted, dtype=torch.int64, device=device)]).squeeze(1)

    def _rope_lengths(self, row: RequestState, count: int) -> list[int]:
        """Return the lengths that determine the RoPE angles of the row's next tokens: the text length when each token
        was first computed.

        Keys keep the angles of that time, but for those of LongRoPE, which are all computed again (`_exceeds_rope_bound`).
        """
        if self._bounds:
            return [len(row.tokens)] * count
        return [max(len(row.request.prompt), place + 1) for place in range(row.num_computed, row.num_computed + count)]

    def _exceeds_rope_bound(self, row: RequestState) -> bool:
        """Return whether the row has outgrown the RoPE angles of its cached keys (LongRoPE)."""
        return any(row.first_length <= bound < len(row.tokens) for bound in self._bounds)

    def _record_computed(self, row: RequestState, count: int, logits: Tensor) -> None:
        """Mark the row's next `count` tokens as cached, and record prompt log-probabilities from logits [count, V] if
        requested.
        """
        prompt = row.request.prompt
        if row.request.prompt_logprobs:
            for place, own in zip(range(row.num_computed, row.num_computed + count), logits, strict=False):
                if place + 1 == len(row.prompt_scores) < len(prompt):  # not told before
                    row.prompt_scores.append(score_token(own, prompt[place + 1], row.request.logprobs or 0))
        row.num_computed += count
        full = row.num_computed // PAGE
        if (
            self._shares and full > len(row.page_hashes) and row.request.images is None
        ):  # which the tokens do not tell apart
            row.page_hashes = hash_full_pages(row.tokens[: full * PAGE], row.page_hashes, row.request.adapter)
            for page, name in zip(row.pages, row.page_hashes, strict=False):
                self._pages.register_page(page, name)

    def _accept_tokens(self, row: RequestState, logits: Tensor, likeliest: Sequence[int]) -> EngineEvent:
        """Choose the next token, and the tokens after it as long as the draft tokens before them are accepted.

        Args:
            row: whose tokens are all computed.
            logits: [1 + guesses, V].
            likeliest: token of each.
        """
        drafts, row.drafts = row.drafts, []
        first, new, tokens, told = not row.text.tokens, "", [], []
        for own, best, draft in zip_longest(logits, likeliest, drafts):
            token = self._choose_token(row, own, best)
            if row.request.logprobs is not None:
                told.append(score_token(own, token, row.request.logprobs))
            tokens.append(token)
            row.tokens.append(token)
            new += row.text.append_token(token)
            if row.grammar is not None and row.grammar.accept_token(token):
                new += row.text.finish_text()
            if row.text.finish is not None or token != draft:
                break
            row.num_computed += 1  # the guess is in the cache already
        row.draft_length.record_acceptance(len(drafts), len(tokens) - 1)
        if row.text.finish is not None:
            self._running.remove(row)
            self._release_row(row)
        prompt = row.prompt_scores if row.request.prompt_logprobs and first else None
        return EngineEvent(row.number, new, tokens, told, prompt, row.text.finish)

    def _choose_token(self, row: RequestState, logits: Tensor, likeliest: int) -> int:
        """Return the next token chosen from logits [V]."""
        request, new = row.request, row.text.tokens
        if request.sampling.is_greedy and row.grammar is None:
            return likeliest
        given = len(row.tokens) - len(new) - request.drawn
        scores = apply_penalties(logits, request.sampling, row.tokens[:given], row.tokens[given:])
        if row.grammar is not None:
            scores = row.grammar.mask_scores(scores)
        p = compute_probabilities(scores, request.sampling)
        return draw_token(p, request.sampling, request.sample, request.drawn + len(new))


def _count_pages(tokens: int) -> int:
    """Return the number of pages that `tokens` tokens need."""
    return -(-tokens // PAGE)
