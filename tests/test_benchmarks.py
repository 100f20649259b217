"""Benchmarks that only a GPU can answer run here too, on next to nothing, so that they are known to run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


def test_the_benchmark_of_a_gpu_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    importlib.import_module("gpu").main(["--tiny"])
    told = capsys.readouterr().out
    for part in ("mega 1B fp8", "mega experts", "speed over transformers, 1B", "'ring'", "'documents'"):
        assert part in told
