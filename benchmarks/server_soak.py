"""Memory, errors and answers of `mega serve` under clients of all kinds at once, for an hour.

    python benchmarks/server_soak.py [--minutes 60] [--clients 32] [--dry]

It serves a tiny vision-language model that it makes, with a folder of adapters. Each client sends one request after another,
drawn at random: honest ones of `HONEST` (completions, chats, tools, schemas, images, responses, messages, embeddings, rerank,
tokens, adapters, whole and streamed), streams and whole answers that the client leaves, bodies and images made to be refused,
and the attacks of `hostile.py`. Every honest request is greedy; its answer is compared with the first one, which was made
before the other clients came.

Recorded are the requests and statuses by kind, the memory of the server and of its worker processes each minute, failed and
changed honest answers, and stuck requests: those without an answer in two minutes, and those that the server still counts as open
after all clients have gone.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hostile
import numpy as np
import record

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tiny_adapters import save_adapter
from vision_language_models import picture, save_model

from mega_common.lora_config import LoraConfig

PATIENCE = 120.0  # seconds until a request without an answer is stuck
SPOKEN = (
    "text", "content", "delta", "arguments", "partial_json", "thinking", "reasoning_content", "tokens", "prompt", "index",
    "message",
)  # fmt: skip
STREAM = {"stream": True}
GREEDY = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
WHERE = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["place", "days"], "additionalProperties": False}  # fmt: skip
TOOLS = {
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": WHERE}}],
    "tool_choice": "required",
}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": WHERE}}}
ASK = [{"role": "user", "content": "what is it?"}]


def image_message(content: bytes) -> list[dict[str, Any]]:
    """Return the messages of a chat about an image file."""
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]}]  # fmt: skip


def make_honest_requests() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the honest requests by kind: the path and the body."""
    chat, completion = {"messages": ASK, **GREEDY}, {"prompt": "the end of the story", **GREEDY}
    tools = {**chat, **TOOLS, "ignore_eos": False, "max_tokens": 80}
    message = {"messages": ASK, "max_tokens": 16, "temperature": 0}
    used = {"tools": [{"name": "weather", "input_schema": WHERE}], "tool_choice": {"type": "any"}, "max_tokens": 80}
    response = {"input": "what is it?", "max_output_tokens": 16, "temperature": 0}
    pictured = {**GREEDY, "messages": image_message(picture(1))}
    texts = ["the end", "the story of the end", "what is it?"]
    whole: dict[str, tuple[str, dict[str, Any]]] = {
        "completion": ("/v1/completions", completion),
        "completion with scores": ("/v1/completions", {**completion, "logprobs": 3, "echo": True, "n": 2}),
        "long completion": ("/v1/completions", {**completion, "max_tokens": 200}),
        "chat": ("/v1/chat/completions", chat),
        "chat with tools": ("/v1/chat/completions", tools),
        "chat with schema": ("/v1/chat/completions", {**chat, **SCHEMA, "ignore_eos": False, "max_tokens": 80}),
        "chat with image": ("/v1/chat/completions", pictured),
        "responses": ("/v1/responses", response),
        "messages": ("/v1/messages", message),
        "messages with tools": ("/v1/messages", {**message, **used}),
    }
    return {
        **whole,
        **{f"{name}, streamed": (path, {**body, **STREAM}) for name, (path, body) in whole.items()},
        "embeddings": ("/v1/embeddings", {"input": texts}),
        "rerank": ("/v1/rerank", {"query": "the end", "documents": texts}),
        "tokenize": ("/tokenize", {"messages": ASK}),
        "detokenize": ("/detokenize", {"tokens": [5, 60, 70]}),
    }


HONEST = make_honest_requests()
DEEP: Any = {"type": "object"}
for _ in range(60):
    DEEP = {"anyOf": [DEEP, {"type": "array", "items": DEEP}]} if len(json.dumps(DEEP)) < 20_000 else {"not": DEEP}
BOMB = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x01\x00\x00\x00\x01\x00\x00\x08\x02\x00\x00\x00" + bytes(64)
REFUSED: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {**GREEDY, "messages": image_message(BOMB)}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://10.0.0.1/a.png"}}]}]}),
    ("/v1/chat/completions", {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}}),
    ("/v1/chat/completions", {"messages": ASK, "chat_template_kwargs": {"messages": []}}),
    ("/v1/chat/completions", {"messages": "no list", "n": -1, "stop": [""] * 99}),
    ("/v1/completions", {"prompt": [[10**9]], "logit_bias": {"-1": 1000}}),
    ("/v1/completions", {"prompt": "\ud800"}),
    ("/v1/completions", {"prompt": ["a"] * 5000}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}], "max_tokens": 1}),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "x"}]}),
    ("/v1/embeddings", {"input": [""]}),
    ("/v1/rerank", {"query": "a", "documents": []}),
    ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "../../etc"}),
    ("/nowhere", []),
]  # fmt: skip


class Answer(NamedTuple):
    """Status of a request (0: none, 598: no answer in time) and what its answer says, without ids and times."""

    status: int
    said: Any


@contextlib.contextmanager
def connected(port: int) -> Iterator[http.client.HTTPConnection]:
    """Give a connection, which is closed at the end in any state."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        yield connection
    finally:
        connection.close()


def ask(port: int, path: str, body: Any) -> Answer:
    """Send a request and read its whole answer."""
    with connected(port) as connection:
        try:
            connection.request("POST", path, json.dumps(body), hostile.JSON)
            answer = connection.getresponse()
            return Answer(answer.status, read_answer(answer.read()))
        except TimeoutError:
            return Answer(598, None)
        except (OSError, http.client.HTTPException) as error:
            return Answer(0, type(error).__name__)


def read_answer(data: bytes) -> Any:
    """Return all that an answer says: texts of the same field joined, so that the chunks of a stream do not matter."""
    said: dict[str, list[Any]] = defaultdict(list)

    def collect(value: Any) -> None:
        for name, inner in value.items() if isinstance(value, dict) else ():
            if name == "embedding" or (isinstance(inner, str) and name in SPOKEN):
                said[name].append(inner)
            elif name == "results":
                said[name] += [one["index"] for one in inner]
            for one in inner if isinstance(inner, list) else [inner]:
                collect(one)

    if data.startswith((b"data:", b"event:")):
        events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
        for event in events:
            collect({} if event == b"[DONE]" else json.loads(event))
    else:
        with contextlib.suppress(ValueError):
            collect(json.loads(data))
    return {name: "".join(found) if isinstance(found[0], str) else found for name, found in said.items()}


def same(one: Any, other: Any) -> bool:
    """Return whether two answers say the same; vectors may differ by rounding."""
    if one is None or other is None or one.keys() != other.keys():
        return False
    return all(
        np.allclose(value, other[name], atol=1e-4) if name == "embedding" else value == other[name]
        for name, value in one.items()
    )


def leave(port: int, draw: random.Random) -> Answer:
    """Leave a stream after some of its bytes, or a whole answer before it comes."""
    path, body = draw.choice([entry for entry in HONEST.values() if "max_tokens" in entry[1]])
    body = {**body, "max_tokens": 400, "stream": draw.random() < 0.7}
    with connected(port) as connection, contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("POST", path, json.dumps(body), hostile.JSON)
        if body["stream"]:
            connection.getresponse().read(draw.randrange(1, 2000))
        else:
            time.sleep(draw.random())
    return Answer(0, None)


def refuse(port: int, draw: random.Random) -> Answer:
    """Send a body that has to be refused."""
    return ask(port, *draw.choice(REFUSED))


def attack(port: int, draw: random.Random) -> Answer:
    """Run one of the attacks of `hostile.py`."""
    draw.choice(hostile.ATTACKS)(port, draw)
    return Answer(0, None)


def use_adapter(port: int, draw: random.Random) -> Answer:
    """Load an adapter under a new name, use it and unload it; says what it answered."""
    name = f"adapter-{draw.getrandbits(64)}"
    if (loaded := ask(port, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": "one"})).status != 200:
        return loaded
    answer = ask(port, "/v1/completions", {**HONEST["completion"][1], "model": name})
    unloaded = ask(port, "/v1/unload_lora_adapter", {"lora_name": name})
    return answer if unloaded.status == 200 else unloaded


KINDS: dict[str, tuple[float, Callable[[int, random.Random], Answer]]] = {
    "left by the client": (5, leave),
    "refused": (4, refuse),
    "attack": (0.5, attack),
    "adapter": (0.3, use_adapter),
    **{
        name: (1, lambda port, _, entry=entry: ask(port, *entry))  # type: ignore[misc]
        for name, entry in HONEST.items()
    },
}
"""Kinds of requests: how often they are drawn, and the function that sends one."""


class Soak:
    """Clients that send requests until a time, and what came of them."""

    def __init__(self, port: int, clients: int) -> None:
        self._port, self._clients = port, clients
        self._lock = threading.Lock()
        self._expected = {name: KINDS[name][1](port, random.Random(0)) for name in (*HONEST, "adapter")}
        self.statuses: dict[str, Counter[int]] = defaultdict(Counter)
        self.changed: list[Any] = []
        self.failed: list[Any] = []

    def run_client(self, number: int, end: float) -> None:
        """Send requests until `end`, with pauses."""
        draw = random.Random(number)
        names, weights = list(KINDS), [weight for weight, _ in KINDS.values()]
        while time.monotonic() < end:
            (name,) = draw.choices(names, weights)
            answer = KINDS[name][1](self._port, draw)
            expected = self._expected.get(name)
            with self._lock:
                self.statuses[name][answer.status] += 1
                if expected and answer.status != 200:
                    self.failed.append({"kind": name, "status": answer.status, "said": answer.said})
                elif expected and not same(answer.said, expected.said):
                    self.changed.append({"kind": name, "expected": expected.said, "found": answer.said})
            time.sleep(draw.random())

    def run(self, minutes: float, sample: Callable[[], None]) -> None:
        """Run all clients for some minutes; call `sample` each minute."""
        assert all(answer.status == 200 for answer in self._expected.values()), self._expected
        end = time.monotonic() + 60 * minutes
        threads = [threading.Thread(target=self.run_client, args=[number, end]) for number in range(self._clients)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            sample()
            until = time.monotonic() + 60
            while time.monotonic() < until and any(thread.is_alive() for thread in threads):
                time.sleep(0.5)
        sample()


def resident_megabytes(pid: int) -> float:
    """Return the resident memory of a process; 0 if it has ended."""
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
    return 0.0


def list_children(pid: int) -> list[int]:
    """Return the ids of the child processes of a process."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


def read_gauges(port: int) -> dict[str, float]:
    """Return the gauges of the engine."""
    with connected(port) as connection:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if line.startswith(("mega_engine", "mega_cache")))}  # fmt: skip


def count_open_requests(port: int) -> float:
    """Return how many requests the engine still has a minute after the last client; also those that hold pages."""
    for _ in range(60):
        gauges = read_gauges(port)
        left = gauges["mega_engine_waiting"] + gauges["mega_engine_running"]
        held = gauges["mega_cache_pages"] - gauges["mega_cache_free_pages"]
        if not left and not held:
            return 0
        time.sleep(1)
    return max(left, 1)


def soak(port: int, pid: int, minutes: float, clients: int) -> dict[str, Any]:
    """Return the results of a soak of a server."""
    run = Soak(port, clients)
    memory, workers, descriptors = list[float](), list[float](), list[int]()

    def sample() -> None:
        memory.append(resident_megabytes(pid))
        workers.append(round(sum(map(resident_megabytes, list_children(pid))), 1))
        descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))

    run.run(minutes, sample)
    left = count_open_requests(port)
    late = sum(statuses[598] for statuses in run.statuses.values())
    return {
        "minutes": minutes, "clients": clients,
        "requests": {name: sum(statuses.values()) for name, statuses in sorted(run.statuses.items())},
        "statuses": {name: {str(status): count for status, count in sorted(statuses.items())} for name, statuses in sorted(run.statuses.items())},
        "memory_mb": memory, "workers_mb": workers, "descriptors": descriptors,
        "failed": len(run.failed), "failures": run.failed[:20], "changed": len(run.changed), "changes": run.changed[:5], "stuck": late + left,
    }  # fmt: skip


def run(minutes: float, clients: int) -> dict[str, Any]:
    """Make the model, serve it, and return the results of a soak."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        save_model("llava", model)
        save_adapter(Path(folder, "adapters", "one"), model, LoraConfig(rank=2, modules=["q_proj", "o_proj"]))
        with hostile.served(str(model), "--adapter-folder", f"{folder}/adapters") as (port, pid):
            return soak(port, pid, minutes, clients)


def main() -> None:
    """Run the soak, print and record its results; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    found = run(options.minutes, options.clients)
    print(json.dumps(found, indent=1))
    if not options.dry:
        record.write("server_soak", found, ["torch", "uvicorn", "fastapi", "llguidance"])


if __name__ == "__main__":
    main()
