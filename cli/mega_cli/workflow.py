"""`mega run`: a chain of mega commands that does only what is not done yet, and goes on where it stopped."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mega_cli.stages import Runner, locked
from mega_cli.workflow_config import Workflow, command_problems, nearest
from mega_common.config import Problem, apply_overrides, json_schema, load_yaml, raise_problems
from mega_common.errors import ConfigError
from mega_common.log import logger

EXAMPLES = """Examples:

  mega run workflow.yaml

  mega run workflow.yaml --status

  mega run workflow.yaml --until train --set stages.tokens.with.workers=8

  mega run workflow.yaml --force eval

  mega run --schema > workflow.schema.json
"""


def run(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(help="The workflow, a YAML file; its paths are relative to its folder.", show_default=False),
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Tell of each stage whether it would run and why.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands that would run.")] = False,
    until: Annotated[str | None, typer.Option(help="Run this stage and what it needs, no others.")] = None,
    force: Annotated[list[str] | None, typer.Option(help="Run this stage again, from nothing. Repeatable.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="Put a.b=value on top of the file. Repeatable.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file again, also those of unchanged size and time.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --status: JSON.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a workflow, for editors.")] = False,
) -> None:
    """Run the stages of a workflow: those that are done and unchanged are skipped, a failed one is taken up again.

    A stage is up to date when its command, the content of all it reads, the code, and what it made are what they were.
    """
    if schema:
        print(json.dumps(json_schema(Workflow), indent=1))
        return
    if file is None:
        raise ConfigError("no workflow given", hint="mega run workflow.yaml; see mega run --help")
    root = context.find_root().command
    forced = set(force or ())
    workflow = load_workflow(file, override or [], root, names={*forced, *([until] if until else [])})
    base = file.parent.resolve()
    state, order = base / f"{file.stem}.state.json", workflow.order(until)
    if status or dry_run:
        told = foresee(Runner(workflow, base, state, verify=verify), order, forced)
        _show(told, as_json=as_json, commands=dry_run)
        return
    with locked(base / f".{file.name}.lock") as lock:
        ended = run_stages(Runner(workflow, base, state, verify=verify), order, forced, lock)
    raise typer.Exit(ended)


def load_workflow(file: Path, overrides: list[str], root: Any, *, names: Collection[str] = ()) -> Workflow:
    """Read and check a workflow, its commands against those of `root`, and the stages that an option named.

    Raises:
        ConfigError: with everything that is wrong.
    """
    workflow = Workflow.parse(apply_overrides(load_yaml(file), overrides), source=str(file))
    found = [problem for name, stage in workflow.stages.items() for problem in command_problems(name, stage, root)]
    found += [
        Problem(name, "no such stage", hint=nearest(name, workflow.stages))
        for name in sorted(set(names) - workflow.stages.keys())
    ]
    if found:
        raise_problems(found, str(file))
    return workflow


@dataclass(frozen=True)
class Forecast:
    """Whether a stage would run (None: that depends on a stage before it), why, and its command."""

    name: str
    run: bool | None
    why: str
    command: str


def foresee(runner: Runner, order: list[str], forced: set[str]) -> list[Forecast]:
    """What each stage would do now. One that needs a stage which is not done can only be judged after that."""
    told: list[Forecast] = []
    for name in order:
        stage = runner.workflow.stages[name]
        waits = [other.name for other in told if other.name in stage.needs and other.run is not False]
        if waits and name not in forced:
            run, why = None, f"depends on {', '.join(waits)}"
        else:
            verdict = runner.judge(name, force=name in forced)
            run, why = verdict is not None, verdict.reason if verdict else "up to date"
        told.append(Forecast(name, run, why, shlex.join(["mega", *stage.command])))
    return told


def _show(told: list[Forecast], *, as_json: bool, commands: bool) -> None:
    if as_json:
        print(json.dumps({stage.name: {"run": stage.run, "why": stage.why} for stage in told}, indent=1))
    elif commands:
        for stage in told:
            if stage.run is not False:
                print(f"# {stage.name}: {stage.why}\n{stage.command}")
    else:
        width = max(len(stage.name) for stage in told)
        for stage in told:
            print(f"{stage.name:{width}}  " + (f"would run: {stage.why}" if stage.run else stage.why))


def run_stages(runner: Runner, order: list[str], forced: set[str], lock: int) -> int:
    """Run what must run, up to the first stage that fails, and return its exit status, or 0."""
    for name in order:
        verdict = runner.judge(name, force=name in forced)
        if verdict is None:
            logger.info("%s: up to date", name)
            continue
        logger.info("%s: %s", name, verdict.reason)
        if status := runner.attempt(name, verdict, lock):
            return status
    runner.save()
    return 0
