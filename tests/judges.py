"""Judges by rule in place of a model, behind OpenAI's API."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from mega_eval.judge_scores import JudgeClient

Rule = Callable[[dict[str, Any]], Any]


@contextmanager
def judging(rule: Rule, failures: int = 0, status: int = 503) -> Iterator[tuple[JudgeClient, list[dict[str, Any]]]]:
    """A judge that gives the verdicts of a rule, after some failed requests; and the bodies that it was sent."""
    bodies: list[dict[str, Any]] = []
    left = [failures]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": "the judge"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if left[0]:
                left[0] -= 1
                self.answer(status, {"error": {"message": "not now"}})
                return
            assert (self.path, self.headers["authorization"]) == ("/v1/chat/completions", "Bearer sk-judge")
            bodies.append(body)
            said = rule(json.loads(body["messages"][1]["content"]))
            self.answer(
                200, {"choices": [{"message": {"content": said if isinstance(said, str) else json.dumps(said)}}]}
            )

        def answer(self, code: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield JudgeClient(f"http://127.0.0.1:{server.server_port}/v1", None, "sk-judge"), bodies
    finally:
        server.shutdown()
        server.server_close()


def score_length(material: dict[str, Any]) -> Any:
    return {"reason": "long", "score": min(10, len(material["answer"]))}
