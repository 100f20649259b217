"""Separation of a generated answer into content, reasoning and tool calls, while it is generated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace

from mega_eval.server.answer_formats import ChoiceDelta, ToolCallDelta
from mega_eval.server.growing_text import Deltas, ParsedAnswerDelta, StreamingTextReader, Waits
from mega_eval.server.tool_formats import (
    PLAIN_FORMAT,
    REASONING_MARKS,
    TEXT_FORMAT,
    TOOL_FORMATS,
    UNKNOWN_FORMATS,
    ToolFormat,
    Tools,
)
from mega_eval.text_stream import GenerationLimits


@dataclass(frozen=True)
class ModelOutputSyntax:
    """Form in which a model writes tool calls and reasoning, detected by its chat template.

    Attributes:
        format: format of tool calls.
        reasoning: text before and after reasoning, if the template has such marks.
        unsupported: marker of an unsupported format of tool calls in the template, if any.
    """

    format: ToolFormat = PLAIN_FORMAT
    reasoning: tuple[str, str] | None = None
    unsupported: str | None = None

    @classmethod
    def detect(cls, template: str) -> ModelOutputSyntax:
        """Return the syntax in which a model writes tool calls and reasoning, detected in its chat template."""
        known = next((form for form in TOOL_FORMATS if form.template.search(template)), None)
        foreign = UNKNOWN_FORMATS.search(template) if known is None else None
        marks = next((marks for marks in REASONING_MARKS if marks[1] in template), None)
        return cls(known or PLAIN_FORMAT, marks, foreign and foreign[0])

    @property
    def has_channels(self) -> bool:
        """True if every answer of the model is written as messages on channels, even without tools."""
        return self.format.name == "harmony"

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Return whether a rendered prompt ends with the mark that opens reasoning."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])

    def list_special_marks(self, specials: Mapping[str, int]) -> frozenset[int]:
        """Return the token ids of those `specials` that mark tool calls or reasoning in an answer."""
        reasoning = frozenset(specials[mark] for mark in self.reasoning or () if mark in specials)
        return self.format.list_special_marks(specials) | reasoning

    def keep_marker_tokens_in_text(self, limits: GenerationLimits, specials: Mapping[str, int]) -> GenerationLimits:
        """Return limits with which the text has the special tokens that mark calls and reasoning.
        Other special tokens stay hidden; `limits` that show all special tokens are returned unchanged.
        """
        if not limits.skip_special_tokens:
            return limits
        hidden = frozenset(specials.values()) - self.list_special_marks(specials)
        return replace(limits, skip_special_tokens=False, hidden_tokens=hidden)


class ModelOutputParser:
    """Incremental parser of one answer, whose text arrives in pieces, to content, reasoning and tool calls.

    White space around reasoning and calls is dropped.

    Args:
        syntax: syntax of the answer.
        tools: JSON schema of the arguments of each tool that may be called, by name; empty: calls are content.
        in_reasoning: the answer continues reasoning that the prompt has opened.
        keep_reasoning: return the reasoning.
    """

    def __init__(
        self, syntax: ModelOutputSyntax, tools: Tools, *, in_reasoning: bool = False, keep_reasoning: bool = True
    ) -> None:
        self._text, self._form = StreamingTextReader(), syntax.format if tools or syntax.has_channels else TEXT_FORMAT
        self._deltas = self._read_answer(syntax.reasoning, tools, in_reasoning)
        self._kind, self._space, self._parted, self._keep = "", "", False, keep_reasoning

    def parse(self, text: str, *, ended: bool) -> list[ParsedAnswerDelta]:
        """Return the new deltas after `text`, which is the last text if `ended`."""
        self._text.unread += text
        self._text.ended = ended
        found: list[ParsedAnswerDelta] = []
        for delta in self._deltas:
            if delta is None:
                break
            found += self._trim(delta)
        if ended and self._space and self._kind == "content":
            found.append(ParsedAnswerDelta("content", self._space))
        return found

    def _read_answer(self, reasoning: tuple[str, str] | None, tools: Tools, opened: bool) -> Deltas:
        """Yield the deltas of the answer."""
        if reasoning is not None:
            begin, end = reasoning
            if not opened:
                opened = yield from self._skip_opening(begin)
            if opened:
                yield from self._text.stream_until("reasoning", end)
        yield from self._form.parse(self._text, tools)

    def _skip_opening(self, begin: str) -> Waits:
        """Drop the mark that opens reasoning, after white space; return whether it was there."""
        text = yield from self._text.peek_past_whitespace()
        space, self._text.unread = self._text.unread[: len(self._text.unread) - len(text)], text
        found = yield from self._text.skip_mark(begin)
        self._text.unread = self._text.unread if found else space + self._text.unread
        return found

    def _trim(self, delta: ParsedAnswerDelta) -> list[ParsedAnswerDelta]:
        """Return a delta without white space that may turn out to be around reasoning or calls."""
        if delta.kind not in ("content", "reasoning"):
            self._kind, self._space, self._parted = delta.kind, "", True
            return [delta]
        if delta.kind != self._kind:
            self._space, self._parted = "", self._parted or self._kind != "" or delta.kind == "reasoning"
            self._kind = delta.kind
        text = self._space + delta.text
        if self._parted:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._parted = self._parted and not shown
        return [ParsedAnswerDelta(delta.kind, shown)] if shown and (self._keep or delta.kind == "content") else []


async def parse_reasoning_and_tool_calls(
    parts: AsyncIterator[ChoiceDelta],
    make_parser: Callable[[], ModelOutputParser],
    make_call_id: Callable[[str, int], str],
) -> AsyncIterator[ChoiceDelta]:
    """Yield the parts of an answer with reasoning and tool calls separated from the text.
    A choice that ends after calls has the finish reason `tool_calls`.
    """
    parsers: dict[int, ModelOutputParser] = {}
    counts: dict[int, int] = {}
    async for part in parts:
        parser = parsers.setdefault(part.choice, make_parser())
        new = replace(part, text="", calls=[])
        for delta in parser.parse(part.text, ended=part.finish is not None):
            count = counts.get(part.choice, 0)
            if delta.kind == "content":
                new.text += delta.text
            elif delta.kind == "reasoning":
                new.reasoning += delta.text
            elif delta.kind == "arguments":
                new.add_call_delta(ToolCallDelta(count - 1, arguments=delta.text))
            else:
                counts[part.choice] = count + 1
                new.add_call_delta(ToolCallDelta(count, delta.text, delta.call_id or make_call_id(delta.text, count)))
        if counts.get(part.choice) and part.finish == "stop":
            new.finish = "tool_calls"
        yield new
