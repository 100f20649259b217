"""Model interface of EleutherAI's lm-evaluation-harness for mega models.

Requests are encoded, truncated and windowed as in the harness's own `hf` model, so that scores agree sample by sample.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text

from mega_common.errors import DataError
from mega_common.progress_logging import ProgressBar
from mega_data.chat.chat_records import Conversation
from mega_data.chat.chat_template import ChatTemplate
from mega_eval.multi_rank_inference import ModelReplicas
from mega_eval.sampling import Sampling
from mega_eval.score import ContextContinuation, split_into_windows
from mega_eval.text_stream import GenerationLimits

NEW_TOKENS = 256  # default of tasks without max_gen_toks, as in the harness
DRAWN = {"temperature", "top_p", "top_k", "min_p"}  # settings without effect in greedy decoding


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Model interface of the lm-evaluation-harness (class LM) for a model loaded by mega.

    Args:
        replicas: copies of the model.
        ends: tokens that end a text.
        template: chat template, if any.
        max_length: maximum number of tokens of an input; longer ones lose their start.

    Raises:
        DataError: when the tokenizer has no end-of-text token.
    """

    def __init__(
        self, replicas: ModelReplicas, ends: frozenset[int], template: ChatTemplate | None, max_length: int
    ) -> None:
        super().__init__()
        self.replicas, self.ends, self.template, self.max_length = replicas, ends, template, max_length
        self.text = replicas.prompts
        self.has_encoder = replicas.model.config.encoder is not None
        self.backend = "seq2seq" if self.has_encoder else "causal"  # selects how the harness encodes pairs
        if self.text.tokenizer.eos_id is None:
            raise DataError(
                f"{self.text.tokenizer.path}: tasks require an end-of-text token, and the tokenizer has none",
                hint='set "eos_token" in tokenizer_config.json',
            )

    @property
    def eot_token_id(self) -> int | None:
        """Id of the token that ends a text."""
        return self.text.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int | None:
        """Id of the token that precedes a text without context."""
        return self.text.prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        """Fingerprint of the tokenizer, which the lm-evaluation-harness uses as its name in caches of encoded requests."""
        return self.text.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the token ids of a text, with the special tokens of the tokenizer's template unless
        `add_special_tokens` is False.
        """
        return self.text.encode(string, add_special_tokens=add_special_tokens is not False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the fingerprint of the model's chat template, for the harness to record; None if there is no template
        or `chat_template` is False.
        """
        return self.template.fingerprint if self.template and chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt text that the model's chat template renders for `chat_history`; a template that refuses
        system messages is retried without them.
        """
        assert self.template is not None
        try:
            return self.template.render_prompt(
                _make_conversation(chat_history), add_generation_prompt=add_generation_prompt
            )
        except DataError:
            rest = [message for message in chat_history if message["role"] != "system"]
            if len(rest) == len(chat_history):
                raise
            return self.template.render_prompt(_make_conversation(rest), add_generation_prompt=add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would produce it."""
        pairs = [self._truncate_pair(context, continuation) for _, context, continuation in requests]
        answers: dict[int, tuple[float, bool]] = {}
        with ProgressBar("scoring", total=len(pairs), unit="continuations") as bar:
            for number, found in self.replicas.score_pairs(pairs):
                answers[number] = found.logprob, found.greedy
                self.cache_hook.add_partial("loglikelihood", requests[number][0], answers[number])
                bar.advance(1)
        return [answers[number] for number in range(len(pairs))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of the whole text of each request, of any length, as the sum over windows."""
        texts = [
            split_into_windows(self.tok_encode(request.args[0]), self.prefix_token_id or 0, self.max_length)
            for request in requests
        ]
        owners = [owner for owner, pairs in enumerate(texts) for _ in pairs]
        parts: list[dict[int, float]] = [{} for _ in texts]
        with ProgressBar("scoring", total=len(owners), unit="windows") as bar:
            for number, found in self.replicas.score_pairs([pair for pairs in texts for pair in pairs]):
                owner = owners[number]
                parts[owner][number] = found.logprob
                if len(parts[owner]) == len(texts[owner]):
                    self.cache_hook.add_partial(
                        "loglikelihood_rolling", requests[owner].args, math.fsum(parts[owner].values())
                    )
                bar.advance(1)
        return [math.fsum(part.values()) for part in parts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the generated continuation of each request's context, up to the first of its stop strings."""
        by_settings: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_settings.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        answers: dict[int, str] = {}
        for numbers in by_settings.values():
            settings = requests[numbers[0]].args[1]
            found = self._generate([requests[number].args[0] for number in numbers], settings)
            for number, text in zip(numbers, found, strict=True):
                answers[number] = text
                self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return [answers[number] for number in range(len(requests))]

    def _generate(self, contexts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
        """Return continuations of contexts that share the same generation settings."""
        rest = dict(normalize_gen_kwargs(dict(settings), NEW_TOKENS))
        eos = self.text.decode([self.eot_token_id or 0])
        stops = [stop for stop in handle_stop_sequences(rest.pop("until", None), eos=eos) if stop]
        new, drawn = rest.pop("max_gen_toks"), rest.pop("do_sample")
        if new >= self.max_length and not self.has_encoder:
            raise DataError(
                f"max_gen_toks of the task must be below the context length {self.max_length}, but is {new}",
                hint="raise --seq-length if the model supports it, or lower max_gen_toks in the task",
            )
        rest = rest if drawn else {key: value for key, value in rest.items() if key not in DRAWN}
        sampling = Sampling.parse(rest, source="generation_kwargs of the task")
        limits = GenerationLimits(new, tuple(stops), self.ends)
        longest = self.max_length - (0 if self.has_encoder else new)
        found = self.replicas.generate_completions(contexts, longest, limits, sampling)
        texts = [self.text.decode(one.tokens, skip_special_tokens=True) for one in found]
        return [postprocess_generated_text(text, stops, None) for text in texts]

    def _truncate_pair(self, context: list[int], continuation: list[int]) -> ContextContinuation:
        """Return the end of a (context, continuation) pair that is too long for the model."""
        length = len(continuation)
        context_room = self.max_length - (0 if self.has_encoder else length - 1)
        if min(context_room, self.max_length + 1 - length) < 1:
            raise DataError(
                f"a continuation of {length} tokens is longer than the context length {self.max_length}",
                hint="raise --seq-length if the model supports it",
            )
        return context[-context_room:], continuation


def _make_conversation(messages: list[dict[str, str]]) -> Conversation:
    """Return the messages as a conversation."""
    return Conversation([dict(message) for message in messages], [], None, {})


def fingerprint_model(model: HarnessModel) -> str:
    """Return a hash of what determines a model's answers: a sample of each weight, the tokenizer, the chat template and
    the maximum length.
    """
    template = model.template.fingerprint if model.template else ""
    digest = hashlib.sha256(f"{model.text.tokenizer.fingerprint} {template} {model.max_length}".encode())
    for name, parameter in model.replicas.model.named_parameters():
        values = parameter.detach().flatten()
        some = values[:: max(1, len(values) // 256)].to(torch.float64).cpu().numpy().tobytes()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + some)
    return digest.hexdigest()[:16]
