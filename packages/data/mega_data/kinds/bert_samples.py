"""BERT samples: sentences in two segments with masked tokens (Devlin et al., 2019), built like Megatron's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mega_data.kinds.dataset_kind import DatasetContext, TrainingSample
from mega_data.kinds.masked_lm_samples import Random, WholeWordMasker, find_special_token, make_inverse_length_sampler
from mega_data.kinds.sentence_samples import MegatronSentenceRanges, SeededSentenceRanges, SentenceRanges
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.token_files.indexed_reader import Tokens

Ints = npt.NDArray[np.int64]
MAX_NGRAM = 3  # maximum number of consecutive masked words


@dataclass(frozen=True, kw_only=True)
class BertSample(TrainingSample):
    """BERT training sequence of S tokens, padded with token 0.
    It is [CLS] A [SEP] B [SEP]; without sentence pairs [CLS] A [SEP].

    Labels are the original ids of tokens to predict, -1 elsewhere, with loss weight 1 at labels; token types are 1 in B
    and its [SEP], else 0. Padding is a separate document.

    Attributes:
        padding_mask: bool [S], false in the padding.
        is_random: whether B precedes A in the document.
        truncated: whether tokens were dropped to fit.
    """

    padding_mask: npt.NDArray[np.bool_]
    is_random: bool
    truncated: bool


class BertSamples:
    """BERT samples (masked words, two segments) of one data set whose sequences are sentences.

    Raises:
        DataError: if the tokenizer lacks one of BERT's special tokens; on the first sample, if no document can be used.
    """

    def __init__(self, part: DatasetPart, setting: DatasetContext, num_samples: int) -> None:
        config, tokenizer = setting.config, setting.tokenizer
        self._part, self._config, self._tokenizer = part, config, tokenizer
        self._cls = find_special_token(tokenizer, "[CLS]", "<s>")
        self._sep = find_special_token(tokenizer, "[SEP]", "</s>")
        self._mask = find_special_token(tokenizer, "[MASK]", "<mask>")
        pad = find_special_token(tokenizer, "[PAD]", "<pad>")
        megatron = config.sample_order == "megatron"
        self._pad = pad if megatron else -1  # Megatron treats every token with this id as padding
        self._vocabulary = sorted(tokenizer.backend.get_vocab(with_added_tokens=True).values())
        self._words = WholeWordMasker(
            tokenizer, (self._cls, self._sep), config.bert.mask_probability, make_inverse_length_sampler(MAX_NGRAM)
        )
        cut = config.seq_length - 3, 2 if config.bert.sentence_pairs else 1, config.bert.short_probability
        self._cuts: SentenceRanges = (
            MegatronSentenceRanges(part, setting, num_samples, *cut)
            if megatron
            else SeededSentenceRanges(part, setting, *cut)
        )

    @cached_property
    def content_key(self) -> str:
        """Text that names everything the BERT samples depend on; equal texts mean equal samples."""
        share, tokenizer = self._config.bert.mask_probability, self._tokenizer.fingerprint
        return f"bert share={share} tokenizer={tokenizer} {self._cuts.content_key}"

    @property
    def samples_per_epoch(self) -> float:
        """Number of BERT samples in one pass over the data set; approximate in order `megatron`."""
        return self._cuts.samples_per_epoch

    def estimate_attention_work(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the squared sequence length for each sample in `numbers`, int64 [len(numbers)]."""
        return np.full(numbers.size, self._config.seq_length**2)

    def __getitem__(self, k: int, /) -> BertSample:
        first, last, length, random = self._cuts[k]
        a, b, swapped = self._draw_segments(first, last, random)
        truncated = a.size + b.size > length
        a, b = trim_segments(a, b, length, random)
        end = [self._sep] if b.size else []
        original = np.concatenate([[self._cls], a, [self._sep], b, end]).astype(np.int64)
        tokens, types = (np.zeros(self._config.seq_length, np.int64) for _ in range(2))
        tokens[: original.size] = original
        types[a.size + 2 : original.size] = 1
        labels = np.full(self._config.seq_length, -1)
        for run in self._words.draw_word_runs(original, length, random):
            labels[run] = original[run]
            for position in run.tolist():
                tokens[position] = self._draw_replacement(int(original[position]), random)
        positions = np.arange(self._config.seq_length)
        padding = positions >= original.size
        return BertSample(
            tokens=tokens, labels=labels, loss_weights=(labels >= 0).astype(np.float32), position_ids=positions,
            document_ids=padding.astype(np.int32), token_types=types,
            pair_label=int(swapped) if self._config.bert.sentence_pairs else None,
            padding_mask=~padding & (tokens != self._pad), is_random=swapped, truncated=truncated,
        )  # fmt: skip

    def _draw_segments(self, first: int, last: int, random: Random) -> tuple[Tokens, Tokens, bool]:
        """Return the sentences before and after a random cut, in swapped order half the time."""
        sentences = [self._part.reader.read_sequence(i) for i in range(first, last)]
        if not self._config.bert.sentence_pairs:
            return np.concatenate(sentences), np.empty(0, np.int64), False
        pivot = random.randint(1, len(sentences)) if len(sentences) > 2 else 1
        a, b = np.concatenate(sentences[:pivot]), np.concatenate(sentences[pivot:])
        return (b, a, True) if random.random_sample() < 0.5 else (a, b, False)

    def _draw_replacement(self, token: int, random: Random) -> int:
        """Return [MASK] with probability 0.8, a random token of the vocabulary with 0.1, else the token itself."""
        if random.random_sample() < 0.8:
            return self._mask
        if random.random_sample() >= 0.5:
            return self._vocabulary[random.randint(0, len(self._vocabulary))]
        return token


def trim_segments(a: Tokens, b: Tokens, length: int, random: Random) -> tuple[Tokens, Tokens]:
    """Return two text segments trimmed to at most `length` tokens in total, at random ends of the longer one.

    The longer one (`b` on a tie) repeatedly loses its first or last token, drawn at random.
    """
    begins, ends = [0, 0], [a.size, b.size]
    for front in random.random_sample(max(0, a.size + b.size - length)) < 0.5:
        longer = 0 if ends[0] - begins[0] > ends[1] - begins[1] else 1
        if front:
            begins[longer] += 1
        else:
            ends[longer] -= 1
    return a[begins[0] : ends[0]], b[begins[1] : ends[1]]


def build_bert_samples(part: DatasetPart, setting: DatasetContext, num_samples: int) -> BertSamples:
    """Return a data set's share of a split as BERT samples; `num_samples` matters only for sample order `megatron`.
    They are in the run's sample order.
    """
    return BertSamples(part, setting, num_samples)
