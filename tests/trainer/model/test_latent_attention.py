"""Latent attention and rotation of neighbors against transformers' DeepSeek, and what an attention with a latent is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mega_ckpt.tensor_pieces import TensorBox, boxes_by_name, copy_overlap
from mega_common.model_config import ModelConfig
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.latent_attention import mla_score_scale
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.parameter_info import get_parameter_info

HEADS = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
YARN = {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 4.0}


def mega_config(**fields: Any) -> ModelConfig:
    sizes = {
        "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 4, "vocab_size": 61,
        "max_position": 64, "norm_eps": 1e-2,
    }  # fmt: skip
    return ModelConfig.parse({**sizes, **fields})


def hf_config(version: int, **fields: Any) -> Any:
    """A random transformers model with dense layers alone. No weight has the value it would start from."""
    transformers = pytest.importorskip("transformers", reason="the oracle")
    config = getattr(transformers, f"DeepseekV{version}Config")(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, first_k_dense_replace=2, max_position_embeddings=64, rms_norm_eps=1e-2, **HEADS, **fields,
    )  # fmt: skip
    torch.manual_seed(0)
    made = getattr(transformers, f"DeepseekV{version}ForCausalLM")._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return made.eval()


def with_weights_of(oracle: Any, config: ModelConfig) -> Decoder:
    """Our model with the same weights, which have the same names."""
    model, weights = Decoder(LayerBuilder(config)).eval().requires_grad_(False), oracle.state_dict()
    boxes = boxes_by_name(
        (parameter.detach(), get_parameter_info(parameter).pieces) for parameter in model.parameters()
    )
    assert boxes.keys() == weights.keys()
    for name, held in boxes.items():
        for box in held.boxes:
            copy_overlap(box, TensorBox((0,) * weights[name].dim(), weights[name]))
    return model


@pytest.mark.parametrize("q_lora_rank", [None, 20])
@pytest.mark.parametrize(
    ("version", "interleaved", "yarn"), [(3, True, False), (3, True, True), (3, False, True), (2, True, True)]
)
def test_logits_are_those_of_transformers(version: int, interleaved: bool, yarn: bool, q_lora_rank: int | None) -> None:
    rope: dict[str, Any] = {"theta": 1000.0, "interleaved": interleaved}
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 1000.0}
    if yarn:
        rope |= {"scaling": "yarn", "original_max_position": 16, **YARN}
        parameters |= {"rope_type": "yarn", "original_max_position_embeddings": 16, **YARN}
    bias = {"rope_interleave": interleaved, "attention_bias": yarn} if version == 3 else {"attention_bias": yarn}
    oracle = hf_config(version, q_lora_rank=q_lora_rank, rope_parameters=parameters, **bias)
    mla = {**HEADS, "q_lora_rank": q_lora_rank}
    model = with_weights_of(oracle, mega_config(mla=mla, rope=rope, qkv_bias=yarn, attention_out_bias=yarn))
    tokens, positions = torch.randint(61, (2, 29), generator=torch.Generator().manual_seed(1)), torch.arange(29)[None]
    with torch.no_grad():
        expected = oracle(tokens).logits
    found = model.compute_logits(model(model.embed_inputs(tokens, positions), model.make_forward_context(positions)))
    assert expected.std() > 0.1, "logits that say nothing"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_scale_of_scores() -> None:
    rope = {"scaling": "yarn", "original_max_position": 16, **YARN}
    assert mla_score_scale(mega_config(mla=HEADS)) == pytest.approx(10**-0.5)
    assert mla_score_scale(mega_config(mla=HEADS, rope=rope)) == pytest.approx(10**-0.5 * 1.1802183**2)
    assert mla_score_scale(mega_config(mla=HEADS, rope={**rope, "mscale_all_dim": None})) == pytest.approx(10**-0.5)
    assert mla_score_scale(mega_config(mla=HEADS, attention_scale=0.25)) == 0.25
