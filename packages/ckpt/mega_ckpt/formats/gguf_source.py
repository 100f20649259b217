"""Weight source of a GGUF file: input of `mega ckpt convert model.gguf out --to hf`.

Its config.json, tokenizer and chat template are built from the file's metadata, so that the conversion gives a complete
folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.families import family_by_name
from mega_ckpt.families.disk_layouts import expand_tensor_rules
from mega_ckpt.formats.dcp import malformed_as_error
from mega_ckpt.formats.disk_source import DiskSource, LazyTensor
from mega_ckpt.formats.gguf_architectures import GgufArchitecture, gguf_architecture_of, gguf_config_json
from mega_ckpt.formats.gguf_file import open_gguf_model
from mega_ckpt.formats.gguf_tokenizer import build_tokenizer_files
from mega_ckpt.formats.hf_source import CONFIG, check_tensor_table
from mega_ckpt.formats.hf_weight_files import encode_json_mapping

_DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # read as settings


class GgufSource(DiskSource):
    """A `WeightSource` of the model in a GGUF file; quantized weights are dequantized when read.

    Raises:
        CheckpointError: from the constructor, for a damaged file or an unsupported model.
    """

    def __init__(self, path: Path) -> None:
        file = open_gguf_model(path)
        architecture = gguf_architecture_of(file)
        with malformed_as_error(f"{path}: its metadata does not describe a model"):
            raw = gguf_config_json(file, architecture)
            self.family = family_by_name(raw["model_type"])
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
            **build_tokenizer_files(self._file),
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
