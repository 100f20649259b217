"""`mega compare`: two models on the same samples, or two variants of a training over several seeds."""

from __future__ import annotations

import glob
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega_common.errors import ConfigError, DataError, MissingPackageError
from mega_common.progress_logging import format_columns

if TYPE_CHECKING:
    from mega_eval.paired_comparison import PairedComparison
    from mega_trainer.experiments.seed_comparison import SeedComparison

EXAMPLES = """Examples:

    mega compare before.json after.json

    mega compare before.json after.json --per-sample differing.jsonl --json -

    mega compare 'runs/base-*' 'runs/muon-*' --metric valid_loss

    mega compare sweeps/lr/run-000,sweeps/lr/run-001 sweeps/lr/run-002,sweeps/lr/run-003
"""


def compare_command(
    first: Annotated[
        str,
        typer.Argument(
            help="Results file of one model (mega eval MODEL --tasks ... --log-samples --output before.json), or folders of "
            "the runs of one variant, as a pattern in quotes or with commas between."
        ),
    ],
    second: Annotated[str, typer.Argument(help="Results file of another model, or runs of another variant.")],
    per_sample: Annotated[
        Path | None, typer.Option(help="JSON lines file for the samples whose scores differ, e.g. differing.jsonl.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="JSON file for the comparison; - for standard output.")
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="With runs: key of metrics.jsonl; the mean over the last tenth of the steps counts.",
            show_default="valid_loss if it is logged, else loss",
        ),
    ] = None,
) -> None:
    """Test if two models differ significantly on tasks, sample by sample; or two variants of a training over seeds.

    p is the probability of a difference at least this large between equal models: McNemar's exact test for scores of 0
    or 1, else Student's paired t-test. With many tasks some p are small by chance: at 0.05, one in twenty.
    """
    from mega_common.atomic_files import open_atomic_file

    try:
        if _names_runs(first):
            found_runs = _compare_runs(first, second, metric)
            _print_result(found_runs.as_json(), _seed_table(found_runs), json_file)
            return
        from mega_eval.paired_comparison import compare_task_results
    except ModuleNotFoundError as error:
        if error.name != "scipy":
            raise
        raise MissingPackageError(
            "mega compare requires scipy, which is not installed", hint="pip install scipy"
        ) from None
    if metric is not None:
        raise ConfigError("--metric requires folders of runs", hint="mega compare 'runs/base-*' 'runs/muon-*'")
    for file in (first, second):
        if _names_runs(file):
            raise ConfigError(f"{first}: no such run, but {second} is one", hint="give two runs, or two results files")
        _check_results_file(Path(file))
    found = compare_task_results(Path(first), Path(second))
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
    _print_result([comparison.as_json() for comparison in found], _table(found), json_file)


def _names_runs(pattern: str) -> bool:
    """Return whether folders of runs are given in place of a results file."""
    return any(glob.glob(f"{part}/metrics.jsonl") for part in pattern.split(","))


def _compare_runs(first: str, second: str, metric: str | None) -> SeedComparison:
    from mega_trainer.experiments.seed_comparison import VariantRuns, compare_variants_over_seeds

    metric = metric or ("valid_loss" if VariantRuns.read_run_logs(first)[0].metric_points("valid_loss") else "loss")
    variants = [VariantRuns.read_runs(pattern, metric) for pattern in (first, second)]
    return compare_variants_over_seeds(variants[0], variants[1], metric)


def _seed_table(found: SeedComparison) -> str:
    """Return the variants as a table, and the conclusion."""
    from mega_trainer.experiments.sweep_study import standard_error

    rows: list[Sequence[str]] = [("variant", "runs", found.metric, "standard error", "lowest", "highest")]
    for variant in (found.first, found.second):
        error = standard_error(variant.values)
        numbers = (variant.mean, error, min(variant.values), max(variant.values))
        rows.append((variant.name, str(len(variant.values)), *(f"{number:.4f}" for number in numbers)))
    differing = f"settings that differ: {', '.join(found.differing_settings) or 'none'}"
    return "\n".join([format_columns(rows), differing, found.conclusion()])


def _print_result(content: object, text: str, json_file: Path | None) -> None:
    """Print a comparison as text, or as JSON for --json -; with another --json, also write the file."""
    from mega_common.atomic_files import write_json_atomically

    if json_file == Path("-"):
        print(json.dumps(content, indent=1))
        return
    if json_file is not None:
        write_json_atomically(json_file, content)
    print(text)


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
    return format_columns(rows)
