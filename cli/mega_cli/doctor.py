"""`mega doctor`: examine this machine before a long run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from mega_trainer.doctor.check_result import CheckResult

EXAMPLES = """Examples:

  mega doctor

  mega doctor --nproc 4 --minutes 5 --json doctor.json

  mega doctor --nproc 8 --fit ours.yaml; mega plan run.yaml --machine ours.yaml --ranks 8
"""
COLORS = {"ok": "green", "failed": "bold red", "no expectation": "dim", "skipped": "yellow"}
INTERRUPTED_STATUS = 130
PLAIN_WIDTH = 120  # columns of the table in a file or pipe


def doctor_command(
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start on this machine. Default: one per GPU; on CPU 1.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Time limit; parts that are not done then are skipped, e.g. 5.")
    ] = 10.0,
    json_: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write all results, to send or compare, e.g. doctor.json."),
    ] = None,
    fit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a machine file with the measured speeds, for mega plan --machine FILE, e.g. ours.yaml.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Examine this machine: versions, kernels, speeds, groups of ranks, small runs, checkpoints and failures.

    Each check has a measured figure, an expected one (from the machine table of mega plan; none for an unknown machine) and
    a verdict. Exit status: 0 nothing failed, 1 a check failed, 2 user error, 130 interrupted; the results until then are shown.
    """
    import tempfile

    from rich.console import Console

    from mega_common.errors import ConfigError
    from mega_trainer.doctor.examination import Examination
    from mega_trainer.launch.local_ranks import default_rank_count

    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device must be auto, cpu or cuda, found {device}")
    if fit is not None and fit.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--fit {fit}: the name of a machine file must end in .yaml")
    results, status = list["CheckResult"](), 0
    screen = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="mega-doctor-") as folder, screen.status("examining") as spinner:
        shown = list[str]()

        def show_progress(part: str) -> None:
            spinner.update(f"examining: {part}")
            if not screen.is_terminal and part not in shown[-1:]:
                print(f"examining: {part}", file=screen.file, flush=True)
            shown.append(part)

        examination = Examination(Path(folder), device, nproc or default_rank_count(1, device), minutes, show_progress)
        try:
            for result in examination.run_checks():
                results.append(result)
        except KeyboardInterrupt:
            status = INTERRUPTED_STATUS
    output = Console()
    (output if output.is_terminal else Console(width=PLAIN_WIDTH)).print(build_doctor_table(results))
    _write_json(json_, results, examination.plan.ranks)
    if fit is not None and not status:
        _write_machine(fit, results, device, examination.plan.machine)
    failed = sum(result.verdict == "failed" for result in results)
    print(f"{failed} of {len(results)} checks failed" if failed else f"none of {len(results)} checks failed")
    if status or failed:
        raise typer.Exit(status or 1)


def build_doctor_table(results: Sequence[CheckResult]) -> Table:
    """Return the results of `mega doctor` as a table, in which kernels of one family that agree are one row."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "measured", "expected", "verdict", box=SIMPLE_HEAD, pad_edge=False)
    part = ""
    for row in _merge_families(results):
        if row.part != part:
            part = row.part
            table.add_section()
            table.add_row(Text(part, style="bold"))
        table.add_row(
            Text(f"  {row.name}"), Text(row.measured), Text(row.expected), Text(row.verdict, style=COLORS[row.verdict])
        )
    return table


def _merge_families(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the results with one row for all kernel checks of a family, such as `attention sdpa`, that passed or were
    skipped.
    """
    from dataclasses import replace

    groups: dict[tuple[Any, ...], list[CheckResult]] = {}
    for number, result in enumerate(results):
        merges = result.part == "kernels" and result.verdict in ("ok", "skipped")
        groups.setdefault((result.name.split(",")[0], result.verdict) if merges else (number,), []).append(result)
    rows = []
    for group in groups.values():
        worst = max(group, key=lambda each: each.value or 0.0)
        count = f" ({len(group)} cases)" if len(group) > 1 else ""
        rows.append(replace(worst, name=worst.name.split(",")[0] + count) if count else worst)
    return rows


def _write_json(path: Path | None, results: Sequence[CheckResult], ranks: int) -> None:
    """Write the results as one JSON file: machine, versions, time, number of ranks and checks."""
    import json
    import time

    from mega_common.atomic_files import open_atomic_file
    from mega_trainer.job.environment import describe_environment

    if path is None:
        return
    content: Mapping[str, Any] = {
        "time": time.time(), "ranks": ranks, **describe_environment(), "checks": [result.to_json() for result in results]
    }  # fmt: skip
    with open_atomic_file(path, text=True) as stream:
        json.dump(content, stream, indent=1)


def _write_machine(path: Path, results: Sequence[CheckResult], device: str, machine: str | None) -> None:
    """Write the machine file that the measured speeds fit."""
    import yaml

    from mega_common.atomic_files import open_atomic_file
    from mega_trainer.distributed.device import select_rank_device
    from mega_trainer.doctor.machine_fit import fit_machine_spec

    spec = fit_machine_spec(results, select_rank_device(device, 0), machine)
    with open_atomic_file(path, text=True) as stream:
        yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True), stream, sort_keys=False)
