"""Launch scripts of models whose layers are of several kinds."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from mega_ckpt.families import is_equivalent_config
from mega_cli.megatron_args import RunYamlTranslation, render_run_yaml, translate_launch_script
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_trainer.config.run_config import RunConfig, resolve_run_config

RUN = "--micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --data-path data/text --bf16 --seq-length 8192"
NANO = f"""
torchrun --nproc-per-node 8 pretrain_mamba.py {RUN} --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec \\
    --is-hybrid-model --mamba-num-heads 64 --mamba-head-dim 64 \\
    --hybrid-override-pattern MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME \\
    --moe-router-score-function sigmoid --num-experts 128 --moe-router-topk 6 --moe-aux-loss-coeff 1e-4 \\
    --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias --moe-router-load-balancing-type seq_aux_loss \\
    --moe-shared-expert-intermediate-size 3712 --untie-embeddings-and-output-weights --disable-bias-linear \\
    --position-embedding-type none --squared-relu --num-layers 52 --hidden-size 2688 --num-attention-heads 32 \\
    --group-query-attention --num-query-groups 2 --ffn-hidden-size 1856 --kv-channels 128 --normalization RMSNorm \\
    --max-position-embeddings 262144 --vocab-size 131072 --attention-dropout 0 --hidden-dropout 0
"""
SMALL = f"""{RUN} --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --vocab-size 512 --disable-bias-linear
    --normalization RMSNorm --swiglu --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --mamba-num-groups 4 """
NEXT = f"""{SMALL} --num-layers 8 --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --qk-layernorm
    --attention-output-gate --apply-layernorm-1p --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8
    --linear-value-head-dim 16 """


def run(text: str) -> dict[str, Any]:
    """The run.yaml of a script, which is one of mega."""
    translation = translate_launch_script(text)
    RunConfig.parse(resolve_run_config(yaml.safe_load(render_run_yaml(translation))))
    return translation.run


def notes(translation: RunYamlTranslation, kind: str) -> str:
    return "\n".join(f"{note.flag} {note.text}" for note in translation.notes if note.kind == kind)


def test_nemotron_3_nano_is_the_preset() -> None:
    assert is_equivalent_config(
        ModelConfig.parse(run(NANO)["model"]), ModelConfig.parse(load_model_preset("nemotron-3-nano"))
    )
    translation = translate_launch_script(NANO)
    assert notes(translation, "no equivalent") == ""
    assert notes(translation, "open") == ""


def test_bars_set_the_stages_and_the_number_of_layers_follows() -> None:
    found = run(SMALL + "--hybrid-layer-pattern 'M-M|*-|M-|M' --pipeline-model-parallel-size 2 --mamba-head-dim 16")
    assert (found["model"]["layers"], found["model"]["num_layers"]) == ("M-M*-M-M", 8)
    assert found["parallel"]["pipeline_layout"] == [3, 2, 2, 1]
    assert found["parallel"]["virtual_stages"] == 2
    mamba = {"num_heads": 8, "head_dim": 16, "state_size": 128, "num_groups": 4, "chunk_size": 128, "norm_eps": 1e-5}
    assert found["model"]["mamba"] == mamba


def test_shares_of_attention_and_mlps() -> None:
    found = run(
        SMALL
        + "--num-layers 10 --is-hybrid-model --hybrid-attention-ratio 0.2 --hybrid-mlp-ratio 0.3 --mamba-num-heads 8"
    )
    assert found["model"]["layers"] == "MM-*M-*MM-"


def test_further_tokens_behind_slashes() -> None:
    found = run(SMALL + "--hybrid-layer-pattern 'M*-/*-/*-' --mamba-num-heads 8")["model"]
    assert found["layers"] == ["mamba", "attention", "mlp", "attention+mlp", "attention+mlp"]
    assert (found["num_layers"], found["mtp_layers"]) == (3, 2)


def test_latent_attention_has_no_output_gate() -> None:
    with pytest.raises(ConfigError, match="--attention-output-gate: is not supported with --multi-latent"):
        run(SMALL + "--num-layers 2 --multi-latent-attention --attention-output-gate")


def test_gated_delta_nets_in_three_of_four_layers() -> None:
    model = run(NEXT)["model"]
    assert model["layers"] == (["delta+mlp"] * 3 + ["attention+mlp"]) * 2
    assert all(model[key] for key in ("attention_gate", "zero_centered_norm", "qk_norm"))
    sizes = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 16, "conv_kernel": 4}
    assert model["delta"] == sizes
    experts = run(NEXT + "--num-experts 4 --moe-layer-freq [0]*1+[1]*7 --moe-router-topk 2 --moe-latent-size 32")[
        "model"
    ]
    assert experts["layers"][:4] == ["delta+mlp", "delta+moe", "delta+moe", "attention+moe"]
    assert "layers" not in experts["moe"]
    assert experts["moe"]["latent_size"] == 32


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--hybrid-layer-pattern M?", "is not supported .supported letters: M mamba"),
        ("--hybrid-override-pattern M- --num-layers 3", "must be 2"),
        ("--hybrid-layer-pattern M-/MM", "/MM is not supported"),
    ],
)
def test_patterns_that_cannot_be_are_refused(flags: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        translate_launch_script(SMALL + flags)


def test_a_pattern_that_the_script_does_not_say_is_left_open() -> None:
    found = translate_launch_script(SMALL + "--num-layers 4 --hybrid-override-pattern $PATTERN")
    assert any(note.key == "model.layers" for note in found.notes if note.kind == "open")
