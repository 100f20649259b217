"""Tokenizer metadata of a GGUF file from the tokenizer.json of a HuggingFace folder, the inverse of `gguf_source`.

llama.cpp has its own implementation of each pre-tokenizer, so the file names one. It is found by its behavior: the one that
cuts sample texts as the tokenizer does. The metadata are then read back, and must give the same tokens for these texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mega_ckpt.formats.gguf_file import GgufModel
from mega_ckpt.formats.gguf_source import SPACE, build_tokenizer_files_from_gguf
from mega_common.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# Pre-tokenizers that llama.cpp and the reader know, the most common behavior first.
_PRE_TOKENIZERS = ("gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o")
_SAMPLES = (
    "Hello world, it's 12345 o'clock; I'LL go there.\n", "  two  spaces\n\n\tand a tab \r\n  x", "Grüße an 東京 🎉 ①½ कि ",
    "def f(x_1):\n    return x**2  # 3.14159e-10\n", "HELLOWorld camelCase don'T \u00a0'S /path/to//x.y", "a\u0301 e\u0301\n \n\n z",
    "The quick brown fox jumps over 13 lazy dogs.",
)  # fmt: skip


def build_gguf_tokenizer_metadata(
    files: Mapping[str, Path | bytes], vocab_size: int, architecture: str, source: object
) -> dict[str, Any]:
    """Return the GGUF metadata `tokenizer.*` of a folder's tokenizer.json; an error if llama.cpp has no equivalent one.

    Args:
        files: files that accompany the weights.
        vocab_size: rows of the embedding; tokens that the tokenizer lacks are unused.
        architecture: value of `general.architecture`.
        source: the model, for errors.

    Raises:
        CheckpointError: when there is no tokenizer.json, or llama.cpp has no such tokenizer.
    """
    from tokenizers import Tokenizer

    if "tokenizer.json" not in files:
        raise CheckpointError(
            f"{source}: --to gguf requires a tokenizer.json, which is missing",
            hint="copy the model's tokenizer files into its folder",
        )
    text = _read(files, "tokenizer.json")
    try:
        raw, tokenizer = json.loads(text), Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - tokenizers raises no narrower one
        raise CheckpointError(
            f"{source}: tokenizer.json is not a tokenizer ({error})", hint="copy the model's tokenizer into its folder"
        ) from None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if largest >= vocab_size:
        raise CheckpointError(
            f"{source}: tokenizer.json has {largest + 1} tokens, but the model's vocabulary has {vocab_size}",
            hint="use the tokenizer that the model was trained with",
        )
    settings = _read_settings(files)
    common = {**_token_fields(raw, vocab_size, tokenizer), **_special_fields(tokenizer, settings)}
    for fields in _candidates(raw, common):
        fields["general.architecture"] = architecture
        if _gives_same_tokens(tokenizer, fields):
            fields.pop("general.architecture")
            return fields
    kind = raw["model"].get("type")
    pre = json.dumps(raw.get("pre_tokenizer"), ensure_ascii=False)
    raise CheckpointError(
        f"{source}: llama.cpp has no tokenizer with the results of this tokenizer.json ({kind}, pre-tokenizer {pre:.200})",
        hint=f"supported: byte-level BPE of {', '.join(_PRE_TOKENIZERS)}, and SentencePiece BPE",
    )


def _read(files: Mapping[str, Path | bytes], name: str) -> str:
    content = files.get(name, b"")
    return (content.read_bytes() if isinstance(content, Path) else content).decode()


def _read_settings(files: Mapping[str, Path | bytes]) -> dict[str, Any]:
    """Return the mapping in tokenizer_config.json, with ids of config.json, and the chat template of its own file."""
    config = json.loads(_read(files, "config.json") or "{}")
    settings = {key: value for key, value in config.items() if key.endswith("_token_id")}
    settings |= json.loads(_read(files, "tokenizer_config.json") or "{}")
    template = _read(files, "chat_template.jinja")
    return settings | ({"chat_template": template} if template else {})


def _token_fields(raw: Mapping[str, Any], vocab_size: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return tokens and their kinds, in the order of their ids."""
    kinds = {each["id"]: _CONTROL if each["special"] else _USER_DEFINED for each in raw.get("added_tokens", ())}
    unknown = raw["model"].get("unk_token")
    tokens, found = [f"[PAD{index}]" for index in range(vocab_size)], [_UNUSED] * vocab_size
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        is_byte = len(token) == 6 and token.startswith("<0x") and bool(raw["model"].get("byte_fallback"))
        plain = _UNKNOWN if token == unknown else _BYTE if is_byte else _NORMAL
        tokens[index], found[index] = token, plain if plain != _NORMAL else kinds.get(index, _NORMAL)
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": found}


def _special_fields(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ids of special tokens, tokens around each text, and the chat template."""
    out: dict[str, Any] = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        token, index = settings.get(f"{name}_token"), settings.get(f"{name}_token_id")
        token = token.get("content") if isinstance(token, Mapping) else token
        found = (
            tokenizer.token_to_id(token) if isinstance(token, str) else index[0] if isinstance(index, list) else index
        )
        if found is not None:
            out[f"tokenizer.ggml.{key}_token_id"] = found
    around = tokenizer.encode("a").ids
    for key, place in (("bos", 0), ("eos", -1)):
        out[f"tokenizer.ggml.add_{key}_token"] = around[place] == out.get(f"tokenizer.ggml.{key}_token_id", -1)
    template = settings.get("chat_template")
    return out | ({"tokenizer.chat_template": template} if template else {})


def _candidates(raw: Mapping[str, Any], common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return metadata of the tokenizers of llama.cpp that may be this one."""
    model = raw["model"]
    if model.get("type") != "BPE":
        return []
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    if not model.get("byte_fallback"):
        fields = {
            **common,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        }
        return [{**fields, "tokenizer.ggml.pre": name} for name in _PRE_TOKENIZERS]
    rank: dict[str, float] = {}
    for index, pair in enumerate(merges):
        rank.setdefault("".join(pair), -float(index))
    kinds, tokens = common["tokenizer.ggml.token_type"], common["tokenizer.ggml.tokens"]
    # llama.cpp looks for tokens of users in the text, where spaces are not yet replaced.
    tokens = [
        token.replace(SPACE, " ") if kind == _USER_DEFINED else token for token, kind in zip(tokens, kinds, strict=True)
    ]
    fields = {
        **common, "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [rank.get(token, -float(len(merges))) for token in common["tokenizer.ggml.tokens"]],
    }  # fmt: skip
    return [{**fields, "tokenizer.ggml.add_space_prefix": prefix} for prefix in (True, False)]


def _gives_same_tokens(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> bool:
    """Return whether the tokenizer that is read from the metadata encodes the samples alike."""
    from tokenizers import Tokenizer

    files = build_tokenizer_files_from_gguf(GgufModel(Path("model.gguf"), fields, {}, None))
    read = Tokenizer.from_str(files["tokenizer.json"].decode())
    if fields["tokenizer.ggml.model"] == "gpt2" and not _cuts_alike(tokenizer, read):
        return False
    ignores = [bool(json.loads(each.to_str())["model"].get("ignore_merges")) for each in (tokenizer, read)]
    return ignores[0] == ignores[1] and all(tokenizer.encode(text).ids == read.encode(text).ids for text in _SAMPLES)


def _cuts_alike(tokenizer: Tokenizer, other: Tokenizer) -> bool:
    """Return whether the pre-tokenizers of both cut the samples into the same pieces."""
    first, second = tokenizer.pre_tokenizer, other.pre_tokenizer
    return first is not None and all(first.pre_tokenize_str(text) == second.pre_tokenize_str(text) for text in _SAMPLES)
