"""GGUF files as a source of weights, and their tokenizers as the files that HuggingFace's libraries read.

The tokenizer is in the file's metadata and is built with `tokenizers`. Two kinds: "gpt2" is byte-level BPE, and the file names
the pre-tokenizer; "llama" is SentencePiece BPE over characters with byte fallback, and the file has scores instead of merges,
which define their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.families import find_family_by_name
from mega_ckpt.families.disk_layouts import expand_tensor_rules
from mega_ckpt.formats.dcp import convert_parse_errors
from mega_ckpt.formats.disk_source import DiskWeightSource, LazyTensor
from mega_ckpt.formats.gguf_architectures import GgufArchitecture, build_config_json_from_gguf, detect_gguf_architecture
from mega_ckpt.formats.gguf_file import GgufModel, open_gguf_model
from mega_ckpt.formats.hf_source import CONFIG, check_tensor_table
from mega_ckpt.formats.hf_weight_files import encode_json_mapping
from mega_common.errors import CheckpointError
from mega_common.progress_logging import logger

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_CONTROL, _USER_DEFINED = 3, 4  # kinds of tokens
SPACE = "▁"
_WORDS, _CONTRACTIONS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Regular expressions of GGUF's pre-tokenizers by name; None is GPT-2's, which is built into `tokenizers`.
_SPLITS: Mapping[str, str | None] = {
    "default": None, "gpt-2": None, "smollm": None, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "gpt-4o": _GPT4O,
}  # fmt: skip
_BEGIN_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")


def build_tokenizer_files_from_gguf(file: GgufModel) -> Mapping[str, bytes]:
    """Return tokenizer.json and tokenizer_config.json from GGUF metadata; empty, with a warning, for an unsupported tokenizer.
    The chat template is included.

    Raises:
        CheckpointError: when the metadata lacks a part of the tokenizer, or a part has the wrong type.
    """
    try:
        return _files(file)
    except Exception as error:  # noqa: BLE001 - `tokenizers` raises plain exceptions
        raise CheckpointError(
            f"{file.path}: its tokenizer (tokenizer.ggml.*) is incomplete or damaged ({type(error).__name__}: {error!s:.200})",
            hint="download the file again, or use the HuggingFace folder of the model",
        ) from None


def _files(file: GgufModel) -> Mapping[str, bytes]:
    kind, split = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2" and split in _SPLITS:
        tokenizer = _byte_level(file.metadata, split)
    elif kind == "llama":
        tokenizer = _sentencepiece(file.metadata)
    else:
        logger.warning(
            "%s: its tokenizer (%s, %s) is not supported; copy the model's tokenizer.json into the converted folder",
            file.path, kind, split,
        )  # fmt: skip
        return {}
    _add_special_tokens(tokenizer, file.metadata, begin=kind == "llama" or split in _BEGIN_BY_DEFAULT)
    return {"tokenizer.json": tokenizer.to_str(pretty=True).encode(), "tokenizer_config.json": _config(file.metadata)}


def _byte_level(metadata: Mapping[str, Any], split: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    pattern = _SPLITS[split]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pattern is _LLAMA3))
    if pattern is _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)]
    if pattern:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    if split == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    gemma = metadata["general.architecture"].startswith("gemma")
    tokens: Sequence[str] = metadata["tokenizer.ggml.tokens"]
    if gemma:  # its tokens of several spaces are stored as plain spaces
        tokens = [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    # The order of Gemma's merges is that of its tokens, independent of the scores.
    scores = [-n for n in range(len(tokens))] if gemma else metadata["tokenizer.ggml.scores"]
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(
        vocabulary, _derive_merges(vocabulary, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) and not gemma
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if prefix else []), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return tokenizer


def _derive_merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every split of a token into two other tokens, in the order of decreasing scores."""
    found = []
    for token, index in vocabulary.items():
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(-scores[index], pair) for pair in pairs]
    found.sort(key=lambda item: item[0])
    return [pair for _, pair in found]


def _add_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any], *, begin: bool) -> None:
    """Add the special tokens, and the token at the beginning of each text."""
    from tokenizers import AddedToken, processors

    kinds = metadata.get("tokenizer.ggml.token_type", ())
    for token, kind in zip(metadata["tokenizer.ggml.tokens"], kinds, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    index = metadata.get("tokenizer.ggml.bos_token_id")
    if index is not None and metadata.get("tokenizer.ggml.add_bos_token", begin):
        first = metadata["tokenizer.ggml.tokens"][index]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first}:1 $B:1", special_tokens=[(first, index)]
        )


def _config(metadata: Mapping[str, Any]) -> bytes:
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in named.items()}
    template = metadata.get("tokenizer.chat_template")
    length = metadata.get(f"{metadata['general.architecture']}.context_length")
    return encode_json_mapping(
        {
            **{f"{name}_token": tokens[index] for name, index in found.items() if index is not None},
            **({"chat_template": template} if template else {}),
            "clean_up_tokenization_spaces": False,
            "model_max_length": length,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }
    )


_DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read as settings


class GgufSource(DiskWeightSource):
    """Reader of a model's weights from a GGUF file; quantized weights are dequantized when read.

    Raises:
        CheckpointError: from the constructor, for a damaged file or an unsupported model.
    """

    def __init__(self, path: Path) -> None:
        file = open_gguf_model(path)
        architecture = detect_gguf_architecture(file)
        with convert_parse_errors(f"{path}: its metadata does not describe a model"):
            raw = build_config_json_from_gguf(file, architecture)
            self.family = find_family_by_name(raw["model_type"])
            model = self.family.read_config_json(raw, str(path))
        self._file, self._raw = file, raw
        expected = canonical_tensors(model)
        table = expand_tensor_rules(architecture.tensor_rules(), expected, model.num_layers)
        stored = {name: one for name, one in file.tensors.items() if name not in _DERIVED}
        disk = {
            name: _to_hf_tensor(name, one, architecture, model.num_attention_heads, model.key_value_heads)
            for name, one in stored.items()
        }
        check_tensor_table(table, {name: one.shape for name, one in disk.items()}, path, self.family.name, "metadata")
        super().__init__(path, model, table, disk, file.quantization)

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return config.json, generation_config.json and the tokenizer files, built from the GGUF metadata."""
        sizes: Counter[torch.dtype] = Counter()
        for name in self.tensor_names():
            sizes[self.tensor_dtype(name)] += torch.Size(self.tensor_shape(name)).numel()
        dtype = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
        tokens = {key: value for key, value in self._raw.items() if key.endswith("_token_id")}
        config = {**self.family.write_config_json(self.model), **tokens, "dtype": dtype}
        generation = {key: value for key, value in tokens.items() if key != "unk_token_id"}
        return {
            CONFIG: encode_json_mapping(config),
            "generation_config.json": encode_json_mapping(generation),
            **build_tokenizer_files_from_gguf(self._file),
        }


def _to_hf_tensor(
    name: str, stored: LazyTensor, architecture: GgufArchitecture, heads: int, kv_heads: int
) -> LazyTensor:
    """Return a tensor of the file in HuggingFace's form."""
    part = name.rpartition(".")[0].rpartition(".")[2]
    if architecture.interleaves_rotary and part in ("attn_q", "attn_k"):
        read = partial(_deinterleave_rotary, stored, heads if part == "attn_q" else kv_heads)
        return replace(stored, read=read, costly=True)
    if architecture.stores_norm_plus_one and part.endswith("norm"):
        return replace(stored, read=lambda: stored.read() - 1, costly=True)
    if part == "ffn_gate_inp_shexp" and len(stored.shape) == 1:
        return replace(stored, shape=(1, *stored.shape), read=lambda: stored.read().unsqueeze(0))
    return stored


def _deinterleave_rotary(stored: LazyTensor, heads: int) -> Tensor:
    """Return [H d, D] with the two rotary halves of each head separated; the file stores them as interleaved pairs."""
    pairs = stored.read().view(heads, -1, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape)
