"""A run that trains an adapter of low rank: what it saves, how it goes on, what it makes of its base."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.derive_checkpoint import average_checkpoints, copy_checkpoint_without_training_state
from mega_ckpt.source import open_weight_source, open_weights_with_adapter
from mega_ckpt.store import Checkpoint, latest_checkpoint, parse_location
from mega_common.errors import CheckpointError, ConfigError
from mega_data.batch_loader import StepBatch
from mega_trainer.config.run_config import RunConfig
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.distributed.process_groups import ParallelGroups, RankInfo
from mega_trainer.distributed.rng import SeededDropout
from mega_trainer.job.step_result import StepResult
from mega_trainer.objectives.training_objective import count_step_tokens
from mega_trainer.optim.sharded_optimizer import ShardedOptimizer
from mega_trainer.run.train_state import TrainState
from mega_trainer.run.train_step import train_step
from mega_trainer.run.training_run import build_training_state_and_executor, initialize_training_state, run_training
from mega_trainer.verify.case_comparison import assemble_tensor
from mega_trainer.verify.synthetic_batches import make_synthetic_batch

CONSTANT = {"name": "constant"}
Settings = Callable[..., dict[str, Any]]


def trained(raw: dict[str, Any]) -> TrainState:
    return run_training(RunConfig.parse(raw), RankInfo())


def bits(state: TrainState) -> dict[str, list[torch.Tensor]]:
    return {name: [box.tensor.clone() for box in held.boxes] for name, held in state.checkpoint_tensors().items()}


def checkpoint_of(raw: dict[str, Any]) -> Checkpoint:
    newest = latest_checkpoint(parse_location(raw["output"]) / "checkpoints")
    assert newest is not None
    return Checkpoint.open_folder(newest)


@pytest.fixture
def tuning(settings: Settings, tmp_path: Path) -> Settings:
    """A run with an adapter beside the weights of a short run."""
    base = settings(train={"steps": 2}, output=str(tmp_path / "base"))
    trained(base)

    def make(**sections: Any) -> dict[str, Any]:
        lora = {"rank": 3, "modules": ["q_proj", "down_proj"], **sections.pop("lora", {})}
        return settings(init_from=base["output"], lora=lora, **{"lr_schedule": CONSTANT, **sections})

    return make


@pytest.mark.parametrize(("precision", "dora"), [("fp32", True), ("bf16", False)])
def test_an_adapter_alone_is_saved_and_goes_on_bitwise(
    tuning: Settings, tmp_path: Path, precision: str, dora: bool
) -> None:
    straight = tuning(precision=precision, lora={"dora": dora}, train={"steps": 4}, output=str(tmp_path / "straight"))
    halves = {**straight, "output": str(tmp_path / "halves")}
    whole = bits(trained(straight))
    trained({**halves, "train": {"steps": 2}})
    again = bits(trained({**halves, "train": {"steps": 4}}))
    assert whole.keys() == again.keys()
    assert all(torch.equal(a, b) for name in whole for a, b in zip(whole[name], again[name], strict=True))
    saved = {key for key in checkpoint_of(straight).tensor_keys() if "lora" not in key}
    assert not saved
    assert len(checkpoint_of(straight).tensor_keys("weights/")) == 2 * 2 * (2 + dora)


def test_what_is_read_of_a_run_is_the_base_with_the_adapter_in_it(tuning: Settings, tmp_path: Path) -> None:
    raw = tuning(train={"steps": 3}, lora={"modules_to_save": ["lm_head"], "rslora": True, "alpha": 4})
    state = trained(raw)
    base, merged = open_weight_source(tmp_path / "base"), open_weight_source(tmp_path / "run")
    saved = checkpoint_of(raw)
    name = "model.layers.1.mlp.down_proj"
    a, b = (saved.read_tensor(f"weights/{name}.lora_{part}.weight") for part in "AB")
    assert b.abs().max() > 0
    torch.testing.assert_close(
        merged.read_tensor(f"{name}.weight"), base.read_tensor(f"{name}.weight") + 4 / 3**0.5 * b @ a
    )
    part = merged.read_tensor_slice(f"{name}.weight", (3, 5), (7, 9))
    torch.testing.assert_close(part, merged.read_tensor(f"{name}.weight")[3:10, 5:14])
    assert torch.equal(merged.read_tensor("lm_head.weight"), saved.read_tensor("weights/lm_head.weight"))
    assert not torch.equal(merged.read_tensor("lm_head.weight"), base.read_tensor("lm_head.weight"))
    assert torch.equal(merged.read_tensor("model.norm.weight"), base.read_tensor("model.norm.weight"))
    assert all(not parameter.requires_grad for parameter in [state.stages[0].head.norm.weight])


def test_magnitudes_start_from_the_lengths_of_the_base_s_rows(tuning: Settings, tmp_path: Path) -> None:
    trained(tuning(train={"steps": 1}, lora={"dora": True}, optimizer={"lr": 1e-12}))
    base, merged = open_weight_source(tmp_path / "base"), open_weight_source(tmp_path / "run")
    for name in base.tensor_names():
        torch.testing.assert_close(merged.read_tensor(name), base.read_tensor(name))
    name = "model.layers.1.mlp.down_proj"
    found = checkpoint_of({"output": str(tmp_path / "run")}).read_tensor(f"weights/{name}.lora_magnitude_vector")
    torch.testing.assert_close(found, base.read_tensor(f"{name}.weight").norm(dim=1))
    part = merged.read_tensor_slice(f"{name}.weight", (3, 5), (7, 9))
    torch.testing.assert_close(part, merged.read_tensor(f"{name}.weight")[3:10, 5:14])


def test_the_average_of_adapters_is_that_of_the_models_with_them(tuning: Settings, tmp_path: Path) -> None:
    """Whatever their ranks: the mean of two products of low rank has no such form."""
    for name, lora in {"one": {"rank": 2}, "two": {"rank": 3, "modules": ["o_proj"]}}.items():
        trained(tuning(train={"steps": 2}, lora=lora, output=str(tmp_path / name)))
    average_checkpoints([tmp_path / "one", tmp_path / "two"], tmp_path / "mean", weights=[1, 3])
    one, two, mean = (open_weight_source(tmp_path / name) for name in ("one", "two", "mean"))
    for name in mean.tensor_names():
        torch.testing.assert_close(mean.read_tensor(name), one.read_tensor(name) / 4 + two.read_tensor(name) * 0.75)
    for name in ("q_proj", "o_proj"):
        matrix = f"model.layers.0.self_attn.{name}.weight"
        assert not torch.equal(mean.read_tensor(matrix), open_weight_source(tmp_path / "base").read_tensor(matrix))


def test_another_base_is_refused_and_one_that_is_gone_is_told(
    tuning: Settings, settings: Settings, tmp_path: Path
) -> None:
    raw = tuning(train={"steps": 1})
    trained(raw)
    other = settings(train={"steps": 2, "seed": 5}, output=str(tmp_path / "other"))
    trained(other)
    with pytest.raises(CheckpointError, match="other has other weights"):
        trained({**raw, "train": {"steps": 2}, "init_from": other["output"]})
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(CheckpointError, match="base of the adapter cannot be opened") as told:
        open_weight_source(tmp_path / "run")
    assert "merge-adapter" in str(told.value.hint)


def test_what_cannot_be_is_told_at_once(tuning: Settings, settings: Settings) -> None:
    with pytest.raises(ConfigError, match="'q_projj' must match a projection of the model"):
        trained(tuning(lora={"modules": ["q_projj"]}))
    with pytest.raises(ConfigError, match="requires pretrained weights"):
        trained(settings(lora={"rank": 2}))
    with pytest.raises(ConfigError, match=r"is frozen and model\.layers\.0\.self_attn\.q_proj\.weight is not"):
        trained(settings(train={"freeze": ["*.k_proj.*"]}))
    with pytest.raises(ConfigError, match="must leave trainable weights"):
        trained(settings(train={"freeze": ["*"]}))
    raw = tuning(train={"steps": 1})
    trained(raw)
    with pytest.raises(ConfigError, match=r"lora\.rank: 3 -> 4"):
        trained({**raw, "train": {"steps": 2}, "lora": {**raw["lora"], "rank": 4}})
    with pytest.raises(CheckpointError, match="must be the checkpoint of a full model, not of an adapter"):
        copy_checkpoint_without_training_state(raw["output"], f"{raw['output']}-pruned")


def test_frozen_tensors_stay_as_they_are_and_have_no_moments(settings: Settings, tmp_path: Path) -> None:
    frozen = ["model.embed_tokens.*", "*.mlp.*"]
    trained(settings(lr_schedule=CONSTANT, train={"steps": 1, "freeze": frozen}))
    first = checkpoint_of(settings())
    before = {key: first.read_tensor(key) for key in first.tensor_keys("weights/")}
    trained(settings(lr_schedule=CONSTANT, train={"steps": 3, "freeze": frozen}))
    after = checkpoint_of(settings())
    still = {key for key, value in before.items() if torch.equal(value, after.read_tensor(key))}
    assert still == {key for key in before if "embed_tokens" in key or ".mlp." in key}
    assert not [key for key in after.tensor_keys("optimizer/") if "embed_tokens" in key or ".mlp." in key]


def first_step(raw: dict[str, Any]) -> tuple[StepBatch, StepResult, ShardedOptimizer]:
    """A step of a run with two samples, whose weights stay, and what has its gradients."""
    config = RunConfig.parse({**raw, "batch": {"micro": 2, "global": 2}})
    state, executor = build_training_state_and_executor(config, ParallelGroups(), torch.device("cpu"))
    initialize_training_state(state, None, ParallelGroups().world, None)
    batch = make_synthetic_batch(config, 0, 0, 1, closed=False)
    batch = replace(batch, position_ids=np.broadcast_to(np.arange(16), batch.tokens.shape))
    micro = list(split_micro_batches(batch, config, torch.device("cpu")))
    tokens = count_step_tokens(batch, 0, ParallelGroups())
    return batch, train_step(executor, state.optimizer, micro, tokens=tokens, lr=0.0, clip=0.0), state.optimizer


def check_is_peft_s(step: tuple[StepBatch, StepResult, ShardedOptimizer], theirs: torch.nn.Module) -> None:
    """Loss, and gradients of the adapter, are those of PEFT's model."""
    batch, result, optimizer = step
    logits = theirs(torch.from_numpy(batch.tokens)).logits
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), torch.from_numpy(batch.labels), reduction="none")
    weights = torch.from_numpy(batch.loss_weights)
    loss = (losses * weights).sum() / weights.sum()
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    expected = {
        name.removeprefix("base_model.model.")
        .replace(".default", "")
        .replace("vector.weight", "vector"): parameter.grad
        for name, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    found = optimizer.gradients_by_name()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(assemble_tensor(found[name]), gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dropout", "dora"), [(0.0, False), (0.3, False), (0.0, True)])
def test_gradients_are_peft_s(settings: Settings, tmp_path: Path, dropout: float, dora: bool) -> None:
    """With dropout, by the same masks: one for the projections that one product makes."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    trained(settings(train={"steps": 1}, output=str(tmp_path / "base")))
    convert_checkpoint(tmp_path / "base", tmp_path / "hf", "hf")
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    wanted = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, lora_dropout=dropout, use_dora=dora
    )
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), wanted)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.linspace(0.5, 1.5, len(parameter)))
    theirs.save_pretrained(tmp_path / "adapter")
    lora = {
        "rank": 3,
        "alpha": 5,
        "modules": targets,
        "dropout": dropout,
        "dora": dora,
        "init_from": str(tmp_path / "adapter"),
    }
    raw = settings(init_from=str(tmp_path / "hf"), lora=lora, data={"order": "stable"})
    step = first_step(raw)
    drops = SeededDropout(RunConfig.parse(raw).train.seed, [int(sample) for sample in step[0].sample_ids], [range(16)])
    for name, module in theirs.named_modules() if dropout else ():
        if isinstance(module, torch.nn.Dropout) and "lora_dropout" in name:
            site = name.removeprefix("base_model.model.").replace("v_proj", "q_proj").split(".lora_dropout")[0]
            module.forward = lambda x, site=f"{site}.lora": drops.drop_projection_inputs(x, dropout, site, x.shape[-1])
    check_is_peft_s(step, theirs)


@pytest.mark.parametrize(
    ("options", "lora", "refused"),
    [
        ({}, {}, ""),
        ({"modules_to_save": ["lm_head"]}, {"modules_to_save": ["lm_head"]}, ""),
        ({"modules_to_save": ["lm_head"]}, {}, r"tensor lm_head.weight is not trained by this run"),
        ({"target_modules": ["q_proj", "lm_head"]}, {}, r"tensor lm_head.weight is not trained by this run"),
        ({"target_modules": ["q_proj", "k_proj"]}, {}, r"tensor .*k_proj\.lora_A.* is not trained by this run"),
        ({"trainable_token_indices": [1, 2]}, {}, r"tensor model\.embed_tokens\.weight is not trained"),
        ({}, {"alpha": 8.0}, "trained with scale 2, which conflicts with scale 2.66667"),
        ({"use_rslora": True}, {}, "trained with scale 3.4641, which conflicts with scale 2"),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 3}}, {}, r"layers\.1.*scale 1, which conflicts"),
        ({"lora_alpha": 12, "use_rslora": True}, {"alpha": 12, "rslora": True}, ""),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_run_starts_from_all_of_an_adapter_of_peft_s(
    options: dict[str, Any], lora: dict[str, Any], refused: str, settings: Settings, tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    trained(settings(train={"steps": 1}, output=str(tmp_path / "base")))
    convert_checkpoint(tmp_path / "base", tmp_path / "hf", "hf")
    wanted = peft.LoraConfig(**{"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]} | options)
    theirs = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), wanted)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.01 if parameter.requires_grad else 0)
    theirs.save_pretrained(tmp_path / "adapter")
    own = {"rank": 3, "alpha": 6, "modules": ["q_proj"], "init_from": str(tmp_path / "adapter")} | lora
    raw = settings(init_from=str(tmp_path / "hf"), lora=own, train={"steps": 1}, optimizer={"lr": 1e-12})
    if refused:
        with pytest.raises(CheckpointError, match=refused):
            trained(raw)
        return
    trained(raw)
    expected = open_weights_with_adapter(tmp_path / "adapter", tmp_path / "hf")
    found = open_weight_source(raw["output"])
    for name in found.tensor_names():
        torch.testing.assert_close(found.read_tensor(name), expected.read_tensor(name), rtol=1e-5, atol=1e-6)
