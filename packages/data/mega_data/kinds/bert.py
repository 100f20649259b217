"""BERT's data: sentences in two segments, some of their tokens masked (Devlin et al., 2019), as Megatron makes it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mega_data.files.indexed import Tokens
from mega_data.kinds.base import Sample, Setting
from mega_data.kinds.cuts import Cuts, DrawnCuts, MegatronCuts
from mega_data.kinds.masking import Random, WholeWords, inverse_ngram, special_token
from mega_data.order.parts import Part

Ints = npt.NDArray[np.int64]
LONGEST = 3  # words that are masked in a row


@dataclass(frozen=True, kw_only=True)
class BertSample(Sample):
    """One sequence of S tokens: [CLS] A [SEP] B [SEP] and padding with token 0; without pairs [CLS] A [SEP].

    Labels are what a token that is to be guessed was, -1 elsewhere, and weights 1 where one is; types are 1 in B and its
    [SEP], else 0. Padding is a document by itself.

    Attributes:
        padding_mask: bool [S], false in the padding.
        is_random: whether B was in front of A in the document.
        truncated: whether tokens were left out to fit.
    """

    padding_mask: npt.NDArray[np.bool_]
    is_random: bool
    truncated: bool


class BertSamples:
    """Samples of one data set of sentences.

    Raises:
        DataError: when the tokenizer lacks one of BERT's special tokens; on the first sample, when no document can be
            used.
    """

    def __init__(self, part: Part, setting: Setting, wanted: int) -> None:
        config, tokenizer = setting.config, setting.tokenizer
        self._part, self._config, self._tokenizer = part, config, tokenizer
        self._cls = special_token(tokenizer, "[CLS]", "<s>")
        self._sep = special_token(tokenizer, "[SEP]", "</s>")
        self._mask = special_token(tokenizer, "[MASK]", "<mask>")
        pad = special_token(tokenizer, "[PAD]", "<pad>")
        megatron = config.sample_order == "megatron"
        self._pad = pad if megatron else -1  # Megatron takes the token for padding, wherever it comes from
        self._vocabulary = sorted(tokenizer.backend.get_vocab(with_added_tokens=True).values())
        self._words = WholeWords(
            tokenizer, (self._cls, self._sep), config.bert.mask_probability, inverse_ngram(LONGEST)
        )
        cut = config.seq_length - 3, 2 if config.bert.sentence_pairs else 1, config.bert.short_probability
        self._cuts: Cuts = MegatronCuts(part, setting, wanted, *cut) if megatron else DrawnCuts(part, setting, *cut)

    @cached_property
    def identity(self) -> str:
        """See `Samples`."""
        share, tokenizer = self._config.bert.mask_probability, self._tokenizer.fingerprint
        return f"bert share={share} tokenizer={tokenizer} {self._cuts.identity}"

    @property
    def samples_per_epoch(self) -> float:
        """See `Samples`."""
        return self._cuts.samples_per_epoch

    def work(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See `Samples`."""
        return np.full(numbers.size, self._config.seq_length**2)

    def __getitem__(self, k: int, /) -> BertSample:
        first, last, length, random = self._cuts[k]
        a, b, swapped = self._segments(first, last, random)
        truncated = a.size + b.size > length
        a, b = trimmed(a, b, length, random)
        end = [self._sep] if b.size else []
        found = np.concatenate([[self._cls], a, [self._sep], b, end]).astype(np.int64)
        tokens, types = (np.zeros(self._config.seq_length, np.int64) for _ in range(2))
        tokens[: found.size] = found
        types[a.size + 2 : found.size] = 1
        labels = np.full(self._config.seq_length, -1)
        for run in self._words.draw(found, length, random):
            labels[run] = found[run]
            for place in run.tolist():
                tokens[place] = self._instead(int(found[place]), random)
        places = np.arange(self._config.seq_length)
        padding = places >= found.size
        return BertSample(
            tokens=tokens, labels=labels, loss_weights=(labels >= 0).astype(np.float32), position_ids=places,
            document_ids=padding.astype(np.int32), token_types=types,
            pair_label=int(swapped) if self._config.bert.sentence_pairs else None,
            padding_mask=~padding & (tokens != self._pad), is_random=swapped, truncated=truncated,
        )  # fmt: skip

    def _segments(self, first: int, last: int, random: Random) -> tuple[Tokens, Tokens, bool]:
        """The sentences before and after a place between two, half the time in the other order."""
        sentences = [self._part.reader.read(i) for i in range(first, last)]
        if not self._config.bert.sentence_pairs:
            return np.concatenate(sentences), np.empty(0, np.int64), False
        pivot = random.randint(1, len(sentences)) if len(sentences) > 2 else 1
        a, b = np.concatenate(sentences[:pivot]), np.concatenate(sentences[pivot:])
        return (b, a, True) if random.random_sample() < 0.5 else (a, b, False)

    def _instead(self, token: int, random: Random) -> int:
        """[MASK] in 8 of 10 cases, any token of the vocabulary in one, the token itself in one."""
        if random.random_sample() < 0.8:
            return self._mask
        if random.random_sample() >= 0.5:
            return self._vocabulary[random.randint(0, len(self._vocabulary))]
        return token


def trimmed(a: Tokens, b: Tokens, length: int, random: Random) -> tuple[Tokens, Tokens]:
    """Both together at most `length` tokens: the longer one, `b` if none is, loses its first or last token, as drawn."""
    begins, ends = [0, 0], [a.size, b.size]
    for front in random.random_sample(max(0, a.size + b.size - length)) < 0.5:
        longer = 0 if ends[0] - begins[0] > ends[1] - begins[1] else 1
        if front:
            begins[longer] += 1
        else:
            ends[longer] -= 1
    return a[begins[0] : ends[0]], b[begins[1] : ends[1]]


def bert(part: Part, setting: Setting, wanted: int) -> BertSamples:
    """The kind `bert`, in the order of the run."""
    return BertSamples(part, setting, wanted)
