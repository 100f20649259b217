"""Text embeddings for retrieval: one vector pooled from the last hidden states of a text's tokens.

Legend: N texts, B rows of a batch, S tokens of its longest, D model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer as Backend
from torch import Tensor

from mega_common.errors import ConfigError, DataError
from mega_common.object_store import Location
from mega_common.progress_logging import ProgressBar, logger
from mega_data.tokenizer import Tokenizer
from mega_eval.encoder_losses import pad_sequences
from mega_eval.model_loading import load_inference_model, load_tokenizer
from mega_eval.sentence_transformers_folder import (
    PoolingMode,
    SentenceTransformersSettings,
    log_sentence_transformers_settings,
    normalize_vectors,
    pool_hidden_states,
    read_sentence_transformers_folder,
)
from mega_trainer.data.micro_batch import DocumentBounds
from mega_trainer.model.decoder import Decoder

BATCH_TOKENS = 8192


@dataclass(frozen=True)
class TextEmbedder:
    """Embedding model with its tokenizer and sentence-transformers settings, which turns texts into vectors.

    Attributes:
        model: encoder or decoder in eval mode.
        tokenizer: tokenizer of the model.
        settings: pooling, projection, prompts and length; by default the mean over all tokens.
    """

    model: Decoder
    tokenizer: Tokenizer
    settings: SentenceTransformersSettings

    @property
    def max_length(self) -> int:
        """Maximum number of tokens that the embedder reads of a text, special tokens included."""
        return min(self.settings.max_length or self.model.config.max_position, self.model.config.max_position)

    def encode_texts(self, texts: Sequence[str], prompt: str = "") -> list[list[int]]:
        """Return the token ids of each text to embed, after `prompt` and truncated to `max_length`.
        The text is truncated as the tokenizer truncates, which keeps special tokens at the end.
        """
        found = [self.encode_untruncated(text, prompt) for text in texts]
        long = [row for row, tokens in enumerate(found) if len(tokens) > self.max_length]
        if long:
            logger.warning("%d of %d texts are cut to %d tokens", len(long), len(texts), self.max_length)
            for row in long:
                found[row] = self._truncating_backend.encode(self._apply_case(prompt + texts[row])).ids
        return found

    def encode_untruncated(self, text: str, prompt: str = "") -> list[int]:
        """Return the token ids of `prompt` + a text of any length, special tokens included."""
        return self.tokenizer.encode(self._apply_case(prompt + text), add_special_tokens=True)

    @cached_property
    def _truncating_backend(self) -> Backend:
        """Tokenizer backend with truncation to `max_length` enabled."""
        backend = Backend.from_str(self.tokenizer.backend.to_str())
        backend.enable_truncation(self.max_length)
        return backend

    def embed_texts(
        self,
        texts: Sequence[str],
        *,
        prompt: str = "",
        batch_tokens: int = BATCH_TOKENS,
        advance: Callable[[int], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the embedding of each text, fp32 [N, P]; zeros for a text without tokens.
        `prompt` is put in front of each.
        """
        return self.embed_token_ids(
            self.encode_texts(texts, prompt), prompt=prompt, batch_tokens=batch_tokens, advance=advance
        )

    def embed_token_ids(
        self,
        tokens: Sequence[Sequence[int]],
        *,
        prompt: str = "",
        batch_tokens: int = BATCH_TOKENS,
        advance: Callable[[int], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the embedding of each text, fp32 [N, P], from its token ids; zeros for a text without tokens.
        The token ids are returned by `encode_texts` for the same `prompt`.
        """
        rows = [row for row, text in enumerate(tokens) if text]
        if advance is not None:
            advance(len(tokens) - len(rows))
        vectors = compute_embeddings(
            self.model,
            [tokens[row] for row in rows],
            pooling=self.settings.modes,
            layers=self.settings.layers,
            normalize=self.settings.normalized,
            skipped=self._count_prompt_tokens(prompt),
            batch_tokens=batch_tokens,
            advance=advance,
        )
        found = np.zeros((len(tokens), vectors.shape[1]), np.float32)
        found[rows] = vectors
        return found

    def _apply_case(self, text: str) -> str:
        """Return the text, in lower case if the settings say so."""
        return text.lower() if self.settings.lower_case else text

    def _count_prompt_tokens(self, prompt: str) -> int:
        """Count the tokens of a prompt that are not pooled, special tokens before it included."""
        if not prompt or self.settings.include_prompt:
            return 0
        tokens = self.tokenizer.encode(self._apply_case(prompt), add_special_tokens=True)
        special = {id for id, token in self.tokenizer.backend.get_added_tokens_decoder().items() if token.special}
        return len(tokens) - (tokens[-1] in special)


def load_text_embedder(
    path: str | Location,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    tokenizer: Path | None = None,
    modes: Sequence[PoolingMode] | None = None,
    normalize: bool | None = None,
) -> TextEmbedder:
    """Load a model folder for text embedding.
    Pooling `modes` and `normalize` override the settings of a sentence-transformers folder.

    Raises:
        CheckpointError: when there is no model, or a declared module or setting is not supported.
        ConfigError: for a model that is neither an encoder nor a decoder.
    """
    found = read_sentence_transformers_folder(Path(str(path)))
    settings = found or SentenceTransformersSettings(Path(str(path)))
    if modes is not None and tuple(modes) != settings.modes:
        if settings.layers:
            logger.warning("%s: another pooling than the folder's; its modules after pooling are left out", path)
        settings = replace(settings, modes=tuple(modes), layers=(), normalized=False)
    if normalize is not None and normalize != settings.normalized:
        layers = (
            settings.layers if normalize else tuple(each for each in settings.layers if each is not normalize_vectors)
        )
        settings = replace(settings, normalized=normalize, layers=layers)
    if found is not None:
        log_sentence_transformers_settings(settings)
    folder = str(settings.model) if found else path
    model = load_inference_model(folder, dtype=dtype, device=device, kinds=("decoder", "encoder"))
    return TextEmbedder(model, Tokenizer(tokenizer) if tokenizer else load_tokenizer(folder), settings)


def compute_embeddings(
    model: Decoder,
    texts: Sequence[Sequence[int]],
    *,
    pooling: PoolingMode | Sequence[PoolingMode] = "mean",
    layers: Sequence[Callable[[Tensor], Tensor]] = (),
    normalize: bool = False,
    skipped: int = 0,
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    advance: Callable[[int], None] | None = None,
) -> npt.NDArray[np.float32]:
    """Return the embedding of each text of token ids, fp32 [N, P], in order; longer texts are cut to `max_length`.
    An embedding does not depend on the other texts.

    Args:
        model: encoder or decoder in eval mode.
        texts: token ids, special tokens included.
        pooling: mode that turns a text's hidden states [S, D] into one vector [P]; vectors of several modes are joined.
        layers: functions of pooled vectors, fp32 [B, P] to fp32 [B, P'], applied in order.
        normalize: scale the vectors to length 1 at the end.
        skipped: number of tokens at the start of each text that are not pooled, such as those of a prompt.
        max_length: maximum number of tokens; longer texts are cut. Default: the positions of the model.
        batch_tokens: maximum number of tokens of a batch of texts of similar length, padding included.
        advance: called with the number of texts that are done; default: a progress bar.

    Raises:
        DataError: when a text has no tokens, or a token outside the vocabulary.
        ConfigError: for `cls` pooling of a decoder.
    """
    modes = (pooling,) if isinstance(pooling, str) else tuple(pooling)
    check_pooling_modes(model, modes)
    most = min(max_length or model.config.max_position, model.config.max_position)
    for number, text in enumerate(texts):
        if not len(text):
            raise DataError(f"text {number + 1} has no tokens")
        if max(text) >= model.config.vocab_size:
            raise DataError(
                f"token {max(text)} of text {number + 1} is outside the model's vocabulary of {model.config.vocab_size}",
                hint="use the tokenizer of this model",
            )
    if cut := sum(len(text) > most for text in texts):
        logger.warning("%d of %d texts are cut to %d tokens", cut, len(texts), most)
    out: npt.NDArray[np.float32] | None = None
    with contextlib.ExitStack() as stack:
        report = advance or stack.enter_context(ProgressBar("embedding", total=len(texts), unit="texts")).advance
        for rows in _length_sorted_batches([min(len(text), most) for text in texts], batch_tokens):
            vectors = _pool_batch(model, [texts[row][:most] for row in rows], modes, skipped)
            for layer in layers:
                vectors = layer(vectors)
            vectors = torch.nn.functional.normalize(vectors, dim=-1) if normalize else vectors
            if out is None:
                out = np.empty((len(texts), vectors.shape[1]), np.float32)
            out[rows] = vectors.numpy()
            report(len(rows))
    return np.empty((0, model.config.hidden_size), np.float32) if out is None else out


def check_pooling_modes(model: Decoder, modes: Sequence[PoolingMode]) -> None:
    """Raise ConfigError for `cls` pooling of a decoder, whose first token does not attend to the others.

    Raises:
        ConfigError: naming the supported modes.
    """
    if "cls" in modes and model.config.causal:
        raise ConfigError(
            "--pooling cls requires an encoder: the first token of a decoder does not attend to the others",
            hint="use --pooling mean or lasttoken",
        )


def _length_sorted_batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield batches of text indices, longest texts first; each holds as many texts as fit in `most` padded tokens."""
    order, start = sorted(range(len(lengths)), key=lambda number: -lengths[number]), 0
    while start < len(order):
        count = max(1, most // lengths[order[start]])
        yield order[start : start + count]
        start += count


@torch.inference_mode()
def _pool_batch(model: Decoder, texts: Sequence[Sequence[int]], modes: Sequence[PoolingMode], skipped: int) -> Tensor:
    """Return pooled vectors, fp32 [B, P] on the host; padding is a separate document that no text attends to."""
    tokens, lengths = pad_sequences(texts)
    columns = np.arange(tokens.shape[1])
    ids, positions = (torch.from_numpy(each).to(model.device) for each in (tokens, columns[None]))
    bounds = DocumentBounds.from_padded_rows(lengths, columns.size)
    context = model.make_forward_context(positions, tokens=ids, sequence_bounds=bounds)
    hidden = model.head.norm(model(model.embed_inputs(ids, positions), context)).float()
    attention_mask = torch.from_numpy(columns < lengths[:, None]).to(model.device)
    return pool_hidden_states(hidden, attention_mask, modes, skipped).cpu()
