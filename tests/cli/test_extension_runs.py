"""Commands on a run with extensions and on its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from engines import Numbers, tokens_of
from engines import run as run_engine
from extension_cases import EXAMPLES, SIZES

from mega_ckpt.checkpoint import Checkpoint
from mega_cli.main import main
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_eval.engine_requests import EngineRequest, GenerationLimits
from mega_eval.inference_engine import InferenceEngine
from mega_eval.model_loading import load_inference_model
from mega_eval.sampling import Sampling

MIXER = str(EXAMPLES / "differential_attention.py")


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped and resumed, with a mixer, an objective, an optimizer and a callback."""
    folder = tmp_path_factory.mktemp("extended")
    with IndexedWriter(folder / "tokens", np.dtype(np.uint16)) as writer:
        for document in np.random.default_rng(0).integers(0, 61, (12, 40)):
            writer.add_document(document)
    names = ("differential_attention.py", "z_loss.py", "schedule_free.py")
    settings: dict[str, Any] = {
        "extensions": [str(EXAMPLES / name) for name in names],
        "model": {**SIZES, "mixers": {"differential": {}}, "layers": ["differential+mlp", "attention+mlp"]},
        "data": {"train": str(folder / "tokens"), "seq_length": 16, "split": "1,0,0"},
        "objective": {"kind": "z_loss"}, "callbacks": {"output": {}}, "lr_schedule": {"name": "constant"},
        "optimizer": {"name": "schedule_free_adamw"}, "batch": {"micro": 2, "global": 2}, "train": {"steps": 4},
        "precision": "fp32", "checkpoint": {"every": 2}, "output": str(folder / "run"),
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    assert call("train", folder / "run.yaml", "--set", "train.exit_interval=2") in (0, 75)
    assert call("train", folder / "run.yaml") == 0
    return folder


def test_a_resumed_run_logs_the_numbers_of_its_callback(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["output/largest_weight"] > 0 for line in lines)


def test_the_checkpoint_records_names_and_versions(run: Path) -> None:
    saved = Checkpoint.open_folder(run / "run/checkpoints/step-00000004")
    assert saved.trainer_state["extensions"] == {
        "differential-attention": "1.0",
        "z-loss": "1.0",
        "schedule-free": "1.0",
    }
    assert saved.model.mixers["differential"].declaration.extension == "differential-attention"
    assert {key.split("/")[1] for key in saved.tensor_keys("optimizer/")} == {"z", "exp_avg_sq"}


def test_commands_on_the_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held_out = ("--data", run / "tokens", "--seq-length", "16")
    assert call("eval", run / "run", *held_out, "--extension", MIXER) == 0
    assert "perplexity" in capsys.readouterr().out
    assert call("eval", run / "run", *held_out) == 2
    assert "requires the extension 'differential-attention'" in capsys.readouterr().err
    assert call("plan", run / "run.yaml", "--ranks", "1") == 0
    assert "parameters" in capsys.readouterr().out
    assert call("report", run / "run", "--out", run / "report.html") == 0
    assert (
        call("ckpt", "convert", run / "run", run / "copy", "--to", "mega", "--dtype", "bf16") == 0
    )  # without its code
    for target, reason in (
        ("hf", "no HuggingFace family has differential"),
        ("megatron", "layers must each be one of"),
    ):
        assert call("ckpt", "convert", run / "run", run / target, "--to", target) == 2
        assert reason in capsys.readouterr().err


def test_a_step_is_reproduced_only_with_files_that_the_command_names(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = run / "run/checkpoints/step-00000002"
    assert call("train", "--reproduce", checkpoint) == 2
    assert "set extensions to the file that has it" in capsys.readouterr().err
    files = [str(EXAMPLES / name) for name in ("differential_attention.py", "z_loss.py", "schedule_free.py")]
    assert call("train", "--reproduce", checkpoint, "--set", f"extensions={json.dumps(files)}") == 0


def test_generation_equals_a_forward_without_cache(run: Path) -> None:
    model = load_inference_model(run / "run", dtype=torch.float64, extensions=[MIXER])
    tokens = [3, 5, 8]
    for _ in range(6):
        positions = torch.arange(len(tokens))[None]
        states = model(model.embed_inputs(torch.tensor([tokens]), positions), model.make_forward_context(positions))
        tokens.append(int(model.compute_logits(states)[0, -1].argmax()))
    engine = InferenceEngine(model, Numbers(), cache_tokens=64, batch_size=2)
    events = run_engine(engine, [EngineRequest(tokens[:3], GenerationLimits(6), Sampling(temperature=0))])
    assert tokens_of(events[0]) == tokens[3:]


PARTS = str(EXAMPLES / "sampler_tokenizer_kernel.py")


def test_a_run_with_a_tokenizer_of_an_extension(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"text": "{a}+{a}={2 * a}"}}\n' for a in range(100)))
    tokenizer, data = f"{PARTS}:place_value", tmp_path / "sums"
    arguments = ("--input", tmp_path / "sums.jsonl", "--tokenizer", tokenizer, "--append-eod", "--output", data)
    assert call("data", "preprocess", *arguments) == 0
    settings: dict[str, Any] = {
        "model": {**SIZES, "vocab_size": 417, "num_layers": 1}, "batch": {"micro": 2, "global": 2}, "train": {"steps": 2},
        "data": {"train": str(data), "seq_length": 16, "split": "1,0,0", "tokenizer": tokenizer},
        "precision": "fp32", "output": str(tmp_path / "run"),
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert call("train", tmp_path / "run.yaml") == 0
    assert call("ckpt", "convert", tmp_path / "run", tmp_path / "hf", "--to", "hf") == 0
    capsys.readouterr()
    for folder in ("run", "hf"):
        prompt = (tmp_path / folder, "--prompt", "12+12=", "--max-new-tokens", "3", "--json", "--temperature", "1")
        assert (
            call("generate", *prompt, "--extension", PARTS, "--sampler", "top_n_sigma", "--sampler-option", "n=3") == 0
        )
        assert len(json.loads(capsys.readouterr().out)["tokens"]) == 3
        assert call("generate", *prompt) == 2
        assert "requires the extension 'sampler-tokenizer-kernel'" in capsys.readouterr().err
        assert call("generate", *prompt, "--extension", PARTS, "--sampler", "top") == 2
        assert "not a sampler of a loaded extension" in capsys.readouterr().err
    assert call("eval", tmp_path / "run", "--data", data, "--seq-length", "16", "--extension", PARTS) == 0
    settings["init_from"] = str(tmp_path / "hf")  # with the tokenizer of the data, so no other is refused
    settings["output"] = str(tmp_path / "more")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert call("train", tmp_path / "run.yaml") == 0
    assert (tmp_path / "more/assets/extension_tokenizer.json").exists()
