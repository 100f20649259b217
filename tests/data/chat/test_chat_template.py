from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import ANSWER, ASK, CONVERSATIONS, FORMS, chat_tokenizer, template
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from mega_common.errors import DataError
from mega_data.chat.chat_preparation import ChatEncoder
from mega_data.chat.chat_records import parse_chat_record
from mega_data.chat.chat_template import ChatTemplate, read_chat_template
from mega_data.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers", reason="what renders templates, and the oracle")
REFUSED = {
    ("mistral", "system"): "content of role 'system'|not a prefix of the whole conversation",
    ("gemma", "tools"): "must alternate",
    ("deepseek", "tools"): "does not render 'tools'",
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of sentencepiece's kind: spaces are marks, and the first word of a text has one too."""
    backend = Backend(models.BPE(byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace()
    text = [json.dumps(record, ensure_ascii=False) for record in CONVERSATIONS.values()] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=[f"<0x{i:02X}>" for i in range(256)]
    )
    backend.train_from_iterator(text, trainer)
    folder = tmp_path_factory.mktemp("words")
    backend.save(str(folder / "tokenizer.json"))
    return folder


def encoded(folder: Path, record: dict[str, Any], loss_on: Any = "answers") -> tuple[list[int], list[int]]:
    """Tokens and mask."""
    tokenizer = Tokenizer(folder)
    (conversation,) = parse_chat_record(json.dumps(record), pairs=False, loss_on=loss_on)
    rendered = read_chat_template(tokenizer.path).render_chat(conversation, loss_on)
    ((array,),) = ChatEncoder(tokenizer, 1, None).encode_chats([(rendered,)], np.int32).texts
    return array["token"].tolist(), array["mask"].tolist()


def oracles(folder: Path, record: dict[str, Any]) -> tuple[list[int], list[int]]:
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    out = theirs.apply_chat_template(
        record["messages"], tools=record.get("tools"), return_dict=True, return_assistant_tokens_mask=True
    )
    return out["input_ids"], out["assistant_masks"]


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_masks_are_those_of_transformers_with_marks_and_without(
    tmp_path: Path, tokenizer_folder: Path, words: Path, kind: str, form: str, name: str
) -> None:
    base, record = tokenizer_folder if kind == "bytes" else words, CONVERSATIONS[name]
    marked = chat_tokenizer(base, tmp_path / "marked", form, marks=True)
    plain = chat_tokenizer(base, tmp_path / "plain", form, marks=False)
    if (form, name) in REFUSED:
        for folder in (marked, plain):
            with pytest.raises(DataError, match=REFUSED[form, name]):
                encoded(folder, record)
        return
    tokens, mask = encoded(marked, record)
    assert (tokens, mask) == oracles(marked, record)
    assert 0 < sum(mask) < len(mask)
    assert encoded(plain, record) == (tokens, mask)


def spans(template: str, record: dict[str, Any], loss_on: Any = "answers", **special: str) -> list[tuple[str, float]]:
    """What counts, and how much."""
    (conversation,) = parse_chat_record(json.dumps(record), pairs=False, loss_on=loss_on)
    text, found, _ = ChatTemplate({"default": template}, special, {}).render_chat(conversation, loss_on)
    return [(text[begin:end], weight) for begin, end, weight in found]


@pytest.mark.parametrize("marks", [True, False])
def test_loss_on_last_and_weights_of_turns(marks: bool) -> None:
    qwen, record = template("qwen", marks=marks), CONVERSATIONS["turns"]
    first, last = "It is 4, naïve café 🎉.<|im_end|>\n", "the cat sat on the mat: 6<|im_end|>\n"
    assert spans(qwen, record) == [(first, 1), (last, 1)]
    assert spans(qwen, record, "last") == [(last, 1)]
    messages = [dict(message) for message in record["messages"]]
    messages[1]["weight"], messages[3]["weight"] = 0, 0.5
    assert spans(qwen, {"messages": messages}) == [(last, 0.5)]
    ((all_of_it, weight),) = spans(qwen, record, "all")
    assert (all_of_it[:18], all_of_it[-len(last) :], weight) == ("<|im_start|>system", last, 1)


@pytest.mark.parametrize(
    ("body", "record", "said"),
    [
        ("{{ messages[-1].content }}", {"messages": [ASK, ANSWER]}, "up to it is not a prefix"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            {"messages": [ASK]},
            "no message has the role 'assistant'",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            {"messages": [ASK, {**ANSWER, "weight": 0}]},
            "no answer counts in the loss",
        ),
        (
            "{% generation %}{{ messages[0].content }}{% endgeneration %}",
            CONVERSATIONS["one"],
            "including the questions",
        ),
        (
            "{% generation %}{% endgeneration %}{{ messages }}",
            CONVERSATIONS["one"],
            "renders no text of the answers",
        ),
        (
            "{{ raise_exception('I will not') }}",
            CONVERSATIONS["one"],
            r"template fails on the conversation \(I will not\)",
        ),
        ("{{ messages | nothing }}", CONVERSATIONS["one"], "No filter named 'nothing'"),
        ("{{ ''.__class__.__mro__ }}", CONVERSATIONS["one"], "unsafe"),
    ],
)
def test_what_cannot_be_told_is_refused(body: str, record: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        spans(body, record)


def test_blocks_that_are_not_as_many_as_answers_take_no_weights_of_their_own() -> None:
    twice = "{% for m in messages %}{{ m.content }}{% generation %}a{% endgeneration %}{% endfor %}"
    assert spans(twice, CONVERSATIONS["turns"]) == [("a", 1)] * 4
    with pytest.raises(DataError, match="marks 4 texts as answers, but the conversation has 2"):
        spans(twice, CONVERSATIONS["turns"], "last")


def test_a_block_that_ends_in_a_character_of_no_token_ends_there(words: Path, tmp_path: Path) -> None:
    """transformers' mask runs to the end of the conversation then, and stops where one begins so."""
    backend = Backend.from_file(str(words / "tokenizer.json"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # drops spaces
    backend.save(str(tmp_path / "tokenizer.json"))
    form = "{% for m in messages %}Q{{ m.content }} {% generation %} {{ m.content }} {% endgeneration %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(form)
    record = {"messages": [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "dog"}]}
    tokens, mask = encoded(tmp_path, record)
    counted = Tokenizer(tmp_path).encode("cat") + Tokenizer(tmp_path).encode("dog")
    assert [token for token, byte in zip(tokens, mask, strict=True) if byte] == counted


def test_all_tokens_of_the_last_character_count(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Of an emoji at the end of a block, transformers counts the first byte alone."""
    form = "{% for m in messages %}Q{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    folder = chat_tokenizer(tokenizer_folder, tmp_path / "t", "qwen", marks=True)
    (folder / "chat_template.jinja").write_text(form)
    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "🎉"}]}
    assert encoded(folder, record)[1] == [0, 1, 0, 1, 1, 1, 1]
    assert oracles(folder, record)[1] == [0, 1, 0, 1, 0, 0, 0]


def test_where_a_template_is_found(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = chat_tokenizer(tokenizer_folder, tmp_path / "t", "qwen", marks=True)
    file = folder / "tokenizer.json"
    beside = read_chat_template(file)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        read_chat_template(file)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for said in (template("qwen", marks=True), [{"name": "default", "template": template("qwen", marks=True)}]):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": said}))
        assert read_chat_template(file).fingerprint == beside.fingerprint
    (folder / "my.jinja").write_text(template("gemma", marks=False))
    other = read_chat_template(file, folder / "my.jinja", {"thinking": False})
    assert not other.marks
    assert other.fingerprint != beside.fingerprint
    with pytest.raises(DataError, match=r"no.jinja: cannot be read"):
        read_chat_template(file, folder / "no.jinja")


def test_conversations_with_tools_have_a_template_of_their_own() -> None:
    form = "{% for m in messages %}[NAME]{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ tools }}"
    both = {"default": form.replace("NAME", "plain"), "tool_use": form.replace("NAME", "tools")}
    for name, expected in (("one", "[plain]"), ("tools", "[tools]")):
        (conversation,) = parse_chat_record(json.dumps(CONVERSATIONS[name]), pairs=False, loss_on="all")
        assert ChatTemplate(both, {}, {}).render_chat(conversation, "all").text.startswith(expected)
