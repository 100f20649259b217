"""Megatron's settings mean the same model in a launch script as in the `args` of the checkpoint that the run saves."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mega_ckpt.families.model_equivalence import drop_redundant_model_fields
from mega_ckpt.formats.megatron_args import read_megatron_args
from mega_cli.megatron_args import translate_launch_script
from mega_cli.megatron_args.arithmetic import parse_megatron_layer_freq
from mega_cli.megatron_args.flag_tables import load_megatron_flag_specs, parse_megatron_arguments
from mega_cli.megatron_args.training_command import find_training_command
from mega_common.errors import CheckpointError, ConfigError
from mega_common.layer_kinds import distribute_layer_kinds
from mega_common.model_config import ModelConfig

SCRIPT = """
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --vocab-size 512
    --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --data-path data/text --bf16
"""
LATENT = """
    --multi-latent-attention --qk-layernorm --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6
    --normalization RMSNorm --position-embedding-type rope
"""
# Of each line one or none.
MODEL = """
    --ffn-hidden-size 96
    --kv-channels 24
    --group-query-attention --num-query-groups 2 | --num-query-groups 2
    --untie-embeddings-and-output-weights
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --apply-layernorm-1p
    --disable-bias-linear | --add-qkv-bias | --disable-bias-linear --add-qkv-bias
    --qk-layernorm
    --swiglu | --squared-relu | --openai-gelu | --no-bias-gelu-fusion | --quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 1
    --softmax-type learnable
    --window-size 7,0 | --window-size '(-1,-1)' | --window-size 7,0 --window-attn-skip-freq 2 | --window-size 7,0 --window-attn-skip-freq [1,0]*2
    --window-attn-skip-freq 2
    --mtp-num-layers 2 | --mtp-num-layers 1 --mtp-loss-scaling-factor 0.5
    --hidden-dropout 0
    --attention-dropout 0.2
    --init-method-std 0.01
    --position-embedding-type rope | --position-embedding-type yarn | --position-embedding-type none | --use-rotary-position-embeddings
    --rotary-base 50000
    --rotary-percent 0.5
    --rotary-interleaved
    --use-rope-scaling | --use-rope-scaling --rope-scaling-factor 4
    --rotary-seq-len-interpolation-factor 2
    --rotary-scaling-factor 8
    --mscale 0.7 --mscale-all-dim 0.7
    --yarn-original-max-position-embeddings 32
    --yarn-beta-fast 16
    --yarn-beta-slow 2
    --no-yarn-correction-range-round-to-int
    --rope-type rope
"""
EXPERTS = """
    --moe-router-topk 1 | --moe-router-topk 3
    --moe-ffn-hidden-size 32
    --moe-layer-freq 2 | --moe-layer-freq [0]+[1]*3 | --moe-layer-freq [1]*4
    --moe-shared-expert-intermediate-size 48
    --moe-shared-expert-gate
    --moe-router-score-function sigmoid
    --moe-router-pre-softmax
    --moe-router-topk-scaling-factor 2.5
    --moe-router-num-groups 4 | --moe-router-num-groups 1 | --moe-router-num-groups 2 --moe-router-group-topk 2
    --moe-router-enable-expert-bias
    --moe-router-bias-update-rate 0.01
    --moe-router-load-balancing-type seq_aux_loss | --moe-router-load-balancing-type global_aux_loss seq_aux_loss aux_loss
    --moe-aux-loss-coeff 0.1 | --moe-aux-loss-coeff 0.1 0.2 0.3
    --moe-z-loss-coeff 1e-3
    --moe-expert-capacity-factor 1.5 | --moe-expert-capacity-factor -1
"""
# What one of the two, or both, refuse in most models.
ODD = """
    --activation-func-clamp-value 7
    --glu-linear-offset 1
    --quick-geglu
    --quick-geglu --activation-func-clamp-value 7 --glu-linear-offset 0.5
    --softmax-type off-by-one
    --window-size 7,1
    --position-embedding-type mrope
    --mscale 0.7
    --mscale-all-dim 0.7
    --use-mup
    --mtp-num-layers 2 --mtp-use-repeated-layer --position-embedding-type rope
    --mtp-num-layers 1 --position-embedding-type rope --window-size 7,0 --window-attn-skip-freq [1,0,1,0,0]
    --qk-l2-norm
    --apply-residual-connection-post-layernorm
    --multi-latent-attention
    --num-experts 8 --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 1
    --num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 1
    --num-experts 8 --moe-router-group-topk 2
    --num-experts 8 --moe-router-score-function sqrtsoftplus
"""


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


def choices(text: str) -> st.SearchStrategy[str]:
    each = [["", "", *line.split("|")] for line in lines(text)]
    return st.tuples(*map(st.sampled_from, each)).map(" ".join)


FLAGS = st.tuples(
    choices(MODEL),
    st.sampled_from(["", "", "", LATENT, f"{LATENT} --q-lora-rank 24 --position-embedding-type none"]),
    st.just("") | choices(EXPERTS).map("--num-experts 8 ".__add__),
    st.just("") | st.sampled_from(lines(ODD)),
).map(" ".join)


def args_of(script: str) -> dict[str, Any]:
    """What Megatron keeps of a command line, with what it fills in."""
    arguments = parse_megatron_arguments(find_training_command(script).arguments, load_megatron_flag_specs())
    arguments.raise_problems()
    args = {dest: arguments[dest] for dest in arguments.flags}
    for name in ("moe_layer_freq", "window_attn_skip_freq"):
        args[name] = parse_megatron_layer_freq(args[name]) if isinstance(args[name], str) else args[name]
    whole = "yarn_correction_range_round_to_int"  # on, off, or neither
    args[whole] = args[whole] if whole in arguments else None
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "num_experts"):  # lists here, or in forks
        args[name] = args[name][0] if args[name] and len(args[name]) == 1 else args[name]
    width = args["hidden_size"]
    args["ffn_hidden_size"] = args["ffn_hidden_size"] or (width * 8 // 3 // 64 * 64 if args["swiglu"] else 4 * width)
    args["kv_channels"] = args["kv_channels"] or width // args["num_attention_heads"]
    args["moe_ffn_hidden_size"] = args["moe_ffn_hidden_size"] or args["ffn_hidden_size"]
    return args | {"bias_gelu_fusion": args["bias_gelu_fusion"] and args["add_bias_linear"]}


def meaning(model: ModelConfig) -> dict[str, Any]:
    """A model's fields without those that have no effect."""
    fields = drop_redundant_model_fields(model).model_dump() | {
        "num_kv_heads": model.key_value_heads,
        "head_dim": model.query_key_head_dim,
    }
    if model.position != "rope":
        fields["rope"] = None
    if model.moe and model.moe.groups == 1:
        fields["moe"]["group_score"] = None
    if model.moe and not model.moe.aux_loss:
        fields["moe"]["aux_loss_scope"] = None
    return fields


@settings(max_examples=200, deadline=None)
@given(FLAGS)
def test_a_launch_script_and_the_checkpoint_of_its_run(flags: str) -> None:
    """Where the checkpoint's settings are refused, something is said of the script's flags."""
    try:
        theirs = read_megatron_args(args_of(SCRIPT + flags), "the checkpoint")
    except CheckpointError:
        theirs = None
    try:
        translation = translate_launch_script(SCRIPT + flags)
        ours = ModelConfig.parse(translation.run["model"])
    except ConfigError:
        assert theirs is None
        return
    if theirs is None:
        assert any(note.flag and note.kind in ("no equivalent", "changes meaning") for note in translation.notes)
    else:
        assert meaning(ours) == meaning(theirs)


HYBRID = """
    --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --vocab-size 512 --mamba-num-groups 4
    --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --data-path data/text --bf16 --disable-bias-linear
    --position-embedding-type none --mamba-head-dim 16
"""


@pytest.mark.parametrize(
    "flags",
    [
        "--hybrid-layer-pattern 'M-|*M' --mamba-num-heads 4 --mamba-state-dim 32",
        "--hybrid-override-pattern ME*E --num-layers 4 --num-experts 4 --moe-latent-size 16 --norm-epsilon 1e-6",
        "--is-hybrid-model --num-layers 7 --hybrid-attention-ratio 0.15 --hybrid-mlp-ratio 0.4 --num-experts 4",
    ],
)
def test_a_launch_script_of_a_hybrid_and_the_checkpoint_of_its_run(flags: str) -> None:
    theirs = read_megatron_args(args_of(HYBRID + flags), "the checkpoint")
    assert meaning(ModelConfig.parse(translate_launch_script(HYBRID + flags).run["model"])) == meaning(theirs)


def test_shares_of_kinds_are_spread_as_megatron_spreads_them() -> None:
    pytest.importorskip("megatron.core", reason="the reference implementation")
    from megatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers

    for layers, attention, mlp in itertools.product(range(1, 60, 3), (0.0, 0.08, 0.1, 0.25), (0.0, 0.1, 0.3, 0.5)):
        assert distribute_layer_kinds(layers, attention, mlp) == "".join(allocate_layers(layers, attention, mlp))


def test_nothing_is_said_of_the_flags_that_all_have() -> None:
    assert {note.kind for note in translate_launch_script(SCRIPT).notes if note.flag} <= {"translated", "not needed"}


def test_latents_that_turn_a_part_of_their_rotary_dimensions_are_told_of() -> None:
    notes = translate_launch_script(SCRIPT + LATENT.replace("\n", " ") + "--rope-type rope --rotary-percent 0.5").notes
    assert [note.kind for note in notes if "--rotary-percent" in (note.flag or "")] == ["no equivalent"]
