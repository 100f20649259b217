"""Paged KV cache (arXiv:2309.06180): allocator of pages, prefix cache of full pages, and attention row by row.

A row of tokens has pages of `PAGE` tokens each. A full page can be shared by all rows that begin with the same tokens; its
key is a hash of all of these. The allocator's bookkeeping is in host memory and has no tensors.

The layers compute the new tokens of all rows as one batch of N tokens. Attention runs separately for each row, so rows of any
lengths are neither padded nor concatenated.

Legend: N new tokens of all rows, S of one row, T tokens of a row so far, H query heads, K key/value heads, d head size.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from mega_trainer.kernels.attention_masks import ALL, BandMask
from mega_trainer.model.forward_context import AttendFunction, CacheAttentionFunction, RecurrenceFunction

PAGE = 16  # tokens


class PageAllocator:
    """Allocator of the fixed-size pages of a paged KV cache, which requests with equal prefixes can share.

    A page that no row uses is free. A free page that is registered under a hash can still be shared; it is reused for
    other tokens only when no other page is left, least recently used first.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._uses = [0] * count
        self._blank = np.ones(count, dtype=bool)  # free and not registered
        self._cached: OrderedDict[int, None] = OrderedDict()  # free and registered, least recently used first
        self._page_of_hash: dict[bytes, int] = {}
        self._hash_of_page: dict[int, bytes] = {}

    @property
    def num_free_pages(self) -> int:
        """Number of KV cache pages that no request uses, including pages still cached under a hash."""
        return int(np.count_nonzero(self._blank)) + len(self._cached)

    def allocate_pages(self, count: int, after: int | None) -> list[int]:
        """Return the indices of `count` free KV cache pages for a request.
        They are directly after its last page `after` as long as the following pages are free.

        Contiguous pages are read in place; others have to be copied together.
        """
        taken: list[int] = []
        while len(taken) < count:
            following = None if after is None else after + 1
            if following is None or following >= self.count or self._uses[following]:
                following = self._find_gap(count - len(taken))
            self._unregister_page(following)
            self._mark_used(following)
            taken.append(following)
            after = following
        return taken

    def share_cached_pages(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the cached KV pages of the longest registered prefix of a request, and count them as used.
        `hashes` are the page hashes of the request in order, and the request uses the pages.
        """
        found = []
        for page_hash in hashes:
            if page_hash not in self._page_of_hash:
                break
            found.append(self._page_of_hash[page_hash])
            self._mark_used(found[-1])
        return found

    def register_page(self, page: int, page_hash: bytes) -> None:
        """Register a full KV cache page in use under the hash of its content, so that other requests can share it."""
        if page_hash not in self._page_of_hash:
            self._page_of_hash[page_hash], self._hash_of_page[page] = page, page_hash

    def release_pages(self, pages: Sequence[int]) -> None:
        """Release a request's KV cache pages.
        The last of the `pages` are reused first, since later pages are useless without earlier ones.
        """
        for page in reversed(pages):
            self._uses[page] -= 1
            if self._uses[page] == 0:
                if page in self._hash_of_page:
                    self._cached[page] = None
                else:
                    self._blank[page] = True

    def _mark_used(self, page: int) -> None:
        """Count one more use of a page."""
        self._uses[page] += 1
        self._blank[page] = False
        self._cached.pop(page, None)

    def _unregister_page(self, page: int) -> None:
        """Remove the hash of a page."""
        if page in self._hash_of_page:
            del self._page_of_hash[self._hash_of_page.pop(page)]

    def _find_gap(self, wanted: int) -> int:
        """Return the page to start a run at: in the middle of the widest gap, so that the row before it can grow too."""
        while not self._blank.any() or (np.count_nonzero(self._blank) < wanted and self._cached):
            page, _ = self._cached.popitem(last=False)
            self._unregister_page(page)
            self._blank[page] = True
        edges = np.flatnonzero(np.diff(self._blank, prepend=False, append=False))
        starts, widths = edges[::2], edges[1::2] - edges[::2]
        widest = widths.argmax()
        before = starts[widest] > 0
        return int(starts[widest] + (max(0, widths[widest] - wanted) // 2 if before else 0))


def hash_full_pages(tokens: Sequence[int], known: Sequence[bytes] = (), adapter: str | None = None) -> list[bytes]:
    """Return the hashes of the full KV cache pages of a request's tokens.
    The request begins with `tokens`; `known` are hashes of its first pages computed before, and `adapter` is the name
    of its LoRA adapter.

    A hash covers the page's tokens and the hash of the page before it; for the first page, the name of the LoRA adapter
    that its keys depend on.
    """
    first = b"" if adapter is None else sha256(adapter.encode()).digest()
    hashes = list(known)
    for start in range(len(hashes) * PAGE, len(tokens) - PAGE + 1, PAGE):
        before = hashes[-1] if hashes else first
        hashes.append(sha256(before + array("q", tokens[start : start + PAGE]).tobytes()).digest())
    return hashes


EncoderMemory = Mapping[int, tuple[Tensor, Tensor]]
SlotRun = tuple[int, int]  # slots from the first to before the second


@dataclass(frozen=True)
class RequestTokenSpan:
    """Tokens of one row (request) that a forward pass computes, and the cache pages of that row.

    Attributes:
        tokens: slice of the row's tokens in the step's N tokens.
        total: T, new tokens included.
        pages: cache pages of all T tokens.
        state_index: index of the row's recurrent states.
        image_ranges: positions of images with bidirectional attention; a step computes all tokens of an image or none.
        cross_memory: for each decoder layer, keys and values of the encoded text [1, E, K, d].
    """

    tokens: slice
    total: int
    pages: Sequence[int]
    state_index: int = 0
    image_ranges: Sequence[range] = ()
    cross_memory: EncoderMemory = field(default_factory=dict)

    @property
    def new_token_count(self) -> int:
        """Number of tokens of the row that the forward pass computes."""
        count: int = self.tokens.stop - self.tokens.start
        return count

    @property
    def attention_segments(self) -> Iterator[tuple[range, bool]]:
        """Position ranges of the row's new tokens, cut at image boundaries, each with a flag that is True for an image."""
        position = self.total - self.new_token_count
        for block in self.image_ranges:
            if position <= block.start < self.total:
                yield range(position, block.start), False
                yield block, True
                position = block.stop
        yield range(position, self.total), False

    @property
    def is_uncached(self) -> bool:
        """True if no token of the row is in the KV cache yet."""
        return self.new_token_count == self.total

    @property
    def new_token_slots(self) -> list[int]:
        """Indices of the cache slots into which the keys and values of the row's new tokens go."""
        positions = range(self.total - self.new_token_count, self.total)
        return [self.pages[position // PAGE] * PAGE + position % PAGE for position in positions]

    @cached_property
    def slot_runs(self) -> list[SlotRun]:
        """Runs of contiguous cache slots of all the row's tokens in order; adjacent pages form one run."""
        return _page_slot_runs(self.pages, self.total)

    def split_at_chunks(self, positions: range, size: int) -> Iterator[tuple[range, int]]:
        """Yield the parts of a range of positions in chunks of `size` tokens, each with the position of its first key."""
        while positions:
            first = positions.start - positions.start % size
            yield positions[: first + size - positions.start], first
            positions = positions[first + size - positions.start :]

    def visible_slot_runs(self, window: int | None, *, chunked: bool = False) -> list[SlotRun]:
        """Return the runs of cache slots whose keys at least one new token of the row attends to.
        `window` is the sliding window in tokens, or None; `chunked`: it is a chunk that does not slide.
        """
        if window is not None and chunked:
            first = self.total - self.new_token_count
            return _last_slots(self.slot_runs, self.total - first + first % window)
        return self.slot_runs if window is None else _last_slots(self.slot_runs, window - 1 + self.new_token_count)


class PagedCache:
    """Paged KV cache of all layers of a model.
    It has keys and values, or the latents that replace them, as tensors [slots, K, d] with `PAGE` slots a page.

    Of a recurrent layer it holds the state of each row: tensors [rows, ..], whose size does not depend on the rows' length.
    """

    def __init__(self, layers: int, pages: int, rows: int) -> None:
        self._slots, self._rows = pages * PAGE, rows
        self._held: list[tuple[Tensor, ...]] = [()] * layers
        self._by_head = list(self._held)  # views of the same memory, in the layout of attention
        self._spans: list[RequestTokenSpan] = []
        self._visible_runs: dict[tuple[int | None, bool], list[list[SlotRun]]] = {}
        self._single = 0  # number of leading spans with one token
        self._new = torch.empty(0)

    def begin_forward_pass(self, spans: list[RequestTokenSpan], device: torch.device) -> None:
        """Set the rows (requests) that the next forward pass computes.
        `spans` are the rows; rows with a single new token should come first, which saves work.
        """
        self._spans, self._visible_runs = spans, {}
        self._single = sum(1 for _ in takewhile(lambda span: span.new_token_count == 1, spans))
        self._new = torch.tensor([slot for span in spans for slot in span.new_token_slots], device=device)

    def update_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, window: int | None, attend: CacheAttentionFunction
    ) -> Tensor:
        """Store the keys and values of a layer's new tokens and return the attention output.
        It follows the `KVCache` interface; each of the N tokens is a batch row of its own: [N, 1, H or K, d].
        """
        by_head = self._store_tokens(layer, k) if v is None else self._store_tokens(layer, k, v)
        kind = window, attend.chunked
        if kind not in self._visible_runs:
            self._visible_runs[kind] = [span.visible_slot_runs(window, chunked=attend.chunked) for span in self._spans]
        keys = [_gather_slots(by_head[0], runs) for runs in self._visible_runs[kind]]
        values = keys if v is None else [_gather_slots(by_head[1], runs) for runs in self._visible_runs[kind]]
        single = self._single
        if single == len(self._spans):
            return attend.decode_attention(q.squeeze(1), keys, values).unsqueeze(1)
        rows = [attend.decode_attention(q[:single, 0], keys[:single], values[:single]).unsqueeze(1)] if single else []
        left = None if window is None else window - 1
        for span, *kept in zip(self._spans[single:], keys[single:], values[single:], strict=True):
            for positions, image in filter(lambda segment: segment[0], span.attention_segments):
                parts = [(positions, 0)]
                if window is not None and attend.chunked:
                    parts = list(span.split_at_chunks(positions, window))
                for part, first_key in parts:
                    first, behind = part.start + span.tokens.stop - span.total, span.total - part.stop
                    length = kept[0].shape[2]
                    start = max(0, first_key - span.total + length)
                    own, value = (held[:, :, start : length - behind].transpose(1, 2) for held in kept)
                    new = q[first : first + len(part)].transpose(0, 1)
                    rows.append(attend(new, own, value, BandMask(left, None if image else 0)).transpose(0, 1))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def cross_attend(self, layer: int, q: Tensor, attend: AttendFunction) -> Tensor:
        """Return the cross attention of a layer's queries to each row's encoded text.
        It follows the `KVCache` interface; each of the N tokens is a batch row of its own: [N, 1, H, d].
        """
        y = torch.empty_like(q)
        for span in self._spans:
            y[span.tokens] = attend(q[span.tokens].transpose(0, 1), *span.cross_memory[layer], ALL).transpose(0, 1)
        return y

    def update_and_recur(self, layer: int, x: Tensor, step: RecurrenceFunction) -> Tensor:
        """Advance the recurrent states of a layer by a step and return its output.
        It follows the `KVCache` interface; `step` is the recurrence, and each of the N tokens is a batch row of its
        own: [N, 1, c].

        Rows with equal numbers of new tokens are one batch; rows without a state yet are batched separately.
        """
        batches: dict[tuple[int, bool], list[RequestTokenSpan]] = {}
        for span in self._spans:
            batches.setdefault((span.new_token_count, span.is_uncached), []).append(span)
        outputs, order = [], []
        for (count, begins), spans in batches.items():
            indices = torch.tensor([span.state_index for span in spans], device=x.device)
            order += [token for span in spans for token in range(span.tokens.start, span.tokens.stop)]
            new = x[order[-count * len(spans) :]].view(len(spans), count, -1)
            y, states = step(new, None if begins else [held[indices] for held in self._held[layer]])
            if not self._held[layer]:
                self._held[layer] = tuple(state.new_empty(self._rows, *state.shape[1:]) for state in states)
            for held, state in zip(self._held[layer], states, strict=True):
                held.index_copy_(0, indices, state)
            outputs.append(y.flatten(0, 1))
        joined = torch.cat(outputs)
        return torch.empty_like(joined).index_copy_(0, torch.tensor(order, device=x.device), joined).unsqueeze(1)

    def _store_tokens(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Store tensors [N, 1, K, d]; return the layer's whole cache, [1, K, slots, d]."""
        if not self._held[layer]:  # allocated lazily and left untouched: a CPU commits memory on first write
            self._held[layer] = tuple(part.new_empty(self._slots, *part.shape[2:]) for part in new)
            self._by_head[layer] = tuple(held.transpose(0, 1).unsqueeze(0) for held in self._held[layer])
        for held, part in zip(self._held[layer], new, strict=True):
            held.index_copy_(0, self._new, part.squeeze(1))
        return self._by_head[layer]


def _page_slot_runs(pages: Sequence[int], total: int) -> list[SlotRun]:
    """Return the slots of the first `total` tokens of a row with these pages; adjacent pages form one run."""
    runs: list[SlotRun] = []
    for number, page in enumerate(pages[: -(-total // PAGE)]):
        start, stop = page * PAGE, page * PAGE + min(PAGE, total - number * PAGE)
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return runs


def _last_slots(runs: Sequence[SlotRun], count: int) -> list[SlotRun]:
    """Return the last `count` slots, or all if there are fewer."""
    found: list[SlotRun] = []
    for start, stop in reversed(runs):
        found.insert(0, (max(start, stop - count), stop))
        count -= stop - start
        if count <= 0:
            break
    return found


def _gather_slots(held: Tensor, runs: Sequence[SlotRun]) -> Tensor:
    """Return the contents of these slots of [1, K, slots, d]; a view if they are one run."""
    parts = [held.narrow(2, start, stop - start) for start, stop in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
