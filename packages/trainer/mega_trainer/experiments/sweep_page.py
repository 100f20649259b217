"""HTML page of a sweep: ranking of the trials, loss curves, and the metric against each setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mega_trainer.experiments.sweep_config import NumberRange, SweepConfig, parse_swept_values
from mega_trainer.experiments.sweep_study import TrialResult
from mega_trainer.pages.axis_scale import format_compact
from mega_trainer.pages.page_elements import (
    LineSeries,
    PageSection,
    ScatterPoint,
    draw_line_figure,
    draw_scatter_figure,
    render_page,
    render_table,
)
from mega_trainer.pages.parallel_coordinates import CoordinateAxis, draw_parallel_coordinates

MAX_CURVES = 10  # as many as there are colours
LOG_RATIO = 20  # of the largest to the smallest value of a setting with listed values and a logarithmic axis


def render_sweep_page(title: str, config: SweepConfig, results: Sequence[TrialResult]) -> str:
    """Return the HTML page of a sweep, given its trial results sorted best first."""
    sections = [
        _ranking_section(config, results), _coordinates_section(config, results), _curves_section(config, results),
        _settings_section(config, results),
    ]  # fmt: skip
    states = [result.state for result in results]
    tiles = [(f"of {config.num_trials:,} trials done", f"{states.count('done'):,}")]
    tiles += [("failed", str(states.count("failed")))] if "failed" in states else []
    best = next((result for result in results if math.isfinite(result.mean) and result.state == "done"), None)
    if best is not None:
        goal = "lowest" if config.goal == "min" else "highest"
        tiles += [(f"{goal} {config.metric}, trial {best.number}", format_metric_with_stderr(best))]
        tiles += [(key, format_setting(best.settings[key])) for key in config.settings]
    seeds = "1 seed" if config.seeds == 1 else f"{config.seeds} seeds"
    text = f"sampler {config.sampler}, {seeds} per trial, metric {config.metric} (mean of the last tenth of the steps)"
    return render_page(title, text, tiles, sections)


def format_setting(value: Any) -> str:
    """Return the value of a setting as short text."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def format_settings(settings: Mapping[str, Any]) -> str:
    """Return settings as text KEY=VALUE."""
    return " ".join(f"{key}={format_setting(value)}" for key, value in settings.items())


def format_metric_with_stderr(result: TrialResult) -> str:
    """Return the mean of the metric with its standard error, if it has several values; "" without a value."""
    if not result.values:
        return ""
    if not math.isfinite(result.mean):
        return "not finite"
    error = result.standard_error
    return f"{result.mean:.4f}" + (f" ± {error:.4f}" if math.isfinite(error) else "")


def format_trial_ranking_rows(config: SweepConfig, results: Sequence[TrialResult]) -> list[tuple[str, ...]]:
    """Return the ranking as rows of text: head first, then one row for each trial in the order of `results`."""
    rows: list[tuple[str, ...]] = [("rank", "trial", config.metric, *config.settings, "step", "state")]
    for rank, result in enumerate(results, 1):
        settings = (format_setting(result.settings[key]) for key in config.settings)
        steps = ", ".join(f"{log.last['step']:,}" for log in result.logs) or "0"
        place = str(rank) if result.state == "done" else ""
        rows.append((place, str(result.number), format_metric_with_stderr(result), *settings, steps, result.state))
    return rows


def _ranking_section(config: SweepConfig, results: Sequence[TrialResult]) -> PageSection:
    head, *rows = format_trial_ranking_rows(config, results)
    table = render_table(head, rows, numbers=(0, 1, 2))
    notes = [(str(result.number), result.note) for result in results if result.note]
    return PageSection("Ranking", [table, render_table(("failed trial", "message"), notes, numbers=(0,))])


def _curves_section(config: SweepConfig, results: Sequence[TrialResult]) -> PageSection:
    """Return the section with the curves of the best trials; the runs of a trial have one colour."""
    shown = [result for result in results if result.logs][:MAX_CURVES]

    def draw_curves(title: str, key: str) -> str:
        lines = [
            LineSeries(f"trial {result.number}" + (f", run {index}" if index else ""), log.metric_points(key), colour,
                       marks=key == "valid_loss", dashed=index > 0)
            for colour, result in enumerate(shown) for index, log in enumerate(result.logs)
        ]  # fmt: skip
        return draw_line_figure(title, lines, log_from=3)

    keys = {"loss": "Training loss", "valid_loss": "Validation loss", "lr": "Learning rate"}
    keys |= {} if config.metric in keys else {config.metric: config.metric}
    text = f"The best {MAX_CURVES} of {len(results)} trials." if len(results) > MAX_CURVES else ""
    return PageSection("Curves", [draw_curves(title, key) for key, title in keys.items()], text)


def _coordinates_section(config: SweepConfig, results: Sequence[TrialResult]) -> PageSection:
    """Return the section with one line for each trial through its settings and its metric."""
    finite = [result for result in results if math.isfinite(result.mean)]
    axes = [
        CoordinateAxis(key, [_axis_value(result.settings[key]) for result in finite], _find_log_ratio(config, key))
        for key in config.settings
    ]
    axes.append(CoordinateAxis(config.metric, [result.mean for result in finite]))
    items = [_describe_trial(config, result) for result in finite]
    figure = draw_parallel_coordinates(f"Settings and {config.metric}", axes, items)
    text = "One line for each trial; the best has another colour, and worse ones are fainter."
    return PageSection("Parallel coordinates", [figure], text, wide=True)


def _find_log_ratio(config: SweepConfig, key: str) -> float:
    """Return the ratio of values from which the axis of a setting is logarithmic: that of a range is as it was drawn."""
    values = parse_swept_values(config.settings[key])
    if isinstance(values, NumberRange):
        return 1.0 if values.log else math.inf
    return LOG_RATIO


def _axis_value(value: Any) -> float | str:
    """Return a setting as a number, or as text if it is none."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else format_setting(value)


def _describe_trial(config: SweepConfig, result: TrialResult) -> str:
    """Return a trial, its metric and its settings as the text of a tooltip."""
    return f"trial {result.number}: {config.metric} {format_metric_with_stderr(result)}, {format_settings(result.settings)}"


def _settings_section(config: SweepConfig, results: Sequence[TrialResult]) -> PageSection:
    finite = [result for result in results if math.isfinite(result.mean)]
    if not finite:
        return PageSection("Metric against each setting", [])
    figures = [_draw_setting(config, key, finite) for key in config.settings]
    return PageSection("Metric against each setting", figures, "One point for each trial; the best is large.")


def _draw_setting(config: SweepConfig, key: str, results: Sequence[TrialResult]) -> str:
    """Draw the metric against one setting; values that are not numbers are numbered in the order of their first use."""
    values = [result.settings[key] for result in results]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    names = list(dict.fromkeys(map(format_setting, values)))
    points = [
        ScatterPoint(
            float(value) if numeric else float(names.index(format_setting(value))), result.mean, "",
            _describe_trial(config, result), result is results[0],
        )
        for value, result in zip(values, results, strict=True)
    ]  # fmt: skip

    def write_name(position: float) -> str:
        index = round(position)
        return names[index] if abs(position - index) < 1e-6 and 0 <= index < len(names) else ""

    return draw_scatter_figure(
        f"{config.metric} against {key}", points, x_name=key, y_name="",
        write_x=format_compact if numeric else write_name, log_from=_find_log_ratio(config, key),
    )  # fmt: skip
