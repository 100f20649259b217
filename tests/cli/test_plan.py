from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from unittest import mock

import pytest
import yaml

from mega_cli.main import main
from mega_trainer.plan import other_trainers

RUN = {
    "model": {"preset": "llama3-8b"},
    "data": {"train": "data/wiki", "seq_length": 8192},
    "parallel": {"tp": 2, "pp": 4},
    "batch": {"micro": 1, "global": 64},
}


def run_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    with pytest.raises(SystemExit) as end:
        main(["plan", str(tmp_path / "run.yaml"), *options])
    out = capsys.readouterr()
    return int(end.value.code or 0), out.out, out.err


def test_the_bubble_stands_beside_its_formula(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_plan(tmp_path, capsys, "--ranks", "16", "--json")
    plan = json.loads(out)
    assert status == 0
    assert plan["ranks"] == {"world": 16, "tp": 2, "pp": 4, "cp": 1, "dp": 2}
    assert plan["bubble"] == pytest.approx(3 / (32 + 3))
    assert plan["bubble_by_formula"] == pytest.approx(plan["bubble"])
    assert plan["parameters"] == 8_030_261_248
    assert plan["flops_per_step"] == 64 * 8192 * plan["flops_per_token"]["exact"]
    assert plan["flops_per_token"]["full"] == 57_912_852_480
    assert len(plan["memory_bytes"]) == 4


def test_memory_as_others_keep_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run_plan(tmp_path, capsys, "--ranks", "16", "--like", "megatron")
    assert status == 0
    assert "estimated memory of megatron by pipeline rank" in out
    _, out, _ = run_plan(tmp_path, capsys, "--ranks", "16", "--like", "megatron", "--machine", "h100", "--json")
    _, ours, _ = run_plan(tmp_path, capsys, "--ranks", "16", "--machine", "h100", "--json")
    other, own = (json.loads(text)["time"] for text in (out, ours))
    assert (other["like"], other["faster"]) == ("megatron", [])
    assert other["seconds"]["tensor"] < own["seconds"]["tensor"], "Transformer Engine sends beside GEMMs"
    status, _, err = run_plan(tmp_path, capsys, "--like", "jax")
    assert status == 2
    assert "one of megatron, nanotron, fsdp2" in err


def test_a_search_like_another_trainer_has_only_its_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--machine", "h100", "--ranks", "8", "--search", "--like", "nanotron", "--why", "tp 4 cp 2", "--json"]
    status, out, _ = run_plan(tmp_path, capsys, *options)
    *rows, why = json.loads(out)
    assert status == 0
    assert {row["like"] for row in rows} == {"nanotron"}
    for settings in (row["settings"] for row in rows):
        assert settings["parallel.zero"] < 2
        assert settings["parallel.cp"] == settings["parallel.virtual_stages"] == settings["parallel.ep"] == 1
        assert settings["recompute"]["kind"] != "selective"
        assert "optimizer.offload" not in settings
        assert not settings["offload.activations"]
    assert why["reason"] == "is not a layout that nanotron is known to run"
    with mock.patch.object(other_trainers, "SEARCH_MARGIN", 1e6):
        *_, why = json.loads(run_plan(tmp_path, capsys, *options[:-2], "tp 2", "--json")[1])
    assert why["fits"]
    assert why["reason"].startswith("is within the margin of memory that a search with --like keeps")
    status, _, err = run_plan(tmp_path, capsys, "--like", "nanotron", "--html", str(tmp_path / "plan.html"))
    assert status == 2
    assert "--html is not supported with --like" in err


def test_a_copy_of_the_weights_lies_on_so_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fully = ["--set", "parallel.pp=1", "--set", "parallel.zero=3", "--json"]
    _, one, _ = run_plan(tmp_path, capsys, "--ranks", "8", *fully)
    _, several, _ = run_plan(tmp_path, capsys, "--ranks", "16", "--set", "parallel.zero3_shard=4", *fully)
    (hybrid,), (whole,) = (json.loads(text)["memory_bytes"] for text in (several, one))
    states = ("weights", "gradients", "optimizer", "work")
    assert [hybrid[kind] for kind in states] == [whole[kind] for kind in states]


def test_a_growing_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    growing = ["--set", "batch.rampup={start: 32, increment: 16, samples: 100}", "--ranks", "8"]
    _, out, _ = run_plan(tmp_path, capsys, *growing, "--json")
    plan = json.loads(out)
    assert plan["rampup"] == [{"global": 32, "steps": 2}, {"global": 48, "steps": 1}]
    assert (plan["microbatches"], plan["tokens_per_step"]) == (64, 64 * 8192)
    assert "batch ramp-up    from 32 samples, over 3 steps" in run_plan(tmp_path, capsys, *growing)[1]
    status, _, error = run_plan(tmp_path, capsys, *growing[:2], "--set", "batch.micro=32", "--ranks", "8")
    assert status == 2
    assert "batch.rampup.increment = 16: must be a multiple of batch.micro = 32" in error


def test_the_schedule_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing = tmp_path / "schedule.svg"
    status, out, _ = run_plan(tmp_path, capsys, "--draw", str(drawing))
    assert status == 0
    assert "pipeline bubble" in out
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


def test_ranks_that_do_not_fit_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, error = run_plan(tmp_path, capsys, "--ranks", "12")
    assert status == 2
    assert "does not divide" in error


def test_a_machine_tells_the_time_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "16", "--machine", "h100-ib", "--tokens", "1T"]
    status, out, _ = run_plan(tmp_path, capsys, *options, "--json")
    plan = json.loads(out)["time"]
    assert status == 0
    assert sum(plan["seconds"].values()) == pytest.approx(plan["seconds_per_step"])
    assert plan["tokens_per_second_per_gpu"] * 16 * plan["seconds_per_step"] == pytest.approx(64 * 8192)
    assert plan["hours"] == pytest.approx(1e12 / 16 / plan["tokens_per_second_per_gpu"] / 3600)
    assert plan["mfu_palm"] > plan["mfu_causal"] > 0.2
    _, text, _ = run_plan(tmp_path, capsys, *options)
    assert "tokens/s/GPU" in text
    assert "PaLM's formula" in text


@pytest.mark.parametrize(
    ("options", "told_of"),
    [
        (["--search"], "--search requires --machine"),
        (["--tokens", "1T"], "--tokens requires --machine"),
        (["--machine", "h100", "--tokens", "many"], "--tokens must be a number with K, M, B or T, found 'many'"),
        (["--machine", "abacus"], "--machine abacus is unknown"),
    ],
)
def test_what_a_prediction_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told_of: str
) -> None:
    status, _, error = run_plan(tmp_path, capsys, "--ranks", "8", *options)
    assert status == 2
    assert told_of in error


SMALL = {
    "model": {"preset": "tiny-10m"}, "data": {"train": "data/wiki", "seq_length": 512}, "batch": {"global": 16},
    "machine": "h100",
}  # fmt: skip


def small(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, *options: str) -> tuple[int, str, str]:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    status = 0
    try:
        main([command, str(tmp_path / "small.yaml"), *options])
    except SystemExit as end:
        status = int(end.code or 0)
    out = capsys.readouterr()
    return status, out.out, out.err


def test_the_layout_that_is_found_is_printed_and_written_and_is_what_a_run_without_one_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = tmp_path / "small-4.yaml"
    options = ["--machine", "h100", "--ranks", "4", "--search", "--write", str(new)]
    status, out, _ = small(tmp_path, capsys, "plan", *options)
    found, written = yaml.safe_load(out), yaml.safe_load(new.read_text())
    assert status == 0
    assert set(found) == {"parallel", "batch", "recompute"}
    assert found["parallel"].items() <= written["parallel"].items()
    status, out, err = small(tmp_path, capsys, "train", "--nproc", "4", "--check", "--no-data")
    checked = yaml.safe_load(out)
    assert status == 0
    assert "run.yaml has no section `parallel`; fastest layout for 4 ranks of h100" in err
    assert (checked["parallel"], checked["batch"]) == (written["parallel"], written["batch"])
    assert small(tmp_path, capsys, "train", "--nproc", "4", "--check", "--no-data", "--set", "parallel.tp=1")[2] == ""
    status, _, err = small(tmp_path, capsys, "plan", *options)
    assert status == 2
    assert "exists already" in err
    assert small(tmp_path, capsys, "plan", "--machine", "h100", "--write", "other.yaml")[0] == 2


def test_a_fitted_machine_predicts_what_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics, machine = tmp_path / "metrics.jsonl", tmp_path / "ours.yaml"
    metrics.write_text("".join(json.dumps({"step": step, "seconds": 0.02}) + "\n" for step in range(1, 12)))
    options = ["--machine", "h100", "--ranks", "1", "--fit", str(metrics)]
    status, out, _ = small(tmp_path, capsys, "plan", *options)
    assert status == 0
    machine.write_text(out)
    _, out, _ = small(tmp_path, capsys, "plan", "--ranks", "1", "--machine", str(machine), "--json")
    assert json.loads(out)["time"]["seconds_per_step"] == pytest.approx(0.02, rel=0.05)
    assert small(tmp_path, capsys, "plan", "--fit", str(metrics))[0] == 2


def test_a_search_tells_hours_and_cost_and_why_another_layout_is_slower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--machine",
        "h100",
        "--ranks",
        "4",
        "--search",
        "--tokens",
        "1B",
        "--price",
        "2",
        "--why",
        "pp 2, micro 4",
    ]
    _, out, _ = small(tmp_path, capsys, "plan", *options, "--json")
    *rows, asked = json.loads(out)
    for row in rows:
        assert row["hours"] == pytest.approx(1e9 / (4 * row["tokens_per_second_per_gpu"]) / 3600)
        assert row["cost"] == pytest.approx(8 * row["hours"])
        assert row["error"]["class"].endswith("dense bf16")
    assert asked["settings"]["parallel.pp"] == 2
    assert asked["slower"] > 0
    assert "%" in asked["reason"]
    _, out, _ = small(tmp_path, capsys, "plan", *options)
    assert "hours" in out
    assert "# --why pp 2, micro 4: " in out
    assert "# error of step time: half within" in out
    status, _, error = small(tmp_path, capsys, "plan", *options[:-1], "wide 3")
    assert status == 2
    assert "'wide' is not a setting of a layout" in error
    _, out, _ = small(tmp_path, capsys, "plan", *options[:-1], "tp 3", "--json")
    assert "is not valid for this run" in json.loads(out)[-1]["reason"]


def test_the_fewest_ranks_that_meet_a_budget_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = ["--machine", "h100", "--price", "2", "--tokens", "100B", "--within", "12h"]
    _, out, _ = small(tmp_path, capsys, "plan", *budget, "--under", "1k", "--json")
    (best, *_) = json.loads(out)
    assert best["hours"] <= 12
    assert best["cost"] <= 1000
    status, _, error = small(tmp_path, capsys, "plan", *budget, "--under", "5")
    assert status == 2
    assert "no number of GPUs up to 16,384 meets the limits" in error


@pytest.mark.parametrize(
    ("options", "told_of"),
    [
        (["--within", "3d"], "--within 3d requires --tokens"),
        (["--tokens", "1B", "--under", "5k"], "--under requires a price of the machine"),
        (["--why", "tp 2"], "--why tp 2 requires --search"),
    ],
)
def test_budget_options_name_what_they_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], told_of: str
) -> None:
    status, _, error = small(tmp_path, capsys, "plan", "--machine", "h100", "--ranks", "4", *options)
    assert status == 2
    assert told_of in error


@pytest.mark.parametrize(
    ("machine", "settings", "options", "told_of"),
    [
        ("a100", ["precision=fp8"], [], ("precision = fp8 is not supported on A100", "set precision=bf16")),
        ("a100", ["precision=fp8"], ["--json"], ("precision = fp8 is not supported on A100", "set precision=bf16")),
        ("a100", ["precision=fp8"], ["--like", "megatron"], ("precision = fp8 is not supported on A100", "tflops: {fp8: 1000}")),
        ("a100", ["precision=fp8"], ["--html", "plan.html"], ("precision = fp8 is not supported on A100", "set precision=bf16")),
        ("a100", [], ["--search", "--precision", "fp8"], ("precision = fp8 is not supported on A100", "set precision=bf16")),
        ("h100", ["precision=fp8", "fp8.recipe=mxfp8"], [], ("mxfp8 is not supported on", "set fp8.recipe=tensorwise")),
        ("h100", ["precision=fp8", "fp8.recipe=nvfp4", "kernels.linear=te"], [], ("nvfp4 is not supported on H100", "tensorwise")),
        ("b200", ["precision=fp8", "fp8.recipe=blockwise"], ["--search"], ("blockwise is not supported on", "fp8.recipe=mxfp8")),
    ],
)  # fmt: skip
def test_a_precision_that_the_gpu_lacks_is_refused_and_not_predicted_from_another_peak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], machine: str, settings: list[str], options: list[str],
    told_of: tuple[str, str]
) -> None:  # fmt: skip
    given = [word for setting in settings for word in ("--set", setting)]
    given += [str(tmp_path / word) if word == "plan.html" else word for word in options]
    status, out, error = run_plan(tmp_path, capsys, "--machine", machine, "--ranks", "16", *given)
    assert (status, out) == (2, "")
    for words in told_of:
        assert words in error
    assert not (tmp_path / "plan.html").exists()


def test_a_page_says_that_it_predicts_and_how_a_layout_would_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    options = ["--machine", "a100-40", "--ranks", "8", "--set", "parallel.pp=1", "--tokens", "1T", "--html", str(page)]
    status, out, _ = run_plan(tmp_path, capsys, *options)
    text = page.read_text()
    assert status == 0
    assert "memory         does not fit 39.4 GiB" in out
    assert "would fit with --set" in out
    for words in (
        "predicted step time on a100-40, does not fit",
        "if it fitted",
        "Settings that fit",
        "All figures are predicted",
    ):
        assert words in text
    for kind in ("communicators", "context", "allocator"):
        assert kind in out
