"""Benchmarks that only a GPU can answer run here too, on next to nothing, so that they are known to run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest


def test_the_benchmark_of_a_gpu_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    importlib.import_module("gpu").main(["--tiny"])
    told = capsys.readouterr().out
    for part in ("mega 1B fp8", "mega experts", "speed over transformers, 1B", "'ring'", "'documents'"):
        assert part in told


def test_the_traffic_of_a_layer_is_counted_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark puts functions of the trainer into the form that a GPU runs: a function that it misses adds kernels."""
    benchmarks = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(benchmarks)
    traffic, parameters, sent = importlib.import_module("traffic").count_all(tokens := 512)
    recorded = json.loads((benchmarks / "results" / "traffic.json").read_text())["results"]["regions"]
    assert set(recorded) == set(traffic.regions) - {"other"}
    layers = [name for name in recorded if name.startswith("layer")]
    assert {name: traffic.regions[name].kernels for name in layers} == {n: recorded[n]["kernels"] for n in layers}
    multiplied = parameters - 128_256 * 4096 - 3 * 4096  # all but the embedding and three norms
    flops = [traffic.regions[name].product_flops for name in ("layer", "head and loss")]
    assert sum(flops) == 6 * tokens * multiplied
    assert [row["host_waits"] for row in sent.values()] == [1, 0, 0, 0, 0] * 2, "only an exchange without a bound waits"


def test_published_memory_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of each peer, and one that leaves its layout open."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    plan_memory = importlib.import_module("plan_memory")
    table = tmp_path / "published.csv"
    table.write_text(
        "source,model,gpu,gpus,seq,tp,pp,cp,ep,zero_or_fsdp,micro_batch,precision,recompute,peak_mem,unit,what\n"
        "torchtitan 2024-12,Llama3.1-8B,H100,8,8192,,,,,FSDP2,2,bf16 compile,selective,77.0,GiB,reserved\n"
        "nanotron sweep (grad-accum 16),Llama-like-8.86B,H100,32,4096,1,2,,,ZeRO-1,1,bf16,,61.10,GB,\n"
        "Megatron-Bridge skill,Moonlight-16B,H100,8,4096,2,1,1,8,,1,bf16,mla_up_proj,35.902,GB,max allocated\n"
        "a skill,Qwen3-30B-A3B,H100,,,4,,,,,,,,29.89,GB,\n"
    )
    *rows, left_out = plan_memory.read(table)
    found = plan_memory.compared(rows)
    assert [row["source"] for row in found] == ["torchtitan 2024-12", "nanotron sweep", "Megatron-Bridge skill"]
    assert all(abs(row["error"]) < 0.06 for row in found)
    assert found[1]["published_gb"] == pytest.approx(61.10 * 2**30 / 1e9), "nanotron writes GiB as GB"
    assert plan_memory.summary(found)["rows"] == 3
    assert left_out.endswith("its layout is not told")
