"""Tokenizers out of GGUF's metadata cut text as the tokenizers do that they were made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mega_ckpt.formats.gguf_file import GgufModel
from mega_ckpt.formats.gguf_source import build_tokenizer_files_from_gguf

TEXTS = [
    "Hello world, it's 12345 o'clock; I'LL go.", "  two  spaces\n\n\tand a tab ", "Grüße an 東京 🎉 ①½", "def f(x):\n    return x**2",
    "<|begin|>user<|end|>",
]  # fmt: skip
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
SPLITS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
    "qwen2": [pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)],
}
SPECIAL = ["<|begin|>", "<|end|>"]


def metadata(tokenizer: Tokenizer, kind: str, **more: Any) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    return {
        "general.architecture": "llama", "tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]], "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.chat_template": "{{ messages }}", **more,
    }  # fmt: skip


def build_tokenizer(fields: dict[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    files = build_tokenizer_files_from_gguf(GgufModel(Path("x.gguf"), fields, {}, None))
    return Tokenizer.from_str(files["tokenizer.json"].decode()), json.loads(files["tokenizer_config.json"])


@pytest.mark.parametrize("split", SPLITS)
def test_byte_level(split: str) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[split])
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    found, config = build_tokenizer(
        metadata(tokenizer, "gpt2", **{"tokenizer.ggml.pre": split, "tokenizer.ggml.add_bos_token": False})
    )
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert found.encode(text).ids == ids
        assert found.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids, skip_special_tokens=False)
    assert (config["bos_token"], config["eos_token"], config["chat_template"]) == (*SPECIAL, "{{ messages }}")


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool) -> None:
    """BPE whose merges follow from scores, with bytes for what has no token."""
    first = [normalizers.Prepend("▁")] if prefix else []
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[*SPECIAL, "<unk>", *(f"<0x{n:02X}>" for n in range(256))], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:2] * 3, trainer)
    fields = metadata(
        tokenizer, "llama", **{"tokenizer.ggml.add_space_prefix": prefix, "tokenizer.ggml.unknown_token_id": 2}
    )
    fields["tokenizer.ggml.scores"] = [-float(n) for n in range(len(fields["tokenizer.ggml.tokens"]))]
    del fields["tokenizer.ggml.merges"]
    found, _ = build_tokenizer(fields)
    for text in TEXTS:
        assert found.encode(text, add_special_tokens=False).ids == tokenizer.encode(text).ids
        assert found.encode(text).ids[0] == 0  # what SentencePiece puts before each text
    assert found.decode(found.encode(TEXTS[2]).ids) == TEXTS[2]


def test_one_that_is_not_known_is_told(caplog: pytest.LogCaptureFixture) -> None:
    fields = {"tokenizer.ggml.model": "t5"}
    assert build_tokenizer_files_from_gguf(GgufModel(Path("x.gguf"), fields, {}, None)) == {}
    assert "its tokenizer (t5, default) is not supported" in caplog.text
