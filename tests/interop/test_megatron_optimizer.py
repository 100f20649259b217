"""Megatron's optimizers: what they have in memory when they save is what mega goes on with, and the next step is theirs."""

from __future__ import annotations

import logging
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_oracle
import numpy as np
import pytest
import torch
from megatron_oracle import BASE, EXPERTS, GROUPED, run
from torch import Tensor

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.source import open_weight_source
from mega_ckpt.store import Checkpoint
from mega_common.progress_logging import logger
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.run import training_loop
from mega_trainer.run.train_state import TrainState
from mega_trainer.run.training_run import run_training as train

pytest.importorskip("megatron.core", reason="the reference implementation")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # the first test waits for four ranks

# name: what differs from BASE, and how Megatron trains and saves it
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({**GROUPED, "vocab_size": 61, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}, {}),
    "bf16": ({"untie_embeddings_and_output_weights": False, "qk_layernorm": True}, {"bf16": True}),
    "experts": ({**GROUPED, **EXPERTS, "add_bias_linear": True, "softmax_type": "learnable"}, {"tp": 1, "ep": 2}),
    "distributed": ({**GROUPED, "vocab_size": 61}, {"pp": 1, "bf16": True, "sharding": "fully_reshardable"}),
    "buckets": ({}, {"pp": 1, "bf16": True, "sharding": "dp_reshardable"}),
}
WHOLE = [name for name in CASES if name != "buckets"]
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each, converted to <name>/ours, and what was in memory as <name>-<what>."""
    root, jobs = tmp_path_factory.mktemp("optimizers"), []
    for name, (changes, how) in CASES.items():
        layout = {"tp": 2, "pp": 2, "ep": 1, "bf16": False, "sharding": None} | how
        places = {"folder": str(root / name / "theirs"), "memory": str(root / name / "memory")}
        jobs.append({"do": "train", "args": BASE | changes, **layout, **places})
    run(jobs, root)
    for name in CASES:
        convert_checkpoint(root / name / "theirs", root / name / "ours", "mega", verify=True)
    return root


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens"
    with IndexedWriter(path, np.dtype(np.uint16)) as writer:
        for document in np.random.default_rng(0).integers(0, 60, (40, 50)):
            writer.add_document(document.astype(np.uint16))
    return path


def in_memory(root: Path, name: str, what: str) -> dict[str, Tensor]:
    source = open_weight_source(root / name / f"memory-{what}")
    return {key: source.read_tensor(key) for key in source.tensor_names()}


def resumed(root: Path, name: str, tokens: Path, *, steps: int) -> TrainState:
    """A run of mega that goes on from the converted checkpoint by so many steps; with none, it ends before its first."""
    with mock.patch.object(training_loop, "islice", lambda batches, left: islice(batches, steps)):
        return _run_from(root, name, tokens, steps)


def _run_from(root: Path, name: str, tokens: Path, steps: int) -> TrainState:
    adam = megatron_oracle.ADAM
    return train(
        RunConfig.parse(
            {
                "model": Checkpoint.open_folder(root / name / "ours").model.model_dump(),
                "data": {"train": str(tokens), "seq_length": 16},
                "batch": {"micro": 2, "global": 4},
                "train": {"steps": 4},
                "optimizer": {
                    "lr": adam["lr"], "weight_decay": adam["weight_decay"], "eps": adam["adam_eps"],
                    "betas": [adam["adam_beta1"], adam["adam_beta2"]],
                },
                "lr_schedule": {"name": "constant"},
                "precision": "bf16" if CASES[name][1].get("bf16") else "fp32",
                "checkpoint": {"load": str(root / name / "ours"), "async": False},
                "log": {"tensorboard": False},
                "device": "cpu",
                "output": str(tokens.parent / f"{name}-{steps}"),
            }
        ),
        RankInfo(),
    )  # fmt: skip


def main_weights(state: TrainState) -> dict[str, Tensor]:
    tensors = state.checkpoint_tensors()
    prefix = "optimizer/main/" if any(key.startswith("optimizer/main/") for key in tensors) else "weights/"
    return whole_tensors({key.removeprefix(prefix): held for key, held in tensors.items() if key.startswith(prefix)})


def whole_tensors(tensors: dict[str, Any]) -> dict[str, Tensor]:
    out = {}
    for name, held in tensors.items():
        out[name] = torch.empty(held.shape)
        for box in held.boxes:
            window = tuple(slice(at, at + n) for at, n in zip(box.offset, box.tensor.shape, strict=True))
            out[name][window] = box.tensor
    return out


@pytest.mark.parametrize("name", WHOLE)
def test_what_was_in_memory_is_what_mega_has(root: Path, name: str) -> None:
    ours = Checkpoint.open_folder(root / name / "ours")
    assert (ours.step, ours.trainer_state["optimizer_steps"], ours.trainer_state["consumed_samples"]) == (3, 3, 24)
    kinds = (*MOMENTS, "main") if CASES[name][1].get("bf16") else MOMENTS
    assert {key.split("/")[1] for key in ours.tensor_keys("optimizer/")} == {*kinds}
    for kind in kinds:
        expected = in_memory(root, name, kind)
        assert {
            key.removeprefix(f"optimizer/{kind}/") for key in ours.tensor_keys(f"optimizer/{kind}/")
        } == expected.keys()
        for key, tensor in expected.items():
            assert tensor.abs().max() > 0
            assert torch.equal(ours.read_tensor(f"optimizer/{kind}/{key}"), tensor), f"{kind} of {key}"


@pytest.mark.parametrize("name", WHOLE)
def test_the_next_step_is_the_one_that_megatron_makes(root: Path, name: str, tokens: Path) -> None:
    """Both with their weights for gradients."""
    state = resumed(root, name, tokens, steps=0)
    assert (state.step, state.consumed_samples, state.optimizer.update_count) == (3, 24, 3)
    for slot in state.optimizer.slots:
        slot.shard.grads.copy_(slot.shard.weights)
    state.optimizer.apply_update(megatron_oracle.ADAM["lr"], 1.0)
    found, expected, before = main_weights(state), in_memory(root, name, "after"), in_memory(root, name, "main")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert not torch.equal(tensor, before[key])
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-7)


def test_a_run_makes_the_step_of_adam(root: Path, tokens: Path) -> None:
    """On data, from the moments that Megatron had; its gradients go to torch's own optimizer."""
    state = resumed(root, "fp32", tokens, steps=1)
    found, gradients = main_weights(state), whole_tensors(state.optimizer.gradients_by_name())
    weights = in_memory(root, "fp32", "main")
    moments = {kind: in_memory(root, "fp32", kind) for kind in MOMENTS}
    for key, weight in weights.items():
        weight.grad = gradients[key]
        decay = megatron_oracle.ADAM["weight_decay"] if weight.dim() > 1 else 0.0
        adam = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=decay)
        adam.state[weight] = {"step": torch.tensor(3.0)} | {kind: held[key].clone() for kind, held in moments.items()}
        adam.step()
        torch.testing.assert_close(found[key], weight, rtol=1e-6, atol=1e-7)


def test_buckets_stay_behind(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger.name):
        convert_checkpoint(root / "buckets" / "theirs", tmp_path / "ours", "mega")
    assert [record.message for record in caplog.records] == [
        "only the weights are converted: buckets of the distributed optimizer can be loaded only by the ranks that saved them "
        "(save with --dist-ckpt-optim-fully-reshardable in Megatron)"
    ]
    assert not Checkpoint.open_folder(tmp_path / "ours").tensor_keys("optimizer/")
