from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, content, save_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from mega_ckpt import convert as module
from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.formats.hf_source import LAYOUT, HfSource
from mega_ckpt.formats.peft_adapter import read_peft_adapter
from mega_ckpt.source import MegaWeightSource, WeightSource, copy_assets, load_weights, open_weight_source
from mega_ckpt.store import Checkpoint, save_sharded_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

OTHER_FILES = {
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "README.md": "# Ünïcode\n".encode(),
    ".gitattributes": b"*.safetensors lfs\n",
}


def add_files(folder: Path) -> Path:
    for name, text in OTHER_FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_files(save_model(tmp_path_factory.mktemp("hf") / "llama", "llama", dtype=torch.bfloat16, shard="8KB"))


@pytest.fixture(scope="module")
def mega(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mega") / "llama"
    convert_checkpoint(llama, folder, "mega")
    return folder


def weights(source: WeightSource) -> dict[str, Tensor]:
    return {name: source.read_tensor(name).clone() for name in source.tensor_names()}


def equal_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.mark.parametrize("shard", ["50GB", "8KB"])
@pytest.mark.parametrize("case", MODELS)
def test_hf_to_mega_to_hf_is_the_same_to_the_byte(case: str, shard: str, tmp_path: Path) -> None:
    """P6: names, sharding, headers, tensors, config.json and all other files."""
    dtype = torch.bfloat16 if shard == "8KB" else torch.float32
    folder = add_files(save_model(tmp_path / "hf", case, dtype=dtype, shard=shard))
    convert_checkpoint(folder, tmp_path / "mega", "mega", verify=True)
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", "hf", verify=True)
    assert content(tmp_path / "back") == content(folder)
    assert equal_tensors(weights(open_weight_source(tmp_path / "mega")), weights(open_weight_source(folder)))
    assert MegaWeightSource(Checkpoint.open_folder(tmp_path / "mega")).model == HfSource(folder).model


def test_folders_of_older_days_come_back_too(tmp_path: Path) -> None:
    """No prefix, masks among the weights, old keys, a header in another order and style."""
    folder = save_model(tmp_path / "hf", "gpt2")
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(folder / "model.safetensors").items()}
    mask = torch.ones(1, 1, 32, 32).tril().bool()
    save_file(tensors | {f"h.{i}.attn.bias": mask.clone() for i in range(3)}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"n_ctx": 32, "torch_dtype": "float32", "task_specific_params": {"text-generation": {"max_length": 50}}}
    (folder / "config.json").write_text(json.dumps(raw, separators=(",", ":")))
    convert_checkpoint(folder, tmp_path / "mega", "mega")
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", "hf")
    assert content(tmp_path / "back") == content(folder)


def test_published_names_of_deepseek_v4_are_read(tmp_path: Path) -> None:
    """No prefix, names of keys' norms and of the head's streams that transformers does not write, and an MTP layer."""
    folder = save_model(tmp_path / "hf", "deepseek_v4")
    usual = weights(open_weight_source(folder))
    names = {"model.": "", "embed_tokens.": "embed.", "hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm."}
    tensors = load_file(folder / "model.safetensors")
    for part, published in names.items():
        tensors = {name.replace(part, published): tensor for name, tensor in tensors.items()}
    assert {"embed.weight", "hc_head_fn", "head.weight", "layers.0.attn.kv_norm.weight"} <= tensors.keys()
    save_file(tensors | {"mtp.0.enorm.weight": torch.ones(3)}, folder / "model.safetensors")
    assert equal_tensors(weights(open_weight_source(folder)), usual)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="PEFT adapters of a deepseek_v4 model are not supported"):
        read_peft_adapter(tmp_path, open_weight_source(folder))
    convert_checkpoint(folder, tmp_path / "mega", "mega")
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", "hf")
    assert content(tmp_path / "back") == content(folder)


def test_keys_that_nothing_reads_come_back_and_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_model(tmp_path / "hf", "llama")
    raw = json.loads((folder / "config.json").read_text()) | {"unsloth_fixed": True, "use_mrope": False}
    (folder / "config.json").write_text(json.dumps(raw))
    convert_checkpoint(folder, tmp_path / "mega", "mega", verify=True)
    told = [line for line in caplog.messages if "use_mrope" in line]
    assert len(told) == 1
    assert "reads unsloth_fixed, use_mrope; kept unchanged" in told[0]
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", "hf")
    assert content(tmp_path / "back") == content(folder)


def test_tied_embeddings_that_are_stored_twice_come_back_twice(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf", "llama-tied-linear")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    convert_checkpoint(folder, tmp_path / "mega", "mega")
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", "hf")
    assert content(tmp_path / "back") == content(folder)


@pytest.mark.parametrize("to", ["hf", "mega"])
def test_casting(to: str, llama: Path, tmp_path: Path) -> None:
    convert_checkpoint(llama, tmp_path / "out", to, options=ConvertOptions(dtype=torch.float32), verify=True)
    expected = {name: tensor.float() for name, tensor in weights(open_weight_source(llama)).items()}
    assert equal_tensors(weights(open_weight_source(tmp_path / "out")), expected)


def test_casting_keeps_the_files_and_tells_config_json(mega: Path, llama: Path, tmp_path: Path) -> None:
    convert_checkpoint(mega, tmp_path / "out", "hf", options=ConvertOptions(dtype=torch.float32))
    old, new = content(llama), content(tmp_path / "out")
    assert old.keys() == new.keys()
    assert json.loads(new["config.json"]) == {**json.loads(old["config.json"]), "dtype": "float32"}
    index_old, index_new = (json.loads(each["model.safetensors.index.json"]) for each in (old, new))
    assert index_new["weight_map"] == index_old["weight_map"]
    assert index_new["metadata"]["total_size"] == 2 * index_old["metadata"]["total_size"]


def test_another_shard_size(mega: Path, llama: Path, tmp_path: Path) -> None:
    convert_checkpoint(mega, tmp_path / "one", "hf", options=ConvertOptions(max_shard=10**9))
    assert sorted(path.name for path in (tmp_path / "one").glob("*.safetensors*")) == ["model.safetensors"]
    assert (tmp_path / "one" / "config.json").read_bytes() == (llama / "config.json").read_bytes()
    convert_checkpoint(tmp_path / "one", tmp_path / "many", "hf", options=ConvertOptions(max_shard=4000))
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(t.nbytes for t in held.values()) <= 4000 or len(held) == 1 for held in map(load_file, files))
    assert equal_tensors(weights(open_weight_source(tmp_path / "many")), weights(open_weight_source(llama)))


SMALL = {"num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 50}
GPT = {"norm": "layernorm", "activation": "gelu_tanh", "position": "learned", "tie_embeddings": True, "qkv_bias": True,
       "attention_out_bias": True, "mlp_bias": True, "max_position": 32}  # fmt: skip


MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8}
LONG = {"scaling": "longrope", "original_max_position": 64, "short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
GEMMA = {"norm_position": "both", "zero_centered_norm": True, "scale_embeddings": True, "activation": "geglu",
         "sliding_window": 8, "full_attention_layers": [1]}  # fmt: skip
OSS = {"sliding_window": 8, "full_attention_layers": [1], "attention_sinks": True, "mlp_bias": True, "qkv_bias": True,
       "attention_out_bias": True, "activation_limit": 7.0, "moe": {**MOE, "router_bias": True}}  # fmt: skip
LATENT = {"mla": {"kv_lora_rank": 6, "q_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3},
          "rope": {"interleaved": True}}  # fmt: skip
KIMI = {
    "layers": ["kda+mlp", "attention+moe"], "position": "none", "kda": {"num_heads": 2, "head_dim": 3}, "mla": LATENT["mla"],
    "moe": {**MOE, "score": "sigmoid", "selection_bias": True, "shared_ffn_hidden_size": 16},
}  # fmt: skip
V3 = {"score": "sigmoid", "selection_bias": True, "shared_ffn_hidden_size": 16, "layers": [1]}


def trained(root: Path, changes: dict[str, Any], assets: Path | None = None, step: int = 7) -> Path:
    """A checkpoint that the trainer would write: no HuggingFace folder ever stood behind it."""
    model = ModelConfig.parse(SMALL | changes)
    generator = torch.Generator().manual_seed(step)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in canonical_tensors(model).items()}
    held = {
        f"{kind}/{name}": ShardedTensor(tuple(tensor.shape), [TensorBox((0,) * tensor.dim(), tensor)])
        for name, tensor in tensors.items()
        for kind in ("weights", "optimizer/exp_avg")
    }
    return save_sharded_checkpoint(root, step, held, model=model, state={"step": step}, assets=assets)


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"), ({"sliding_window": 8, "num_kv_heads": 2}, "mistral"), ({"qkv_bias": True}, "qwen2"),
        ({"qk_norm": True, "head_dim": 6}, "qwen3"), (GPT, "gpt2"),
        ({"rope": {"fraction": 0.5}, "hidden_size": 16}, "phi3"),
        ({"norm_position": "post", "qk_norm": True, "qk_norm_span": "all"}, "olmo2"),
        ({**GPT, "position": "rope", "parallel_residual": True}, "gpt_neox"),
        ({"sliding_window": 8, "full_attention_layers": [1]}, "ministral"),
        ({"rope": LONG}, "llama"),
        ({**GEMMA, "attention_softcap": 5.0}, "gemma2"),
        ({**GEMMA, "qk_norm": True, "local_rope": {"theta": 100.0}}, "gemma3_text"),
        ({"moe": MOE}, "mixtral"),
        ({"moe": {**MOE, "layers": [1]}, "qk_norm": True}, "qwen3_moe"),
        ({"moe": {**MOE, "shared_ffn_hidden_size": 12, "shared_gate": True}}, "qwen2_moe"),
        (OSS, "gpt_oss"),
        ({**LATENT, "moe": {**MOE, **V3}}, "deepseek_v3"),
        ({**LATENT, "moe": {**MOE, "normalize": False, "shared_ffn_hidden_size": 8}}, "deepseek_v2"),
        (KIMI, "kimi_linear"),
        (
            {**KIMI, "position": "rope", "rope": LATENT["rope"], "attention_gate": True, "mla": {**KIMI["mla"], "q_lora_rank": None},
             "kda": {"num_heads": 4, "head_dim": 3, "low_rank_gates": False}}, "bailing_hybrid",
        ),
    ],
)  # fmt: skip
def test_a_model_that_mega_trained_is_loaded_by_transformers(
    changes: dict[str, Any], family: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    checkpoint = trained(tmp_path / "run" / "checkpoints", changes)
    convert_checkpoint(checkpoint, tmp_path / "out", "hf", verify=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == family
    model, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    assert equal_tensors(weights(open_weight_source(tmp_path / "out")), weights(open_weight_source(checkpoint)))
    model.save_pretrained(tmp_path / "theirs")
    assert equal_tensors(weights(open_weight_source(tmp_path / "theirs")), weights(open_weight_source(checkpoint)))


@pytest.fixture
def predictor(tmp_path: Path) -> Path:
    """A DeepSeek-V3 folder as its makers wrote it: a further predictor behind the layers, with both ends again."""
    moe = {**MOE, **V3, "layers": [1, 2]}
    source = open_weight_source(trained(tmp_path / "run", {**LATENT, "moe": moe, "mtp_layers": 1}))
    convert_checkpoint(
        tmp_path / "run",
        tmp_path / "hf",
        "hf",
        options=ConvertOptions(dtype=torch.bfloat16, max_shard=4000),
        verify=True,
    )
    disk = {
        name: tensor for file in (tmp_path / "hf").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    ends = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    for copy, name in ends.items():
        assert torch.equal(disk[f"model.layers.2.{copy}.weight"], source.read_tensor(f"{name}.weight").bfloat16())
    assert {"model.layers.2.enorm.weight", "model.layers.2.eh_proj.weight"} <= disk.keys()
    assert "model.layers.2.mlp.experts.3.up_proj.weight" in disk
    return tmp_path / "hf"


def test_further_predictors_come_back_with_their_copies(predictor: Path, tmp_path: Path) -> None:
    convert_checkpoint(predictor, tmp_path / "mega", "mega", verify=True)
    assert open_weight_source(tmp_path / "mega").model.mtp_layers == 1
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", "hf", verify=True)
    assert content(tmp_path / "back") == content(predictor)


def test_a_selection_bias_stays_in_fp32(predictor: Path, tmp_path: Path) -> None:
    convert_checkpoint(predictor, tmp_path / "mega", "mega", options=ConvertOptions(dtype=torch.float16), verify=True)
    for folder in (predictor, tmp_path / "mega"):
        source = open_weight_source(folder)
        others = {source.tensor_dtype(name) for name in source.tensor_names() if not name.endswith("correction_bias")}
        assert source.tensor_dtype("model.layers.1.mlp.gate.e_score_correction_bias") == torch.float32
        assert others == {torch.bfloat16 if folder == predictor else torch.float16}


def test_experts_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf", "mixtral")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    save_file(tensors | {name: tensors[name].half()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}, .* must be that of .*experts.0.w1.weight"):
        open_weight_source(folder)


def test_predictors_that_are_left_out_and_copies_that_differ(predictor: Path, tmp_path: Path) -> None:
    disk = {name: tensor for file in predictor.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in predictor.glob("model*"):
        file.unlink()
    without = {name: tensor for name, tensor in disk.items() if not name.startswith("model.layers.2.")}
    save_file(without, predictor / "model.safetensors")
    source = open_weight_source(predictor)
    assert (source.model.mtp_layers, source.model.moe and source.model.moe.layers) == (0, [1])
    convert_checkpoint(predictor, tmp_path / "mega", "mega")
    convert_checkpoint(tmp_path / "mega", tmp_path / "back", "hf")
    assert content(tmp_path / "back") == content(predictor)
    name = "model.layers.2.embed_tokens.weight"
    save_file({key: tensor for key, tensor in disk.items() if key != name}, predictor / "model.safetensors")
    assert open_weight_source(predictor).model.mtp_layers == 1
    save_file(disk | {name: disk[name] + 1}, predictor / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} differs from model.embed_tokens.weight, .* they must be equal"):
        open_weight_source(predictor)


def test_a_model_that_was_changed_after_it_came_from_hf(llama: Path, tmp_path: Path) -> None:
    """Its assets still tell of the old folder: tokens and tokenizer are kept, the architecture is not."""
    copy_assets(open_weight_source(llama), tmp_path / "assets")
    checkpoint = trained(tmp_path / "run" / "checkpoints", {"qk_norm": True}, assets=tmp_path / "assets")
    convert_checkpoint(checkpoint, tmp_path / "out", "hf", verify=True)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (raw["model_type"], raw["eos_token_id"], raw["dtype"]) == ("qwen3", 2, "float32")
    out = content(tmp_path / "out")
    assert LAYOUT not in out
    assert "model.safetensors.index.json" not in out
    assert {name: out[name] for name in OTHER_FILES} == OTHER_FILES


@pytest.mark.parametrize("config", [b'{"model_type": "t5", "eos_token_id": 3}', b"{", b"[]"])
def test_a_config_that_came_with_a_tokenizer_is_no_obstacle(config: bytes, tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_bytes(config)
    convert_checkpoint(trained(tmp_path / "checkpoints", {}, assets=tmp_path / "assets"), tmp_path / "out", "hf")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"


def test_a_model_trained_on_from_hf_keeps_its_folder(llama: Path, tmp_path: Path) -> None:
    source = open_weight_source(llama)
    copy_assets(source, tmp_path / "assets")
    tensors = {name: tensor + 1 for name, tensor in weights(source).items()}
    held = {f"weights/{k}": ShardedTensor(tuple(t.shape), [TensorBox((0,) * t.dim(), t)]) for k, t in tensors.items()}
    model = source.model.model_copy(update={"attention_dropout": 0.1})
    checkpoint = save_sharded_checkpoint(
        tmp_path / "checkpoints", 5, held, model=model, state={}, assets=tmp_path / "assets"
    )
    convert_checkpoint(checkpoint, tmp_path / "out", "hf")
    old, new = content(llama), content(tmp_path / "out")
    changed = {name for name in old if old[name] != new.get(name)}
    assert old.keys() == new.keys()
    assert changed == {name for name in old if name.endswith(".safetensors")}


def test_no_family_fits(tmp_path: Path) -> None:
    checkpoint = trained(tmp_path / "checkpoints", {"norm": "layernorm", "activation": "geglu"})
    with pytest.raises(CheckpointError, match="norm must be 'rmsnorm', not 'layernorm'"):
        convert_checkpoint(checkpoint, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=r"a gpt2 config.json cannot express this model: .*qkv_bias must be true"):
        convert_checkpoint(checkpoint, tmp_path / "out", "hf", options=ConvertOptions(family="gpt2"))
    with pytest.raises(CheckpointError, match=r"'gpt-2' is not supported; .*nearest: gpt2"):
        convert_checkpoint(checkpoint, tmp_path / "out", "hf", options=ConvertOptions(family="gpt-2"))


def test_what_is_there_is_not_touched(mega: Path, llama: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already"):
        convert_checkpoint(mega, old, "hf")
    with pytest.raises(CheckpointError, match="can be replaced"):
        convert_checkpoint(mega, old, "hf", overwrite=True)
    assert content(old) == {"notes": b"mine"}
    copy = Path(shutil.copytree(llama, tmp_path / "copy"))
    with pytest.raises(CheckpointError, match="can be replaced"):
        convert_checkpoint(copy, copy, "hf", overwrite=True)
    convert_checkpoint(mega, tmp_path / "copy", "hf", overwrite=True, options=ConvertOptions(max_shard=10**9))
    assert (copy / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "old"]


def test_nothing_is_left_of_a_conversion_that_fails(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Iterator[int] = iter(range(10**9))
    read = HfSource.read_tensor_slice

    def failing(self: HfSource, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        if next(calls) > 5:
            raise KeyboardInterrupt
        return read(self, name, offset, shape)

    monkeypatch.setattr(HfSource, "read_tensor_slice", failing)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(llama, tmp_path / "out", "mega")
    assert list(tmp_path.iterdir()) == []


def test_verify_notices_what_was_written_wrongly(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = module.write_hf_folder

    def wrong(source: WeightSource, plan: Any, folder: Path, *more: Any) -> None:
        write(source, plan, folder, *more)
        path = min(folder.glob("*.safetensors"))
        path.write_bytes(path.read_bytes()[:-1] + b"\x55")

    monkeypatch.setattr(module, "write_hf_folder", wrong)
    with pytest.raises(CheckpointError, match="the written tensor differs from the source"):
        convert_checkpoint(llama, tmp_path / "out", "hf", verify=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["hf", "mega", "megatron"])
def test_weights_that_are_not_finite_are_named(to: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_model(tmp_path / "hf", "llama", dtype=torch.float16)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"].fill_(60000)  # their sum overflows, and none is infinite
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    convert_checkpoint(folder, tmp_path / "finite", to)
    assert "NaN" not in caplog.text
    tensors["model.layers.0.input_layernorm.weight"][1] = torch.nan
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = torch.inf
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    convert_checkpoint(folder, tmp_path / "out", to)
    assert f"{folder}: NaN or infinity in the tensor model.layers.0." in caplog.text
    assert "(and 1 more), which is converted unchanged" in caplog.text


def test_unknown_target(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="format 'onnx' is not supported"):
        convert_checkpoint(llama, tmp_path / "out", "onnx")


def test_a_damaged_layout_is_refused(mega: Path, tmp_path: Path) -> None:
    """The layout in the assets names files to write: none may lie outside, and it has to fit the model."""
    assets = Path(shutil.copytree(mega / "assets", tmp_path / "assets"))
    layout = json.loads((assets / LAYOUT).read_text())
    first = next(iter(layout["files"]))
    model, tensors = MegaWeightSource(Checkpoint.open_folder(mega)).model, weights(open_weight_source(mega))
    held = {f"weights/{k}": ShardedTensor(tuple(t.shape), [TensorBox((0,) * t.dim(), t)]) for k, t in tensors.items()}
    broken = {
        "must be the plain name": {"files": {"../../x.safetensors": layout["files"][first]}},
        "is missing": {"files": {first: layout["files"][first]}},
        "damaged": {"file": 3},
    }
    for step, (told, value) in enumerate(broken.items()):
        (assets / LAYOUT).write_text(json.dumps(value))
        checkpoint = save_sharded_checkpoint(tmp_path / "checkpoints", step, held, model=model, state={}, assets=assets)
        with pytest.raises(CheckpointError, match=told):
            convert_checkpoint(checkpoint, tmp_path / "out", "hf")


def test_open_source_finds_the_newest_checkpoint_of_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="the run has no complete checkpoint"):
        open_weight_source(run)
    trained(run / "checkpoints", {}, step=2)
    newest = trained(run / "checkpoints", {}, step=10)
    for path in (run, run / "checkpoints", newest):
        source = open_weight_source(path)
        assert equal_tensors(weights(source), weights(MegaWeightSource(Checkpoint.open_folder(newest))))
        assert list(source.tensor_names()) == list(canonical_tensors(source.model))


def test_open_source_of_anything_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("10")
    for name, told in {
        "absent": "no such folder", "file": "must be a folder, not a file", "empty": "expected a mega checkpoint",
        "megatron": "10 requires the folder iter_0000010",
    }.items():  # fmt: skip
        with pytest.raises(CheckpointError, match=f"(?s){name}.*{told}"):
            open_weight_source(tmp_path / name)


@pytest.mark.parametrize("kind", ["hf", "mega"])
def test_load_weights_fills_boxes_and_casts(kind: str, llama: Path, mega: Path) -> None:
    source = open_weight_source(llama if kind == "hf" else mega)
    whole = weights(source)
    name = "model.layers.1.self_attn.q_proj.weight"
    rows, columns = whole[name].shape
    top, corner = torch.zeros(5, columns), torch.zeros(3, 4, dtype=torch.float64)
    boxes = {
        name: ShardedTensor((rows, columns), [TensorBox((0, 0), top), TensorBox((rows - 3, 2), corner)]),
        "model.norm.weight": ShardedTensor((columns,), [TensorBox((0,), torch.zeros(columns))]),
    }
    load_weights(source, boxes)
    assert torch.equal(top, whole[name][:5].float())
    assert torch.equal(corner, whole[name][-3:, 2:6].double())
    with pytest.raises(CheckpointError, match=r"have no tensor model\.other, which"):
        load_weights(source, {"model.other": ShardedTensor((1,), [])})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[24\].*requires \[25\]"):
        load_weights(source, {"model.norm.weight": ShardedTensor((25,), [])})


def test_a_checkpoint_that_is_of_another_model_than_it_says(tmp_path: Path) -> None:
    model = ModelConfig.parse(SMALL)
    for told, change in (("is missing", {"num_layers": 3}), ("is not part of the model", {"num_layers": 1}),
                         ("has shape", {"vocab_size": 51}), ("less than or equal to 10000", {"num_layers": 10**12})):  # fmt: skip
        held = {
            f"weights/{k}": ShardedTensor(s, [TensorBox((0,) * len(s), torch.zeros(s))])
            for k, s in canonical_tensors(model).items()
        }
        folder = save_sharded_checkpoint(tmp_path, 1, held, model=model.model_copy(update=change), state={})
        with pytest.raises(CheckpointError, match=told):
            open_weight_source(folder)
