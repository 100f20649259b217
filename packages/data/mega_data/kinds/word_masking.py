"""Selection of masked tokens: runs of whole words, drawn like Megatron's masked-word data sets.

All draws come from a `RandomState`, whose streams numpy keeps stable, in Megatron's order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import DataError
from mega_data.tokenizer import Tokenizer

Random = np.random.RandomState
Ints = npt.NDArray[np.int64]


def create_megatron_stream(seed: int, k: int) -> Random:
    """Return the numpy random generator with which Megatron masks sample `k`, seeded with seed + k."""
    return Random((seed + k) % (1 << 32))


def create_sample_stream(content_key: str, k: int) -> Random:
    """Return a numpy random generator for sample `k` of the data set named by `content_key`, independent of other samples."""
    return Random(np.random.PCG64(xxhash.xxh3_64_intdigest(f"{content_key} sample={k}".encode())))


def inverse_ngram_sampler(longest: int) -> Callable[[Random], int]:
    """Return a function that draws a number of words N from 1 to `longest` with probability proportional to 1/N, as
    Megatron does for BERT.
    """
    weights = 1.0 / np.arange(1, longest + 1)
    sums = (weights / weights.sum()).cumsum()
    bounds: list[float] = (sums / sums[-1]).tolist()
    return lambda random: bisect_right(bounds, random.random_sample()) + 1


def geometric_ngram_sampler(longest: int) -> Callable[[Random], int]:
    """Return a function that draws a number of words for T5: geometric with p = 0.2, clipped to `longest` (SpanBERT,
    Joshi et al., 2020).
    """
    return lambda random: min(random.geometric(0.2), longest)


class WholeWordMasker:
    """Sampler of runs of whole words to mask, drawn as by Megatron for BERT and T5.

    A word is a token and the following tokens with the WordPiece prefix `##`; without such tokens, each token is a
    word. `excluded_tokens` belong to no word.
    """

    def __init__(
        self, tokenizer: Tokenizer, excluded_tokens: Sequence[int], probability: float, ngram: Callable[[Random], int]
    ) -> None:
        vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
        self._is_excluded, self._continues_word = (np.zeros(tokenizer.vocab_size, np.bool_) for _ in range(2))
        self._is_excluded[list(excluded_tokens)] = True
        self._continues_word[[token for text, token in vocab.items() if text.startswith("##")]] = True
        self._probability, self._ngram = probability, ngram

    def draw_word_runs(self, tokens: Ints, length: int, random: Random) -> Iterator[Ints]:
        """Yield runs of positions in `tokens` to mask, in the order they are drawn, int64 each; `length` bounds the
        number of masked tokens.

        `length` is the target length of the sample, which bounds the number of masked tokens. The generator draws
        lazily, so draws of the caller between two runs come between its own.
        """
        positions = np.flatnonzero(~self._is_excluded[tokens])
        begins = ~self._continues_word[tokens[positions]]
        begins[:1] = True
        words = np.append(np.flatnonzero(begins), positions.size)
        budget = min(self._probability * length, max(1, round(tokens.size * self._probability)))
        order = np.arange(words.size - 1)
        random.shuffle(order)
        taken, count = np.zeros(tokens.size, np.bool_), 0
        for word in order.tolist():
            if count >= budget:
                return
            last = min(word + self._ngram(random), words.size - 1)
            while last > word and count + words[last] - words[word] > budget:
                last -= 1
            run = positions[words[word] : words[last]]
            if run.size and not taken[run].any():
                taken[run] = True
                count += run.size
                yield run


def find_special_token(tokenizer: Tokenizer, *names: str) -> int:
    """Return the id of the first of `names` that is in the tokenizer's vocabulary.

    Raises:
        DataError: if none is in the vocabulary.
    """
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    for name in names:
        if name in vocab:
            return vocab[name]
    raise DataError(
        f"{tokenizer.path}: the special token {' or '.join(names)} is missing",
        hint="set data.tokenizer to a tokenizer with this token",
    )
