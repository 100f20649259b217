"""Writer of GGUF files for llama.cpp, the inverse of `gguf_source`: one tensor in memory at a time."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mega_ckpt.families.disk_layouts import DiskTensor
from mega_ckpt.formats.gguf_blocks import choose_gguf_type, encode_tensor_as_gguf
from mega_ckpt.formats.gguf_metadata import GgufDescription, describe_model_as_gguf
from mega_ckpt.formats.gguf_tokenizer_write import build_gguf_tokenizer_metadata
from mega_ckpt.formats.hf_source import CONFIG
from mega_ckpt.formats.hf_weight_files import decode_json_mapping
from mega_ckpt.resumable_folder import FinishedFile, RunOnce, write_without_journal
from mega_ckpt.shard_files import HashingFileWriter
from mega_ckpt.tensor_pieces import TensorShape
from mega_ckpt.weight_source import WeightSource, write_file_durably
from mega_common.errors import MissingPackageError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_ALIGNMENT = 32  # bytes
_FILE_TYPES = {"f16": 1, "q8_0": 7, "q4_0": 2, "q4_k": 14}  # of llama.cpp
_QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class GgufTensor:
    """Type, shape and size in bytes of a tensor to write."""

    kind: GGMLQuantizationType
    shape: TensorShape
    nbytes: int


@dataclass(frozen=True)
class GgufPlan:
    """Contents of a folder with the GGUF files of a model, except the bytes of the tensors.

    Attributes:
        description: architecture, metadata and names.
        metadata: all metadata of the first file.
        files: {file name: tensors in it, by name}.
        quantization: types of the tensors, as text.
    """

    description: GgufDescription
    metadata: Mapping[str, Any]
    files: Mapping[str, Mapping[str, GgufTensor]]
    quantization: str

    @property
    def total_bytes(self) -> int:
        """Total size in bytes of the tensors."""
        return sum(tensor.nbytes for tensors in self.files.values() for tensor in tensors.values())

    def encode_header(self, name: str) -> bytes:
        """Return the bytes of the file `name` before its tensors."""
        from gguf import GGUFWriter
        from gguf.gguf_writer import WriterState

        writer, stream = GGUFWriter(None, self.description.name), io.BytesIO()
        number, first = list(self.files).index(name), next(iter(self.files))
        for key, value in self.metadata.items() if name == first else ():
            _add_metadata(writer, key, value)
        if len(self.files) > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", len(self.files))
            writer.add_int32("split.tensors.count", sum(map(len, self.files.values())))
        for tensor, info in self.files[name].items():
            writer.add_tensor_info(tensor, info.shape, np.dtype(np.float32), info.nbytes, raw_dtype=info.kind)
        writer.fout, writer.state = [stream], WriterState.EMPTY  # type: ignore[list-item]
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return stream.getvalue() + bytes(-stream.tell() % _ALIGNMENT)


def _add_metadata(writer: Any, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


def plan_gguf_folder(source: WeightSource, quantize: str, max_shard: int | None = None) -> GgufPlan:
    """Plan the GGUF files to write for `source`: architecture, metadata, tokenizer and tensor types.

    Args:
        source: the weights.
        quantize: f16, q8_0, q4_0 or q4_k.
        max_shard: maximum bytes of tensors per file; None: one file.

    Raises:
        CheckpointError: when llama.cpp cannot express the model or its tokenizer.
        MissingPackageError: when the package gguf is not installed.
    """
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError:
        raise MissingPackageError(
            "--to gguf requires the package gguf, which is not installed",
            hint="in the root of the repository: pip install 'packages/ckpt[gguf]'",
        ) from None
    assets = source.asset_files()
    config = assets.get(CONFIG, b"{}")
    kind = decode_json_mapping(config.read_bytes() if isinstance(config, Path) else config, CONFIG).get("model_type")
    description = describe_model_as_gguf(source.model, str(kind or "a model without config.json"))
    metadata = {
        "general.file_type": _FILE_TYPES[quantize], "general.quantization_version": _QUANTIZATION_VERSION,
        **description.metadata, **build_gguf_tokenizer_metadata(assets, source.model.vocab_size, description.name, kind),
    }  # fmt: skip
    tensors: dict[str, GgufTensor] = {}
    shapes = {name: tuple(tensor.shape) for name, tensor in description.extra.items()}
    for name, shape in {
        **shapes,
        **{name: _file_shape(name, disk) for name, disk in description.table.items()},
    }.items():
        chosen = choose_gguf_type(quantize, name, shape)
        block, size = GGML_QUANT_SIZES[chosen]
        tensors[name] = GgufTensor(chosen, shape, math.prod(shape) // block * size)
    names = sorted({tensor.kind.name for tensor in tensors.values() if len(tensor.shape) > 1})
    text = f"GGUF, matrices in {' and '.join(names)}, rounded without calibration data"
    return GgufPlan(description, metadata, _split_into_files(tensors, max_shard, quantize), text)


def _file_shape(name: str, disk: DiskTensor) -> TensorShape:
    return disk.shape[1:] if "ffn_gate_inp_shexp" in name else disk.shape


def _split_into_files(
    tensors: Mapping[str, GgufTensor], max_shard: int | None, quantize: str
) -> dict[str, dict[str, GgufTensor]]:
    groups: list[dict[str, GgufTensor]] = [{}]
    for name, tensor in tensors.items():
        full = sum(each.nbytes for each in groups[-1].values()) + tensor.nbytes > (max_shard or math.inf)
        if full and groups[-1]:
            groups.append({})
        groups[-1][name] = tensor
    if len(groups) == 1:
        return {f"model-{quantize}.gguf": groups[0]}
    return {f"model-{quantize}-{n + 1:05d}-of-{len(groups):05d}.gguf": group for n, group in enumerate(groups)}


def write_gguf_folder(
    source: WeightSource,
    plan: GgufPlan,
    folder: Path,
    advance: Callable[[int], object],
    once: RunOnce = write_without_journal,
    others: Mapping[str, Path | bytes] = {},
) -> None:
    """Write the files of `plan`, and `others`, into an existing folder; durable on return.

    `once` skips files that are already complete.
    """
    for name, tensors in plan.files.items():
        header = plan.encode_header(name)
        once(name, header, partial(_write_file, source, plan, header, tensors, folder / name, advance))
    for name, content in others.items():
        write_file_durably(folder / name, content)


def _write_file(
    source: WeightSource,
    plan: GgufPlan,
    header: bytes,
    tensors: Mapping[str, GgufTensor],
    path: Path,
    advance: Callable[[int], object],
) -> FinishedFile:
    with HashingFileWriter(path) as file:
        file.write_hashed(header)
        for name, tensor in tensors.items():
            for part in _read_parts(source, plan.description, name):
                for data in encode_tensor_as_gguf(name, part, tensor.kind):
                    file.write_hashed(np.ascontiguousarray(data).data.cast("B"))
                    advance(data.nbytes)
            file.write_hashed(bytes(-tensor.nbytes % _ALIGNMENT))
        return FinishedFile(file=file.close())


def _read_parts(source: WeightSource, description: GgufDescription, name: str) -> Iterator[Tensor]:
    """Yield a tensor as it is in the file, experts one by one."""
    if name in description.extra:
        yield description.extra[name]
        return
    disk, architecture = description.table[name], description.architecture
    part = name.rpartition(".")[0].rpartition(".")[2]
    if len(disk.shape) == 3:
        (slab,) = disk.slabs
        for expert in range(disk.shape[0]):
            yield source.read_tensor_slice(slab.name, (expert, 0, 0), (1, *disk.shape[1:]))
        return
    found = (
        torch.cat([source.read_tensor(slab.name) for slab in disk.slabs])
        if disk.slabs[1:]
        else source.read_tensor(disk.slabs[0].name)
    )
    if architecture.interleaves_rotary and part in ("attn_q", "attn_k"):
        heads = source.model.num_attention_heads if part == "attn_q" else source.model.key_value_heads
        found = found.view(heads, 2, -1, *found.shape[1:]).transpose(1, 2).reshape(found.shape)
    if architecture.stores_norm_plus_one and part.endswith("norm"):
        found = found.float() + 1
    yield found.view(_file_shape(name, disk))
