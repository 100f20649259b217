"""Models that LitGPT makes from nothing, without a config.json: as mega they say what they say there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mega_ckpt.source import open_weight_source
from mega_common.errors import CheckpointError
from mega_eval.model_loading import load_inference_model

lit = pytest.importorskip("litgpt", reason="LitGPT is not installed")
SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 4, "intermediate_size": 48, "block_size": 64, "padded_vocab_size": 56}
TOKENS = torch.arange(40).reshape(2, 20) * 7 % 48
MODELS: dict[str, dict[str, Any]] = {
    "pythia-14m": {},
    "Llama-3.2-1B": {"n_query_groups": 2, "head_size": 8, "rope_adjustments": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 16,
    }},
    "Qwen2.5-0.5B": {"n_query_groups": 2, "head_size": 8},
    "Qwen3-0.6B": {"n_query_groups": 2, "head_size": 16},
    "Mistral-7B-v0.1": {"n_query_groups": 2, "head_size": 8, "sliding_window_size": 5, "sliding_window_indices": [1, 1]},
    "falcon-7b": {"n_query_groups": 1, "head_size": 8},
    "Gemma-2b": {"n_query_groups": 1, "head_size": 8},
    "Gemma-2-2b": {
        "n_query_groups": 2, "head_size": 8, "attention_scores_scalar": 12, "sliding_window_size": 5,
        "sliding_window_indices": [1, 0],
    },
    "Gemma-3-1b-it": {
        "n_query_groups": 1, "head_size": 8, "attention_scores_scalar": 12, "sliding_window_size": 5,
        "sliding_window_indices": [1, 0], "rope_indices": [1, 0], "rope_adjustments": {"factor": 2.0},
    },
    "OLMo-2-1124-7B": {"n_query_groups": 4, "head_size": 8},
    "Mixtral-8x7B-v0.1": {"n_query_groups": 2, "head_size": 8, "n_expert": 4},
    "Qwen3-30B-A3B": {
        "n_query_groups": 2, "head_size": 16, "moe_intermediate_size": 24, "n_expert": 6, "n_expert_per_token": 3,
    },
    "Phi-3-mini-4k-instruct": {"sliding_window_size": 7},
    "tiny-llama-1.1b": {"n_query_groups": 2, "head_size": 8, "rope_condense_ratio": 2},
}  # fmt: skip


def written(folder: Path, name: str, **fields: Any) -> Any:
    """A random model, saved as `litgpt pretrain` saves it; returns it."""
    config = lit.Config.from_name(name, **SMALL, **fields)
    torch.manual_seed(0)
    model = lit.GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    torch.save({"model": model.state_dict(), "step_count": 3}, folder / "lit_model.pth")
    lit.utils.save_config(config, folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_its_description_of_a_model_is_read(tmp_path: Path, name: str) -> None:
    theirs = written(tmp_path, name, **MODELS[name])
    ours, positions = load_inference_model(str(tmp_path)), torch.arange(TOKENS.shape[1])[None]
    with torch.no_grad():
        found = ours.compute_logits(ours(ours.embed_inputs(TOKENS, positions), ours.make_forward_context(positions)))
        torch.testing.assert_close(found, theirs(TOKENS), rtol=1e-5, atol=1e-5)


def test_what_it_alone_does_not_tell_is_refused_with_a_way_out(tmp_path: Path) -> None:
    scaled = {"factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 16}
    refused: dict[str, dict[str, Any]] = {
        "lm_head_bias = true": {"lm_head_bias": True}, "rope_adjustments": {"rope_adjustments": scaled},
        "norm_1 = true": {"post_mlp_norm": True}, "n_shared_expert = 2": {"n_shared_expert": 2},
    }  # fmt: skip
    for said, fields in refused.items():
        lit.utils.save_config(lit.Config.from_name("tiny-llama-1.1b", **SMALL, n_query_groups=2, **fields), tmp_path)
        with pytest.raises(CheckpointError, match=f"{said}.* is not supported") as error:
            open_weight_source(tmp_path)
        assert "add the config.json of the model to the folder of" in str(error.value)
    for damage in ("n_layer: 2\n", "- 1\n", "n_layer: [\n"):
        (tmp_path / "model_config.yaml").write_text(damage)
        with pytest.raises(CheckpointError, match=r"model_config.yaml: does not describe a model"):
            open_weight_source(tmp_path)
    lit.utils.save_config(lit.Config.from_name("pythia-14m", **SMALL), tmp_path)
    (tmp_path / "model_config.yaml").write_text(
        (tmp_path / "model_config.yaml").read_text().replace("n_head: 4", "n_head: 0")
    )
    with pytest.raises(CheckpointError, match=r"model_config.yaml: does not describe a model"):
        open_weight_source(tmp_path)
