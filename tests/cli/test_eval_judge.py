"""`mega eval --judge` from prompts to result files, with a judge by rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import typed
from judges import judging, score_length
from served_models import chat_model
from typer.testing import Result

from mega_cli.compare import compare_command
from mega_cli.eval import eval_command
from mega_common.errors import ConfigError, MegaError


def mega(*args: object, fails: type[MegaError] | None = None) -> Result:
    app = typer.Typer()
    app.command("eval")(eval_command)
    app.command("compare")(compare_command)
    return typed(app, *args, fails=fails, env={"MEGA_JUDGE_API_KEY": "sk-judge"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    lines: list[Any] = [
        {"prompt": "the end of the story", "reference": "the beginning"},
        {"messages": [{"role": "user", "content": "the other story?"}], "reference": "no"},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "prompts.jsonl"


def test_answers_are_scored_and_compared(folder: Path, prompts: Path, tmp_path: Path) -> None:
    options = ["--prompts", prompts, "--max-new-tokens", 6, "--device", "cpu"]
    files = [tmp_path / name for name in ("a.json", "a.csv", "b.json")]
    with judging(score_length) as (judge, bodies):
        shown = mega("eval", folder, "--judge", judge.url, *options, "--output", files[0], "--csv", files[1]).stdout
        mega("eval", folder, "--judge", judge.url, *options, "--output", files[2], "--limit", 1)
    results = json.loads(files[0].read_text())
    samples = results["samples"]["judge_score"]
    answers = [json.loads(body["messages"][1]["content"])["answer"] for body in bodies[:2]]
    assert sorted(answers) == sorted(sample["answer"] for sample in samples)
    assert "judge_score" in shown
    assert files[1].read_text().startswith("task,filter,metric,value,stderr\njudge_score,none,score,")
    assert results["config"]["judge"] == "the judge"
    assert results["config"]["model_args"]["model"] == str(folder)
    (compared,) = json.loads(mega("compare", files[0], files[2], "--json", "-").stdout)
    assert (compared["metric"], compared["samples"], compared["first"]) == ("score", 1, samples[0]["score"])


def test_answers_are_compared_with_references_and_models(folder: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "pairs.json"

    def prefer_reference(material: dict[str, Any]) -> Any:
        known = ("the beginning", "no")
        return {"reason": "", "better": "first" if material["first"] in known else "second" if material["second"] in known else "tie"}  # fmt: skip

    with judging(prefer_reference) as (judge, _):
        options = ["--judge", judge.url, "--prompts", prompts, "--max-new-tokens", 6, "--output", out]
        found = []
        for other in ("reference", folder):
            mega("eval", folder, *options, "--against", other)
            found.append(json.loads(out.read_text())["results"]["judge_pair"])
    assert [(one["win_rate,none"], one["order_agreement,none"]) for one in found] == [(0, 1), (0.5, 1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--judge requires --prompts"),
        (["--prompts", "p", "--tasks", "a"], "--tasks conflicts with --judge"),
        (["--prompts", "p", "--num-fewshot", 3], "--num-fewshot requires --tasks, found --judge"),
        (["--prompts", "p", "--per-sample", "x"], "--per-sample requires --data, found --judge"),
        (["--prompts", "p", "--picture", "a.gif"], "a.gif: the name must end with"),
        (["--limit", 0.5], "--limit 0.5 must be a number of prompts"),
        (["--system-instruction", "be"], "--system-instruction requires prompts with 'messages'"),
        (["--against", "reference"], "--against reference requires a reference"),
    ],
)
def test_judges_that_cannot_be(tmp_path: Path, options: list[object], message: str) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    given = ["--prompts", tmp_path / "p.jsonl"] if options and "--prompts" not in options else []
    with judging(score_length) as (judge, _):
        mistake = mega("eval", "no/model", "--judge", judge.url, *given, *options, fails=ConfigError)
    assert message in str(mistake.exception)


def test_options_of_a_judge_are_for_judges() -> None:
    mistake = mega("eval", "no/model", "--data", "a", "--against", "b", fails=ConfigError)
    assert "--against requires --judge, found --data" in str(mistake.exception)
