"""T5's data: spans leave the encoder's text, a sentinel in the place of each, and the decoder is to tell them.

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
from mega_data.kinds.base import Setting
from mega_data.kinds.cuts import MegatronCuts
from mega_data.kinds.masking import WholeWords, drawn_random, geometric_ngram, special_token
from mega_data.kinds.text import windows
from mega_data.order.parts import Part
from mega_data.spans import Spans
from mega_data.tokenizer import Tokenizer

Ints = npt.NDArray[np.int64]
LONGEST = 10  # words that leave in a row in Megatron's order
SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclass(frozen=True)
class T5Sample:
    """S tokens for the encoder, D for the decoder, both padded with token 0.

    Attributes:
        encoder_tokens: int64 [S], the text with a sentinel for each span that left it.
        decoder_tokens: int64 [D], a start token, then each sentinel and its span.
        labels: int64 [D], the token that follows each, the end token at last; -1 in the padding.
        loss_weights: fp32 [D], 0 in the padding.
        encoder_mask: bool [S], false in the padding.
        decoder_mask: bool [D], likewise.
        truncated: whether tokens were left out to fit.
    """

    encoder_tokens: Ints
    decoder_tokens: Ints
    labels: Ints
    loss_weights: npt.NDArray[np.float32]
    encoder_mask: npt.NDArray[np.bool_]
    decoder_mask: npt.NDArray[np.bool_]
    truncated: bool


class Corruption:
    """Puts sentinels in the place of spans, and pads: what the samples of both orders end with.

    Raises:
        DataError: when the tokenizer has no sentinels; when a sample needs more of them, or more room, than there is.
    """

    def __init__(self, tokenizer: Tokenizer, start: int, eos: int, sizes: tuple[int, int]) -> None:
        numbered = {
            int(match[1]): token
            for name, token in tokenizer.backend.get_vocab(with_added_tokens=True).items()
            if (match := SENTINEL.fullmatch(name))
        }
        if not numbered:
            raise DataError(f"{tokenizer.path}: has no sentinel tokens <extra_id_0>, <extra_id_1> and so on")
        self._sentinels = [token for _, token in sorted(numbered.items())]
        self._path, self._start, self._eos, self._sizes = tokenizer.path, start, eos, sizes

    def sample(self, tokens: Ints, runs: Iterable[Ints], *, end: bool, truncated: bool = False) -> T5Sample:
        """A sample of the text `tokens`; `runs` are the positions of each span, `end` ends the encoder's text too."""
        runs = sorted(runs, key=lambda run: int(run[0]))
        if len(runs) > len(self._sentinels):
            raise DataError(
                f"{self._path}: has {len(self._sentinels)} sentinels, and a sample of data.seq_length ="
                f" {self._sizes[0]} needs {len(runs)}",
                hint="shorten data.seq_length, or hide less (data.t5.mask_probability)",
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
                f"data.t5.decoder_seq_length = {size}: a sample has {len(decoder)} tokens for the decoder",
                hint=f"{2 * sum(run.size for run in runs) + 1} holds any like it; or hide less (data.t5.mask_probability)",
            )
        return T5Sample(
            _padded(encoder, self._sizes[0], 0),
            _padded(decoder, size, 0),
            _padded(labels, size, -1),
            (np.arange(size) < len(labels)).astype(np.float32),
            np.arange(self._sizes[0]) < len(encoder),
            np.arange(size) < len(decoder),
            truncated,
        )


def _padded(tokens: list[int], size: int, fill: int) -> Ints:
    return np.array(tokens + [fill] * (size - len(tokens)), np.int64)


class MegatronT5Samples:
    """Samples of one data set of sentences, bit-identical to Megatron's.

    Raises:
        DataError: when the tokenizer lacks a special token; on the first sample, when no document can be used.
    """

    def __init__(self, part: Part, setting: Setting, wanted: int) -> None:
        config, tokenizer = setting.config, setting.tokenizer
        assert config.t5.decoder_seq_length is not None, "checked with the configuration"
        self._part, self._config, self._tokenizer = part, config, tokenizer
        self._pad = special_token(tokenizer, "[PAD]", "<pad>")
        apart = special_token(tokenizer, "[CLS]", "<s>"), special_token(tokenizer, "[SEP]", "</s>")
        self._words = WholeWords(tokenizer, apart, config.t5.mask_probability, geometric_ngram(LONGEST))
        start = special_token(tokenizer, "[BOS]", "<s>", "<bos>")
        end = special_token(tokenizer, "[EOS]", "</s>", "<eos>")
        self._corruption = Corruption(tokenizer, start, end, (config.seq_length, config.t5.decoder_seq_length))
        self._cuts = MegatronCuts(part, setting, wanted, config.seq_length - 2, 1, config.t5.short_probability)

    @cached_property
    def identity(self) -> str:
        """See `Samples`."""
        share, size = self._config.t5.mask_probability, self._config.t5.decoder_seq_length
        return f"t5 share={share} decoder={size} tokenizer={self._tokenizer.fingerprint} {self._cuts.identity}"

    @property
    def samples_per_epoch(self) -> float:
        """See `Samples`."""
        return self._cuts.samples_per_epoch

    def work(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See `Samples`."""
        return np.full(numbers.size, self._config.seq_length**2)

    def __getitem__(self, k: int, /) -> T5Sample:
        first, last, length, random = self._cuts[k]
        tokens = np.concatenate([self._part.reader.read(i) for i in range(first, last)])
        runs = self._words.draw(tokens[:length], length, random)
        found = self._corruption.sample(tokens[:length], runs, end=False, truncated=tokens.size > length)
        # Megatron takes padding for what it is by the token, wherever that comes from.
        masks = found.encoder_mask & (found.encoder_tokens != self._pad)
        return replace(found, encoder_mask=masks, decoder_mask=found.decoder_mask & (found.decoder_tokens != self._pad))


class T5Samples:
    """Samples of running text: a window of as many tokens as the encoder's room allows, with random spans hidden.

    Raises:
        DataError: when the tokenizer lacks a special token, or the part is empty.
    """

    def __init__(self, part: Part, setting: Setting, wanted: int) -> None:
        config, tokenizer = setting.config, setting.tokenizer
        self._config, self._tokenizer = config, tokenizer
        self._spans = Spans.fitting(config.seq_length, config.t5.mask_probability, config.t5.mean_span)
        room = config.t5.decoder_length(config.seq_length)
        start = special_token(tokenizer, "<pad>", "[PAD]")
        end = special_token(tokenizer, "</s>", "[EOS]", "<eos>")
        self._corruption = Corruption(tokenizer, start, end, (config.seq_length, room))
        self._windows = windows(part, setting, wanted, self._spans.tokens)

    @cached_property
    def identity(self) -> str:
        """See `Samples`."""
        spans, tokenizer = self._spans, self._tokenizer.fingerprint
        return f"t5 hidden={spans.hidden} spans={spans.count} tokenizer={tokenizer} {self._windows.identity}"

    @property
    def samples_per_epoch(self) -> float:
        """See `Samples`."""
        return self._windows.samples_per_epoch

    def work(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """See `Samples`."""
        return np.full(numbers.size, self._config.seq_length**2)

    def __getitem__(self, k: int, /) -> T5Sample:
        runs = self._spans.draw(drawn_random(self.identity, k))
        return self._corruption.sample(self._windows[k][:-1], runs, end=True)


def t5(part: Part, setting: Setting, wanted: int) -> MegatronT5Samples | T5Samples:
    """The kind `t5`, in the order of the run."""
    made = MegatronT5Samples if setting.config.sample_order == "megatron" else T5Samples
    return made(part, setting, wanted)
