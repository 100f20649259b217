"""HTML page of a scaling law: fit and measurements, held-out predictions, and the optimal size of a compute budget."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mega_trainer.experiments.scaling_law import FLOPS_PER_PARAMETER, ScalingFit, ScalingLawPoint
from mega_trainer.pages.axis_scale import format_compact, format_percent
from mega_trainer.pages.page_elements import PageSection, ScatterPoint, draw_scatter_figure, render_page, render_table

LOG_RATIO = 20  # of the largest to the smallest x with a logarithmic axis
CURVE_POINTS, CURVE_SPAN = 80, 30  # of a curve of constant compute, from optimum / span to optimum x span


def render_scaling_page(fit: ScalingFit, budgets: Sequence[float]) -> str:
    """Return the HTML page of a fit, with the optimum of each compute budget in FLOPs."""
    law, held_out = fit.law, [abs(each.relative_error) for each in fit.held_out]
    tiles = [("runs", str(len(fit.points))), ("irreducible loss E", f"{law.E:.4f}")]
    tiles += [("exponent of parameters, alpha", f"{law.alpha:.3f}"), ("exponent of tokens, beta", f"{law.beta:.3f}")]
    tiles += [("largest held-out error", format_percent(max(held_out)))] if held_out else []
    formula = "L(N, D) = E + A / N^alpha + B / D^beta, N parameters, D tokens, compute 6 N D"
    figures = [_draw_fit(fit), _draw_sizes(fit)]
    sections = [
        PageSection("Fit", [*figures, render_table(*_coefficient_rows(fit))]),
        PageSection("Optimal size", [*(_draw_budget(fit, flops) for flops in budgets), render_table(*_optimum_rows(fit, budgets))]),
        PageSection("Held-out runs", [render_table(*_held_out_rows(fit))], "Predicted by a law fitted to the smaller runs."),
        PageSection("Runs", [render_table(*_run_rows(fit))]),
    ]  # fmt: skip
    return render_page("Scaling law", formula, tiles, sections)


def format_large_number(value: float) -> str:
    """Return a large number with three digits as text: 1.23e+21, or 4.5M below a trillion."""
    return f"{value:.3g}" if not 1 <= value < 1e12 else format_compact(float(f"{value:.3g}"))


def _draw_fit(fit: ScalingFit) -> str:
    """Draw measured and predicted losses against compute."""
    points = []
    for point in fit.points:
        predicted = fit.law.predict_loss(point.parameters, point.tokens)
        what = f"{point.name}: N {format_large_number(point.parameters)}, D {format_large_number(point.tokens)}, loss {point.loss:.4f}"
        points.append(ScatterPoint(point.flops, point.loss, "measured", what))
        points.append(ScatterPoint(point.flops, predicted, "law", f"{what}, law {predicted:.4f}"))
    return draw_scatter_figure(
        "Loss against training compute", points, x_name="FLOPs", y_name="", write_x=_format_power, log_from=LOG_RATIO
    )


def _draw_sizes(fit: ScalingFit) -> str:
    """Draw the relative error of the law against the number of parameters."""
    points = [
        ScatterPoint(p.parameters, 100 * (fit.law.predict_loss(p.parameters, p.tokens) / p.loss - 1), "", p.name)
        for p in fit.points
    ]
    title = "Law / measured - 1, percent"
    return draw_scatter_figure(title, points, x_name="parameters", y_name="", log_from=LOG_RATIO)


def _draw_budget(fit: ScalingFit, flops: float) -> str:
    """Draw the predicted loss of models of different sizes that are trained with the same compute."""
    best, _ = fit.law.find_compute_optimal_size(flops)
    if not 0 < best < math.inf:
        return ""
    points = []
    for size in [*np.geomspace(best / CURVE_SPAN, best * CURVE_SPAN, CURVE_POINTS), best]:
        tokens = flops / FLOPS_PER_PARAMETER / size
        loss = fit.law.predict_loss(size, tokens)
        what = f"N {format_large_number(size)}, D {format_large_number(tokens)}, loss {loss:.4f}"
        points.append(ScatterPoint(size, loss, "optimum" if size == best else "law", what, size == best))
    title = f"Loss of {format_large_number(flops)} FLOPs against parameters"
    return draw_scatter_figure(title, points, x_name="parameters", y_name="", log_from=LOG_RATIO)


def _format_power(value: float) -> str:
    return f"{value:.0e}".replace("e+", "e") if value >= 1e12 else format_compact(value)


TableRows = tuple[Sequence[str], Sequence[Sequence[str]], Sequence[int]]


def _coefficient_rows(fit: ScalingFit) -> TableRows:
    intervals = fit.coefficient_intervals()
    rows = [
        (name, f"{value:.4g}", f"{intervals[name][0]:.4g} to {intervals[name][1]:.4g}")
        for name, value in vars(fit.law).items()
    ]
    return ("coefficient", "value", "95 % bootstrap interval"), rows, (1,)


def format_compute_optimum_rows(fit: ScalingFit, budgets: Sequence[float]) -> Sequence[Sequence[str]]:
    """Return (FLOPs, parameters, interval, tokens, interval, loss) of the optimum of each budget, as text."""
    rows = []
    for flops in budgets:
        n, d = fit.law.find_compute_optimal_size(flops)
        ranges = [" to ".join(map(format_large_number, each)) for each in fit.optimum_intervals(flops)]
        loss = fit.law.predict_loss(n, d) if 0 < n < math.inf else math.nan
        rows.append(
            (f"{flops:.3g}", format_large_number(n), ranges[0], format_large_number(d), ranges[1], f"{loss:.4f}")
        )
    return rows


def _optimum_rows(fit: ScalingFit, budgets: Sequence[float]) -> TableRows:
    head = ("FLOPs", "parameters", "95 % interval", "tokens", "95 % interval", "loss")
    return head, format_compute_optimum_rows(fit, budgets), (0, 1, 3, 5)


def _held_out_rows(fit: ScalingFit) -> TableRows:
    rows = [
        (h.point.name, f"{h.point.loss:.4f}", f"{h.predicted:.4f}", f"{100 * h.relative_error:+.2f} %")
        for h in fit.held_out
    ]
    return ("run", "loss", "predicted", "error"), rows, (1, 2, 3)


def _run_rows(fit: ScalingFit) -> TableRows:
    def make_row(p: ScalingLawPoint) -> tuple[str, ...]:
        numbers = (format_large_number(p.parameters), format_large_number(p.tokens), f"{p.flops:.3g}", f"{p.loss:.4f}")
        return p.name, *numbers, f"{fit.law.predict_loss(p.parameters, p.tokens):.4f}"

    head = ("run", "parameters", "tokens", "FLOPs", "loss", "law")
    return head, [make_row(point) for point in fit.points], (1, 2, 3, 4, 5)
