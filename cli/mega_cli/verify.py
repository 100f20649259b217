"""`mega verify`: compare a run's model in parallel layouts with one process, on this machine's CPUs."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from mega_trainer.config.run_config import RunConfig
    from mega_trainer.verify.failure_location import TensorDifference
    from mega_trainer.verify.verification import LayoutFailureReport, VerifyCheckRow

EXAMPLES = """Examples:

  mega verify

  mega verify run.yaml --layouts 30 --ranks 8

  mega verify run.yaml --only "tp=2 pp=2 schedule=zb-h1"

  mega verify Qwen3-0.6B/config.json --json verify.json

  mega verify run.yaml --mup --widths 64,128,256,512 --out coordinates.html
"""
PLAIN_WIDTH = 150  # columns of the table in a file or pipe
DEFAULT_RUN = Path("run.yaml")


def verify_command(
    run: Annotated[
        Path,
        typer.Argument(
            help="Configuration of the run; or a model alone: a folder or a HuggingFace config.json.", metavar="[RUN]"
        ),
    ] = DEFAULT_RUN,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Override a setting, e.g. --set model.moe.top_k=1. Repeatable."
        ),
    ] = None,
    layouts: Annotated[int, typer.Option(min=1, help="Number of layouts, e.g. 30.")] = 12,
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Largest number of processes of a layout, e.g. 8.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the choice of layouts; another seed gives others.")] = 0,
    only: Annotated[
        str | None, typer.Option(metavar="LAYOUT", help='Only this layout, as in the table, e.g. "tp=2 sp=True".')
    ] = None,
    mup: Annotated[
        bool,
        typer.Option(
            "--mup", help="Check over widths instead: that muP makes the effect of a step independent of the width."
        ),
    ] = False,
    widths: Annotated[str, typer.Option(help="With --mup: hidden sizes, e.g. 64,128,256,512.")] = "64,128,256,512",
    out: Annotated[Path, typer.Option(help="With --mup: HTML file to write.")] = Path("coordinates.html"),
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="JSON file for all results; - for standard output.")
    ] = None,
) -> None:
    """Verify that a run's model computes the same in every parallel layout, with a tiny model of the same kind.

    The tiny model trains a few steps in fp64 in a covering of layouts and in one process: losses, gradients, weights and
    optimizer state must agree. Checkpoints are restored in other layouts, generation is compared with training, recurrent
    layers token by token with chunks, and bf16 with fp32. Of a failure, the smallest failing layout and the first tensor that
    differs are reported. Exit status: 0 all agree, 1 some do not, 2 user error.

    With --mup, tiny models of several widths are trained a few steps with muP (`optimizer.mup`) and without; the change of
    their activations is printed and drawn. Exit status 1: with muP the change of the logits depends on the width.
    """
    if mup:
        _check_coordinates(_load_model(run, set_ or []), run, widths, out, json_file)
        return
    from rich.console import Console
    from rich.progress import Progress

    from mega_common.progress_logging import logger
    from mega_eval.generation_check import compare_generation_with_training
    from mega_trainer.verify.tiny_model import TinyModelRun
    from mega_trainer.verify.verification import Verification

    tiny = TinyModelRun.from_run(_load_model(run, set_ or []))
    report = Console(stderr=json_file == Path("-"))
    report = report if report.is_terminal else Console(stderr=json_file == Path("-"), width=PLAIN_WIDTH)
    report.print(
        f"{run}: {tiny.name}\ntiny model: {', '.join(tiny.describe_changes()) or 'unchanged'}", highlight=False
    )
    for sentence in tiny.unverified:
        report.print(f"not verified: {sentence}", highlight=False)
    logger.setLevel("WARNING")
    verification = Verification(
        tiny, layouts=layouts, ranks=ranks, seed=seed, only=only, check_generation=compare_generation_with_training
    )
    if verification.uncovered_parallel_degrees:
        names = ", ".join(verification.uncovered_parallel_degrees)
        report.print(
            f"not verified: no layout of up to {ranks} processes has {names}; try --ranks 8 or more --layouts."
        )
    rows: list[VerifyCheckRow] = []
    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("verifying", total=verification.num_checks)
        for row in verification.run_checks():
            rows.append(row)
            progress.update(task, advance=1, description=row.check)
            if not screen.is_terminal:
                screen.print(
                    f"{len(rows)}/{verification.num_checks} {row.check}: {row.name}", soft_wrap=True, highlight=False
                )
        progress.update(task, description="locating the failure")
        failure = verification.explain_failure() if verification.failures else None
    report.print(build_verify_table(rows))
    problems = [row for row in rows if row.problem]
    report.print("\n".join(format_verify_summary(rows, failure, run)), soft_wrap=True, highlight=False, markup=False)
    if json_file is not None:
        _write_json(json_file, tiny.name, tiny.describe_changes(), tiny.unverified, rows, failure)
    if problems:
        raise typer.Exit(1)


def _check_coordinates(config: RunConfig, run: Path, widths: str, out: Path, json_file: Path | None) -> None:
    """Run the coordinate check of muP, print its table and write its page."""
    from rich.console import Console
    from rich.progress import Progress

    from mega_common.atomic_files import write_json_atomically
    from mega_common.errors import ConfigError
    from mega_common.progress_logging import logger
    from mega_trainer.pages.page_elements import write_html_page
    from mega_trainer.verify.coordinate_check import check_coordinates

    parts = [part.strip() for part in widths.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--widths must be whole numbers, found {widths!r}", hint="--widths 64,128,256,512")
    logger.setLevel("WARNING")
    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("coordinate check", total=2 * len(set(parts)))
        found = check_coordinates(
            config, list(map(int, parts)), lambda what: progress.update(task, advance=1, description=what)
        )
    write_html_page(out, found.render_page(str(run)), "--out")
    if json_file == Path("-"):
        print(json.dumps(found.as_json(), indent=1))
    else:
        if json_file is not None:
            write_json_atomically(json_file, found.as_json())
        rows = found.list_rows()
        sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(size) for cell, size in zip(row, sizes, strict=True)).rstrip())
        print(found.problem or "with muP the change of the logits does not depend on the width")
        print(out)
    if found.problem:
        raise typer.Exit(1)


def _load_model(run: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the configuration of a run.yaml, or of a model alone."""
    from mega_cli.workflow_config import load_run_file
    from mega_common.errors import ConfigError
    from mega_trainer.config.run_config import load_plan_config

    if not run.exists():
        hint = "mega verify RUN; RUN is a run.yaml, a run folder, a model folder or a config.json"
        raise ConfigError(f"{run} does not exist", hint=hint)
    run = run / "run.yaml" if (run / "run.yaml").is_file() else run
    is_model = run.is_dir() or run.suffix == ".json"
    return load_plan_config(run, overrides) if is_model else load_run_file(run, overrides)


def build_verify_table(rows: Sequence[VerifyCheckRow]) -> Table:
    """Return the results of `mega verify` as a table: check, layout, ranks, largest error and verdict."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "layout", "ranks", "largest error", "verdict", box=SIMPLE_HEAD, pad_edge=False)
    for number, row in enumerate(rows):
        if number and row.check != rows[number - 1].check:
            table.add_section()
        error = "" if row.error is None else f"{row.error:.1e}"
        verdict = Text(f"FAILED: {row.problem}", style="bold red") if row.problem else Text("ok", style="green")
        verdict = Text(f"skipped: {row.skipped}", style="yellow") if row.skipped else verdict
        table.add_row(row.check, Text(row.name), str(row.ranks), error, verdict)
    return table


def format_verify_summary(rows: Sequence[VerifyCheckRow], failure: LayoutFailureReport | None, run: Path) -> list[str]:
    """Return the lines below the table of `mega verify`: how many checks passed, and the smallest failing layout."""
    problems, layouts = [row for row in rows if row.problem], [row for row in rows if row.check == "layout"]
    if not problems:
        worst = max((row.error or 0.0 for row in layouts), default=0.0)
        return [f"{len(rows)} checks passed; {len(layouts)} layouts agree with one process, largest error {worst:.1e}"]
    lines = [f"{len(problems)} of {len(rows)} checks failed"]
    lines += [
        f"first difference of {row.check}: {_describe_difference(row.difference)}" for row in rows if row.difference
    ]
    if failure is not None:
        lines += [f"smallest failing layout: {failure.layout} ({failure.ranks} rank(s)): {failure.problem}"]
        if failure.difference is not None:
            lines += [f"first difference: {_describe_difference(failure.difference)}"]
        elif not failure.problem.count("ranks") and "(in " not in failure.problem:
            lines += ["the first step agrees; later steps differ"]
        lines += [f'again: mega verify {shlex.quote(str(run))} --only "{failure.layout}"']
    return lines


def _describe_difference(found: TensorDifference) -> str:
    return f"{found}" if found.layer is None else f"layer {found.layer}, {found}"


def _write_json(
    file: Path,
    model: str,
    changes: Sequence[str],
    unverified: Sequence[str],
    rows: Sequence[VerifyCheckRow],
    failure: LayoutFailureReport | None,
) -> None:
    from mega_common.atomic_files import write_json_atomically

    content: dict[str, Any] = {
        "model": model, "changes": list(changes), "unverified": list(unverified),
        "passed": not any(row.problem for row in rows), "checks": [row.as_json() for row in rows],
        "failure": None if failure is None else failure.as_json(),
    }  # fmt: skip
    for check in content["checks"]:
        check["error"] = check["error"] if check["error"] is None or math.isfinite(check["error"]) else None
    if file == Path("-"):
        print(json.dumps(content, indent=1))
    else:
        write_json_atomically(file, content)
