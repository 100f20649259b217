"""`mega compare`: a paired comparison of two models on the same samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega_common.errors import DataError, MissingPackageError

if TYPE_CHECKING:
    from mega_eval.paired_comparison import PairedComparison

EXAMPLES = """Examples:

    mega compare before.json after.json

    mega compare before.json after.json --per-sample differing.jsonl --json -
"""


def compare_command(
    first: Annotated[
        Path,
        typer.Argument(
            help="Results file of one model: `mega eval MODEL --tasks ... --log-samples --output before.json`."
        ),
    ],
    second: Annotated[Path, typer.Argument(help="Results file of another model on the same tasks.")],
    per_sample: Annotated[
        Path | None, typer.Option(help="JSON lines file for the samples whose scores differ, e.g. differing.jsonl.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="JSON file for the comparison; - for standard output.")
    ] = None,
) -> None:
    """Test if two models differ significantly on tasks, sample by sample.

    p is the probability of a difference at least this large between equal models: McNemar's exact test for scores of 0
    or 1, else Student's paired t-test. With many tasks some p are small by chance: at 0.05, one in twenty.
    """
    from mega_common.atomic_files import open_atomic_file, write_json_atomically

    try:
        from mega_eval.paired_comparison import compare_task_results
    except ModuleNotFoundError as error:
        if error.name != "scipy":
            raise
        raise MissingPackageError(
            "mega compare requires scipy, which is not installed", hint="pip install scipy"
        ) from None
    for file in (first, second):
        _check_results_file(file)
    found = compare_task_results(first, second)
    if per_sample is not None:
        with open_atomic_file(per_sample, text=True) as stream:
            for comparison in found:
                for number, (a, b) in comparison.scores.items():
                    if a != b:
                        line = {
                            "task": comparison.task,
                            "metric": comparison.metric,
                            "filter": comparison.filter,
                            "sample": number,
                        }
                        stream.write(json.dumps({**line, "first": a, "second": b}) + "\n")
    lines = [comparison.as_json() for comparison in found]
    if json_file == Path("-"):
        print(json.dumps(lines, indent=1))
        return
    if json_file is not None:
        write_json_atomically(json_file, lines)
    print(_table(found))


def _check_results_file(file: Path) -> None:
    """Raise a DataError if a folder, such as a model, is given instead of a results file."""
    if file.is_dir():
        raise DataError(
            f"{file}: mega compare requires results files of mega eval, found a folder",
            hint=f"first: mega eval {file} --tasks NAME,... --log-samples --output {file.name}.json",
        )


def _table(found: list[PairedComparison]) -> str:
    rows = [("task", "metric", "samples", "first", "second", "difference", "lower", "higher", "p", "test")]
    for comparison in found:
        (a, b), (lower, higher) = comparison.mean_scores, comparison.differing_counts
        metric = comparison.metric if comparison.filter == "none" else f"{comparison.metric},{comparison.filter}"
        numbers = (f"{a:.4f}", f"{b:.4f}", f"{b - a:+.4f}", str(lower), str(higher), f"{comparison.p:.3g}")
        rows.append((comparison.task, metric, str(len(comparison.scores)), *numbers, comparison.test))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
