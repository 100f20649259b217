from __future__ import annotations

import torch

from mega_eval.cache import PagedCache, Span
from mega_eval.pages import PAGE, Pages, page_names


def test_a_row_grows_in_one_piece_as_long_as_there_is_room():
    pages = Pages(8)
    first, second = pages.take(1, None), pages.take(1, None)
    for row in (first, second):
        row += pages.take(2, row[-1])
    assert [first, second] == [[row[0] + i for i in range(3)] for row in (first, second)]
    assert set(pages.take(2, None)) | set(first) | set(second) == set(range(8))
    assert pages.free == 0


def test_what_was_computed_is_found_until_its_page_is_needed():
    pages, names = Pages(3), page_names(range(3 * PAGE))
    row = pages.take(3, None)
    for page, name in zip(row, names, strict=True):
        pages.name(page, name)
    pages.release(row)
    assert pages.free == 3
    assert pages.share(names[:2]) == row[:2]
    pages.release(row[:2])
    assert pages.take(1, None) == row[2:]  # the longest unused
    assert pages.share(names) == row[:2]
    assert pages.free == 0


def test_a_page_is_named_by_all_tokens_up_to_its_end():
    one, other = page_names(range(40)), page_names([9, *range(1, 40)])
    assert len(one) == 2
    assert not set(one) & set(other)
    assert page_names(range(60), one) == page_names(range(60))


def test_slots_of_a_row_and_what_a_window_sees_of_them():
    span = Span(slice(5, 8), 2 * PAGE + 4, [4, 5, 1])
    assert span.runs == [(4 * PAGE, 6 * PAGE), (PAGE, PAGE + 4)]
    assert span.new == [PAGE + 1, PAGE + 2, PAGE + 3]
    assert span.seen(4) == [(6 * PAGE - 2, 6 * PAGE), (PAGE, PAGE + 4)]
    assert span.seen(None) == span.seen(100) == span.runs


def test_a_latent_alone_is_kept_where_keys_are_values():
    cache, given = PagedCache(1, 2, 1), torch.randn(3, 1, 1, 6)
    cache.begin([Span(slice(0, 3), 3, [1])], torch.device("cpu"))
    seen = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object) -> torch.Tensor:
        seen.append((k, v))
        return q

    cache.attend(0, given, given, None, None, attend)
    assert torch.equal(seen[0][0], given.transpose(0, 1))
    assert torch.equal(seen[0][1], given.transpose(0, 1))
