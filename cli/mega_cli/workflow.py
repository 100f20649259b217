"""`mega run`: run a workflow of mega commands, skip finished stages, and resume after a failure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mega_cli.workflow_config import WorkflowConfig, find_command_problems, reject_run_yaml_as_workflow, suggest_nearest
from mega_cli.workflow_runner import WorkflowRunner, hold_workflow_lock
from mega_common.errors import ConfigError
from mega_common.progress_logging import logger
from mega_common.strict_config import (
    ConfigProblem,
    apply_config_overrides,
    build_json_schema,
    load_yaml_mapping,
    raise_config_error,
)

EXAMPLES = """Examples:

  mega run workflow.yaml

  mega run workflow.yaml --status

  mega run workflow.yaml --until train --set stages.tokens.with.workers=8

  mega run workflow.yaml --force eval

  mega run --schema > workflow.schema.json
"""


def run_command(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Workflow file, e.g. workflow.yaml; its paths are relative to its folder.", show_default=False
        ),
    ] = None,
    status: Annotated[
        bool, typer.Option("--status", help="Print for each stage if it would run and why, and exit.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands that would run, and exit.")] = False,
    until: Annotated[str | None, typer.Option(help="Run only this stage and the stages it needs, e.g. train.")] = None,
    force: Annotated[
        list[str] | None, typer.Option(help="Re-run this stage from the start, e.g. eval. Repeatable.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a setting of the file, e.g. stages.tokens.with.workers=8. Repeatable.",
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Compute the digests of all files again, including files of unchanged size and modification time.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --status: print JSON.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of a workflow, for editors, and exit.")
    ] = False,
) -> None:
    """Run the stages of a workflow: finished and unchanged stages are skipped, a failed one is resumed.

    A stage is up to date if its command, its inputs, the code and its outputs have not changed since it finished.
    """
    if schema:
        print(json.dumps(build_json_schema(WorkflowConfig), indent=1))
        return
    if file is None:
        raise ConfigError("mega run requires a workflow file", hint="mega run workflow.yaml; see mega run --help")
    root = context.find_root().command
    forced = set(force or ())
    workflow = load_workflow(file, override or [], root, names={*forced, *([until] if until else [])})
    base = file.parent.resolve()
    state, order = base / f"{file.stem}.state.json", workflow.ordered_stages(until)
    if status or dry_run:
        forecasts = forecast_stages(WorkflowRunner(workflow, base, state, verify=verify), order, forced)
        _print_forecasts(forecasts, as_json=as_json, commands=dry_run)
        return
    with hold_workflow_lock(base / f".{file.name}.lock") as lock:
        status_code = run_workflow_stages(WorkflowRunner(workflow, base, state, verify=verify), order, forced, lock)
    raise typer.Exit(status_code)


def load_workflow(file: Path, overrides: list[str], root: Any, *, names: Collection[str] = ()) -> WorkflowConfig:
    """Return the configuration of a workflow file; a ConfigError lists the problems of its stages and commands.
    Its commands are checked against the `mega` command tree `root`, and the stage names `names` given as options.

    Raises:
        ConfigError: with all problems.
    """
    raw = apply_config_overrides(load_yaml_mapping(file), overrides)
    reject_run_yaml_as_workflow(file, raw)
    workflow = WorkflowConfig.parse(raw, source=str(file))
    found = [problem for name, stage in workflow.stages.items() for problem in find_command_problems(name, stage, root)]
    found += [
        ConfigProblem(name, "the workflow has no such stage", hint=suggest_nearest(name, workflow.stages))
        for name in sorted(set(names) - workflow.stages.keys())
    ]
    if found:
        raise_config_error(found, str(file))
    return workflow


@dataclass(frozen=True)
class WorkflowStageForecast:
    """Forecast of a workflow stage: if it would run (None: depends on an earlier stage), the reason, and its command."""

    name: str
    run: bool | None
    why: str
    command: str


def forecast_stages(runner: WorkflowRunner, order: list[str], forced: set[str]) -> list[WorkflowStageForecast]:
    """Return the forecast of each workflow stage in `order`, without running any.
    A stage that needs an unfinished one can only be judged after that one ran.
    """
    forecasts: list[WorkflowStageForecast] = []
    for name in order:
        stage = runner.workflow.stages[name]
        waits = [other.name for other in forecasts if other.name in stage.needs and other.run is not False]
        if waits and name not in forced:
            run, why = None, f"depends on {', '.join(waits)}"
        else:
            verdict = runner.find_stage_rerun_reason(name, force=name in forced)
            run, why = verdict is not None, verdict.reason if verdict else "up to date"
        forecasts.append(WorkflowStageForecast(name, run, why, shlex.join(["mega", *stage.command_arguments])))
    return forecasts


def _print_forecasts(forecasts: list[WorkflowStageForecast], *, as_json: bool, commands: bool) -> None:
    if as_json:
        print(json.dumps({stage.name: {"run": stage.run, "why": stage.why} for stage in forecasts}, indent=1))
    elif commands:
        for stage in forecasts:
            if stage.run is not False:
                print(f"# {stage.name}: {stage.why}\n{stage.command}")
    else:
        width = max(len(stage.name) for stage in forecasts)
        for stage in forecasts:
            print(f"{stage.name:{width}}  " + (f"would run: {stage.why}" if stage.run else stage.why))


def run_workflow_stages(runner: WorkflowRunner, order: list[str], forced: set[str], lock: int) -> int:
    """Run the workflow stages in `order` that are not up to date, and return 0 or the first failure's exit status.
    No stage is run after a failure.
    """
    for name in order:
        verdict = runner.find_stage_rerun_reason(name, force=name in forced)
        if verdict is None:
            logger.info("%s: up to date", name)
            continue
        logger.info("%s: %s", name, verdict.reason)
        if status := runner.attempt_stage(name, verdict, lock):
            return status
    runner.save_state()
    return 0
