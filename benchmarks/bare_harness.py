"""lm-evaluation-harness with its own `hf` model, for `eval_tasks.py` to be judged against: it imports nothing of mega.

    python benchmarks/bare_harness.py MODEL TASK.yaml OUT.json --batch-size 8

Writes the scores of each sample.
"""

import argparse
import json

import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("task")
    parser.add_argument("out")
    parser.add_argument("--batch-size", type=int, required=True)
    given = parser.parse_args()
    results = simple_evaluate(
        "hf",
        model_args={"pretrained": given.model, "dtype": "float32"},
        tasks=[given.task],
        task_manager=TaskManager(include_defaults=False),
        batch_size=given.batch_size,
        device="cuda" if torch.cuda.is_available() else "cpu",
        log_samples=True,
    )
    with open(given.out, "w") as stream:
        json.dump({"samples": results["samples"]}, stream, default=str)


if __name__ == "__main__":
    main()
