from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_decoders import published
from local_tasks import WORDS, assert_same, hf_results, write_model, write_tasks

from mega_ckpt.convert import convert_checkpoint
from mega_common.errors import ConfigError, DataError
from mega_data.chat.chat_template import read_chat_template
from mega_data.tokenizer import train_tokenizer
from mega_eval.model_loading import find_end_tokens, load_inference_model, load_tokenizer
from mega_eval.multi_rank_inference import ModelReplicas, PromptTokenizer
from mega_eval.result_reports import write_results_csv

pytest.importorskip("lm_eval", reason="lm-evaluation-harness")
from mega_eval.harness_tasks import (
    HarnessModel,
    HarnessTaskOptions,
    format_results_table,
    load_harness_task_manager,
    run_harness_tasks,
    unknown_task_error,
    write_task_results,
)

pytestmark = pytest.mark.usefixtures("quick_harness")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def harness_model(folder: Path, **options: Any) -> HarnessModel:
    tokenizer = load_tokenizer(folder)
    replicas = ModelReplicas(load_inference_model(folder), PromptTokenizer(tokenizer), **options)
    template = read_chat_template(tokenizer.path)
    return HarnessModel(replicas, find_end_tokens(folder, tokenizer), template, replicas.model.config.max_position)


@pytest.fixture(scope="module")
def mega_results(folder: Path, names: list[str]) -> dict[str, Any]:
    return run_harness_tasks(
        harness_model(folder, batch_size=3), names, HarnessTaskOptions(log_samples=True), {"device": "cpu"}
    )


def test_each_sample_scores_as_with_the_harness_own_model(
    folder: Path, names: list[str], mega_results: dict[str, Any]
) -> None:
    assert_same(mega_results, hf_results(folder, names))
    texts = [sample["resps"][0][0] for sample in mega_results["samples"]["local_generation"]]
    assert len(set(texts)) > 1  # the model does say something
    longest = max(
        len(load_tokenizer(folder).encode(s["doc"]["text"])) for s in mega_results["samples"]["local_rolling"]
    )
    assert longest > 64  # of more than one window


def test_each_sample_of_a_model_with_an_encoder_scores_so_too(tmp_path: Path, names: list[str]) -> None:
    published(tmp_path, vocab_size=300, num_decoder_layers=None)  # whose cache wants both stacks alike
    train_tokenizer([" ".join(WORDS)] * 3, 300, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    replicas = ModelReplicas(
        load_inference_model(tmp_path, kinds=("encoder-decoder",)), PromptTokenizer(tokenizer), batch_size=3
    )
    model = HarnessModel(replicas, find_end_tokens(tmp_path, tokenizer), None, 64)
    mine, theirs = (
        run_harness_tasks(model, names, HarnessTaskOptions(log_samples=True)),
        hf_results(tmp_path, names, max_length=64),
    )
    texts = [[sample["resps"][0][0] for sample in found["samples"].pop("local_generation")] for found in (mine, theirs)]
    for one, other in zip(*texts, strict=True):  # the harness lets it go on for as many tokens more as its context has
        assert one
        assert other.startswith(one)
    assert len(set(texts[0])) > 1
    for found in (mine, theirs):
        found["results"].pop("local_generation")
    assert_same(mine, theirs)


def test_chats_and_few_shots_are_those_of_the_harness_own_model(folder: Path, names: list[str]) -> None:
    options = HarnessTaskOptions(apply_chat_template=True, num_fewshot=2, limit=3, log_samples=True)
    mine = run_harness_tasks(harness_model(folder), [names[0], names[2]], options)
    other = hf_results(folder, [names[0], names[2]], apply_chat_template=True, num_fewshot=2, limit=3)
    assert "<|im_start|>assistant" in mine["samples"]["local_choice"][0]["arguments"][0][0]
    assert_same(mine, other)


def test_the_example_of_own_tasks_scores_as_with_the_harness_own_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2] / "examples/own-tasks")
    names, options = ["capitals.yaml", "sums.yaml"], HarnessTaskOptions(limit=4, log_samples=True)
    mine = run_harness_tasks(harness_model(folder), names, options)
    assert {task: len(samples) for task, samples in mine["samples"].items()} == {"capitals": 4, "sums": 4}
    assert_same(mine, hf_results(folder, names, limit=4))


def test_a_mega_checkpoint_scores_as_its_export(
    folder: Path, names: list[str], mega_results: dict[str, Any], tmp_path: Path
) -> None:
    convert_checkpoint(folder, tmp_path / "mega", "mega")
    found = run_harness_tasks(
        harness_model(tmp_path / "mega", batch_size=8), names, HarnessTaskOptions(log_samples=True)
    )
    assert_same(found, mega_results)


def test_answers_are_kept_for_the_model_that_gave_them(folder: Path, names: list[str], tmp_path: Path) -> None:
    options = HarnessTaskOptions(limit=2, log_samples=True, cache=tmp_path / "cache")
    first = run_harness_tasks(harness_model(folder), names, options)
    again = harness_model(folder)

    def none(*_: object) -> Any:
        raise AssertionError("computed again")

    again.replicas = type("Nothing", (), {"model": again.replicas.model, "score": none, "generate": none})()
    assert_same(run_harness_tasks(again, names, options), first)
    other = harness_model(folder)
    with torch.no_grad():
        other.replicas.model.output_weight.mul_(1.5)
    changed = run_harness_tasks(other, names, options)
    assert changed["samples"]["local_rolling"][0]["resps"] != first["samples"]["local_rolling"][0]["resps"]


def test_results_are_told_and_written(mega_results: dict[str, Any], tmp_path: Path) -> None:
    write_task_results(tmp_path / "results.json", mega_results)
    raw = json.loads((tmp_path / "results.json").read_text())
    assert raw["results"]["local_choice"]["acc,none"] == mega_results["results"]["local_choice"]["acc,none"]
    assert raw["config"]["model"] == "mega"
    assert raw["config"]["device"] == "cpu"
    assert len(raw["samples"]["local_generation"]) == 12
    assert "local_choice" in format_results_table(mega_results)
    assert "word_perplexity" in format_results_table(mega_results)


def test_a_task_that_is_not_there_has_a_nearest_name(tmp_path: Path) -> None:
    assert "'hellaswag'" in str(unknown_task_error("hellaswg", ["arc_easy", "hellaswag", "mmlu"]))
    with pytest.raises(ConfigError, match="does not exist"):
        load_harness_task_manager([str(tmp_path / "none.yaml")])
    with pytest.raises(ConfigError, match="does not exist"):
        load_harness_task_manager(["a"], tmp_path / "none")


def test_tasks_of_a_folder_are_known_by_name_and_pattern(names: list[str]) -> None:
    manager = load_harness_task_manager(["local_choice", "local_r*"], Path(names[0]).parent)
    assert manager.match_tasks(["local_r*"]) == ["local_rolling"]


def test_data_that_are_not_there(folder: Path, names: list[str], tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    task.write_text(Path(names[0]).read_text().replace("choice.jsonl", "nowhere.jsonl"))
    with pytest.raises(DataError, match=r"task .*task\.yaml cannot be loaded"):
        run_harness_tasks(harness_model(folder), [str(task)], HarnessTaskOptions())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("max_gen_toks: 12", "max_gen_toks: 64"),
            "max_gen_toks of the task must be below the context length 64, but is 64",
        ),
        (("do_sample: false", "num_beams: 4"), "num_beams"),
    ],
)
def test_generation_settings_that_cannot_be(
    folder: Path, names: list[str], tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    task = tmp_path / "task.yaml"
    task.write_text(Path(names[2]).read_text().replace(*change))
    with pytest.raises((DataError, ConfigError), match=said):
        run_harness_tasks(harness_model(folder), [str(task)], HarnessTaskOptions(limit=1))


def test_prompts_and_settings_of_the_options(
    folder: Path, names: list[str], mega_results: dict[str, Any], tmp_path: Path
) -> None:
    """A system message, examples in one message or in turns, a template by name, and other generation settings."""

    def prompts_and_answers(**more: Any) -> list[tuple[str, list[str]]]:
        options = HarnessTaskOptions(num_fewshot=2, limit=2, log_samples=True, **more)
        results = run_harness_tasks(harness_model(folder), names, options)
        every = [one for task in sorted(results["samples"]) for one in results["samples"][task]]
        return [(json.dumps(one["arguments"], default=str), [str(two) for two in one["resps"]]) for one in every]

    turns = prompts_and_answers(apply_chat_template=True)
    together = prompts_and_answers(apply_chat_template=True, fewshot_as_multiturn=False)
    system = prompts_and_answers(apply_chat_template=True, system_instruction="Be the dog.")
    assert turns != together
    assert (
        sum("Be the dog." in prompt for prompt, _ in system) > sum("Be the dog." in prompt for prompt, _ in turns) == 0
    )
    assert prompts_and_answers(apply_chat_template=True, chat_template_name="default") == turns
    with pytest.raises(DataError, match="no chat template 'other'"):
        prompts_and_answers(apply_chat_template=True, chat_template_name="other")
    short = prompts_and_answers(gen_kwargs="max_gen_toks=1")
    assert short != prompts_and_answers()
    write_results_csv(tmp_path / "a.csv", mega_results)
    head, *rows = (tmp_path / "a.csv").read_text().splitlines()
    assert head == "task,filter,metric,value,stderr"
    for row in rows:
        task, kind, metric, value, _ = row.split(",")
        assert str(mega_results["results"][task][f"{metric},{kind}"]) == value
    assert {row.split(",")[0] for row in rows} == {*mega_results["results"]}
