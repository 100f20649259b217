"""Function calls in the text of an answer.

They are read in two forms: JSON within `<tool_call>` tags (Hermes, Qwen), or an answer that is the JSON of one call or of
a list of them (Llama).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator
from typing import Any

from mega_eval.server.answers import Part

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


async def with_tool_calls(parts: AsyncIterator[Part], names: frozenset[str]) -> AsyncIterator[Part]:
    """Yield each choice in one part, once it is complete, with the calls of functions `names` apart from its text."""
    open_parts: dict[int, Part] = {}
    async for part in parts:
        if part.choice in open_parts:
            open_parts[part.choice].join(part)
        else:
            open_parts[part.choice] = part
        if part.finish is not None:
            whole = open_parts.pop(part.choice)
            found = _parse_calls(whole.text, names)
            if found is not None:
                whole.text, whole.calls = found
                whole.finish = "tool_calls"
            yield whole


def _parse_calls(text: str, names: frozenset[str]) -> tuple[str, list[dict[str, Any]]] | None:
    """Return the text before the calls, and the calls; None where there are none, or one that cannot be read."""
    tagged = CALL.findall(text)
    try:
        read = [json.loads(one) for one in tagged] if tagged else json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = read if isinstance(read, list) else [read]
    if not calls or not all(isinstance(call, dict) and call.get("name") in names for call in calls):
        return None
    before = text.partition("<tool_call>")[0].rstrip() if tagged else ""
    return before, [_call_body(call) for call in calls]


def _call_body(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call.get("arguments", call.get("parameters", {}))
    spelt = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": call["name"], "arguments": spelt}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
