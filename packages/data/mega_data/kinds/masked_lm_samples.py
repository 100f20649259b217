"""Running text with masked tokens, for encoders trained without sentence pairs (RoBERTa, Liu et al., 2019)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mega_data.kinds.dataset_kind import DatasetContext, TrainingSample
from mega_data.kinds.running_text import DocumentRules, TextSamples, build_token_windows
from mega_data.kinds.word_masking import create_sample_stream, find_special_token
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.tokenizer import Tokenizer

SPECIALS = ("[CLS]", "[SEP]", "[PAD]", "<s>", "</s>", "<pad>")  # never masked


def find_mask_token(tokenizer: Tokenizer) -> int:
    """Return the id of the tokenizer's mask token.

    Raises:
        DataError: if the tokenizer has none.
    """
    return find_special_token(tokenizer, "[MASK]", "<mask>", "<|mask|>")


def find_unmaskable_tokens(tokenizer: Tokenizer, eod: int | None, size: int) -> npt.NDArray[np.bool_]:
    """Return for each of `size` token ids whether it is never masked (special tokens and `eod`): bool [size]."""
    vocab, unmaskable = tokenizer.backend.get_vocab(with_added_tokens=True), np.zeros(size, np.bool_)
    unmaskable[[vocab[name] for name in SPECIALS if name in vocab]] = True
    if eod is not None:
        unmaskable[eod] = True
    return unmaskable


class MaskedLmSamples(TextSamples):
    """Masked-LM samples of running text: each token of a window is selected for prediction with probability
    `data.bert.mask_probability`.

    80 % of the selected tokens become the mask token, 10 % a random token, 10 % stay unchanged. Labels are the original
    tokens.

    Raises:
        DataError: if the tokenizer has no mask token, or the part is empty.
    """

    def __init__(self, part: DatasetPart, setting: DatasetContext, num_samples: int) -> None:
        config, tokenizer = setting.config, setting.tokenizer
        super().__init__(
            build_token_windows(part, setting, num_samples, config.seq_length),
            DocumentRules.from_context(setting),
            config.seq_length,
        )
        self._share, self._tokenizer = config.bert.mask_probability, tokenizer.fingerprint
        self._mask = find_mask_token(tokenizer)
        self._vocabulary = np.array(sorted(tokenizer.backend.get_vocab(with_added_tokens=True).values()))
        self._is_unmaskable = find_unmaskable_tokens(tokenizer, setting.eod, int(self._vocabulary[-1]) + 1)

    @cached_property
    def content_key(self) -> str:
        """Text that names everything the masked-LM samples depend on; equal texts mean equal samples."""
        return f"masked share={self._share} tokenizer={self._tokenizer} {self._windows.content_key}"

    def __getitem__(self, k: int, /) -> TrainingSample:
        sample, random = self._rules.build_sample(self._windows[k]), create_sample_stream(self.content_key, k)
        tokens = sample.tokens.astype(np.int64)
        selected = (random.random_sample(tokens.size) < self._share) & ~self._is_unmaskable[tokens]
        draw = random.random_sample(tokens.size)
        other = self._vocabulary[random.randint(0, self._vocabulary.size, tokens.size)]
        replaced = np.where(draw < 0.8, self._mask, np.where(draw < 0.9, other, tokens))
        weights = np.where(selected, sample.loss_weights, np.float32(0))
        return replace(sample, tokens=np.where(selected, replaced, tokens), labels=tokens, loss_weights=weights)


def build_masked_lm_samples(part: DatasetPart, setting: DatasetContext, num_samples: int) -> MaskedLmSamples:
    """Return the masked-LM samples of a data set part (dataset kind `masked`), in the run's sample order."""
    return MaskedLmSamples(part, setting, num_samples)
