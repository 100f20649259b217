"""A workflow whose commands are stand-ins that run in milliseconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mega_cli.workflow import forecast_stages, run_workflow_stages
from mega_cli.workflow_config import WorkflowConfig
from mega_cli.workflow_runner import WorkflowRunner, hold_workflow_lock

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
if command == "train":
    folder = pathlib.Path("run/checkpoints")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "made").open("a").write("trained\\n")
    (folder / options.get("--set", "end")).write_text("")
elif command == "tempfail":
    pathlib.Path(options["--output"]).write_text("half")
    sys.exit(75)
elif command != "idle":
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

    def runner(self, *, verify: bool = False) -> WorkflowRunner:
        program = (sys.executable, "program.py")
        return WorkflowRunner(
            WorkflowConfig.parse(self.raw), self.base, self.base / "flow.state.json", verify=verify, program=program
        )

    def run(self, *force: str, until: str | None = None) -> list[str]:
        """Run it and return which commands ran."""
        log = self.base / "runs.log"
        log.unlink(missing_ok=True)
        with hold_workflow_lock(self.base / "lock") as lock:
            self.status = run_workflow_stages(
                self.runner(), WorkflowConfig.parse(self.raw).ordered_stages(until), set(force), lock
            )
        return log.read_text().split() if log.exists() else []

    def why(self) -> dict[str, str]:
        return {told.name: told.why for told in forecast_stages(self.runner(), list(self.raw["stages"]), set())}

    def state(self) -> dict[str, Any]:
        return json.loads((self.base / "flow.state.json").read_text())["stages"]
