"""run.yaml: what it may say, and what it is told when it says something else."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mega_common.errors import ConfigError
from mega_trainer.config.parallel_layout import can_split_model, tensor_degree_rule
from mega_trainer.config.run_config import RunConfig, load_run_config, resolve_run_config

Settings = Callable[..., dict[str, Any]]

# What the design shows a user writing.
DOCUMENTED = """
model: {preset: llama3-8b}
data:
  train: [{path: data/wiki, weight: 0.7}, {path: data/code, weight: 0.3}]
  split: [969, 30, 1]
  seq_length: 8192
parallel: {tp: 2, sp: true, pp: 2, virtual_stages: 2, schedule: 1f1b, cp: 1, cp_kind: ring, ep: 1, zero: 1}
batch: {micro: 1, global: 128}
train: {steps: 1000, eval_every: 100, eval_steps: 10, seed: 1234}
optimizer: {name: adamw, lr: 3.0e-4, betas: [0.9, 0.95], weight_decay: 0.1, clip_grad: 1.0}
lr_schedule: {name: cosine, warmup_steps: 100, min_lr: 3.0e-5}
precision: bf16
recompute: selective
checkpoint: {every: 100, keep: 2, async: true}
output: runs/llama3-8b
"""


def test_the_documented_run_yaml_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(DOCUMENTED)
    config = load_run_config(path, ["batch.micro=2", "data.train.0.weight=0.5"])
    assert config.model.num_layers == 32
    assert config.batch.micro == 2
    assert config.data.train[0].weight == 0.5
    assert config.recompute.kind == "selective"
    again = yaml.safe_dump(config.model_dump(mode="json", by_alias=True))
    assert RunConfig.parse(resolve_run_config(yaml.safe_load(again))) == config


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ({"decay_steps": 4}, "lr_schedule.decay_steps = 4 ends the decay before the run"),
        ({"decay_steps": 4, "min_lr": 1e-5}, None),
        ({"decay_steps": 4, "name": "constant"}, None),
        ({}, None),
    ],
)
def test_steps_at_a_learning_rate_of_nothing_are_told(
    settings: Settings, schedule: dict[str, Any], told: str | None
) -> None:
    notes = list(RunConfig.parse(settings(train={"steps": 10}, lr_schedule=schedule)).find_warnings())
    assert [note[: len(told or "")] for note in notes] == ([told] if told else [])


def test_all_problems_at_once(settings: Settings) -> None:
    raw = settings(optimizer={"lr": -1, "lrr": 3}, batch={"micro": 3}, parallel={"tp": 3})
    with pytest.raises(ConfigError) as told:
        RunConfig.parse(raw, source="run.yaml")
    text = str(told.value)
    for part in ("run.yaml: ", "optimizer.lr = -1", "optimizer.lrr: unknown key -> did you mean 'lr'?"):
        assert part in text


def test_rules_between_sections_are_told_together(settings: Settings) -> None:
    raw = settings(
        batch={"micro": 3}, parallel={"tp": 3, "pp": 5}, lr_schedule={"warmup_steps": 50}, optimizer={"clip_grad": 1.0}
    )
    with pytest.raises(ConfigError) as told:
        RunConfig.parse(raw)
    text = str(told.value)
    for part in ("parallel.tp = 3", "parallel.pp = 5", "batch.global = 4", "lr_schedule.warmup_steps = 50"):
        assert part in text


def test_transformer_engine_has_not_every_recipe(settings: Settings) -> None:
    asked = settings(kernels={"linear": "te"}, precision="fp8", fp8={"recipe": "rowwise"})
    with pytest.raises(ConfigError, match=r"fp8.recipe = 'rowwise': is not supported with kernels.linear = te"):
        RunConfig.parse(asked)


@pytest.mark.parametrize("kind", ["bert", "masked"])
def test_data_for_an_encoder_is_refused_for_a_decoder(settings: Settings, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"data.kind = '{kind}': requires a bidirectional model"):
        RunConfig.parse(settings(data={"kind": kind}))


def test_an_encoder_guesses_masked_tokens_and_has_a_head_for_what_the_data_asks(settings: Settings) -> None:
    whole = {"causal": False, "token_types": 2, "pooler": True, "sentence_pairs": True}
    assert RunConfig.parse(settings(data={"kind": "bert"}, model=whole)).model.sentence_pairs
    for kind, model, told in (
        ("text", whole, r"model.causal = false: requires data with masked tokens"),
        (
            "bert",
            {"causal": False},
            r"data.bert.sentence_pairs = true: requires token types and a sentence-pair head",
        ),
        ("masked", {"causal": False, "sentence_pairs": True}, r"sentence_pairs = true: requires pooler"),
        ("masked", {"causal": False, "mtp_layers": 1}, r"causal = false: is not supported with recurrent layers"),
        ("text", {"pooler": True}, r"pooler: requires causal: false"),
        ("text", {"position_offset": 2}, r"position_offset = 2: requires position: learned"),
        (
            "text",
            {"norm_position": "sum", "parallel_residual": True},
            r"norm_position = 'sum': requires a mixer and a feed-forward block",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            RunConfig.parse(settings(data={"kind": kind}, model=model))


def test_tokens_that_look_like_placeholders_may_be_named(settings: Settings) -> None:
    names = ["<fim_prefix>", "<fim_middle>", "<fim_suffix>"]
    assert RunConfig.parse(settings(data={"kind": "fim", "fim": {"tokens": names}})).data.fim.tokens == names


def test_unknown_preset_names_the_nearest(settings: Settings) -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama3-8b'"):
        resolve_run_config(settings(model={"preset": "llama-3-8b"}))


@pytest.mark.parametrize("world", [3, 5, 8])
def test_ranks_that_do_not_fit_get_a_suggestion_that_works(settings: Settings, world: int) -> None:
    config = RunConfig.parse(settings(parallel={"tp": 2, "pp": 2}, batch={"micro": 1, "global": 120}))
    if world % 4 == 0:
        config.check_world_size(world)
        return
    with pytest.raises(ConfigError, match=r"parallel.tp=(\d+), parallel.pp=(\d+)") as told:
        config.check_world_size(world)
    tp, pp = re.search(r"parallel.tp=(\d+), parallel.pp=(\d+)", str(told.value)).groups()  # type: ignore[union-attr]
    suggestion = {"tp": int(tp), "pp": int(pp)}
    RunConfig.parse(settings(parallel=suggestion, batch={"micro": 1, "global": 120})).check_world_size(world)


def test_checking_a_configuration_needs_no_torch() -> None:
    code = "import sys, mega_trainer.config.run_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": {}}, None),
        ({"data": {"kind": "text"}}, "data.kind = 'text': must be t5 for an encoder-decoder model"),
        ({"parallel": {"cp": 2}}, "parallel.cp_kind = 'ring': is not supported with relative position biases"),
        ({"parallel": {"cp": 2, "cp_kind": "alltoall"}, "model": {"attention_dropout": 0.1}}, "is not supported for an encoder-decoder model with attention dropout"),
        ({"parallel": {"tp": 2, "sp": True}, "data": {"t5": {"decoder_seq_length": 33}}}, "data.t5.decoder_seq_length = 33: must"),
        ({"model": {"position": "learned", "max_position": 64}, "data": {"t5": {"decoder_seq_length": 80}}}, "max_position = 64"),
        ({"model": {"encoder": {"num_layers": 4}}}, "model.encoder.num_layers = 4: must be less than num_layers = 4"),
        ({"model": {"norm_position": "post"}}, "model.norm_position: is not supported with encoder"),
        ({"model": {"encoder": None}}, "requires an encoder-decoder model"),
        ({"model": {"encoder": None}, "data": {"kind": "t5"}}, "data.kind = 't5': requires an encoder-decoder model"),
        ({"precision": "fp8"}, "precision = 'fp8': is not supported for encoder-decoder models"),
    ],
)  # fmt: skip
def test_rules_of_encoder_decoders(change: dict[str, Any], told: str | None) -> None:
    model = {
        "num_layers": 4, "encoder": {"num_layers": 2}, "hidden_size": 64, "ffn_hidden_size": 64, "num_attention_heads": 4,
        "vocab_size": 512, "position": "relative", "norm": "rmsnorm",
    }  # fmt: skip
    data = {"train": ["none"], "seq_length": 64}
    raw = {**change, "model": {**model, **change.get("model", {})}, "data": {**data, **change.get("data", {})}}
    if told is None:
        assert RunConfig.parse(resolve_run_config(raw)).sequence_lengths == (64, 14)
        return
    with pytest.raises(ConfigError) as error:
        RunConfig.parse(resolve_run_config(raw))
    assert told in str(error.value)


@pytest.mark.parametrize(("loss", "noted"), [(0.0, True), (1.0, False)])
def test_an_indexer_that_nothing_trains_is_noted(settings: Any, loss: float, noted: bool) -> None:
    raw = settings()
    mla = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    mla |= {"indexer": {"num_heads": 6, "head_dim": 8, "kl_loss": loss}}
    raw["model"] = {**{key: value for key, value in raw["model"].items() if key != "num_kv_heads"}, "mla": mla}
    config = RunConfig.parse(raw)
    assert ("kl_loss = 0 does not train the indexer" in " ".join(config.find_warnings())) == noted
    assert config.is_trainable("model.layers.0.self_attn.indexer.wk.weight") != noted
    assert config.is_trainable("model.layers.0.self_attn.o_proj.weight")
    assert not can_split_model(config.model, 4)
    assert "and 6 index heads" in tensor_degree_rule(config.model)


@pytest.mark.parametrize(
    ("moe", "noted"),
    [
        ({"aux_loss": 0.1, "aux_loss_scope": "batch"}, True),
        ({"aux_loss": 0.0, "aux_loss_scope": "batch"}, False),
        ({"aux_loss": 0.1, "aux_loss_scope": "sequence"}, False),
    ],
)
def test_a_load_counted_over_the_batch_is_noted_to_depend_on_the_layout(
    settings: Any, moe: dict[str, Any], noted: bool
) -> None:
    raw = settings()
    raw["model"] = {**raw["model"], "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 32, **moe}}
    notes = " ".join(RunConfig.parse(raw).find_warnings())
    assert ("training depends on batch.micro x data ranks" in notes) == noted


@pytest.mark.parametrize(("split", "noted"), [("90,10,0", True), ("100,0,0", False), (None, False)])
def test_a_share_that_separate_validation_data_replace_is_noted(settings: Any, split: str | None, noted: bool) -> None:
    raw = settings()
    raw["data"] = {**raw["data"], "valid": "held-out"} | ({} if split is None else {"split": split})
    raw["data"] = {key: value for key, value in raw["data"].items() if key != "split" or split is not None}
    assert ("data.split has a share" in " ".join(RunConfig.parse(raw).find_warnings())) == noted
