from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_data.cleaning.clean_config import MinHashConfig
from mega_data.cleaning.duplicate_detection import (
    NONE,
    _find_roots,
    _join_clusters,
    compute_text_minhash_signatures,
    estimate_jaccard_similarity,
    find_first_exact_duplicates,
    find_first_near_duplicates,
    hash_texts,
)
from mega_data.cleaning.text_words import AnalyzedText


def prose(rng: random.Random, words: int = 200) -> list[str]:
    return [f"w{rng.randrange(3000)}" for _ in range(words)]


@given(st.lists(st.sampled_from(["", "a", "b", "a ", "ä"]), max_size=12))
def test_exact_leaders_are_the_first_of_equal_texts(texts: list[str]) -> None:
    assert find_first_exact_duplicates(hash_texts(list(map(AnalyzedText, texts)))).tolist() == [
        texts.index(text) for text in texts
    ]


def test_data_sets_apart_are_not_compared() -> None:
    hashes = hash_texts([AnalyzedText(text) for text in "aabab"])
    assert find_first_exact_duplicates(hashes, np.array([0, 0, 0, 1, 1])).tolist() == [0, 0, 2, 3, 4]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=15))
def test_clusters_are_the_connected_components(pairs: list[tuple[int, int]]) -> None:
    leaders, expected = np.arange(10), list(range(10))
    for a, b in pairs:
        low, high = sorted((expected[a], expected[b]))
        expected = [low if root == high else root for root in expected]
    _join_clusters(leaders, np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64))
    assert _find_roots(leaders, np.arange(10)).tolist() == expected


class TestMinHash:
    @pytest.fixture(autouse=True)
    def _rensa(self) -> None:
        pytest.importorskip("rensa", reason="makes the signatures")

    def test_near_duplicates_join_the_first_and_others_do_not(self) -> None:
        rng = random.Random(0)
        first = [prose(rng) for _ in range(30)]
        near = [[*words[:50], "other", *words[51:]] for words in first]
        half = [[*words[:100], *prose(rng, 100)] for words in first]
        texts = [AnalyzedText(" ".join(words)) for words in [*first, *near, *half]]
        leaders = find_first_near_duplicates(
            compute_text_minhash_signatures(texts, MinHashConfig()), MinHashConfig(), np.arange(90)
        )
        assert leaders.tolist() == [*range(30), *range(30), *range(60, 90)]

    def test_likeness_spreads(self) -> None:
        """A is like B and B like C: all three are one cluster, though A and C differ by more than the threshold."""
        words = prose(random.Random(1), 300)
        steps = [words, [*"abcdefgh", *words[8:]], [*"abcdefgh", *words[8:270], *prose(random.Random(2), 30)]]
        found = compute_text_minhash_signatures([AnalyzedText(" ".join(step)) for step in steps], MinHashConfig())
        settings = MinHashConfig(threshold=0.78, bands=112, rows=1)
        alike = [
            estimate_jaccard_similarity(found, np.array([a]), np.array([b]))[0] for a, b in ((0, 1), (1, 2), (0, 2))
        ]
        assert min(alike[:2]) > 0.78 > alike[2]
        assert find_first_near_duplicates(found, settings, np.arange(3)).tolist() == [0, 0, 0]

    def test_signatures_estimate_the_similarity_of_sets(self) -> None:
        rng = random.Random(3)
        for share in (0.2, 0.5, 0.9):
            common = prose(rng, int(600 * share))
            a, b = ([*common, *(f"{name}{i}" for i in range(600 - len(common)))] for name in "xy")
            found = compute_text_minhash_signatures(
                [AnalyzedText(" ".join(a)), AnalyzedText(" ".join(b))], MinHashConfig(bands=64, rows=8, ngram=1)
            )
            true = len({*a} & {*b}) / len({*a} | {*b})
            assert estimate_jaccard_similarity(found, np.array([0]), np.array([1]))[0] == pytest.approx(true, abs=0.07)

    def test_texts_of_few_or_no_words(self) -> None:
        texts = [AnalyzedText(text) for text in ("", "...", "two words", "Two words!", "", "other")]
        found = compute_text_minhash_signatures(texts, MinHashConfig())
        assert (found[[0, 1, 4]] == NONE).all()
        assert find_first_near_duplicates(found, MinHashConfig(), np.arange(6)).tolist() == [0, 1, 2, 2, 4, 5]
