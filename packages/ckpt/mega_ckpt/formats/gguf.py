"""The model in a GGUF file as a source of weights: what `mega ckpt convert model.gguf out --to hf` reads.

Its config.json, tokenizer and chat template are made of the file's metadata, so that what is converted is a whole folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mega_ckpt.families import family_named
from mega_ckpt.families.layouts import disk_tensors
from mega_ckpt.formats.dcp import failing
from mega_ckpt.formats.disk import DiskSource, Stored
from mega_ckpt.formats.gguf_file import open_gguf
from mega_ckpt.formats.gguf_models import Architecture, architecture_of, config_of
from mega_ckpt.formats.gguf_tokenizer import tokenizer_files
from mega_ckpt.formats.hf import CONFIG, check_table
from mega_ckpt.formats.hf_files import encode_json
from mega_ckpt.names import tensors_of

_DERIVED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # these became settings


class GgufSource(DiskSource):
    """The model in a GGUF file; quantised weights as the numbers that they stand for.

    Raises:
        CheckpointError: from the constructor, for a damaged file, or a model that is not known.
    """

    def __init__(self, path: Path) -> None:
        file = open_gguf(path)
        architecture = architecture_of(file)
        with failing(f"{path}: its metadata does not describe a model"):
            raw = config_of(file, architecture)
            self.family = family_named(raw["model_type"])
            model = self.family.read_config(raw, str(path))
        self._file, self._raw = file, raw
        expected = tensors_of(model)
        table = disk_tensors(architecture.rules(), expected, model.num_layers)
        stored = {name: one for name, one in file.tensors.items() if name not in _DERIVED}
        disk = {
            name: _as_trained(name, one, architecture, model.num_attention_heads, model.kv_heads)
            for name, one in stored.items()
        }
        check_table(table, {name: one.shape for name, one in disk.items()}, path, self.family.name, "metadata")
        super().__init__(path, model, table, disk, file.quantised)

    def assets(self) -> Mapping[str, Path | bytes]:
        """config.json, and what the metadata tells of tokens."""
        sizes: Counter[torch.dtype] = Counter()
        for name in self.keys():
            sizes[self.dtype(name)] += torch.Size(self.shape(name)).numel()
        dtype = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
        tokens = {key: value for key, value in self._raw.items() if key.endswith("_token_id")}
        config = {**self.family.write_config(self.model), **tokens, "dtype": dtype}
        generation = {key: value for key, value in tokens.items() if key != "unk_token_id"}
        return {
            CONFIG: encode_json(config),
            "generation_config.json": encode_json(generation),
            **tokenizer_files(self._file),
        }


def _as_trained(name: str, stored: Stored, architecture: Architecture, heads: int, kv_heads: int) -> Stored:
    """A tensor of the file as HuggingFace has it."""
    part = name.rpartition(".")[0].rpartition(".")[2]
    if architecture.halves_in_turns and part in ("attn_q", "attn_k"):
        read = partial(_halves_apart, stored, heads if part == "attn_q" else kv_heads)
        return replace(stored, read=read, costly=True)
    if architecture.ones_added and part.endswith("norm"):
        return replace(stored, read=lambda: stored.read() - 1, costly=True)
    if part == "ffn_gate_inp_shexp" and len(stored.shape) == 1:
        return replace(stored, shape=(1, *stored.shape), read=lambda: stored.read().unsqueeze(0))
    return stored


def _halves_apart(stored: Stored, heads: int) -> Tensor:
    """[H d, D] whose rotated rows were stored pair by pair, of each pair one from either half of the head."""
    pairs = stored.read().view(heads, -1, 2, *stored.shape[1:])
    return pairs.transpose(1, 2).reshape(stored.shape)
