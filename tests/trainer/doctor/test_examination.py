"""Parts of an examination that crash or hang, results against expectations, and the machine file of measured speeds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.doctor import examination as module
from mega_trainer.doctor import training_checks
from mega_trainer.doctor.check_result import (
    CheckResult,
    CheckVerdict,
    make_speed_check_result,
    make_upper_bound_check_result,
)
from mega_trainer.doctor.examination import Examination
from mega_trainer.doctor.machine_fit import fit_machine_spec
from mega_trainer.doctor.training_checks import list_parity_cases
from mega_trainer.plan.kernel_throughput import GpuThroughput
from mega_trainer.plan.layout_search import make_planned_run
from mega_trainer.plan.machine import load_machine
from mega_trainer.plan.memory_advice import make_training_layout
from mega_trainer.plan.memory_prediction import predict_memory
from mega_trainer.verify.case_comparison import RankFindings
from mega_trainer.verify.layout_case import LayoutCase

CPU = torch.device("cpu")
# In place of the worker: each part writes a result and is done, but for those that crash or hang.
WORKER = """
import json, os, sys, time
parts, processes, folder = sys.argv[1].split(","), sys.argv[2], sys.argv[3]
for part in parts:
    line = dict(part=part, name="one", verdict="ok", measured=processes)
    open(f"{folder}/{part}.json", "a").write(json.dumps(line) + "\\n")
    if part == "kernels":
        print("an illegal memory access", file=sys.stderr, flush=True)
        os.abort()
    if part == "parity":
        time.sleep(100)
    open(f"{folder}/{part}.done", "w")
"""


def examine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, ranks: int, seconds: float
) -> tuple[list[CheckResult], list[str]]:
    seen = list[str]()
    monkeypatch.setattr(module, "COMMAND", [sys.executable, "-c", WORKER])
    made = Examination(folder, "cpu", ranks, seconds / 60, seen.append)
    return [result for result in made.run_checks() if result.part != "environment"], seen


def test_parts_after_one_that_crashes_run_and_one_that_hangs_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    results, seen = examine(tmp_path, monkeypatch, ranks=2, seconds=8)
    assert time.monotonic() - began < 60
    found = [(result.part, result.name, result.verdict) for result in results]
    assert found == [
        ("kernels", "one", "ok"), ("kernels", "runs to its end", "failed"), ("speed", "one", "ok"),
        ("collectives", "one", "ok"), ("checkpoint", "one", "ok"), ("parity", "one", "ok"),
        ("parity", "runs to its end", "failed"), ("plan", "all", "skipped"), ("failures", "all", "skipped"),
    ]  # fmt: skip
    words = {result.part: result.measured for result in results if result.name == "runs to its end"}
    assert "an illegal memory access" in words["kernels"]
    assert "--minutes" in words["parity"]
    assert {result.measured for result in results if result.name == "one" and result.part in ("kernels", "speed")} == {
        "1"
    }
    assert next(result for result in results if result.part == "collectives").measured == "2"
    assert "parity" in seen


def test_ctrl_c_ends_the_processes_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = list[Any]()
    real = module.subprocess.Popen

    def start(*args: Any, **more: Any) -> Any:
        children.append(real(*args, **more))
        return children[-1]

    def interrupt(part: str) -> None:
        if part == "parity":
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "COMMAND", [sys.executable, "-c", WORKER])
    monkeypatch.setattr(module.subprocess, "Popen", start)
    made = Examination(tmp_path, "cpu", 1, 5.0, interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(made.run_checks())
    assert all(child.poll() is not None for child in children)


SPEEDS: list[tuple[float, float | None, CheckVerdict]] = [
    (100.0, 100.0, "ok"), (81.0, 100.0, "ok"), (79.0, 100.0, "failed"), (79.0, None, "no expectation")
]  # fmt: skip


@pytest.mark.parametrize(("value", "expected", "verdict"), SPEEDS)
def test_a_speed_is_judged_by_the_machine(value: float, expected: float | None, verdict: CheckVerdict) -> None:
    assert make_speed_check_result("speed", "x", value, expected, "GB/s").verdict == verdict


@pytest.mark.parametrize(("value", "verdict"), [(0.1, "ok"), (0.3, "failed"), (float("nan"), "failed")])
def test_an_error_is_judged_by_its_bound(value: float, verdict: CheckVerdict) -> None:
    result = make_upper_bound_check_result("kernels", "x", value, 0.2)
    assert result.verdict == verdict
    again = CheckResult.from_json(result.to_json())
    assert again.to_json() == result.to_json() or value != value


def measured(**speeds: float) -> Sequence[CheckResult]:
    names = {
        "bf16": ("speed", "GEMM, bfloat16"), "attention": ("speed", "attention, causal"), "memory": ("speed", "memory, copy"),
        "kernel": ("speed", "smallest kernel"), "link": ("collectives", "all-gather in world of 8"),
        "other": ("collectives", "all-gather in tp of 2"), "hop": ("collectives", "latency in world of 8"),
    }  # fmt: skip
    return [CheckResult(*names[name], "ok", value=value) for name, value in speeds.items()]


def test_measured_speeds_become_shares_of_a_known_machine() -> None:
    h100 = load_machine("h100")
    speeds = measured(bf16=700.0, memory=2680.0, link=360.0, other=1.0, kernel=4.0, hop=80.0)
    spec = fit_machine_spec(speeds, CPU, "h100")
    shares = spec.achieved_efficiency
    assert shares.bf16 == pytest.approx(700e12 / h100.get_peak_flops("bf16"), abs=1e-4)
    assert (shares.memory, shares.link) == (0.8, 0.8)
    assert shares.kernel == pytest.approx(4e-6)
    assert shares.hop == pytest.approx(5e-6)  # an all-reduce passes each of eight ranks twice
    assert shares.attention == h100.achieved_efficiency.attention  # was not measured
    assert spec.model_copy(update={"efficiency": None}) == h100


def test_a_fitted_machine_has_the_measured_rates_under_its_power_limit() -> None:
    spec = fit_machine_spec(measured(bf16=1500.0, attention=900.0, memory=6000.0), CPU, "b200")
    rates = GpuThroughput.from_machine(spec, spec.achieved_efficiency, "fused")
    assert rates.product["bf16"] == pytest.approx(1500e12, rel=1e-3)
    assert rates.attention == pytest.approx(900e12, rel=1e-3)


def test_an_unknown_machine_achieves_what_was_measured(tmp_path: Path) -> None:
    spec = fit_machine_spec(measured(bf16=0.05, attention=0.02, memory=10.0, link=0.5), CPU, None)
    assert spec.get_peak_flops("bf16") == pytest.approx(0.05e12)
    assert spec.achieved_efficiency.bf16 == 1
    assert spec.achieved_efficiency.attention == pytest.approx(0.4)
    assert spec.link_gb_s == 0.5


def test_an_unknown_machine_without_its_speeds_is_refused() -> None:
    with pytest.raises(ConfigError, match="requires the measured speeds of GEMMs and memory, and memory failed"):
        fit_machine_spec(measured(bf16=0.05), CPU, None)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_layouts_fit_their_ranks(ranks: int) -> None:
    assert [name for name, case in list_parity_cases(ranks).items() if not case.is_legal or case.ranks != ranks] == []


@pytest.mark.parametrize(("error", "verdict"), [(1e-12, "ok"), (1e-9, "failed"), (float("nan"), "failed")])
def test_a_layout_with_other_gradients_fails(error: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def sweep(cases: list[LayoutCase], device: torch.device) -> Iterator[RankFindings]:
        for case in cases:
            yield RankFindings({"loss": 0.0, "gradients": error if case.recompute else 0.0}, {}, {})

    monkeypatch.setattr(training_checks, "compare_cases_with_one_process", sweep)
    (result,) = training_checks.check_layout_parity(CPU, RankInfo())
    assert (result.name, result.verdict) == ("recompute", verdict)
    assert result.measured.startswith("not comparable") == (error != error)


def test_a_layout_of_one_process_agrees() -> None:
    (result,) = training_checks.check_layout_parity(CPU, RankInfo())
    assert result.verdict == "ok"


MEMORY: list[tuple[float, float, tuple[str, str]]] = [  # share of the predicted time and memory
    (1.1, 1.05, ("ok", "ok")), (0.5, 0.95, ("ok", "ok")), (1.3, 1.0, ("failed", "ok")), (1.0, 1.2, ("ok", "failed"))
]  # fmt: skip


@pytest.mark.parametrize(("slower", "larger", "verdicts"), MEMORY)
def test_a_run_is_judged_by_its_plan(slower: float, larger: float, verdicts: tuple[str, str]) -> None:
    model = {"num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "vocab_size": 512}
    raw = {"model": model, "data": {"train": "none", "seq_length": 256}, "batch": {"micro": 1, "global": 8}}
    config, h100 = RunConfig.parse(raw), load_machine("h100")
    seconds = make_planned_run(config, 8, h100).predict_step_time().seconds * slower
    memory = sum(predict_memory(config.model, make_training_layout(config, 8))[0].values()) * larger
    lines = [{"seconds": seconds, "tokens_per_second": 1.0}]
    found = list(training_checks._compare_plan("x", config, 8, h100, lines, memory))
    assert tuple(result.verdict for result in found) == verdicts
