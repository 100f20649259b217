"""Judges by rule in place of a model: scores, pairs in both orders, invalid verdicts, and servers that fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from judges import Rule, judging, score_length
from served_models import chat_model
from serving import Playback, service_of, serving

from mega_common.errors import ConfigError, DataError, TrainingError
from mega_eval import judge_scores
from mega_eval.judge_scores import (
    SCORE_FORM,
    JudgeClient,
    JudgedPrompt,
    compare_answers,
    read_judged_prompts,
    score_answers,
)
from mega_eval.result_reports import format_metric_table

PROMPTS = [JudgedPrompt([], "Rome", "capital of Italy?"), JudgedPrompt([{"role": "user", "content": "and of France?"}])]


def prefer_longer(material: dict[str, Any]) -> Any:
    first, second = len(material["first"]), len(material["second"])
    return {"reason": "longer", "better": "first" if first > second else "second" if second > first else "tie"}


def test_answers_are_scored() -> None:
    with judging(score_length) as (judge, bodies):
        results = score_answers(judge, PROMPTS, ["ab", "abcd"])
    assert results["results"]["judge_score"]["score,none"] == 3
    assert results["results"]["judge_score"]["score_stderr,none"] == 1
    assert results["results"]["judge_score"]["invalid,none"] == 0
    assert results["config"]["judge"] == "the judge"
    first, second = results["samples"]["judge_score"]
    assert (first["score"], first["answer"], first["reason"]) == (2, "ab", "long")
    assert first["doc_hash"] != second["doc_hash"]
    materials = [json.loads(body["messages"][1]["content"]) for body in bodies]
    assert {
        "conversation": [{"role": "user", "content": "capital of Italy?"}],
        "reference": "Rome",
        "answer": "ab",
    } in materials
    for body in bodies:
        schema = body["response_format"]["json_schema"]["schema"]
        jsonschema.validate({"reason": "r", "score": 10}, schema)
        for wrong in ({"reason": "r", "score": 11}, {"score": 1}, {"reason": "r", "score": 1, "more": 1}):
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(wrong, schema)
    assert "judge_score  score    3 ± 1" in format_metric_table(results)


@pytest.mark.parametrize(
    ("rule", "answers", "others", "win_rate", "agreement"),
    [
        (prefer_longer, ["long one", "long one"], ["short", "short"], 1.0, 1.0),
        (prefer_longer, ["long one", "a"], ["short", "short"], 0.5, 1.0),
        (prefer_longer, ["same", "same"], ["same", "same"], 0.5, 1.0),
        (
            lambda _: {"reason": "", "better": "first"},
            ["a", "b"],
            ["c", "d"],
            0.5,
            0.0,
        ),  # a judge with a favorite position
        (lambda _: {"reason": "", "better": "second"}, ["a", "b"], ["c", "d"], 0.5, 0.0),
    ],
)
def test_pairs_are_judged_in_both_orders(
    rule: Rule, answers: list[str], others: list[str], win_rate: float, agreement: float
) -> None:
    with judging(rule) as (judge, bodies):
        results = compare_answers(judge, PROMPTS, answers, others)["results"]["judge_pair"]
    assert (results["win_rate,none"], results["order_agreement,none"]) == (win_rate, agreement)
    assert len(bodies) == 4


INVALID = [
    "no JSON",
    "[1]",
    {"score": 3},
    {"reason": "", "score": 11},
    {"reason": "", "score": True},
    {"reason": "", "score": "3"},
]


@pytest.mark.parametrize("verdict", INVALID, ids=str)
def test_invalid_verdicts_are_counted(verdict: Any) -> None:
    with judging(lambda material: verdict if material["answer"] == "b" else {"reason": "", "score": 4}) as (judge, _):
        results = score_answers(judge, PROMPTS, ["a", "b"])
        with pytest.raises(DataError, match="none of the 2 verdicts of the judge follows the schema"):
            score_answers(judge, PROMPTS, ["b", "b"])
    assert results["results"]["judge_score"]["invalid,none"] == 0.5
    assert results["results"]["judge_score"]["score,none"] == 4
    assert results["samples"]["judge_score"][1]["metrics"] == []


def test_a_busy_judge_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(judge_scores.time, "sleep", waits.append)
    with judging(score_length, failures=2) as (judge, _):
        assert score_answers(judge, PROMPTS[:1], ["abc"])["results"]["judge_score"]["score,none"] == 3
    assert waits[-3:] == [0, 2, 4]
    with judging(score_length, failures=9) as (judge, _), pytest.raises(TrainingError, match=r"status 503.*not now"):
        score_answers(judge, PROMPTS[:1], ["abc"])
    with (
        judging(score_length, failures=1, status=401) as (judge, _),
        pytest.raises(ConfigError, match=r"refuses .*status 401"),
    ):
        score_answers(judge, PROMPTS[:1], ["abc"])
    with pytest.raises(TrainingError, match=r"does not answer \(Connection refused\)"):
        JudgeClient("http://127.0.0.1:9/v1").get_judge_model_name()


def test_megas_own_server_can_be_the_judge(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = chat_model(tmp_path_factory, max_position=4096)
    engine = Playback(folder)
    engine.answers += ['{"reason": "It is right.", "score": 9}'] * 2
    with serving(service_of(engine, folder, max_length=4096)) as (url, _):
        results = score_answers(JudgeClient(f"{url}/v1"), PROMPTS, ["Rome", "Paris"])
    assert results["results"]["judge_score"]["score,none"] == 9
    assert "capital of Italy?" in "".join(engine.prompts)


def test_the_page_has_the_form_of_the_judge() -> None:
    page = (Path(__file__).parents[2] / "docs/evaluation.md").read_text()
    quoted = " ".join(line.removeprefix("> ") for line in page.splitlines() if line.startswith("> "))
    assert quoted == SCORE_FORM


@pytest.mark.parametrize(
    "line",
    ["no JSON", "3", "{}", '{"prompt": ""}', '{"prompt": "a", "messages": []}', '{"messages": [{"role": "user"}]}', '{"prompt": "a", "reference": 3}'],
)  # fmt: skip
def test_prompts_of_another_form_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a", "reference": "b"}}\n\n{line}\n')
    with pytest.raises(DataError, match=r"prompts\.jsonl: line 3 must have a text in 'prompt'"):
        read_judged_prompts(file)
    file.write_text("\n")
    with pytest.raises(DataError, match="has no prompts"):
        read_judged_prompts(file)
