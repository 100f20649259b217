"""The tokens before an answer are those of the prompt that is served, whatever the tokenizer merges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from mega_data.chat.chat_preparation import INSEPARABLE, MERGED, ChatEncoder, ChatOptions
from mega_data.chat.chat_records import parse_chat_record
from mega_data.chat.chat_template import ChatTemplate
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.preprocessing.sharding import EngineName
from mega_data.tokenizer import Tokenizer

pytest.importorskip("transformers", reason="what renders templates")
PLAIN = (
    "{% for m in messages %}{{ m.role }}:{{ '\\n' if m.role == 'assistant' else ' ' }}{{ m.content }}\n{% endfor %}"
    "{{ 'assistant:\\n' if add_generation_prompt }}"
)
CORPUS = [
    "user: what is 2 + 2\nassistant:\n 4\nuser: and 3\nassistant:\n\n  it is 3, no 33\n",
    "a  b\n\n\n  c 4 44 444\n \n",
] * 9
ANSWERS = [" 4", "\n4", "\n\n4", "  two", "4", "four", "\t4", " \n4", "\n 4", "é", " ", "  \n\n  4"]


def backend(kind: str) -> Backend:
    made = Backend(models.BPE(unk_token="<unk>", byte_fallback=kind != "bytes"))
    special = ["<unk>", "<s>"] + [f"<0x{byte:02X}>" for byte in range(256)] * (kind != "bytes")
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
    if kind == "bytes":
        made.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(r"\p{L}+|\p{N}+|[^\s\p{L}\p{N}]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
        made.decoder = decoders.ByteLevel()
    else:
        space = normalizers.Replace(" ", "▁")
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if kind == "prefix" else space
        strip = [decoders.Strip(" ", 1, 0)] if kind == "prefix" else []
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, special_tokens=special, initial_alphabet=alphabet
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def folder_of(kind: str, folder: Path) -> Path:
    folder.mkdir()
    backend(kind).save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(PLAIN)
    return folder


@pytest.fixture(scope="module", params=["bytes", "whole", "prefix"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(request.param, tmp_path_factory.mktemp("t") / "t")


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_is_trained_follows_the_prompt_that_is_served(folder: Path, answer: str) -> None:
    tokenizer, template = Tokenizer(folder), ChatTemplate({"default": PLAIN}, {}, {})
    record = {"prompt": "what is 2 + 2", "completion": answer}
    (conversation,) = parse_chat_record(json.dumps(record), pairs=False, loss_on="answers")
    rendered = template.render_chat(conversation, "answers")
    encoded = ChatEncoder(tokenizer, 1, None).encode_chats([(rendered,)], np.int32)
    ((array,),) = encoded.texts
    served = tokenizer.encode(rendered.text[: rendered.spans[0].begin])
    first = int(np.flatnonzero(array["mask"])[0])
    assert array["token"][:first].tolist() == served
    assert array["mask"].tolist()[first:][: len(tokenizer.encode(answer))].count(0) <= 1
    assert tokenizer.decode(array["token"].tolist()) == tokenizer.decode(tokenizer.encode(rendered.text))
    merges = tokenizer.encode(rendered.text)[:first] != served
    assert encoded.notes == ({MERGED: 1} if merges else {})


def test_some_answers_of_each_tokenizer_merge(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    prompt = "user: what is 2 + 2\nassistant:\n"
    served = tokenizer.encode(prompt)
    assert any(tokenizer.encode(prompt + answer + "\n")[: len(served)] != served for answer in ANSWERS)


def test_later_answers_and_pairs_are_counted_once_a_conversation(tmp_path: Path) -> None:
    tokenizer, template = Tokenizer(folder_of("bytes", tmp_path / "t")), ChatTemplate({"default": PLAIN}, {}, {})
    turns = [{"role": role, "content": text} for role, text in
             (("user", "a"), ("assistant", " 4"), ("user", "b"), ("assistant", "c"), ("user", "b"), ("assistant", " \n"))]  # fmt: skip
    (conversation,) = parse_chat_record(json.dumps({"messages": turns}), pairs=False, loss_on="answers")
    rendered = template.render_chat(conversation, "answers")
    encoded = ChatEncoder(tokenizer, 1, None).encode_chats([(rendered,), (rendered, rendered)], np.int32)
    assert encoded.notes == {MERGED: 2}
    array = encoded.texts[0][0]
    counted = [tokenizer.decode(array["token"][array["mask"] > 0].tolist())]
    assert counted == [" 4\nc\n \n\n"]


def test_a_tokenizer_that_cannot_encode_them_apart(tmp_path: Path) -> None:
    made = Backend(
        models.WordLevel({"<unk>": 0, "user:": 1, "assistant:x": 2, "hi": 3, "assistant:": 4, "x": 5}, "<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    template = ChatTemplate({"default": PLAIN.replace("\\n", "")}, {}, {})
    (conversation,) = parse_chat_record('{"prompt": "hi", "completion": "x hi"}', pairs=False, loss_on="answers")
    rendered = template.render_chat(conversation, "answers")
    encoded = ChatEncoder(Tokenizer(tmp_path), 1, None).encode_chats([(rendered,)], np.int32)
    assert encoded.notes == {INSEPARABLE: 1}
    assert encoded.texts[0][0].tolist() == [(1, 0), (3, 0), (2, 0), (3, 1)]


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_how_many_is_reported(engine: EngineName, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of("bytes", tmp_path / "t")
    records: list[Any] = [{"prompt": "a", "completion": answer} for answer in (" 4", "4", " \n 4")]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    info = preprocess_corpus(
        [tmp_path / "d.jsonl"], folder, tmp_path / "d", chat=ChatOptions(), engine=engine, workers=1
    )
    assert info.chat is not None
    assert info.chat.notes == {MERGED: 2}
    assert f"2 conversations {MERGED}" in caplog.messages
