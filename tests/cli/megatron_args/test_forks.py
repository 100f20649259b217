"""Flags that forks of Megatron-LM add, and those that no table has."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from mega_cli.megatron_args import RunYamlTranslation, render_run_yaml, translate_launch_script
from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig, resolve_run_config

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--vocab-size 512 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --data-path data/text --bf16 "
    "--attention-dropout 0 "
)
STEPS = SMALL + "--train-iters 10 "
DEEPSPEED = SMALL.replace("--bf16", "--fp16") + "--deepspeed --deepspeed_config ds.json "


def value(run: dict[str, Any], key: str) -> Any:
    node: Any = run
    for part in key.split("."):
        node = node.get(part, "absent") if isinstance(node, dict) else "absent"
    return node


def parsed(translation: RunYamlTranslation) -> RunConfig:
    """As `mega train` reads the file."""
    return RunConfig.parse(resolve_run_config(yaml.safe_load(render_run_yaml(translation))))


def texts(translation: RunYamlTranslation, kind: str) -> str:
    return "\n".join(f"{note.flag or note.key}: {note.text}" for note in translation.notes if note.kind == kind)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--normalization rmsnorm", {"model.norm": "rmsnorm"}),
        ("--apply-layernorm-rms", {"model.norm": "rmsnorm"}),
        ("--position-embedding-type rotary --rotary-theta 5e5", {"model.position": "rope", "model.rope.theta": 5e5}),
        ("--position-embedding-type absolute", {"model.position": "learned"}),
        ("--optimizer AdamW", {"optimizer.name": "adamw"}),
        ("--num-key-value-heads 2", {"model.num_kv_heads": 2}),
        ("--attention-head-type multiquery", {"model.num_kv_heads": 1}),
        ("--glu-activation swiglu", {"model.activation": "swiglu", "model.ffn_hidden_size": 256}),
        ("--swiglu --multiple-of 96 --hidden-dim-multiplier 1.3", {"model.ffn_hidden_size": 288}),
        ("--no-scaled-init --apply-layernorm-weight-plus-one", {"model.scale_residual_init": False}),
        ("--tokenizer-type PretrainedFromHF --tokenizer-name-or-path tok", {"data.tokenizer": "tok"}),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-style 1-sqrt", {"lr_schedule.cooldown_shape": "minus-sqrt"}),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 0", {"lr_schedule.name": "constant"}),
        ("--fp8-hybrid --wandb-project-name p", {"log.wandb": "p", "fp8.format": "hybrid"}),
        ("--decoupled-lr 2e-3 --decoupled-min-lr 1e-4", {"optimizer.decoupled_lr": 2e-3, "lr_schedule.decoupled_min_lr": 1e-4}),
        ("--lr-warmup-init 1e-5 --lr-warmup-iters 2", {"lr_schedule.warmup_init": 1e-5}),
        ("--exit-interval 5 --exit-duration-in-mins 60", {"train.exit_interval": 5, "train.exit_after_minutes": 60}),
        ("--grad-reduce-in-bf16", {"parallel.grad_reduce_dtype": "bf16"}),
        (
            "--num-experts 4 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn --disable-bias-linear",
            {"model.moe.sinkhorn": True, "model.moe.score": "sigmoid", "model.moe.normalize": False},
        ),
    ],
)  # fmt: skip
def test_what_has_an_exact_meaning_is_translated(arguments: str, expected: dict[str, Any]):
    translation = translate_launch_script(STEPS + arguments)
    assert {key: value(translation.run, key) for key in expected} == expected
    parsed(translation)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--train-iters 9", {"fp16.initial_scale": 65_536.0, "parallel.zero": 1}),
        ("--train-iters 9 --zero-stage 2 --no-pipeline-parallel", {"parallel.zero": 2, "parallel.pp": 1}),
        ("--train-iters 9 --ds-sequence-parallel-size 2", {"parallel.cp": 2, "parallel.cp_kind": "alltoall"}),
        ("--train-iters 9 --cpu-optimizer", {"optimizer.offload": True}),
        (
            "--train-samples 800 --train-tokens 5200 --lr-decay-tokens 4096 --lr-warmup-tokens 640",
            {"train.steps": 11, "lr_schedule.decay_steps": 8, "lr_schedule.warmup_samples": 10},
        ),
        ("--train-iters 5 --train-tokens 512000", {"train.steps": 5}),
        ("--train-iters 9 --num-experts 1", {"model.moe": "absent"}),
        (
            "--train-iters 9 --num-experts 8 --moe-loss-coeff 0.01 --moe-expert-parallel-size 4",
            {
                "model.moe": {
                    "num_experts": 8, "top_k": 1, "ffn_hidden_size": 256, "layers": [1, 3], "score": "softmax",
                    "normalize": False, "router_bias": False, "aux_loss": 0.01, "aux_loss_scope": "batch",
                    "capacity_factor": 1.0,
                },
                "parallel.ep": 4,
            },
        ),
    ],
)  # fmt: skip
def test_megatron_deepspeed(arguments: str, expected: dict[str, Any]):
    translation = translate_launch_script(DEEPSPEED + arguments)
    assert {key: value(translation.run, key) for key in expected} == expected
    parsed(translation)
    assert "gradient_clipping" in texts(translation, "changes meaning"), "DeepSpeed's own file counts too"


def test_flags_with_underscores_are_those_of_megatron_llm():
    translation = translate_launch_script(STEPS.replace("-layers", "_layers").replace("hidden-size", "hidden_size"))
    assert translation.run["model"]["num_layers"] == 4
    assert translation.run["model"]["qkv_bias"] is False
    assert translate_launch_script(f"{STEPS} --use_bias").run["model"]["qkv_bias"] is True


@pytest.mark.parametrize(
    ("arguments", "key", "reason"),
    [
        ("--position-embedding-type alibi", "model.position", "alibi must be one of"),
        ("--use-alibi-mask", "model.position", "ALiBi is not supported"),
        ("--xielu", "model.activation", "xielu is not supported"),
        ("--glu-activation reglu", "model.activation", "reglu is not supported"),
        ("--our-own-glu", "model.activation", "--our-own-glu may set it"),
        ("--optimizer ademamix", "optimizer.name", "ademamix must be one of adam"),
        ("--normalization groupnorm", "model.norm", "groupnorm must be one of"),
        ("--lr-decay-style infinite-cosine", "lr_schedule.name", "infinite-cosine must be one of"),
        ("--use-checkpoint-args --load old", "model.qkv_bias", "that of the checkpoint"),
    ],
)
def test_what_cannot_be_expressed_stays_open(arguments: str, key: str, reason: str):
    translation = translate_launch_script(STEPS + arguments)
    assert value(translation.run, key) is None
    assert reason in texts(translation, "open")
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        parsed(translation)


def test_an_unknown_flag_takes_the_words_up_to_the_next_flag():
    translation = translate_launch_script(f"{STEPS} --colour red green --seed 7 --quiet --swiglu")
    assert translation.run["train"]["seed"] == 7
    assert translation.run["model"]["activation"] == "swiglu"
    assert "--colour red green: is not a flag of Megatron-LM" in texts(translation, "open")
    assert "--quiet: is not a flag of Megatron-LM" in texts(translation, "open")


def test_strict_refuses_what_only_forks_have():
    with pytest.raises(ConfigError, match=r"--num-key-value-heads: is not a flag of Megatron-LM"):
        translate_launch_script(f"{STEPS} --num-key-value-heads 2", strict=True)


def test_without_a_global_batch_a_decay_in_samples_is_open():
    translation = translate_launch_script(STEPS.replace("--global-batch-size 8", "--lr-decay-samples 800"))
    assert translation.run["lr_schedule"]["decay_steps"] == "800 / batch.global"
    assert "--lr-decay-samples" not in texts(translation, "not needed")


def test_a_ramp_up_lengthens_the_run_in_steps():
    run = translate_launch_script(
        f"{SMALL} --rampup-batch-size 4 4 40 --train-samples 840 --lr-warmup-fraction 0.1"
    ).run
    config = parsed(
        translate_launch_script(f"{SMALL} --rampup-batch-size 4 4 40 --train-samples 840 --lr-warmup-fraction 0.1")
    )
    assert run["batch"]["rampup"] == {"start": 4, "increment": 4, "samples": 40}
    assert config.batch.samples_after_steps(run["train"]["steps"]) == 840
    assert run["lr_schedule"]["warmup_samples"] == 84


@pytest.mark.parametrize(
    ("program", "flags", "tokens"),
    [
        ("pretrain_gpt.py", "", 50_257),
        ("pretrain_gpt.py", "--vocab-file data/gpt2-vocab.json", 50_257),
        ("pretrain_gpt.py", "--vocab-file bpe/vocab.json --tokenizer-type GPT2BPETokenizer", 50_257),
        ("pretrain_gpt.py", "--vocab-file finnish_131072/vocab.json --tokenizer-type GPT2BPETokenizer", None),
        ("pretrain_gpt.py", "--tokenizer-type $KIND", None),
        ("pretrain_gpt.py", "--patch-tokenizer-type LLamaTokenizer", None),
        ("pretrain_llama.py", "", None),
    ],
)
def test_the_default_tokenizer_is_gpt2s(program: str, flags: str, tokens: int | None):
    translation = translate_launch_script(f"python {program} {STEPS.replace('--vocab-size 512', flags)}")
    assert translation.run["model"]["vocab_size"] == tokens


def test_latent_attention_with_plain_rope_can_be_run():
    flags = "--multi-latent-attention --qk-layernorm --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"
    plain = "--position-embedding-type rope --rope-type rope --normalization RMSNorm --disable-bias-linear"
    assert "fraction" not in translate_launch_script(f"{STEPS} {flags} {plain}").run["model"]["rope"]
    parsed(translate_launch_script(f"{STEPS} {flags} {plain}"))


def test_hysteresis_is_told_without_its_flag():
    assert "tolerates 1" in texts(translate_launch_script(STEPS.replace("--bf16", "--fp16")), "changes meaning")


def test_flags_that_were_not_read_leave_the_precision_open():
    translation = translate_launch_script(f"python pretrain_gpt.py {STEPS.replace('--bf16', '')} $PRECISION_OPTIONS")
    assert translation.run["precision"] is None
    assert "$PRECISION_OPTIONS may contain --bf16" in texts(translation, "open")


def test_a_placeholder_is_no_value():
    translation = translate_launch_script(
        STEPS.replace("data/text", "'<path to data>'").replace("--lr 1e-3", "--lr '<rate>'")
    )
    assert translation.run["optimizer"]["lr"] is None
    with pytest.raises(ConfigError, match=r"optimizer\.lr"):
        parsed(translation)
