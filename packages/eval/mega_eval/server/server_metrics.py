"""Prometheus metrics of the server, in their own registry."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import Scope

from mega_eval.inference_engine import InferenceEngine

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class ServerMetrics:
    """Prometheus metrics of the server.
    They are counters of requests and tokens, and gauges of the inference engines, summed over the models.
    """

    def __init__(self, *engines: InferenceEngine) -> None:
        self._registry = CollectorRegistry()
        labels = ("route", "status")
        self._requests = Counter("mega_requests", "HTTP requests answered", labels, registry=self._registry)
        self._seconds = _make_histogram(
            "mega_request_seconds", "Time from a request to the end of its answer", self._registry
        )
        self._first = _make_histogram("mega_first_token_seconds", "Time to the first token", self._registry)
        self._tokens = Counter("mega_tokens", "Prompt and completion tokens", ("kind",), registry=self._registry)
        counts: dict[str, tuple[str, Callable[[], float]]] = {
            "mega_engine_waiting": (
                "Requests waiting in the queue",
                lambda: sum(engine.num_waiting for engine in engines),
            ),
            "mega_engine_running": ("Running requests", lambda: sum(engine.num_running for engine in engines)),
            "mega_cache_pages": ("Pages of the KV cache", lambda: sum(engine.num_pages for engine in engines)),
            "mega_cache_free_pages": (
                "Free pages of the KV cache",
                lambda: sum(engine.num_free_pages for engine in engines),
            ),
        }
        for name, (text, count) in counts.items():
            Gauge(name, text, registry=self._registry).set_function(count)

    def record_request(self, scope: Scope, status: int, seconds: float) -> None:
        """Count an answered HTTP request and its duration in the metrics.
        Unknown paths share one label, so that clients cannot create new series.
        """
        route = getattr(scope.get("route"), "path", "other")
        self._requests.labels(route, str(status or "gone")).inc()
        self._seconds.observe(seconds)

    def record_first_token(self, seconds: float) -> None:
        """Record the time from a request to its first generated token, in seconds."""
        self._first.observe(seconds)

    def record_tokens(self, prompt: int, completion: int) -> None:
        """Add the numbers of prompt tokens and completion tokens of an answer to the counters."""
        self._tokens.labels("prompt").inc(prompt)
        self._tokens.labels("completion").inc(completion)

    def render_metrics(self) -> bytes:
        """Return all metrics of the server in Prometheus's text format."""
        return generate_latest(self._registry)


def _make_histogram(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    """Return a histogram of seconds."""
    return Histogram(name, text, buckets=SECONDS, registry=registry)
