"""Prompts of chats: messages and tools rendered by the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mega_common.errors import DataError
from mega_data.chat.chat_records import Conversation
from mega_data.chat.chat_template import ChatTemplate
from mega_eval.server.answer_parser import AnswerSyntax
from mega_eval.server.api_errors import ApiRequestError
from mega_eval.server.chat_tools import describe_tools, write_call_arguments
from mega_eval.server.request_schemas import ChatMessage, ChatRequest, ChatTemplateFields
from mega_eval.server.worker_processes import WorkerProcesses


@dataclass(frozen=True)
class ChatPromptRenderer:
    """Renderer of chats as prompt text.

    Attributes:
        template: chat template of the model; None: chats are refused.
        syntax: syntax of the model's answers.
        workers: processes that render.
    """

    template: ChatTemplate | None
    syntax: AnswerSyntax
    workers: WorkerProcesses

    async def render_prompt(self, messages: Sequence[ChatMessage], body: ChatTemplateFields) -> str:
        """Return the text of a conversation up to the beginning of the answer.

        Raises:
            ApiRequestError: without a chat template, or for tools in an unsupported format.
            DataError: when the chat template rejects the conversation.
        """
        if self.template is None:
            raise ApiRequestError(400, "this model has no chat template; use /v1/completions", param="messages")
        turns, tools = [message.to_template_message() for message in messages], self._list_tools(body)
        if not self.template.renders_tools:
            turns, tools = describe_tools(turns, tools), []
        if self.syntax.has_channels:
            turns = [_rename_reasoning(turn) for turn in turns]
        try:
            return await self._render(self.template, turns, tools, body)
        except DataError:
            if not any(turn.get("tool_calls") for turn in turns):
                raise
            try:
                return await self._render(self.template, [write_call_arguments(turn) for turn in turns], tools, body)
            except DataError:
                pass
            raise

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
