"""Which stages run, why, on what, and what is recorded of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from workflows import Flow, stage

from mega_cli import workflow_runner
from mega_cli.workflow_runner import WorkflowError, hold_workflow_lock
from mega_data.token_files.dataset_info import get_info_path


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
    assert flow.runner().find_stage_rerun_reason("first") is None
    verdict = flow.runner(verify=True).find_stage_rerun_reason("first")
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
    monkeypatch.setattr(workflow_runner, "compute_code_digest", lambda command: f"new {command}")
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


def test_a_stage_that_ends_by_status_75_has_stopped_and_goes_on_next_time(flow: Flow) -> None:
    flow.raw["stages"]["first"]["run"] = "tempfail"
    assert flow.run() == ["tempfail"]
    assert flow.status == 75
    assert flow.state()["first"]["status"] == "interrupted"
    assert flow.why() == {"first": "was interrupted", "second": "depends on first"}
    assert flow.run() == ["tempfail"]
    assert not (flow.base / "b.txt.old-1").exists()


@pytest.mark.parametrize("status", ["running", "interrupted", "done"])
def test_a_command_that_writes_over_nothing_finds_nothing_in_its_way(flow: Flow, status: str) -> None:
    """Also not the description of a data set, which a workflow need not list, nor what was finished before a kill."""
    flow.raw["stages"]["first"] = stage("data", "a.txt", "d.bin")
    flow.raw["stages"]["second"]["with"]["input"] = "d.bin"
    assert flow.run() == ["data", "copy"]
    description = get_info_path(flow.base / "d").name
    for name in ("d.idx", description, "d.jsonl"):
        (flow.base / name).write_text("text")
    path = flow.base / "flow.state.json"
    state = json.loads(path.read_text())
    state["stages"]["first"]["status"] = status
    path.write_text(json.dumps(state))
    if status == "done":
        (flow.base / "a.txt").write_text("other")
    assert flow.run()[0] == "data"
    there = {path.name for path in flow.base.glob("d.*")}
    assert there == {"d.bin", "d.bin.old-1", "d.idx.old-1", f"{description}.old-1", "d.jsonl"}


def test_a_missing_output_is_a_failure(flow: Flow) -> None:
    flow.raw["stages"]["first"]["run"] = "idle"
    with pytest.raises(WorkflowError, match=r"'first' succeeded, but did not write its output b\.txt"):
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
    with hold_workflow_lock(flow.base / "lock"), pytest.raises(WorkflowError, match=f"process {os.getpid()}"):
        flow.run()


DRIVER = """
import sys
from pathlib import Path
from mega_cli.main import run_and_report_errors
from mega_cli.workflow import run_workflow_stages
from mega_cli.workflow_config import WorkflowConfig
from mega_cli.workflow_runner import WorkflowRunner, hold_workflow_lock
from mega_common.strict_config import load_yaml_mapping

def work():
    base = Path.cwd()
    workflow = WorkflowConfig.parse(load_yaml_mapping(base / "flow.yaml"))
    with hold_workflow_lock(base / "lock") as lock:
        runner = WorkflowRunner(workflow, base, base / "flow.state.json", program=(sys.executable, "program.py"))
        sys.exit(run_workflow_stages(runner, workflow.ordered_stages(), set(), lock))

sys.exit(run_and_report_errors(work))
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
    with pytest.raises(WorkflowError, match="is already running"):
        flow.run()
    deadline = time.monotonic() + 60
    while not (flow.base / "b.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    assert flow.why()["first"] == "was killed"
    flow.raw["stages"]["first"]["run"] = "upper"
    assert flow.run() == ["upper", "copy"]
