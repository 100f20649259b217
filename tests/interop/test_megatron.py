"""Checkpoints of Megatron-Core itself: it saves and mega computes the same; mega writes and it loads, strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_oracle
import pytest
import torch
from megatron_oracle import BASE, EXPERTS, GROUPED, run
from torch import nn

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.source import load_weights, open_weight_source
from mega_ckpt.tensor_pieces import boxes_by_name
from mega_eval.model_loading import load_inference_model
from mega_trainer.data.micro_batch import DocumentBounds, MicroBatch, MtpTargets
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.parameter_info import get_parameter_info, iterate_saved_buffers
from mega_trainer.run.train_step import normalize_auxiliary_loss_weights

pytest.importorskip("megatron.core", reason="the reference implementation")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
]  # the first test of a fixture waits for four ranks that start twice

LATENT: dict[str, Any] = {
    "multi_latent_attention": True, "qk_layernorm": True, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4, "v_head_dim": 5, "rope_type": "yarn", "rotary_scaling_factor": 40.0, "mscale": 0.7,
    "mscale_all_dim": 0.9,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "num_layers": 6, "is_hybrid_model": True, "position_embedding_type": "none", "squared_relu": True, "swiglu": False,
    "mamba_state_dim": 5, "mamba_head_dim": 6, "mamba_num_groups": 2, "mamba_num_heads": 8, "hybrid_attention_ratio": 0.0,
    "hybrid_mlp_ratio": 0.0,
}  # fmt: skip
# name: what differs from BASE, and the layout that Megatron saves it in
MODELS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "grouped-bias-odd-vocabulary": ({**GROUPED, "add_qkv_bias": True, "vocab_size": 61}, {"tp": 2, "pp": 2}),
    "tied-normed-gated": (
        {
            **GROUPED, "untie_embeddings_and_output_weights": False, "qk_layernorm": True, "attention_output_gate": True,
            "add_qkv_bias": True,
        },
        {"tp": 2, "pp": 2},
    ),
    "gpt": (
        {
            "normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True, "kv_channels": 10,
            "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False,
        },
        {"tp": 2, "pp": 1},
    ),
    "experts": ({**GROUPED, **EXPERTS}, {"tp": 1, "pp": 2, "ep": 2}),
    "experts-shared": ({**EXPERTS, "moe_shared_expert_intermediate_size": 40}, {"tp": 2, "pp": 1}),
    "experts-in-some-layers-and-groups": (
        {
            **EXPERTS, "moe_layer_freq": [0, 1, 1, 0], "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True, "moe_router_group_topk": 1,
        },
        {"tp": 1, "pp": 2, "ep": 2},
    ),
    "latent": (LATENT, {"tp": 2, "pp": 2}),
    "latent-without-norms": ({**LATENT, "qk_layernorm": False}, {"tp": 2, "pp": 2}),
    "experts-as-in-gpt-oss": (
        {
            **GROUPED, **EXPERTS, "add_bias_linear": True, "swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 0.3, "softmax_type": "learnable", "window_size": [4, 0], "window_attn_skip_freq": 2,
            "position_embedding_type": "yarn", "rotary_scaling_factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.0,
            "yarn_original_max_position_embeddings": 16, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0,
            "yarn_correction_range_round_to_int": False,
        },
        {"tp": 1, "pp": 2, "ep": 2},
    ),
    "centred-norms-neighbors": (
        {
            **GROUPED, "normalization": "LayerNorm", "layernorm_zero_centered_gamma": True, "rotary_interleaved": True,
            "kv_channels": 12, "rotary_percent": 0.5, "softmax_type": "learnable", "window_size": [3, 0],
            "window_attn_skip_freq": [1, 0, 0, 1], "swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 0.3,
        },
        {"tp": 2, "pp": 2},
    ),
    "interleaved": ({}, {"tp": 1, "pp": 2, "vp": 2}),
    "further": (
        {
            **GROUPED, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.2, "window_size": [4, 0],
            "window_attn_skip_freq": 5,
        },
        {"tp": 2, "pp": 2},
    ),
    "further-latent-experts": (
        {
            **EXPERTS, **LATENT, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1,
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        },
        {"tp": 2, "pp": 2},
    ),
    "further-experts-in-some-layers": (
        {**GROUPED, **EXPERTS, "moe_layer_freq": [0, 1, 0, 1], "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3},
        {"tp": 1, "pp": 2, "ep": 2},
    ),
    "hybrid": (
        {**GROUPED, **EXPERTS, **HYBRID, "moe_shared_expert_intermediate_size": 40, "moe_router_score_function": "sigmoid",
         "moe_router_enable_expert_bias": True, "hybrid_override_pattern": "M*-MEM"},
        {"tp": 2, "pp": 2},
    ),
    "hybrid-rotary-tied": (
        {**HYBRID, "hybrid_override_pattern": "-MM*M-", "position_embedding_type": "rope", "swiglu": True, "squared_relu": False,
         "untie_embeddings_and_output_weights": False, "mamba_num_groups": 4},
        {"tp": 1, "pp": 2},
    ),
}  # fmt: skip
FURTHER = [name for name, (changes, _) in MODELS.items() if changes.get("mtp_num_layers")]


@pytest.fixture(scope="module")
def megatron_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model as Megatron saves it, in both formats, with its logits."""
    root, jobs = tmp_path_factory.mktemp("theirs"), []
    for name, (changes, layout) in sorted(MODELS.items(), key=lambda item: str(item[1][1])):  # a layout after the other
        places = {"folder": str(root / name / "iter_0000007"), "legacy": str(root / f"{name}-legacy")}
        jobs.append({"do": "save", "args": BASE | changes, **layout, **places})
    run([*jobs, *({"do": "load", "folder": job["folder"]} for job in jobs)], root)
    return root


@pytest.fixture(scope="module")
def mega_checkpoint(megatron_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model as mega writes it after a way through a checkpoint of its own, loaded by Megatron: its logits.

    Its older format is loaded strictly too, and gives the same tensors on every rank.
    """
    root, jobs = tmp_path_factory.mktemp("ours"), []
    for name, (changes, _) in MODELS.items():
        tp = (
            1 if changes.get("num_experts") and changes.get("add_bias_linear") else 2
        )  # biases of experts are not split
        convert_checkpoint(megatron_checkpoint / name, root / "mega" / name, "mega", verify=True)
        convert_checkpoint(root / "mega" / name, root / name, "megatron", options=ConvertOptions(tp=tp), verify=True)
        jobs.append({"do": "load", "folder": str(root / name / "release"), "tp": tp})
        for pp in (1, 2):
            legacy = root / f"{name}-{tp}-{pp}"
            options = ConvertOptions(megatron_format="torch", tp=tp, pp=pp, implementation="local")
            convert_checkpoint(root / "mega" / name, legacy, "megatron", options=options)
            same = {"folder": str(legacy / "release"), "like": str(root / name / "release"), "tp": tp, "pp": pp}
            jobs.append({"do": "load legacy", **same})
    run(sorted(jobs, key=lambda job: (job["do"], job["tp"], job.get("pp", 1))), root)
    return root


def logits(folder: Path) -> torch.Tensor:
    model, config = load_inference_model(folder), open_weight_source(folder).model
    tokens = megatron_oracle.tokens(config.vocab_size)
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        return model.compute_logits(model(model.embed_inputs(tokens, positions), model.make_forward_context(positions)))


@pytest.mark.parametrize("name", MODELS)
def test_what_megatron_saves_mega_reads(megatron_checkpoint: Path, name: str) -> None:
    expected = torch.load(megatron_checkpoint / name / "iter_0000007.pt")["logits"]
    assert expected.std() > 0.1, "logits that say nothing"
    torch.testing.assert_close(logits(megatron_checkpoint / name), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_what_mega_writes_megatron_loads(megatron_checkpoint: Path, mega_checkpoint: Path, name: str) -> None:
    expected = torch.load(megatron_checkpoint / name / "iter_0000007.pt")["logits"]
    torch.testing.assert_close(torch.load(mega_checkpoint / name / "release.pt")["logits"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_files_of_all_ranks_are_the_same_model(megatron_checkpoint: Path, name: str) -> None:
    dist, legacy = (
        open_weight_source(megatron_checkpoint / name),
        open_weight_source(megatron_checkpoint / f"{name}-legacy"),
    )
    assert all(torch.equal(dist.read_tensor(key), legacy.read_tensor(key)) for key in dist.tensor_names())


def whole_model(folder: Path) -> Decoder:
    """The model with the layers that predict further tokens."""
    source = open_weight_source(folder)
    model = Decoder(LayerBuilder(source.model))
    held = [(parameter.detach(), get_parameter_info(parameter).pieces) for parameter in model.parameters()]
    load_weights(source, boxes_by_name([*held, *iterate_saved_buffers(model)]))
    return model


@pytest.mark.parametrize("name", FURTHER)
def test_further_tokens(megatron_checkpoint: Path, mega_checkpoint: Path, name: str) -> None:
    """Their logits, on both sides of both ways, and what they add to the loss."""
    model, expected = (
        whole_model(megatron_checkpoint / name),
        torch.load(megatron_checkpoint / name / "iter_0000007.pt"),
    )
    tokens, found = megatron_oracle.tokens(model.config.vocab_size), []
    labels, positions, ones = tokens.roll(-1, 1), torch.arange(tokens.shape[1])[None], torch.ones(tokens.shape)
    ahead = [
        MtpTargets(*(nn.functional.pad(one[:, k:], (0, k)) for one in (tokens, labels, ones)))
        for k in range(1, model.config.mtp_layers + 1)
    ]
    for predictor in model.predictors:
        predictor.register_forward_hook(lambda module, inputs, output: found.append(output @ model.output_weight.T))
    batch = MicroBatch(
        tokens,
        labels,
        ones,
        positions,
        DocumentBounds.from_positions(positions.numpy(), None),
        [0, 1],
        mtp_targets=ahead,
    )
    (batch,) = normalize_auxiliary_loss_weights(
        [batch], [ones.sum().item(), *(one.weights.sum().item() for one in ahead)]
    )
    with torch.no_grad():
        _, (_, loss), _ = model.run_stage(None, batch, model.make_forward_context(positions))
    written = torch.load(mega_checkpoint / name / "release.pt")["further"]
    for mine, one, other in zip(found, expected["further"], written, strict=True):
        assert one.std() > 0.1, "logits that say nothing"
        torch.testing.assert_close(mine, one, rtol=0, atol=1e-5)
        torch.testing.assert_close(other, one, rtol=0, atol=1e-5)
    torch.testing.assert_close(model.config.mtp_loss * loss / ones.sum(), expected["loss"], rtol=1e-5, atol=0)
