"""Chat session with a model: chat template, history, and one streamed answer at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mega_ckpt.source import copy_assets
from mega_common.errors import DataError
from mega_common.object_store import Location
from mega_data.chat.chat_records import Conversation
from mega_data.chat.chat_template import ChatTemplate, read_chat_template
from mega_data.tokenizer import Tokenizer
from mega_eval.engine_requests import EngineRequest
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import open_inference_source
from mega_eval.sampling import Sampling
from mega_eval.text_stream import GenerationLimits


def load_chat_template(
    model: str | Location, tokenizer: Path | None = None, file: Path | None = None, extensions: Sequence[str] = ()
) -> ChatTemplate:
    """Load a chat template: that of `file` if given, else of the folder of `tokenizer` if given, else of `model`.
    `extensions` may have the family of the folder.

    Raises:
        DataError: when there is no chat template.
        MissingPackageError: when transformers is not installed.
    """
    if tokenizer is not None:
        return read_chat_template(Tokenizer(tokenizer).path, file)
    with tempfile.TemporaryDirectory() as folder:
        copy_assets(open_inference_source(model, None, extensions), Path(folder))
        try:
            return read_chat_template(Path(folder) / "tokenizer.json", file)
        except DataError as error:
            raise DataError(error.message.replace(folder, str(model)), hint=error.hint) from None


@dataclass
class ChatSession:
    """Multi-turn conversation with a model, which generates each answer with an inference engine.

    Attributes:
        engine: inference engine for the exclusive use of this session.
        tokenizer: tokenizer of the model.
        template: chat template of the model.
        sampling: sampling settings; the answers of a conversation are different samples.
        ends: tokens that end an answer.
        max_new_tokens: maximum number of tokens of an answer.
        max_length: maximum number of tokens of the conversation; the oldest turns are dropped to fit.
        system: system prompt, if any.
        messages: turns so far.
    """

    engine: InferenceEngine
    tokenizer: Tokenizer
    template: ChatTemplate
    sampling: Sampling
    ends: frozenset[int]
    max_new_tokens: int
    max_length: int
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def stream_answer(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Add a user turn to the conversation and yield the model's answer as text while it is generated.
        `text` is the user turn. The answer ends early once `stopped()` is True, and the text generated so far is kept
        in the conversation.

        Raises:
            DataError: when the turn is too long for the model; the conversation is unchanged then.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._fit_prompt()
            room = min(self.max_new_tokens, self.max_length - len(prompt))
            turns = sum(message["role"] == "assistant" for message in before)
            number = self.engine.add_request(
                EngineRequest(prompt, GenerationLimits(room, (), self.ends), self.sampling, sample=turns)
            )
        except BaseException:
            self.messages[:] = before
            raise
        answer: dict[str, Any] = {"role": "assistant", "content": ""}
        self.messages.append(answer)
        running = True
        try:
            while running and not stopped():
                for event in self.engine.step():
                    answer["content"] += event.text
                    running = event.finish is None
                    yield event.text
        finally:
            self.engine.cancel_request(number)

    def _fit_prompt(self) -> list[int]:
        """Return the prompt tokens; drop the oldest turns until a quarter of the context, or a whole answer, fits."""
        reserved = min(self.max_new_tokens, self.max_length // 4)
        while True:
            tokens = self._encode_messages()
            if len(tokens) + reserved <= self.max_length:
                return tokens
            if len(self.messages) == 1:
                break
            del self.messages[:2]
        if len(tokens) < self.max_length:
            return tokens
        raise DataError(
            f"this turn has {len(tokens)} tokens, but must be shorter than the context of {self.max_length}"
        )

    def _encode_messages(self) -> list[int]:
        """Return the tokens of all messages, rendered by the chat template."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        text = self.template.render_prompt(Conversation([*system, *self.messages], [], None, {}))
        return self.tokenizer.encode(text)
