"""Allocator of KV cache pages and prefix cache of full pages: bookkeeping in host memory, no tensors.

As in paged attention (arXiv:2309.06180) a row of tokens has pages of `PAGE` tokens each. A full page can be shared by all
rows that begin with the same tokens; its key is a hash of all of these.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

import numpy as np

PAGE = 16  # tokens


class PageAllocator:
    """Allocator of the fixed-size pages of a KV cache, which rows with equal prefixes can share.

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
        """Number of cache pages that no row uses, including pages still cached under a hash."""
        return int(np.count_nonzero(self._blank)) + len(self._cached)

    def allocate_pages(self, count: int, after: int | None) -> list[int]:
        """Return the indices of `count` free pages for a row, directly after its last page `after` as long as the
        following pages are free.

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
        """Return the cached pages of the longest registered prefix of `hashes`, the page hashes of a row in order, and
        count them as used by that row.
        """
        found = []
        for page_hash in hashes:
            if page_hash not in self._page_of_hash:
                break
            found.append(self._page_of_hash[page_hash])
            self._mark_used(found[-1])
        return found

    def register_page(self, page: int, page_hash: bytes) -> None:
        """Register a full page in use under the hash of its content, so that other rows can share it."""
        if page_hash not in self._page_of_hash:
            self._page_of_hash[page_hash], self._hash_of_page[page] = page, page_hash

    def release_pages(self, pages: Sequence[int]) -> None:
        """Release a row's `pages`; the last of them are reused first, since later pages are useless without earlier
        ones.
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
    """Return the hashes of the full cache pages of a row that begins with `tokens`; `known` are hashes of its first
    pages computed before, and `adapter` is the name of its LoRA adapter.

    A hash covers the page's tokens and the hash of the page before it; for the first page, the name of the LoRA adapter
    that its keys depend on.
    """
    first = b"" if adapter is None else sha256(adapter.encode()).digest()
    hashes = list(known)
    for start in range(len(hashes) * PAGE, len(tokens) - PAGE + 1, PAGE):
        before = hashes[-1] if hashes else first
        hashes.append(sha256(before + array("q", tokens[start : start + PAGE]).tobytes()).digest())
    return hashes
