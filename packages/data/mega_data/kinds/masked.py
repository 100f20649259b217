"""Running text with masked tokens, for encoders that are trained without sentences (RoBERTa, Liu et al., 2019)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mega_data.kinds.base import Sample, Setting
from mega_data.kinds.masking import drawn_random, special_token
from mega_data.kinds.text import DocumentRules, TextSamples, windows
from mega_data.order.parts import Part
from mega_data.tokenizer import Tokenizer

SPECIALS = ("[CLS]", "[SEP]", "[PAD]", "<s>", "</s>", "<pad>")  # which are never masked


def mask_token(tokenizer: Tokenizer) -> int:
    """The token that hides another.

    Raises:
        DataError: when the tokenizer has none.
    """
    return special_token(tokenizer, "[MASK]", "<mask>", "<|mask|>")


def never_hidden(tokenizer: Tokenizer, eod: int | None, size: int) -> npt.NDArray[np.bool_]:
    """Of `size` tokens which are special ones or `eod`, and so never hidden: bool [size]."""
    vocab, apart = tokenizer.backend.get_vocab(with_added_tokens=True), np.zeros(size, np.bool_)
    apart[[vocab[name] for name in SPECIALS if name in vocab]] = True
    if eod is not None:
        apart[eod] = True
    return apart


class MaskedSamples(TextSamples):
    """Windows of S tokens, of which each is to be guessed with `data.bert.mask_probability`: of these 8 in 10 become the mask
    token, one any token of the vocabulary, one stays. Labels are the tokens themselves.

    Raises:
        DataError: when the tokenizer has no mask token, or the part is empty.
    """

    def __init__(self, part: Part, setting: Setting, wanted: int) -> None:
        config, tokenizer = setting.config, setting.tokenizer
        super().__init__(
            windows(part, setting, wanted, config.seq_length), DocumentRules.of(setting), config.seq_length
        )
        self._share, self._tokenizer = config.bert.mask_probability, tokenizer.fingerprint
        self._mask = mask_token(tokenizer)
        self._vocabulary = np.array(sorted(tokenizer.backend.get_vocab(with_added_tokens=True).values()))
        self._apart = never_hidden(tokenizer, setting.eod, int(self._vocabulary[-1]) + 1)

    @cached_property
    def identity(self) -> str:
        """See `Samples`."""
        return f"masked share={self._share} tokenizer={self._tokenizer} {self._windows.identity}"

    def __getitem__(self, k: int, /) -> Sample:
        sample, random = self._rules.sample(self._windows[k]), drawn_random(self.identity, k)
        tokens = sample.tokens.astype(np.int64)
        guessed = (random.random_sample(tokens.size) < self._share) & ~self._apart[tokens]
        how = random.random_sample(tokens.size)
        other = self._vocabulary[random.randint(0, self._vocabulary.size, tokens.size)]
        hidden = np.where(how < 0.8, self._mask, np.where(how < 0.9, other, tokens))
        weights = np.where(guessed, sample.loss_weights, np.float32(0))
        return replace(sample, tokens=np.where(guessed, hidden, tokens), labels=tokens, loss_weights=weights)


def masked(part: Part, setting: Setting, wanted: int) -> MaskedSamples:
    """The kind `masked`, in the order of the run."""
    return MaskedSamples(part, setting, wanted)
