"""Continuous batching: requests come and go between two forward passes, and each pass serves all that are there.

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
from mega_common.log import logger
from mega_eval.cache import PagedCache, Span
from mega_eval.draft import Drafter
from mega_eval.flat import flat
from mega_eval.grammar import Grammars
from mega_eval.load import check_length
from mega_eval.mtp_draft import MtpDrafter
from mega_eval.pages import PAGE, Pages, page_names
from mega_eval.pictured import columns as seen_columns
from mega_eval.pictured import seen_together
from mega_eval.requests import Event as Event
from mega_eval.requests import Request as Request
from mega_eval.requests import Scored as Scored
from mega_eval.requests import scored
from mega_eval.rows import Row
from mega_eval.sampling import draw, most_likely, penalised, probabilities
from mega_eval.text import Continuation, Text
from mega_trainer.batch import Outline
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import EncoderDecoder
from mega_trainer.parallel.lora import Selection


class Engine:
    """Runs requests on one model. Not thread-safe: one thread drives it.

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
        tokenizer: Text,
        *,
        cache_tokens: int,
        batch_size: int,
        chunk_tokens: int = 512,
        drafter: Drafter | Literal["mtp"] | None = None,
        adapters: Selection | None = None,
    ) -> None:
        self._model, self._tokenizer, self._adapters = model, tokenizer, adapters or Selection([])
        self._layers, self._batch_size, self._chunk = flat(model), batch_size, chunk_tokens
        self._pages = Pages(-(-cache_tokens // PAGE))
        self._cache = PagedCache(model.config.num_layers + len(model.predictors), self._pages.count, batch_size)
        self._places = list(range(batch_size))  # of states, those that no row has
        self.grammars = Grammars(tokenizer)
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._number = 0
        ropes = [rope for rope in (model.config.rope, model.config.local_rope) if rope]
        self._bounds = [rope.original_max_position or 0 for rope in ropes if rope.scaling == "longrope"]
        recurrent, encodes = model.config.recurrent, model.config.encoder is not None
        asked = None if self._bounds or recurrent or encodes else drafter
        self._drafter = MtpDrafter(model, self._cache) if asked == "mtp" else asked
        # keys that are turned by angles which depend on the length of their row are of no use to another, nor are keys
        # without the states of those tokens
        self._shares = (
            not recurrent and not encodes and not any(rope.scaling in ("dynamic", "longrope") for rope in ropes)
        )

    @property
    def waiting(self) -> int:
        """Requests that have not begun, or have to begin anew."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have begun."""
        return len(self._running)

    @property
    def pages(self) -> int:
        """Pages of the cache, of `PAGE` tokens each."""
        return self._pages.count

    @property
    def free_pages(self) -> int:
        """Those that no request uses."""
        return self._pages.free

    def add(self, request: Request) -> int:
        """Take a request; its number.

        Raises:
            DataError: when it has no tokens, a token that the model does not know, an adapter that it has not, a bad
                grammar, or is too long.
        """
        self._check(request)
        before = () if self._model.config.encoder else request.prompt  # what an encoder reads is not gone on with
        text = Continuation(self._tokenizer, request.limits, before)
        grammar = None if request.grammar is None else self.grammars.read(request.grammar, request.limits.ends)
        vision = self._model.config.vision
        blocks = [] if vision is None or request.images is None else seen_together(request.prompt, vision)
        self._waiting.append(Row(self._number, request, text, self._first(request), grammar, blocks))
        self._number += 1
        return self._number - 1

    def _first(self, request: Request) -> list[int]:
        """The tokens that a text begins with: the prompt, unless an encoder reads that."""
        encoder = self._model.config.encoder
        return [encoder.start_token] if encoder else list(request.prompt)

    def cancel(self, request: int) -> None:
        """Drop a request and free its pages at once; nothing happens if it has finished or never was."""
        for row in [row for row in (*self._waiting, *self._running) if row.number == request]:
            (self._waiting if row in self._waiting else self._running).remove(row)
            self._release(row)

    def step(self, *, isolate: bool = False) -> list[Event]:
        """Run one forward pass and return its events; none when idle, or while prompts are computed.

        Args:
            isolate: report a request that fails by an event with an error, instead of raising that. The request is
                dropped in both cases, and all others continue.

        Raises:
            CheckpointError: when the model's output is not a number.
        """
        events = self._admit()
        self._guess()
        if work := self._plan():
            x, logits = self._forward(work)
            likeliest = most_likely(logits)
            end, done = 0, [row.done for row, _ in work]
            for row, count in work:
                own = slice(end, end := end + row.wanted(count))
                events += self._guard(row, partial(self._take, row, count, logits[own], likeliest[own]))
            if isinstance(self._drafter, MtpDrafter):
                self._drafter.keep(work, done, x)
        if not isolate and (failed := next((event.error for event in events if event.error), None)):
            raise failed
        return events

    def reset(self) -> None:
        """Drop all requests and forget the cached pages, after a step that failed."""
        self._waiting.clear()
        self._running.clear()
        self._pages, self._places = Pages(self._pages.count), list(range(self._batch_size))

    def _guard(self, row: Row, act: Callable[[], list[Event]]) -> list[Event]:
        """Return the events of `act`; if it raises, drop the row and return the event of its failure."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 - no error in one request may end the others
            if not isinstance(error, MegaError):
                logger.exception("request %d of the engine failed", row.number)
            self.cancel(row.number)
            return [Event(row.number, "", [], [], None, None, error)]

    def _take(self, row: Row, count: int, logits: Tensor, likeliest: Sequence[int]) -> list[Event]:
        """Record `count` computed tokens of a row, and choose the next token once its prompt is complete."""
        if -1 in likeliest:
            raise CheckpointError(
                f"the model's output is not a number in {self._model.dtype}", hint="try a precision with a wider range"
            )
        if count < row.pending:
            self._advance(row, count, logits)
            return []
        self._advance(row, count - len(row.drafts), logits)
        known = 1 + len(row.drafts)
        return [self._next(row, logits[-known:], likeliest[-known:])]

    def _check(self, request: Request) -> None:
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
            check_length(self._model.config, max(size, new), what)
            size = 1
        else:
            check_length(self._model.config, size + new - 1, what)  # the last token is never fed back
        if size + new - 1 > self.pages * PAGE:
            raise DataError(f"{what} are more than the {self.pages * PAGE} that the cache has room for")

    def _admit(self) -> list[Event]:
        """Start the requests that have waited longest, while all of their tokens fit; return events of failures."""
        failed: list[Event] = []
        while self._waiting and len(self._running) < self._batch_size:
            row = self._waiting[0]
            self._share(row)
            if _pages_of(len(row.tokens)) - len(row.pages) > self._pages.free:
                self._release(row)
                break
            row.begun, row.place = len(row.tokens), self._places.pop()
            self._running.append(self._waiting.popleft())
            failed += self._guard(row, partial(self._encode, row))
        return failed

    def _encode(self, row: Row) -> list[Event]:
        """Compute the encoder's output for a row's prompt, where the model has an encoder."""
        if isinstance(self._model, EncoderDecoder) and row.memory is None:
            row.memory = self._model.encode(torch.tensor([row.request.prompt], device=self._model.device))
        return []

    def _share(self, row: Row) -> None:
        """Give the row the pages of others that begin alike; at least its last token has to be computed."""
        if not self._shares or row.request.prompt_logprobs or row.request.images:
            return
        names = page_names(row.tokens[:-1], of=row.request.adapter)
        row.pages = self._pages.share(names)
        row.done, row.names = len(row.pages) * PAGE, names[: len(row.pages)]

    def _release(self, row: Row) -> None:
        """Give back all pages of a row, and the place of its states."""
        self._pages.release(row.pages)
        self._places += [] if row.place is None else [row.place]
        row.place = None
        row.done, row.pages, row.names, row.drafts, row.ahead = 0, [], [], [], []

    def _guess(self) -> None:
        """Ask for the next tokens of the rows that generate."""
        if self._drafter is None:
            return
        rows = [row for row in self._running if row.generates and row.text.room > 1]
        asked = [(row, row.so_far(count)) for row in rows if (count := row.trust.count())]
        if not asked:
            return
        if isinstance(self._drafter, MtpDrafter):
            found = self._drafter.propose([row for row, _ in asked])
        else:
            found = self._drafter.propose([request for _, request in asked])
        for (row, request), drafts in zip(asked, found, strict=True):
            row.drafts = drafts[: request.limits.max_new_tokens]

    def _plan(self) -> list[tuple[Row, int]]:
        """Who computes how many tokens in this step: rows that generate theirs, and of prompts what there is room for.

        Those with one token come first, as the cache likes it.
        """
        room = max(1, self._chunk - sum(row.pending for row in self._running if row.generates))
        work = []
        for row in list(self._running):
            if row not in self._running:  # its pages went to an older one
                continue
            if self._outgrown(row):
                row.done, row.begun = 0, len(row.tokens)
            count = row.pending if row.generates else row.whole_images(min(row.pending, room))
            if count and self._reserve(row, row.done + count):
                work.append((row, count))
                room -= 0 if row.generates else min(count, room)
        return sorted(work, key=lambda one: one[1] > 1)

    def _reserve(self, row: Row, total: int) -> bool:
        """Get pages for so many tokens, if need be from younger rows; False if that would be the row itself."""
        needed = _pages_of(total) - len(row.pages)
        while needed > self._pages.free:
            youngest = self._running.pop()
            self._release(youngest)
            self._waiting.appendleft(youngest)
            if youngest is row:
                return False
        row.pages += self._pages.take(needed, row.pages[-1] if row.pages else None)
        return True

    @torch.inference_mode()
    def _forward(self, work: Sequence[tuple[Row, int]]) -> tuple[Tensor, Tensor]:
        """The stream [N, 1, D], and logits [M, V] after the tokens of each row that are `Row.wanted`, which are its last in this step."""
        model, device = self._model, self._model.device
        spans: list[Span] = []
        tokens: list[int] = []
        positions: list[int] = []
        lengths: list[int] = []
        wanted: list[int] = []
        for row, count in work:
            first, total = len(tokens), row.done + count
            spans.append(
                Span(slice(first, first + count), total, row.pages, row.place or 0, row.blocks, row.memory or {})
            )
            tokens += (row.tokens[row.done : total] + row.drafts)[:count]
            positions += range(row.done, total)
            lengths += self._lengths(row, count)
            wanted += range(first + count - row.wanted(count), first + count)
        self._cache.begin(spans, device)
        if self._adapters.names:
            self._adapters.begin([row.request.adapter for row, count in work for _ in range(count)], device)
        # each token is a batch row of its own: what concerns its neighbours is up to the cache
        columns = torch.tensor(positions, device=device)[:, None]
        images = seen_columns([(row.request.images, row.done, count) for row, count in work], device)
        turned = columns if images is None or images.positions is None else images.positions
        context = model.context(turned, outline=Outline(lengths), cache=self._cache)
        x = self._layers(model.embed(torch.tensor(tokens, device=device)[:, None], columns, images=images), context)
        return x, model.logits(x[torch.tensor(wanted, dtype=torch.int64, device=device)]).squeeze(1)

    def _lengths(self, row: Row, count: int) -> list[int]:
        """The length that the angles of the row's next tokens depend on: that of its text when a token was computed first.

        Keys keep the angles of that time, but for those of LongRoPE, which are all computed again (`_outgrown`).
        """
        if self._bounds:
            return [len(row.tokens)] * count
        return [max(len(row.request.prompt), place + 1) for place in range(row.done, row.done + count)]

    def _outgrown(self, row: Row) -> bool:
        """Whether the row has become too long for the angles that its keys were turned by (LongRoPE)."""
        return any(row.begun <= bound < len(row.tokens) for bound in self._bounds)

    def _advance(self, row: Row, count: int, logits: Tensor) -> None:
        """The row's next tokens are in the cache; logits [count, V] are what the model says after each, if that is asked for."""
        prompt = row.request.prompt
        if row.request.prompt_logprobs:
            for place, own in zip(range(row.done, row.done + count), logits, strict=False):
                if place + 1 == len(row.prompt) < len(prompt):  # not told before
                    row.prompt.append(scored(own, prompt[place + 1], row.request.logprobs or 0))
        row.done += count
        full = row.done // PAGE
        if self._shares and full > len(row.names) and row.request.images is None:  # which the tokens do not tell apart
            row.names = page_names(row.tokens[: full * PAGE], row.names, row.request.adapter)
            for page, name in zip(row.pages, row.names, strict=False):
                self._pages.name(page, name)

    def _next(self, row: Row, logits: Tensor, likeliest: Sequence[int]) -> Event:
        """Choose the token that follows, and those behind it as long as the guesses before them were right.

        Args:
            row: whose tokens are all computed.
            logits: [1 + guesses, V].
            likeliest: token of each.
        """
        drafts, row.drafts = row.drafts, []
        first, new, tokens, told = not row.text.tokens, "", [], []
        for own, best, draft in zip_longest(logits, likeliest, drafts):
            token = self._choose(row, own, best)
            if row.request.logprobs is not None:
                told.append(scored(own, token, row.request.logprobs))
            tokens.append(token)
            row.tokens.append(token)
            new += row.text.add(token)
            if row.grammar is not None and row.grammar.accept(token):
                new += row.text.end()
            if row.text.finish is not None or token != draft:
                break
            row.done += 1  # the guess is in the cache already
        row.trust.learn(len(drafts), len(tokens) - 1)
        if row.text.finish is not None:
            self._running.remove(row)
            self._release(row)
        prompt = row.prompt if row.request.prompt_logprobs and first else None
        return Event(row.number, new, tokens, told, prompt, row.text.finish)

    def _choose(self, row: Row, logits: Tensor, likeliest: int) -> int:
        """The token that follows, by logits [V]."""
        request, new = row.request, row.text.tokens
        if request.sampling.plain and row.grammar is None:
            return likeliest
        given = len(row.tokens) - len(new) - request.drawn
        scores = penalised(logits, request.sampling, row.tokens[:given], row.tokens[given:])
        if row.grammar is not None:
            scores = row.grammar.mask(scores)
        p = probabilities(scores, request.sampling)
        return draw(p, request.sampling, request.sample, request.drawn + len(new))


def _pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)
