"""A server under strain: engines that are slow, stuck or broken, readers that do not read, and the end of it all."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from serving import Scripted, service_of, serving, until

from mega_common.errors import ConfigError, DataError, MegaError
from mega_data.tokenizer import train_tokenizer
from mega_eval.engine_requests import GenerationEvent
from mega_eval.server.inference_server import bind_server_socket


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["some text"], 260, folder)
    return folder


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def post(url: str, *, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    given = {"prompt": "some", "max_tokens": 3, **body}
    return httpx.post(f"{url}/v1/completions", json=given, headers=headers, timeout=60)


def error_of(response: httpx.Response) -> Any:
    return response.json()["error"]


def test_more_than_the_server_takes_is_refused_with_429(tokenizer: Path, pool: ThreadPoolExecutor) -> None:
    engine = Scripted()
    service = service_of(engine, tokenizer, most=3)
    with serving(service) as (url, _):
        first = pool.submit(post, url, n=3)
        until(lambda: engine.num_running == 3)
        refused = post(url)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert error_of(refused)["code"] == "server_busy"
        assert httpx.get(f"{url}/health").status_code == 200
        engine.go.set()
        assert [choice["text"] for choice in first.result().json()["choices"]] == ["xxx"] * 3
        assert post(url).status_code == 200


def test_as_many_requests_at_once_as_it_may_be(tokenizer: Path, pool: ThreadPoolExecutor) -> None:
    engine = Scripted()
    with serving(service_of(engine, tokenizer), requests=2) as (url, _):
        running = [pool.submit(post, url) for _ in range(2)]
        until(lambda: engine.num_running == 2)
        assert post(url).status_code == 429
        engine.go.set()
        assert [one.result().status_code for one in running] == [200, 200]


def test_time_is_bounded(tokenizer: Path) -> None:
    engine = Scripted()
    with serving(service_of(engine, tokenizer, seconds=0.2)) as (url, _):
        late = post(url)
        assert (late.status_code, error_of(late)["code"]) == (504, "timeout")
        until(lambda: engine.num_running == 0)
        streamed = post(url, stream=True)
        assert streamed.status_code == 200
        (event,) = streamed.text.split("\n\n")[:-1]
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == "timeout"


@pytest.mark.parametrize("work", ["step", "add_request", "cancel_request"])
def test_an_engine_that_hangs_shows_in_health_until_it_goes_on(
    tokenizer: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    engine, hang = Scripted(), threading.Event()
    engine.go.set()
    service = service_of(engine, tokenizer, seconds=0.2)
    with serving(service) as (url, _):
        assert post(url).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        does = getattr(engine, work)

        def hanging(*arguments: Any, **options: Any) -> Any:
            hang.wait(60)
            return does(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(engine, work, hanging)
            if work == "cancel_request":
                engine.go.clear()  # the time limit cancels it
            late = pool.submit(post, url)
            until(lambda: httpx.get(f"{url}/health").status_code == 503)
            assert "the engine hangs" in error_of(httpx.get(f"{url}/health"))["message"]
            assert late.result().status_code == 504
        engine.go.set()
        hang.set()
        until(lambda: httpx.get(f"{url}/health").status_code == 200)
        assert post(url).status_code == 200


def test_the_end_does_not_wait_for_a_step_that_hangs(
    tokenizer: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, hang = Scripted(), threading.Event()
    monkeypatch.setattr(engine, "step", lambda *, isolate: hang.wait(60) and [])
    service = service_of(engine, tokenizer, seconds=0.1)
    close = service.driver.stop_thread
    monkeypatch.setattr(service.driver, "stop_thread", lambda: close(0.1))
    with serving(service, drain=0.1) as (url, server):
        late = pool.submit(post, url)
        assert late.result().status_code == 504
    assert not server.engine_ended
    hang.set()


def test_a_failed_step_ends_what_runs_and_the_engine_starts_again(tokenizer: Path, pool: ThreadPoolExecutor) -> None:
    engine = Scripted(error=RuntimeError("out of memory"))
    with serving(service_of(engine, tokenizer)) as (url, _):
        running = [pool.submit(post, url, stream=stream) for stream in (False, True)]
        until(lambda: engine.num_running == 2)
        engine.go.set()
        whole, streamed = (one.result() for one in running)
        assert whole.status_code == 500
        assert "out of memory" in error_of(whole)["message"]
        assert "out of memory" in streamed.text
        assert httpx.get(f"{url}/health").status_code == 200
        engine.error = None
        assert post(url).json()["choices"][0]["text"] == "xxx"


def test_an_engine_that_fails_again_and_again_stays_down_and_shows_in_health(tokenizer: Path) -> None:
    engine = Scripted(error=RuntimeError("out of memory"))
    engine.go.set()
    with serving(service_of(engine, tokenizer)) as (url, _):
        assert [post(url).status_code for _ in range(5)] == [500, 500, 500, 503, 503]
        assert httpx.get(f"{url}/health").status_code == 503


def test_an_engine_that_cannot_start_again_stays_down(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted(error=RuntimeError("out of memory"))
    engine.go.set()
    monkeypatch.setattr(engine, "drop_all_requests", lambda: 1 / 0)
    with serving(service_of(engine, tokenizer)) as (url, _):
        assert [post(url).status_code for _ in range(2)] == [500, 503]


@pytest.mark.parametrize(
    ("error", "status"), [(DataError("the grammar is too complex"), 400), (ValueError("x"), 500), (MegaError("x"), 500)]
)
def test_a_request_that_fails_while_it_runs_ends_no_other(
    tokenizer: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    engine = Scripted()
    told = engine._event

    def event_of(number: int, request: Any) -> GenerationEvent:
        if request.limits.max_new_tokens == 5:
            engine.requests.pop(number)
            return GenerationEvent(number, "", [], [], None, None, error)
        return told(number, request)

    monkeypatch.setattr(engine, "_event", event_of)
    with serving(service := service_of(engine, tokenizer)) as (url, _):
        honest = [pool.submit(post, url, stream=stream, n=2) for stream in (False, True)]
        failing = [pool.submit(post, url, stream=stream, max_tokens=5, n=2) for stream in (False, True)]
        until(lambda: engine.num_running == 8)
        engine.go.set()
        whole, streamed = (one.result() for one in failing)
        assert (whole.status_code, whole.json()) == (status, json.loads(streamed.text.removeprefix("data: ")))
        assert [choice["text"] for choice in honest[0].result().json()["choices"]] == ["xxx"] * 2
        assert honest[1].result().text.endswith("data: [DONE]\n\n")
        until(lambda: service.driver.open_requests == engine.num_running == 0)


def test_a_request_that_fails_ends_no_other(tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted()
    engine.go.set()
    with serving(service_of(engine, tokenizer)) as (url, _):
        with monkeypatch.context() as patch:
            patch.setattr(engine, "add_request", lambda request: 1 / 0)
            failed = post(url)
        assert (failed.status_code, error_of(failed)["message"]) == (500, "internal error; the server's log has more")
        assert post(url).status_code == 200


def test_a_reader_that_does_not_read_holds_up_nobody(tokenizer: Path) -> None:
    engine = Scripted(text="x" * 50_000)
    engine.go.set()
    service = service_of(engine, tokenizer)
    with serving(service) as (url, _):
        body = json.dumps({"prompt": "some", "max_tokens": 200, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1]))) as slow:
            slow.sendall(head.encode() + body)
            until(lambda: list(engine.said.values()) == [200])
            assert engine.num_running == 0
            assert post(url).status_code == 200
            assert service.driver.open_requests == 1
        until(lambda: service.driver.open_requests == 0)


def test_the_end_waits_for_what_runs_and_refuses_what_comes(tokenizer: Path, pool: ThreadPoolExecutor) -> None:
    engine = Scripted()
    with serving(service_of(engine, tokenizer)) as (url, server), httpx.Client() as kept:
        running = pool.submit(post, url)
        until(lambda: engine.num_running == 1)
        server.handle_exit(signal.SIGTERM, None)
        assert kept.get(f"{url}/health").status_code == 503
        assert post(url).status_code == 503
        assert not server.should_exit
        engine.go.set()
        assert running.result().json()["choices"][0]["text"] == "xxx"
        until(lambda: server.should_exit)
    assert not server.force_exit


def test_the_end_does_not_wait_forever(tokenizer: Path, pool: ThreadPoolExecutor) -> None:
    engine = Scripted()
    with serving(service_of(engine, tokenizer), drain=0.2) as (url, _):
        running = [pool.submit(post, url, stream=stream) for stream in (False, True)]
        until(lambda: engine.num_running == 2)
    whole, streamed = (one.result() for one in running)
    assert (whole.status_code, error_of(whole)["message"]) == (503, "the server is shutting down")
    assert "shutting down" in streamed.text


def test_a_second_signal_ends_at_once(tokenizer: Path, pool: ThreadPoolExecutor) -> None:
    engine = Scripted()
    with serving(service_of(engine, tokenizer)) as (url, server):
        running = pool.submit(post, url)
        until(lambda: engine.num_running == 1)
        server.handle_exit(signal.SIGTERM, None)
        server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "engine"])
    assert running.exception() or running.result().status_code >= 500


def test_bodies_are_bounded_and_half_characters_refused(tokenizer: Path) -> None:
    with serving(service_of(Scripted(), tokenizer), max_body=1000) as (url, _):
        large = post(url, prompt="x" * 1000)
        assert (large.status_code, error_of(large)["code"]) == (413, "request_too_large")
        headers = {"content-type": "application/json"}
        pieces = httpx.post(f"{url}/v1/completions", content=iter([b" " * 600] * 2), headers=headers)
        assert (pieces.status_code, error_of(pieces)["code"]) == (413, "request_too_large")
        half = httpx.post(f"{url}/v1/completions", content=rb'{"prompt": "\ud800"}', headers=headers)
        assert half.status_code == 400
        half = httpx.post(
            f"{url}/tokenize",
            content=rb'{"messages": [{"role": "user", "content": "", "x": "\ud800"}]}',
            headers=headers,
        )
        assert half.status_code == 400
        unknown = httpx.post(f"{url}/v1/completions", content=rb'{"prompt": "a", "model": "\ud800"}', headers=headers)
        assert unknown.status_code == 404
        broken = httpx.post(f"{url}/v1/completions", content=b'{"prompt": ', headers=headers)
        assert (broken.status_code, error_of(broken)["message"]) == (
            400,
            "the body is not JSON (Expecting value at character 11)",
        )
        deep = httpx.post(f"{url}/v1/completions", content=b"[" * 999, headers=headers)
        assert deep.status_code == 400


def test_a_server_without_key_answers_only_to_the_names_of_its_machine(tokenizer: Path) -> None:
    with serving(service_of(Scripted(), tokenizer)) as (url, _):
        assert httpx.get(f"{url}/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert httpx.get(f"{url}/v1/models", headers={"host": "localhost:1"}).status_code == 200
        plain = httpx.post(f"{url}/v1/completions", content='{"prompt": "x"}', headers={"content-type": "text/plain"})
        assert plain.status_code == 415


def test_addresses_that_cannot_be(tokenizer: Path) -> None:
    with pytest.raises(ConfigError, match="requires an API key"):
        bind_server_socket("0.0.0.0", 0, None)
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind_server_socket("no-such-host.invalid", 0, "key")
    with bind_server_socket("127.0.0.1", 0, None) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="in use"):
            bind_server_socket("127.0.0.1", taken.getsockname()[1], None)
