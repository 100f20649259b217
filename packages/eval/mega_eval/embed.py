"""Vectors of texts, for retrieval: the last hidden states of a text's tokens as one.

Legend: N texts, B rows of a batch, S tokens of its longest, D model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mega_common.errors import ConfigError, DataError
from mega_common.log import ProgressBar, logger
from mega_eval.encoder_decoder import padded
from mega_trainer.batch import Outline
from mega_trainer.model.decoder import Decoder

Pooling = Literal["mean", "cls"]
BATCH_TOKENS = 8192


def embed(
    model: Decoder,
    texts: Sequence[Sequence[int]],
    *,
    pooling: Pooling = "mean",
    normalize: bool = False,
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    advance: Callable[[int], None] | None = None,
) -> npt.NDArray[np.float32]:
    """A vector for each text, fp32 [N, D], in the order given. It does not depend on the others but for rounding.

    Args:
        model: in eval mode.
        texts: token ids, those that the tokenizer puts around a text included.
        pooling: the mean over all tokens of a text, or the first token's.
        normalize: to length 1.
        max_length: tokens after which a text is cut; default: those that the model was made for.
        batch_tokens: of texts of about one length that are computed together, padding included.
        advance: is told of texts that are done; default: a bar of its own.

    Raises:
        DataError: when a text has no tokens, or one that the model does not know.
        ConfigError: for `cls` of a decoder.
    """
    if pooling == "cls" and model.config.causal:
        raise ConfigError("the first token of a decoder sees no other", hint="--pooling mean")
    most = min(max_length or model.config.max_position, model.config.max_position)
    for number, text in enumerate(texts):
        if not len(text):
            raise DataError(f"text {number + 1} has no tokens")
        if max(text) >= model.config.vocab_size:
            raise DataError(
                f"text {number + 1} has the token {max(text)}, and the model's vocabulary is {model.config.vocab_size}",
                hint="the tokenizer is that of another model",
            )
    if cut := sum(len(text) > most for text in texts):
        logger.warning("%d of %d texts are cut to %d tokens", cut, len(texts), most)
    out = np.empty((len(texts), model.config.hidden_size), np.float32)
    with contextlib.ExitStack() as stack:
        tell = advance or stack.enter_context(ProgressBar("embedding", total=len(texts), unit="texts")).advance
        for rows in _batches([min(len(text), most) for text in texts], batch_tokens):
            found = _pooled(model, [texts[row][:most] for row in rows], pooling)
            out[rows] = torch.nn.functional.normalize(found, dim=-1).numpy() if normalize else found.numpy()
            tell(len(rows))
    return out


def _batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Numbers of texts, the longest first, as many as fill `most` tokens when padded."""
    order, start = sorted(range(len(lengths)), key=lambda number: -lengths[number]), 0
    while start < len(order):
        count = max(1, most // lengths[order[start]])
        yield order[start : start + count]
        start += count


@torch.inference_mode()
def _pooled(model: Decoder, texts: Sequence[Sequence[int]], pooling: Pooling) -> Tensor:
    """fp32 [B, D] on the host. Padding is a document by itself, which no text sees."""
    tokens, lengths = padded(texts)
    places = np.arange(tokens.shape[1])
    ids, positions = (torch.from_numpy(each).to(model.device) for each in (tokens, places[None]))
    outline = Outline.padded(lengths, places.size)
    hidden = model.head.norm(model(model.embed(ids, positions), model.context(positions, outline=outline))).float()
    if pooling == "cls":
        first: Tensor = hidden[:, 0].cpu()
        return first
    there = torch.from_numpy(places < lengths[:, None]).to(model.device)
    mean: Tensor = ((hidden * there.unsqueeze(-1)).sum(1) / there.sum(1, keepdim=True)).cpu()
    return mean
