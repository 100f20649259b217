"""What the kinds of data that hide a part of the text are told: the sections `data.fim`, `data.bert` and `data.t5`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from mega_common.config import Config
from mega_data.spans import Spans

Probability = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, lt=1)]

ROOM = (
    8  # positions that a document may take more once it is rearranged: three tokens, and what two cuts within words add
)


class FimConfig(Config):
    """Fill in the middle (Bavarian et al., 2022): a piece of a document is cut in prefix, middle and suffix."""

    rate: Probability = Field(0.5, description="share of the documents' pieces that are rearranged")
    spm_rate: Probability = Field(0.5, description="share of those with the suffix first; the others have the prefix")
    cut: Literal["character", "token"] = Field("character", description="between what the middle is cut out")
    level: Literal["context", "document"] = Field(
        "context",
        description="context: what a window of running text has of each document; document: whole ones, before they are packed",
    )
    tokens: Annotated[list[str], Field(min_length=3, max_length=3)] | None = Field(
        None, description="the tokens before prefix, middle and suffix; default: those usual names the tokenizer has"
    )


class BertConfig(Config):
    """BERT's masked words and order of sentences; the kind `masked` goes by `mask_probability` alone."""

    mask_probability: Share = Field(0.15, description="share of the tokens that are to be guessed")
    short_probability: Probability = Field(0.1, description="share of the samples that are shorter than seq_length")
    sentence_pairs: bool = Field(True, description="two segments, swapped half the time, which the model is to tell")


class T5Config(Config):
    """T5's corruption of spans."""

    mask_probability: Share = Field(0.15, description="share of the tokens that leave the encoder's input")
    mean_span: float = Field(3.0, ge=1, description="mean tokens of a span, but in order megatron")
    short_probability: Probability = Field(0.1, description="share of shorter samples in order megatron")
    decoder_seq_length: PositiveInt | None = Field(
        None, description="tokens the decoder sees at once; default, but in order megatron: what seq_length brings"
    )

    def decoder_length(self, seq_length: int) -> int:
        """Tokens of the decoder beside `seq_length` of the encoder."""
        if self.decoder_seq_length is not None:
            return self.decoder_seq_length
        spans = Spans.fitting(seq_length, self.mask_probability, self.mean_span)
        return spans.hidden + spans.count + 1
