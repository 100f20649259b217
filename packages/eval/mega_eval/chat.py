"""A conversation with a model: its chat template, its history, and one answer at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mega_ckpt.source import copy_assets, open_source
from mega_common.errors import DataError
from mega_common.remote import Place
from mega_data.chat.records import Conversation
from mega_data.chat.template import ChatTemplate, load_template
from mega_data.tokenizer import Tokenizer
from mega_eval.engine import Engine, Request
from mega_eval.sampling import Sampling
from mega_eval.text import Limits


def load_chat_template(model: str | Place, tokenizer: Path | None = None, file: Path | None = None) -> ChatTemplate:
    """The chat template that travels with a model; or that beside another `tokenizer`, or in a `file`.

    Raises:
        DataError: when there is none.
        MissingPackageError: without transformers.
    """
    if tokenizer is not None:
        return load_template(Tokenizer(tokenizer).path, file)
    with tempfile.TemporaryDirectory() as folder:
        copy_assets(open_source(model), Path(folder))
        try:
            return load_template(Path(folder) / "tokenizer.json", file)
        except DataError as error:
            raise DataError(error.message.replace(folder, str(model)), hint=error.hint) from None


@dataclass
class Chat:
    """A conversation.

    Attributes:
        engine: that nothing else drives meanwhile.
        tokenizer: the model's.
        template: its chat template.
        sampling: how answers are drawn; answers of one conversation are different samples.
        ends: tokens that end an answer.
        max_new_tokens: of an answer.
        max_length: tokens of the conversation that the model may see; the oldest turns are forgotten beyond.
        system: what the model is told first, if anything.
        messages: the turns so far.
    """

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate
    sampling: Sampling
    ends: frozenset[int]
    max_new_tokens: int
    max_length: int
    system: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, text: str, stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Take a turn; yields the answer as it comes. It ends early, and is remembered so far, once `stopped()`.

        Raises:
            DataError: when the model has no room for so long a turn, which then is not taken.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            prompt = self._prompt()
            room = min(self.max_new_tokens, self.max_length - len(prompt))
            turns = sum(message["role"] == "assistant" for message in before)
            number = self.engine.add(Request(prompt, Limits(room, (), self.ends), self.sampling, sample=turns))
        except BaseException:
            self.messages[:] = before
            raise
        answer: dict[str, Any] = {"role": "assistant", "content": ""}
        self.messages.append(answer)
        going = True
        try:
            while going and not stopped():
                for event in self.engine.step():
                    answer["content"] += event.text
                    going = event.finish is None
                    yield event.text
        finally:
            self.engine.cancel(number)

    def _prompt(self) -> list[int]:
        """Tokens up to where the answer begins. The oldest turns go until a quarter of all, or an answer, has room."""
        wanted = min(self.max_new_tokens, self.max_length // 4)
        while True:
            tokens = self._tokens()
            if len(tokens) + wanted <= self.max_length:
                return tokens
            if len(self.messages) == 1:
                break
            del self.messages[:2]
        if len(tokens) < self.max_length:
            return tokens
        raise DataError(f"this turn has {len(tokens)} tokens, and the model has room for {self.max_length}")

    def _tokens(self) -> list[int]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        text = self.template.prompt(Conversation([*system, *self.messages], [], None, {}))
        return self.tokenizer.encode(text)
