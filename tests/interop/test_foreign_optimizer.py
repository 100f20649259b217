"""Runs of other trainers, saved by themselves where they are here, else laid out as they do: mega makes the next step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.formats.hf_source import HfSource
from mega_ckpt.source import open_weight_source
from mega_ckpt.store import Checkpoint
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.run.training_run import run_training

TOKENS = np.random.default_rng(0).integers(0, 48, (4, 17))
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.0}


SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    told = model(tokens[:, :-1])
    logits = told if isinstance(told, torch.Tensor) else told.logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    loss_of(model, torch.tensor(TOKENS[number : number + 1])).backward()
    optimizer.step()
    optimizer.zero_grad()


def save(model: transformers.PreTrainedModel, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=folder)
    model.config.save_pretrained(folder)


def llama(**more: Any) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **more))


def save_colossal(model: transformers.PreTrainedModel, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """As `booster.save_model` and `save_optimizer` with `shard=True`: shards of both, and what the groups are."""
    state, saved = model.state_dict(), optimizer.state_dict()
    for inside, name, parts in (("modeling", "model", state), ("optimizer", "optim", saved["state"])):
        (folder / inside).mkdir(parents=True)
        places = {key: f"pytorch_{name}-{1 + number // 7:05d}.bin" for number, key in enumerate(parts)}
        for file in set(places.values()):
            torch.save({key: parts[key] for key in parts if places[key] == file}, folder / inside / file)
        index = {"metadata": {}, "weight_map": {str(key): file for key, file in sorted(places.items())}}
        (folder / inside / f"pytorch_{name}.bin.index.json").write_text(json.dumps(index))
    torch.save(saved["param_groups"], folder / "optimizer/pytorch_optim_group.bin")
    model.config.save_pretrained(folder / "modeling")


def by_torch(tmp_path: Path, name: str) -> tuple[Path, Path]:
    """A model after three steps and after four, in folders as that trainer leaves them."""
    write, inside, tied = {"fsdp": (save, "", True), "colossalai": (save_colossal, "modeling", False)}[name]
    model = llama(tie_word_embeddings=tied)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for number in range(4):
        step(model, optimizer, number)
        if number >= 2:
            write(model, optimizer, tmp_path / f"after-{number + 1}")
    return tmp_path / "after-3" / inside, tmp_path / "after-4" / inside


def by_litgpt(tmp_path: Path, name: str) -> tuple[Path, Path]:
    """The same by LitGPT's model, and its writers of weights and settings; begun from a model of the hub, or from nothing."""
    fabric = pytest.importorskip("lightning.fabric", reason="LitGPT is not installed").Fabric(
        accelerator="cpu", devices=1
    )
    lit, files = pytest.importorskip("litgpt.model"), pytest.importorskip("litgpt.utils")
    llama().config.save_pretrained(tmp_path / "downloaded")
    config = lit.Config(
        n_layer=SIZES["num_hidden_layers"], n_embd=SIZES["hidden_size"], n_head=SIZES["num_attention_heads"],
        n_query_groups=SIZES["num_key_value_heads"], intermediate_size=SIZES["intermediate_size"],
        padded_vocab_size=SIZES["vocab_size"], block_size=64, rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", norm_eps=1e-6, mlp_class_name="LLaMAMLP",
    )  # fmt: skip
    model = fabric.setup(lit.GPT(config))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), **ADAM))
    for number in range(4):
        step(model, optimizer, number)
        if number >= 2:
            folder = tmp_path / f"after-{number + 1}"
            folder.mkdir()
            state = {"model": model, "optimizer": optimizer, "step_count": number + 1, "hparams": {"out_dir": tmp_path}}
            fabric.save(folder / "lit_model.pth", state)
            if name == "litgpt":
                files.copy_config_files(tmp_path / "downloaded", folder)
            files.save_config(config, folder)
    return tmp_path / "after-3", tmp_path / "after-4"


def by_lightning(tmp_path: Path, _: str) -> tuple[Path, Path]:
    """The same by Lightning's Trainer."""
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()

        def training_step(self, tokens: torch.Tensor, number: int) -> torch.Tensor:
            return loss_of(self.net, tokens)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), **ADAM)

        def on_train_batch_end(self, *_: Any) -> None:
            folder = tmp_path / f"after-{self.global_step}"
            self.net.config.save_pretrained(folder)
            self.trainer.save_checkpoint(folder / "last.ckpt")

    quiet = {f"enable_{name}": False for name in ("checkpointing", "progress_bar", "model_summary")}
    trainer = lightning.Trainer(max_steps=4, accelerator="cpu", default_root_dir=tmp_path, logger=False, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.tensor(TOKENS)))
    return tmp_path / "after-3", tmp_path / "after-4"


def by_the_hub(tmp_path: Path, name: str) -> tuple[Path, Path]:
    """The same by transformers' Trainer, whose optimizer has two groups, or by Accelerate's `save_state`."""
    from accelerate import Accelerator

    model = llama(tie_word_embeddings=name == "trainer, tied")
    if name == "accelerate":
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **ADAM))
        for number in range(4):
            step(model, optimizer, number)
            accelerator.save_state(str(tmp_path / f"checkpoint-{number + 1}"))
            model.config.save_pretrained(tmp_path / f"checkpoint-{number + 1}")
    else:
        (one, other), eps = ADAM["betas"], 1e-8
        how = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=4, save_steps=1, per_device_train_batch_size=1, learning_rate=ADAM["lr"],
            lr_scheduler_type="constant", weight_decay=0.0, adam_beta1=one, adam_beta2=other, adam_epsilon=eps,
            max_grad_norm=0.0, use_cpu=True, report_to=[], disable_tqdm=True, train_sampling_strategy="sequential",
        )  # fmt: skip
        rows = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in TOKENS]
        transformers.Trainer(model, how, train_dataset=rows).train()  # type: ignore[arg-type]
    return tmp_path / "checkpoint-3", tmp_path / "checkpoint-4"


@pytest.fixture(scope="session")
def deepspeed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed itself writes of each ZeRO stage, on two ranks."""
    folder = tmp_path_factory.mktemp("deepspeed")
    (folder / "given.json").write_text(json.dumps({"tokens": TOKENS.tolist(), "sizes": SIZES, "adam": ADAM}))
    script, installed = Path(__file__).parent / "written_by_deepspeed.py", Path(sys.prefix) / "deepspeed"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, folder]
    environment = {**os.environ, "DEEPSPEED": str(installed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_next_step_is_the_one_that_deepspeed_makes(tmp_path: Path, deepspeed: Path, stage: int) -> None:
    assert_the_next_step_is_theirs(tmp_path, deepspeed / str(stage) / "after-3", deepspeed / str(stage) / "after-4")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("fsdp", by_torch), ("colossalai", by_torch), ("litgpt", by_litgpt), ("litgpt from nothing", by_litgpt),
        ("lightning", by_lightning), ("accelerate", by_the_hub), ("trainer", by_the_hub), ("trainer, tied", by_the_hub),
    ],
)  # fmt: skip
def test_the_next_step_is_the_one_that_they_make(
    tmp_path: Path, name: str, make: Callable[[Path, str], tuple[Path, Path]]
) -> None:
    assert_the_next_step_is_theirs(tmp_path, *make(tmp_path, name))


def assert_the_next_step_is_theirs(tmp_path: Path, theirs: Path, after: Path) -> None:
    """That a run of ours goes on from one folder as theirs did to the other."""
    with IndexedWriter(tmp_path / "tokens", np.dtype(np.uint16)) as writer:
        writer.add_document(TOKENS[3].astype(np.uint16))
    convert_checkpoint(theirs, tmp_path / "ours", "mega", verify=True)
    config = {
        "model": Checkpoint.open_folder(tmp_path / "ours").model.model_dump(),
        "data": {"train": str(tmp_path / "tokens"), "seq_length": 16, "kind": "documents", "split": "1"},
        "batch": {"micro": 1, "global": 1},
        "train": {"steps": 4},
        "optimizer": {**ADAM, "betas": list(ADAM["betas"]), "clip_grad": 0.0},
        "lr_schedule": {"name": "constant"},
        "precision": "fp32",
        "checkpoint": {"load": str(tmp_path / "ours"), "async": False},
        "log": {"tensorboard": False},
        "device": "cpu",
        "output": str(tmp_path / "run"),
    }
    assert run_training(RunConfig.parse(config), RankInfo()).step == 4
    found, expected = open_weight_source(tmp_path / "run"), open_weight_source(after)
    made = Checkpoint.open_folder(tmp_path / "run/checkpoints/step-00000004")
    assert isinstance(expected, HfSource)
    training = expected.read_training_state(torch.float32)
    assert training is not None
    assert training.step == 4
    for key in expected.tensor_names():
        torch.testing.assert_close(found.read_tensor(key), expected.read_tensor(key), rtol=1e-4, atol=1e-6)
        for kind, moments in training.tensors.items():
            shape = moments.tensor_shape(key)
            moment = moments.read_tensor_slice(key, (0,) * len(shape), shape)
            torch.testing.assert_close(made.read_tensor(f"optimizer/{kind}/{key}"), moment)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_that_are_cast_have_what_they_were_beside_them(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    step(model, optimizer, 0)
    save(model, optimizer, tmp_path / "theirs")
    convert_checkpoint(
        tmp_path / "theirs", tmp_path / "ours", "mega", options=ConvertOptions(dtype=torch.bfloat16), verify=True
    )
    made = Checkpoint.open_folder(tmp_path / "ours")
    assert (made.step, made.tensor_dtype("weights/lm_head.weight")) == (1, torch.bfloat16)
    assert torch.equal(made.read_tensor("optimizer/main/lm_head.weight"), model.lm_head.weight)
