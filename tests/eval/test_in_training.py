"""Tasks during a run score as they do on its checkpoints, in any layout, and change nothing of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from local_tasks import WORDS, write_tasks
from ranks import run_ranks

from mega_common.errors import ConfigError
from mega_data.making.preprocess import preprocess
from mega_data.tokenizer import train_tokenizer
from mega_trainer.config import RunConfig
from mega_trainer.ranks import Ranks
from mega_trainer.train import run

pytest.importorskip("lm_eval", reason="lm-evaluation-harness")
from mega_eval.harness import HarnessModel
from mega_eval.in_training import TrainingTasks
from mega_eval.load import end_tokens, load_model, load_tokenizer
from mega_eval.replicas import Prompts, Replicas
from mega_eval.tasks import TaskOptions, run_tasks

pytestmark = pytest.mark.usefixtures("quick_harness")


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """A run of three steps, and tasks after the first and the last of them."""
    words = train_tokenizer([" ".join(WORDS)] * 3, 300, tmp_path / "tok")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": " ".join(WORDS * 40)}) + "\n")
    preprocess([tmp_path / "text.jsonl"], tmp_path / "tok", tmp_path / "data")
    model = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 2, "max_position": 64,
             "vocab_size": words.vocab_size, "mtp_layers": 1}  # fmt: skip
    tasks = write_tasks(tmp_path, 4)
    return {
        "model": model, "data": {"train": str(tmp_path / "data"), "seq_length": 64, "split": [1]},
        "batch": {"micro": 2, "global": 4}, "train": {"steps": 3}, "optimizer": {"lr": 1e-2}, "precision": "fp32",
        "log": {"tensorboard": False}, "device": "cpu", "output": str(tmp_path / "run"), "checkpoint": {"async": False},
        "eval": {"tasks": tasks, "every": 2, "max_share": 1},
    }  # fmt: skip


def trained(raw: dict[str, Any]) -> None:
    """A run on all ranks there are, with its tasks."""
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else Ranks()
    config = RunConfig.parse(raw)
    run(config, ranks, scorer=TrainingTasks(config) if config.eval.tasks else None)


def lines(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(raw["output"]) / "metrics.jsonl").read_text().splitlines()]


def test_scores_are_those_of_the_checkpoint_and_the_run_is_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    trained(settings)
    check(settings, tmp_path)


@pytest.mark.long
def test_on_ranks_that_share_weights_and_sequences(settings: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(trained, 4, raw := {**settings, "parallel": {"tp": 2, "sp": True, "cp": 2}}, timeout=120)
    check(raw, tmp_path)


def check(raw: dict[str, Any], tmp_path: Path) -> None:
    told, settings = lines(raw), {**raw, "parallel": {}}
    trained(without := {**settings, "eval": {}, "output": str(tmp_path / "without")})
    assert [line["loss"] for line in told] == pytest.approx([line["loss"] for line in lines(without)], rel=3e-5)
    scores = [{name: value for name, value in line.items() if name.startswith("eval/")} for line in told]
    assert not scores[0]
    assert scores[1].keys() == scores[2].keys() != set()
    tokenizer = load_tokenizer(raw["output"])
    model = HarnessModel(
        Replicas(load_model(raw["output"]), Prompts(tokenizer)), end_tokens(raw["output"], tokenizer), None, 64
    )
    expected = run_tasks(model, raw["eval"]["tasks"], TaskOptions())["results"]
    for name, score in scores[2].items():
        _, task, metric = name.split("/")
        assert score == pytest.approx(expected[task][f"{metric},none"], rel=1e-4), name


def test_what_took_too_long_waits_and_what_cannot_be_is_refused(settings: dict[str, Any]) -> None:
    trained(
        {
            **settings,
            "eval": {**settings["eval"], "every": 1, "max_share": 1e-9, "tasks": settings["eval"]["tasks"][:1]},
        }
    )
    assert [any(name.startswith("eval/") for name in line) for line in lines(settings)] == [True, False, False]
    with pytest.raises(ConfigError, match=r"eval\.tasks(?s:.*)mega eval --tasks"):
        RunConfig.parse({**settings, "parallel": {"pp": 2}})
    with pytest.raises(ConfigError, match=r"nothing.yaml: no such file"):
        TrainingTasks(RunConfig.parse({**settings, "eval": {"tasks": ["nothing.yaml"]}}))
