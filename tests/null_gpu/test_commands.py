"""`mega train` on a CUDA device, from a folder to a checkpoint: adapters, objectives, memory settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from commands import typed
from preference_pairs import LENGTH, VOCABULARY, pairs, write_model, write_pairs

from mega_cli.main import build_typer_app
from mega_data.token_files.indexed_writer import IndexedWriter

PAIRS = {"train": "pairs", "kind": "pairs"}
RUNS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "fp16": {"precision": "fp16"},
    "compiled": {"compile": True},
    "LoRA": {"lora": {"rank": 4}},
    "QLoRA": {"lora": {"rank": 4, "quantize": "nf4"}},
    "DoRA": {"lora": {"rank": 4, "dora": True}},
    "frozen": {"train": {"steps": 2, "freeze": ["*.mlp.*"]}},
    "optimizer on the host": {"optimizer": {"offload": True}},
    "activations on the host": {"offload": {"activations": 1, "min_bytes": 0}},
    "weight average": {"train": {"steps": 2, "ema": 0.9}},
    "copies in memory": {"checkpoint": {"every": 2, "memory_every": 1}},
    "hashes": {"fault": {"hash_every": 1}},
    "transformers": {"model": {"from": "base", "implementation": "transformers"}},
    "dpo": {"data": PAIRS, "objective": {"kind": "dpo"}},
    "kto": {"data": PAIRS, "objective": {"kind": "kto"}},
    "simpo": {"data": PAIRS, "objective": {"kind": "simpo"}},
    "distillation": {"objective": {"kind": "distill", "teacher": "base", "top_k": 8}},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("commands")
    write_model(made / "base", 1, hidden_size=64, intermediate_size=128)
    write_pairs(made / "pairs", pairs(12))
    with IndexedWriter(made / "tokens", np.dtype(np.uint16)) as writer:
        for document in np.random.default_rng(0).integers(0, VOCABULARY, (20, 40)):
            writer.add_document(document)
    return made


@pytest.mark.parametrize("name", RUNS)
def test_a_run_trains_and_saves(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    changed = RUNS[name]
    run: dict[str, Any] = {
        "model": {"from": "base"}, "batch": {"micro": 1, "global": 2}, "train": {"steps": 2}, "precision": "bf16",
        "checkpoint": {"every": 2, "async": False}, "log": {"tensorboard": False, "every": 1}, "compile": False,
        "output": name, **changed, "data": {"train": "tokens", "seq_length": LENGTH, "split": [1], **changed.get("data", {})},
    }  # fmt: skip
    Path("run.yaml").write_text(yaml.safe_dump(run))
    typed(build_typer_app(), "train", "--nproc", 1, "run.yaml")
    metrics = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics if "loss" in line] == [1, 2]
    assert list(Path(name, "checkpoints").glob("step-00000002"))
