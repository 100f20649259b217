"""Which tokens of a sample a model is to guess: runs of whole words, as Megatron's masked-word data sets draw them.

Every draw is of a `RandomState`, whose streams numpy keeps as they are, and in Megatron's order.
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


def megatron_random(seed: int, k: int) -> Random:
    """What Megatron draws sample `k` with."""
    return Random((seed + k) % (1 << 32))


def drawn_random(identity: str, k: int) -> Random:
    """A stream of its own for each sample of each data set."""
    return Random(np.random.PCG64(xxhash.xxh3_64_intdigest(f"{identity} sample={k}".encode())))


def inverse_ngram(longest: int) -> Callable[[Random], int]:
    """Numbers of words 1 to `longest`, N with a probability proportional to 1/N: Megatron's for BERT."""
    weights = 1.0 / np.arange(1, longest + 1)
    sums = (weights / weights.sum()).cumsum()
    bounds: list[float] = (sums / sums[-1]).tolist()
    return lambda random: bisect_right(bounds, random.random_sample()) + 1


def geometric_ngram(longest: int) -> Callable[[Random], int]:
    """Numbers of words 1 to `longest`, geometric with p = 0.2 and clipped (SpanBERT, Joshi et al., 2020): for T5."""
    return lambda random: min(random.geometric(0.2), longest)


class WholeWords:
    """Draws runs of whole words to be masked.

    A word is a token and those behind it that the vocabulary writes with `##` in front, as WordPiece does; without such
    marks each token is a word. Tokens `apart` are of no word.
    """

    def __init__(
        self, tokenizer: Tokenizer, apart: Sequence[int], probability: float, ngram: Callable[[Random], int]
    ) -> None:
        vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
        self._apart, self._goes_on = (np.zeros(tokenizer.vocab_size, np.bool_) for _ in range(2))
        self._apart[list(apart)] = True
        self._goes_on[[token for text, token in vocab.items() if text.startswith("##")]] = True
        self._probability, self._ngram = probability, ngram

    def draw(self, tokens: Ints, length: int, random: Random) -> Iterator[Ints]:
        """Runs of positions in `tokens`, one after another as they are drawn: int64 [tokens of the run] each.

        `length` is the number of tokens that the sample was to reach, which bounds how many are masked. What the caller
        draws between two runs comes between theirs.
        """
        places = np.flatnonzero(~self._apart[tokens])
        begins = ~self._goes_on[tokens[places]]
        begins[:1] = True
        words = np.append(np.flatnonzero(begins), places.size)
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
            run = places[words[word] : words[last]]
            if run.size and not taken[run].any():
                taken[run] = True
                count += run.size
                yield run


def special_token(tokenizer: Tokenizer, *names: str) -> int:
    """The token with the first of `names` that the vocabulary has.

    Raises:
        DataError: when it has none of them.
    """
    vocab = tokenizer.backend.get_vocab(with_added_tokens=True)
    for name in names:
        if name in vocab:
            return vocab[name]
    raise DataError(
        f"{tokenizer.path}: has no token {' or '.join(names)}", hint="data.tokenizer names the tokenizer of the data"
    )
