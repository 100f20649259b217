"""Prompts of chats, rendered by the chat template, and plans of their answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mega_common.errors import DataError
from mega_data.chat.chat_records import Conversation
from mega_data.chat.chat_template import ChatTemplate
from mega_eval.server.answer_parser import ModelOutputParser, ModelOutputSyntax
from mega_eval.server.api_errors import ApiRequestError
from mega_eval.server.call_grammars import NO_ARGUMENTS, CallableTool, build_answer_grammar, build_tool_call_grammar
from mega_eval.server.chat_tools import add_tools_to_messages, encode_tool_call_arguments
from mega_eval.server.request_schemas import ChatMessage, ChatRequest, ChatTemplateFields
from mega_eval.server.worker_processes import WorkerProcesses
from mega_trainer.data.batch_images import BatchImages


@dataclass(frozen=True)
class AnswerGrammarAndParser:
    """Grammar and parser of an answer, and the images of its prompt.
    `make_parser` and `syntax` separate reasoning and calls, and are None for plain text; `images` have no features yet.
    """

    grammar: str | None
    make_parser: Callable[[], ModelOutputParser] | None = None
    syntax: ModelOutputSyntax | None = None
    images: BatchImages | None = None


@dataclass(frozen=True)
class ChatPromptRenderer:
    """Renderer of chats as prompt text.

    Attributes:
        template: chat template of the model; None: chats are refused.
        syntax: syntax of the model's answers.
        workers: processes that render.
    """

    template: ChatTemplate | None
    syntax: ModelOutputSyntax
    workers: WorkerProcesses

    async def render_prompt(self, messages: Sequence[ChatMessage], body: ChatTemplateFields) -> str:
        """Return the text of a chat up to the beginning of the answer; an ApiRequestError without a chat template.

        Raises:
            ApiRequestError: without a chat template, or for tools in an unsupported format.
            DataError: when the chat template rejects the conversation.
        """
        if self.template is None:
            raise ApiRequestError(400, "this model has no chat template; use /v1/completions", param="messages")
        turns, tools = [message.to_template_message() for message in messages], self._list_tools(body)
        if not self.template.renders_tools:
            turns, tools = add_tools_to_messages(turns, tools), []
        if self.syntax.has_channels:
            turns = [_rename_reasoning(turn) for turn in turns]
        try:
            return await self._render(self.template, turns, tools, body)
        except DataError:
            if not any(turn.get("tool_calls") for turn in turns):
                raise
            with contextlib.suppress(DataError):
                return await self._render(
                    self.template, [encode_tool_call_arguments(turn) for turn in turns], tools, body
                )
            raise

    def build_grammar_and_parser(
        self, body: ChatRequest, prompt: str, specials: Mapping[str, int]
    ) -> AnswerGrammarAndParser:
        """Return the grammar and the parser of an answer in a chat.
        `prompt` is the rendered chat, and `specials` are the token ids of special tokens.

        Raises:
            DataError: for tools whose schema the call format cannot express.
        """
        syntax, schema = self.syntax, body.get_grammar_constraint()
        if body.separate_reasoning is False:
            syntax = replace(syntax, reasoning=None)
        opened = syntax.begins_in_reasoning(prompt)
        tools = [tool.function for tool in body.list_callable_tools()]
        end = syntax.reasoning[1] if opened and syntax.reasoning is not None else None
        grammar = schema
        if body.constrains_tool_calls():
            strict = body.requires_tool_call()
            callable_tools = [
                CallableTool(tool.name, (tool.parameters or NO_ARGUMENTS) if strict or tool.strict else None)
                for tool in tools
            ]
            grammar = build_tool_call_grammar(
                syntax.format, callable_tools, specials, required=strict, reasoning_end=end
            )
        elif schema is not None and schema.startswith("{") and (opened or syntax.has_channels):
            grammar = build_answer_grammar(syntax.format, schema, specials, reasoning_end=end)
        elif schema is not None:
            opened = False  # the grammar holds from the first token
        if not tools and syntax.reasoning is None and not syntax.has_channels:
            return AnswerGrammarAndParser(grammar)
        make_parser = partial(
            ModelOutputParser, syntax, {tool.name: tool.parameters or {} for tool in tools}, in_reasoning=opened,
            keep_reasoning=body.include_reasoning is not False,
        )  # fmt: skip
        return AnswerGrammarAndParser(grammar, make_parser, syntax)

    async def _render(
        self, template: ChatTemplate, turns: list[dict[str, Any]], tools: list[dict[str, Any]], body: ChatTemplateFields
    ) -> str:
        """Return the text of messages in the form that chat templates expect."""
        continues = bool(body.continue_final_message)
        begins = body.add_generation_prompt if body.add_generation_prompt is not None else not continues
        conversation = Conversation(turns, [], tools or None, dict(body.chat_template_kwargs or {}))
        return await self.workers.render_chat(template, conversation, begins, continues)

    def _list_tools(self, body: ChatTemplateFields) -> list[dict[str, Any]]:
        """Return the tools of a chat in the form that templates expect."""
        found = body.list_callable_tools() if isinstance(body, ChatRequest) else []
        if found and self.template is not None and self.template.renders_tools and self.syntax.unsupported:
            message = (
                f"tools are not supported with this chat template, whose calls begin with {self.syntax.unsupported!r}"
            )
            raise ApiRequestError(400, message, param="tools")
        return [tool.model_dump(exclude_none=True) for tool in found]


def _rename_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the assistant with its reasoning under the name that templates with channels use."""
    if not message.get("tool_calls") or "thinking" in message or not message.get("reasoning_content"):
        return message
    return {**message, "thinking": message["reasoning_content"]}
