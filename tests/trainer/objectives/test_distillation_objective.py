"""Learning from a teacher: by transformers' logits, in any layout, from files as from the teacher itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from first_steps import in_layouts, step
from preference_pairs import VOCABULARY, write_model
from ranks import run_ranks

from mega_common.errors import ConfigError
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.run.training_run import run_training
from mega_trainer.verify.case_comparison import assemble_tensor

transformers = pytest.importorskip("transformers", reason="whose logits are the truth here")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("distillation")
    rng = np.random.default_rng(0)
    with IndexedWriter(made / "text", np.dtype(np.uint16)) as writer:
        for _ in range(20):
            writer.add_document(rng.integers(0, VOCABULARY, 100).astype(np.uint16))
    write_model(made / "student", 1)
    write_model(made / "teacher", 2)
    return made


def settings(folder: Path, output: Path, parallel: dict[str, Any] | None = None, **objective: Any) -> dict[str, Any]:
    return {
        "model": {"from": str(folder / "student")}, "precision": "fp64", "device": "cpu", "output": str(output),
        "data": {"train": str(folder / "text"), "seq_length": 16, "split": [3, 1]}, "parallel": parallel or {},
        "batch": {"micro": 1, "global": 4}, "train": {"steps": 1}, "optimizer": {"clip_grad": 0.0},
        "checkpoint": {"async": False}, "log": {"tensorboard": False},
        "objective": {"kind": "distill", "teacher": str(folder / "teacher"), "top_k": VOCABULARY, **objective},
    }  # fmt: skip


@pytest.mark.parametrize(("count", "temperature"), [(VOCABULARY, 1.0), (VOCABULARY, 2.5), (5, 1.5)])
def test_loss_and_gradients_are_those_of_the_divergence_of_transformers_logits(
    folder: Path, tmp_path: Path, count: int, temperature: float
) -> None:
    result, _, gradients, batch = step(settings(folder, tmp_path, top_k=count, temperature=temperature))
    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        for name in ("student", "teacher")
    )
    tokens = torch.from_numpy(batch.tokens)
    theirs = teacher(tokens).logits.detach()
    kept = theirs.topk(count).indices
    p = (theirs.gather(-1, kept) / temperature).softmax(-1)
    q = (student(tokens).logits / temperature).log_softmax(-1).gather(-1, kept)
    loss = temperature**2 * (p * (p.log() - q)).sum(-1).mean()
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in student.named_parameters():
        error = (assemble_tensor(gradients[name]) - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error < 1e-5


def test_layouts_make_the_same_step_and_files_made_in_one_serve_another(folder: Path, tmp_path: Path) -> None:
    layouts = [
        ({"tp": 2, "sp": True, "cp": 2}, {"teacher_logits": "live", "top_k": 20}),
        ({"pp": 2, "zero": 2}, {"temperature": 2.0}),
        ({"tp": 4}, {"top_k": 7}),
        ({"zero": 3}, {"teacher_logits": "live"}),
    ]
    raws = [settings(folder, tmp_path / str(i), parallel, **more) for i, (parallel, more) in enumerate(layouts)]
    assert run_ranks(in_layouts, 4, raws) == [[]] * 4
    cached, live = (
        step(settings(folder, tmp_path / "one", cache=str(tmp_path / "1" / "teacher"), teacher_logits=how))
        for how in ("cached", "live")
    )
    assert not (tmp_path / "one" / "teacher").exists()
    assert cached[0].loss == pytest.approx(live[0].loss, rel=1e-6)
    assert cached[0].grad_norm == pytest.approx(live[0].grad_norm, rel=1e-6)


def test_a_student_comes_nearer_to_its_teacher_and_validations_are_of_the_text(folder: Path, tmp_path: Path) -> None:
    raw = settings(folder, tmp_path, top_k=8) | {"optimizer": {"lr": 0.02}, "lr_schedule": {"name": "constant"}}
    raw["train"] = {"steps": 12, "eval_every": 12, "eval_steps": 1}
    asked = {**raw, "objective": {**raw["objective"], "ask_only": True}}
    assert run_training(RunConfig.parse(resolve_run_config(asked)), RankInfo()).step == 0
    assert list((tmp_path / "teacher").rglob("*.safetensors"))
    assert not (tmp_path / "metrics.jsonl").exists()
    run_training(RunConfig.parse(resolve_run_config(raw)), RankInfo())
    told = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert told[-1]["loss"] < 0.8 * told[0]["loss"]
    assert told[-1]["valid_loss"] > np.log(VOCABULARY)  # random text has nothing to learn


def test_what_does_not_fit_is_told(folder: Path, tmp_path: Path) -> None:
    raw = settings(folder, tmp_path)
    write_model(tmp_path / "other", 3, vocab_size=VOCABULARY + 1)
    raw["objective"]["teacher"] = str(tmp_path / "other")
    with pytest.raises(ConfigError, match="it has 33 tokens, the model 32"):
        run_training(RunConfig.parse(resolve_run_config(raw)), RankInfo())
    raw["objective"] = {"kind": "distill", "top_k": 99}
    with pytest.raises(ConfigError, match=r"objective\.teacher: is required") as told:
        RunConfig.parse(resolve_run_config(raw))
    assert "objective.top_k = 99: must be at most model.vocab_size = 32" in told.value.message
