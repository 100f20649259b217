"""Allocator of KV cache pages and prefix cache of full pages: bookkeeping in host memory, no tensors.

As in paged attention (arXiv:2309.06180) a row of tokens has pages of `PAGE` tokens each. A full page can be shared by all
rows that begin with the same tokens; it is found by a hash of all of these.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

import numpy as np

PAGE = 16  # tokens


class PageAllocator:
    """Allocator of the pages of a KV cache.

    A page that no row uses is free. A free page whose tokens are known can still be found; it is taken for something
    else only when no other is left, the longest unused first.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._uses = [0] * count
        self._blank = np.ones(count, dtype=bool)  # free, and holds nothing that can be found
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, the longest unused first
        self._found: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def num_free_pages(self) -> int:
        """Number of pages that no row uses."""
        return int(np.count_nonzero(self._blank)) + len(self._kept)

    def allocate_pages(self, count: int, after: int | None) -> list[int]:
        """Return `count` free pages for a row, directly after its last page `after` as long as those are free.

        Pages in one piece are read where they lie; others have to be copied together.
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

    def share_cached_pages(self, names: Sequence[bytes]) -> list[int]:
        """Return the pages with the longest cached prefix of these hashes, and count them as used by the caller."""
        found = []
        for name in names:
            if name not in self._found:
                break
            found.append(self._found[name])
            self._mark_used(found[-1])
        return found

    def register_page(self, page: int, name: bytes) -> None:
        """Register a full page in use under a hash, so that other rows can share it."""
        if name not in self._found:
            self._found[name], self._names[page] = page, name

    def release_pages(self, pages: Sequence[int]) -> None:
        """Release the pages of a row; its last pages are reused first, since they are useless without those before."""
        for page in reversed(pages):
            self._uses[page] -= 1
            if self._uses[page] == 0:
                if page in self._names:
                    self._kept[page] = None
                else:
                    self._blank[page] = True

    def _mark_used(self, page: int) -> None:
        """Count one more use of a page."""
        self._uses[page] += 1
        self._blank[page] = False
        self._kept.pop(page, None)

    def _unregister_page(self, page: int) -> None:
        """Remove the hash of a page."""
        if page in self._names:
            del self._found[self._names.pop(page)]

    def _find_gap(self, wanted: int) -> int:
        """Return the page to start a run at: in the middle of the widest gap, so that the row before it can grow too."""
        while not self._blank.any() or (np.count_nonzero(self._blank) < wanted and self._kept):
            page, _ = self._kept.popitem(last=False)
            self._unregister_page(page)
            self._blank[page] = True
        edges = np.flatnonzero(np.diff(self._blank, prepend=False, append=False))
        starts, widths = edges[::2], edges[1::2] - edges[::2]
        widest = widths.argmax()
        before = starts[widest] > 0
        return int(starts[widest] + (max(0, widths[widest] - wanted) // 2 if before else 0))


def hash_full_pages(tokens: Sequence[int], known: Sequence[bytes] = (), of: str | None = None) -> list[bytes]:
    """Return the hashes of the full pages of a row that begins with these tokens; the first hashes may be `known`.

    A name is a hash of the page's tokens and of the name of the page before it; of the first by what it is: the adapter
    that its keys were made with.
    """
    first = b"" if of is None else sha256(of.encode()).digest()
    names = list(known)
    for start in range(len(names) * PAGE, len(tokens) - PAGE + 1, PAGE):
        before = names[-1] if names else first
        names.append(sha256(before + array("q", tokens[start : start + PAGE]).tobytes()).digest())
    return names
