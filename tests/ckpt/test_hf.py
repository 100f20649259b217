from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import MODELS, content, save_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from vision_modules import save_model as save_vision_model

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.convert import convert_checkpoint
from mega_ckpt.formats.hf_source import HfSource
from mega_ckpt.formats.hf_write import plan_hf_folder, write_hf_folder
from mega_ckpt.formats.safetensors_file import SafetensorsFile, SafetensorsHeader, write_safetensors
from mega_ckpt.source import find_unsupported_parts, warn_of_unsupported_parts
from mega_ckpt.store import save_sharded_checkpoint
from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox
from mega_ckpt.weight_source import DerivedWeightSource
from mega_common.errors import CheckpointError

LLAMA, GPT2 = "llama-biases-head-llama3", "gpt2"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    sharded = {f"{case}-sharded": save_model(root / f"{case}-sharded", case, shard="8KB") for case in (LLAMA, GPT2)}
    return {case: save_model(root / case, case) for case in (LLAMA, GPT2, "llama-tied-linear")} | sharded


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy to damage: Llama in several files."""
    return Path(shutil.copytree(folders[f"{LLAMA}-sharded"], tmp_path / "model"))


def on_disk(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("case", [LLAMA, f"{LLAMA}-sharded"])
def test_llama_is_read_as_it_is(folders: dict[str, Path], case: str) -> None:
    source, disk = HfSource(folders[case]), on_disk(folders[case])
    assert list(source.tensor_names()) == list(canonical_tensors(source.model))
    assert set(source.tensor_names()) == disk.keys()
    for name, tensor in disk.items():
        assert (source.tensor_shape(name), source.tensor_dtype(name)) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(source.read_tensor(name), tensor)


@pytest.mark.parametrize("case", [GPT2, f"{GPT2}-sharded"])
def test_gpt2_is_split_and_turned(folders: dict[str, Path], case: str) -> None:
    source, disk = HfSource(folders[case]), on_disk(folders[case])
    fused, bias = disk["transformer.h.2.attn.c_attn.weight"], disk["transformer.h.2.attn.c_attn.bias"]
    for index, name in enumerate("qkv"):
        part = slice(24 * index, 24 * (index + 1))
        assert torch.equal(source.read_tensor(f"model.layers.2.self_attn.{name}_proj.weight"), fused[:, part].T)
        assert torch.equal(source.read_tensor(f"model.layers.2.self_attn.{name}_proj.bias"), bias[part])
    assert torch.equal(
        source.read_tensor("model.layers.0.mlp.up_proj.weight"), disk["transformer.h.0.mlp.c_fc.weight"].T
    )
    assert torch.equal(source.read_tensor("model.embed_positions.weight"), disk["transformer.wpe.weight"])
    assert "lm_head.weight" not in source.tensor_names()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_slice_is_a_slice_of_the_whole(folders: dict[str, Path], data: st.DataObject) -> None:
    source = HfSource(folders[data.draw(st.sampled_from([LLAMA, f"{GPT2}-sharded"]))])
    name = data.draw(st.sampled_from(list(source.tensor_names())))
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in source.tensor_shape(name)]
    offset, shape = tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)
    expected = source.read_tensor(name)[tuple(slice(a, b) for a, b in bounds)]
    assert torch.equal(source.read_tensor_slice(name, offset, shape), expected)


def test_reading_never_writes_to_the_file(folders: dict[str, Path]) -> None:
    source = HfSource(folders[LLAMA])
    before = source.read_tensor("model.norm.weight").clone()
    source.read_tensor("model.norm.weight").zero_()
    assert torch.equal(source.read_tensor("model.norm.weight"), before)


def test_a_folder_saved_without_its_head(folders: dict[str, Path], tmp_path: Path) -> None:
    """GPT-2 as it was first published: no `transformer.`, and the causal mask among the weights."""
    folder = Path(shutil.copytree(folders[GPT2], tmp_path / "old"))
    tensors = {name.removeprefix("transformer."): value for name, value in on_disk(folder).items()}
    mask = torch.ones(1, 1, 32, 32).tril()
    save_file(tensors | {f"h.{i}.attn.bias": mask.clone() for i in range(3)}, folder / "model.safetensors")
    source, whole = HfSource(folder), HfSource(folders[GPT2])
    assert all(torch.equal(source.read_tensor(name), whole.read_tensor(name)) for name in whole.tensor_names())
    assert sorted(source.buffer_names()) == [f"h.{i}.attn.bias" for i in range(3)]
    assert torch.equal(source.read_buffer("h.1.attn.bias"), mask)


def test_tied_embeddings_may_be_stored_twice_if_they_are_the_same(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["llama-tied-linear"], tmp_path / "twice"))
    tensors = on_disk(folder)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    assert "lm_head.weight" not in HfSource(folder).tensor_names()
    save_file(tensors | {"lm_head.weight": embedding + 1}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        HfSource(folder)


def test_fused_experts_of_a_model_with_images(tmp_path: Path) -> None:
    """As on the hub: experts in two tensors, and an MTP block that is carried."""
    whole, mega, back = (tmp_path / name for name in ("whole", "mega", "back"))
    save_vision_model("qwen3_5_moe", whole)
    source, tensors = HfSource(whole), on_disk(whole)
    before = {name: source.read_tensor(name) for name in source.tensor_names()}
    for layer in range(2):
        experts = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}.{e}.{part}_proj.weight") for e in range(4)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{experts}.gate_up_proj": torch.cat([gate, up], 1), f"{experts}.down_proj": down}
    save_file({**tensors, "mtp.norm.weight": torch.ones(2)}, whole / "model.safetensors")
    fused = HfSource(whole)
    assert all(torch.equal(fused.read_tensor(name), value) for name, value in before.items())
    assert fused.buffer_names() == ["mtp.norm.weight"]
    convert_checkpoint(whole, mega, "mega")
    convert_checkpoint(mega, back, "hf")
    assert content(back) == content(whole)


def test_the_text_part_of_gemma_4(tmp_path: Path) -> None:
    whole, mega, back = (tmp_path / name for name in ("whole", "mega", "back"))
    kind, settings = MODELS["gemma4-unified"]
    config = AutoConfig.for_model(
        kind.removesuffix("_text"),
        text_config={**settings, "model_type": kind, "use_bidirectional_attention": "vision"},
        vision_config={"mm_embed_dim": 8, "mm_posemb_size": 6},
    )
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(whole)
    inner, weights = HfSource(whole), model.state_dict()
    name = "model.layers.2.self_attn.q_proj.weight"
    assert torch.equal(inner.read_tensor(name), weights[name.replace("model.", "model.language_model.")])
    convert_checkpoint(whole, mega, "mega")
    convert_checkpoint(mega, back, "hf")
    assert content(back) == content(whole)


def test_the_text_part_of_gemma_3n(tmp_path: Path) -> None:
    """Its vision encoder requires timm: the tensors of the other parts are made up, and keys that layers share are stored too."""
    text, whole, mega, back = (tmp_path / name for name in ("text", "whole", "mega", "back"))
    save_model(text, "gemma3n-odd")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in on_disk(text).items()}
    shared = {f"model.language_model.layers.3.self_attn.{part}_proj.weight": torch.randn(20, 24) for part in "kv"}
    others = {
        name: torch.randn(3, 4)
        for name in ("model.vision_tower.a.weight", "model.audio_tower.b", "model.embed_audio.c")
    }
    config = {
        "model_type": "gemma3n", "architectures": ["Gemma3nForConditionalGeneration"], "tie_word_embeddings": False,
        "text_config": json.loads((text / "config.json").read_text()), "vision_config": {}, "audio_config": {},
    }  # fmt: skip
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps(config))
    save_file({**tensors, **shared, **others}, whole / "model.safetensors", metadata={"format": "pt"})
    source = HfSource(whole)
    assert source.model.altup is not None
    assert set(source.buffer_names()) == {*shared, *others}
    convert_checkpoint(whole, mega, "mega")
    convert_checkpoint(mega, back, "hf")
    assert content(back) == content(whole)


class WithoutOrigin(DerivedWeightSource):
    """The weights alone, as of a model that was trained from the start."""

    def buffer_names(self) -> list[str]:
        return []

    def asset_files(self) -> dict[str, Path | bytes]:
        return {}


def test_constants_that_transformers_reads_are_written_for_a_model_from_elsewhere(tmp_path: Path) -> None:
    """Without those of xIELU transformers would draw them."""
    first, back = tmp_path / "first", tmp_path / "back"
    save_model(first, "apertus")
    held = HfSource(first)
    source = WithoutOrigin(held, held.model)
    back.mkdir()
    write_hf_folder(source, plan_hf_folder(source), back, lambda done: None)
    tokens = torch.arange(20)[None]
    one, other = (AutoModelForCausalLM.from_pretrained(folder).eval()(tokens).logits for folder in (first, back))
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        ([], []),
        (["model.layers.0.self_attn.rotary_emb.inv_freq"], []),
        (["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"], []),
        (["vision_tower.vision_model.embeddings.position_ids"], []),
        (["visual.rotary_pos_emb.inv_freq"], []),
        (["model.visual.pos_embed.weight"], ["vision encoder"]),
        (["visual.blocks.0.norm1.weight", "visual.blocks.0.norm2.weight"], ["vision encoder"]),
        (["model.vision_tower.vision_model.head.probe"], []),
        (["model.vision_tower.blocks.0.norm1.weight"], ["vision encoder"]),
        (["mtp.norm.weight"], ["multi-token prediction block"]),
        (["model.mtp.fc.weight"], ["multi-token prediction block"]),
        (["mtp.norm.weight", "model.visual.pos_embed.weight"], ["multi-token prediction block", "vision encoder"]),
    ],
)
def test_parts_that_are_carried_and_not_computed_are_known(names: list[str], parts: list[str]) -> None:
    assert list(find_unsupported_parts(names)) == parts


@pytest.mark.parametrize(("training", "fate"), [(False, "copied by a conversion"), (True, "neither trained nor saved")])
def test_a_vision_encoder_that_is_only_carried_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, training: bool, fate: str
) -> None:
    folder = save_model(tmp_path / "hf", "qwen3_5")
    save_file(on_disk(folder) | {"model.visual.pos_embed.weight": torch.ones(3, 2)}, folder / "model.safetensors")
    with caplog.at_level("WARNING"):
        warn_of_unsupported_parts(HfSource(folder), training=training)
    (line,) = [record.getMessage() for record in caplog.records if "vision encoder" in record.getMessage()]
    assert "model.visual.pos_embed.weight" in line
    assert fate in line


@pytest.mark.parametrize("case", ["qwen3_5", "qwen3_5-tied-bias"])
def test_a_run_without_the_vision_encoder_exports_the_language_model_alone(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a run saves it: the assets of the whole, its text weights, and no buffers."""
    text, whole = save_model(tmp_path / "text", case), tmp_path / "whole"
    whole.mkdir()
    raw = json.loads((text / "config.json").read_text())
    outer = {"text_config": raw, "vision_config": {"depth": 1}, "image_token_id": 3, "model_type": "qwen3_5"}
    outer |= {"architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": raw["tie_word_embeddings"]}
    (whole / "config.json").write_text(json.dumps(outer))
    (whole / "preprocessor_config.json").write_text("{}")
    source = HfSource(text)
    shards = {
        f"weights/{name}": ShardedTensor(
            tuple(source.tensor_shape(name)),
            (TensorBox((0,) * len(source.tensor_shape(name)), source.read_tensor(name)),),
        )
        for name in source.tensor_names()
    }
    run = save_sharded_checkpoint(tmp_path / "run", 1, shards, model=source.model, state={}, assets=whole)
    with caplog.at_level("WARNING"):
        convert_checkpoint(run, tmp_path / "out", "hf", verify=True)
    assert "whose weights are not in this checkpoint; only the language model" in caplog.text
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == "qwen3_5_text"
    assert not written.keys() & {"vision_config", "text_config", "image_token_id"}
    assert not (tmp_path / "out" / "preprocessor_config.json").exists()
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(
        torch.equal(source.read_tensor(name), HfSource(tmp_path / "out").read_tensor(name))
        for name in source.tensor_names()
    )


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change tensors, and put them into one file."""
    tensors = on_disk(folder)
    change(tensors)
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    save_file(tensors, folder / "model.safetensors")


def index_says(name: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        edit_json(
            folder / "model.safetensors.index.json", lambda raw: raw["weight_map"].update({"model.norm.weight": name})
        )

    return change


def shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def cut_short(folder: Path) -> None:
    shard(folder).write_bytes(shard(folder).read_bytes()[:-5])


def pickled(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def larger_vocabulary(folder: Path) -> None:
    edit_json(folder / "config.json", lambda raw: raw.update(vocab_size=98))


NORM = "model.norm.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json is missing.*add the model's config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "must be a JSON object, found a list"),
    "unknown model_type": (
        lambda f: edit_json(f / "config.json", lambda raw: raw.update(model_type="rwkv")),
        "model type 'rwkv' is not supported; supported families: docs/families.md",
    ),
    "shard missing": (lambda f: shard(f).unlink(), r"model-00001-of-\d+.safetensors, the file of .* is missing"),
    "shard truncated": (cut_short, r"model-00001-of-\d+.safetensors: truncated: \d+ bytes instead of \d+"),
    "shard longer": (lambda f: shard(f).open("ab").write(b"x"), "too long"),
    "shard empty": (lambda f: shard(f).write_bytes(b""), r"truncated, or not a safetensors file \(0 bytes\)"),
    "shard is text": (lambda f: shard(f).write_text("version https://git-lfs.github.com/spec/v1\n" * 3), "is a Git LFS pointer, not the file"),
    "index outside": (index_says("../other/model.safetensors"), "'../other/model.safetensors' must be the plain name"),
    "index absolute": (index_says("/etc/x.safetensors"), "must be the plain name of a safetensors file"),
    "index of a pickle": (index_says("pytorch_model.bin"), "must be the plain name of a safetensors file"),
    "index of a number": (index_says(3), "3 must be the plain name"),
    "index without map": (
        lambda f: edit_json(f / "model.safetensors.index.json", lambda raw: raw.pop("weight_map")), "weight_map is missing",
    ),
    "index disagrees": (
        lambda f: edit_json(f / "model.safetensors.index.json", lambda raw: raw["weight_map"].pop(NORM)),
        "conflicts with .* only one of them has model.norm.weight",
    ),
    "tensor missing": (lambda f: rewrite(f, lambda t: t.pop(NORM)), "the tensor model.norm.weight is missing"),
    "tensor unknown": (
        lambda f: rewrite(f, lambda t: t.update({"model.layers.0.lora": torch.ones(2)})),
        "the tensor model.layers.0.lora is not part of a llama model",
    ),
    "one layer too many in config.json": (
        lambda f: edit_json(f / "config.json", lambda raw: raw.update(num_hidden_layers=raw["num_hidden_layers"] + 1)),
        r"config.json has more layers than the weights, which have \d: correct its number of layers",
    ),
    "wrong shape": (larger_vocabulary, r"has shape \[97, 24\], but config.json requires \[98, 24\]"),
    "quantised": (
        lambda f: edit_json(f / "config.json", lambda raw: raw.update(quantization_config={"quant_method": "awq"})),
        r"weights quantized with 'awq' are not supported \(only fp8, mxfp4, compressed-tensors",
    ),
    "too many experts": (
        lambda f: edit_json(f / "config.json", lambda raw: raw.update(model_type="qwen3_moe", num_experts=10**12, mlp_bias=None, moe_intermediate_size=8)),
        "num_experts = 1000000000000",
    ),
    "too many layers": (
        lambda f: edit_json(f / "config.json", lambda raw: raw.update(num_hidden_layers=10**12)), "num_layers = 1000000000000",
    ),
    "a damaged pickle": (pickled, r"pytorch_model.bin: (damaged|not written by torch.save)"),
    "weights are missing": (lambda f: [path.unlink() for path in f.glob("*.safetensors*")], "neither model.safetensors nor"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_folder_that_cannot_be_used_is_told_in_a_sentence(folder: Path, damage: str) -> None:
    change, told = DAMAGE[damage]
    change(folder)
    with pytest.raises(CheckpointError, match=f"(?s){told}") as caught:
        HfSource(folder)
    assert folder.name in str(caught.value)


HEADERS = {
    "no JSON": b"{",
    "a list": b"[]",
    "unknown dtype": b'{"x":{"dtype":"F4","shape":[2],"data_offsets":[0,8]}}',
    "shape too large": b'{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
    "a hole": b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "an overlap": b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"y":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "negative": b'{"x":{"dtype":"F32","shape":[-1,-2],"data_offsets":[0,8]}}',
    "no number": b'{"x":{"dtype":"F32","shape":["2"],"data_offsets":[0,8]}}',
    "nothing inside": b'{"x":3}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_broken_header_is_refused(tmp_path: Path, case: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(HEADERS[case])) + HEADERS[case] + bytes(8))
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        SafetensorsFile.open_file(path)


def test_a_header_longer_than_the_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(CheckpointError, match="truncated"):
        SafetensorsFile.open_file(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_told_or_harmless(folders: dict[str, Path], tmp_path: Path, data: st.DataObject) -> None:
    """Cut anywhere, or any bytes of length and header changed: a CheckpointError that names the file, or a sound file."""
    whole = (folders["llama-tied-linear"] / "model.safetensors").read_bytes()
    path = tmp_path / "x.safetensors"
    if data.draw(st.booleans()):
        damaged = bytearray(whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        damaged = bytearray(whole)
        for place, value in data.draw(
            st.dictionaries(st.integers(0, 400), st.integers(0, 255), min_size=1, max_size=3)
        ).items():
            damaged[place] = value
    path.write_bytes(damaged)
    try:
        file = SafetensorsFile.open_file(path)
    except CheckpointError as error:
        assert "x.safetensors" in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert len(damaged) == len(whole)
        assert all(file.read_tensor(name).shape == entry.shape for name, entry in file.header.entries.items())


def test_elements_that_are_not_aligned_are_read(tmp_path: Path) -> None:
    text = b'{"x":{"dtype":"F64","shape":[3],"data_offsets":[0,24]}} '
    path, values = tmp_path / "x.safetensors", torch.randn(3, dtype=torch.float64)
    path.write_bytes(struct.pack("<Q", len(text) - 1) + text[:-1] + values.numpy().tobytes())
    assert torch.equal(SafetensorsFile.open_file(path).read_tensor("x"), values)


def test_a_file_is_written_as_the_library_writes_it(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 2), "a": torch.randn(5).bfloat16(), "c": torch.arange(4), "z": torch.empty(0, 3),
        "ä": torch.tensor(2.0, dtype=torch.float64), "f": torch.ones(2).to(torch.float8_e4m3fn), "g": torch.tensor([True]),
    }  # fmt: skip
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    header = SafetensorsHeader.make_header({k: (v.dtype, tuple(v.shape)) for k, v in tensors.items()}, {"format": "pt"})
    write_safetensors(tmp_path / "ours", header, (tensors[name] for name in header.entries))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    ours = SafetensorsFile.open_file(tmp_path / "ours")
    assert ours.header.entries == header.entries
    assert all(torch.equal(ours.read_tensor(k).float(), v.float()) for k, v in tensors.items())


def test_the_cases_cover_every_family() -> None:
    from mega_ckpt.families import FAMILIES

    assert {kind for kind, _ in MODELS.values()} == {family.name for family in FAMILIES}


def test_no_more_than_one_tensor_is_read_ahead(tmp_path: Path) -> None:
    made: list[int] = []
    ahead: list[int] = []

    def tensors() -> Iterator[torch.Tensor]:
        for number in range(6):
            made.append(number)
            yield torch.tensor([number])

    header = SafetensorsHeader.make_header({str(number): (torch.int64, (1,)) for number in range(6)}, {})
    write_safetensors(tmp_path / "one", header, tensors(), lambda _: ahead.append(len(made) - len(ahead)))
    assert max(ahead) <= 2  # the one that is written, and the next
    assert torch.equal(SafetensorsFile.open_file(tmp_path / "one").read_tensor("5"), torch.tensor([5]))
