"""Which pages of the key-value cache are in use, and what the full ones hold: bookkeeping in host memory, no tensors.

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


class Pages:
    """Takes pages and gives them back.

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
    def free(self) -> int:
        """Pages that no row uses."""
        return int(np.count_nonzero(self._blank)) + len(self._kept)

    def take(self, count: int, after: int | None) -> list[int]:
        """Free pages for a row, as many as asked for: behind its last page `after` as long as these are free.

        Pages in one piece are read where they lie; others have to be copied together.
        """
        taken: list[int] = []
        while len(taken) < count:
            following = None if after is None else after + 1
            if following is None or following >= self.count or self._uses[following]:
                following = self._gap(count - len(taken))
            self._forget(following)
            self._use(following)
            taken.append(following)
            after = following
        return taken

    def share(self, names: Sequence[bytes]) -> list[int]:
        """The pages that hold the first of these, as far as there are any; the caller uses them now, too."""
        found = []
        for name in names:
            if name not in self._found:
                break
            found.append(self._found[name])
            self._use(found[-1])
        return found

    def name(self, page: int, name: bytes) -> None:
        """From now on `page`, which is full and in use, can be found."""
        if name not in self._found:
            self._found[name], self._names[page] = page, name

    def release(self, pages: Sequence[int]) -> None:
        """A row uses these no more. Its last pages are the first to go, for they are no use without those before."""
        for page in reversed(pages):
            self._uses[page] -= 1
            if self._uses[page] == 0:
                if page in self._names:
                    self._kept[page] = None
                else:
                    self._blank[page] = True

    def _use(self, page: int) -> None:
        self._uses[page] += 1
        self._blank[page] = False
        self._kept.pop(page, None)

    def _forget(self, page: int) -> None:
        if page in self._names:
            del self._found[self._names.pop(page)]

    def _gap(self, wanted: int) -> int:
        """Where to begin a piece: in the middle of the widest gap, so that the row before it may grow, too."""
        while not self._blank.any() or (np.count_nonzero(self._blank) < wanted and self._kept):
            page, _ = self._kept.popitem(last=False)
            self._forget(page)
            self._blank[page] = True
        edges = np.flatnonzero(np.diff(self._blank, prepend=False, append=False))
        starts, widths = edges[::2], edges[1::2] - edges[::2]
        widest = widths.argmax()
        before = starts[widest] > 0
        return int(starts[widest] + (max(0, widths[widest] - wanted) // 2 if before else 0))


def page_names(tokens: Sequence[int], known: Sequence[bytes] = (), of: str | None = None) -> list[bytes]:
    """The names of the full pages of a row that begins with these tokens; those of the first may be `known`.

    A name is a hash of the page's tokens and of the name of the page before it; of the first by what it is: the adapter
    that its keys were made with.
    """
    first = b"" if of is None else sha256(of.encode()).digest()
    names = list(known)
    for start in range(len(names) * PAGE, len(tokens) - PAGE + 1, PAGE):
        before = names[-1] if names else first
        names.append(sha256(before + array("q", tokens[start : start + PAGE]).tobytes()).digest())
    return names
