from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mega_data.cleaning.text_words import AnalyzedText, hash_ngrams


def test_words_are_lower_case_and_without_punctuation() -> None:
    assert AnalyzedText("The cat's “Hat”, 3.5 naïve_x!").words == ["the", "cat", "s", "hat", "3", "5", "naïve_x"]


def test_characters_of_scripts_without_spaces_are_words() -> None:
    assert AnalyzedText("abc漢字かな한국 def").words == ["abc", "漢", "字", "か", "な", "한국", "def"]


@given(st.lists(st.sampled_from("abc"), max_size=12), st.integers(1, 5))
def test_ngrams_are_equal_where_the_words_are(words: list[str], n: int) -> None:
    hashes = AnalyzedText(" ".join(words)).hash_word_ngrams(n)
    runs = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    assert hashes.shape == (len(runs),)
    assert all((hashes[i] == hashes[j]) == (runs[i] == runs[j]) for i in range(len(runs)) for j in range(i))


def test_order_counts_in_a_run() -> None:
    assert hash_ngrams(np.array([1, 2], np.uint64), 2) != hash_ngrams(np.array([2, 1], np.uint64), 2)
