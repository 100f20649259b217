"""The command: its table, JSON, machine file and exit status; a whole examination on this machine's CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import typed
from typer.testing import CliRunner

from mega_cli.doctor import build_doctor_table
from mega_cli.main import build_typer_app
from mega_common.errors import ConfigError
from mega_trainer.doctor.check_result import CheckResult
from mega_trainer.doctor.examination import Examination
from mega_trainer.plan.machine import load_machine

GOOD = [
    CheckResult("environment", "torch", "ok", "2.13.0"),
    CheckResult("kernels", "attention sdpa, causal", "ok", "0.003", "<= 0.01", 0.003),
    CheckResult("kernels", "attention sdpa, window", "ok", "0.004", "<= 0.01", 0.004),
    CheckResult("kernels", "attention flash, causal", "skipped", "requires a GPU"),
    CheckResult("speed", "GEMM, float32", "no expectation", "0.05 TFLOP/s", value=0.05, unit="TFLOP/s"),
    CheckResult("speed", "memory, copy", "no expectation", "9 GB/s", value=9.0, unit="GB/s"),
]
BAD = CheckResult("kernels", "attention sdpa, documents", "failed", "0.3", "<= 0.01", 0.3)


def finds(results: list[CheckResult], monkeypatch: pytest.MonkeyPatch, *, interrupted: bool = False) -> None:
    def run_checks(self: Examination) -> Iterator[CheckResult]:
        yield from results
        if interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(Examination, "run_checks", run_checks)


def test_results_are_a_table_json_and_a_machine_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finds(GOOD, monkeypatch)
    written, machine = tmp_path / "doctor.json", tmp_path / "ours.yaml"
    out = typed(build_typer_app(), "doctor", "--device", "cpu", "--json", written, "--fit", machine).stdout
    assert "none of 6 checks failed" in out
    row = next(line for line in out.splitlines() if "attention sdpa" in line)
    assert row.split() == ["attention", "sdpa", "(2", "cases)", "0.004", "<=", "0.01", "ok"]
    content = json.loads(written.read_text())
    assert [check["name"] for check in content["checks"]] == [result.name for result in GOOD]
    assert (content["ranks"], content["versions"]["python"][:2]) == (1, "3.")
    assert load_machine(str(machine)).get_peak_flops("bf16") == pytest.approx(0.05e12)


@pytest.mark.parametrize(
    ("results", "interrupted", "status", "words"),
    [([*GOOD, BAD], False, 1, "1 of 7 checks failed"), (GOOD, True, 130, "none of 6 checks failed")],
)
def test_the_exit_status_is_that_of_the_worst(
    results: list[CheckResult], interrupted: bool, status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finds(results, monkeypatch, interrupted=interrupted)
    done = CliRunner().invoke(build_typer_app(), ["doctor", "--device", "cpu"])
    assert (done.exit_code, words in done.stdout) == (status, True)


def test_a_failed_case_has_a_row_of_its_own() -> None:
    names = list(build_doctor_table([*GOOD, BAD]).columns[0].cells)
    assert "  attention sdpa, documents" in map(str, names)


@pytest.mark.parametrize(("option", "value"), [("--device", "tpu"), ("--fit", "ours.json")])
def test_a_wrong_option_is_named(option: str, value: str) -> None:
    refused = typed(build_typer_app(), "doctor", option, value, fails=ConfigError)
    assert option in str(refused.exception)
    assert value in str(refused.exception)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "mega_cli.main", "doctor", "--device", "cpu", *words]


def environment() -> dict[str, Any]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_cpu_is_healthy(ranks: int, tmp_path: Path) -> None:
    written, machine = tmp_path / "doctor.json", tmp_path / "ours.yaml"
    words = ["--nproc", str(ranks), "--json", str(written), "--fit", str(machine)]
    done = subprocess.run(command(*words), env=environment(), capture_output=True, text=True, timeout=600)
    checks = json.loads(written.read_text())["checks"]
    # how long failed jobs take to end depends on what else the machine does
    failed = [check for check in checks if check["verdict"] == "failed"]
    assert done.returncode == bool(failed), done.stdout + done.stderr
    assert not [check for check in failed if not check["name"].endswith("all ranks end")]
    assert all(check["value"] < 300 for check in checks if check["name"].endswith("all ranks end"))
    ran = {check["part"] for check in checks if check["verdict"] in ("ok", "no expectation")}
    alone = {"environment", "kernels", "speed", "checkpoint", "parity", "plan"}
    assert ran == (alone if ranks == 1 else alone | {"collectives", "failures"})
    (tmp_path / "run.yaml").write_text("{model: {preset: tiny}, data: {train: tokens, seq_length: 64}}")
    plan = [sys.executable, "-m", "mega_cli.main", "plan", str(tmp_path / "run.yaml"), "--machine", str(machine)]
    assert (
        "step"
        in subprocess.run(plan, env=environment(), capture_output=True, text=True, check=True, timeout=120).stdout
    )


@pytest.mark.long
def test_ctrl_c_shows_what_was_found(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command("--nproc", "2"), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "examining: speed" in line or "examining: reference" in line:
            break
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - began < 30
    assert "environment" in out
    assert "checks failed" in out
