"""Chat templates in the forms of five families, with and without marks of what a model says, and conversations to try them.

Written after what the families' own templates print. In a form, `<<` and `>>` stand for the marks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

LLAMA3 = """
{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {%- set body = message.content | default('', true) | trim %}
    {%- if loop.first and tools %}{% set body = body + '\\n\\nFunctions: ' + tools | tojson %}{% endif %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}<<
        {%- for call in message.tool_calls or [] %}{{- call.function | tojson }}{% endfor %}
        {{- body + '<|eot_id|>' }}>>
    {%- else %}
        {{- body + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

QWEN = """
{%- set given = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}
{{- '<|im_start|>system\\n' + given }}
{%- for tool in tools or [] %}{{- '\\n' + tool | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}<<
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}>>
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if messages[loop.index0 - 1].role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""

MISTRAL = """
{%- set said = messages[0].content if messages[0].role == 'system' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- if tools and message == asked[-1] %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST] ' + (said + '\\n\\n' if loop.last and said else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}<<
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}{{- call.function | tojson + (']' + eos_token if loop.last else ', ') }}{% endfor %}>>
    {%- elif message.role == 'assistant' %}<<
        {{- ' ' + message.content | trim + eos_token }}>>
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + '}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """
{{- bos_token }}
{%- set said = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for message in (messages[1:] if said else messages) %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<start_of_turn>model\\n' }}<<{{- message.content | trim + '<end_of_turn>\\n' }}>>
    {%- else %}
        {{- '<start_of_turn>user\\n' + (said if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<start_of_turn>model\\n' if add_generation_prompt }}
"""

DEEPSEEK = """
{{- bos_token }}
{%- set ns = namespace(tool=false) %}
{%- for message in messages if message.role == 'system' %}{{- message.content }}{% endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.tool = false %}
        {{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜tool▁outputs▁end｜>' if ns.tool else '<｜Assistant｜>' }}
        {%- set ns.tool = false %}<<
        {{- message.content.split('</think>') | last if message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
            {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
        {%- endfor %}
        {{- eos_token }}>>
    {%- elif message.role == 'tool' %}
        {{- '' if ns.tool else '<｜tool▁outputs▁begin｜>' }}
        {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
        {%- set ns.tool = true %}
    {%- endif %}
{%- endfor %}
{%- if ns.tool %}{{- '<｜tool▁outputs▁end｜>' }}{% elif add_generation_prompt %}{{- '<｜Assistant｜>' }}{% endif %}
"""

GLM = """
{{- '[gMASK]<sop>' }}
{%- if tools %}{{- '<|system|>\\n' + tools | tojson }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>' }}<<{{- '\\n<think></think>\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + (value if value is string else value | tojson) + '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}>>
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message.role + '|>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}
"""

KIMI = """
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_assistant|>assistant<|im_middle|>' }}<<{{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<|tool_calls_section_begin|>' if loop.first }}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + call.function.arguments | tojson + '<|tool_call_end|>' }}
            {{- '<|tool_calls_section_end|>' if loop.last }}
        {%- endfor %}
        {{- '<|im_end|>' }}>>
    {%- elif message.role == 'tool' %}
        {{- '<|im_system|>tool<|im_middle|>## Return of ' + message.tool_call_id + '\\n' + message.content + '<|im_end|>' }}
    {%- else %}
        {{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_assistant|>assistant<|im_middle|>' if add_generation_prompt }}
"""

HARMONY = """
{{- '<|start|>system<|message|>Reasoning: medium' }}
{%- if tools %}{{- '\\n# Tools\\n' + tools | tojson }}{% endif %}
{{- '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|start|>assistant' }}<<
            {{- '<|channel|>commentary to=functions.' + call.function.name + ' <|constrain|>json<|message|>' + call.function.arguments | tojson + '<|call|>' }}>>
        {%- else %}
            {{- '<|start|>assistant' }}<<{{- '<|channel|>final<|message|>' + message.content + '<|return|>' }}>>
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.tool to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}
"""

FORMS = {
    "llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA, "deepseek": DEEPSEEK, "glm": GLM, "harmony": HARMONY,
}  # fmt: skip
ALL_FORMS = {**FORMS, "kimi": KIMI}  # Kimi's renders the id of a call, which has its name
SPECIALS = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>",
    "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>",
    "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>",
)  # fmt: skip
MORE_SPECIALS = (
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>",
    "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|start|>",
    "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
)  # fmt: skip
ENDS = {
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"), "qwen": (None, "<|im_end|>"), "mistral": ("<s>", "</s>"),
    "gemma": ("<bos>", "<eos>"), "glm": (None, "<|endoftext|>"), "kimi": (None, "<|im_end|>"), "harmony": (None, "<|return|>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
}  # fmt: skip

ASK, ANSWER = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4, naïve café 🎉."}
MORE = [{"role": "user", "content": "And 3 + 3?\n"}, {"role": "assistant", "content": "the cat sat on the mat: 6"}]
SYSTEM = {"role": "system", "content": "Be the dog."}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
CALL = {"type": "function", "id": "123456789", "function": {"name": "add", "arguments": {"a": 2}}}
CALLING = [
    ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "123456789", "content": "4"}, ANSWER,
]  # fmt: skip
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one": {"messages": [ASK, ANSWER]},
    "turns": {"messages": [ASK, ANSWER, *MORE]},
    "system": {"messages": [SYSTEM, ASK, ANSWER, *MORE]},
    "tools": {"messages": CALLING, "tools": [TOOL]},
}


def template(form: str, *, marks: bool) -> str:
    """The template of a family."""
    begin, end = ("{%- generation %}", "{%- endgeneration %}") if marks else ("", "")
    return ALL_FORMS[form].replace("<<", begin).replace(">>", end)


def chat_tokenizer(base: Path, folder: Path, form: str, *, marks: bool) -> Path:
    """A tokenizer's folder with the special tokens of all families, the template of one, and what ends its texts."""
    backend = Tokenizer.from_file(str(base / "tokenizer.json"))
    specials = SPECIALS + (MORE_SPECIALS if form in ("glm", "kimi", "harmony") else ())
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    bos, eos = ENDS[form]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(template(form, marks=marks))
    return folder
