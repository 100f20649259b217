"""lm-evaluation-harness over HTTP: its client for servers gives what its own model gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from local_tasks import assert_same, hf_results, write_model, write_tasks
from serving import service_of, serving

from mega_data.tokenizer import Tokenizer
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import load_inference_model


@pytest.mark.long
def test_scores_over_http_are_those_of_the_harness_own_model(tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    write_model(tmp_path)
    tasks = write_tasks(tmp_path, 6)[:2]  # choices, and documents longer than the model sees
    engine = InferenceEngine(load_inference_model(tmp_path), Tokenizer(tmp_path), cache_tokens=2048, batch_size=8)
    with serving(service_of(engine, tmp_path, max_length=80)) as (url, _):
        # of its max_length the client keeps a token for an answer and, of windows, one for what comes before
        given = {"model": "tiny", "base_url": f"{url}/v1/completions", "tokenizer": str(tmp_path), "max_length": 64 + 2}
        manager = TaskManager(include_defaults=False)
        found = simple_evaluate(
            "local-completions",
            model_args=given,
            tasks=tasks,
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
        )
    assert_same(json.loads(json.dumps(found, default=str)), hf_results(tmp_path, tasks), rel=1e-4)
