"""Scaling law of a loss in parameters N and training tokens D: L(N, D) = E + A / N^alpha + B / D^beta.

The fit is approach 3 of Hoffmann et al. 2022 (arXiv:2203.15556): Huber loss between the logarithms of predicted and measured
losses, minimised by L-BFGS from many starts. Training compute is taken as C = 6 N D FLOPs.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from mega_common.errors import ConfigError, DataError
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.pages.run_log import RunLog
from mega_trainer.plan.flops import count_parameters_by_layer

FLOPS_PER_PARAMETER = 6  # of a token in training
HUBER_DELTA = 1e-3  # of the logarithm of the loss, as in the paper
MIN_POINTS, MIN_SIZES = 7, 3  # five parameters of the law need a few more points, of different N and D
STARTS = 8  # minimisations from the best starts of a grid
MAX_EXPONENT = 5.0
COLLINEAR = 0.99  # correlation of log N and log D above which their terms can hardly be separated
Array = NDArray[np.float64]
ParameterCount = Literal["active", "total", "non-embedding"]


@dataclass(frozen=True)
class ScalingLawPoint:
    """One finished training: number of parameters, number of training tokens, and loss."""

    name: str
    parameters: float
    tokens: float
    loss: float

    @property
    def flops(self) -> float:
        """Training compute in FLOPs, 6 N D for N parameters and D tokens."""
        return FLOPS_PER_PARAMETER * self.parameters * self.tokens


@dataclass(frozen=True)
class ScalingLaw:
    """Fitted scaling law of the loss, L(N, D) = E + A / N^alpha + B / D^beta."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def predict_loss(self, parameters: float, tokens: float) -> float:
        """Return the predicted loss of a model with `parameters` parameters after `tokens` training tokens."""
        return float(self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta)

    @property
    def undetermined_exponents(self) -> list[str]:
        """Names of the exponents at a bound of the fit, 0 or `MAX_EXPONENT`, which the points do not determine."""
        return [name for name in ("alpha", "beta") if not 0 < getattr(self, name) < MAX_EXPONENT]

    def find_compute_optimal_size(self, flops: float) -> tuple[float, float]:
        """Return the parameters and tokens of lowest loss with 6 N D = `flops`; infinite or 0 if an exponent is 0."""
        product = flops / FLOPS_PER_PARAMETER
        if min(self.alpha, self.beta, self.A, self.B) <= 0:
            return (math.inf, 0.0) if self.alpha * self.A > 0 else (0.0, math.inf)
        log_ratio = math.log(self.alpha * self.A) - math.log(self.beta * self.B)
        log_n = (log_ratio + self.beta * math.log(product)) / (self.alpha + self.beta)
        return math.exp(log_n), math.exp(math.log(product) - log_n)


def fit_scaling_law(points: Sequence[ScalingLawPoint], start: ScalingLaw | None = None) -> ScalingLaw:
    """Fit a scaling law to finished trainings by L-BFGS, from a grid of starts or from one `start`.

    Raises:
        DataError: for fewer than seven trainings, or fewer than three different N or D.
    """
    check_scaling_points(points)
    sizes, tokens, losses = (np.log([[p.parameters, p.tokens, p.loss] for p in points])).T
    center = np.array([sizes.mean(), tokens.mean()])  # the terms at the center are well conditioned coordinates
    x, y = sizes - center[0], tokens - center[1]
    if start is None:
        starts = _best_starts(x, y, losses)
    else:
        terms = math.log(start.A) - start.alpha * center[0], math.log(start.B) - start.beta * center[1]
        starts = np.array([[math.log(start.E), *terms, start.alpha, start.beta]])
    bounds = [(None, None)] * 3 + [(0.0, MAX_EXPONENT)] * 2
    # The default tolerance is absolute for values below 1, and would stop far from the minimum of a small Huber loss.
    options = {"ftol": 1e-13, "gtol": 1e-7, "maxiter": 2000, "maxfun": 20_000}
    found = [
        minimize(_huber_loss, each, (x, y, losses), method="L-BFGS-B", jac=True, bounds=bounds, options=options)
        for each in starts
    ]
    e, a, b, alpha, beta = min(found, key=lambda result: float(result.fun)).x
    return ScalingLaw(
        math.exp(e), math.exp(a + alpha * center[0]), math.exp(b + beta * center[1]), float(alpha), float(beta)
    )


def check_scaling_points(points: Sequence[ScalingLawPoint]) -> None:
    """Raise `DataError` unless a scaling law can be fitted to the trainings.

    Raises:
        DataError: for too few trainings, too few different N or D, or a number that is not positive.
    """
    wrong = next((p for p in points if not (min(p.parameters, p.tokens, p.loss) > 0 and math.isfinite(p.loss))), None)
    if wrong is not None:
        raise DataError(f"{wrong.name}: parameters, tokens and loss must be positive numbers", hint="leave it out")
    kinds = len({p.parameters for p in points}), len({p.tokens for p in points})
    if len(points) < MIN_POINTS or min(kinds) < MIN_SIZES:
        raise DataError(
            f"a scaling law requires {MIN_POINTS} runs with {MIN_SIZES} different numbers of parameters and of tokens, "
            f"found {len(points)} runs with {kinds[0]} and {kinds[1]}",
            hint="train more sizes and lengths, e.g. with mega sweep",
        )


def _residuals(theta: Array, x: Array, y: Array, losses: Array) -> tuple[Array, Array]:
    """Return log predicted - log measured loss [..., P], and the three terms' shares of the prediction [3, ..., P]."""
    e, a, b, alpha, beta = theta.T[..., None]
    terms = np.stack(np.broadcast_arrays(e, a - alpha * x, b - beta * y))
    highest = terms.max(0)
    scaled = np.exp(terms - highest)
    total = scaled.sum(0)
    return highest + np.log(total) - losses, scaled / total


def _huber_loss(theta: Array, x: Array, y: Array, losses: Array) -> tuple[float, Array]:
    """Return the Huber loss in units of delta^2, and its gradient in theta = (e, a, b, alpha, beta)."""
    r, shares = _residuals(theta, x, y, losses)
    r = r / HUBER_DELTA
    slope = np.clip(r, -1, 1)
    value = np.where(np.abs(r) <= 1, r * r / 2, np.abs(r) - 0.5).sum()
    by_term = shares * slope / HUBER_DELTA
    gradient = [by_term[0], by_term[1], by_term[2], -by_term[1] * x, -by_term[2] * y]
    return float(value), np.array([part.sum() for part in gradient])


def _best_starts(x: Array, y: Array, losses: Array) -> Array:
    """Return the starts of a grid with the lowest loss: [STARTS, 5]."""
    shares = np.log([0.01, 0.05, 0.15, 0.4, 0.8])  # of a term in the mean loss
    exponents = [0.05, 0.2, 0.35, 0.6, 1.0]
    middle = losses.mean()
    grid = np.array(list(itertools.product(shares + middle, shares + middle, shares + middle, exponents, exponents)))
    # Absolute errors in place of the Huber loss: all starts are far away.
    errors = np.concatenate([np.abs(_residuals(part, x, y, losses)[0]).sum(-1) for part in np.array_split(grid, 25)])
    return np.asarray(grid[np.argsort(errors)[:STARTS]])


@dataclass(frozen=True)
class HeldOutPrediction:
    """Prediction of a large training by a law that is fitted to smaller ones."""

    point: ScalingLawPoint
    predicted: float

    @property
    def relative_error(self) -> float:
        """Relative error of the predicted loss: predicted / measured - 1."""
        return self.predicted / self.point.loss - 1


@dataclass(frozen=True)
class ScalingFit:
    """Law fitted to trainings, with its uncertainty.

    Attributes:
        points: trainings, in order of compute.
        samples: laws fitted to bootstrap samples of the trainings.
        held_out: predictions of the largest trainings by a law that is fitted to the others; empty if they are too few.
    """

    points: Sequence[ScalingLawPoint]
    law: ScalingLaw
    samples: Sequence[ScalingLaw]
    held_out: Sequence[HeldOutPrediction]

    @classmethod
    def from_points(
        cls, points: Sequence[ScalingLawPoint], *, bootstrap: int = 200, hold_out: int | None = None, seed: int = 0
    ) -> ScalingFit:
        """Fit the law, bootstrap samples, and a law without the largest trainings (a fifth, or `hold_out`).

        Raises:
            DataError: as `fit_scaling_law`.
        """
        ordered = sorted(points, key=lambda point: point.flops)
        law = fit_scaling_law(ordered)
        rng = np.random.default_rng(seed)
        samples: list[ScalingLaw] = []
        while len(samples) < bootstrap:
            drawn = [ordered[index] for index in rng.integers(0, len(ordered), len(ordered))]
            if min(len({p.parameters for p in drawn}), len({p.tokens for p in drawn})) >= MIN_SIZES:
                samples.append(fit_scaling_law(drawn, law))
        count = max(1, len(ordered) // 5) if hold_out is None else hold_out
        smaller, held_out = ordered[: len(ordered) - count], []
        try:
            partial = fit_scaling_law(smaller)
            held_out = [
                HeldOutPrediction(p, partial.predict_loss(p.parameters, p.tokens)) for p in ordered[len(smaller) :]
            ]
        except DataError:
            if hold_out:
                raise
        return cls(ordered, law, samples, held_out)

    def coefficient_intervals(self) -> dict[str, tuple[float, float]]:
        """Return the 95 % bootstrap interval of each coefficient."""
        columns = zip(*map(astuple, self.samples), strict=True)
        return {name.name: _interval(column) for name, column in zip(fields(ScalingLaw), columns, strict=False)}

    def optimum_intervals(self, flops: float) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the 95 % bootstrap intervals of the optimal parameters and tokens for a compute budget."""
        found = [law.find_compute_optimal_size(flops) for law in self.samples]
        return _interval([n for n, _ in found]), _interval([d for _, d in found])

    @property
    def collinearity(self) -> float:
        """Correlation of log N and log D over the trainings."""
        return float(np.corrcoef(np.log([[p.parameters, p.tokens] for p in self.points]).T)[0, 1])

    def as_json(self, budgets: Sequence[float]) -> dict[str, Any]:
        """Return the fit as JSON fields, with the optimum of each compute budget in FLOPs."""
        optima = [
            (flops, *self.law.find_compute_optimal_size(flops), *self.optimum_intervals(flops)) for flops in budgets
        ]
        return {
            "coefficients": vars(self.law), "intervals": self.coefficient_intervals(), "runs": len(self.points),
            "held_out": [{"name": h.point.name, "loss": h.point.loss, "predicted": h.predicted} for h in self.held_out],
            "optima": [
                {"flops": flops, "parameters": n, "tokens": d, "parameters_interval": n_range, "tokens_interval": d_range,
                 "loss": self.law.predict_loss(n, d)}
                for flops, n, d, n_range, d_range in optima
            ],
        }  # fmt: skip


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 2.5 and 97.5 percentiles; NaN without a value."""
    low, high = np.percentile(values, [2.5, 97.5]) if len(values) else (math.nan, math.nan)
    return float(low), float(high)


def read_scaling_points_csv(path: Path) -> list[ScalingLawPoint]:
    """Read trainings from a CSV file with the columns parameters, tokens, loss and optionally name.

    Raises:
        DataError: for a missing column or a value that is not a number.
    """
    with open(path, newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        if missing := {"parameters", "tokens", "loss"} - set(reader.fieldnames or ()):
            raise DataError(
                f"{path} has no column {', '.join(sorted(missing))}; its columns are {', '.join(reader.fieldnames or ['none'])}",
                hint="the columns parameters, tokens and loss are required, and name is optional",
            )
        rows = list(reader)
    points = []
    for number, row in enumerate(rows, 2):
        try:
            values = (float(row[key]) for key in ("parameters", "tokens", "loss"))
            points.append(ScalingLawPoint(row.get("name") or f"{path.name}:{number}", *values))
        except (TypeError, ValueError):
            raise DataError(f"{path}:{number}: parameters, tokens and loss must be numbers") from None
    return points


def read_scaling_point_of_run(log: RunLog, metric: str, count: ParameterCount) -> ScalingLawPoint:
    """Return a run as a point for a scaling-law fit: parameters, trained tokens, and the metric over the last steps.

    Raises:
        ConfigError: if its settings are missing, or the metric is not logged.
    """
    if not log.settings:
        raise ConfigError(f"{log.folder} has no run.yaml", hint="give the run as a line of a CSV file")
    config = RunConfig.parse(resolve_run_config(log.settings), source=str(log.folder / "run.yaml"))
    loss = log.mean_of_last_steps(metric)
    if loss is None:
        keys = ", ".join(sorted(log.columns)[:12])
        why = "; only runs with validation (train.eval_every) log valid_loss" if metric == "valid_loss" else ""
        raise ConfigError(f"{log.folder} has not logged {metric}{why}", hint=f"choose --metric of {keys}, ...")
    counts = count_parameters_by_layer(config.model)
    parameters = {
        "active": counts.active_parameters, "total": counts.total,
        "non-embedding": counts.active_parameters - counts.embedding - counts.head,
    }  # fmt: skip
    tokens = sum(value for _, value in log.metric_points("tokens"))
    return ScalingLawPoint(log.run_name, parameters[count], tokens, loss)
