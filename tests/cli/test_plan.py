from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import yaml

from mega_cli.main import main

RUN = {
    "model": {"preset": "llama3-8b"},
    "data": {"train": "data/wiki", "seq_length": 8192},
    "parallel": {"tp": 2, "pp": 4},
    "batch": {"micro": 1, "global": 64},
}


def told(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    with pytest.raises(SystemExit) as end:
        main(["plan", str(tmp_path / "run.yaml"), *options])
    out = capsys.readouterr()
    return int(end.value.code or 0), out.out, out.err


def test_the_bubble_stands_beside_its_formula(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = told(tmp_path, capsys, "--ranks", "16", "--json")
    plan = json.loads(out)
    assert status == 0
    assert plan["ranks"] == {"world": 16, "tp": 2, "pp": 4, "cp": 1, "dp": 2}
    assert plan["bubble"] == pytest.approx(3 / (32 + 3))
    assert plan["bubble_by_formula"] == pytest.approx(plan["bubble"])
    assert plan["parameters"] == 8_030_261_248
    assert plan["flops_per_step"] == 64 * 8192 * plan["flops_per_token"]["exact"]
    assert plan["flops_per_token"]["full"] == 57_912_852_480
    assert len(plan["memory_bytes"]) == 4


def test_a_copy_of_the_weights_lies_on_so_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fully = ["--set", "parallel.pp=1", "--set", "parallel.zero=3", "--json"]
    _, one, _ = told(tmp_path, capsys, "--ranks", "8", *fully)
    _, several, _ = told(tmp_path, capsys, "--ranks", "16", "--set", "parallel.zero3_shard=4", *fully)
    (hybrid,), (whole,) = (json.loads(text)["memory_bytes"] for text in (several, one))
    states = ("weights", "gradients", "optimizer", "work")
    assert [hybrid[kind] for kind in states] == [whole[kind] for kind in states]


def test_a_growing_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    growing = ["--set", "batch.rampup={start: 32, increment: 16, samples: 100}", "--ranks", "8"]
    _, out, _ = told(tmp_path, capsys, *growing, "--json")
    plan = json.loads(out)
    assert plan["rampup"] == [{"global": 32, "steps": 2}, {"global": 48, "steps": 1}]
    assert (plan["microbatches"], plan["tokens_per_step"]) == (64, 64 * 8192)
    assert "batch ramp-up    from 32 samples, in 3 steps" in told(tmp_path, capsys, *growing)[1]
    status, _, error = told(tmp_path, capsys, *growing[:2], "--set", "batch.micro=32", "--ranks", "8")
    assert status == 2
    assert "batch.rampup.increment = 16: must be a multiple of batch.micro = 32" in error


def test_the_schedule_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = tmp_path / "schedule.svg"
    status, out, _ = told(tmp_path, capsys, "--draw", str(drawing))
    assert status == 0
    assert "pipeline bubble" in out
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


def test_ranks_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = told(tmp_path, capsys, "--ranks", "12")
    assert status == 2
    assert "do not divide" in error


def test_a_machine_tells_the_time_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "16", "--machine", "h100-ib", "--tokens", "1T"]
    status, out, _ = told(tmp_path, capsys, *options, "--json")
    plan = json.loads(out)["time"]
    assert status == 0
    assert sum(plan["seconds"].values()) == pytest.approx(plan["seconds_per_step"])
    assert plan["tokens_per_second_per_gpu"] * 16 * plan["seconds_per_step"] == pytest.approx(64 * 8192)
    assert plan["hours"] == pytest.approx(1e12 / 16 / plan["tokens_per_second_per_gpu"] / 3600)
    assert plan["mfu_palm"] > plan["mfu_causal"] > 0.2
    _, text, _ = told(tmp_path, capsys, *options)
    assert "tokens a second and GPU" in text
    assert "as PaLM counts" in text


def test_a_search_prints_sections_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = told(tmp_path, capsys, "--ranks", "16", "--machine", "h100", "--search")
    assert status == 0
    found = yaml.safe_load(out)
    assert set(found) == {"parallel", "batch", "recompute"}
    (tmp_path / "best.yaml").write_text(yaml.safe_dump({**RUN, **found, "batch": {**RUN["batch"], **found["batch"]}}))
    with pytest.raises(SystemExit) as end:
        main(["plan", str(tmp_path / "best.yaml"), "--ranks", "16"])
    assert not end.value.code


@pytest.mark.parametrize(
    ("options", "told_of"),
    [
        (["--search"], "--search predicts times"),
        (["--tokens", "1T"], "--tokens predicts times"),
        (["--machine", "h100", "--tokens", "many"], "--tokens many: no number of tokens"),
        (["--machine", "abacus"], "--machine abacus: no such machine"),
    ],
)
def test_what_a_prediction_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told_of: str
) -> None:
    status, _, error = told(tmp_path, capsys, "--ranks", "8", *options)
    assert status == 2
    assert told_of in error
