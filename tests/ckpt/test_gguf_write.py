"""GGUF files that mega writes: read back as the same model and tokenizer, by mega, transformers and llama.cpp."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hf_models import save_model
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from mega_ckpt.convert import ConvertOptions, convert_checkpoint
from mega_ckpt.families import is_equivalent_config
from mega_ckpt.formats.gguf_blocks import encode_tensor_as_gguf
from mega_ckpt.formats.hf_source import HfSource
from mega_ckpt.source import open_weight_source
from mega_common.errors import CheckpointError

Kind = gguf.GGMLQuantizationType
TEXTS = [
    "Hello world, it's 12345 o'clock; I'LL go.", "  two  spaces\n\n\tand a tab ", "Grüße an 東京 🎉 ①½", "def f(x):\n    return x**2",
]  # fmt: skip
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
    "qwen2": [
        pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ],
}
CASES = [
    "llama", "llama-3.1", "llama-tied-linear", "mixtral", "qwen2", "qwen3", "qwen2_moe",
    "qwen3_moe", "gemma2-plain", "gemma3-plain",
]  # fmt: skip
SMALL = ["the world in there", "a worm"]  # text of a tokenizer for the tiny models, whose vocabulary is 97


def byte_level(split: str, *, small: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[split])
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = [] if small else pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=60 if small else 300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SMALL if small else TEXTS * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama 2's kind: characters and bytes, merged in the order of the tokens."""
    words = ["▁the", "▁a", "he", "th", "▁t", "in", "er", "▁w", "or", "ld", "▁world", "orld", "wor"]
    merges = [
        ("t", "h"),
        ("h", "e"),
        ("▁", "t"),
        ("▁t", "he"),
        ("i", "n"),
        ("e", "r"),
        ("▁", "a"),
        ("l", "d"),
        ("o", "r"),
        ("or", "ld"),
    ]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{n:02X}>" for n in range(256)], *words, "▁", *"abcdefghijklmnopqrstuvwxyz"]
    splits = [(word[:at], word[at:]) for word in words for at in range(1, len(word))]
    merges = [pair for pair in splits if all(part in tokens for part in pair)]
    model = models.BPE(
        {token: n for n, token in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages[0]['content'] }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def save_sized(folder: Path, kind: str, **sizes: int | None) -> Path:
    transformers = pytest.importorskip("transformers", reason="the folders are written by transformers")
    common = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 320,
    }
    config = transformers.AutoConfig.for_model(kind, **{**common, "num_key_value_heads": 2, **sizes})
    torch.manual_seed(5)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def write(folder: Path, out: Path, quantize: str = "f16", **options: Any) -> Any:
    convert_checkpoint(folder, out, "gguf", options=ConvertOptions(quantize=quantize, **options))
    return open_weight_source(out)


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_read_back(case: str, tmp_path: Path) -> None:
    folder = save_tokenizer(save_model(tmp_path / "in", case), byte_level("gpt-2", small=True))
    found, expected = write(folder, tmp_path / "out"), HfSource(folder)
    assert is_equivalent_config(found.model, expected.model)
    for name in expected.tensor_names():
        weight = expected.read_tensor(name)
        exact = weight.dim() == 1 or name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        close = torch.float32 if exact else torch.float16
        torch.testing.assert_close(found.read_tensor(name).float(), weight.to(close).float(), rtol=0, atol=3e-7)


@pytest.mark.parametrize("split", SPLITS)
def test_a_tokenizer_is_read_back_and_its_pre_tokenizer_named(split: str, tmp_path: Path) -> None:
    tokenizer = byte_level(split)
    kind = "mistral" if split == "llama-bpe" else "qwen2"
    sizes = {"sliding_window": None} if kind == "mistral" else {}
    folder = save_tokenizer(save_sized(tmp_path / "in", kind, **sizes), tokenizer)
    found = write(folder, tmp_path / "out")
    fields = gguf.GGUFReader(tmp_path / "out" / "model-f16.gguf").fields
    assert fields["tokenizer.ggml.pre"].contents() == split
    assert fields["tokenizer.ggml.tokens"].contents()[-1] == "[PAD319]"
    files = {name: content.decode() for name, content in found.asset_files().items()}
    read = Tokenizer.from_str(files["tokenizer.json"])
    for text in (*TEXTS, "a text that is new: 2,718"):
        assert read.encode(text).ids == tokenizer.encode(text).ids
    settings = json.loads(files["tokenizer_config.json"])
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")
    assert settings["chat_template"] == "{{ messages[0]['content'] }}"


def test_a_sentencepiece_tokenizer_is_read_back(tmp_path: Path) -> None:
    tokenizer = sentencepiece()
    folder = save_tokenizer(save_sized(tmp_path / "in", "llama"), tokenizer)
    read = Tokenizer.from_str(write(folder, tmp_path / "out").asset_files()["tokenizer.json"].decode())
    for text in ("the world in there", " another  text: 東京", "thinner"):
        assert read.encode(text).ids == tokenizer.encode(text).ids


ERRORS = {"q8_0": 0.01, "q4_0": 0.1, "q4_k": 0.08}


@pytest.mark.parametrize("quantize", ERRORS)
def test_quantized_weights_are_close_and_transformers_reads_the_same(quantize: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="another reader of GGUF")
    sizes = {"hidden_size": 256, "intermediate_size": 288, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 300}
    folder = save_tokenizer(save_sized(tmp_path / "in", "llama", **sizes), byte_level("gpt-2"))
    found, expected = write(folder, tmp_path / "out", quantize), HfSource(folder)
    for name in expected.tensor_names():
        read, exact = found.read_tensor(name).float(), expected.read_tensor(name).float()
        assert float((read - exact).norm() / exact.norm()) <= (ERRORS[quantize] if exact.dim() > 1 else 0), name
    kinds = {
        tensor.name: tensor.tensor_type
        for tensor in gguf.GGUFReader(tmp_path / "out" / f"model-{quantize}.gguf").tensors
    }
    assert kinds["token_embd.weight"] == kinds["output.weight"] == Kind.Q8_0
    if quantize == "q4_k":
        assert (kinds["blk.0.attn_q.weight"], kinds["blk.0.ffn_down.weight"]) == (Kind.Q4_K, Kind.Q5_0)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file=f"model-{quantize}.gguf", dtype=torch.float32
    ).state_dict()
    for name in found.tensor_names():
        assert torch.equal(found.read_tensor(name).float(), theirs[name]), name


def test_q4_k_keeps_blocks_of_zeros_and_constants() -> None:
    rows = torch.stack([torch.zeros(256), torch.full((256,), -0.5), (torch.arange(256) % 32 - 16) / 17.0])
    (data,) = encode_tensor_as_gguf("x", rows, Kind.Q4_K)
    read = torch.from_numpy(gguf.dequantize(data, Kind.Q4_K))
    assert torch.equal(read[0], rows[0])
    torch.testing.assert_close(read[1], rows[1], rtol=2e-3, atol=0)
    assert (read[2] - rows[2]).abs().max() < 0.04


def test_split_files_are_one_model(tmp_path: Path) -> None:
    folder = save_tokenizer(save_model(tmp_path / "in", "qwen2"), byte_level("gpt-2", small=True))
    whole, split = write(folder, tmp_path / "one"), write(folder, tmp_path / "many", max_shard=8_000)
    assert len(list((tmp_path / "many").glob("model-f16-*-of-*.gguf"))) > 2
    for name in whole.tensor_names():
        assert torch.equal(whole.read_tensor(name), split.read_tensor(name))


def test_what_llama_cpp_has_not_is_refused_by_name(tmp_path: Path) -> None:
    def refuse(folder: Path, message: str, **options: Any) -> None:
        with pytest.raises(CheckpointError, match=re.escape(message)):
            convert_checkpoint(folder, tmp_path / "out", "gguf", options=ConvertOptions(**options))
        assert not (tmp_path / "out").exists()

    plain = save_model(tmp_path / "plain", "llama")
    refuse(plain, "--to gguf requires a tokenizer.json")
    (plain / "tokenizer.json").write_text("{}")
    refuse(plain, "tokenizer.json is not a tokenizer")
    refuse(
        save_tokenizer(plain, byte_level("gpt-2", small=True)),
        "--dtype is not supported with --to gguf",
        dtype=torch.bfloat16,
    )
    for case, message in (
        ("qwen3-yarn", "llama.cpp does not read blk.0.attn_output.bias of qwen3"),
        ("granite", "--to gguf does not support this model (granite)"),
        ("mistral-window", "--to gguf does not support this model (mistral)"),
        ("llama-mha-dynamic", "--to gguf does not support this model (llama)"),
    ):
        refuse(save_tokenizer(save_model(tmp_path / case, case), byte_level("gpt-2", small=True)), message)
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    refuse(
        save_tokenizer(plain, words), "llama.cpp has no tokenizer with the results of this tokenizer.json (WordLevel"
    )
    other = byte_level("gpt-2", small=True)
    other.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(False)])
    refuse(save_tokenizer(plain, other), "llama.cpp has no tokenizer with the results of this tokenizer.json (BPE")
    refuse(
        save_tokenizer(plain, byte_level("gpt-2")), "tokenizer.json has 300 tokens, but the model's vocabulary has 97"
    )


def test_an_existing_folder_is_replaced_and_a_file_is_not_the_result(tmp_path: Path) -> None:
    folder = save_tokenizer(save_model(tmp_path / "in", "llama"), byte_level("gpt-2", small=True))
    write(folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists already"):
        write(folder, tmp_path / "out", "q8_0")
    convert_checkpoint(folder, tmp_path / "out", "gguf", options=ConvertOptions(quantize="q8_0"), overwrite=True)
    assert [path.name for path in sorted(tmp_path.joinpath("out").iterdir())] == ["README.md", "model-q8_0.gguf"]
    with pytest.raises(CheckpointError, match="--to gguf creates a folder with the file"):
        write(folder, tmp_path / "model.gguf")


def test_weights_that_fp16_cannot_hold_are_refused() -> None:
    with pytest.raises(CheckpointError, match="x has weights that F16 cannot represent"):
        list(encode_tensor_as_gguf("x", torch.full((2, 32), 1e5), Kind.F16))
