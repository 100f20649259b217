from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from workflows import Flow

from mega_cli.main import build_typer_app
from mega_cli.workflow import load_workflow
from mega_cli.workflow_config import WorkflowConfig, diff_flat_settings
from mega_cli.workflow_runner import WorkflowError
from mega_common.atomic_files import lock_folder
from mega_common.errors import ConfigError
from mega_trainer.config.run_config import load_run_config

ROOT = typer.main.get_command(build_typer_app())


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*/workflow.yaml")), ids=lambda path: path.parent.name)
def test_the_examples_are_valid(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(example.parent)
    workflow = load_workflow(example, [], ROOT)
    assert workflow.ordered_stages()
    start = yaml.safe_load((example.parent / "run.yaml").read_text())["model"].get("from")
    if start is None:
        load_run_config(example.parent / "run.yaml")
    else:  # a stage makes it
        assert any(start in stage.outputs for stage in workflow.stages.values())


def problems(tmp_path: Path, text: str, *overrides: str, names: tuple[str, ...] = ()) -> str:
    (tmp_path / "flow.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_workflow(tmp_path / "flow.yaml", list(overrides), ROOT, names=names)
    return str(caught.value)


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    said = problems(
        tmp_path,
        """
stages:
  one: {run: launch slurm, needs: [tow], outputs: [x/y]}
  two: {run: launch slurm, args: [a.yaml], outputs: [x]}
  three: {run: launch slurm, inputs: [x/z], outputs: [w]}
""",
    )
    assert "stages.one.needs = 'tow': the workflow has no such stage -> did you mean 'two'?" in said
    assert "stages.one.outputs = 'x/y': is inside x, an output of stage 'two'" in said
    assert "stages.three: reads x, an output of stage 'two' -> needs: [two]" in said
    assert "3 problems" in said


def test_commands_and_options_are_checked_before_anything_runs(tmp_path: Path) -> None:
    said = problems(
        tmp_path,
        """
stages:
  one: {run: launch, outputs: [a]}
  two: {run: lanch slurm, outputs: [b]}
  three: {run: launch slurm, with: {node: 3}, outputs: [c]}
  four: {run: data preprocess, with: {input: texts, output: d, tokenizer: t, workers: two}, outputs: [d]}
  five: {run: data preprocess, with: {input: texts, output: e}, outputs: [e]}
""",
        names=("thre",),
    )
    assert "stages.one.run = 'launch': requires a subcommand -> one of slurm, kubernetes" in said
    assert "stages.two.run = 'lanch slurm': mega has no command 'lanch' -> did you mean 'launch'?" in said
    assert "stages.three.with.node: mega launch slurm has no such option -> did you mean 'nodes'?" in said
    assert "stages.four.with.workers: must be a whole number" in said
    assert "stages.five.with.tokenizer: mega data preprocess requires --tokenizer" in said
    assert "thre: the workflow has no such stage -> did you mean 'three'?" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stages: {a: {run: run, outputs: [x], need: [b]}}", "stages.a.need: unknown key -> did you mean 'needs'?"),
        ("stages: {a: {run: run}}", "stages.a.outputs: is required"),
        ("stages: {}", "stages"),
        (
            "stages: {a: {run: run, needs: [b], outputs: [x]}, b: {run: run, needs: [a], outputs: [y]}}",
            "the stages need each other in a cycle",
        ),
        ("stages: {a b: {run: run, outputs: [x]}}", "letters, digits"),
    ],
)
def test_a_workflow_that_cannot_be_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in problems(tmp_path, text)


def test_options_become_arguments() -> None:
    raw = {"run": "data preprocess", "args": ["x", 1], "outputs": ["y"]}
    options = {"input": ["a", "b"], "append-eod": True, "progress": False, "lr": 0.5}
    workflow = WorkflowConfig.parse({"stages": {"one": {**raw, "with": options}}})
    expected = "data preprocess --input a --input b --append-eod --no-progress --lr 0.5 x 1"
    assert workflow.stages["one"].command_arguments == expected.split()


@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=10), st.randoms())
def test_each_stage_comes_after_what_it_needs(needs: list[set[int]], random: Any) -> None:
    names = [f"s{i}" for i in range(len(needs))]
    items = [
        (name, {"run": "run", "needs": [names[n] for n in earlier if n < i], "outputs": [f"o/{name}"]})
        for i, (name, earlier) in enumerate(zip(names, needs, strict=True))
    ]
    random.shuffle(items)
    workflow = WorkflowConfig.parse({"stages": dict(items)})
    order = workflow.ordered_stages()
    assert sorted(order) == sorted(names)
    for name, config in workflow.stages.items():
        assert all(order.index(need) < order.index(name) for need in config.needs)
        part = workflow.ordered_stages(name)
        assert part[-1] == name
        assert set(config.needs) < set(part) <= set(order)


RUN = """\
# a comment
model: {preset: tiny, vocab_size: 300}
data: {train: tokens, seq_length: 64}
batch: {micro: 2, global: 8}
train: {steps: 60}
output: run
"""
UP_TO_DATE, GOES_ON, STARTS_OVER = "up to date", "goes on", "starts over"


@pytest.fixture
def trained(flow: Flow) -> Flow:
    """A workflow of one train stage, which has been run."""
    flow.raw = {"stages": {"train": {"run": "train", "args": ["run.yaml"], "outputs": ["run/checkpoints"]}}}
    (flow.base / "run.yaml").write_text(RUN)
    assert flow.run() == ["train"]
    return flow


def change(base: Path, sections: dict[str, Any]) -> None:
    raw = dict(reversed(yaml.safe_load(RUN).items()))
    for name, value in sections.items():
        raw[name] = {**raw.get(name, {}), **value} if isinstance(value, dict) else value
    (base / "run.yaml").write_text(yaml.safe_dump(raw, sort_keys=False))


def what_happens(flow: Flow) -> str:
    """To the run that is there, which the next one writes a second line into, or sets aside."""
    if not flow.run():
        return UP_TO_DATE
    return GOES_ON if trainings(flow.base / "run") == 2 else STARTS_OVER


def trainings(folder: Path) -> int:
    return (folder / "checkpoints/made").read_text().count("trained")


@pytest.mark.parametrize(
    ("sections", "finished", "half_done"),
    [
        ({}, UP_TO_DATE, GOES_ON),  # no comment any more, and the keys in another order
        ({"train": {"steps": 70}}, GOES_ON, GOES_ON),
        ({"train": {"steps": 70}, "optimizer": {"lr": 1e-4}}, GOES_ON, GOES_ON),
        ({"train": {"steps": 40}}, STARTS_OVER, GOES_ON),
        ({"optimizer": {"lr": 1e-4}}, STARTS_OVER, GOES_ON),
        ({"optimizer": {"lr": 3.0e-4}}, UP_TO_DATE, GOES_ON),  # the default
        ({"model": {"vocab_size": 301}}, STARTS_OVER, STARTS_OVER),
        ({"model": {"vocab_size": 301}, "train": {"steps": 70}}, STARTS_OVER, STARTS_OVER),
        ({"batch": {"global": 16}}, STARTS_OVER, GOES_ON),
        ({"train": {"seed": 7}}, STARTS_OVER, GOES_ON),
        ({"lr_schedule": {"decay_steps": 60}}, UP_TO_DATE, GOES_ON),  # the default, too
        ({"lr_schedule": {"decay_steps": 50}}, STARTS_OVER, GOES_ON),
        ({"checkpoint": {"every": 5, "keep": 2}, "log": {"every": 7}}, UP_TO_DATE, GOES_ON),
        ({"parallel": {"tp": 2}, "batch": {"micro": 1}, "recompute": "full"}, UP_TO_DATE, GOES_ON),
    ],
)
def test_only_what_makes_the_old_outputs_wrong_puts_them_aside(
    trained: Flow, sections: dict[str, Any], finished: str, half_done: str
) -> None:
    state = trained.base / "flow.state.json"
    as_finished = state.read_text()
    change(trained.base, sections)
    assert what_happens(trained) == finished
    shutil.rmtree(trained.base / "run")
    (trained.base / "run/checkpoints").mkdir(parents=True)
    (trained.base / "run/checkpoints/made").write_text("trained\n")
    failed = json.loads(as_finished)
    failed["stages"]["train"] |= {"status": "failed", "exit_status": 1}
    state.write_text(json.dumps(failed))
    assert what_happens(trained) == half_done


def test_settings_on_the_command_count_like_those_in_the_file(trained: Flow) -> None:
    trained.raw["stages"]["train"]["with"] = {"nproc": 2, "set": ["train.steps=60", "checkpoint.keep=3"]}
    assert what_happens(trained) == UP_TO_DATE
    trained.raw["stages"]["train"]["with"]["set"] = "train.steps=70"
    assert trained.why() == {"train": "train.steps: 60 -> 70, lr_schedule.decay_steps: 60 -> 70"}
    assert what_happens(trained) == GOES_ON


NAMED = {
    "data": {
        "valid": [{"path": "held/out"}, {"path": "raw/one.jsonl"}],
        "test": [{"path": "texts"}, {"path": "more/*.jsonl"}],
        "tokenizer": "tok",
    },
    "init_from": "weights",
    "checkpoint": {"load": "older"},
}


@pytest.mark.parametrize(
    "name",
    [
        "tokens.bin",
        "tokens.idx",
        "tokens.mask.bin",
        "held/out.bin",
        "raw/one.jsonl",
        "texts/inner/a.txt",
        "more/one.jsonl",
        "tok/tokenizer.json",
        "weights/model.safetensors",
        "older/a",
    ],
)
def test_files_that_a_run_yaml_names_are_inputs(flow: Flow, name: str) -> None:
    flow.raw = {"stages": {"train": {"run": "train", "args": ["run.yaml"], "outputs": ["run/checkpoints"]}}}
    change(flow.base, NAMED)
    file = flow.base / name
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text("one")
    assert flow.run() == ["train"]
    assert what_happens(flow) == UP_TO_DATE
    file.write_text("another")
    assert flow.why() == {"train": f"input {name} changed"}
    assert what_happens(flow) == STARTS_OVER


def test_a_checkpoint_of_its_own_that_a_run_loads_is_no_input(trained: Flow) -> None:
    change(trained.base, {"checkpoint": {"load": "run/checkpoints"}})
    assert what_happens(trained) == STARTS_OVER
    assert what_happens(trained) == UP_TO_DATE


def test_a_state_that_does_not_know_the_named_files_keeps_its_training(trained: Flow) -> None:
    (trained.base / "tokens.bin").write_text("there before")
    state = json.loads((trained.base / "flow.state.json").read_text())
    state["stages"]["train"]["named"] = None
    (trained.base / "flow.state.json").write_text(json.dumps(state))
    assert what_happens(trained) == UP_TO_DATE


def test_a_run_yaml_that_cannot_be_is_told_before_the_stage_runs(trained: Flow) -> None:
    change(trained.base, {"train": {"step": 3}})
    with pytest.raises(ConfigError, match=r"train\.step: unknown key"):
        trained.run()


def test_what_changed_is_named_with_its_values(trained: Flow) -> None:
    change(trained.base, {"optimizer": {"lr": 1e-4, "eps": 1e-6, "weight_decay": 0}, "precision": "fp32"})
    assert "optimizer.lr: 0.0003 -> 0.0001" in trained.why()["train"]
    assert trained.why()["train"].endswith("(and 1 more)")
    assert diff_flat_settings({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "d": 3}}) == {"a.d": (None, 3), "c": (2, None)}


@pytest.mark.parametrize("lost", ["step", "nothing, and more was made"])
def test_training_goes_on_with_what_is_left_of_its_checkpoints(trained: Flow, lost: str) -> None:
    folder = trained.base / "run/checkpoints"
    if lost == "step":
        (folder / "made").rename(folder / "other")
        assert trained.why() == {"train": "output run/checkpoints/made is gone"}
        assert trained.run() == ["train"]
        assert (folder / "other").exists()
    else:
        (folder / "later").write_text("by hand")
        assert trained.run() == []


def test_new_code_does_not_throw_a_training_away(trained: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mega_cli.workflow_runner.compute_code_digest", lambda command: f"new {command}")
    assert what_happens(trained) == GOES_ON


@pytest.fixture
def halves(flow: Flow) -> Flow:
    """One training in two stages, which have been run."""
    half = {"run": "train", "args": ["run.yaml"]}
    first = {**half, "with": {"set": "train.steps=30"}, "outputs": ["run/checkpoints/train.steps=30"]}
    flow.raw = {"stages": {"first": first, "second": {**half, "needs": ["first"], "outputs": ["run/checkpoints/end"]}}}
    (flow.base / "run.yaml").write_text(RUN)
    assert flow.run() == ["train", "train"]
    return flow


def test_a_training_that_starts_over_takes_later_stages_of_its_run_along(halves: Flow) -> None:
    """What a first stage began and a second went on with is one run: nothing of the old one may be gone on with."""
    (halves.base / "run/assets").mkdir()
    change(halves.base, {"model": {"vocab_size": 301}})
    assert halves.run() == ["train", "train"]
    assert trainings(halves.base / "run") == trainings(halves.base / "run.old-1") == 2
    assert not (halves.base / "run/assets").exists()


def test_a_longer_second_half_leaves_the_first_alone(halves: Flow) -> None:
    change(halves.base, {"train": {"steps": 70}})
    assert halves.why() == {"first": "up to date", "second": "train.steps: 60 -> 70, lr_schedule.decay_steps: 60 -> 70"}
    assert halves.run() == ["train"]
    assert trainings(halves.base / "run") == 3


def test_what_is_not_the_runs_own_stays_where_it_is(trained: Flow) -> None:
    (trained.base / "run/tokens.bin").write_text("the data lies beside")
    change(trained.base, {"model": {"vocab_size": 301}})
    assert what_happens(trained) == STARTS_OVER
    assert (trained.base / "run/tokens.bin").exists()
    assert trainings(trained.base / "run") == 1
    assert (trained.base / "run/checkpoints.old-1/made").exists()


def test_a_folder_that_something_trains_in_is_not_moved(trained: Flow) -> None:
    change(trained.base, {"model": {"vocab_size": 301}})
    with (
        lock_folder(trained.base / "run"),
        pytest.raises(ConfigError, match=f"run: is in use by process {os.getpid()}"),
    ):
        trained.run()
    assert trainings(trained.base / "run") == 1


def test_a_run_that_moves_elsewhere_leaves_the_old_one_alone(trained: Flow) -> None:
    (trained.base / "run/note").write_text("")
    change(trained.base, {"output": "elsewhere"})
    trained.run()
    assert (trained.base / "run/note").exists()


@pytest.mark.parametrize("place", ["kept", "s3://bucket/run"])
def test_checkpoints_that_are_kept_elsewhere_are_not_gone_on_from_either(flow: Flow, place: str) -> None:
    flow.raw = {"stages": {"train": {"run": "train", "args": ["run.yaml"], "outputs": ["run/checkpoints"]}}}
    change(flow.base, {"checkpoint": {"path": place}})
    flow.run()
    (flow.base / "kept").mkdir()
    change(flow.base, {"checkpoint": {"path": place}, "model": {"vocab_size": 301}})
    if place == "kept":
        flow.run()
        assert (flow.base / "kept.old-1").exists()
    else:
        with pytest.raises(
            WorkflowError, match="s3://bucket/run: the checkpoints of the earlier run cannot be moved away"
        ):
            flow.run()
        assert not (flow.base / "run.old-1").exists()
