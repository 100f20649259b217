"""Launch scripts of models with experts, and of the parts that came with them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from mega_cli.megatron_args import RunYamlTranslation, render_run_yaml, translate_launch_script
from mega_cli.megatron_args.arithmetic import parse_megatron_layer_freq
from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig, resolve_run_config

DEEPSEEK_V3 = r"""
NODES=32; MOE_FREQ="([0]*3+[1]*58)"
DISTRIBUTED_ARGS=(--nproc-per-node 8 --nnodes $NODES)
MODEL_ARGS=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128
    --seq-length 4096 --max-position-embeddings 163840 --vocab-size 129280
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64
    --v-head-dim 128 --qk-layernorm --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0
    --position-embedding-type rope --no-rope-fusion --rotary-base 10000
    --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --untie-embeddings-and-output-weights --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
)
MOE_ARGS=(
    --num-experts 256 --moe-layer-freq "$MOE_FREQ" --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-shared-expert-overlap
    --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-pre-softmax
    --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --moe-grouped-gemm --moe-token-dispatcher-type flex --moe-enable-deepep --moe-permute-fusion
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${MOE_ARGS[@]} \
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 8 \
    --pipeline-model-parallel-layout "Et*7|(t*8|)*6t*6L" \
    --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --use-distributed-optimizer \
    --micro-batch-size 1 --global-batch-size 512 --train-iters 1000 --lr 2e-4 --bf16 --data-path data/text
"""

GPT_OSS = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 32
    --seq-length 64 --max-position-embeddings 512 --vocab-size 512 --normalization RMSNorm
    --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --softmax-type learnable
    --window-size 127,0 --window-attn-skip-freq 2 --position-embedding-type yarn --rotary-base 150000
    --rotary-scaling-factor 32 --yarn-original-max-position-embeddings 4096 --no-yarn-correction-range-round-to-int
    --num-experts 8 --moe-router-topk 4 --moe-ffn-hidden-size 64 --moe-router-load-balancing-type none
    --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights
    --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --data-path data/text --bf16
"""

SMALL = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --vocab-size 512
    --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --data-path data/text --bf16
    --attention-dropout 0
"""
EXPERTS = SMALL + "--num-experts 8 --disable-bias-linear "
LATENT = "--multi-latent-attention --qk-layernorm --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"


def parsed(translation: RunYamlTranslation) -> RunConfig:
    """As `mega train` reads the file."""
    return RunConfig.parse(resolve_run_config(yaml.safe_load(render_run_yaml(translation))))


def notes(translation: RunYamlTranslation, kind: str) -> dict[str, str]:
    return {
        (note.flag or note.key or "").partition(" ")[0]: note.text for note in translation.notes if note.kind == kind
    }


def check(translation: RunYamlTranslation, expected: dict[str, Any]) -> None:
    flat = flattened(translation.run)
    assert {key: flat.get(key) for key in expected} == expected


def flattened(run: dict[str, Any], path: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in run.items():
        out |= flattened(item, f"{path}{key}.") if isinstance(item, dict) else {path + key: item}
    return out


def test_deepseek_v3():
    translation = translate_launch_script(DEEPSEEK_V3)
    assert translation.run["model"]["moe"] == {
        "num_experts": 256, "top_k": 8, "ffn_hidden_size": 2048, "layers": [*range(3, 62)],
        "shared_ffn_hidden_size": 2048, "score": "sigmoid", "normalize": True, "router_bias": False, "scaling": 2.5,
        "groups": 8, "top_groups": 4, "group_score": "top2", "selection_bias": True, "bias_rate": 1e-3, "aux_loss": 1e-4,
        "aux_loss_scope": "sequence", "z_loss": 0.0,
    }  # fmt: skip
    assert translation.run["parallel"] == {
        "tp": 2, "sp": True, "pp": 8, "pipeline_layout": [7, 8, 8, 8, 8, 8, 8, 6], "ep": 16, "zero": 1,
    }  # fmt: skip
    assert notes(translation, "no equivalent") == {}
    assert "--moe-aux-loss-coeff" in notes(translation, "changes meaning")
    assert "only has an effect with softmax scores" in notes(translation, "not needed")["--moe-router-pre-softmax"]
    config = parsed(translation)
    config.check_world_size(256)
    assert config.model.is_moe_layer(61), "the layer of further tokens is like the last one"


def test_gpt_oss():
    translation = translate_launch_script(GPT_OSS)
    expected: dict[str, Any] = {
        "model.activation": "swiglu", "model.activation_limit": 7.0, "model.attention_sinks": True,
        "model.sliding_window": 128, "model.full_attention_layers": [1, 3], "model.rope.scaling": "yarn",
        "model.rope.truncate": False, "model.moe.router_bias": True, "model.moe.aux_loss": 0.0,
        "model.moe.score": "softmax", "model.moe.normalize": True,
    }  # fmt: skip
    check(translation, expected)
    assert notes(translation, "no equivalent") == {}
    assert parsed(translation).model.activation_limit == 7.0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {"model.moe.layers": None, "model.moe.groups": None, "parallel.expert_tp": None}),
        ("--moe-router-pre-softmax", {"model.moe.normalize": False}),
        ("--moe-router-score-function sigmoid --moe-router-topk 1", {"model.moe.normalize": False}),
        ("--moe-layer-freq 2", {"model.moe.layers": [0, 2]}),
        ("--moe-layer-freq 2 --mtp-num-layers 1 --position-embedding-type rope", {"model.moe.layers": [0, 2]}),
        ("--moe-layer-freq [0]+[1]*3", {"model.moe.layers": [1, 2, 3]}),
        ("--moe-layer-freq [1]*4", {"model.moe.layers": None}),
        (
            "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate",
            {"model.moe.shared_ffn_hidden_size": 32, "model.moe.shared_gate": True},
        ),
        ("--moe-router-num-groups 4 --moe-router-group-topk 2", {"model.moe.groups": 4, "model.moe.group_score": "max"}),
        ("--moe-router-num-groups 4", {"model.moe.groups": None}),
        ("--moe-router-bias-update-rate 0.1", {"model.moe.bias_rate": None}),
        (
            "--moe-router-load-balancing-type global_aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2",
            {"model.moe.aux_loss": 0.2, "model.moe.aux_loss_scope": "sequence"},
        ),
        ("--moe-expert-capacity-factor -1", {"model.moe.capacity_factor": None}),
        ("--tensor-model-parallel-size 2 --sequence-parallel", {"parallel.expert_tp": 2}),
        ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", {"parallel.expert_tp": None}),
        ("--expert-tensor-parallel-size 4", {"parallel.expert_tp": 4}),
        ("--context-parallel-size 2", {"parallel.cp": 2, "parallel.cp_kind": "ring"}),
        ("--context-parallel-size 2 --cp-comm-type all_gather", {"parallel.cp_kind": "allgather"}),
        ("--context-parallel-size 2 --cp-comm-type a2a a2a a2a a2a", {"parallel.cp_kind": "alltoall"}),
        ("--apply-layernorm-1p", {"model.zero_centered_norm": True}),
        ("--position-embedding-type rope --rotary-interleaved", {"model.rope.interleaved": True}),
        ("--position-embedding-type yarn --rotary-interleaved", {"model.rope.interleaved": None}),
        ("--position-embedding-type yarn --rotary-percent 0.5", {"model.rope.fraction": None, "model.rope.mscale": None}),
        (
            f"{LATENT} --position-embedding-type none --yarn-original-max-position-embeddings 8 --yarn-beta-fast 8",
            {"model.position": "rope", "model.rope.original_max_position": 4096, "model.rope.beta_fast": None},
        ),
        (f"{LATENT} --position-embedding-type rope --rope-type rope --use-rope-scaling", {"model.rope.scaling": None}),
        ("--window-size 7,0 --window-attn-skip-freq [1,1,0,1]", {"model.full_attention_layers": [2]}),
        ("--window-size 7,0 --window-attn-skip-freq 4", {"model.full_attention_layers": [3]}),
        ("--optimizer-cpu-offload", {"optimizer.offload": True}),
    ],
)  # fmt: skip
def test_single_settings(arguments: str, expected: dict[str, Any]):
    translation = translate_launch_script(EXPERTS + arguments)
    check(translation, expected)
    parsed(translation)


@pytest.mark.parametrize(
    ("arguments", "kind", "flag"),
    [
        ("--moe-router-score-function sqrtsoftplus", "open", "model.moe.score"),
        ("--moe-router-load-balancing-type quantile_balancing", "no equivalent", "--moe-router-load-balancing-type"),
        ("--moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-topk 3", "no equivalent", "--moe-router-group-topk"),
        ("--moe-router-num-groups 2 --moe-router-group-topk 1", "changes meaning", "--moe-router-group-topk"),
        ("--moe-router-num-groups 2", "not needed", "--moe-router-num-groups"),
        ("--moe-expert-capacity-factor 1 --moe-token-drop-policy position", "changes meaning", "--moe-token-drop-policy"),
        ("--moe-pad-expert-input-to-capacity", "not needed", "--moe-pad-expert-input-to-capacity"),
        ("--context-parallel-size 2 --cp-comm-type p2p a2a", "no equivalent", "--cp-comm-type"),
        ("--context-parallel-size 2 --cp-comm-type a2a+p2p", "no equivalent", "--cp-comm-type"),
        ("--quick-geglu", "no equivalent", "--quick-geglu"),
        ("--position-embedding-type yarn --mscale 0.7", "no equivalent", "--mscale"),
        (f"{LATENT} --use-rotary-position-embeddings --apply-layernorm-1p", "changes meaning", "--apply-layernorm-1p"),
        ("--quick-geglu --activation-func-clamp-value 7", "no equivalent", "--activation-func-clamp-value"),
        ("--swiglu --activation-func-clamp-value 7", "no equivalent", "--activation-func-clamp-value"),
        ("--window-attn-skip-freq 2", "not needed", "--window-attn-skip-freq"),
        ("--rotary-interleaved", "not needed", "--rotary-interleaved"),
        ("--optimizer-cpu-offload --optimizer-offload-fraction 0.5", "changes meaning", "--optimizer-offload-fraction"),
    ],
)  # fmt: skip
def test_what_differs_is_told(arguments: str, kind: str, flag: str):
    assert flag in notes(translate_launch_script(EXPERTS + arguments), kind)


def test_copies_of_sharded_weights():
    script = "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py " + " ".join(SMALL.split())
    flags = " --use-megatron-fsdp --num-distributed-optimizer-instances 2 --tensor-model-parallel-size 2"
    config = parsed(translate_launch_script(script + flags))
    assert config.parallel.zero3_shard == 4
    config.check_world_size(16)
    unknown = translate_launch_script(script.replace("8", "$GPUS", 1) + flags)
    assert unknown.run["parallel"]["zero3_shard"] == "ranks of a copy", "null would mean all of them"


def test_without_a_number_of_layers_theirs_are_to_be_filled_in():
    flags = "--num-experts 8 --moe-layer-freq 2 --window-size 7,0 --window-attn-skip-freq 2"
    translation = translate_launch_script(SMALL.replace("--num-layers 4", "") + flags)
    keys = {note.key for note in translation.notes if note.kind == "open"}
    assert {"model.moe.layers", "model.full_attention_layers"} <= keys


def test_without_experts_their_flags_say_nothing():
    flags = "--moe-layer-freq 2 --moe-router-score-function sigmoid --expert-tensor-parallel-size 2"
    translation = translate_launch_script(SMALL + flags)
    assert "moe" not in translation.run["model"]
    assert "expert_tp" not in translation.run["parallel"]
    assert {"--moe-layer-freq", "--expert-tensor-parallel-size"} <= notes(translation, "not needed").keys()


@pytest.mark.parametrize("pattern", ["often", "[1]*3", "0", "[x]*4", "[1]*(2"])
@pytest.mark.parametrize("flag", ["--moe-layer-freq", "--window-size 7,0 --window-attn-skip-freq"])
def test_a_pattern_that_fits_no_layers_is_refused(flag: str, pattern: str):
    with pytest.raises(ConfigError, match=r"-freq .*must be a number, or a list of 4 zeros and ones"):
        translate_launch_script(f"{EXPERTS} {flag} '{pattern}'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", 3), ("[0]*3+[1]*2", [0, 0, 0, 1, 1]), ("([1]*2 + [0])*2", [1, 1, 0] * 2), ("2*[1,0]", [1, 0] * 2), ("x", None)],
)  # fmt: skip
def test_patterns_of_layers(text: str, expected: int | list[int] | None):
    assert parse_megatron_layer_freq(text) == expected
