from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mega_cli import stages
from mega_cli.main import build_app
from mega_cli.stages import Runner, WorkflowError, locked
from mega_cli.workflow import foresee, load_workflow, run_stages
from mega_cli.workflow_config import Workflow
from mega_common.errors import ConfigError
from mega_trainer.config import load_run

# Stands in for `mega`: joins its inputs into its output, and notes each run and signal.
PROGRAM = """
import pathlib, signal, sys, time
command, *rest = sys.argv[1:]
options = dict(zip(rest[::2], rest[1::2]))
note = lambda text: open("runs.log", "a").write(text + "\\n")
note(command)
if command == "fail":
    pathlib.Path(options["--output"]).write_text("half")
    sys.exit(5)
if command == "sleep":
    def stop(number, _):
        note(f"signal {number}")
        sys.exit(0)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    note("ready")
    time.sleep(float(options["--seconds"]))
if command != "idle":
    text = pathlib.Path(options["--input"]).read_text()
    pathlib.Path(options["--output"]).write_text(text.upper() if command == "upper" else text + options.get("--add", ""))
"""


def stage(run: str, source: str, output: str, needs: list[str] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "run": run,
        "with": {"input": source, "output": output, **more.pop("options", {})},
        "needs": needs or [],
        "outputs": [output],
        **more,
    }


class Flow:
    """A workflow in a folder: a.txt -> upper -> b.txt -> copy -> c.txt, run by the stand-in."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.raw: dict[str, Any] = {
            "stages": {
                "first": stage("upper", "a.txt", "b.txt"),
                "second": stage("copy", "b.txt", "c.txt", ["first"]),
            }
        }
        (base / "a.txt").write_text("text")
        (base / "program.py").write_text(PROGRAM)

    def runner(self, *, verify: bool = False) -> Runner:
        program = (sys.executable, "program.py")
        return Runner(
            Workflow.parse(self.raw), self.base, self.base / "flow.state.json", verify=verify, program=program
        )

    def run(self, *force: str, until: str | None = None) -> list[str]:
        """Run it and return which commands ran."""
        log = self.base / "runs.log"
        log.unlink(missing_ok=True)
        with locked(self.base / "lock") as lock:
            self.status = run_stages(self.runner(), Workflow.parse(self.raw).order(until), set(force), lock)
        return log.read_text().split() if log.exists() else []

    def why(self) -> dict[str, str]:
        return {told.name: told.why for told in foresee(self.runner(), list(self.raw["stages"]), set())}

    def state(self) -> dict[str, Any]:
        return json.loads((self.base / "flow.state.json").read_text())["stages"]


@pytest.fixture
def flow(tmp_path: Path) -> Flow:
    return Flow(tmp_path)


def test_what_is_done_is_not_done_again(flow: Flow) -> None:
    assert flow.run() == ["upper", "copy"]
    assert (flow.base / "c.txt").read_text() == "TEXT"
    assert {name: attempt["status"] for name, attempt in flow.state().items()} == {"first": "done", "second": "done"}
    assert flow.run() == []
    assert flow.why() == {"first": "up to date", "second": "up to date"}


def test_a_changed_input_runs_what_depends_on_it(flow: Flow) -> None:
    flow.run()
    (flow.base / "a.txt").write_text("other")
    assert flow.why() == {"first": "input a.txt changed", "second": "depends on first"}
    assert flow.run() == ["upper", "copy"]
    assert (flow.base / "c.txt").read_text() == "OTHER"


def test_new_time_stamps_change_nothing(flow: Flow) -> None:
    flow.run()
    for name in ("a.txt", "b.txt", "c.txt"):
        os.utime(flow.base / name, (1, 1))
    assert flow.run() == []


def test_a_change_of_equal_size_right_after_a_run_is_seen(flow: Flow) -> None:
    flow.run()
    before = (flow.base / "a.txt").stat()
    (flow.base / "a.txt").write_text("TEXT")
    os.utime(flow.base / "a.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert flow.why()["first"] == "input a.txt changed"


def test_an_old_file_of_known_size_and_time_is_not_read_unless_asked(flow: Flow) -> None:
    os.utime(flow.base / "a.txt", (1, 1))
    flow.run()
    (flow.base / "a.txt").write_text("TEXT")
    os.utime(flow.base / "a.txt", (1, 1))
    assert flow.runner().judge("first") is None
    verdict = flow.runner(verify=True).judge("first")
    assert verdict is not None
    assert verdict.reason == "input a.txt changed"


def test_an_equal_result_stops_the_chain(flow: Flow) -> None:
    flow.run()
    (flow.base / "a.txt").write_text("TEXT")  # its upper case is the same
    assert flow.run() == ["upper"]


@pytest.mark.parametrize(("damage", "why"), [(None, "output b.txt is gone"), ("TE", "output b.txt changed")])
def test_a_damaged_output_is_made_again(flow: Flow, damage: str | None, why: str) -> None:
    flow.run()
    (flow.base / "b.txt").unlink()
    if damage is not None:
        (flow.base / "b.txt").write_text(damage)
    assert flow.why()["first"] == why
    assert flow.run() == ["upper"]
    assert (flow.base / "b.txt").read_text() == "TEXT"


def test_a_changed_command_starts_over_and_keeps_the_old_output(flow: Flow) -> None:
    flow.run()
    flow.raw["stages"]["second"]["with"]["add"] = "!"
    assert flow.run() == ["copy"]
    assert (flow.base / "c.txt").read_text() == "TEXT!"
    assert (flow.base / "c.txt.old-1").read_text() == "TEXT"


def test_on_change_continue_leaves_outputs_in_place(flow: Flow) -> None:
    flow.run()
    flow.raw["stages"]["second"]["with"]["add"] = "!"
    flow.raw["stages"]["second"]["on_change"] = "continue"
    assert flow.run() == ["copy"]
    assert not (flow.base / "c.txt.old-1").exists()


def test_changed_code_runs_a_stage_again(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    flow.run()
    monkeypatch.setattr(stages, "code_digest", lambda command: f"new {command}")
    assert flow.why()["first"] == "the code changed"
    assert flow.run() == ["upper", "copy"]
    assert flow.run() == []


def test_a_failure_is_passed_on_and_taken_up_without_repeating_earlier_stages(flow: Flow) -> None:
    flow.raw["stages"]["second"]["run"] = "fail"
    assert flow.run() == ["upper", "fail"]
    assert flow.status == 5
    assert flow.state()["second"]["status"] == "failed"
    assert flow.why() == {"first": "up to date", "second": "failed with status 5"}
    assert flow.run() == ["fail"]
    assert not (flow.base / "c.txt.old-1").exists()  # the same attempt goes on with what it left


def test_a_failed_stage_with_another_command_starts_over(flow: Flow) -> None:
    flow.raw["stages"]["second"]["run"] = "fail"
    flow.run()
    flow.raw["stages"]["second"]["run"] = "copy"
    assert flow.why()["second"] == "failed with status 5, its command changed"
    assert flow.run() == ["copy"]
    assert (flow.base / "c.txt.old-1").read_text() == "half"


def test_a_stage_that_was_killed_is_taken_up(flow: Flow) -> None:
    flow.run()
    path = flow.base / "flow.state.json"
    state = json.loads(path.read_text())
    state["stages"]["second"]["status"] = "running"
    path.write_text(json.dumps(state))
    assert flow.why()["second"] == "was killed"
    assert flow.run() == ["copy"]


def test_a_missing_output_is_a_failure(flow: Flow) -> None:
    flow.raw["stages"]["first"]["run"] = "idle"
    with pytest.raises(WorkflowError, match=r"'first' ended with status 0 but did not make b\.txt"):
        flow.run()
    assert flow.state()["first"]["status"] == "failed"


def test_a_missing_declared_input_is_named(flow: Flow) -> None:
    flow.raw["stages"]["first"]["inputs"] = ["corpus/*.txt"]
    with pytest.raises(WorkflowError, match=r"corpus/\*\.txt"):
        flow.run()


def test_folders_and_globs_are_followed_file_by_file(flow: Flow) -> None:
    (flow.base / "extra/deep").mkdir(parents=True)
    (flow.base / "extra/deep/one.txt").write_text("1")
    flow.raw["stages"]["first"]["inputs"] = ["extra", "*.py"]
    flow.run()
    assert list(flow.state()["first"]["inputs"]) == ["a.txt", "extra/deep/one.txt", "program.py"]
    (flow.base / "extra/deep/two.txt").write_text("2")
    assert flow.why()["first"] == "input extra/deep/two.txt is new"


def test_arguments_that_name_globs_and_token_data_sets_are_inputs(flow: Flow) -> None:
    (flow.base / "data").mkdir()
    for name in ("x.bin", "x.idx", "x.json", "y.bin"):
        (flow.base / "data" / name).write_text(name)
    flow.raw["stages"]["first"]["with"] |= {"data": "data/x", "more": "data/y.*"}
    flow.run()
    assert list(flow.state()["first"]["inputs"]) == ["a.txt", "data/x.bin", "data/x.idx", "data/y.bin"]


def test_what_a_stage_makes_is_not_its_input(flow: Flow) -> None:
    flow.raw["stages"]["first"]["with"]["output"] = "out/b.txt"
    flow.raw["stages"]["first"]["with"] |= {"folder": "out", "prompt": "no file name " * 100, "above": ".."}
    flow.raw["stages"]["first"]["outputs"] = ["out/b.txt"]
    flow.raw["stages"]["second"]["with"]["input"] = "out/b.txt"
    (flow.base / "out").mkdir()
    assert flow.run() == ["upper", "copy"]
    assert list(flow.state()["first"]["inputs"]) == ["a.txt"]
    assert flow.run() == []


def test_until_and_force(flow: Flow) -> None:
    assert flow.run(until="first") == ["upper"]
    assert flow.run("first", until="first") == ["upper"]
    assert (flow.base / "b.txt.old-1").exists()
    assert flow.run() == ["copy"]


def test_a_broken_state_file_is_named(flow: Flow) -> None:
    (flow.base / "flow.state.json").write_text('{"version": 1, "stages": 3}')
    with pytest.raises(WorkflowError, match=r"flow\.state\.json"):
        flow.run()


def test_two_runs_at_once_are_refused(flow: Flow) -> None:
    with locked(flow.base / "lock"), pytest.raises(WorkflowError, match=f"process {os.getpid()}"):
        flow.run()


DRIVER = """
import sys
from pathlib import Path
from mega_cli.main import guarded
from mega_cli.stages import Runner, locked
from mega_cli.workflow import run_stages
from mega_cli.workflow_config import Workflow
from mega_common.config import load_yaml

def work():
    base = Path.cwd()
    workflow = Workflow.parse(load_yaml(base / "flow.yaml"))
    with locked(base / "lock") as lock:
        runner = Runner(workflow, base, base / "flow.state.json", program=(sys.executable, "program.py"))
        sys.exit(run_stages(runner, workflow.order(), set(), lock))

sys.exit(guarded(work))
"""


def start_sleeper(flow: Flow, seconds: float) -> subprocess.Popen[bytes]:
    """The workflow in a process of its own, when its first stage is up."""
    flow.raw["stages"]["first"] = stage("sleep", "a.txt", "b.txt", options={"seconds": seconds})
    (flow.base / "flow.yaml").write_text(yaml.safe_dump(flow.raw))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-c", DRIVER], cwd=flow.base, env=env, stderr=subprocess.DEVNULL)
    log = flow.base / "runs.log"
    while not log.exists() or "ready" not in log.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_stage_once_and_is_recorded(flow: Flow, number: signal.Signals) -> None:
    process = start_sleeper(flow, 60)
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert (flow.base / "runs.log").read_text().split("\n") == ["sleep", "ready", f"signal {number}", ""]
    assert flow.state()["first"]["status"] == "interrupted"
    assert flow.why()["first"] == "was interrupted"


def test_a_stage_that_outlives_its_workflow_keeps_the_lock(flow: Flow) -> None:
    process = start_sleeper(flow, 1.5)
    process.kill()
    process.wait()
    with pytest.raises(WorkflowError, match="is being run already"):
        flow.run()
    deadline = time.monotonic() + 60
    while not (flow.base / "b.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    assert flow.why()["first"] == "was killed"
    flow.raw["stages"]["first"]["run"] = "upper"
    assert flow.run() == ["upper", "copy"]


ROOT = typer.main.get_command(build_app())


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*/workflow.yaml")), ids=lambda path: path.parent.name)
def test_the_examples_are_valid(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(example.parent)
    assert load_workflow(example, [], ROOT).order()
    load_run(example.parent / "run.yaml")


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
    assert "stages.one.needs = 'tow': no such stage -> did you mean 'two'?" in said
    assert "stages.one.outputs = 'x/y': lies in what 'two' makes, x" in said
    assert "stages.three: reads x, which 'two' makes -> needs: [two]" in said
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
    assert "stages.one.run = 'launch': not a whole command -> one of slurm, kubernetes" in said
    assert "stages.two.run = 'lanch slurm': no command 'lanch' -> did you mean 'launch'?" in said
    assert "stages.three.with.node: mega launch slurm has no such option -> did you mean 'nodes'?" in said
    assert "thre: no such stage -> did you mean 'three'?" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stages: {a: {run: run, outputs: [x], need: [b]}}", "stages.a.need: unknown key -> did you mean 'needs'?"),
        ("stages: {a: {run: run}}", "stages.a.outputs: required"),
        ("stages: {}", "stages"),
        (
            "stages: {a: {run: run, needs: [b], outputs: [x]}, b: {run: run, needs: [a], outputs: [y]}}",
            "these need each other in a circle",
        ),
        ("stages: {a b: {run: run, outputs: [x]}}", "letters, digits"),
    ],
)
def test_a_workflow_that_cannot_be_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in problems(tmp_path, text)


def test_options_become_arguments() -> None:
    raw = {"run": "data preprocess", "args": ["x", 1], "outputs": ["y"]}
    options = {"input": ["a", "b"], "append-eod": True, "progress": False, "lr": 0.5}
    workflow = Workflow.parse({"stages": {"one": {**raw, "with": options}}})
    expected = "data preprocess --input a --input b --append-eod --no-progress --lr 0.5 x 1"
    assert workflow.stages["one"].command == expected.split()


@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=10), st.randoms())
def test_each_stage_comes_after_what_it_needs(needs: list[set[int]], random: Any) -> None:
    names = [f"s{i}" for i in range(len(needs))]
    items = [
        (name, {"run": "run", "needs": [names[n] for n in earlier if n < i], "outputs": [f"o/{name}"]})
        for i, (name, earlier) in enumerate(zip(names, needs, strict=True))
    ]
    random.shuffle(items)
    workflow = Workflow.parse({"stages": dict(items)})
    order = workflow.order()
    assert sorted(order) == sorted(names)
    for name, config in workflow.stages.items():
        assert all(order.index(need) < order.index(name) for need in config.needs)
        part = workflow.order(name)
        assert part[-1] == name
        assert set(config.needs) < set(part) <= set(order)


def test_the_command_runs_real_stages(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("parallel: {tp: 2}\n")
    (tmp_path / "flow.yaml").write_text(
        """
stages:
  script: {run: launch slurm, args: [run.yaml], with: {nodes: 1, output: job.sh}, outputs: [job.sh]}
  manifest: {run: launch kubernetes, args: [run.yaml], with: {nodes: 3, output: job.yaml}, outputs: [job.yaml]}
"""
    )
    paths = os.pathsep.join(path for path in sys.path if path)

    def mega(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "mega_cli.main", "run", "flow.yaml", *args]
        env = {**os.environ, "PYTHONPATH": paths}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)

    assert "# script: never run\nmega launch slurm --nodes 1 --output job.sh run.yaml" in mega("--dry-run").stdout
    assert not (tmp_path / "job.sh").exists()
    assert mega().returncode == 0
    assert (tmp_path / "job.sh").exists()
    status = mega("--status", "--json")
    assert json.loads(status.stdout)["manifest"] == {"run": False, "why": "up to date"}
    failed = mega("--set", "stages.script.with.gpus-per-node=3")
    assert failed.returncode == 2
    assert "does not divide the 3 ranks" in failed.stderr
    assert "script    would run: failed with status 2, its command changed" in mega("--status").stdout
