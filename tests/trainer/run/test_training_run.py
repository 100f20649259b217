"""Runs from configuration to checkpoint, in this process."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.derive_checkpoint import copy_checkpoint_without_training_state
from mega_ckpt.source import open_weight_source
from mega_ckpt.store import Checkpoint, latest_checkpoint, parse_location
from mega_cli.main import main
from mega_common.errors import CheckpointError, ConfigError, DataError, TrainingError, TrainingInterrupted
from mega_common.model_config import MoeConfig
from mega_common.object_store import ObjectStoreError
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.plan.layout_search import make_planned_run
from mega_trainer.plan.machine import load_machine
from mega_trainer.run import train_step as step_module
from mega_trainer.run import training_loop
from mega_trainer.run.train_state import TrainState
from mega_trainer.run.training_run import run_training

Settings = Callable[..., dict[str, Any]]


def trained(raw: dict[str, Any]) -> TrainState:
    return run_training(RunConfig.parse(raw), RankInfo())


def bits(state: TrainState) -> dict[str, list[torch.Tensor]]:
    return {name: [box.tensor.clone() for box in held.boxes] for name, held in state.checkpoint_tensors().items()}


def same_bits(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True)
    )


def lines(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(raw["output"]) / "metrics.jsonl").read_text().splitlines()]


def test_routers_tell_what_they_do(settings: Settings, tmp_path: Path) -> None:
    raw = settings(train={"steps": 2})
    moe = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "aux_loss": 0.1, "z_loss": 0.01}
    routed = {**raw, "model": {**raw["model"], "moe": moe}, "output": str(tmp_path / "routed")}
    trained(raw)
    trained(routed)
    keys = {"aux_loss", "z_loss", "expert_load_max", "expert_load_min", "drop_rate", "router_entropy"}
    for dense, sparse in zip(lines(raw), lines(routed), strict=True):
        assert not keys & dense.keys()
        assert keys <= sparse.keys()
        assert sparse["expert_load_min"] <= 1 <= sparse["expert_load_max"]
        assert sparse["drop_rate"] == 0


def test_what_a_balanced_choice_leaves_behind_is_told_at_export(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moe = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "sinkhorn": True, "normalize": False}
    raw = settings(train={"steps": 2})
    raw["model"] = {**raw["model"], "moe": moe, "qk_norm": True}
    trained(raw)
    convert_checkpoint(tmp_path / "run", tmp_path / "hf", "hf")
    assert "model.moe.sinkhorn applies only in training" in caplog.text
    assert open_weight_source(tmp_path / "hf").model.moe == MoeConfig.model_validate({**moe, "sinkhorn": False})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_resume_is_bitwise(settings: Settings, tmp_path: Path, precision: str) -> None:
    straight = settings(precision=precision, train={"steps": 6}, output=str(tmp_path / "straight"))
    model = {**straight["model"], "residual_dropout": 0.1, "attention_dropout": 0.1}
    straight["model"] = model
    whole = bits(trained(straight))
    halves = {**straight, "output": str(tmp_path / "halves"), "lr_schedule": {"decay_steps": 6}}
    trained({**halves, "train": {"steps": 3}})
    resumed = trained({**halves, "train": {"steps": 6}})
    assert resumed.step == 6
    assert resumed.consumed_samples == 24
    assert same_bits(whole, bits(resumed))
    assert [line["loss"] for line in lines(straight)] == [line["loss"] for line in lines(halves)]


def test_a_run_goes_on_in_its_order_and_a_changed_blend_with_what_is_next(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run.yaml that names no order: of a run that began with the file's, and of a new one."""
    tokens = str(tmp_path / "tokens")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"more{suffix}").write_bytes((tmp_path / f"tokens{suffix}").read_bytes())
    trained(settings(data={"order": "stable"}, train={"steps": 2}))
    blend = {"train": [tokens, {"path": str(tmp_path / "more"), "weight": 3, "max_epochs": 5}]}
    more: dict[str, Any] = {"checkpoint": {"every": 1}, "lr_schedule": {"decay_steps": 2}}
    with caplog.at_level("INFO", "mega"):
        for steps in (4, 5):
            state = trained(settings(data=blend, train={"steps": steps}, **more))
    resolved = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["data"]
    assert (state.config.data.order, resolved["order"]) == ("stable", "stable")
    assert resolved["begun"] == {"samples": 8, "read": {tokens: 8}}
    assert state.count_samples_read is not None
    assert state.count_samples_read(20) == {tokens: 11, str(tmp_path / "more"): 9}
    assert f"the blend changes at sample 8: {tokens} continues after 8 of its samples" in caplog.text
    told = lines(settings())[-1]
    epochs = [told[f"epochs/{tokens}"], told[f"epochs/{tmp_path / 'more'}"]]
    assert epochs[0] / epochs[1] == pytest.approx(11 / 9)
    assert trained(settings(output=str(tmp_path / "new"), train={"steps": 1})).config.data.order == "shuffled"


def test_a_run_on_packed_documents_resumes_bitwise(settings: Settings, tmp_path: Path) -> None:
    packed: dict[str, Any] = {"data": {"kind": "documents"}, "lr_schedule": {"decay_steps": 4}}
    whole = bits(trained(settings(train={"steps": 4}, output=str(tmp_path / "straight"), **packed)))
    for steps in (2, 4):
        resumed = trained(settings(train={"steps": steps}, output=str(tmp_path / "halves"), **packed))
    assert same_bits(whole, bits(resumed))


@pytest.mark.parametrize(
    "growth",
    [
        {"rampup": {"start": 2, "increment": 2, "samples": 13}},
        {"stages": [{"until": 6, "size": 2}, {"until": 10, "size": 4}, {"until": 16, "size": 6}]},
    ],
    ids=["rampup", "stages"],
)
def test_a_growing_batch_resumes_bitwise_and_reads_every_sample_once(
    settings: Settings, tmp_path: Path, growth: dict[str, Any]
) -> None:
    batch = {"micro": 2, "global": 8, **growth}
    more: dict[str, Any] = {"batch": batch, "lr_schedule": {"decay_steps": 8, "warmup_steps": 3}}
    straight = settings(train={"steps": 8, "eval_every": 4, "eval_steps": 1}, output=str(tmp_path / "straight"), **more)
    whole = bits(trained(straight))
    for steps in (3, 8):
        resumed = trained(settings(train={"steps": steps}, output=str(tmp_path / "halves"), **more))
    assert same_bits(whole, bits(resumed))
    told = lines(straight)
    assert [line["consumed_samples"] for line in told] == [2, 4, 6, 10, 16, 24, 32, 40]
    assert told[1]["lr"] == pytest.approx(1e-2 * 2 / 6)  # a third of the warmup's samples, which three steps read
    assert told[-1]["lr"] == pytest.approx(1e-2 * 0.5 * (1 + math.cos(math.pi * (32 - 6) / (40 - 6))))
    per_sample = [line["tokens_per_second"] * line["seconds"] / 16 for line in told]
    assert per_sample == pytest.approx([2, 2, 2, 4, 6, 8, 8, 8])


def test_checkpoints_on_an_object_store_resume_bitwise(settings: Settings, tmp_path: Path) -> None:
    straight = settings(train={"steps": 4}, output=str(tmp_path / "straight"))
    whole = bits(trained(straight))
    url = f"memory://bucket/{tmp_path.name}"
    halves = settings(
        output=str(tmp_path / "halves"), lr_schedule={"decay_steps": 4}, checkpoint={"path": url, "every": 1, "keep": 1}
    )
    trained({**halves, "train": {"steps": 2}})
    assert not (tmp_path / "halves" / "checkpoints").exists()
    assert latest_checkpoint(parse_location(url)) == f"{url}/step-00000002"
    assert same_bits(whole, bits(trained({**halves, "train": {"steps": 4}})))
    branch = settings(output=str(tmp_path / "branch"), train={"steps": 4}, checkpoint={"load": url})
    with pytest.raises(ConfigError, match=r"must be larger than the step of .*step-00000004, which is 4"):
        trained(branch)
    with pytest.raises(ConfigError, match=r"output = 's3://bucket/run'.*checkpoint\.path=s3://bucket/run"):
        RunConfig.parse(settings(output="s3://bucket/run"))


def test_old_checkpoints_that_cannot_be_removed_end_no_run(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ObjectStoreError("no answer")

    monkeypatch.setattr("mega_trainer.run.train_state.delete_old_checkpoints", refuse)
    url = f"memory://bucket/{tmp_path.name}"
    trained(settings(train={"steps": 2}, checkpoint={"path": url, "every": 1, "keep": 1}))
    assert "old checkpoints were not deleted: no answer" in caplog.text
    assert latest_checkpoint(parse_location(url)) == f"{url}/step-00000002"


def test_loss_falls_and_metrics_have_the_promised_keys(settings: Settings) -> None:
    raw = settings(train={"steps": 40, "eval_every": 20, "eval_steps": 2}, machine="h100")
    trained(raw)
    told = lines(raw)
    assert [line["step"] for line in told] == list(range(1, 41))
    promised = {"step", "consumed_samples", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
    assert all(promised <= line.keys() for line in told)
    assert {line["predicted_seconds"] for line in told} == {
        make_planned_run(RunConfig.parse(raw), 1, load_machine("h100")).predict_step_time().seconds
    }
    assert told[-1]["loss"] < 0.5 * told[0]["loss"]
    assert [line["step"] for line in told if "valid_loss" in line] == [20, 40]


def test_an_indexer_is_warmed_up_alone(settings: Settings, tmp_path: Path) -> None:
    """With the rest frozen by the patterns that the documentation has; then trained with it, over the selected tokens."""
    raw = settings(
        train={
            "steps": 12,
            "freeze": [
                "model.embed_tokens.*",
                "model.norm.*",
                "lm_head.*",
                "*layernorm*",
                "*.mlp.*",
                "*.self_attn.[!i]*",
            ],
        }
    )
    indexer = {"num_heads": 4, "head_dim": 8, "top_k": 4, "kl_loss": 1.0, "dense": True}
    mla = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    raw["model"] = {**raw["model"], "mla": {**mla, "indexer": indexer}}
    raw["model"].pop("num_kv_heads", None)
    trained(raw)
    told = [line["indexer_loss"] for line in lines(raw)]
    assert told[-1] < 0.9 * told[0]
    losses = [line["loss"] for line in lines(raw)]
    sparse = {**raw, "model": {**raw["model"], "mla": {**mla, "indexer": {**indexer, "dense": False}}}}
    sparse |= {"output": str(tmp_path / "sparse"), "train": {**raw["train"], "freeze": []}}
    trained(sparse)
    assert lines(sparse)[-1]["loss"] < losses[-1]


def test_further_tokens_are_learned_beside_the_next(settings: Settings, tmp_path: Path) -> None:
    raw = settings(train={"steps": 40, "eval_every": 20, "eval_steps": 2}, lr_schedule={"decay_steps": 40})
    mla = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    raw["model"] = {**raw["model"], "mla": mla, "mtp_layers": 2}
    whole = bits(trained(raw))
    told = lines(raw)
    for loss in ("loss", "mtp_loss"):
        assert told[-1][loss] < 0.6 * told[0][loss]
    assert told[-1]["loss"] != told[-1]["mtp_loss"]
    halves = {**raw, "output": str(tmp_path / "halves")}
    trained({**halves, "train": {**raw["train"], "steps": 20}})
    assert same_bits(whole, bits(trained(halves)))
    assert [line["mtp_loss"] for line in lines(halves)] == [line["mtp_loss"] for line in told]


def test_micro_batch_size_changes_nothing_but_rounding(settings: Settings, tmp_path: Path) -> None:
    one = settings(precision="fp64", batch={"micro": 1}, output=str(tmp_path / "one"))
    four = settings(precision="fp64", batch={"micro": 4}, output=str(tmp_path / "four"))
    trained(one)
    trained(four)
    for a, b in zip(lines(one), lines(four), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-12)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-12)


@pytest.mark.parametrize("recompute", [{"kind": "selective"}, {"kind": "full"}, {"kind": "full", "layers": 1}])
def test_recompute_is_bitwise(settings: Settings, tmp_path: Path, recompute: dict[str, Any]) -> None:
    plain = settings(output=str(tmp_path / "plain"))
    again = settings(output=str(tmp_path / "again"), recompute=recompute)
    for raw in (plain, again):
        raw["model"] = {**raw["model"], "residual_dropout": 0.2, "attention_dropout": 0.2}
    assert same_bits(bits(trained(plain)), bits(trained(again)))


def test_asynchronous_saves_hold_what_was_there_when_they_began(settings: Settings, tmp_path: Path) -> None:
    now = settings(output=str(tmp_path / "now"), checkpoint={"async": False, "every": 2})
    later = settings(output=str(tmp_path / "later"), checkpoint={"async": True, "every": 2})
    trained(now)
    trained(later)
    for step in (2, 4, 6):
        one, other = (
            Checkpoint.open_folder(Path(raw["output"]) / f"checkpoints/step-{step:08d}") for raw in (now, later)
        )
        assert list(one.tensor_keys()) == list(other.tensor_keys())
        assert all(torch.equal(one.read_tensor(key), other.read_tensor(key)) for key in one.tensor_keys())


def test_old_checkpoints_go(settings: Settings) -> None:
    raw = settings(checkpoint={"async": True, "every": 1, "keep": 2, "keep_every": 3})
    trained(raw)
    kept = sorted(path.name for path in (Path(raw["output"]) / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000005", "step-00000006"]


def test_a_run_that_began_from_another_resumes_from_its_own(settings: Settings, tmp_path: Path) -> None:
    longer = {"lr_schedule": {"decay_steps": 3}}
    trained(settings(train={"steps": 2}, checkpoint={"every": 1}, **longer))
    first = str(tmp_path / "run" / "checkpoints" / "step-00000001")
    branch = settings(output=str(tmp_path / "branch"), checkpoint={"load": first, "every": 1}, **longer)
    for steps in (2, 3):
        trained({**branch, "train": {"steps": steps}})
    assert [record["step"] for record in lines(branch)] == [2, 3]
    with pytest.raises(CheckpointError, match=r"step-00000001 is older than the newest checkpoint of .*step-00000002"):
        trained(settings(train={"steps": 2}, checkpoint={"load": first}))


def test_a_missing_checkpoint_that_was_asked_for_is_an_error(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist: no such folder"):
        trained(settings(checkpoint={"load": str(tmp_path / "nowhere")}))


def test_weights_alone_are_nothing_to_go_on_from(settings: Settings, tmp_path: Path) -> None:
    trained(settings(train={"steps": 1}))
    copy_checkpoint_without_training_state(tmp_path / "run", tmp_path / "weights")
    with pytest.raises(CheckpointError, match="holds weights without the state of a run") as refused:
        trained(settings(checkpoint={"load": str(tmp_path / "weights")}, output=str(tmp_path / "second")))
    assert f"init_from={tmp_path / 'weights'}" in str(refused.value)


def test_resume_refuses_another_model_and_tells_other_changes(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    trained(settings(train={"steps": 2}, lr_schedule={"name": "constant"}))
    for change in ({"rope": {"theta": 5000.0}}, {"norm_eps": 1e-6}, {"activation": "geglu"}, {"num_layers": 3}):
        raw = settings(train={"steps": 3})
        raw["model"] = {**raw["model"], **change}
        with pytest.raises(ConfigError, match="saved by another model") as refused:
            trained(raw)
        assert next(iter(change)) in str(refused.value)
        assert ("allow_changes" in str(refused.value)) == (change != {"num_layers": 3})  # its tensors are not there
    with caplog.at_level("INFO", "mega"):
        trained(settings(train={"steps": 3}, optimizer={"weight_decay": 0.3}, lr_schedule={"name": "constant"}))
    assert "optimizer.weight_decay: 0.1 -> 0.3" in caplog.text


def test_a_finished_run_says_so_and_changes_nothing(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    raw = settings(train={"steps": 4}, lr_schedule={"decay_steps": 6})
    trained(raw)

    def files() -> dict[Path, bytes]:
        found = (path for path in Path(raw["output"]).rglob("*") if path.is_file() and path.name != ".lock")
        return {path: path.read_bytes() for path in found}

    before = files()
    for steps in (4, 3):
        with caplog.at_level("INFO", "mega"):
            trained({**raw, "train": {"steps": steps}, "optimizer": {"weight_decay": 0.3}})
        assert "finished at step 4; nothing is changed; a larger train.steps continues the run" in caplog.text
        assert files() == before
        assert "done" not in caplog.text
    assert trained({**raw, "train": {"steps": 5}}).step == 5
    branch = {**raw, "output": raw["output"] + "-branch", "checkpoint": {"load": raw["output"]}}
    with pytest.raises(
        ConfigError, match=r"train\.steps = 5 must be larger than the step of .*step-00000005, which is 5"
    ):
        trained({**branch, "train": {"steps": 5}})


@pytest.mark.parametrize(("before", "after"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_another_precision_is_refused_with_a_way_out_that_works(settings: Settings, before: str, after: str) -> None:
    trained(settings(train={"steps": 1}, precision=before))
    raw = settings(train={"steps": 2}, precision=after)
    with pytest.raises(
        ConfigError, match=f"precision = {after} conflicts with that of the resumed checkpoint .*, {before}"
    ) as told:
        trained(raw)
    (source,) = re.findall(r"init_from=(\S+)", str(told.value))
    assert trained({**raw, "init_from": source, "output": raw["output"] + "-new"}).step == 2


def test_weights_and_biases_goes_on_with_the_same_run_and_knows_its_settings(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []
    logged: list[int] = []

    def init(**given: Any) -> Any:
        begun.append(given)
        return SimpleNamespace(log=lambda numbers, step: logged.append(step), finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    raw = settings(log={"wandb": "project"}, lr_schedule={"name": "constant"})
    for steps in (2, 3):
        trained({**raw, "train": {"steps": steps}})
    assert logged == [1, 2, 3]
    first, second = begun
    assert first["id"] == second["id"] == (Path(raw["output"]) / "wandb-id").read_text()
    assert {given["resume"] for given in begun} == {"allow"}
    assert [given["config"]["train"]["steps"] for given in begun] == [2, 3]
    trained({**raw, "output": raw["output"] + "-other", "train": {"steps": 1}})
    assert begun[2]["id"] != first["id"]


def test_a_length_past_the_last_position_is_told(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    raw = settings(train={"steps": 1})
    trained({**raw, "model": {**raw["model"], "max_position": 8}})
    assert "data.seq_length = 16 is larger than model.max_position = 8" in caplog.text
    assert "set model.max_position=16" in caplog.text


def test_start_from_other_weights(settings: Settings, tmp_path: Path) -> None:
    first = trained(settings(train={"steps": 2}, output=str(tmp_path / "first")))
    second = settings(train={"steps": 1}, output=str(tmp_path / "second"), init_from=str(tmp_path / "first"))
    second["optimizer"] = {"lr": 1e-12, "weight_decay": 0.0}
    source = open_weight_source(tmp_path / "first")
    trained(second)
    moved = open_weight_source(tmp_path / "second")
    for name in source.tensor_names():
        torch.testing.assert_close(moved.read_tensor(name), source.read_tensor(name), rtol=0, atol=1e-9)
    assert first.step == 2


ENDS = {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("more", [{}, {"name": "muon"}, {"offload": True}])
def test_a_learning_rate_of_their_own_moves_embedding_and_output_alone(
    settings: Settings, tmp_path: Path, more: dict[str, Any]
) -> None:
    """One step: with each rate alone, and with both; without a clip no gradient depends on the others."""
    made, rates = {}, {"low": {"lr": 1e-3}, "high": {"lr": 5e-3}, "both": {"lr": 1e-3, "decoupled_lr": 5e-3}}
    for name, lr in rates.items():
        optimizer = {"clip_grad": 0.0, **lr, **more}
        made[name] = bits(trained(settings(train={"steps": 1}, optimizer=optimizer, output=str(tmp_path / name))))
    for key, boxes in made["both"].items():
        like = made["high" if key.removeprefix("weights/") in ENDS else "low"][key]
        assert all(torch.equal(a, b) for a, b in zip(boxes, like, strict=True)), key
    (line,) = lines(settings(output=str(tmp_path / "both")))
    assert (line["lr"], line["decoupled_lr"]) == (1e-3, 5e-3)
    assert "decoupled_lr" not in lines(settings(output=str(tmp_path / "low")))[0]


def test_a_folder_without_weights_is_no_start_but_its_config_is_a_shape(settings: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    shape = {"model_type": "llama", "max_position_embeddings": 64, **sizes}
    (folder / "config.json").write_text(json.dumps(shape))
    raw = settings(train={"steps": 1})
    with pytest.raises(CheckpointError, match="weights are missing") as refused:
        trained(resolve_run_config({**raw, "model": {"from": str(folder)}}))
    assert f"model.from={folder / 'config.json'}" in str(refused.value.hint)
    assert trained(resolve_run_config({**raw, "model": {"from": str(folder / "config.json")}})).step == 1


def poison(monkeypatch: pytest.MonkeyPatch, step: int, loss: float) -> None:
    """The loss of one step of a run, in order, is that."""
    real, calls = step_module.sum_step_scalars, []

    def poisoned(*args: Any) -> Any:
        calls.append(1)
        told, table = real(*args)
        if len(calls) == step:
            told[0] = loss
        return told, table

    monkeypatch.setattr(step_module, "sum_step_scalars", poisoned)


def test_not_finite_stops_without_touching_the_weights(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = settings(train={"steps": 4}, checkpoint={"every": 1, "async": False})
    poison(monkeypatch, 3, float("nan"))
    with pytest.raises(TrainingError, match=r"step 3: loss nan .* not updated"):
        trained(raw)
    assert latest_checkpoint(Path(raw["output"]) / "checkpoints").name == "step-00000002"  # type: ignore[union-attr]


def test_not_finite_can_be_skipped(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 2, float("inf"))
    state = trained(settings(train={"steps": 4, "on_nan": "skip"}))
    assert (state.step, state.optimizer.update_count) == (4, 3)


def test_deterministic_asks_torch_while_the_run_lasts_and_is_written_down(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = training_loop.train_step, []

    def step(*args: Any, **more: Any) -> Any:
        asked.append(torch.are_deterministic_algorithms_enabled())
        return real(*args, **more)

    monkeypatch.setattr(training_loop, "train_step", step)
    raw = settings(train={"steps": 2}, deterministic=True)
    trained(raw)
    assert asked == [True, True]
    assert not torch.are_deterministic_algorithms_enabled()
    assert "deterministic: true" in (Path(raw["output"]) / "run.yaml").read_text()


@pytest.mark.parametrize("limit", [{"exit_interval": 2}, {"exit_after_minutes": 1e-9}])
def test_a_limit_saves_and_ends_and_the_same_command_goes_on(
    settings: Settings, tmp_path: Path, limit: dict[str, float]
) -> None:
    whole = bits(trained(settings(train={"steps": 5}, output=str(tmp_path / "straight"))))
    raw = settings(train={"steps": 5, **limit})
    ends = [2, 4] if "exit_interval" in limit else [1, 2, 3, 4]
    for step in ends:
        with pytest.raises(TrainingInterrupted, match=rf"{next(iter(limit))} = .*: saved step {step} of 5"):
            trained(raw)
    assert same_bits(whole, bits(trained(raw)))
    assert [line["step"] for line in lines(raw)] == [1, 2, 3, 4, 5]


def test_tokens_outside_the_vocabulary_are_named(settings: Settings) -> None:
    raw = settings()
    raw["model"] = {**raw["model"], "vocab_size": 20}
    with pytest.raises(DataError, match=r"model.vocab_size = 20 must be larger than every token id, found \d+"):
        trained(raw)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_ends_with_status_75(settings: Settings, tmp_path: Path, number: signal.Signals) -> None:
    raw = settings(train={"steps": 100_000}, checkpoint={"async": True})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(raw))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mega_cli.main", "train", str(path)], env=environment, stderr=subprocess.PIPE, text=True
    )
    metrics = Path(raw["output"]) / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline, "it does not train"
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    process.send_signal(number)  # as a scheduler's that a launcher passes on
    _, told = process.communicate(timeout=60)
    assert process.returncode == 75, told
    saved = latest_checkpoint(Path(raw["output"]) / "checkpoints")
    assert saved is not None
    assert f"{number.name}: saved step {Checkpoint.open_folder(saved).step}" in told


def test_a_run_that_is_not_to_resume_leaves_a_used_folder_as_it_is(settings: Settings) -> None:
    raw = settings(train={"steps": 3}, checkpoint={"keep": 1})
    trained(raw)
    before = lines(raw)
    for steps in (2, 3):
        with pytest.raises(
            CheckpointError, match=r"checkpoint.resume = false requires an unused output folder, found .*-00000003"
        ):
            trained(settings(train={"steps": steps}, checkpoint={"resume": False, "keep": 1}))
    assert lines(raw) == before
    latest_checkpoint(Path(raw["output"]) / "checkpoints").rename(Path(raw["output"]) / "aside")  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=r"an unused output folder, found .*metrics\.jsonl"):
        trained(settings(checkpoint={"resume": False}))
    fresh = settings(train={"steps": 1}, checkpoint={"resume": False}, output=f"{raw['output']}-fresh")
    assert trained(fresh).step == 1


def test_an_unreadable_newest_checkpoint_stops_training_eval_and_convert(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = settings(train={"steps": 2}, checkpoint={"every": 1})
    trained(raw)
    newest = Path(raw["output"]) / "checkpoints" / "step-00000002" / "manifest.json"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings(train={"steps": 3})))
    sound, read = newest.read_bytes(), Path.read_bytes

    def unreadable(path: Path) -> bytes:
        if path == newest:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return read(path)

    commands = [
        ["train", str(tmp_path / "run.yaml")],
        ["eval", raw["output"], "--data", str(tmp_path / "tokens"), "--seq-length", "16"],
        ["ckpt", "convert", raw["output"], str(tmp_path / "hf"), "--to", "hf"],
    ]
    for words, arguments in itertools.product(["damaged or changed", "Input/output error"], commands):
        with monkeypatch.context() as patch:
            newest.write_bytes(sound[:-9] if "damaged" in words else sound)
            if "error" in words:
                patch.setattr(Path, "read_bytes", unreadable)
            with pytest.raises(SystemExit) as end:
                main(arguments)
        told = capsys.readouterr().err
        assert end.value.code == 2, told
        assert f"{newest}: " in told
        assert words in told
        assert "move step-00000002 elsewhere" in told
    assert len(lines(raw)) == 2


@pytest.mark.parametrize(("key", "folder"), [("checkpoint.path", "tokens.bin/deep"), ("output", "/proc/nowhere")])
def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(
    settings: Settings, tmp_path: Path, key: str, folder: str
) -> None:
    section = {"path": str(tmp_path / folder)} if key == "checkpoint.path" else {}
    raw = settings(checkpoint=section, output=folder if key == "output" else str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=rf"{key} must be writable: .*(tokens\.bin|nowhere): ") as told:
        trained(raw)
    assert f"set another {key}" in str(told.value)
    assert not (Path(raw["output"]) / "metrics.jsonl").exists()


def test_a_save_that_fails_in_the_background_ends_the_run_and_names_the_file(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    raw = settings(train={"steps": 1000}, checkpoint={"async": True, "every": 2}, log={"every": 1000})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))  # a full disk, for files of this process
    try:
        with pytest.raises(CheckpointError, match=r"shard-00000-000\.safetensors: File too large"):
            trained(raw)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert latest_checkpoint(Path(raw["output"]) / "checkpoints") is None
    with caplog.at_level("INFO", "mega"):
        trained({**raw, "train": {"steps": 2}})
    assert re.search(r"saved step 2 in \d+\.\d s: .*step-00000002", caplog.text)


def test_a_model_that_memory_cannot_hold_is_told_with_advice(settings: Settings) -> None:
    raw = settings()
    raw["model"] = {**raw["model"], "vocab_size": 1 << 36}
    with pytest.raises(
        TrainingError, match=r"rank 0 on .*, before the first step: out of memory on the host: cannot allocate 4.*TB"
    ) as told:
        trained(raw)
    assert "--set batch.micro=1 (4.4TB); mega train --find-micro-batch" in str(told.value)  # half of what logits take
