"""Continuous batching: requests enter and leave between forward passes, and each pass serves all running requests.

A step computes the next tokens of all running rows as one batch: one token of each row that generates, and chunks of new
prompts (chunked prefill). Rows do not affect each other, except for rounding in GEMMs and attention. Keys and values are in
a paged KV cache (`paged_cache`); rows with a common prefix share its full pages. When no page is free, the youngest row is
preempted: it releases its pages and is recomputed later. With a drafter the rows decode speculatively (`drafters`).

Legend: N tokens of a step, V vocabulary, D model width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Literal

import torch
from torch import Tensor

from mega_common.errors import ConfigError, DataError, MegaError
from mega_common.progress_logging import logger
from mega_eval.cpu_layers import build_cpu_layer_function
from mega_eval.engine_requests import Drafter, EngineRequest, GenerationEvent, RequestState, score_tokens
from mega_eval.grammar_matcher import GrammarCache
from mega_eval.image_prompts import attach_image_features, find_image_ranges, gather_token_images
from mega_eval.model_loading import add_lora_adapter, remove_lora_adapter
from mega_eval.mtp_drafter import MtpDrafter
from mega_eval.paged_cache import PAGE, PageAllocator, PagedCache, RequestTokenSpan, choose_page_size, hash_full_pages
from mega_eval.sampling import CHOSEN_LATER, TokenChoice, check_chosen_tokens, choose_tokens
from mega_eval.text_stream import Continuation, TextTokenizer
from mega_trainer.data.batch_images import BatchImages
from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.distributed.device import to_device
from mega_trainer.kernels.attention_masks import PagedAttentionName
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import EncoderDecoderModel
from mega_trainer.parallel.lora_layers import PerRowAdapterSelection


class InferenceEngine:
    """Engine that generates text for many requests at once on one model, with continuous batching and a paged KV cache.
    Not thread-safe: one thread drives it.

    Args:
        model: decoder in eval mode.
        tokenizer: tokenizer of the model.
        cache_tokens: capacity of the KV cache in tokens, for all requests together.
        batch_size: maximum number of requests that run at once.
        chunk_tokens: maximum number of prompt tokens in a forward pass; tokens of generating rows count towards it but
            are never deferred.
        drafter: source of draft tokens; `mtp`: the model's own MTP layers. Ignored for models with LongRoPE, whose keys
            depend on the length, with recurrent states, which cannot be rolled back, or with an encoder, whose texts are
            short.
        adapters: selects the LoRA adapter of each row.
        attention: implementation of attention for rows with one new token (`mega_trainer.kernels.paged_attention`), where
            it supports the model; None: the fastest.
        fused_cpu_layers: apply the layers by functions that are faster on a CPU; False: call the modules and their hooks.
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
        adapters: PerRowAdapterSelection | None = None,
        attention: PagedAttentionName | None = None,
        fused_cpu_layers: bool = True,
    ) -> None:
        if model.config.transformers is not None:
            raise ConfigError(
                "continuous batching is not supported with a model of implementation: transformers",
                hint="use mega generate, or convert it (mega ckpt convert --to hf) and serve it with another server",
            )
        self._model, self._tokenizer, self._adapters = model, tokenizer, adapters or PerRowAdapterSelection([])
        self._layers = build_cpu_layer_function(model) if fused_cpu_layers else model
        self._batch_size, self._chunk = batch_size, chunk_tokens
        self._page_size = choose_page_size(model.config, model.device, model.dtype)
        # a larger page leaves part of each row's last page unused
        self._pages = PageAllocator(-(-cache_tokens // self._page_size) + (batch_size if self._page_size > PAGE else 0))
        self._cache = PagedCache(
            model.config.num_layers + model.config.mtp_layers, self._pages.count, batch_size,
            page_size=self._page_size, attention=attention,
        )  # fmt: skip
        self._free_states = list(range(batch_size))  # indices of recurrent states that no row uses
        self.grammars = GrammarCache(tokenizer)
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []
        self._number = 0
        ropes = [rope for rope in (model.config.rope, model.config.local_rope) if rope]
        self._longrope_bounds = [rope.original_max_position or 0 for rope in ropes if rope.scaling == "longrope"]
        recurrent, encodes = model.config.is_recurrent, model.config.encoder is not None
        supported = None if self._longrope_bounds or recurrent or encodes else drafter
        self._drafter = MtpDrafter(model, self._cache) if supported == "mtp" else supported
        # another row cannot use keys whose RoPE angles depend on the length of their row, nor keys without the recurrent
        # states of those tokens
        self._shares_prefixes = (
            not recurrent and not encodes and not any(rope.scaling in ("dynamic", "longrope") for rope in ropes)
        )

    @property
    def num_waiting(self) -> int:
        """Number of queued requests: not yet started, or to be recomputed after they lost their KV cache pages."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Number of requests that have started and not finished."""
        return len(self._running)

    @property
    def num_pages(self) -> int:
        """Number of pages of the KV cache, of equal size."""
        return self._pages.count

    @property
    def num_free_pages(self) -> int:
        """Number of pages of the KV cache that no request uses."""
        return self._pages.num_free_pages

    def add_request(self, request: EngineRequest) -> int:
        """Add a request to the engine's queue and return its number, which events and `cancel_request` use.

        Raises:
            DataError: when the prompt is empty, too long or has tokens outside the vocabulary, the adapter is unknown, or
                the grammar is invalid.
        """
        request.check_fits_engine(self._model.config, self._adapters.names, self.num_pages * self._page_size)
        before = () if self._model.config.encoder else request.prompt  # the text does not continue an encoder's input
        text = Continuation(self._tokenizer, request.limits, before)
        grammar = (
            None if request.grammar is None else self.grammars.get_grammar_matcher(request.grammar, request.limits.ends)
        )
        vision = self._model.config.vision
        given = request.prompt[: len(request.prompt) - request.drawn]
        blocks = [] if vision is None or request.images is None else find_image_ranges(given, vision)
        self._waiting.append(RequestState(self._number, request, text, self._initial_tokens(request), grammar, blocks))
        self._number += 1
        return self._number - 1

    def _initial_tokens(self, request: EngineRequest) -> list[int]:
        """Return the first tokens of the row: the prompt, or the start token if an encoder reads the prompt."""
        encoder = self._model.config.encoder
        return [encoder.start_token] if encoder else list(request.prompt)

    def cancel_request(self, request: int) -> None:
        """Drop a request and free its KV cache pages at once.
        `request` is its number; a number that has finished or is unknown is ignored.
        """
        for row in [row for row in (*self._waiting, *self._running) if row.number == request]:
            (self._waiting if row in self._waiting else self._running).remove(row)
            self._release_row(row)

    def encode_images(self, images: BatchImages) -> BatchImages:
        """Return the images of a prompt with features computed by the model's vision encoder."""
        return attach_image_features(self._model, images)

    def load_adapter(self, name: str, base: str, folder: str) -> None:
        """Load the LoRA adapter in `folder`, of the model at `base`, which requests then select by `name`.

        Raises:
            CheckpointError: when it is not an adapter of the model, or cannot stay separate from its weights.
            ConfigError: when the engine drafts with MTP layers, which adapters do not change.
        """
        if isinstance(self._drafter, MtpDrafter):
            raise ConfigError("LoRA adapters are not supported with draft = mtp", hint="use draft = ngrams")
        add_lora_adapter(self._model, base, folder, name, self._adapters)
        self._layers = build_cpu_layer_function(self._model)

    def unload_adapter(self, name: str) -> None:
        """Remove the LoRA adapter `name` from the engine; a DataError while a request uses it.

        Raises:
            DataError: when a request uses it.
        """
        users = sum(row.request.adapter == name for row in (*self._waiting, *self._running))
        if users:
            raise DataError(f"the adapter is in use by {users} requests", hint="unload it when they have ended")
        remove_lora_adapter(self._model, name, self._adapters)

    def step(self, *, isolate: bool = False) -> list[GenerationEvent]:
        """Run one forward pass over the scheduled requests; return events with new text, and with `isolate` with errors.
        The list is empty when the engine is idle or only computes prompts.

        Args:
            isolate: report a failed request as an event with an error instead of raising that error. The request is
                dropped in both cases, and all others continue.

        Raises:
            CheckpointError: when the model's output is not a number.
        """
        events = self._admit_requests()
        self._draft_tokens()
        if work := self._schedule_step():
            x, logits = self._forward(work)
            chosen = self._choose_tokens(work, logits)
            end, done = 0, [row.num_computed for row, _ in work]
            for row, count in work:
                own = slice(end, end := end + row.count_tokens_needing_logits(count))
                events += self._isolate_failure(
                    row, partial(self._process_outputs, row, count, logits, own, chosen[own])
                )
            if isinstance(self._drafter, MtpDrafter):
                self._drafter.record_hidden_states(work, done, x)
        if not isolate and (failed := next((event.error for event in events if event.error), None)):
            raise failed
        return events

    def drop_all_requests(self) -> None:
        """Drop all requests and all pages of the engine's KV cache, for use after a `step` that raised an error."""
        self._waiting.clear()
        self._running.clear()
        self._pages, self._free_states = PageAllocator(self._pages.count), list(range(self._batch_size))

    def _isolate_failure(self, row: RequestState, act: Callable[[], list[GenerationEvent]]) -> list[GenerationEvent]:
        """Return the events of `act`; if it raises, drop the row and return the event of its failure."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - an error in one request must not end the others
            if not isinstance(error, MegaError):
                logger.exception("request %d of the engine failed", row.number)
            self.cancel_request(row.number)
            return [GenerationEvent(row.number, "", [], [], None, None, error)]

    def _choose_tokens(self, work: Sequence[tuple[RequestState, int]], logits: Tensor) -> list[int]:
        """Return the next token after each row of logits [M, V] of the scheduled requests, see `choose_tokens`."""
        choices: list[TokenChoice | Literal["later"] | None] = []
        for row, count in work:
            own = row.list_token_choices() if count == row.num_pending_tokens else []
            choices += [*([None] * (row.count_tokens_needing_logits(count) - len(own))), *own]
        try:
            return choose_tokens(logits, choices)
        except Exception:  # noqa: BLE001 - due to one row's settings, which are to fail that row alone, when it is accepted
            return choose_tokens(logits, [choice and "later" for choice in choices])

    def _process_outputs(
        self, row: RequestState, count: int, logits: Tensor, own: slice, chosen: Sequence[int]
    ) -> list[GenerationEvent]:
        """Record `count` computed tokens of a row, and accept the next token once its prompt is complete.

        Args:
            row: state of the request.
            count: number of the row's tokens that the forward pass computed.
            logits: [M, V] of all rows.
            own: the row's part of them.
            chosen: token chosen from each row of `logits[own]`, see `choose_tokens`.
        """
        check_chosen_tokens(chosen, self._model.dtype)
        if count < row.num_pending_tokens:
            self._record_computed(row, count, logits, own)
            return []
        self._record_computed(row, count - len(row.drafts), logits, own)
        verified = 1 + len(row.drafts)
        return [self._accept_tokens(row, logits, own.stop - verified, chosen[-verified:])]

    def _admit_requests(self) -> list[GenerationEvent]:
        """Start the requests that have waited longest while all of their tokens fit; return events of failures."""
        failed: list[GenerationEvent] = []
        while self._waiting and len(self._running) < self._batch_size:
            row = self._waiting[0]
            self._share_prefix_pages(row)
            if self._count_pages(len(row.tokens)) - len(row.pages) > self._pages.num_free_pages:
                self._release_row(row)
                break
            row.first_length, row.state_index = len(row.tokens), self._free_states.pop()
            self._running.append(self._waiting.popleft())
            failed += self._isolate_failure(row, partial(self._run_encoder, row))
        return failed

    def _run_encoder(self, row: RequestState) -> list[GenerationEvent]:
        """Compute the encoder output for a row's prompt if the model has an encoder."""
        if isinstance(self._model, EncoderDecoderModel) and row.cross_memory is None:
            row.cross_memory = self._model.encode_keys_values(
                torch.tensor([row.request.prompt], device=self._model.device)
            )
        return []

    def _share_prefix_pages(self, row: RequestState) -> None:
        """Give the row the cached pages of rows with an identical prefix, without its last token."""
        if not self._shares_prefixes or row.request.prompt_logprobs or row.request.images:
            return
        hashes = hash_full_pages(row.tokens[:-1], adapter=row.request.adapter, page_size=self._page_size)
        row.pages = self._pages.share_cached_pages(hashes)
        row.num_computed, row.page_hashes = len(row.pages) * self._page_size, hashes[: len(row.pages)]

    def _release_row(self, row: RequestState) -> None:
        """Free all pages of a row and its state slot."""
        self._pages.release_pages(row.pages)
        self._free_states += [] if row.state_index is None else [row.state_index]
        row.state_index = None
        row.num_computed, row.pages, row.page_hashes, row.drafts, row.mtp_inputs = 0, [], [], [], []

    def _draft_tokens(self) -> None:
        """Request draft tokens for the rows that generate."""
        if self._drafter is None:
            return
        rows = [row for row in self._running if row.is_generating and row.text.remaining_tokens > 1]
        drafting = [
            (row, row.make_draft_request(count)) for row in rows if (count := row.draft_length.next_draft_length())
        ]
        if not drafting:
            return
        if isinstance(self._drafter, MtpDrafter):
            found = self._drafter.propose_drafts([row for row, _ in drafting])
        else:
            found = self._drafter.propose_drafts([request for _, request in drafting])
        for (row, request), drafts in zip(drafting, found, strict=True):
            row.drafts = drafts[: request.limits.max_new_tokens]

    def _schedule_step(self) -> list[tuple[RequestState, int]]:
        """Return the rows of this step and their token counts: generating rows first, then prompt chunks that fit
        (chunked prefill).

        Rows with one token come first, which saves work in the cache.
        """
        room = max(1, self._chunk - sum(row.num_pending_tokens for row in self._running if row.is_generating))
        work = []
        for row in list(self._running):
            if row not in self._running:  # preempted in this loop
                continue
            if self._exceeds_rope_bound(row):
                row.num_computed, row.first_length = 0, len(row.tokens)
            count = (
                row.num_pending_tokens
                if row.is_generating
                else row.extend_to_image_end(min(row.num_pending_tokens, room))
            )
            if count and self._reserve_pages(row, row.num_computed + count):
                work.append((row, count))
                room -= 0 if row.is_generating else min(count, room)
        return sorted(work, key=lambda one: one[1] > 1)

    def _reserve_pages(self, row: RequestState, total: int) -> bool:
        """Reserve pages for `total` tokens, preempting younger rows if necessary; return False if the row itself is
        preempted.
        """
        needed = self._count_pages(total) - len(row.pages)
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
        """Return the final hidden states [N, 1, D], and the logits [M, V] after the last `RequestState.count_tokens_needing_logits`
        tokens of each row.
        """
        model, device = self._model, self._model.device
        spans: list[RequestTokenSpan] = []
        vision = self._model.config.vision
        tokens: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        wanted: list[int] = []
        for row, count in work:
            first, total = len(tokens), row.num_computed + count
            spans.append(
                RequestTokenSpan(
                    slice(first, first + count),
                    total,
                    row.pages,
                    row.state_index or 0,
                    row.image_ranges,
                    row.cross_memory or {},
                    self._page_size,
                    vision is not None and vision.bidirectional_windows,
                )
            )
            tokens += (row.tokens[row.num_computed : total] + row.drafts)[:count]
            positions += range(row.num_computed, total)
            lengths += self._rope_lengths(row, count)
            wanted += range(first + count - row.count_tokens_needing_logits(count), first + count)
        self._cache.begin_forward_pass(spans, device)
        if self._adapters.names:
            self._adapters.select_adapters([row.request.adapter for row, count in work for _ in range(count)], device)
        # each token is a batch row of its own; the cache computes its attention to other tokens
        columns = to_device(torch.tensor(positions), device)[:, None]
        images = gather_token_images([(row.request.images, row.num_computed, count) for row, count in work], device)
        rotary = columns if images is None or images.positions is None else images.positions
        ids, bounds = to_device(torch.tensor(tokens), device)[:, None], DocumentBounds(lengths)
        context = model.make_forward_context(rotary, tokens=ids, sequence_bounds=bounds, cache=self._cache)
        context = context if images is None else replace(context, images=images)
        x = self._layers(model.embed_inputs(ids, columns, images=images), context)
        return x, model.compute_logits(x[to_device(torch.tensor(wanted, dtype=torch.int64), device)]).squeeze(1)

    def _rope_lengths(self, row: RequestState, count: int) -> list[int]:
        """Return the lengths that determine the RoPE angles of the row's next tokens: the text length when each token
        was first computed.

        Cached keys keep their angles, except with LongRoPE, where all keys are recomputed (`_exceeds_rope_bound`).
        """
        if self._longrope_bounds:
            return [len(row.tokens)] * count
        positions = range(row.num_computed, row.num_computed + count)
        return [max(len(row.request.prompt), position + 1) for position in positions]

    def _exceeds_rope_bound(self, row: RequestState) -> bool:
        """Return whether the row has outgrown the RoPE angles of its cached keys (LongRoPE)."""
        return any(row.first_length <= bound < len(row.tokens) for bound in self._longrope_bounds)

    def _record_computed(self, row: RequestState, count: int, logits: Tensor, own: slice) -> None:
        """Mark the row's next `count` tokens as cached, and record prompt log-probabilities from `logits[own]` if
        requested.
        """
        prompt, first = row.request.prompt, len(row.prompt_scores) - 1
        targets = prompt[first + 1 : row.num_computed + count + 1]  # others were recorded before a preemption
        if row.request.prompt_logprobs and row.num_computed <= first and targets:
            start = own.start + first - row.num_computed
            scored = score_tokens(logits[start : start + len(targets)], targets, row.request.logprobs or 0)
            row.prompt_scores += scored
        row.num_computed += count
        full = row.num_computed // self._page_size
        hashable = row.request.images is None  # tokens do not identify images
        if self._shares_prefixes and hashable and full > len(row.page_hashes):
            row.page_hashes = hash_full_pages(
                row.tokens[: full * self._page_size], row.page_hashes, row.request.adapter, self._page_size
            )
            for page, page_hash in zip(row.pages, row.page_hashes, strict=False):
                self._pages.register_page(page, page_hash)

    def _accept_tokens(self, row: RequestState, logits: Tensor, start: int, chosen: Sequence[int]) -> GenerationEvent:
        """Accept the next token, and the tokens after it as long as the draft tokens before them are right.

        Args:
            row: state of the request, with all tokens computed.
            logits: [M, V] of all rows; the row's own 1 + number of draft tokens begin at `start`.
            chosen: token chosen from each of them, see `choose_tokens`.
        """
        drafts, row.drafts = row.drafts, []
        first, new, tokens = not row.text.tokens, "", []
        for index, (token, draft) in enumerate(zip_longest(chosen, drafts)):
            token = row.choose_token(logits[start + index]) if token == CHOSEN_LATER else token
            check_chosen_tokens([token], self._model.dtype)
            tokens.append(token)
            row.tokens.append(token)
            new += row.text.append_token(token)
            if row.grammar is not None and row.grammar.accept_token(token):
                new += row.text.flush_held_back_text()
            if row.text.finish is not None or token != draft:
                break
            row.num_computed += 1  # the accepted draft token is in the cache already
        wanted = row.request.logprobs
        scored = [] if wanted is None else score_tokens(logits[start : start + len(tokens)], tokens, wanted)
        row.draft_length.record_acceptance(len(drafts), len(tokens) - 1)
        if row.text.finish is not None:
            self._running.remove(row)
            self._release_row(row)
        prompt = row.prompt_scores if row.request.prompt_logprobs and first else None
        return GenerationEvent(row.number, new, tokens, scored, prompt, row.text.finish, stop=row.text.stop)

    def _count_pages(self, tokens: int) -> int:
        """Return the number of pages that `tokens` tokens need."""
        return -(-tokens // self._page_size)
