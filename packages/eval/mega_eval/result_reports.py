"""Results of tasks and judges as CSV, and as a picture of a table with bars."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mega_common.atomic_files import open_atomic_file
from mega_common.errors import ConfigError, MissingPackageError

PICTURE_FORMATS = (".png", ".svg", ".pdf")
ROW_INCHES, WIDTH_INCHES = 0.32, 9.0
BAR, LIGHT, INK = "#4477aa", "#e8edf3", "#222222"


class MetricRow(NamedTuple):
    """One metric of a task or group; `stderr` is its standard error, or an empty text."""

    task: str
    filter: str
    metric: str
    value: Any
    stderr: Any


def list_metric_rows(results: Mapping[str, Any]) -> list[MetricRow]:
    """Return the metrics of the tasks and groups in results of lm-evaluation-harness."""
    rows = []
    for task, values in {**results["results"], **(results.get("groups") or {})}.items():
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if kind and not metric.endswith("_stderr"):
                rows.append(MetricRow(task, kind, metric, value, values.get(f"{metric}_stderr,{kind}", "")))
    return rows


def format_metric_table(results: Mapping[str, Any]) -> str:
    """Return the metrics of results as aligned lines of text."""
    rows = [(row.task, row.metric, _format_value(row)) for row in list_metric_rows(results)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(f"{task:<{widths[0]}}  {metric:<{widths[1]}}  {value}" for task, metric, value in rows)


def write_results_csv(path: Path, results: Mapping[str, Any]) -> None:
    """Write the metrics of tasks and groups as a CSV file with the columns task, filter, metric, value and stderr."""
    with open_atomic_file(path, text=True) as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(MetricRow._fields)
        writer.writerows(list_metric_rows(results))


def check_picture_file(path: Path) -> None:
    """Raise an error if a picture's file name has no known suffix, or matplotlib, which draws it, is not installed.

    Raises:
        ConfigError: when the name of the file does not end with a known format.
        MissingPackageError: when matplotlib is not installed.
    """
    if path.suffix.lower() not in PICTURE_FORMATS:
        raise ConfigError(
            f"--picture {path}: the name must end with {', '.join(PICTURE_FORMATS)}", hint=f"--picture {path.stem}.png"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "--picture requires matplotlib, which is not installed",
            hint="in the root of the repository: pip install 'packages/eval[pictures]'",
        ) from None


def plot_task_results(path: Path, results: Mapping[str, Any], title: str) -> None:
    """Draw the metrics of results to the picture file `path`: a table, with bars and lines for their standard errors.
    Values between 0 and 1 have a bar, unless lower is better.
    """
    from matplotlib.figure import Figure

    rows = list_metric_rows(results)
    names = [
        row.task if before is None or row.task != before.task else ""
        for before, row in zip([None, *rows], rows, strict=False)
    ]
    figure = Figure(figsize=(WIDTH_INCHES, ROW_INCHES * (len(rows) + 2)), layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(-1.75, 1)
    axes.set_ylim(len(rows) - 0.4, -1.2)
    axes.axis("off")
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    for at, text in ((-1.75, "task"), (-1.0, "metric"), (-0.06, "value")):
        axes.text(at, -0.8, text, fontsize=8, color="#666666", ha="right" if text == "value" else "left")
    axes.text(0, -0.8, "0", fontsize=7, color="#666666")
    axes.text(1, -0.8, "1", fontsize=7, color="#666666", ha="right")
    for at, (name, row) in enumerate(zip(names, rows, strict=True)):
        metric = row.metric if row.filter == "none" else f"{row.metric} ({row.filter})"
        for x, text in ((-1.75, name), (-1.0, metric), (-0.06, _format_value(row))):
            axes.text(
                x, at, text, fontsize=8, color=INK, va="center", ha="right" if x == -0.06 else "left", clip_on=True
            )
        higher = (results.get("higher_is_better") or {}).get(row.task, {}).get(row.metric, True)
        if higher is not False and isinstance(row.value, int | float) and 0 <= row.value <= 1:
            axes.barh(at, 1, 0.5, color=LIGHT)
            error = row.stderr if isinstance(row.stderr, int | float) else None
            axes.barh(
                at, row.value, 0.5, xerr=error, color=BAR, error_kw={"ecolor": INK, "elinewidth": 0.8, "capsize": 2}
            )
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lower()[1:], dpi=160)
    with open_atomic_file(path) as stream:
        stream.write(buffer.getvalue())


def _format_value(row: MetricRow) -> str:
    """Return a value and its standard error as text."""
    value = f"{row.value:.4g}" if isinstance(row.value, int | float) else str(row.value)
    return f"{value} ± {row.stderr:.2g}" if isinstance(row.stderr, int | float) else value
