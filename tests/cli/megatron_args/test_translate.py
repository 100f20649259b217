"""Launch scripts as people write them, and what becomes of every flag."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import settings as tried
from hypothesis import strategies as st

from mega_cli.megatron_args import RunYamlTranslation, render_run_yaml, translate_launch_script
from mega_cli.megatron_args import flag_tables as flags
from mega_cli.megatron_args.flag_tables import MegatronFlagSpec, load_megatron_flag_specs
from mega_cli.megatron_args.run_draft import load_untranslated_flag_notes
from mega_cli.megatron_args.translate import HEADINGS
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.strict_config import load_yaml_mapping
from mega_trainer.config.run_config import RunConfig, resolve_run_config

FLAGS = load_megatron_flag_specs()
HANDLING = load_untranslated_flag_notes()

GPT_345M = r"""
#!/bin/bash
# GPT of 345 million parameters, on one GPU, the old way.
export CUDA_DEVICE_MAX_CONNECTIONS=1

CHECKPOINT_PATH=runs/gpt2_345m
VOCAB_FILE=gpt2-vocab.json
MERGE_FILE=gpt2-merges.txt
DATA_PATH=data/my-gpt2_text_document

GPT_ARGS="
    --num-layers 24 \
    --hidden-size 1024 \
    --num-attention-heads 16 \
    --seq-length 1024 \
    --max-position-embeddings 1024 \
    --micro-batch-size 4 \
    --global-batch-size 8 \
    --lr 0.00015 \
    --train-iters 500000 \
    --lr-decay-iters 320000 \
    --lr-decay-style cosine \
    --min-lr 1.0e-5 \
    --weight-decay 1e-2 \
    --lr-warmup-fraction .01 \
    --clip-grad 1.0 \
    --fp16
"
DATA_ARGS="--data-path $DATA_PATH --vocab-file $VOCAB_FILE --merge-file $MERGE_FILE --data-impl mmap --split 949,50,1"
OUTPUT_ARGS="--log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10"

torchrun pretrain_gpt.py $GPT_ARGS $DATA_ARGS $OUTPUT_ARGS \
    --tokenizer-type GPT2BPETokenizer \
    --save $CHECKPOINT_PATH --load ${CHECKPOINT_PATH} > log.txt 2>&1
"""

LLAMA3_8B = r"""
#!/usr/bin/env bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"1"}
TOKENIZER=${TOKENIZER:-tok/llama3}
SEQ_LENGTH=8192; TP=4
SAMPLES=$((1000 * 128))

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NNODES
    --master_addr ${MASTER_ADDR:-localhost}  # the first machine
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length $SEQ_LENGTH --max-position-embeddings $SEQ_LENGTH
    --position-embedding-type rope --rotary-base 500000 --use-rope-scaling
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
    --vocab-size 128256
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 128
    --train-samples ${SAMPLES} --lr-decay-samples ${SAMPLES} --lr-warmup-samples 1280
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-samples 12800
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --bf16 --calculate-per-token-loss --seed 42
    --recompute-granularity full --recompute-method block --recompute-num-layers 3
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP
    --pipeline-model-parallel-size 2
    --num-layers-per-virtual-pipeline-stage 4
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
[ $TP -gt 1 ] && MODEL_PARALLEL_ARGS+=(--sequence-parallel)
DATA_ARGS=(
    --data-path 0.7 data/wiki_text_document 0.3 data/code_text_document
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
    --reset-position-ids --eod-mask-loss
)
if [ -n "${WANDB_API_KEY}" ]; then
    DATA_ARGS+=(--wandb-project hidden)
else
    DATA_ARGS+=(--tensorboard-dir "runs/llama/tb" --log-interval 1)
fi

torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" ${DATA_ARGS[@]} --save runs/llama --save-interval 100 --save-retain-interval 500
"""

MIXTRAL = r"""
CHECKPOINT_PATH=$1
DATA_PATH=$2
MOE_ARGS=(--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
          --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.25
          --expert-model-parallel-size 8)
python -m torch.distributed.launch --nproc-per-node=8 $MEGATRON/pretrain_gpt.py ${MOE_ARGS[@]} \
    --disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope --no-position-embedding \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --untie-embeddings-and-output-weights --rotary-base 1000000 \
    --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.01 \
    --seq-length 4096 --max-position-embeddings 32768 --micro-batch-size 1 --train-iters 100 --lr 1e-4 \
    --bf16 --use-distributed-optimizer --vocab-size 32000 \
    --data-path $DATA_PATH --load $CHECKPOINT_PATH --no-load-optim 2>&1 | tee log
"""

SLURM = r"""#!/bin/bash
#SBATCH --job-name=gpt --nodes=4
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
module load cuda
DIR=$(pwd)
options=" \
    --num-layers 31 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 \
    --pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 7 --context-parallel-size 2 --cp-comm-type a2a \
    --micro-batch-size 2 --train-iters 1000 --lr 1e-4 --squared-relu --disable-bias-linear --bf16 --vocab-size 50304 \
    --train-data-path ${DIR}/train --valid-data-path ${DIR}/valid --recompute-activations --finetune --load base"
run_cmd="python -u ${DIR}/pretrain_gpt.py ${options}"
srun -l --output=${DIR}/logs/%x_%j.log sh -c "${run_cmd}"
"""


def value(run: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        run = run[part]
    return run


def check(translation: RunYamlTranslation, expected: dict[str, Any]) -> None:
    assert {key: value(translation.run, key) for key in expected} == expected


def parsed(translation: RunYamlTranslation) -> RunConfig:
    """As `mega train` reads the file."""
    return RunConfig.parse(resolve_run_config(yaml.safe_load(render_run_yaml(translation))))


def notes(translation: RunYamlTranslation, kind: str) -> dict[str, str]:
    return {
        (note.flag or note.key or "").partition(" ")[0]: note.text for note in translation.notes if note.kind == kind
    }


@pytest.mark.parametrize("script", [GPT_345M, LLAMA3_8B, MIXTRAL, SLURM], ids=["gpt", "llama", "mixtral", "slurm"])
def test_the_result_can_be_run_but_for_what_cannot_be_run_yet(script: str):
    translation = translate_launch_script(
        script.replace("$(pwd)", "data").replace("=$1", "=old").replace("=$2", "=data/text")
    )
    ModelConfig.parse(translation.run["model"])
    try:
        parsed(translation)
    except ConfigError as error:
        problems = error.message.splitlines()[1:]
        assert [
            line for line in problems if "yet" not in line and "  precision" not in line and "  fp16" not in line
        ] == []


def test_gpt_345m():
    translation = translate_launch_script(GPT_345M)
    check(
        translation,
        {
            "model.num_layers": 24, "model.hidden_size": 1024, "model.ffn_hidden_size": 4096,
            "model.vocab_size": 50_257, "model.max_position": 1024, "model.norm": "layernorm", "model.norm_eps": 1e-5,
            "model.activation": "gelu_tanh", "model.position": "learned", "model.tie_embeddings": True,
            "model.qkv_bias": True, "model.mlp_bias": True, "model.attention_out_bias": True,
            "model.embedding_dropout": 0.1, "model.attention_dropout": 0.1, "model.residual_dropout": 0.1,
            "model.init_std": 0.02, "model.scale_residual_init": True,
            "data.train": [{"path": "data/my-gpt2_text_document"}], "data.split": [949.0, 50.0, 1.0],
            "data.order": "megatron", "data.seq_length": 1024, "parallel.zero": 0, "batch.micro": 4, "batch.global": 8,
            "train.steps": 500_000, "train.eval_every": 1000, "train.eval_steps": 10, "train.seed": 1234,
            "optimizer.betas": [0.9, 0.999], "optimizer.eps": 1e-8, "optimizer.weight_decay": 0.01,
            "lr_schedule.name": "cosine", "lr_schedule.warmup_steps": 3200, "lr_schedule.decay_steps": 320_000,
            "lr_schedule.min_lr": 1e-5, "precision": "fp16", "fp16.initial_scale": 2.0**32, "checkpoint.every": 10_000,
            "log.every": 100, "log.tensorboard": False, "output": "runs/gpt2_345m",
        },
    )  # fmt: skip
    assert "num_kv_heads" not in translation.run["model"]
    assert "load" not in translation.run["checkpoint"]
    assert set(notes(translation, "not needed")) == {"--data-impl"}
    assert "loss: mega's gradient" in render_run_yaml(translation)
    assert "1 x 1 = 1 ranks, so dp = 1" in render_run_yaml(translation)


def test_llama3_8b():
    translation = translate_launch_script(LLAMA3_8B)
    check(
        translation,
        {
            "model.num_kv_heads": 8, "model.norm": "rmsnorm", "model.activation": "swiglu", "model.position": "rope",
            "model.rope": {
                "theta": 500_000.0, "fraction": 1.0, "scaling": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position": 8192,
            },
            "model.qkv_bias": False, "model.mlp_bias": False, "model.tie_embeddings": False,
            "data.train": [
                {"path": "data/wiki_text_document", "weight": 0.7}, {"path": "data/code_text_document", "weight": 0.3},
            ],
            "data.split": [969.0, 30.0, 1.0], "data.tokenizer": "tok/llama3", "data.reset_position_ids": True,
            "data.eod_mask_loss": True,
            "parallel": {"tp": 4, "sp": True, "pp": 2, "virtual_stages": 4, "zero": 1},
            "train.steps": 1000, "train.eval_every": 0, "train.seed": 42,
            "lr_schedule": {
                "name": "wsd", "warmup_samples": 1280, "min_lr": 3e-5, "decay_steps": 1000, "cooldown_steps": 100,
                "cooldown_shape": "minus-sqrt",
            },
            "precision": "bf16", "recompute": {"kind": "full", "layers": 3},
            "checkpoint": {"every": 100, "keep_every": 500}, "log.every": 1, "log.tensorboard": True,
        },
    )  # fmt: skip
    config = parsed(translation)
    assert config.data_parallel_size(8) == 1
    assert config.build_lr_curve()(128_000) == 3e-5
    assert "wandb" not in translation.run["log"]
    text = render_run_yaml(translation)
    assert "num_layers: 32  # --num-layers 32" in text
    assert "eps: 1.0e-08  # Megatron's default" in text
    assert "gradient and log" not in text, "per-token loss is what mega does"


def test_middles_to_fill_in():
    flags = "--fim-data --fim-rate 0.5 --fim-spm-rate 0.25 --fim-middle-token '<mid>' --fim-split-sample '<file>'"
    translation = translate_launch_script(COMPLETE + flags)
    tokens = ["<fim_prefix>", "<mid>", "<fim_suffix>"]
    check(translation, {"data.kind": "fim", "data.fim": {"rate": 0.5, "spm_rate": 0.25, "tokens": tokens}})
    assert parsed(translation).data.fim.tokens == tokens
    assert "--fim-data" in notes(translation, "changes meaning")
    assert "--fim-split-sample" in notes(translation, "no equivalent")


def test_mixtral():
    translation = translate_launch_script(MIXTRAL)
    check(
        translation,
        {
            "model.moe": {
                "num_experts": 8, "top_k": 2, "ffn_hidden_size": 14_336, "score": "softmax", "normalize": True,
                "router_bias": False, "aux_loss": 0.01, "aux_loss_scope": "batch", "z_loss": 0.0, "capacity_factor": 1.25,
            },
            "parallel": {"tp": 1, "pp": 1, "ep": 8, "zero": 1}, "batch.global": 8, "data.train": [{"path": "$DATA_PATH"}],
            "checkpoint.load": "$CHECKPOINT_PATH", "lr_schedule.name": "linear", "lr_schedule.warmup_steps": 0,
        },
    )  # fmt: skip
    assert notes(translation, "no equivalent") == {}
    changed = notes(translation, "changes meaning")
    assert "lowest weights" in changed["--moe-expert-capacity-factor"]
    assert "all data ranks" in changed["--moe-aux-loss-coeff"]
    assert notes(translation, "open") == {
        "data.train": "$DATA_PATH is not set in the script",
        "checkpoint.load": "$CHECKPOINT_PATH is not set in the script",
    }
    assert "convert" in notes(translation, "changes meaning")["--load"]
    needless = notes(translation, "not needed")
    assert {"--moe-grouped-gemm", "--moe-token-dispatcher-type", "--no-position-embedding"} == set(needless)


def test_slurm():
    translation = translate_launch_script(SLURM)
    check(
        translation,
        {
            "parallel": {"tp": 1, "pp": 4, "pipeline_layout": [7, 8, 8, 8], "cp": 2, "cp_kind": "alltoall", "zero": 0},
            "batch.global": 8, "model.activation": "relu2", "data.train": [{"path": "$(pwd)/train"}],
            "data.valid": [{"path": "$(pwd)/valid"}], "recompute.kind": "selective", "init_from": "base",
        },
    )  # fmt: skip
    assert translation.launch == "4 x 8 = 32 ranks, so dp = 4"
    assert "split" not in translation.run["data"]


def test_a_bare_list_of_arguments():
    text = "--num-layers 2 --hidden-size=64\n--num-attention-heads 4 --swiglu"
    translation = translate_launch_script(text)
    check(translation, {"model.num_layers": 2, "model.hidden_size": 64, "model.ffn_hidden_size": 128})
    missing = {"model.vocab_size", "model.max_position", "data.train", "data.seq_length", "batch.micro", "batch.global"}
    assert set(notes(translation, "open")) == missing | {"train.steps", "optimizer.lr"}
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        parsed(translation)


COMPLETE = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --vocab-size 512
    --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --data-path data/text --bf16
"""


@pytest.mark.parametrize(
    "arguments", ["", "--optimizer muon", "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*3|tL'"]
)
def test_what_is_given_completely_can_be_run(arguments: str):
    assert parsed(translate_launch_script(COMPLETE + arguments)).train.steps == 10


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--no-bias-gelu-fusion", {"model.activation": "gelu"}),
        ("--disable-bias-linear", {"model.activation": "gelu", "model.qkv_bias": False}),
        ("--disable-bias-linear --add-qkv-bias", {"model.qkv_bias": True, "model.mlp_bias": False}),
        ("--swiglu", {"model.activation": "swiglu", "model.ffn_hidden_size": 128}),
        ("--group-query-attention", {"model.num_kv_heads": 1}),
        ("--window-size 127,0", {"model.sliding_window": 128}),
        ("--kv-channels 32 --qk-layernorm --normalization RMSNorm", {"model.head_dim": 32, "model.qk_norm": True}),
        ("--use-rotary-position-embeddings --rotary-percent 0.5", {"model.rope": {"theta": 1e4, "fraction": 0.5}}),
        (
            "--position-embedding-type rope --rotary-seq-len-interpolation-factor 4",
            {"model.rope.scaling": "linear", "model.rope.factor": 4.0},
        ),
        (
            "--position-embedding-type yarn --rotary-scaling-factor 4",
            {"model.rope.scaling": "yarn", "model.rope.factor": 4.0, "model.rope.original_max_position": 4096},
        ),
        ("--data-path a b c", {"data.train": [{"path": p, "weight": 1.0} for p in "abc"]}),
        ("--data-path 2 a", {"data.train": [{"path": "a"}]}),
        ("--split '99, 1,.5'", {"data.split": [99.0, 1.0, 0.5]}),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"parallel.zero": 2}),
        ("--use-megatron-fsdp", {"parallel.zero": 3}),
        ("--use-torch-fsdp2", {"parallel.zero": 3}),
        ("--lr-decay-style constant --lr-warmup-iters 3", {"lr_schedule.name": "constant", "lr_schedule.warmup_steps": 3}),
        ("--lr-warmup-fraction 0.3", {"lr_schedule.warmup_steps": 3}),
        ("--lr-warmup-fraction 0.24", {"lr_schedule.warmup_samples": 19}),
        ("--eval-interval 5 --eval-iters 0", {"train.eval_every": 0}),
        (
            "--optimizer dist_muon --muon-extra-scale-factor 0.2 --weight-decay 0.1",
            {
                "optimizer.name": "muon",
                "optimizer.muon": {
                    "momentum": 0.9, "nesterov": False, "lr_factor": 1.0, "weight_decay": 0.1, "rounds": 5,
                },
            },
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*2|t|t|L'",
            {"parallel.virtual_stages": 2, "parallel.pipeline_layout": [2, 1, 1, 0]},
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers 6 --account-for-embedding-in-pipeline-split"
            " --account-for-loss-in-pipeline-split --num-virtual-stages-per-pipeline-rank 2",
            {"parallel.virtual_stages": 2, "parallel.pipeline_layout": [1, 2, 2, 1]},
        ),
        ("--load a --save b --finetune", {"init_from": "a", "output": "b"}),
        ("--load a --save b", {"checkpoint.load": "a", "output": "b"}),
        ("--wandb-project p --async-save", {"log.wandb": "p", "checkpoint.async": True}),
        ("--checkpoint-activations", {"recompute.kind": "full"}),
        ("--recompute-granularity selective", {"recompute.kind": "selective"}),
        (
            "--recompute-granularity selective --recompute-modules core_attn layernorm moe_act",
            {"recompute.kind": "selective", "recompute.modules": ["norm", "activation"]},
        ),
        ("--fp8-format hybrid", {"precision": "fp8", "fp8": {"recipe": "tensorwise", "format": "hybrid"}}),
        (
            "--fp8-format e4m3 --fp8-recipe blockwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
            {"fp8": {"recipe": "blockwise", "format": "e4m3", "bf16_first": 1, "bf16_last": 2}},
        ),
        (
            "--fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
            {"precision": "fp8", "fp8": {"recipe": "nvfp4", "bf16_first": 1, "bf16_last": 2}, "kernels.linear": "te"},
        ),
        ("--fp8-recipe mxfp8 --num-layers-at-start-in-bf16 2", {"precision": "bf16"}),
        ("--layernorm-epsilon 1e-6", {"model.norm_eps": 1e-6}),
        ("--seed 1 --seed 2", {"train.seed": 2}),
    ],
)  # fmt: skip
def test_single_settings(arguments: str, expected: dict[str, Any]):
    check(translate_launch_script(COMPLETE + arguments), expected)


def test_latent_attention_and_further_tokens():
    flags = """--multi-latent-attention --qk-layernorm --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8
        --qk-pos-emb-head-dim 4 --v-head-dim 6 --position-embedding-type rope --rotary-scaling-factor 40 --mscale 1.0
        --mscale-all-dim 1.0 --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 --kv-channels 128
        --group-query-attention --num-query-groups 2 --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"""
    translation = translate_launch_script(COMPLETE + flags)
    check(
        translation,
        {
            "model.mla": {
                "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
                "norm_eps": 1e-6,
            },
            "model.rope.interleaved": True, "model.rope.scaling": "yarn", "model.rope.factor": 40.0,
            "model.rope.original_max_position": 4096, "model.rope.mscale_all_dim": 1.0, "model.mtp_layers": 1,
            "model.mtp_loss": 0.3,
        },
    )  # fmt: skip
    assert {"num_kv_heads", "head_dim", "qk_norm", "qkv_bias"}.isdisjoint(translation.run["model"])
    assert parsed(translation).model.mla is not None
    plain = translate_launch_script(COMPLETE + flags.replace("--qk-layernorm", "--rope-type rope"))
    assert "scaling" not in plain.run["model"]["rope"]
    assert plain.run["model"]["mla"]["latent_norm"] is False
    assert "norm_eps" not in plain.run["model"]["mla"]
    assert "--multi-latent-attention" not in notes(plain, "changes meaning")


def test_fp8_scaled_by_earlier_steps_is_scaled_by_the_numbers_at_hand():
    for text, flag in (("--fp8-hybrid", "--fp8-hybrid"), ("--fp8-format e4m3 --fp8-recipe delayed", "--fp8-recipe")):
        assert flag in notes(translate_launch_script(COMPLETE + text), "changes meaning")
    translation = translate_launch_script(COMPLETE + "--fp8-format e4m3 --fp8-recipe custom")
    assert translation.run["fp8"]["recipe"] is None
    assert "fp8.recipe" in notes(translation, "open")


def test_a_warmup_share_is_that_of_the_decay():
    run = translate_launch_script(COMPLETE + "--lr-warmup-fraction 0.5 --lr-decay-iters 4").run
    assert (run["lr_schedule"]["warmup_steps"], run["lr_schedule"]["decay_steps"]) == (2, 4)


def dummy(flag: MegatronFlagSpec) -> list[str]:
    """A value of the right kind for a flag, that is not its default."""
    if not flag.max_value_count:
        return []
    if flag.name in ("--hybrid-layer-pattern", "--hybrid-override-pattern"):
        return ["M*-M"]
    if flag.name == "--step-batch-size-schedule":
        return ["0:8"]
    others = [choice for choice in flag.choices.values() if choice != flag.default]
    text = others[0] if others else {"int": "2", "float": "0.5"}.get(flag.type, "1")
    return ["2" if flag.means else text] * (3 if flag.takes == "3" else 1)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_every_flag_ends_in_one_note_with_a_reason(flag: MegatronFlagSpec):
    translation = translate_launch_script(" ".join([COMPLETE, flag.name, *dummy(flag)]))
    found = [note for note in translation.notes if note.flag and note.flag.split()[0] == flag.name]
    assert [note.kind in HEADINGS or note.kind == "translated" for note in found] == [True]
    assert "not known" not in found[0].text
    assert found[0].text
    assert found[0].line
    assert yaml.load(render_run_yaml(translation), yaml.CSafeLoader).keys() == translation.run.keys()


def test_the_table_is_whole():
    assert len([flag for flag in FLAGS if flag.name.startswith("--")]) >= 838
    spellings = [name for flag in FLAGS for name in (flag.name, *flag.aliases)]
    assert len(spellings) == len(set(spellings))


def test_no_line_of_the_handling_is_idle():
    idle, seen = [], set()
    for pattern, _, _ in HANDLING:
        matched = {flag.name for flag in FLAGS if fnmatchcase(flag.name, pattern)} - seen
        seen |= matched
        idle += [] if matched else [pattern]
    assert idle == []


def test_a_value_that_is_megatrons_default_is_no_missing_feature():
    assert "--softmax-type" in notes(translate_launch_script(COMPLETE + "--softmax-type vanilla"), "not needed")
    assert "--softmax-type" in notes(translate_launch_script(COMPLETE + "--softmax-type off-by-one"), "no equivalent")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num-layers two", r"--num-layers two: must be a whole number"),
        ("--train-iters 2.5", r"--train-iters 2.5: must be a whole number"),
        ("--lr fast", r"--lr fast: must be a number"),
        ("--num-layers x --lr x", r"2 problems"),
        ("--num-layers 1000000000 --num-experts 8 --moe-layer-freq 2", r"1000000000: must be at most 100,000"),
        ("--num-layers 4 --pipeline-model-parallel-size 1000000000", r"1000000000: must be at most 100,000"),
        ("--num-layers 4 --num-experts 8 --moe-layer-freq [1]*1000000000", r"must be a number, or a list of 4 zeros"),
        ("--lr 1 --bf16", r"the list of arguments requires flags with the sizes of the model"),
        (
            "--num-layers 4 --vision-model-type clip",
            r"line 1: --vision-model-type belongs to Megatron's multimodal example",
        ),
    ],
)
def test_what_cannot_be_understood(arguments: str, message: str):
    with pytest.raises(ConfigError, match=message):
        translate_launch_script(arguments)


@pytest.mark.parametrize(
    ("arguments", "message", "note"),
    [
        (
            "--num-layer 2",
            r"line 3: --num-layer: is not a flag .*did you mean --num-layers\?",
            "did you mean --num-layers?",
        ),
        ("--nonsense 1 2 --seed 3", r"--nonsense", "--nonsense 1 2: is not a flag of Megatron-LM"),
        (
            "--normalization groupnorm",
            r"must be one of LayerNorm, RMSNorm",
            "groupnorm must be one of LayerNorm, RMSNorm",
        ),
        ("--swiglu=1", r"--swiglu 1: takes no value", "--swiglu 1 takes no value"),
        ("--lr --swiglu", r"--lr: --lr requires 1 value", "--lr requires 1 value"),
        ("--rampup-batch-size 1 2", r"requires 3 values", "requires 3 values"),
        ("--swiglu yes", r"yes: is not a flag", "yes is not a flag"),
    ],
)
def test_what_megatron_would_refuse_is_to_be_looked_at(arguments: str, message: str, note: str):
    assert note in render_run_yaml(translate_launch_script(f"{COMPLETE.rstrip()} {arguments}")).replace("\n#     ", " ")
    with pytest.raises(ConfigError, match=message):
        translate_launch_script(f"{COMPLETE.rstrip()} {arguments}", strict=True)


@pytest.mark.parametrize("text", ["", "echo hello", "# nothing\n", "ls *.txt"])
def test_a_script_without_training(text: str):
    with pytest.raises(ConfigError, match="no training command"):
        translate_launch_script(text)


def test_other_kinds_of_models():
    with pytest.raises(ConfigError, match=r"line 2: pretrain_ict\.py"):
        translate_launch_script("A=1\ntorchrun pretrain_ict.py --num-layers 2")


def test_remarks_of_the_script_stand_on_top():
    text = "if [ -f x ]; then ARGS=--swiglu; fi\nsource env.sh\npython pretrain_gpt.py $EXTRA " + " ".join(
        COMPLETE.split()
    )
    lines = render_run_yaml(translate_launch_script(text)).splitlines()
    assert any("line 1: it is unknown if this `if` holds" in line for line in lines)
    assert any("line 2: the file of `source env.sh` was not read" in line for line in lines)
    assert any("line 3: the value of $EXTRA is unknown" in line for line in lines)


def test_no_torch_is_imported():
    code = "import sys, mega_cli.megatron_args; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )


def test_the_tables_are_in_the_package():
    assert {"flags.csv", "forks.csv", "handling.yaml"} <= {path.name for path in Path(flags.__file__).parent.iterdir()}


PATHS = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Co", "Zl", "Zp"]), min_size=1, max_size=12
)


@tried(max_examples=50, deadline=None)
@given(PATHS.filter(lambda text: not text.startswith("--")))
@example("1e5")
@example("no")
@example(".inf")
@example("a: b # c")
def test_any_path_comes_back_from_the_file(path: str):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(
            render_run_yaml(translate_launch_script(f"{COMPLETE} --save {shlex.quote(path)}")), encoding="utf-8"
        )
        assert load_yaml_mapping(file)["output"] == path
