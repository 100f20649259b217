"""Chat templates and grammars without end, and texts that are too long: refused, while others are served."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from anyio import CapacityLimiter, to_process
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from mega_common.errors import DataError
from mega_data.chat.chat_records import Conversation
from mega_data.chat.chat_template import ChatTemplate, ChatTemplateMemoryError
from mega_data.tokenizer import Tokenizer, train_tokenizer
from mega_eval.grammar_matcher import GrammarCache
from mega_eval.server import worker_processes
from mega_eval.server.api_errors import ApiRequestError
from mega_eval.server.token_spelling import find_max_token_bytes
from mega_eval.server.worker_processes import WorkerProcesses
from mega_eval.server.worker_tasks import run_with_cpu_and_memory_limits

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}"
END = "{% endfor %}{% endfor %}"
ENDLESS = {
    "a loop": LOOP + END,
    "a loop that counts": "{% set x = namespace(n=0) %}" + LOOP + "{% set x.n = x.n + 1 %}" + END,
    "a loop over messages": LOOP + "{% for m in messages %}{% endfor %}" + END,
    "a loop over text": LOOP + "{% for letter in messages[0].content %}{% endfor %}" + END,
    "a filter in a loop": LOOP + "{{ messages | tojson | length }}" + END,
    "a list without end": "{{ (range(99999) | list * 99999) | length }}",
    "a text without end": "{{ 'x' * 10 ** 11 }}",
    "a text that doubles": "{% set x = namespace(t='x' * 999) %}{% for i in range(99) %}{% set x.t = x.t ~ x.t %}{% endfor %}",
    "a number without end": "{{ 9 ** (9 ** 9) }}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "an error": "{{ raise_exception('no') }}",
}
REGEXES = "start: A\nA: " + " & ".join(f"/(.|\\n)*[ab].{{{10 + number}}}/" for number in range(40))


def conversation(**options: Any) -> Conversation:
    return Conversation([{"role": "user", "content": "hello"}], [], None, options)


def template(text: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, {}, {})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return train_tokenizer(["some text"] * 3, 270, tmp_path_factory.mktemp("tokenizer"))


async def ticking(work: Callable[[], Awaitable[Any]]) -> tuple[Any, int]:
    """Return what `work` gives, an error too, and how often the event loop went round meanwhile."""
    task, rounds = asyncio.ensure_future(work()), 0
    while not task.done():
        await asyncio.sleep(0.01)
        rounds += 1
    return task.exception() or task.result(), rounds


QUICK = ["a loop", "a text without end", "a number without end", "recursion", "an error"]


@pytest.mark.parametrize("names", [QUICK, pytest.param(list(ENDLESS), marks=pytest.mark.long)], ids=["some", "all"])
def test_templates_without_end_are_refused_and_others_rendered(names: list[str]) -> None:
    async def run() -> tuple[list[Any], int]:
        workers = WorkerProcesses(None, seconds=1.5)
        asked = [workers.render_chat(template(ENDLESS[name]), conversation(), True, False) for name in names]
        found, rounds = await ticking(lambda: asyncio.gather(*asked, return_exceptions=True))
        honest = await workers.render_chat(template("<{{ messages[0].content }}>"), conversation(), True, False)
        return [*found, honest], rounds

    (*errors, honest), rounds = asyncio.run(run())
    assert len(errors) == len(names)
    assert {type(error) for error in errors} <= {DataError, ChatTemplateMemoryError}
    assert honest == "<hello>"
    assert rounds > 10


def test_grammars_without_end_are_refused_once_and_others_compiled(tokenizer: Tokenizer) -> None:
    async def run() -> list[Any]:
        workers = WorkerProcesses(GrammarCache(tokenizer), seconds=1)
        same = [asyncio.ensure_future(workers.prepare_grammar(REGEXES, {0})) for _ in range(8)]
        await workers.prepare_grammar('start: "a"', {0})
        assert not any(one.done() for one in same)
        found = await asyncio.gather(*same, return_exceptions=True)
        begun = time.monotonic()
        found += await asyncio.gather(workers.prepare_grammar(REGEXES, {0}), return_exceptions=True)
        assert time.monotonic() - begun < 0.5  # remembered
        return found

    assert [type(error) for error in asyncio.run(run())] == [DataError] * 9


def exhaust_memory() -> None:
    """Run in a worker process."""
    raise MemoryError


def test_a_lost_process_is_replaced_and_a_busy_machine_is_no_fault_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        workers = WorkerProcesses(None)

        async def render() -> str:
            return await workers.render_chat(template("<{{ messages[0].content }}>"), conversation(), True, False)

        assert await render() == "<hello>"
        before = await to_process.run_sync(os.getpid)
        os.kill(before, signal.SIGKILL)  # while it is idle
        assert await render() == "<hello>"
        assert (after := await to_process.run_sync(os.getpid)) != before
        excess = DataError("too much")
        with pytest.raises(DataError, match="too much"):
            await workers._run_task(CapacityLimiter(1), excess, run_with_cpu_and_memory_limits, exhaust_memory)
        assert await render() == "<hello>"
        assert await to_process.run_sync(os.getpid) != after, "a process without memory gets no other task"
        monkeypatch.setattr(worker_processes, "WALL_SECONDS", -1)
        with pytest.raises(ApiRequestError, match="too busy") as refused:
            await render()
        assert (refused.value.status, refused.value.retry_after) == (503, 10)

    asyncio.run(run())


def test_an_honest_grammar_is_compiled_for_the_engine(tokenizer: Tokenizer) -> None:
    grammars = GrammarCache(tokenizer)
    asyncio.run(WorkerProcesses(grammars).prepare_grammar('start: "a"', {0}))
    assert grammars.has_grammar('start: "a"', {0})


def test_other_threads_run_while_a_text_is_encoded(tokenizer: Tokenizer) -> None:
    """`encode` of one text keeps the interpreter's lock; a batch of one does not."""
    done, rounds = threading.Event(), 0
    text = "some text " * 200_000

    def encode() -> None:
        tokenizer.backend.encode_batch([text])
        done.set()

    threading.Thread(target=encode).start()
    while not done.wait(0.001):
        rounds += 1
    assert rounds > 3


def byte_pairs(**options: Any) -> Backend:
    letters = pre_tokenizers.ByteLevel.alphabet()
    backend = Backend(models.BPE({letter: number for number, letter in enumerate([*letters, "ab"])}, [("a", "b")]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for name, value in options.items():
        setattr(backend, name, value)
    return backend


def with_token(content: str, **how: bool) -> Backend:
    from tokenizers import AddedToken

    backend = byte_pairs()
    backend.add_tokens([AddedToken(content, **how)])
    return backend


SENTENCES = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


@pytest.mark.parametrize(
    ("backend", "longest"),
    [
        (byte_pairs(), 2),
        (with_token("<|a long token|>"), 16),
        (with_token("🎉🎉"), 8),
        (with_token("<mask>", lstrip=True), None),
        (with_token("<mask>", rstrip=True), None),
        (byte_pairs(normalizer=normalizers.Lowercase()), None),
        (byte_pairs(normalizer=normalizers.Strip()), None),
        (byte_pairs(normalizer=normalizers.NFC()), None),
        (byte_pairs(normalizer=normalizers.Replace("x", "")), None),
        (byte_pairs(normalizer=SENTENCES), 2),
        (byte_pairs(pre_tokenizer=pre_tokenizers.Whitespace()), None),
        (byte_pairs(pre_tokenizer=pre_tokenizers.Split("x", "removed")), None),
        (Backend(models.BPE({"a": 0, "b": 1}, [])), None),
        (Backend(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")), None),
        (Backend(models.Unigram([("a", 0.0)], 0)), None),
    ],
)
def test_bytes_that_a_token_covers(backend: Backend, longest: int | None, tmp_path: Path) -> None:
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    found = find_max_token_bytes(tokenizer)
    assert (found is None) is (longest is None)
    if found is not None and longest is not None:
        assert found >= longest
        for text in ("ab" * 99, "some text 🎉" * 9, " " * 50, "<|a long token|>" * 9, json.dumps(["ä"] * 9)):
            assert len(text.encode()) <= found * len(tokenizer.encode(text))
