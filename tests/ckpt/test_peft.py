"""Adapters beside those of PEFT: folders both ways, and what a model with one computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import BASE, MOE, NEOX
from torch import Tensor
from typer.testing import CliRunner

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.families import find_family_by_name
from mega_ckpt.formats.peft_adapter import read_peft_adapter, write_peft_folder
from mega_ckpt.lora_adapter import AdaptedWeightSource, SavedAdapter
from mega_ckpt.lora_tensors import adapted_modules, adapter_tensor_shapes
from mega_ckpt.source import open_weight_source, open_weights_with_adapter
from mega_ckpt.tensor_pieces import crop_tensor
from mega_cli.ckpt import app
from mega_common.errors import CheckpointError, ConfigError
from mega_common.lora_config import LoraConfig
from mega_common.model_config import ModelConfig

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_kv_heads": 2, "tie_embeddings": True},
    "phi3": {"num_kv_heads": 2},
    "gpt_neox": NEOX,
    "gpt2": {
        "norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "tie_embeddings": True, "qkv_bias": True,
        "attention_out_bias": True, "mlp_bias": True,
    },
    "qwen3_moe": {"qk_norm": True, "head_dim": 6, "moe": MOE},
}  # fmt: skip
LORA = LoraConfig(rank=4, alpha=6.0, rslora=True, ranks={".*layers.1.*o_proj": 2}, alphas={".*o_proj": 3.0})
DORA = LoraConfig(rank=4, alpha=6.0, dora=True, modules=["v_proj", "o_proj", "down_proj"])


def folder_of(name: str, path: Path) -> Path:
    """A tiny model of transformers'."""
    config = find_family_by_name(name).write_config_json(ModelConfig.model_validate({**BASE, **MODELS[name]}))
    config |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    made.save_pretrained(path)
    return path


def adapter_beside(folder: Path, lora: LoraConfig = LORA) -> AdaptedWeightSource:
    """A random adapter of ours."""
    base = open_weight_source(folder)
    modules = adapted_modules(base.model, lora)
    shapes = adapter_tensor_shapes(modules)
    made = torch.Generator().manual_seed(1)
    tensors = {name: torch.randn(shape, generator=made) / 4 for name, shape in shapes.items()}
    return AdaptedWeightSource(
        base, SavedAdapter(lora, modules, shapes, lambda name, *box: crop_tensor(tensors[name], *box), {})
    )


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(tokens).logits
    return out


@pytest.mark.parametrize(
    ("name", "lora"), [*((name, LORA) for name in MODELS), ("phi3", DORA), ("gpt2", DORA), ("gpt_neox", DORA)]
)
def test_a_folder_of_ours_is_peft_s_and_comes_back(name: str, lora: LoraConfig, tmp_path: Path) -> None:
    """Among them magnitudes of a fused projection, of which not all parts have an adapter, and beside biases."""
    folder, out = folder_of(name, tmp_path / "base"), tmp_path / "adapter"
    source = adapter_beside(folder, lora)
    out.mkdir()
    write_peft_folder(source.adapter, source.base, out)
    tokens = torch.arange(24).view(2, 12)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    before = logits(base, tokens)
    theirs = logits(peft.PeftModel.from_pretrained(base, out), tokens)
    convert_checkpoint(folder, tmp_path / "merged", "hf", options=ConvertOptions(adapter=str(out)))
    ours = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), tokens)
    assert (theirs - before).abs().max() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    back = open_weights_with_adapter(out, folder)
    for key in source.tensor_names():
        torch.testing.assert_close(back.read_tensor(key), source.read_tensor(key), rtol=1e-5, atol=1e-6)


def test_what_peft_saves_is_read_and_what_is_not_ours_is_refused(tmp_path: Path) -> None:
    folder, out = folder_of("llama", tmp_path / "base"), tmp_path / "theirs"
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"], rank_pattern={"layers.1.mlp.down_proj": 2},
        init_lora_weights=False,
    )  # fmt: skip
    model = peft.get_peft_model(base, config)
    model.save_pretrained(out)
    theirs = model.merge_and_unload().state_dict()
    ours = open_weights_with_adapter(out, folder)
    for key in ours.tensor_names():
        torch.testing.assert_close(ours.read_tensor(key), theirs[key], rtol=1e-5, atol=1e-6)
    raw = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps({**raw, "base_model_name_or_path": str(folder)}))
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(open_weight_source(out).read_tensor(name), ours.read_tensor(name))
    (out / "adapter_config.json").write_text(json.dumps({**raw, "bias": "some"}))
    with pytest.raises(CheckpointError, match="bias = 'some' is not supported"):
        read_peft_adapter(out, open_weight_source(folder))
    with pytest.raises(CheckpointError, match="--to peft requires a LoRA adapter"):
        convert_checkpoint(folder, tmp_path / "none", "peft")
    (out / "adapter_config.json").write_text(json.dumps(raw))
    other = folder_of("gpt2", tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"the module model\.layers\.0\..* is not supported in a gpt2 model"):
        open_weights_with_adapter(out, other)


def test_magnitudes_of_experts_in_a_folder_are_refused(tmp_path: Path) -> None:
    folder, out = folder_of("qwen3_moe", tmp_path / "base"), tmp_path / "adapter"
    source = adapter_beside(folder)
    out.mkdir()
    write_peft_folder(source.adapter, source.base, out)
    raw = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps({**raw, "use_dora": True}))
    with pytest.raises(ConfigError, match=r"lora\.dora = True is not supported .*experts\.gate_up_proj"):
        read_peft_adapter(out, open_weight_source(folder))


def test_experts_have_neither_dropout_nor_magnitudes() -> None:
    model = ModelConfig.model_validate({**BASE, **MODELS["qwen3_moe"]})
    with pytest.raises(
        ConfigError,
        match=r"lora\.dropout = 0\.1 is not supported with experts .model\.layers\.\d\.mlp\.experts\.gate_up_proj",
    ):
        adapted_modules(model, LoraConfig(dropout=0.1))
    with pytest.raises(ConfigError, match=r"lora\.dora = True"):
        adapted_modules(model, LoraConfig(dora=True))
    assert {of.dropout for of in adapted_modules(model, LoraConfig(dropout=0.1, modules=["q_proj"])).values()} == {0.1}


def test_the_commands(tmp_path: Path) -> None:
    """Beside a base that says nothing of the adapter; a folder without one is told as such."""
    folder, out = folder_of("llama", tmp_path / "base"), tmp_path / "none"
    source = adapter_beside(folder)
    (tmp_path / "adapter").mkdir()
    write_peft_folder(source.adapter, source.base, tmp_path / "adapter")

    def call(*args: object) -> None:
        CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)

    call("merge-adapter", folder, tmp_path / "adapter", tmp_path / "merged")
    name = "model.layers.1.self_attn.v_proj.weight"
    torch.testing.assert_close(open_weight_source(tmp_path / "merged").read_tensor(name), source.read_tensor(name))
    with pytest.raises(CheckpointError, match="must be an adapter"):
        call("merge-adapter", folder, folder, out)
    with pytest.raises(CheckpointError, match="--to peft requires a LoRA adapter"):
        call("convert", folder, out, "--to", "peft")
    for option in (["--add-tokens", "<a>"], ["--vocab-size", 99]):
        with pytest.raises(CheckpointError, match="adding tokens is not supported with --to peft"):
            call("convert", tmp_path / "adapter", out, "--to", "peft", *option)
    with pytest.raises(CheckpointError, match="no exponential moving average"):
        call("convert", folder, out, "--to", "hf", "--ema")
    assert not out.exists()
