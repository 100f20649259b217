"""Models with settings that few folders have: HuggingFace to mega gives the same logits, and so does a folder that is written anew."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mega_ckpt.convert import convert
from mega_ckpt.formats.hf_write import plan_hf_folder, write_hf_folder
from mega_ckpt.source import MegaWeightSource, open_weight_source
from mega_common.errors import CheckpointError
from mega_eval.encoder_losses import compute_decoder_states
from mega_eval.model_loading import load_inference_model

transformers = pytest.importorskip("transformers", reason="the reference implementation")

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2}
DELTA = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
GRANITE = {**MAMBA, "num_local_experts": 0, "shared_intermediate_size": 48}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0], "original_max_position_embeddings": 32,
}  # fmt: skip
T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "Bamba without attention": ("BambaConfig", {**SIZES, **MAMBA, "attn_layer_indices": []}),
    "Bamba of attention alone": ("BambaConfig", {**SIZES, **MAMBA, "attn_layer_indices": [0, 1]}),
    "Granite without attention": ("GraniteMoeHybridConfig", {**SIZES, **GRANITE, "layer_types": ["mamba"] * 2}),
    "Granite of attention alone": ("GraniteMoeHybridConfig", {**SIZES, **GRANITE, "layer_types": ["attention"] * 2}),
    "Qwen3-Next without attention": (
        "Qwen3NextConfig", {**SIZES, **DELTA, **EXPERTS, "layer_types": ["linear_attention"] * 2}
    ),
    "Qwen3-Next of attention alone": (
        "Qwen3NextConfig", {**SIZES, **DELTA, **EXPERTS, "layer_types": ["full_attention"] * 2}
    ),
    "Qwen3.5 without attention": ("Qwen3_5TextConfig", {**SIZES, **DELTA, "layer_types": ["linear_attention"] * 2}),
    "Qwen3.5 of attention alone": ("Qwen3_5TextConfig", {**SIZES, **DELTA, "layer_types": ["full_attention"] * 2}),
    "Cohere with wide heads": ("CohereConfig", {**SIZES, "head_dim": 12}),
    "Cohere 2 with wide heads": ("Cohere2Config", {**SIZES, "head_dim": 12}),
    "Cohere 2 with narrow heads": ("Cohere2Config", {**SIZES, "head_dim": 4}),
    "UMT5 with a head of its own": ("UMT5Config", {**T5, "tie_word_embeddings": False}),
    "mT5 with a head of its own": ("MT5Config", {**T5, "tie_word_embeddings": False}),
    "UMT5 with tied matrices": ("UMT5Config", T5),
    "LongRoPE of Llama": ("LlamaConfig", {**SIZES, "rope_parameters": LONG}),
    "LongRoPE of Mistral": ("MistralConfig", {**SIZES, "rope_parameters": LONG, "sliding_window": None}),
    "LongRoPE of Qwen2": ("Qwen2Config", {**SIZES, "rope_parameters": LONG}),
    "LongRoPE of Qwen3": ("Qwen3Config", {**SIZES, "head_dim": 8, "rope_parameters": LONG}),
}  # fmt: skip


class Bare(MegaWeightSource):
    """A checkpoint without the files of the folder that it was made from."""

    def asset_files(self) -> Mapping[str, Path | bytes]:
        return {}


def computed(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of transformers; of an encoder-decoder those of the same tokens. Its cache needs a layer with attention."""
    also = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {"use_cache": False}
    logits: torch.Tensor = model(tokens, **also).logits
    return logits


@torch.no_grad()
@pytest.mark.parametrize("length", [20, 40], ids=["short", "long"])
@pytest.mark.parametrize("case", CASES)
def test_a_model_comes_in_and_goes_out_again(tmp_path: Path, case: str, length: int) -> None:
    kind, settings = CASES[case]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**settings)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    theirs = auto.from_config(config).float().eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.1)
    theirs.save_pretrained(tmp_path / "hf")
    tokens = torch.randint(3, 97, (1, length))
    expected = computed(theirs, tokens)

    convert(tmp_path / "hf", tmp_path / "mega", "mega")
    ours = load_inference_model(tmp_path / "mega", kinds=("decoder", "encoder-decoder"))
    positions = torch.arange(length)[None]
    if config.is_encoder_decoder:
        x = compute_decoder_states(ours, tokens.tolist(), tokens.tolist())
    else:
        x = ours(ours.embed_inputs(tokens, positions), ours.make_forward_context(positions))
    torch.testing.assert_close(ours.compute_logits(x), expected, rtol=1e-4, atol=1e-4)

    source = open_weight_source(tmp_path / "mega")
    assert isinstance(source, MegaWeightSource)
    bare = Bare(source.checkpoint)
    (tmp_path / "anew").mkdir()
    write_hf_folder(bare, plan_hf_folder(bare), tmp_path / "anew", lambda _: None)
    again, info = auto.from_pretrained(tmp_path / "anew", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(computed(again.float().eval(), tokens), expected, rtol=1e-4, atol=1e-4)


UNTIED: dict[str, tuple[str, bool | None, float | None]] = {
    # class, tie_word_embeddings in config.json, and by what our logits are larger; None: refused by name
    "mT5, false": ("MT5Config", False, 1.0),
    "mT5, true": ("MT5Config", True, 1.0),
    "mT5, absent": ("MT5Config", None, 1.0),
    "UMT5 of version 5": ("UMT5Config", True, 1.0),
    "UMT5, absent": ("UMT5Config", None, 1.0),
    "UMT5 of version 4, which does not scale": ("UMT5Config", False, 32**0.5),
    "T5 1.1": ("T5Config", False, 1.0),
    "T5 1.0": ("T5Config", True, None),
    "T5 1.0, absent": ("T5Config", None, None),
}


@torch.no_grad()
@pytest.mark.parametrize(("kind", "said", "factor"), UNTIED.values(), ids=UNTIED)
@pytest.mark.parametrize("bare", [False, True], ids=["with its files", "anew"])
def test_a_head_apart_from_the_embedding_comes_in_and_goes_out_again(
    tmp_path: Path, kind: str, said: bool | None, factor: float | None, bare: bool
) -> None:
    """Transformers 5 ties such models when it makes them, but not when a folder has two different matrices."""
    torch.manual_seed(0)
    auto, folder = transformers.AutoModelForSeq2SeqLM, tmp_path / "hf"
    auto.from_config(getattr(transformers, kind)(**T5)).float().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(97, 32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in ("tie_word_embeddings", "scale_decoder_outputs")}
    (folder / "config.json").write_text(json.dumps(raw if said is None else {**raw, "tie_word_embeddings": said}))
    theirs, tokens = auto.from_pretrained(folder).eval(), torch.randint(3, 97, (1, 20))
    assert not torch.equal(theirs.lm_head.weight, theirs.shared.weight)

    if factor is None:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from shared\.weight"):
            convert(folder, tmp_path / "mega", "mega")
        return
    convert(folder, tmp_path / "mega", "mega")
    ours = load_inference_model(tmp_path / "mega", kinds=("encoder-decoder",))
    expected = computed(theirs, tokens)
    logits = ours.compute_logits(compute_decoder_states(ours, tokens.tolist(), tokens.tolist()))
    torch.testing.assert_close(logits, factor * expected, rtol=1e-4, atol=1e-4)

    source = open_weight_source(tmp_path / "mega")
    assert isinstance(source, MegaWeightSource)
    out = Bare(source.checkpoint) if bare else source
    (tmp_path / "anew").mkdir()
    write_hf_folder(out, plan_hf_folder(out, family=theirs.config.model_type), tmp_path / "anew", lambda _: None)
    torch.testing.assert_close(computed(auto.from_pretrained(tmp_path / "anew").eval(), tokens), expected)
    assert open_weight_source(tmp_path / "anew").model == source.model
