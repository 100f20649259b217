"""Two variants over several seeds: the test that applies, and the sentence about it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from commands import typed
from scipy import stats

from mega_cli.main import build_typer_app
from mega_common.errors import ConfigError
from mega_trainer.experiments.seed_comparison import SeedComparison, VariantRuns, compare_variants_over_seeds

BASE = [3.02, 3.05, 2.98, 3.01, 3.04]


def write_runs(root: Path, name: str, values: Sequence[float], seeds: Sequence[int], lr: float = 1e-3) -> str:
    for value, seed in zip(values, seeds, strict=True):
        folder = root / f"{name}-{seed}-{value}"
        folder.mkdir()
        lines = [{"step": step, "loss": 9.0 if step < 10 else value} for step in range(1, 11)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        settings = {"train": {"steps": 10, "seed": seed}, "optimizer": {"lr": lr}, "output": str(folder)}
        (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return str(root / f"{name}-*")


def compare(root: Path, second: Sequence[float], seeds: Sequence[int], first: Sequence[float] = BASE) -> SeedComparison:
    patterns = write_runs(root, "a", first, range(len(first))), write_runs(root, "b", second, seeds, 2e-3)
    one, other = (VariantRuns.read_runs(pattern, "loss") for pattern in patterns)
    return compare_variants_over_seeds(one, other, "loss")


def test_equal_seeds_are_compared_in_pairs(tmp_path: Path) -> None:
    """A difference that is smaller than that of the seeds is found."""
    second = [value - 0.01 - 0.001 * index for index, value in enumerate(BASE)]
    found = compare(tmp_path, second, range(5))
    assert found.test == "paired t-test"
    assert found.p == pytest.approx(stats.ttest_rel(BASE, second).pvalue)
    assert found.difference == pytest.approx(-0.012)
    assert found.interval[0] < -0.012 < found.interval[1] < 0
    assert "is lower than that of" in found.conclusion()
    assert stats.ttest_ind(BASE, second, equal_var=False).pvalue > 0.3


def test_other_seeds_are_compared_by_welch(tmp_path: Path) -> None:
    second = [2.99, 3.04, 3.00]
    found = compare(tmp_path, second, [7, 8, 9])
    assert found.test == "Welch's t-test"
    assert found.p == pytest.approx(stats.ttest_ind(BASE, second, equal_var=False).pvalue)
    assert "No difference between" in found.conclusion()
    assert found.needed is not None
    assert f"About {found.needed} runs" in found.conclusion()


@pytest.mark.parametrize(
    ("values", "seeds", "p", "sentence"),
    [
        ([3.1], [0], None, "Nothing can be concluded"),
        (BASE, range(5), 1.0, "No difference"),
        ([value + 0.5 for value in BASE], range(5), 0.0, "is higher than"),
    ],
)
def test_one_run_and_equal_runs(
    tmp_path: Path, values: Sequence[float], seeds: Sequence[int], p: float | None, sentence: str
) -> None:
    found = compare(tmp_path, values, seeds)
    assert math.isnan(found.p) if p is None else found.p == pytest.approx(p, abs=1e-9), found
    assert sentence in found.conclusion()
    assert json.loads(json.dumps(found.as_json()))["p"] == (None if p is None else pytest.approx(p, abs=1e-9))


def test_the_needed_runs_are_enough_for_four_tests_in_five(tmp_path: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    found = compare(tmp_path, [3.00, 3.06, 2.95, 3.02, 3.00], [7, 8, 9, 10, 11])
    assert found.needed is not None
    spread = [math.sqrt(sum((v - each.mean) ** 2 for v in each.values) / 4) for each in (found.first, found.second)]
    draws = [
        stats.ttest_ind(
            rng.normal(0, spread[0], found.needed),
            rng.normal(found.difference, spread[1], found.needed),
            equal_var=False,
        ).pvalue
        < 0.05
        for _ in range(400)
    ]
    assert 0.72 < sum(draws) / 400 < 0.88


def test_the_command_prints_both_variants_and_what_follows(tmp_path: Path) -> None:
    first = write_runs(tmp_path, "a", BASE, range(5))
    second = write_runs(tmp_path, "b", [value - 0.3 for value in BASE[:4]] + [2.8], range(5), 2e-3)
    out = typed(build_typer_app(), "compare", first, second, "--json", tmp_path / "found.json").stdout.splitlines()
    assert out[1].split()[1:3] == ["5", "3.0200"]
    assert out[3] == "settings that differ: optimizer.lr"
    assert "is lower than that of" in out[4]
    assert json.loads((tmp_path / "found.json").read_text())["test"] == "paired t-test"
    for words, message in (
        ((first, str(tmp_path / "none-*")), "has no run with metrics.jsonl"),
        ((first, second, "--metric", "valid_loss"), "has not logged valid_loss"),
        (("a.json", "b.json", "--metric", "loss"), "--metric requires folders of runs"),
    ):
        assert message in str(typed(build_typer_app(), "compare", *words, fails=ConfigError).exception)
