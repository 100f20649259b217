"""Tasks of lm-evaluation-harness whose data are files here: one of each kind, and a model that is asked them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_templates import QWEN
from tiny_models import save_tiny, variant

from mega_ckpt.families import find_family_by_name
from mega_data.tokenizer import train_tokenizer

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "the",
    "dog",
    "ran",
    "to",
    "an",
    "end",
    "of",
    "the",
    "story",
    "in",
    "one",
    "long",
    "day",
]
KINDS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}", "num_fewshot": 1, "fewshot_split": "validation",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "generation": {
        "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{target}}",
        "generation_kwargs": {"until": ["\n", "q"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


def write_tasks(folder: Path, count: int = 12) -> list[str]:
    """Write a task of each kind, with `count` documents; returns the paths of their YAML files."""
    rng = random.Random(0)

    def text(low: int, high: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))

    paths = []
    for kind, task in KINDS.items():
        documents = [
            {
                "question": text(2, 9), "choices": [text(1, 3) for _ in range(4)], "answer": rng.randrange(4),
                "text": text(1, 150), "target": text(1, 2),
            }
            for _ in range(count)
        ]  # fmt: skip
        data = folder / f"{kind}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        given = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": str(data)}}}
        path = folder / f"{kind}.yaml"
        path.write_text(yaml.safe_dump({"task": f"local_{kind}", "validation_split": "validation", **given, **task}))
        paths.append(str(path))
    return paths


def write_model(folder: Path, name: str = "grouped", family: str = "llama") -> None:
    """A tiny random model as a HuggingFace folder, with a tokenizer, its chat template, and room for 64 tokens."""
    tokenizer = train_tokenizer([" ".join(WORDS)] * 3, 300, folder)
    model = variant(name).model_copy(update={"vocab_size": tokenizer.vocab_size})
    save_tiny(folder, find_family_by_name(family), model)
    (folder / "chat_template.jinja").write_text(QWEN.replace("<<", "").replace(">>", ""))


def hf_results(
    folder: Path, names: list[str], dtype: str = "float32", max_length: int | None = None, **options: Any
) -> dict[str, Any]:
    """What the harness's own model gives."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(folder), device="cpu", dtype=dtype, batch_size=3, max_length=max_length)
    manager = TaskManager(include_defaults=False)
    return simple_evaluate(model, tasks=names, task_manager=manager, log_samples=True, bootstrap_iters=0, **options)


def assert_same(one: dict[str, Any], other: dict[str, Any], rel: float = 1e-5) -> None:
    """Sample by sample: what was asked, what was answered, how it scored."""
    one, other = (json.loads(json.dumps(results, default=str)) for results in (one, other))  # tuples are lists there
    assert one["samples"].keys() == other["samples"].keys()
    for task, samples in one["samples"].items():
        assert len(samples) == len(other["samples"][task]) > 0
        for mine, yours in zip(samples, other["samples"][task], strict=True):
            assert mine["arguments"] == yours["arguments"]
            for a, b in zip(mine["resps"], yours["resps"], strict=True):
                (left,), (right,) = a, b
                assert left == (right if isinstance(right, str) else pytest.approx(right, rel=rel))
            for metric in mine["metrics"]:
                assert mine[metric] == pytest.approx(yours[metric], rel=rel)
    for task, metrics in one["results"].items():
        for name, value in metrics.items():
            if isinstance(value, float) and "stderr" not in name:
                assert value == pytest.approx(other["results"][task][name], rel=rel)
