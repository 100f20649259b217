"""A chat template that does not end, or fills the memory, is ended with a sentence that names it or the record."""

from __future__ import annotations

import json
import resource
import signal
import threading
from pathlib import Path

import pytest

from mega_cli.main import main
from mega_common.errors import DataError
from mega_data.chat import chat_template as module
from mega_data.chat.chat_records import Conversation
from mega_data.chat.chat_template import (
    ChatTemplateMemoryError,
    ChatTemplateTimeout,
    limit_render_time,
    read_chat_template,
)
from mega_data.tokenizer import train_tokenizer

MANY = "range(99999)"
ENDLESS = {
    "nested_loops": f"{{% for a in {MANY} %}}{{% for b in {MANY} %}}{{% endfor %}}{{% endfor %}}",
    "sum_of_loops": f"{{% set n = namespace(a=0) %}}{{% for a in {MANY} %}}{{% for b in {MANY} %}}{{% set n.a = n.a + 1 %}}{{% endfor %}}{{% endfor %}}",
    "filtered_loop": f"{{% for a in {MANY} %}}{{% for b in {MANY} if b < 0 %}}{{% endfor %}}{{% endfor %}}",
    "macro": f"{{% macro m() %}}{{% for a in {MANY} %}}x{{% endfor %}}{{% endmacro %}}{{% for a in {MANY} %}}{{% set t = m() %}}{{% endfor %}}",
    "two_macros": "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}",
    "map": f"{{% for a in {MANY} %}}{{% set t = {MANY}|map('string')|list %}}{{% endfor %}}",
    "select": f"{{% for a in {MANY} %}}{{% set t = {MANY}|select('lt', 0)|list %}}{{% endfor %}}",
    "recursive_loop": f"{{% for a in {MANY} recursive %}}{{% if loop.depth < 5 %}}{{% set t = loop({MANY}) %}}{{% endif %}}{{% endfor %}}",
    "tojson": f"{{% for a in {MANY} %}}{{% set t = {MANY}|list|tojson %}}{{% endfor %}}",
    "long_condition": f"{{% for a in {MANY} %}}{{% for b in {MANY} %}}{{% if a == b and a > 99999 %}}x{{% endif %}}{{% endfor %}}{{% endfor %}}",
}
WITH_MESSAGES = "{%% if messages %%}%s{%% endif %%}{%% for m in messages %%}{{ m.content }}{%% endfor %%}"
CHAT = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENDER_SECONDS", 0.2)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(["a story"], 260, tmp_path_factory.mktemp("tokenizer")).path


def _load(tokenizer: Path, text: str, folder: Path) -> module.ChatTemplate:
    (folder / "endless.jinja").write_text(text)
    return read_chat_template(tokenizer, folder / "endless.jinja")


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_an_endless_template_is_named_when_it_is_loaded(text: str, tokenizer: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"endless\.jinja.*takes more than 0\.2 seconds"):
        _load(tokenizer, text, tmp_path)


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_a_prompt_of_an_endless_template_ends(text: str, tokenizer: Path, tmp_path: Path) -> None:
    template = _load(tokenizer, WITH_MESSAGES % text, tmp_path)
    with pytest.raises(ChatTemplateTimeout, match="takes more than"):
        template.render_prompt(Conversation(CHAT["messages"], [], None, {}))


@pytest.mark.parametrize("on_bad_line", ["error", "skip"])
def test_preprocessing_with_an_endless_template_ends(
    on_bad_line: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "endless.jinja").write_text(
        WITH_MESSAGES.replace("if messages", "if 'loop' in (messages|string)") % ENDLESS["nested_loops"]
    )
    (tmp_path / "chats.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "loop"}, CHAT["messages"][1]]})
        + "\n"
        + json.dumps(CHAT)
        + "\n"
    )
    words = [
        "data",
        "preprocess",
        "--kind",
        "conversations",
        "--on-bad-line",
        on_bad_line,
        "--tokenizer",
        str(tokenizer),
    ]
    words += ["--chat-template", str(tmp_path / "endless.jinja"), "--input", str(tmp_path / "chats.jsonl")]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--output", str(tmp_path / "made")])
    said = capsys.readouterr().err
    if on_bad_line == "error":
        assert ended.value.code == 2
        assert "chats.jsonl:1: the chat template takes more than 0.2 seconds" in said
    else:
        quarantined = (tmp_path / "made.quarantine.jsonl").read_text()
        assert "takes more than" in quarantined


def test_the_timer_and_the_handler_are_put_back() -> None:
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0
    with limit_render_time(60):
        assert signal.getsignal(signal.SIGALRM) is not before[0]
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0] > 0) == before


def test_other_threads_render_without_a_timer() -> None:
    done: list[int] = []

    def render() -> None:
        with limit_render_time(0.001):
            done.append(sum(range(1000)))

    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    assert done


LONG = "('x' * (10**6 + messages|length))"  # not a constant, which jinja evaluates when it compiles
HUGE = {
    "repeated_text": "{{ 'x' * 10**10 }}",
    "repeated_list": "{{ [0] * 10**10 }}",
    "doubled_text": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled_list": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "nested_joins": f"{{{{ ([([{LONG}] * 100)|join] * 10**4)|join }}}}",
    "center": "{{ 'x'|center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "percent": "{{ '%0*d' % (10**9 * 2, 1) }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "indent": "{{ 'a\n\nb'|indent(10**10, true, true) }}",
    "replace": f"{{{{ {LONG}|replace('x', {LONG}) }}}}",
    "batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "output": f"{{% for a in range(99999) %}}{{{{ {LONG} }}}}{{% endfor %}}",
}


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENDER_SECONDS", 60)
    monkeypatch.setattr(module, "RENDER_MEMORY", 256 << 20)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
def test_a_template_that_takes_too_much_memory_is_refused(text: str, tokenizer: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(DataError, match=r"endless\.jinja.*takes more than 256 MiB of memory"):
        _load(tokenizer, text, tmp_path)
    template = _load(tokenizer, f"{{% if messages %}}{text}{{% endif %}}", tmp_path)
    with pytest.raises(ChatTemplateMemoryError, match="takes more than 256 MiB of memory"):
        template.render_prompt(Conversation(CHAT["messages"], [], None, {}))
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.usefixtures("_small")
def test_a_rendered_text_beyond_the_limit_is_refused(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = _load(tokenizer, "{% for m in messages %}{{ m.content * 500 }}{% endfor %}", tmp_path)
    assert len(template.render_prompt(Conversation(CHAT["messages"], [], None, {}))) == 1000
    monkeypatch.setattr(module, "MAX_TEXT", 999)
    with pytest.raises(ChatTemplateMemoryError, match="renders 1,000 characters, more than 999"):
        template.render_prompt(Conversation(CHAT["messages"], [], None, {}))
