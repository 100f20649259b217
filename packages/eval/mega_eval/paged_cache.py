"""Paged KV cache (arXiv:2309.06180): allocator of pages, prefix cache of full pages, and attention to cached keys.

A row of tokens has pages of equal size, `PAGE` tokens where the attention kernel does not require more. A full page can be
shared by all rows that begin with the same tokens; its key is a hash of all of these. The allocator's bookkeeping is in host
memory and has no tensors.

The layers compute the new tokens of all rows as one batch of N tokens. Rows with one new token attend in one call, by block
tables (`mega_trainer.kernels.paged_attention`). Other rows, and all rows where separate calls are faster, attend one by one,
so they are neither padded nor concatenated.

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

from mega_common.model_config import ModelConfig
from mega_trainer.distributed.device import to_device
from mega_trainer.kernels.attention_masks import ALL, BandMask, PagedAttentionName, VisiblePagedKeys
from mega_trainer.kernels.flash_attention import supports_flash_head_size
from mega_trainer.kernels.paged_attention import get_flash_page_size
from mega_trainer.model.forward_context import AttendFunction, CacheAttentionFunction, RecurrenceFunction

PAGE = 16  # tokens per page, unless the attention kernel requires more


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
        """Release KV cache pages that a request used; those that no other request uses become free.
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
        """Return the page to start a run at: amid the widest gap, so that the row before it can grow too."""
        while not self._blank.any() or (np.count_nonzero(self._blank) < wanted and self._cached):
            page, _ = self._cached.popitem(last=False)
            self._unregister_page(page)
            self._blank[page] = True
        edges = np.flatnonzero(np.diff(self._blank, prepend=False, append=False))
        starts, widths = edges[::2], edges[1::2] - edges[::2]
        widest = widths.argmax()
        before = starts[widest] > 0
        return int(starts[widest] + (max(0, widths[widest] - wanted) // 2 if before else 0))


def hash_full_pages(
    tokens: Sequence[int], known: Sequence[bytes] = (), adapter: str | None = None, page_size: int = PAGE
) -> list[bytes]:
    """Return the hashes of the full KV cache pages of a request's tokens; each covers all tokens up to the page's end.
    The request begins with `tokens`; `known` are hashes of its first pages computed before, `adapter` is the name of its
    LoRA adapter, and a page has `page_size` tokens.

    A hash covers the page's tokens and the hash of the page before it; for the first page, the name of the LoRA adapter
    that its keys depend on.
    """
    first = b"" if adapter is None else sha256(adapter.encode()).digest()
    hashes = list(known)
    for start in range(len(hashes) * page_size, len(tokens) - page_size + 1, page_size):
        before = hashes[-1] if hashes else first
        hashes.append(sha256(before + array("q", tokens[start : start + page_size]).tobytes()).digest())
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
        page_size: tokens per page.
        images_in_windows: attention among the tokens of an image is bidirectional only in layers with a sliding window.
    """

    tokens: slice
    total: int
    pages: Sequence[int]
    state_index: int = 0
    image_ranges: Sequence[range] = ()
    cross_memory: EncoderMemory = field(default_factory=dict)
    page_size: int = PAGE
    images_in_windows: bool = False

    @property
    def new_token_count(self) -> int:
        """Number of tokens of the row that the forward pass computes."""
        count: int = self.tokens.stop - self.tokens.start
        return count

    def attention_segments(self, window: int | None) -> Iterator[tuple[range, bool]]:
        """Yield (positions of new tokens, flag), cut at images; the flag is True for an image with bidirectional attention.
        `window` is the layer's sliding window or None.
        """
        position = self.total - self.new_token_count
        for block in () if self.images_in_windows and window is None else self.image_ranges:
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
        size = self.page_size
        return [self.pages[position // size] * size + position % size for position in positions]

    @cached_property
    def contiguous_slot_runs(self) -> list[SlotRun]:
        """Runs of contiguous cache slots of all the row's tokens in order; adjacent pages form one run."""
        return _page_slot_runs(self.pages, self.total, self.page_size)

    def split_at_chunks(self, positions: range, size: int) -> Iterator[tuple[range, int]]:
        """Yield the parts of a range of positions in chunks of `size` tokens, each with its chunk's first position."""
        while positions:
            first = positions.start - positions.start % size
            yield positions[: first + size - positions.start], first
            positions = positions[first + size - positions.start :]

    def first_visible_position(self, window: int | None, *, chunked: bool = False) -> int:
        """Return the position of the first key that the row's first new token attends to.
        `window` is the sliding window in tokens, or None; `chunked`: it is a chunk that does not slide.
        """
        first = self.total - self.new_token_count
        if window is None:
            return 0
        return first - first % window if chunked else max(0, first + 1 - window)

    def visible_slot_runs(self, window: int | None, *, chunked: bool = False) -> list[SlotRun]:
        """Return the runs of cache slots whose keys at least one new token of the row attends to.
        `window` is the sliding window in tokens, or None; `chunked`: it is a chunk that does not slide.
        """
        first = self.first_visible_position(window, chunked=chunked)
        return _last_slots(self.contiguous_slot_runs, self.total - first) if first else self.contiguous_slot_runs


def choose_page_size(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> int:
    """Return the number of tokens per page: `PAGE`, or as many as a fused kernel requires that the model can use."""
    fused = (
        config.mla is None
        and config.attention_softcap is None
        and config.position not in ("alibi", "relative")
        and supports_flash_head_size(config.query_key_head_dim)
        and any({"attention", "swa"} & {*kind.mixers} for kind in config.layer_kinds)  # others need a mask
    )
    return (get_flash_page_size(device, dtype) if fused else None) or PAGE


class PagedCache:
    """Paged KV cache of all layers of a model.
    It has keys and values, or the latents that replace them, as tensors [slots, K, d] with `page_size` slots a page.

    Of a recurrent layer it holds the state of each row: tensors [rows, ..], whose size does not depend on the rows' length.

    Args:
        layers, pages, rows: number of layers, of pages, and of requests at once.
        page_size: tokens per page.
        attention: implementation of attention for rows with one new token, where it supports the call; None: the fastest.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        rows: int,
        *,
        page_size: int = PAGE,
        attention: PagedAttentionName | None = None,
    ) -> None:
        self.page_size, self._attention = page_size, attention
        self._slots, self._rows = pages * page_size, rows
        self._held: list[tuple[Tensor, ...]] = [()] * layers
        self._by_head = list(self._held)  # views of the same memory, in the layout of attention
        self._states: dict[tuple[int, str], tuple[Tensor, ...]] = {}  # of recurrent layers, by layer and name
        self._spans: list[RequestTokenSpan] = []
        self._visible_runs: dict[tuple[int | None, bool], list[list[SlotRun]]] = {}
        self._paged_rows: dict[tuple[int | None, bool], VisiblePagedKeys] = {}
        self._single = 0  # number of leading spans with one token
        self._new = self._block_table = torch.empty(0)

    def begin_forward_pass(self, spans: list[RequestTokenSpan], device: torch.device) -> None:
        """Set the rows (requests) that the next forward pass computes.
        `spans` are the rows; rows with a single new token should come first, which saves work.
        """
        self._spans, self._visible_runs, self._paged_rows = spans, {}, {}
        self._single = sum(1 for _ in takewhile(lambda span: span.new_token_count == 1, spans))
        self._new = to_device(torch.tensor([slot for span in spans for slot in span.new_token_slots]), device)

    def update_and_attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, window: int | None, attend: CacheAttentionFunction
    ) -> Tensor:
        """Store the keys and values of a layer's new tokens and return the attention output.
        It follows the `KVCache` interface; each of the N tokens is a batch row of its own: [N, 1, H or K, d].
        """
        self._store_tokens(layer, *((k,) if v is None else (k, v)))
        outputs = [self._attend_single_tokens(layer, q[: self._single, 0], window, attend)] if self._single else []
        if self._single < len(self._spans):
            outputs += self._attend_spans(layer, q, window, attend)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_single_tokens(
        self, layer: int, q: Tensor, window: int | None, attend: CacheAttentionFunction
    ) -> Tensor:
        """Return the attention output [N, 1, H, e] of rows with one new token, from their queries [N, H, d]."""
        held, kind = self._held[layer], (window, attend.chunked)
        if (len(q) > 1 or q.is_cuda) and self._attention != "rows":
            if kind not in self._paged_rows:
                self._paged_rows[kind] = self._list_paged_rows(window, q.device, chunked=attend.chunked)
            y = attend.paged_attention(q, held[0], held[-1], self._paged_rows[kind], self._attention)
            if y is not None:
                return y.unsqueeze(1)
        keys, values = self._view_visible_keys(layer, window, attend, slice(self._single))
        return attend.decode_attention(q, keys, values).unsqueeze(1)

    def _list_paged_rows(self, window: int | None, device: torch.device, *, chunked: bool) -> VisiblePagedKeys:
        """Return the visible keys of the rows with a single new token, under a window or none.
        The block table is copied to the device once per forward pass.
        """
        spans = self._spans[: self._single]
        if not self._paged_rows:
            table = np.zeros((len(spans), max(-(-span.total // self.page_size) for span in spans)), dtype=np.int32)
            for row, span in zip(table, spans, strict=True):
                row[: len(span.pages)] = span.pages[: len(row)]
            self._block_table = to_device(torch.from_numpy(table), device)
        first = [span.first_visible_position(window, chunked=chunked) for span in spans]
        return VisiblePagedKeys.from_bounds(
            self._block_table, first, [span.total for span in spans], self.page_size, window=window, chunked=chunked
        )

    def _view_visible_keys(
        self, layer: int, window: int | None, attend: CacheAttentionFunction, some: slice
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the visible keys and values of some rows, [1, K, T, d] and [1, K, T, e]; views where pages adjoin."""
        by_head, kind = self._by_head[layer], (window, attend.chunked)
        if kind not in self._visible_runs:
            self._visible_runs[kind] = [span.visible_slot_runs(window, chunked=attend.chunked) for span in self._spans]
        keys, *values = ([_gather_slots(held, runs) for runs in self._visible_runs[kind][some]] for held in by_head)
        return keys, values[0] if values else keys

    def _attend_spans(
        self, layer: int, q: Tensor, window: int | None, attend: CacheAttentionFunction
    ) -> Iterator[Tensor]:
        """Yield the attention outputs [S, 1, H, e] of the other rows, in segments with one mask each."""
        left, others = None if window is None else window - 1, slice(self._single, None)
        keys, values = self._view_visible_keys(layer, window, attend, others)
        for span, *kept in zip(self._spans[others], keys, values, strict=True):
            for positions, image in filter(lambda segment: segment[0], span.attention_segments(window)):
                parts = [(positions, 0)]
                if window is not None and attend.chunked:
                    parts = list(span.split_at_chunks(positions, window))
                for part, first_key in parts:
                    first, behind = part.start + span.tokens.stop - span.total, span.total - part.stop
                    length = kept[0].shape[2]
                    start = max(0, first_key - span.total + length)
                    own, value = (held[:, :, start : length - behind].transpose(1, 2) for held in kept)
                    new = q[first : first + len(part)].transpose(0, 1)
                    yield attend(new, own, value, BandMask(left, None if image else 0)).transpose(0, 1)

    def cross_attend(self, layer: int, q: Tensor, attend: AttendFunction) -> Tensor:
        """Return the cross attention of a layer's queries to each row's encoded text.
        It follows the `KVCache` interface; each of the N tokens is a batch row of its own: [N, 1, H, d].
        """
        y = torch.empty_like(q)
        for span in self._spans:
            y[span.tokens] = attend(q[span.tokens].transpose(0, 1), *span.cross_memory[layer], ALL).transpose(0, 1)
        return y

    def update_and_recur(self, layer: int, x: Tensor, step: RecurrenceFunction, name: str = "") -> Tensor:
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
            indices = to_device(torch.tensor([span.state_index for span in spans]), x.device)
            order += [token for span in spans for token in range(span.tokens.start, span.tokens.stop)]
            new = x[order[-count * len(spans) :]].view(len(spans), count, -1)
            y, states = step(new, None if begins else [held[indices] for held in self._states[layer, name]])
            if (layer, name) not in self._states:
                self._states[layer, name] = tuple(state.new_empty(self._rows, *state.shape[1:]) for state in states)
            for held, state in zip(self._states[layer, name], states, strict=True):
                held.index_copy_(0, indices, state)
            outputs.append(y.flatten(0, 1))
        joined = torch.cat(outputs)
        return torch.empty_like(joined).index_copy_(0, to_device(torch.tensor(order), x.device), joined).unsqueeze(1)

    def _store_tokens(self, layer: int, *new: Tensor) -> None:
        """Store tensors [N, 1, K, d] of all rows in the layer's pages, in place."""
        if not self._held[layer]:  # allocated lazily and left untouched: a CPU commits memory on first write
            self._held[layer] = tuple(part.new_empty(self._slots, *part.shape[2:]) for part in new)
            self._by_head[layer] = tuple(held.transpose(0, 1).unsqueeze(0) for held in self._held[layer])
        for held, part in zip(self._held[layer], new, strict=True):
            held.index_copy_(0, self._new, part.squeeze(1))


def _page_slot_runs(pages: Sequence[int], total: int, size: int) -> list[SlotRun]:
    """Return the slots of the first `total` tokens of a row with these pages of `size` tokens; adjacent pages form one
    run.
    """
    runs: list[SlotRun] = []
    for number, page in enumerate(pages[: -(-total // size)]):
        start, stop = page * size, page * size + min(size, total - number * size)
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
