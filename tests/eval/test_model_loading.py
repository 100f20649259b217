from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf_models import write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import BASE, save_tiny, variant

from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.families import find_family_by_name
from mega_ckpt.store import save_sharded_checkpoint
from mega_common.errors import CheckpointError, ConfigError
from mega_common.model_config import ModelConfig
from mega_data.tokenizer import Tokenizer, train_tokenizer
from mega_eval.model_loading import find_end_tokens, load_inference_model, load_tokenizer, select_device
from mega_trainer.config.run_config import resolve_run_config
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.run.train_state import collect_stage_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "hf", find_family_by_name("llama"), variant("attention-bias"))
    train_tokenizer(["some text"], 257, tmp_path / "hf")
    return tmp_path / "hf"


def logits(path: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = load_inference_model(path, dtype=dtype)
    tokens, positions = torch.arange(9)[None], torch.arange(9)[None]
    return model.compute_logits(model(model.embed_inputs(tokens, positions), model.make_forward_context(positions)))


def test_every_kind_of_folder_is_the_same_model(folder: Path, tmp_path: Path):
    run = tmp_path / "run"
    convert_checkpoint(folder, run / "checkpoints" / "step-00000000", "mega")
    expected, tokenizer = logits(folder), load_tokenizer(folder)
    for path in (run, run / "checkpoints" / "step-00000000"):
        assert torch.equal(logits(path), expected)
        assert load_tokenizer(path).fingerprint == tokenizer.fingerprint
        assert find_end_tokens(path, tokenizer) == find_end_tokens(folder, tokenizer)


@pytest.mark.parametrize("kind", ["fp8", "gguf", "pytorch_model.bin"])
def test_what_is_not_stored_plainly_is_the_model_that_its_export_is(kind: str, tmp_path: Path):
    folder = save_tiny_as(kind, tmp_path)
    convert_checkpoint(folder, tmp_path / "hf", "hf")
    assert torch.equal(logits(folder), logits(tmp_path / "hf"))
    config = resolve_run_config({"model": {"from": str(folder)}, "data": {"train": "tokens"}})
    assert (config["init_from"], config["model"]["num_layers"]) == (str(folder), BASE["num_layers"])


def save_tiny_as(kind: str, tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    save_tiny(folder, find_family_by_name("llama"), variant("grouped"))
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(file)
    if kind == "gguf":
        return write_gguf(folder, tmp_path / "model.gguf")
    file.unlink()
    if kind == "pytorch_model.bin":
        torch.save(tensors, folder / kind)
        return folder
    for name in [name for name in tensors if "_proj" in name]:
        tensors[f"{name}_scale_inv"] = torch.tensor(0.5)
        tensors[name] = (tensors[name] / 0.5).to(torch.float8_e4m3fn)
    save_file(tensors, file)
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    return folder


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path):
    config = ModelConfig.parse({**BASE, "mtp_layers": 1})
    whole = Decoder(LayerBuilder(config)).eval()
    initialize_weights(whole, 1)
    save_sharded_checkpoint(tmp_path, 0, collect_stage_weights({0: whole}, prefix="weights/"), model=config, state={})
    model, tokens = load_inference_model(tmp_path), torch.arange(9)[None]
    assert not model.predictors
    assert torch.equal(
        logits(tmp_path),
        whole.compute_logits(whole(whole.embed_inputs(tokens, tokens), whole.make_forward_context(tokens))),
    )
    asked = load_inference_model(tmp_path, mtp=True).state_dict()
    assert all(torch.equal(asked[name], tensor) for name, tensor in whole.state_dict().items())
    assert any(name.startswith("predictors.0.") for name in asked)


def test_layers_that_are_not_there_guess_nothing(folder: Path):
    with pytest.raises(ConfigError, match=r"requires multi-token prediction \(MTP\) layers"):
        load_inference_model(folder, mtp=True)


def test_model_is_for_inference_in_the_dtype_asked_for(folder: Path):
    model = load_inference_model(folder, dtype=torch.bfloat16)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_missing_tensor_is_named(folder: Path, name: str):
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        load_inference_model(folder)


def test_extra_tensor_is_named(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.sinks"] = torch.zeros(4)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.layers.0.self_attn.sinks"):
        load_inference_model(folder)


def test_end_tokens_come_from_all_files(folder: Path):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 11}))
    assert find_end_tokens(folder, Tokenizer(folder)) == {0, 7, 9, 11}


def test_no_tokenizer(folder: Path):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(folder)


def test_no_folder(tmp_path: Path):
    with pytest.raises(CheckpointError, match="nowhere"):
        load_inference_model(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["toaster", "cuda:99", "xpu"])
def test_unknown_device(name: str):
    with pytest.raises(ConfigError, match=name):
        select_device(name)
