"""Reinforcement learning in a run: every layout and a resumed run sample and learn the same; its settings have effects."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from mega_cli.data_show import _load_run_config
from mega_common.errors import ConfigError, DataError
from mega_data.tokenizer import train_tokenizer
from mega_eval.live_model import RolloutSampler
from mega_eval.model_loading import load_inference_model
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.engine import TrainingEngine
from mega_trainer.run.input_check import find_input_problems
from mega_trainer.run.training_run import run_training

REWARDS = """
def spread(prompt, answer, record):
    return sum(map(ord, answer)) % 7 / 7 + record["bonus"]

def broken(prompt, answer, record):
    raise ValueError("broken")
"""


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Three steps of two prompts with four answers each, of a model whose answers are about random."""
    words = train_tokenizer(["ab"], 257, tmp_path / "tok")
    prompts = [{"prompt": "abcdefg"[: 2 + k % 5], "bonus": k / 10} for k in range(9)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(each) + "\n" for each in prompts))
    (tmp_path / "rewards.py").write_text(REWARDS)
    return {
        "model": {"num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4,
                  "vocab_size": words.vocab_size, "max_position": 32, "mtp_layers": 1},
        "data": {"train": str(tmp_path / "prompts.jsonl"), "kind": "prompts", "seq_length": 16,
                 "tokenizer": str(tmp_path / "tok")},
        "objective": {"kind": "grpo", "rewards": f"{tmp_path}/rewards.py:spread", "group_size": 4, "max_new_tokens": 5},
        "batch": {"micro": 2, "global": 8}, "train": {"steps": 3}, "optimizer": {"lr": 1e-2, "eps": 1e-3}, "precision": "fp64",
        "lr_schedule": {"name": "constant", "warmup_steps": 0},  # eps: else Adam enlarges rounding of gradients near zero
        "log": {"tensorboard": False}, "device": "cpu", "output": str(tmp_path / "run"), "checkpoint": {"async": False},
    }  # fmt: skip


def changed(raw: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        **raw,
        **{key: {**raw.get(key, {}), **value} if isinstance(value, dict) else value for key, value in sections.items()},
    }


def trained(raw: dict[str, Any]) -> None:
    ranks = RankInfo(dist.get_rank(), dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else RankInfo()
    config = RunConfig.parse(raw)
    run_training(config, ranks, generate=RolloutSampler(config))


def lines(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(raw["output"]) / "metrics.jsonl").read_text().splitlines()]


def rollouts(raw: dict[str, Any]) -> list[dict[str, Any]]:
    files = sorted((Path(raw["output"]) / "rollouts").iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def weights(raw: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: each.detach()
        for name, each in load_inference_model(raw["output"], dtype=torch.float64).named_parameters()
    }


def check_equal(one: dict[str, Any], other: dict[str, Any], rel: float) -> None:
    for ours, theirs in zip(lines(one), lines(other), strict=True):
        for name in ("loss", "grad_norm", "reward/mean", "policy/clip_fraction", "answer/length"):
            assert ours[name] == pytest.approx(theirs[name], rel=rel, abs=rel), name
    assert [each["tokens"] for each in rollouts(one)] == [each["tokens"] for each in rollouts(other)]
    found = weights(other)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(tensor, found[name], rtol=rel, atol=rel)


LAYOUTS: list[dict[str, Any]] = [
    {"zero": 1}, {"tp": 2, "sp": True, "cp": 2}, {"pp": 2, "tp": 2}, {"zero": 3, "pp": 2}, {"zero": 3, "cp": 2},
    {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "zero": 2},
]  # fmt: skip


def trained_in_layouts(raws: list[dict[str, Any]]) -> None:
    for raw in raws:
        trained(raw)


def test_experts_on_other_ranks_sample_and_learn_what_one_rank_does(settings: dict[str, Any]) -> None:
    moe = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "aux_loss": 0.0}
    raw = changed(settings, batch={"micro": 1}, model={"moe": moe}, objective={"kl": 0.0, "resample": 2})
    trained(raw)
    other = {**raw, "parallel": {"ep": 2, "tp": 2, "sp": True}, "output": f"{raw['output']}-ep"}
    run_ranks(trained, 4, other, timeout=200)
    check_equal(other, raw, 1e-10)


@pytest.mark.parametrize(
    "layouts", [LAYOUTS[:2], pytest.param(LAYOUTS[2:], marks=pytest.mark.long)], ids=["two", "others"]
)
def test_four_ranks_sample_and_learn_what_one_does(settings: dict[str, Any], layouts: list[dict[str, Any]]) -> None:
    raw = changed(settings, batch={"micro": 1}, objective={"rollout_steps": 3, "variant": "gspo"})
    trained(raw)
    assert lines(raw)[0]["policy/ratio_error"] < 1e-12  # engine and trainer compute the same log-probabilities
    assert lines(raw)[2]["policy/clip_fraction"] > 0.1
    others = [{**raw, "parallel": layout, "output": f"{raw['output']}-{k}"} for k, layout in enumerate(layouts)]
    run_ranks(trained_in_layouts, 4, others, timeout=200)
    for other in others:
        check_equal(other, raw, 1e-10)


@pytest.mark.parametrize("rollout_steps", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(settings: dict[str, Any], rollout_steps: int) -> None:
    whole = changed(settings, train={"steps": 5}, objective={"rollout_steps": rollout_steps})
    parts = {**whole, "output": f"{whole['output']}-parts"}
    trained(whole)
    trained(changed(parts, train={"steps": 3}))
    trained(parts)
    check_equal(parts, whole, 0.0)
    assert rollouts(parts) == rollouts(whole)


def test_the_kl_term_is_zero_at_the_reference_and_then_grows(settings: dict[str, Any], tmp_path: Path) -> None:
    trained(changed(settings, train={"steps": 1}))
    start = changed(settings, init_from=settings["output"], output=f"{tmp_path}/kl", objective={"kl": 0.5})
    trained(start)
    found = [line["policy/kl"] for line in lines(start)]
    assert found[0] == pytest.approx(0, abs=1e-14)
    assert found[2] > 1e-4


def test_a_reward_model_scores_whole_texts_in_every_layout(settings: dict[str, Any], tmp_path: Path) -> None:
    model = {**settings["model"], "mtp_layers": 0, "score": True, "num_layers": 2}
    rated = {"model": model, "data": {"kind": "pairs", "seq_length": 16}, "objective": {"kind": "reward"}}
    folder = str(TrainingEngine({**rated, "precision": "fp64", "device": "cpu"}).save(tmp_path / "reward"))
    objective = {**settings["objective"], "reward_model": folder}
    del objective["rewards"]
    raw = {**changed(settings, batch={"micro": 1}, train={"steps": 2}), "objective": objective}
    trained(raw)
    scorer = load_inference_model(folder, dtype=torch.float64, kinds=("reward model",))
    for one in rollouts(raw):
        tokens = torch.tensor([[*one["prompt"], *one["tokens"]]])
        positions = torch.arange(tokens.shape[1])[None]
        x = scorer(scorer.embed_inputs(tokens, positions), scorer.make_forward_context(positions))
        assert one["reward"] == pytest.approx(scorer.compute_logits(x)[0, -1, 0].item(), rel=1e-10)
    layouts: list[dict[str, Any]] = [{"tp": 2, "cp": 2}, {"pp": 2, "zero": 1}]
    others = [{**raw, "parallel": layout, "output": f"{raw['output']}-{k}"} for k, layout in enumerate(layouts)]
    run_ranks(trained_in_layouts, 4, others, timeout=200)
    for other in others:
        check_equal(other, raw, 1e-10)


@pytest.mark.long
def test_the_example_learns_arithmetic_from_rewards(tmp_path: Path) -> None:
    folder = shutil.copytree(Path(__file__).parents[2] / "examples/arithmetic", tmp_path / "example")
    mega = [sys.executable, "-m", "mega_cli.main"]
    for command in (
        [sys.executable, "make_data.py"],
        [*mega, "data", "train-tokenizer", "--input", "warmup.jsonl", "--vocab-size", "257", "--output", "tokenizer"],
        [*mega, "train", "warmup.yaml"],
        [*mega, "train", "run.yaml", "--set", "train.steps=120"],
    ):
        subprocess.run(command, cwd=folder, check=True)
    rewards = [line["reward/mean"] for line in lines({"output": folder / "runs/grpo"})]
    assert sum(rewards[:5]) / 5 < 0.16
    assert sum(rewards[-10:]) / 10 > 0.38


def test_truncated_answers_can_be_left_out_of_the_loss(settings: dict[str, Any]) -> None:
    trained(changed(settings, train={"steps": 1}, objective={"mask_truncated": True}))
    told = rollouts(settings)
    assert {each["truncated"] for each in told} == {True} or lines(settings)[0]["tokens"] == sum(
        len(each["tokens"]) for each in told if not each["truncated"]
    )
    assert lines(settings)[0]["tokens"] < sum(len(each["tokens"]) for each in told)


def test_groups_of_equal_rewards_are_replaced_and_those_that_stay_do_not_count(settings: dict[str, Any]) -> None:
    rewards = Path(settings["objective"]["rewards"].partition(":")[0])
    rewards.write_text(
        "def some(prompt, answer, record):\n    return sum(map(ord, answer)) % 2 if record['bonus'] < 0.5 else 0\n"
    )
    raw = changed(settings, objective={"rewards": f"{rewards}:some"}, batch={"global": 16}, train={"steps": 1})
    trained(raw)
    resampled = changed(raw, output=f"{raw['output']}-again", objective={"resample": 8})
    trained(resampled)
    limited = changed(raw, output=f"{raw['output']}-once", objective={"resample": 1})
    trained(limited)
    before, after, once = (lines(each)[0] for each in (raw, resampled, limited))
    assert before["reward/equal_groups"] >= once["reward/equal_groups"] > after["reward/equal_groups"] == 0
    assert before["tokens"] == sum(len(each["tokens"]) for each in rollouts(raw))  # without resampling all groups count
    told = rollouts(limited)
    groups = [told[first : first + 4] for first in range(0, 16, 4)]
    unequal = [group for group in groups if len({each["reward"] for each in group}) > 1]
    assert once["tokens"] == sum(len(each["tokens"]) for group in unequal for each in group)
    assert [each["sample"] for each in told] == list(range(16))


def test_a_function_that_always_fails_ends_the_run_with_a_sentence(settings: dict[str, Any]) -> None:
    broken = settings["objective"]["rewards"].replace("spread", "broken")
    with pytest.raises(DataError, match=r"rewards\.py:broken fails for all answers"):
        trained(changed(settings, objective={"rewards": broken}))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"batch": {"global": 6}}, "multiple of objective.group_size = 4"),
        ({"data": {"kind": "text"}}, "requires data.kind = prompts"),
        ({"train": {"eval_every": 1}}, "train.eval_every"),
        ({"train": {"on_nan": "rollback"}}, "is not supported with objective.kind = grpo"),
        ({"objective": {"variant": "rloo", "kl": 0.1}}, "is not supported with objective.variant = rloo"),
        ({"objective": {"kl": 0.1}}, "requires a reference model"),
        ({"objective": {"rewards": "exact"}}, "must be FILE.py:FUNCTION"),
        ({"data": {"seq_length": 5}}, "must be larger than objective.max_new_tokens = 5"),
        ({"objective": {"beta": 0.2}}, "has no effect with objective.kind = grpo"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig.parse(changed(settings, **sections))


def test_a_missing_file_of_rewards_is_found_before_the_run(settings: dict[str, Any]) -> None:
    assert not find_input_problems(RunConfig.parse(settings), data=True)
    missing = changed(settings, objective={"rewards": "nowhere/rewards.py:exact"})
    found = find_input_problems(RunConfig.parse(missing), data=True)
    assert [(each.path, each.value) for each in found] == [("objective.rewards", "nowhere/rewards.py")]


def test_the_samples_of_a_run_are_not_shown_but_named(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"not supported with data\.kind = prompts"):
        _load_run_config(tmp_path / "run.yaml")


def test_a_group_size_that_cuts_groups_of_a_resumed_run_is_refused(settings: dict[str, Any]) -> None:
    trained(changed(settings, train={"steps": 1}))
    with pytest.raises(DataError, match="group_size = 3 must divide the number of consumed samples, 8"):
        trained(changed(settings, objective={"group_size": 3}, batch={"global": 6, "micro": 1}))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "found no record"),
        ('{"text": "a"}\n', "line 1 must be a JSON object"),
        ('{"prompt": "' + "a" * 99 + '"}', "found 99"),
    ],
)
def test_a_file_without_usable_prompts_is_refused(settings: dict[str, Any], content: str, words: str) -> None:
    Path(settings["data"]["train"]).write_text(content)
    with pytest.raises(DataError, match=words):
        trained(settings)
