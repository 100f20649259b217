"""Pictures of results: every metric is in them, and formats that cannot be drawn are refused first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from mega_common.errors import ConfigError, MissingPackageError
from mega_eval.result_reports import check_picture_file, list_metric_rows, plot_task_results

RESULTS: dict[str, Any] = {
    "results": {
        "hellaswag": {"alias": "hellaswag", "acc,none": 0.5123, "acc_stderr,none": 0.0049, "acc_norm,none": 0.6871, "acc_norm_stderr,none": 0.0046},
        "wikitext": {"word_perplexity,none": 11.73, "word_perplexity_stderr,none": "N/A", "bits_per_byte,none": 0.66},
        "gsm8k": {"exact_match,strict-match": 0.31, "exact_match_stderr,strict-match": 0.0127},
        "judge_score": {"score,none": 7.25, "score_stderr,none": 0.2},
    },
    "higher_is_better": {"wikitext": {"bits_per_byte": False}},
    "groups": {"mmlu": {"acc,none": 0.45, "acc_stderr,none": 0.004}},
}  # fmt: skip


def test_a_picture_has_every_metric(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.png", "a.svg", "a.pdf"):
        check_picture_file(tmp_path / name)
        plot_task_results(tmp_path / name, RESULTS, "my model")
    with PIL.Image.open(tmp_path / "a.png") as picture:
        assert picture.width > 1000
        colors = {color for _, color in picture.convert("RGB").getcolors(2**16)}
        assert (0x44, 0x77, 0xAA) in colors, "bars"
    written = (tmp_path / "a.svg").read_text()
    for row in list_metric_rows(RESULTS):
        assert f"<!-- {row.task} -->" in written
        assert f"<!-- {row.metric}" in written
    assert "0.5123 ± 0.0049" in written
    assert "exact_match (strict-match)" in written
    assert not list(tmp_path.glob(".*"))


def test_pictures_that_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"a\.jpg: the name must end with \.png, \.svg, \.pdf"):
        check_picture_file(Path("a.jpg"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match="requires matplotlib"):
        check_picture_file(Path("a.png"))
