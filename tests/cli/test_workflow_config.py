from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mega_cli.main import build_typer_app
from mega_cli.workflow import load_workflow
from mega_cli.workflow_config import WorkflowConfig
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
""",
        names=("thre",),
    )
    assert "stages.one.run = 'launch': requires a subcommand -> one of slurm, kubernetes" in said
    assert "stages.two.run = 'lanch slurm': mega has no command 'lanch' -> did you mean 'launch'?" in said
    assert "stages.three.with.node: mega launch slurm has no such option -> did you mean 'nodes'?" in said
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
