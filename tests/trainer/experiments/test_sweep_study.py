"""A sweep: its settings, its trials, and what its folder accepts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from mega_common.errors import ConfigError
from mega_trainer.experiments.sweep_config import NumberRange, SweepConfig, parse_setting_words, parse_swept_values
from mega_trainer.experiments.sweep_page import format_trial_ranking_rows, render_sweep_page
from mega_trainer.experiments.sweep_study import Sweep, SweepStudy, TrialResult, iterate_unfinished_trials

pytest.importorskip("optuna")
BASE: dict[str, Any] = {
    "model": {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 32, "num_attention_heads": 2, "vocab_size": 61},
    "data": {"train": "tokens", "seq_length": 16}, "train": {"steps": 20}, "checkpoint": {"save": False},
}  # fmt: skip


def config(words: str, **options: Any) -> SweepConfig:
    return SweepConfig.parse({"settings": parse_setting_words(words.split()), **options}, source="sweep")


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("optimizer.lr=1e-3,3e-3", [1e-3, 3e-3]),
        ("optimizer.betas=[0.9,0.95],[0.9,0.99]", [[0.9, 0.95], [0.9, 0.99]]),
        ("optimizer.name=adamw,lion", ["adamw", "lion"]),
        ("model.norm=null,layernorm", [None, "layernorm"]),
        ("data.train=../a,../b", ["../a", "../b"]),
        ("optimizer.lr=1e-4..1e-2:log", NumberRange(1e-4, 1e-2, True)),
        ("batch.global=4..16", NumberRange(4, 16)),
    ],
)
def test_words_are_lists_or_ranges(word: str, values: object) -> None:
    (given,) = parse_setting_words([word]).values()
    assert parse_swept_values(given) == values


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ("optimizer.lr", {}, "must have the form KEY=V1,V2"),
        ("optimizer.lr=1 optimizer.lr=2", {}, "is given twice"),
        ("optimizer.lr=1e-3,1e-3", {}, "all different"),
        ("optimizer.lr=1e-2..1e-3", {"sampler": "random", "trials": 2}, "must be below the second"),
        ("optimizer.lr=0..1:log", {"sampler": "random", "trials": 2}, "must be above 0"),
        ("optimizer.lr=1e-4..1e-2", {}, "a range is not supported with a grid"),
        ("optimizer.lr=1e-3", {"trials": 2}, "must not be given with a grid"),
        ("optimizer.lr=1e-3,1e-2", {"sampler": "tpe"}, "is required with sampler = tpe"),
        ("train.seed=1,2", {"seeds": 2}, "conflicts with settings.train.seed"),
        ("optimizer.lr=1e-3", {"sampler": "best"}, "sampler"),
    ],
)
def test_a_wrong_request_is_one_sentence(words: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(words, **options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("optimizer.lrr=1e-3,1e-2", r"optimizer.lrr: unknown key -> did you mean 'lr'"),
        ("optimizer.lr=1e-3,fast", r"optimizer.lr = 'fast': must be a number"),
        ("batch.global=4,0", r"batch.global"),
        ("model.hidden_size=16,24 model.num_attention_heads=2,8", r'with model.hidden_size=24 model.num_attention_heads=8'),
    ],
)  # fmt: skip
def test_values_that_run_yaml_refuses_start_nothing(tmp_path: Path, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sweep.open_folder(tmp_path / "sweep", config(words), BASE, "run.yaml")
    assert not (tmp_path / "sweep").exists()


RANDOM = "optimizer.lr=1e-4..1e-2:log batch.global=4..16 optimizer.name=adamw,lion"


@pytest.mark.parametrize("sampler", ["random", "tpe", "gp"])
def test_restarts_do_not_change_what_is_drawn(tmp_path: Path, sampler: str) -> None:
    """With the same results, a study that is reopened before each draw has the trials of one that is not.
    After ten trials optuna's tpe and gp learn from the earlier ones.
    """
    given = config(RANDOM, sampler=sampler, trials=12)
    whole, drawn = SweepStudy(given, None), []
    for number in range(12):
        trial = whole.draw_trial(number)
        whole.finish_trial(number, abs(math.log10(trial["optimizer.lr"]) + 3))
        again = SweepStudy(given, tmp_path / "study.log").draw_trial(number)
        SweepStudy(given, tmp_path / "study.log").finish_trial(number, abs(math.log10(again["optimizer.lr"]) + 3))
        drawn.append(trial == again == SweepStudy(given, tmp_path / "study.log").draw_trial(number))
        assert 1e-4 <= trial["optimizer.lr"] <= 1e-2
        assert isinstance(trial["batch.global"], int)
    assert all(drawn)


def write_log(folder: Path, losses: list[float], steps: int = 20) -> None:
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "run.yaml").write_text(yaml.safe_dump({"train": {"steps": steps}, "checkpoint": {"save": False}}))


def test_trials_are_ranked_by_the_mean_over_seeds_and_read_again(tmp_path: Path) -> None:
    given = config("optimizer.lr=1e-3,2e-3,3e-3,4e-3", seeds=2, metric="loss")
    sweep = Sweep.open_folder(tmp_path / "sweep", given, BASE, "run.yaml")
    ends = {0: (3.0, 3.2), 1: (2.0, 2.4), 2: (5.0, math.nan)}
    for trial, values in ends.items():
        runs = sweep.create_trial_runs(trial)
        assert [run.settings["train.seed"] for run in runs] == [1234, 1235]
        for run, value in zip(runs, values, strict=True):
            write_log(run.folder, [9.0] * 18 + [value - 0.1, value + 0.1])
        assert all(map(sweep.is_run_finished, runs))
        sweep.finish_trial(trial, failed=trial == 2)
    sweep = Sweep.open_folder(tmp_path / "sweep", given, BASE, "run.yaml")
    assert list(iterate_unfinished_trials(sweep)) == [3]
    results = sweep.read_trial_results()
    assert [result.number for result in results] == [1, 0, 2]
    assert results[0].mean == pytest.approx(2.2)
    assert results[0].standard_error == pytest.approx(0.2)
    head, best, *_ = format_trial_ranking_rows(given, results)
    assert dict(zip(head, best, strict=True))["loss"] == "2.2000 ± 0.2000"
    page = render_sweep_page("Sweep", given, results)
    assert "loss against optimizer.lr" in page
    assert "http" not in page


def test_the_axis_of_a_range_is_as_its_values_are_drawn() -> None:
    words = "optimizer.lr=1e-3..1e-1:log optimizer.weight_decay=0..0.2 model.tie_embeddings=true,false"
    given = config(words, metric="loss", sampler="random", trials=2)
    results = [
        TrialResult(i, dict(zip(given.settings, values, strict=True)), "done", values=[1.0 + i])
        for i, values in enumerate([(1e-3, 0.001, True), (1e-2, 0.1, False)])
    ]
    page = render_sweep_page("Sweep", given, results)
    lr, decay = (page.split(f"loss against {key}<")[1].split("</svg>")[0] for key in list(given.settings)[:2])
    assert ">5e-03<" in lr
    assert ">0.04<" in decay
    assert ">0.002<" not in decay
    assert ">true<" in page


def test_a_run_whose_last_checkpoint_is_missing_is_not_finished(tmp_path: Path) -> None:
    """Killed between its last step and its save."""
    sweep = Sweep.open_folder(tmp_path / "sweep", config("optimizer.lr=1e-3", metric="loss"), BASE, "run.yaml")
    (run,) = sweep.create_trial_runs(0)
    write_log(run.folder, [1.0] * 20)
    (run.folder / "run.yaml").write_text(yaml.safe_dump({"train": {"steps": 20}}))
    assert not sweep.is_run_finished(run)
    (run.folder / "checkpoints/step-00000020").mkdir(parents=True)
    (run.folder / "checkpoints/step-00000020/manifest.json").write_text("{}")
    assert sweep.is_run_finished(run)


def test_a_metric_that_no_run_logs_is_refused_with_those_that_are(tmp_path: Path) -> None:
    sweep = Sweep.open_folder(tmp_path / "sweep", config("optimizer.lr=1e-3", metric="losss"), BASE, "run.yaml")
    (run,) = sweep.create_trial_runs(0)
    write_log(run.folder, [1.0] * 20)
    with pytest.raises(ConfigError, match="--metric losss is not logged"):
        sweep.finish_trial(0, failed=False)


@pytest.mark.parametrize(
    ("words", "options", "base", "message"),
    [
        (RANDOM, {"sampler": "random", "trials": 3, "sampler_seed": 1}, BASE, "another sampler_seed"),
        (RANDOM, {"sampler": "random", "trials": 1}, BASE, "another trials"),
        ("optimizer.lr=1e-3", {"sampler": "random", "trials": 2}, BASE, "another settings"),
        (RANDOM, {"sampler": "random", "trials": 2}, BASE | {"train": {"steps": 3}}, "another run.yaml"),
        (RANDOM, {"sampler": "random", "trials": 3}, BASE, None),
        (RANDOM, {"sampler": "random", "trials": 2, "metric": "grad_norm", "goal": "max"}, BASE, None),
    ],
)
def test_a_folder_has_one_sweep_which_may_get_more_trials(
    tmp_path: Path, words: str, options: dict[str, Any], base: dict[str, Any], message: str | None
) -> None:
    Sweep.open_folder(tmp_path, config(RANDOM, sampler="random", trials=2), BASE, "run.yaml")
    if message is None:
        Sweep.open_folder(tmp_path, config(words, **options), base, "run.yaml")
    else:
        with pytest.raises(ConfigError, match=message):
            Sweep.open_folder(tmp_path, config(words, **options), base, "run.yaml")
