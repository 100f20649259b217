"""Masked-token samples: selection of the tokens to mask, for BERT, T5 and RoBERTa, and RoBERTa's samples.

Masked tokens are runs of whole words, drawn like those of Megatron's masked-word data sets: all draws come from a
`RandomState`, whose streams numpy keeps stable, in Megatron's order.

`MaskedLmSamples` are windows of running text, for encoders trained without sentence pairs (RoBERTa, Liu et al., 2019).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from mega_common.errors import DataError
from mega_data.kinds.dataset_kind import DatasetContext, TrainingSample
from mega_data.kinds.running_text import EndOfDocumentRules, TextSamples, build_token_windows
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.tokenizer import Tokenizer

Random = np.random.RandomState
Ints = npt.NDArray[np.int64]


def make_megatron_random_generator(seed: int, k: int) -> Random:
    """Return the numpy random generator with which Megatron masks sample `k`, seeded with seed + k."""
    return Random((seed + k) % (1 << 32))


def make_sample_random_generator(content_key: str, k: int) -> Random:
    """Return a numpy random generator of its own for sample `k` of the data set named by `content_key`."""
    return Random(np.random.PCG64(xxhash.xxh3_64_intdigest(f"{content_key} sample={k}".encode())))


def make_inverse_length_sampler(longest: int) -> Callable[[Random], int]:
    """Return a function that draws a number of words N from 1 to `longest` with probability proportional to 1/N.
    Megatron does so for BERT.
    """
    weights = 1.0 / np.arange(1, longest + 1)
    sums = (weights / weights.sum()).cumsum()
    bounds: list[float] = (sums / sums[-1]).tolist()
    return lambda random: bisect_right(bounds, random.random_sample()) + 1


def make_geometric_length_sampler(longest: int) -> Callable[[Random], int]:
    """Return a function that draws a number of words from a geometric distribution (p = 0.2) clipped to `longest`.
    T5 uses it (SpanBERT, Joshi et al., 2020).
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
        """Yield runs of positions in `tokens` to mask, in the order they are drawn, int64 each.

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
    """Return the id of the first of `names` that is in the tokenizer's vocabulary; a DataError if none is.

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


SPECIALS = ("[CLS]", "[SEP]", "[PAD]", "<s>", "</s>", "<pad>")  # never masked


def find_mask_token(tokenizer: Tokenizer) -> int:
    """Return the id of the tokenizer's mask token; a DataError if it has none.

    Raises:
        DataError: if the tokenizer has none.
    """
    return find_special_token(tokenizer, "[MASK]", "<mask>", "<|mask|>")


def mark_unmaskable_tokens(tokenizer: Tokenizer, eod: int | None, size: int) -> npt.NDArray[np.bool_]:
    """Return for each of `size` token ids whether it is never masked (special tokens and `eod`): bool [size]."""
    vocab, unmaskable = tokenizer.backend.get_vocab(with_added_tokens=True), np.zeros(size, np.bool_)
    unmaskable[[vocab[name] for name in SPECIALS if name in vocab]] = True
    if eod is not None:
        unmaskable[eod] = True
    return unmaskable


class MaskedLmSamples(TextSamples):
    """Masked-LM samples of running text, with BERT's 80/10/10 replacement of randomly selected tokens.
    Each token of a window is selected for prediction with probability `data.bert.mask_probability`.

    80 % of the selected tokens become the mask token, 10 % a random token, 10 % stay unchanged. Labels are the original
    tokens.

    Raises:
        DataError: if the tokenizer has no mask token, or the part is empty.
    """

    def __init__(self, part: DatasetPart, setting: DatasetContext, num_samples: int) -> None:
        config, tokenizer = setting.config, setting.tokenizer
        super().__init__(
            build_token_windows(part, setting, num_samples, config.seq_length),
            EndOfDocumentRules.from_context(setting),
            config.seq_length,
        )
        self._share, self._tokenizer = config.bert.mask_probability, tokenizer.fingerprint
        self._mask = find_mask_token(tokenizer)
        self._vocabulary = np.array(sorted(tokenizer.backend.get_vocab(with_added_tokens=True).values()))
        self._is_unmaskable = mark_unmaskable_tokens(tokenizer, setting.eod, int(self._vocabulary[-1]) + 1)

    @cached_property
    def content_key(self) -> str:
        """Text that names everything the masked-LM samples depend on; equal texts mean equal samples."""
        return f"masked share={self._share} tokenizer={self._tokenizer} {self._windows.content_key}"

    def __getitem__(self, k: int, /) -> TrainingSample:
        sample, random = self._rules.build_sample(self._windows[k]), make_sample_random_generator(self.content_key, k)
        tokens = sample.tokens.astype(np.int64)
        selected = (random.random_sample(tokens.size) < self._share) & ~self._is_unmaskable[tokens]
        draw = random.random_sample(tokens.size)
        other = self._vocabulary[random.randint(0, self._vocabulary.size, tokens.size)]
        replaced = np.where(draw < 0.8, self._mask, np.where(draw < 0.9, other, tokens))
        weights = np.where(selected, sample.loss_weights, np.float32(0))
        return replace(sample, tokens=np.where(selected, replaced, tokens), labels=tokens, loss_weights=weights)


def build_masked_lm_samples(part: DatasetPart, setting: DatasetContext, num_samples: int) -> MaskedLmSamples:
    """Return the masked-LM samples of one data set's share of a split (dataset kind `masked`).
    They are in the run's sample order.
    """
    return MaskedLmSamples(part, setting, num_samples)
