"""Scaling laws: known coefficients are found again, their errors are estimated, and the optimum is that of the law."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import yaml
from commands import typed

from mega_cli.main import build_typer_app
from mega_common.errors import ConfigError, DataError
from mega_trainer.experiments.scaling_law import (
    ScalingFit,
    ScalingLaw,
    ScalingLawPoint,
    fit_scaling_law,
    read_scaling_point_of_run,
    read_scaling_points_csv,
)
from mega_trainer.pages.run_log import RunLog

HOFFMANN = ScalingLaw(1.69, 406.4, 410.7, 0.34, 0.28)  # arXiv:2203.15556, appendix D.3
EPOCH = ScalingLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658)  # Besiroglu et al., arXiv:2404.10102


def trained(law: ScalingLaw, noise: float, sizes: int = 6, lengths: int = 5, seed: int = 0) -> list[ScalingLawPoint]:
    rng = np.random.default_rng(seed)
    return [
        ScalingLawPoint(f"{n:.0e} {d:.0e}", float(n), float(d), law.predict_loss(n, d) * math.exp(rng.normal(0, noise)))
        for n in np.geomspace(5e7, 1e10, sizes)
        for d in np.geomspace(1e9, 2e11, lengths)
    ]


@pytest.mark.parametrize("law", [HOFFMANN, EPOCH, ScalingLaw(0.5, 20.0, 3000.0, 0.15, 0.45)])
def test_known_coefficients_are_found_exactly(law: ScalingLaw) -> None:
    found = fit_scaling_law(trained(law, 0.0))
    assert vars(found) == pytest.approx(vars(law), rel=1e-6)


def test_an_outlier_changes_little() -> None:
    points = trained(HOFFMANN, 0.0)
    points[7] = ScalingLawPoint("diverged", points[7].parameters, points[7].tokens, points[7].loss * 1.5)
    assert vars(fit_scaling_law(points)) == pytest.approx(vars(HOFFMANN), rel=0.01)


def test_intervals_and_held_out_errors_are_of_the_size_of_the_noise() -> None:
    """Over several draws of the noise, most 95 % intervals contain the coefficient."""
    inside = 0
    for seed in range(3):
        fit = ScalingFit.from_points(trained(HOFFMANN, 0.002, seed=seed), bootstrap=20, seed=seed)
        intervals = fit.coefficient_intervals()
        inside += sum(low <= getattr(HOFFMANN, name) <= high for name, (low, high) in intervals.items())
        assert len(fit.held_out) == 6
        assert max(abs(each.relative_error) for each in fit.held_out) < 0.01
        assert intervals["alpha"][1] - intervals["alpha"][0] < 0.05
    assert inside >= 0.7 * 15


@pytest.mark.parametrize("flops", [1e21, 5.76e23])
def test_no_other_size_of_the_budget_has_a_lower_loss(flops: float) -> None:
    best, tokens = EPOCH.find_compute_optimal_size(flops)
    assert 6 * best * tokens == pytest.approx(flops)
    others = [EPOCH.predict_loss(best * factor, tokens / factor) for factor in np.geomspace(0.2, 5, 101)]
    assert min(others) == pytest.approx(EPOCH.predict_loss(best, tokens), abs=1e-9)


def test_the_optimum_of_published_coefficients() -> None:
    """Chinchilla's budget: about 32B parameters by the coefficients of the paper, 70B by those that were corrected."""
    assert HOFFMANN.find_compute_optimal_size(5.76e23)[0] == pytest.approx(32e9, rel=0.02)
    assert EPOCH.find_compute_optimal_size(5.76e23)[0] == pytest.approx(70e9, rel=0.1)


def test_an_exponent_at_a_bound_is_not_determined() -> None:
    points = [ScalingLawPoint("", n, d, 1 + 100 / d**0.4) for n in (1e6, 2e6, 4e6) for d in (1e8, 3e8, 9e8)]
    assert fit_scaling_law(points).undetermined_exponents == ["alpha"]
    assert ScalingLaw(1.7, 400.0, 410.0, 0.34, 0.28).undetermined_exponents == []


def test_the_largest_runs_are_held_out() -> None:
    """A law that bends at large compute is noticed."""
    points = trained(HOFFMANN, 0.0)
    largest = max(points, key=lambda point: point.flops)
    points[points.index(largest)] = ScalingLawPoint("bend", largest.parameters, largest.tokens, largest.loss * 1.05)
    (held,) = ScalingFit.from_points(points, bootstrap=0, hold_out=1).held_out
    assert (held.point.name, held.relative_error) == ("bend", pytest.approx(1 / 1.05 - 1, rel=1e-4))


GRID = trained(HOFFMANN, 0.0, 3, 3)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (GRID[:6], "requires 7 runs"),
        (list(trained(HOFFMANN, 0.0, 2, 5)), "found 10 runs with 2 and 5"),
        ([*GRID, ScalingLawPoint("bad", 1e8, 0.0, 3.0)], "bad: parameters, tokens and loss must be positive"),
        ([*GRID, ScalingLawPoint("bad", 1e8, 1e9, math.nan)], "bad: parameters, tokens and loss must be positive"),
    ],
)
def test_points_that_no_law_fits_are_refused(points: Sequence[ScalingLawPoint], message: str) -> None:
    with pytest.raises(DataError, match=message):
        fit_scaling_law(points)


def test_the_command_reads_csv_and_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open("points.csv", "w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["parameters", "tokens", "loss"])
        writer.writerows((p.parameters, p.tokens, p.loss) for p in trained(HOFFMANN, 0.001, 4, 4))
    words = ("scaling", "points.csv", "--bootstrap", 5, "--budget", 1e22, "--json", "law.json")
    out = typed(build_typer_app(), *words).stdout
    assert "held out: error of the 3 largest runs" in out
    found = json.loads(Path("law.json").read_text())
    (optimum,) = found["optima"]
    assert optimum["parameters_interval"][0] <= optimum["parameters"] <= optimum["parameters_interval"][1]
    assert 6 * optimum["parameters"] * optimum["tokens"] == pytest.approx(1e22)
    page = Path("scaling.html").read_text()
    assert "Loss of 1e+22 FLOPs against parameters" in page
    assert "http" not in page
    for source, message in (("none.csv", "does not exist"), ("runs/none", "does not exist")):
        assert message in str(typed(build_typer_app(), "scaling", source, fails=ConfigError).exception)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("parameters,tokens\n1,2\n", "no column loss"),
        ("parameters,tokens,loss\n1,2,x\n", "points.csv:2"),
        ("", "no column"),
    ],
)
def test_a_csv_that_is_not_one_of_points(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "points.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_scaling_points_csv(tmp_path / "points.csv")


def test_a_run_is_a_point(tmp_path: Path) -> None:
    """Its tokens are the sum over the steps, its parameters those of its model, its loss the last."""
    lines = [{"step": step, "loss": 9.0 if step < 10 else 2.5, "tokens": 64.0} for step in range(1, 11)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 16, "num_attention_heads": 2, "vocab_size": 10}
    settings = {"model": {**model, "tie_embeddings": True}, "data": {"train": "t"}, "train": {"steps": 10}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    matrices, norms = 4 * 8 * 8 + 3 * 8 * 16, 3 * 8
    point = read_scaling_point_of_run(RunLog.read_folder(tmp_path), "loss", "active")
    assert (point.parameters, point.tokens, point.loss) == (matrices + norms + 10 * 8, 640, 2.5)
    assert (
        read_scaling_point_of_run(RunLog.read_folder(tmp_path), "loss", "non-embedding").parameters == matrices + norms
    )
    with pytest.raises(ConfigError, match="has not logged valid_loss"):
        read_scaling_point_of_run(RunLog.read_folder(tmp_path), "valid_loss", "active")
