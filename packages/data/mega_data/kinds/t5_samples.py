"""T5 samples: spans of the encoder's text are replaced by sentinels, and the decoder predicts the spans.

Order `megatron` hides whole words of sentences as Megatron does; the other orders hide spans of running text, as T5 was
trained (Raffel et al., 2020, section 3.1.4).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mega_common.errors import DataError
from mega_data.data_config import SpanCorruption
from mega_data.kinds.dataset_kind import DatasetContext
from mega_data.kinds.masked_lm_samples import (
    WholeWordMasker,
    find_special_token,
    make_geometric_length_sampler,
    make_sample_random_generator,
)
from mega_data.kinds.running_text import build_token_windows
from mega_data.kinds.sentence_samples import MegatronSentenceRanges
from mega_data.sampling.dataset_parts import DatasetPart
from mega_data.tokenizer import Tokenizer

Ints = npt.NDArray[np.int64]
MAX_NGRAM = 10  # maximum number of consecutive masked words in Megatron's order
SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclass(frozen=True)
class T5Sample:
    """T5 training sample: S encoder tokens and D decoder tokens, both padded with token 0.
    Labels, loss weights and masks are included.

    Attributes:
        encoder_tokens: int64 [S], the text with a sentinel for each masked span.
        decoder_tokens: int64 [D], a start token, then each sentinel and its span.
        labels: int64 [D], the token that follows each, finally the end token; -1 in the padding.
        loss_weights: fp32 [D], 0 in the padding.
        encoder_mask: bool [S], false in the padding.
        decoder_mask: bool [D], false in the padding.
        truncated: whether tokens were dropped to fit.
    """

    encoder_tokens: Ints
    decoder_tokens: Ints
    labels: Ints
    loss_weights: npt.NDArray[np.float32]
    encoder_mask: npt.NDArray[np.bool_]
    decoder_mask: npt.NDArray[np.bool_]
    truncated: bool


class SentinelReplacement:
    """Replacement of masked spans by sentinel tokens, with padding.
    It is the last step of building T5 samples in every sample order.

    Raises:
        DataError: if the tokenizer has no sentinels; if a sample needs more sentinels or decoder tokens than available.
    """

    def __init__(self, tokenizer: Tokenizer, start: int, eos: int, sizes: tuple[int, int]) -> None:
        numbered = {
            int(match[1]): token
            for name, token in tokenizer.backend.get_vocab(with_added_tokens=True).items()
            if (match := SENTINEL.fullmatch(name))
        }
        if not numbered:
            raise DataError(
                f"{tokenizer.path}: the sentinel tokens <extra_id_0>, <extra_id_1> and so on are missing",
                hint="set data.tokenizer to a T5 tokenizer, or add these tokens to tokenizer.json",
            )
        self._sentinels = [token for _, token in sorted(numbered.items())]
        self._path, self._start, self._eos, self._sizes = tokenizer.path, start, eos, sizes

    def build_sample(self, tokens: Ints, runs: Iterable[Ints], *, end: bool, truncated: bool = False) -> T5Sample:
        """Build a T5 sample from the text `tokens` by replacing masked spans.

        Each span of positions in `runs` is replaced by a sentinel in the encoder's text and predicted by the decoder.
        `end` appends the end token to the encoder's text. Raises DataError if the tokenizer has too few sentinels, or
        the decoder's text is too long.
        """
        runs = sorted(runs, key=lambda run: int(run[0]))
        if len(runs) > len(self._sentinels):
            raise DataError(
                f"{self._path}: has {len(self._sentinels)} sentinel tokens, but a sample of data.seq_length ="
                f" {self._sizes[0]} requires {len(runs)}",
                hint="reduce data.seq_length or data.t5.mask_probability",
            )
        encoder: list[int] = []
        decoder = [self._start]
        at = 0
        for run, sentinel in zip(runs, self._sentinels, strict=False):
            encoder += [*tokens[at : run[0]].tolist(), sentinel]
            decoder += [sentinel, *tokens[run].tolist()]
            at = int(run[-1]) + 1
        encoder += [*tokens[at:].tolist(), *([self._eos] if end else [])]
        labels = [*decoder[1:], self._eos]
        size = self._sizes[1]
        if len(decoder) > size:
            raise DataError(
                f"data.t5.decoder_seq_length = {size}: must be at least {len(decoder)} for a sample of these data",
                hint=f"set it to {2 * sum(run.size for run in runs) + 1}, or reduce data.t5.mask_probability",
            )
        return T5Sample(
            _pad_tokens(encoder, self._sizes[0], 0),
            _pad_tokens(decoder, size, 0),
            _pad_tokens(labels, size, -1),
            (np.arange(size) < len(labels)).astype(np.float32),
            np.arange(self._sizes[0]) < len(encoder),
            np.arange(size) < len(decoder),
            truncated,
        )


def _pad_tokens(tokens: list[int], size: int, fill: int) -> Ints:
    return np.array(tokens + [fill] * (size - len(tokens)), np.int64)


class MegatronT5Samples:
    """T5 samples of one data set whose sequences are sentences, bit-identical to Megatron's.

    Raises:
        DataError: if the tokenizer lacks a special token; on the first sample, if no document can be used.
    """

    def __init__(self, part: DatasetPart, setting: DatasetContext, num_samples: int) -> None:
        config, tokenizer = setting.config, setting.tokenizer
        assert config.t5.decoder_seq_length is not None, "checked with the configuration"
        self._part, self._config, self._tokenizer = part, config, tokenizer
        self._pad = find_special_token(tokenizer, "[PAD]", "<pad>")
        excluded = find_special_token(tokenizer, "[CLS]", "<s>"), find_special_token(tokenizer, "[SEP]", "</s>")
        self._words = WholeWordMasker(
            tokenizer, excluded, config.t5.mask_probability, make_geometric_length_sampler(MAX_NGRAM)
        )
        start = find_special_token(tokenizer, "[BOS]", "<s>", "<bos>")
        end = find_special_token(tokenizer, "[EOS]", "</s>", "<eos>")
        self._corruption = SentinelReplacement(tokenizer, start, end, (config.seq_length, config.t5.decoder_seq_length))
        self._cuts = MegatronSentenceRanges(
            part, setting, num_samples, config.seq_length - 2, 1, config.t5.short_probability
        )

    @cached_property
    def content_key(self) -> str:
        """Text that names everything the T5 samples depend on; equal texts mean equal samples."""
        share, size = self._config.t5.mask_probability, self._config.t5.decoder_seq_length
        return f"t5 share={share} decoder={size} tokenizer={self._tokenizer.fingerprint} {self._cuts.content_key}"

    @property
    def samples_per_epoch(self) -> float:
        """Approximate number of T5 samples in one pass over the data set."""
        return self._cuts.samples_per_epoch

    def estimate_attention_work(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the squared encoder length for each sample in `numbers`, int64 [len(numbers)]."""
        return np.full(numbers.size, self._config.seq_length**2)

    def __getitem__(self, k: int, /) -> T5Sample:
        first, last, length, random = self._cuts[k]
        tokens = np.concatenate([self._part.reader.read_sequence(i) for i in range(first, last)])
        runs = self._words.draw_word_runs(tokens[:length], length, random)
        sample = self._corruption.build_sample(tokens[:length], runs, end=False, truncated=tokens.size > length)
        # Megatron treats every token with the padding id as padding.
        encoder_mask = sample.encoder_mask & (sample.encoder_tokens != self._pad)
        decoder_mask = sample.decoder_mask & (sample.decoder_tokens != self._pad)
        return replace(sample, encoder_mask=encoder_mask, decoder_mask=decoder_mask)


class T5Samples:
    """T5 samples of running text with random masked spans.
    Each text window fits the encoder length exactly after corruption.

    Raises:
        DataError: if the tokenizer lacks a special token, or the part is empty.
    """

    def __init__(self, part: DatasetPart, setting: DatasetContext, num_samples: int) -> None:
        config, tokenizer = setting.config, setting.tokenizer
        self._config, self._tokenizer = config, tokenizer
        self._spans = SpanCorruption.from_encoder_length(
            config.seq_length, config.t5.mask_probability, config.t5.mean_span
        )
        decoder_length = config.t5.get_decoder_length(config.seq_length)
        start = find_special_token(tokenizer, "<pad>", "[PAD]")
        end = find_special_token(tokenizer, "</s>", "[EOS]", "<eos>")
        self._corruption = SentinelReplacement(tokenizer, start, end, (config.seq_length, decoder_length))
        self._windows = build_token_windows(part, setting, num_samples, self._spans.tokens)

    @cached_property
    def content_key(self) -> str:
        """Text that names everything the T5 samples depend on; equal texts mean equal samples."""
        spans, tokenizer = self._spans, self._tokenizer.fingerprint
        return f"t5 hidden={spans.hidden} spans={spans.count} tokenizer={tokenizer} {self._windows.content_key}"

    @property
    def samples_per_epoch(self) -> float:
        """Number of T5 samples in one pass over the data set."""
        return self._windows.samples_per_epoch

    def estimate_attention_work(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the squared encoder length for each sample in `numbers`, int64 [len(numbers)]."""
        return np.full(numbers.size, self._config.seq_length**2)

    def __getitem__(self, k: int, /) -> T5Sample:
        runs = self._spans.draw_spans(make_sample_random_generator(self.content_key, k))
        return self._corruption.build_sample(self._windows[k][:-1], runs, end=True)


def build_t5_samples(part: DatasetPart, setting: DatasetContext, num_samples: int) -> MegatronT5Samples | T5Samples:
    """Return the T5 samples of one data set's share of a split (dataset kind `t5`).
    They are Megatron's in order `megatron`, else of running text.
    """
    samples = MegatronT5Samples if setting.config.sample_order == "megatron" else T5Samples
    return samples(part, setting, num_samples)
