from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mega_common.errors import ConfigError
from mega_common.model_presets import load_model_preset
from mega_trainer.config.run_config import RunConfig
from mega_trainer.plan.layout_search import make_planned_run
from mega_trainer.plan.machine import MachineSpec, load_machine
from mega_trainer.plan.machine_calibration import (
    MeasuredTimes,
    fit_machine_efficiency,
    format_calibration_comparison,
    read_measured_times,
)

H100 = load_machine("h100")
RUN = RunConfig.parse(
    {"model": load_model_preset("llama3-8b"), "data": {"train": ["x"], "seq_length": 8192}, "batch": {"global": 128}}
)


def slower(share: float, wires: float = 1.0) -> MachineSpec:
    shares = H100.achieved_efficiency
    update: dict[str, float] = {
        name: getattr(shares, name) * share for name in ("bf16", "fp8", "attention", "flash2", "triton", "memory")
    }
    update |= {name: getattr(shares, name) * wires for name in ("link", "network")}
    return H100.model_copy(update={"efficiency": shares.model_copy(update=update)})


@pytest.mark.parametrize(("share", "wires"), [(0.8, 0.1), (1.1, 0.05)])
def test_a_machine_is_found_again_by_the_times_of_a_run_on_it(share: float, wires: float) -> None:
    there = slower(share, wires)
    parts = make_planned_run(RUN, 64, there).predict_step_time().parts
    compute = sum(seconds for part, seconds in parts.items() if part not in ("data", "optimizer"))
    phases = {
        "forward": compute / 3,
        "backward": 2 * compute / 3,
        "reduce": parts["data"],
        "update": parts["optimizer"],
    }
    measured = MeasuredTimes(sum(parts.values()), phases)
    found = fit_machine_efficiency(make_planned_run(RUN, 64, H100), H100, measured)
    assert found.achieved_efficiency.bf16 == pytest.approx(there.achieved_efficiency.bf16, rel=0.01)
    assert found.achieved_efficiency.network == pytest.approx(there.achieved_efficiency.network, rel=0.05)
    assert found.achieved_efficiency.exchange == H100.achieved_efficiency.exchange
    assert make_planned_run(RUN, 64, found).predict_step_time().seconds == pytest.approx(measured.seconds, rel=0.01)
    assert MachineSpec.parse(found.model_dump(mode="json", exclude_none=True), source="printed") == found
    told = list(
        format_calibration_comparison(make_planned_run(RUN, 64, H100), make_planned_run(RUN, 64, found), measured)
    )
    assert f"measured {measured.seconds:.4g} s" in told[0]


def test_a_run_that_was_faster_than_its_machine_can_be_is_no_run_on_it() -> None:
    with pytest.raises(ConfigError, match="at the peak of H100"):
        fit_machine_efficiency(make_planned_run(RUN, 8, H100), H100, MeasuredTimes(1.0, {}))


def metrics(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_medians_are_of_steps_that_did_nothing_else(tmp_path: Path) -> None:
    lines = [{"step": step, "seconds": 100.0 if step < 4 else 2.0, "phases/forward": 0.5} for step in range(1, 9)]
    lines.append({"step": 9, "seconds": 50.0, "phases/forward": 0.5, "phases/save": 48.0})
    assert read_measured_times(metrics(tmp_path / "m.jsonl", lines)) == MeasuredTimes(2.0, {"forward": 0.5})
    with pytest.raises(ConfigError, match="5 steps after the first 3, but has 2"):
        read_measured_times(metrics(tmp_path / "few.jsonl", lines[:5]))
    with pytest.raises(ConfigError, match="no metrics of a run"):
        read_measured_times(metrics(tmp_path / "other.jsonl", [{"loss": 1.0}]))
