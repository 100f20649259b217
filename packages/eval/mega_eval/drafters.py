"""Draft tokens for speculative decoding (arXiv:2211.17192), which one forward pass of the model verifies together.

At each position the model's own token is chosen as without a draft, by the same random number, and draft tokens are
accepted as long as they equal it. So the text of each seed is unchanged, greedy or sampled, not only its distribution.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from mega_common.errors import ConfigError, DataError
from mega_eval.engine_requests import Drafter, EngineRequest
from mega_eval.inference_engine import InferenceEngine
from mega_eval.text_stream import TextTokenizer
from mega_trainer.model.decoder import Decoder

# n-gram lookup in the text, the model's own MTP layers, no drafts, or a smaller model
DraftSource = Literal["ngrams", "mtp", "none"] | Decoder

DEFAULT_NGRAM_TEXTS = 4


class NgramDrafter:
    """Source of draft tokens for speculative decoding by n-gram lookup in the text itself.
    It looks up an earlier occurrence of a text's last n-gram and proposes the tokens that followed it, which helps in
    quotations and code.

    Args:
        texts: maximum number of texts to draft for; with more, none gets a draft. None: no maximum.
        longest: size of the longest n-gram to look up; shorter ones follow, down to two tokens.
    """

    def __init__(self, texts: int | None = None, longest: int = 4) -> None:
        self._texts, self._longest = texts, longest

    def propose_drafts(self, requests: Sequence[EngineRequest]) -> list[list[int]]:
        """Return draft tokens for each request by n-gram lookup in its prompt; none for more requests than configured."""
        if self._texts is not None and len(requests) > self._texts:
            return [[] for _ in requests]
        return [self._find_continuation(request.prompt, request.limits.max_new_tokens) for request in requests]

    def _find_continuation(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that followed the latest earlier occurrence of the longest matching n-gram."""
        data = array("q", tokens)
        text, size = data.tobytes(), data.itemsize
        for n in range(min(self._longest, len(tokens) - 1), 1, -1):
            stop = len(text) - size  # at least one token follows the match
            while (at := text.rfind(text[-n * size :], 0, stop)) >= 0:
                if at % size == 0:
                    start = at // size + n
                    return data[start : start + count].tolist()
                stop = at + n * size - 1  # not at the start of a token: search before it
        return []


class ModelDrafter:
    """Source of draft tokens for speculative decoding that generates them with a smaller model of the same vocabulary.

    Args:
        engine: engine of the smaller model, for the exclusive use of this drafter.
    """

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    def propose_drafts(self, requests: Sequence[EngineRequest]) -> list[list[int]]:
        """Return the draft tokens with which the smaller model continues each request.
        Its engine reuses the keys and values of earlier steps through its paged KV cache.

        A row with images, or longer than the smaller model supports, gets no draft.
        """
        drafts: list[list[int]] = [[] for _ in requests]
        by_number: dict[int, list[int]] = {}
        for request, draft in zip(requests, drafts, strict=True):
            with suppress(DataError):
                if request.images is None:
                    by_number[self._engine.add_request(request)] = draft
        try:
            while self._engine.num_waiting or self._engine.num_running:
                for event in self._engine.step(isolate=True):
                    by_number[event.request] += event.tokens
        finally:
            if self._engine.num_running:  # after a failed step
                self._engine.drop_all_requests()
        return drafts


def make_drafter(
    draft: DraftSource | None, model: Decoder, tokenizer: TextTokenizer, cache_tokens: int, batch_size: int
) -> Drafter | Literal["mtp"] | None:
    """Return the drafter that `draft` names (None: the default of the device): an object, `mtp`, or None for no drafts.

    `draft` names the source: the result is the string `mtp`, since the engine builds that one itself, or a draft model
    in an engine of its own with `cache_tokens` and `batch_size`.

    Raises:
        ConfigError: when a draft model has another vocabulary.
    """
    if draft is None:
        return choose_default_drafter(model)
    if not isinstance(draft, Decoder):
        named: dict[str, Drafter | Literal["mtp"]] = {"ngrams": NgramDrafter(), "mtp": "mtp"}
        return named.get(draft)
    if draft.config.vocab_size != model.config.vocab_size:
        raise ConfigError(
            f"the draft model must have the model's vocabulary size {model.config.vocab_size}, "
            f"but has {draft.config.vocab_size}",
            hint="use a draft model with the model's own tokenizer",
        )
    return ModelDrafter(InferenceEngine(draft, tokenizer, cache_tokens=cache_tokens, batch_size=batch_size))


def choose_default_drafter(model: Decoder) -> Drafter | None:
    """Return an n-gram drafter for an fp32 or fp64 model on a CPU, else None.
    On a CPU, verifying the drafts of a few texts costs little.

    Half precision has none: its logits often tie, and the rounding of larger GEMMs would change which token wins.
    """
    return NgramDrafter(DEFAULT_NGRAM_TEXTS) if model.device.type == "cpu" and model.dtype.itemsize >= 4 else None
