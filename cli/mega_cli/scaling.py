"""`mega scaling`: a scaling law fitted to finished runs."""

from __future__ import annotations

import glob
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega_common.errors import ConfigError, MissingPackageError
from mega_common.progress_logging import format_columns

if TYPE_CHECKING:
    from mega_trainer.experiments.scaling_law import ParameterCount, ScalingFit, ScalingLawPoint

EXAMPLES = """Examples:

  mega scaling sweeps/sizes/run-???

  mega scaling points.csv --budget 1e21 --budget 1e22 --out law.html

  mega scaling runs/* --metric loss --count non-embedding --hold-out 3 --json -
"""
MAX_HELD_OUT_ERROR = 0.05  # above it, a warning
COUNTS = ("active", "total", "non-embedding")


def scaling_command(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|CSV...",
            help="Folders of finished runs, or CSV files with the columns parameters, tokens, loss and optionally name.",
        ),
    ],
    budget: Annotated[
        list[float] | None,
        typer.Option(min=1.0, help="Compute in FLOPs to find the best size for, e.g. 1e21. Repeatable.",
                     show_default="10 and 100 times the largest run"),
    ] = None,
    metric: Annotated[str, typer.Option(help="Key of metrics.jsonl, e.g. loss.")] = "valid_loss",
    count: Annotated[
        str, typer.Option(help="Parameters of a run that count: active (for one token), total or non-embedding.")
    ] = "active",
    hold_out: Annotated[
        int | None, typer.Option(min=0, help="Number of the largest runs to predict from the others.", show_default="a fifth")
    ] = None,
    bootstrap: Annotated[int, typer.Option(min=0, max=100_000, help="Samples for the intervals, e.g. 1000.")] = 200,
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("scaling.html"),
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="JSON file for the law; - for standard output.")
    ] = None,
) -> None:  # fmt: skip
    """Fit L(N, D) = E + A / N^alpha + B / D^beta to runs of several sizes and lengths (arXiv:2203.15556).

    It prints the coefficients with 95 % bootstrap intervals, the error of predicting the largest runs from the smaller ones,
    and the optimal numbers of parameters N and tokens D for a compute budget of 6 N D FLOPs; and writes an HTML page.

    Each run is one point, by its last loss: use runs whose learning rate has decayed.
    """
    from mega_common.atomic_files import write_json_atomically

    if count not in COUNTS:
        raise ConfigError(f"--count must be {', '.join(COUNTS)}, found {count!r}", hint="--count active")
    try:
        from mega_trainer.experiments.scaling_law import COLLINEAR, ScalingFit
        from mega_trainer.experiments.scaling_page import render_scaling_page
    except ModuleNotFoundError as error:
        if error.name != "scipy":
            raise
        raise MissingPackageError(
            "mega scaling requires scipy, which is not installed", hint="pip install scipy"
        ) from None
    from mega_common.progress_logging import logger
    from mega_trainer.pages.page_elements import write_html_page

    points = [point for source in sources for point in _read_source(source, metric, count)]  # type: ignore[arg-type]
    fit = ScalingFit.from_points(points, bootstrap=bootstrap, hold_out=hold_out)
    if abs(fit.collinearity) > COLLINEAR:
        logger.warning(
            "log N and log D have the correlation %.3f, so their terms cannot be separated; add runs of one size with "
            "different lengths", fit.collinearity,
        )  # fmt: skip
    if names := fit.law.undetermined_exponents:
        logger.warning(
            "the runs do not determine %s, which is at a bound of the fit; do not use its optimum", " and ".join(names)
        )
    worst = max((abs(each.relative_error) for each in fit.held_out), default=0.0)
    if worst > MAX_HELD_OUT_ERROR:
        logger.warning("the law predicts the largest runs with an error of %.0f %%; do not extrapolate it", 100 * worst)
    budgets = budget or [factor * fit.points[-1].flops for factor in (10, 100)]
    write_html_page(out, render_scaling_page(fit, budgets), "--out")
    content = fit.as_json(budgets)
    if json_file == Path("-"):
        print(json.dumps(content, indent=1))
        return
    if json_file is not None:
        write_json_atomically(json_file, content)
    print(_format_fit(fit, budgets))
    print(out)


def _read_source(source: str, metric: str, count: ParameterCount) -> list[ScalingLawPoint]:
    """Return the points of a CSV file, or of the runs that a folder or pattern names."""
    from mega_trainer.experiments.scaling_law import read_scaling_point_of_run, read_scaling_points_csv
    from mega_trainer.pages.run_log import RunLog

    if source.endswith(".csv"):
        if not Path(source).is_file():
            raise ConfigError(f"{source} does not exist", hint="give a CSV file or folders of runs")
        return read_scaling_points_csv(Path(source))
    folders = [Path(path) for path in sorted(glob.glob(source))] or [Path(source)]
    return [read_scaling_point_of_run(RunLog.read_folder(folder), metric, count) for folder in folders]


def _format_fit(fit: ScalingFit, budgets: list[float]) -> str:
    """Return the law, its held-out error and the optima as text."""
    from mega_trainer.experiments.scaling_page import format_compute_optimum_rows

    intervals = fit.coefficient_intervals()
    rows = [("coefficient", "value", "95 % interval")]
    rows += [
        (name, f"{value:.4g}", f"{intervals[name][0]:.4g} to {intervals[name][1]:.4g}")
        for name, value in vars(fit.law).items()
    ]
    lines = [f"{len(fit.points)} runs", format_columns(rows)]
    if fit.held_out:
        errors = ", ".join(f"{100 * each.relative_error:+.2f} %" for each in fit.held_out)
        lines += [f"held out: error of the {len(fit.held_out)} largest runs, predicted from the others: {errors}"]
    head = ("FLOPs", "parameters", "95 % interval", "tokens", "95 % interval", "loss")
    return "\n".join([*lines, format_columns([head, *format_compute_optimum_rows(fit, budgets)])])
