from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from serving import Scripted
from tiny_models import save_tiny, variant

import mega_cli
from mega_ckpt.families import find_family_by_name
from mega_cli.serve import load_default_sampling
from mega_common.errors import DataError
from mega_data.chat.chat_template import ChatTemplate
from mega_data.tokenizer import train_tokenizer
from mega_eval.chat_session import ChatSession, load_chat_template
from mega_eval.language_model import LanguageModel
from mega_eval.sampling import Sampling
from mega_trainer.config.extensions import load_extensions

TEMPLATE = "{% for one in messages %}{{ one.role[0] + ':' + one.content + '\\n' }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train_tokenizer(["x"], 257, tmp_path_factory.mktemp("tokenizer"))  # a token a byte


def chat_of(words: Any, **options: Any) -> tuple[ChatSession, Scripted]:
    engine = Scripted(text="yes")
    engine.go.set()
    template = ChatTemplate({"default": TEMPLATE}, {}, {})
    given = {"max_new_tokens": 2, "max_length": 40, **options}
    return ChatSession(engine, words, template, Sampling(), frozenset(), **given), engine


def test_each_turn_sees_those_before(words: Any) -> None:
    chat, engine = chat_of(words, system="go")
    prompts = []
    for turn in ("hi", "so"):
        for _ in chat.stream_answer(turn):
            prompts += [words.decode(request.prompt) for request in engine.requests.values()]
    assert list(dict.fromkeys(prompts)) == ["s:go\nu:hi\na:", "s:go\nu:hi\na:yesyes\nu:so\na:"]
    assert [one["content"] for one in chat.messages] == ["hi", "yesyes", "so", "yesyes"]


def test_an_answer_that_is_stopped_is_remembered_so_far(words: Any) -> None:
    chat, engine = chat_of(words, max_new_tokens=20)
    counts = itertools.count()
    assert "".join(chat.stream_answer("hi", lambda: next(counts) == 3)) == "yesyesyes"
    assert chat.messages[-1] == {"role": "assistant", "content": "yesyesyes"}
    assert not engine.requests


def test_the_oldest_turns_are_forgotten(words: Any) -> None:
    chat, _ = chat_of(words, system="go")
    for turn in "12345":
        assert "".join(chat.stream_answer(turn)) == "yesyes"
    assert [one["content"] for one in chat.messages] == ["3", "yesyes", "4", "yesyes", "5", "yesyes"]


def test_a_turn_that_is_too_long_is_not_taken(words: Any) -> None:
    chat, _ = chat_of(words)
    list(chat.stream_answer("hi"))
    before = list(chat.messages)
    with pytest.raises(DataError, match="must be shorter than the context of 40"):
        list(chat.stream_answer("x" * 40))
    assert chat.messages == before


def test_a_folder_of_an_extensions_family_has_its_template_and_sampling(tmp_path: Path) -> None:
    extension = str(Path(mega_cli.__file__).parent / "templates/family.py")
    (family,) = load_extensions([extension]).families
    train_tokenizer(["x"], 257, tmp_path)
    save_tiny(tmp_path, find_family_by_name("llama"), config := variant("plain").model_copy(update={"vocab_size": 257}))
    (tmp_path / "config.json").write_text(json.dumps(family.write_config_json(config)))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 3}))
    assert load_chat_template(tmp_path, extensions=[extension]).source == TEMPLATE
    assert load_default_sampling(str(tmp_path), [extension])["top_k"] == 3
    model = LanguageModel.load(tmp_path, extensions=[extension], draft=str(tmp_path))
    assert model.chat([{"role": "user", "content": "x"}], max_new_tokens=2).tokens
