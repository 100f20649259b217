"""Honest requests among those of `benchmarks/hostile.py` and `server_soak.py`: none fails, and no answer changes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from engines import model_of
from serving import service_of, serving, until
from tiny_models import variant

from mega_data.tokenizer import Tokenizer, train_tokenizer
from mega_eval.inference_engine import InferenceEngine

pytest.importorskip("llguidance")


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    return importlib.import_module("hostile")


@pytest.mark.long
def test_honest_answers_are_the_same_among_hostile_requests(hostile: Any, tmp_path: Path) -> None:
    words: Tokenizer = train_tokenizer(["the end of the story: def main, a list [1, 2]"] * 3, 300, tmp_path)
    config = variant("grouped").model_copy(update={"vocab_size": words.vocab_size, "max_position": 512})
    engine = InferenceEngine(model_of(config), words, cache_tokens=2048, batch_size=8)
    with serving(service := service_of(engine, tmp_path), requests=32) as (url, server):
        port = int(url.rsplit(":", 1)[1])
        alone = hostile.honest(port, 3)
        with hostile.attacked(port):
            among = hostile.honest(port, 30)
        assert {*alone["statuses"], *among["statuses"]} == {200}
        assert among["texts"] == alone["texts"]
        assert all(len(texts) == 1 for texts in among["texts"].values())
        assert httpx.get(f"{url}/health").status_code == 200
        until(lambda: service.driver.open_requests == 0 and server.gate.active == 0)
        until(lambda: engine.num_free_pages == engine.num_pages)


@pytest.mark.long
def test_a_short_soak_changes_no_answer(hostile: Any) -> None:
    """Seconds of the hour that `benchmarks/server_soak.py` runs."""
    soak = importlib.import_module("server_soak")
    found = soak.run(0.25, 12)
    assert (found["changed"], found["stuck"]) == (0, 0), found["changes"]
    assert found["statuses"].keys() >= {"left by the client", "refused"}
    for name in found["statuses"].keys() & {*soak.HONEST, "adapter"}:
        assert found["statuses"][name].keys() == {"200"}, name
    assert not {"0", "200", "500"} & found["statuses"]["refused"].keys()
