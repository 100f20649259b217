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
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.tokenizer import train_tokenizer
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.pipeline.executor import PipelineExecutor
from mega_trainer.run.training_run import run_training

pytest.importorskip("lm_eval", reason="lm-evaluation-harness")
from mega_eval.harness_tasks import HarnessModel, HarnessTaskOptions, run_harness_tasks
from mega_eval.in_training_tasks import InTrainingTaskEvaluator
from mega_eval.live_model import build_inference_model
from mega_eval.model_loading import find_end_tokens, load_inference_model, load_tokenizer
from mega_eval.multi_rank_inference import ModelReplicas, PromptTokenizer
from mega_eval.score import score_continuations

pytestmark = pytest.mark.usefixtures("quick_harness")


MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """A run of three steps, and tasks after the first and the last of them."""
    words = train_tokenizer([" ".join(WORDS)] * 3, 300, tmp_path / "tok")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": " ".join(WORDS * 40)}) + "\n")
    preprocess_corpus([tmp_path / "text.jsonl"], tmp_path / "tok", tmp_path / "data")
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
    ranks = RankInfo(dist.get_rank(), dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else RankInfo()
    config = RunConfig.parse(raw)
    run_training(config, ranks, scorer=InTrainingTaskEvaluator(config) if config.eval.tasks else None)


def lines(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(raw["output"]) / "metrics.jsonl").read_text().splitlines()]


def test_scores_are_those_of_the_checkpoint_and_the_run_is_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    trained(settings)
    check(settings, tmp_path)


@pytest.mark.long
def test_on_ranks_that_share_weights_and_sequences(settings: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(trained, 4, raw := {**settings, "parallel": {"tp": 2, "sp": True, "cp": 2}}, timeout=120)
    check(raw, tmp_path)


LAYOUTS: list[dict[str, Any]] = [
    {"zero": 1}, {"pp": 2, "zero": 2}, {"pp": 2, "virtual_stages": 2, "tp": 2},
    {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "cp": 2}, {"pp": 2, "ep": 2},
    {"zero": 3, "tp": 2}, {"zero": 3, "cp": 2, "zero3_shard": 2}, {"zero": 3, "ep": 2},
    {"zero": 3, "pp": 2, "schedule": "zbv", "virtual_stages": 2}, {"zero": 3, "pp": 2, "zero3_gather": "step"},
    {"zero": 3, "tp": 2, "pp": 2},
    {"pp": 4},  # the last: its ends alone make a group, and torch counts those of each rank
]  # fmt: skip
PAIRS = [([1, 2, 3], [4, 5]), ([1, 2, 3], [6]), ([7, 8], [9, 10, 11])]


def asked_in_training(raw: dict[str, Any], layouts: list[dict[str, Any]]) -> None:
    """On all ranks: what a model in training says after each step, which the first keeps, in each layout."""
    rank = dist.get_rank()
    for number, layout in enumerate(layouts):
        output = f"{raw['output']}-{number}"
        moe = MOE if "ep" in layout else None
        model = {**raw["model"], "tie_embeddings": number % 2 == 0, "moe": moe}
        config = RunConfig.parse({**raw, "parallel": layout, "model": model, "output": output})
        told: list[list[list[float]]] = []

        def ask(executor: PipelineExecutor, config: RunConfig = config, told: list[Any] = told) -> dict[str, float]:
            asked = build_inference_model(executor, config)
            told.append([one.logprobs for one in score_continuations(asked, PAIRS)])
            return {}

        run_training(config, RankInfo(rank, dist.get_world_size(), rank), scorer=ask)
        if rank == 0:
            Path(f"{output}/told.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    "layouts",
    [[LAYOUTS[3], LAYOUTS[8]], pytest.param(LAYOUTS, marks=pytest.mark.long)],
    ids=["two", "all"],
)
def test_a_model_in_training_says_what_its_checkpoint_does_wherever_its_parts_are(
    settings: dict[str, Any], layouts: list[dict[str, Any]]
) -> None:
    raw = {**settings, "model": {**settings["model"], "num_layers": 5}, "train": {"steps": 2}, "eval": {"every": 1},
           "batch": {"micro": 1, "global": 4}}  # fmt: skip
    run_ranks(asked_in_training, 4, raw, layouts, timeout=200)
    for number, layout in enumerate(layouts):
        found = json.loads(Path(f"{raw['output']}-{number}/told.json").read_text())
        expected = score_continuations(load_inference_model(f"{raw['output']}-{number}"), PAIRS)
        for one, other in zip(found[-1], expected, strict=True):
            assert one == pytest.approx(other.logprobs, rel=1e-4), layout
        assert found[0] != found[-1]


def check(raw: dict[str, Any], tmp_path: Path) -> None:
    told, settings = lines(raw), {**raw, "parallel": {}}
    trained(without := {**settings, "eval": {}, "output": str(tmp_path / "without")})
    assert [line["loss"] for line in told] == pytest.approx(
        [line["loss"] for line in lines(without)], rel=3e-5, abs=1e-6
    )
    scores = [{name: value for name, value in line.items() if name.startswith("eval/")} for line in told]
    assert not scores[0]
    assert scores[1].keys() == scores[2].keys() != set()
    check_scores(raw, scores[2])


def check_scores(raw: dict[str, Any], told: dict[str, Any]) -> None:
    """Told at the end of a run: what its checkpoint scores."""
    scores = {name: value for name, value in told.items() if name.startswith("eval/")}
    assert scores
    tokenizer = load_tokenizer(raw["output"])
    model = HarnessModel(
        ModelReplicas(load_inference_model(raw["output"]), PromptTokenizer(tokenizer)),
        find_end_tokens(raw["output"], tokenizer),
        None,
        64,
    )
    expected = run_harness_tasks(model, raw["eval"]["tasks"], HarnessTaskOptions())["results"]
    for name, value in scores.items():
        _, task, metric = name.split("/")
        assert value == pytest.approx(expected[task][f"{metric},none"], rel=1e-4), name


def test_what_took_too_long_waits_and_what_cannot_be_is_refused(settings: dict[str, Any]) -> None:
    trained(
        {
            **settings,
            "eval": {**settings["eval"], "every": 1, "max_share": 1e-9, "tasks": settings["eval"]["tasks"][:1]},
        }
    )
    assert [any(name.startswith("eval/") for name in line) for line in lines(settings)] == [True, False, False]
    with pytest.raises(ConfigError, match=r"nothing.yaml: the task file does not exist"):
        InTrainingTaskEvaluator(RunConfig.parse({**settings, "eval": {"tasks": ["nothing.yaml"]}}))
