"""Configuration sections of denoising data: `data.fim`, `data.bert` and `data.t5`, and T5's span corruption."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, PositiveInt

from mega_common.strict_config import StrictConfig

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SpanCorruption:
    """Sizes of T5 span corruption for a text of `tokens` tokens: `hidden` of them are masked, in `count` spans."""

    tokens: int
    hidden: int
    count: int

    @classmethod
    def from_token_count(cls, tokens: int, share: float, mean: float) -> SpanCorruption:
        """Return the span corruption of a text of `tokens` tokens (at least 2), with the share `share` masked in spans
        of `mean` tokens on average.
        """
        hidden = min(max(round(tokens * share), 1), tokens - 1)
        return cls(tokens, hidden, min(max(round(hidden / mean), 1), tokens - hidden))

    @classmethod
    def from_encoder_length(cls, length: int, share: float, mean: float) -> SpanCorruption:
        """Return the span corruption of the longest text whose encoder input has at most `length` tokens, with the
        share `share` masked in spans of `mean` tokens on average.

        The encoder input includes the sentinels and the end token.
        """
        spans = cls.from_token_count(2, share, mean)
        while (longer := cls.from_token_count(spans.tokens + 1, share, mean)).num_encoder_tokens <= length:
            spans = longer
        return spans

    @property
    def num_encoder_tokens(self) -> int:
        """Number of encoder tokens: unmasked tokens, one sentinel per span and the end token."""
        return self.tokens - self.hidden + self.count + 1

    def draw_spans(self, random: np.random.RandomState) -> list[Ints]:
        """Draw the token positions of each masked span: unmasked text and spans alternate, text first, all partitions
        equally likely.
        """
        hidden, text = (
            _draw_partition(self.hidden, self.count, random),
            _draw_partition(self.tokens - self.hidden, self.count, random),
        )
        ends = np.cumsum(text + hidden)
        return [np.arange(end - size, end) for end, size in zip(ends.tolist(), hidden.tolist(), strict=True)]


def _draw_partition(total: int, parts: int, random: np.random.RandomState) -> Ints:
    """Draw sizes of `parts` parts of `total`, each at least one: int64 [parts]."""
    cuts = np.sort(random.permutation(total - 1)[: parts - 1]) + 1
    return np.diff(cuts, prepend=0, append=total)


Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, lt=1)]

ROOM = (
    8  # extra positions of a rearranged document: three special tokens, and the tokens added by two cuts within words
)


class FimConfig(StrictConfig):
    """Settings of fill-in-the-middle (Bavarian et al., 2022): a document is split into prefix, middle and suffix, and
    the middle is moved to the end.
    """

    rate: Probability = Field(0.5, description="share of the documents that are rearranged")
    spm_rate: Probability = Field(0.5, description="share of the rearranged ones with the suffix first (SPM); else PSM")
    cut: Literal["character", "token"] = Field("character", description="cut between characters or between tokens")
    level: Literal["context", "document"] = Field(
        "context",
        description="context: rearrange the part of a document in a window; document: whole documents, before packing",
    )
    tokens: Annotated[list[str], Field(min_length=3, max_length=3)] | None = Field(
        None, description="tokens before prefix, middle and suffix; default: common names that the tokenizer has"
    )


class BertConfig(StrictConfig):
    """Settings of BERT samples: masked words and sentence order prediction; dataset kind `masked` uses only
    `mask_probability`.
    """

    mask_probability: Share = Field(0.15, description="share of the tokens that are predicted")
    short_probability: Probability = Field(0.1, description="share of the samples that are shorter than seq_length")
    sentence_pairs: bool = Field(True, description="two segments, swapped half the time; the model predicts the order")


class T5Config(StrictConfig):
    """Settings of T5 samples: span corruption and decoder length."""

    mask_probability: Share = Field(0.15, description="share of the tokens that are masked in the encoder's input")
    mean_span: float = Field(3.0, ge=1, description="mean number of tokens of a span; not used by order megatron")
    short_probability: Probability = Field(0.1, description="share of shorter samples in order megatron")
    decoder_seq_length: PositiveInt | None = Field(
        None, description="tokens of the decoder; default: follows from seq_length, except with order megatron"
    )

    def get_decoder_length(self, seq_length: int) -> int:
        """Return the number of decoder tokens of a T5 sample with `seq_length` encoder tokens."""
        if self.decoder_seq_length is not None:
            return self.decoder_seq_length
        spans = SpanCorruption.from_encoder_length(seq_length, self.mask_probability, self.mean_span)
        return spans.hidden + spans.count + 1
