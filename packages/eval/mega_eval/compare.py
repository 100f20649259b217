"""Do two folders hold the same model? Their logits on the same tokens tell, whatever the formats are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mega_ckpt.source import Source, open_source
from mega_common.errors import CheckpointError
from mega_common.remote import Place
from mega_data.files.indexed import IndexedReader
from mega_eval.encoder_decoder import hidden
from mega_eval.load import load_model, load_tokenizer
from mega_eval.perplexity import check_vocabulary
from mega_trainer.model.decoder import Decoder

TOKENS = 256
TEXT = """The quick brown fox jumps over the lazy dog. In 1843 Ada Lovelace wrote the first program, for a machine that
was never built; it computes the numbers of Bernoulli. Zürich, Kraków, 東京, Москва. 3.14159 * 2 = 6.28318

def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)
"""
# Largest difference, as a share of the largest logit (1 at least): what is the same, and about ten roundings of what was cast.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Comparison:
    """Logits of two models.

    Attributes:
        difference: the largest of any logit.
        tolerance: what it may be.
        tokens: how many were looked at.
        what: they were.
    """

    difference: float
    tolerance: float
    tokens: int
    what: str

    def __str__(self) -> str:
        return (
            f"logits on {self.tokens} tokens of {self.what}: largest difference {self.difference:.3g}"
            f" (tolerance {self.tolerance:.3g})"
        )


def compare_logits(one: str | Place, other: str | Place, data: Path | None = None) -> Comparison:
    """Run both models on the same tokens, one after the other, so that memory for one suffices.

    Weights that are the same on both sides are computed with in fp32 (fp64 where they are that), and so must give the
    same; weights that were cast may differ as much as the narrower dtype explains.

    Args:
        one: a folder or URL of a model; its tokenizer, where it has one, makes the tokens.
        other: the one to compare with it.
        data: PREFIX of a token data set whose first tokens are taken instead.

    Raises:
        CheckpointError: when a logit differs by more than the tolerance, or is not a number on one side only.
        DataError: when `data` cannot be used, or is of another vocabulary.
    """
    source = open_source(one)
    tokens, what = _tokens(one, source, data)
    stored = _coarsest(source), _coarsest(open_source(other))
    width = torch.float64 if stored == (torch.float64, torch.float64) else torch.float32
    rounded = width if stored[0] == stored[1] else max(stored, key=_roundoff)
    left, right = (_logits(path, tokens, width) for path in (one, other))
    apart = (left - right).abs()
    apart[left.isnan() & right.isnan()] = 0
    found = Comparison(
        difference=float(apart.nan_to_num(nan=math.inf).max()),
        tolerance=TOLERANCES.get(rounded, 2 * _roundoff(rounded)) * max(1.0, float(left.nan_to_num().abs().max())),
        tokens=len(tokens),
        what=what,
    )
    if found.difference > found.tolerance:
        raise CheckpointError(
            f"{one}: what is compared with it is not the same model: {found}",
            hint="where the tensors are the same, a setting is not",
        )
    return found


def _tokens(path: str | Place, source: Source, data: Path | None) -> tuple[list[int], str]:
    """Token ids, and what they are."""
    count = min(TOKENS, source.model.max_position)
    if data is not None:
        check_vocabulary(data, source.model.vocab_size)
        return [int(token) for token in IndexedReader(data).tokens[:count]], str(data)
    if "tokenizer.json" in source.assets():
        ids = load_tokenizer(path).encode(TEXT)[:count]
        if max(ids, default=source.model.vocab_size) < source.model.vocab_size:
            return ids, "text"
    generator = torch.Generator().manual_seed(0)
    return torch.randint(source.model.vocab_size, (count,), generator=generator).tolist(), "random numbers"


@torch.inference_mode()
def _logits(path: str | Place, tokens: list[int], dtype: torch.dtype) -> Tensor:
    """Return all that a model computes of the tokens, as one vector on the host.

    That is the logits of a decoder and of an encoder-decoder, which reads the tokens and predicts them; the scores of a reward
    model; the last hidden states of an encoder, and what its heads make of them.
    """
    model = load_model(path, dtype=dtype, kinds=("decoder", "encoder", "encoder-decoder", "reward model"))
    ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    if model.config.encoder is not None:
        return model.logits(hidden(model, [tokens], [[model.config.encoder.start_token, *tokens[:-1]]])).flatten()
    x = model(model.embed(ids, positions), model.context(positions))
    if model.config.causal:
        return model.logits(x).flatten()
    return torch.cat([output.flatten() for output in _encoder_outputs(model, x)])


def _encoder_outputs(model: Decoder, x: Tensor) -> Iterator[Tensor]:
    """Yield the hidden states [1, S, D] of an encoder's residual stream, and the outputs of the heads that it has."""
    states, pooler = model.head.norm(x), model.head.pooler
    yield states
    if model.config.masked_lm is not None:
        yield model.logits(x)
    if pooler is not None:
        yield pooler.logits(states) if model.config.sentence_pairs else pooler(states)


def _coarsest(source: Source) -> torch.dtype:
    """The stored dtype that rounds most."""
    return max((source.dtype(name) for name in source.keys()), key=_roundoff)  # noqa: SIM118


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
