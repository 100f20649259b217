from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from chunked_data import documents
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mega_data.retrieval.document_chunks import DocumentChunks, NeighborLeakFilter, mark_leaking_neighbors


def test_chunks_begin_with_their_document_and_end_with_it(tmp_path: Path) -> None:
    chunks = DocumentChunks(documents(tmp_path / "d", [range(10), [], range(20, 28), [30]]), 4)
    assert chunks.starts.tolist() == [0, 3, 3, 5, 6]
    assert len(chunks) == 6
    assert chunks.find_documents(np.array([0, 2, 3, 5])).tolist() == [0, 0, 2, 3]
    found = np.where((own := chunks.read_tokens(np.array([[0, 2], [4, -1]]), 6)) >= 0, own - 7, -1)
    assert found[0].tolist() == [[0, 1, 2, 3, 4, 5], [8, 9, -1, -1, -1, -1]]
    assert found[1].tolist() == [[24, 25, 26, 27, -1, -1], [-1] * 6]
    assert chunks.find_sequence_chunks(1, 3) == range(3, 5)
    assert chunks.find_sequence_chunks(0, 4) == range(6)


def test_a_hash_is_of_the_content(tmp_path: Path) -> None:
    chunks = DocumentChunks(
        documents(tmp_path / "d", [[1, 2, 3, 4, 5, 6, 7, 8, 9], [0] + [1] * 7, [1, 2, 3, 4, 5, 6, 7, 8]]), 8
    )
    first, short, other, again = chunks.compute_hashes(0, 4).tolist()
    assert first == again != other
    assert short == 0


M = 8  # so that w = 2
words = st.integers(0, 2)
texts = st.lists(words, max_size=30)
# Documents, many of which are made of others: copied, cut, shifted.
corpora = st.lists(texts, min_size=1, max_size=4).flatmap(
    lambda rows: st.lists(
        st.tuples(st.sampled_from(rows), st.integers(0, 9), texts).map(
            lambda made: [*made[2][:5], *made[0][made[1] :]]
        ),
        max_size=4,
    ).map(lambda more: [*rows, *more])
)


def within(part: list[int], whole: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


@given(corpora)
@settings(max_examples=60, deadline=None)
@example([[*range(20)], [1, *range(20)]])
@example([[*range(16)], [*range(30, 38), *range(8)]])
def test_no_neighbor_is_of_the_document_nor_holds_what_it_goes_on_with(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]]
) -> None:
    if not any(rows):
        return
    chunks = DocumentChunks(documents(tmp_path_factory.mktemp("d") / "d", rows), M)
    numbers = np.arange(len(chunks))
    allowed = NeighborLeakFilter(chunks, chunks).mask_allowed_candidates(numbers, np.tile(numbers, (len(chunks), 1)))
    of, texts = chunks.find_documents(numbers), chunks.read_tokens(numbers, 2 * M)
    for one in numbers:
        after = [token for token in texts[one, M:].tolist() if token >= 0]
        mine = [texts[other, :M].tolist() for other in numbers if of[other] == of[one]]
        mine = [chunk for chunk in mine if sum(token >= 0 for token in chunk) >= 2]
        for other in numbers[allowed[one]]:
            theirs = texts[other].tolist()
            assert of[one] != of[other]
            assert not after or not within([*texts[one, M - 2 : M].tolist(), *after], theirs)
            assert len(after) < 3 or not any(within(after[at : at + 3], theirs) for at in range(len(after) - 2))
            assert theirs[:M] not in mine
            assert theirs[M:] not in mine


def test_other_documents_are_allowed_and_another_database_too(tmp_path: Path) -> None:
    one = DocumentChunks(documents(tmp_path / "a", [[*range(16)], [*range(20, 36)]]), M)
    assert NeighborLeakFilter(one, one).mask_allowed_candidates(np.arange(4), np.tile(np.array([0, 1, 2, 3, -1]), (4, 1))).tolist() == [
        [False, False, True, True, False]] * 2 + [[True, True, False, False, False]] * 2  # fmt: skip
    other = DocumentChunks(documents(tmp_path / "b", [[*range(40, 50)], [*range(20, 28)], [5, *range(16)]]), M)
    found = NeighborLeakFilter(one, other).mask_allowed_candidates(np.array([0, 2]), np.tile(np.arange(6), (2, 1)))
    assert found.tolist() == [[True, True, True, False, False, True], [True, True, False, True, True, True]]


def test_stretches_are_found_wherever_they_begin() -> None:
    own = np.arange(16)
    rows = np.array([
        [99, *range(4, 10), *[99] * 9],  # ends with the two tokens that come next
        [99, *range(4, 9), *[99] * 10],  # with one of them alone
        [*[99] * 13, 12, 13, -1],
        [*[99] * 13, 13, 14, -1],  # two that end nowhere
    ])  # fmt: skip
    assert mark_leaking_neighbors(np.tile(own, (4, 1)), rows).tolist() == [True, False, True, False]
    short = np.where(own < 9, own, -1)  # one token comes next: it, and the one before
    assert mark_leaking_neighbors(np.tile(short, (2, 1)), rows[:2]).tolist() == [True, True]
    last = np.where(own < 8, own, -1)
    assert not mark_leaking_neighbors(last[None], last[None]).any()
