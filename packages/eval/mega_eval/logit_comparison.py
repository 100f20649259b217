"""Check that two folders hold the same model, in whatever format, by their logits on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mega_ckpt.source import WeightSource, open_weight_source
from mega_common.errors import CheckpointError
from mega_common.object_store import Location
from mega_data.token_files.indexed_reader import IndexedReader
from mega_eval.dataset_scores import check_token_ids_in_vocabulary
from mega_eval.encoder_losses import compute_decoder_states
from mega_eval.model_loading import ModelKind, load_inference_model, load_tokenizer
from mega_trainer.config.extensions import load_extensions
from mega_trainer.model.decoder import Decoder

TOKENS = 256
TEXT = """The quick brown fox jumps over the lazy dog. In 1843 Ada Lovelace wrote the first program, for a machine that
was never built; it computes the numbers of Bernoulli. Zürich, Kraków, 東京, Москва. 3.14159 * 2 = 6.28318

def factorial(n: int) -> int:
    return 1 if n < 2 else n * factorial(n - 1)
"""
# Largest difference as a share of the largest logit (at least 1); for half precision about ten rounding errors.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class LogitComparison:
    """Result of `compare_logits`: the largest difference between the logits of two models, and its tolerance.

    Attributes:
        difference: largest absolute difference of a logit.
        tolerance: largest difference that counts as equal.
        tokens: number of tokens compared.
        token_source: description of the tokens.
    """

    difference: float
    tolerance: float
    tokens: int
    token_source: str

    def __str__(self) -> str:
        return (
            f"logits on {self.tokens} tokens of {self.token_source}: largest difference {self.difference:.3g}"
            f" (tolerance {self.tolerance:.3g})"
        )


def compare_logits(
    one: str | Location, other: str | Location, data: Path | None = None, *, extensions: Sequence[str] = ()
) -> LogitComparison:
    """Compare the logits of two models on the same tokens, and raise CheckpointError if they differ.
    Differences by rounding are allowed. The models run one after the other, so memory for one suffices.

    Both models compute in fp32 (fp64 if both are stored in fp64), so equal weights give equal logits; weights that were cast
    may differ by the rounding of the narrower dtype.

    Args:
        one: folder or URL of a model; its tokenizer, if any, encodes the text to compare on.
        other: folder or URL of the second model.
        data: prefix of a token data set to take the first tokens from instead.
        extensions: extensions with the code of the models' own layers or families.

    Raises:
        CheckpointError: when a logit differs by more than the tolerance, or is not a number in one model only.
        DataError: when `data` cannot be used, or has tokens outside the vocabulary.
    """
    families = load_extensions(extensions).families
    source = open_weight_source(one, families=families)
    tokens, what = _choose_tokens(one, source, data, extensions)
    stored = _coarsest_dtype(source), _coarsest_dtype(open_weight_source(other, families=families))
    width = torch.float64 if stored == (torch.float64, torch.float64) else torch.float32
    rounded = width if stored[0] == stored[1] else max(stored, key=_roundoff)
    left, right = (_compute_outputs(path, tokens, width, extensions) for path in (one, other))
    difference = (left - right).abs()
    difference[left.isnan() & right.isnan()] = 0
    found = LogitComparison(
        difference=float(difference.nan_to_num(nan=math.inf).max()),
        tolerance=TOLERANCES.get(rounded, 2 * _roundoff(rounded)) * max(1.0, float(left.nan_to_num().abs().max())),
        tokens=len(tokens),
        token_source=what,
    )
    if found.difference > found.tolerance:
        raise CheckpointError(
            f"{one} and {other} are different models: {found}",
            hint="compare their tensors, and, if these are equal, their configurations",
        )
    return found


def _choose_tokens(
    path: str | Location, source: WeightSource, data: Path | None, extensions: Sequence[str]
) -> tuple[list[int], str]:
    """Return the token ids to compare on, and a description of their source."""
    count = min(TOKENS, source.model.max_position)
    if data is not None:
        check_token_ids_in_vocabulary(data, source.model.vocab_size)
        return [int(token) for token in IndexedReader(data).tokens[:count]], str(data)
    if "tokenizer.json" in source.asset_files():
        ids = load_tokenizer(path, extensions=extensions).encode(TEXT)[:count]
        if max(ids, default=source.model.vocab_size) < source.model.vocab_size:
            return ids, "text"
    generator = torch.Generator().manual_seed(0)
    return torch.randint(source.model.vocab_size, (count,), generator=generator).tolist(), "random numbers"


@torch.inference_mode()
def _compute_outputs(path: str | Location, tokens: list[int], dtype: torch.dtype, extensions: Sequence[str]) -> Tensor:
    """Return all outputs of a model for the tokens, as one vector on the host.

    These are the logits of a decoder or an encoder-decoder (which reads and predicts the same tokens), the scores of a reward
    model, or the last hidden states of an encoder and the outputs of its heads.
    """
    kinds: tuple[ModelKind, ...] = ("decoder", "encoder", "encoder-decoder", "reward model")
    model = load_inference_model(path, dtype=dtype, kinds=kinds, extensions=extensions)
    ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    if model.config.encoder is not None:
        return model.compute_logits(
            compute_decoder_states(model, [tokens], [[model.config.encoder.start_token, *tokens[:-1]]])
        ).flatten()
    x = model(model.embed_inputs(ids, positions), model.make_forward_context(positions, tokens=ids))
    if model.config.causal:
        return model.compute_logits(x).flatten()
    return torch.cat([output.flatten() for output in _encoder_outputs(model, x)])


def _encoder_outputs(model: Decoder, x: Tensor) -> Iterator[Tensor]:
    """Yield the hidden states [1, S, D] of an encoder's residual stream, and the outputs of the heads that it has."""
    states, pooler = model.head.norm(x), model.head.pooler
    yield states
    if model.config.masked_lm is not None:
        yield model.compute_logits(x)
    if pooler is not None:
        yield pooler.segment_order_logits(states) if model.config.sentence_pairs else pooler(states)


def _coarsest_dtype(source: WeightSource) -> torch.dtype:
    """Return the stored dtype with the largest rounding error."""
    return max((source.tensor_dtype(name) for name in source.tensor_names()), key=_roundoff)


def _roundoff(dtype: torch.dtype) -> float:
    """Return the machine epsilon of a dtype."""
    return torch.finfo(dtype).eps
