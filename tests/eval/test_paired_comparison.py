from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy", reason="paired tests")

from mega_common.errors import DataError
from mega_eval.paired_comparison import compare_task_results, run_paired_test


def write(path: Path, scores: dict[str, list[Any]], *, metric: str = "acc", document: str = "d") -> Path:
    samples = {
        task: [
            {"doc_id": number, "doc_hash": f"{document}{number}", "filter": "none", "metrics": [metric], metric: value}
            for number, value in enumerate(values)
        ]
        for task, values in scores.items()
    }
    path.write_text(json.dumps({"results": {}, "samples": samples}))
    return path


@pytest.mark.parametrize(("lost", "won"), [(0, 1), (0, 6), (1, 7), (3, 4), (5, 5)])
def test_mcnemar_counts_the_tosses_at_least_as_uneven(lost: int, won: int) -> None:
    both = [(1.0, 1.0), (0.0, 0.0), (1.0, 1.0)]  # which tell nothing
    p, test = run_paired_test([*both, *[(1.0, 0.0)] * lost, *[(0.0, 1.0)] * won])
    tosses = [sum(one) for one in product((0, 1), repeat=lost + won)]
    uneven = sum(abs(heads - (lost + won) / 2) >= abs(lost - won) / 2 for heads in tosses)
    assert test == "mcnemar"
    assert p == pytest.approx(uneven / len(tosses))


def test_other_scores_are_compared_by_their_differences() -> None:
    # differences 1, 2, 3: mean 2, standard error 1/sqrt(3), so t = 2 sqrt(3) with two degrees of freedom
    t = 2 * math.sqrt(3)
    p, test = run_paired_test([(0.5, 1.5), (7.0, 9.0), (-1.0, 2.0)])
    assert test == "t-test"
    assert p == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_the_same_scores_differ_by_nothing() -> None:
    assert run_paired_test([(1.0, 1.0), (0.0, 0.0)]) == (1.0, "mcnemar")
    assert run_paired_test([(0.3, 0.3)]) == (1.0, "t-test")
    assert run_paired_test([(0.25, 0.5)]) == (1.0, "t-test")  # one sample has no spread


def test_results_are_compared_sample_by_sample(tmp_path: Path) -> None:
    one = write(tmp_path / "1.json", {"a": [0, 1, 1, 0], "mine": [1]})
    other = write(tmp_path / "2.json", {"a": [1, 1, 1, 1, 0], "yours": [1]})
    (found,) = compare_task_results(one, other)
    assert (found.task, found.metric, found.filter) == ("a", "acc", "none")
    assert found.scores == {0: (0.0, 1.0), 1: (1.0, 1.0), 2: (1.0, 1.0), 3: (0.0, 1.0)}  # the fifth is in one alone
    assert found.mean_scores == (0.5, 1.0)
    assert found.differing_counts == (0, 2)
    assert found.p == 0.5


def test_log_likelihoods_come_with_a_weight(tmp_path: Path) -> None:
    one, other = (
        write(tmp_path / f"{n}.json", {"text": [[-10.0 - n, 3], [-5.0 - 2 * n, 2]]}, metric="word_perplexity")
        for n in (1, 2)
    )
    (found,) = compare_task_results(one, other)
    assert found.scores == {0: (-11.0, -12.0), 1: (-7.0, -9.0)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no json", "cannot be read"),
        ("{}", "samples are missing"),
        ("[1]", "samples are missing"),
        (None, "cannot be read"),
    ],
)
def test_files_that_cannot_be_compared(tmp_path: Path, content: str | None, said: str) -> None:
    good = write(tmp_path / "good.json", {"a": [1]})
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    with pytest.raises(DataError, match=said):
        compare_task_results(good, bad)


def test_other_samples_are_no_pairs(tmp_path: Path) -> None:
    one = write(tmp_path / "1.json", {"a": [1, 0]})
    with pytest.raises(DataError, match="sample 0 of a differs"):
        compare_task_results(one, write(tmp_path / "2.json", {"a": [1, 0]}, document="other"))
    with pytest.raises(DataError, match="no task in common"):
        compare_task_results(one, write(tmp_path / "3.json", {"b": [1, 0]}))
