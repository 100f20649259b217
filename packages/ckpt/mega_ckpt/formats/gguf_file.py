"""GGUF files (github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata, and tensors that are decoded as they are read.

The package `gguf` knows the format and the rule of each quantised type. Those become fp32, in which the rules are exact; but
the numbers of MXFP4 are exact in bf16. Tensors that are not quantised stay as they are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mega_ckpt.formats.disk import Stored
from mega_ckpt.formats.gguf_bounds import check_header
from mega_ckpt.pieces import Shape
from mega_common.errors import CheckpointError, MissingPackageError

if TYPE_CHECKING:
    from gguf import ReaderTensor

SUFFIX = ".gguf"
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 1 << 18  # elements that are decoded at once


@dataclass(frozen=True)
class Gguf:
    """What a model's GGUF file, or its several ones, hold.

    Attributes:
        path: the first of them.
        metadata: {key: value}, with floats as the shortest decimal that is the same in the file's fp32.
        tensors: {name: tensor}, in shapes (out, in).
        quantised: how many tensors have which type, in words; None when none is quantised.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Stored]
    quantised: str | None


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its name."""
    return path.suffix == SUFFIX and path.is_file()


def open_gguf(path: Path) -> Gguf:
    """The model in a file, or in the several ones of which this is one.

    Raises:
        CheckpointError: when one is missing, damaged or not of this format, or has a type that cannot be decoded.
        MissingPackageError: when the package gguf is not installed.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, Stored] = {}
    kinds: Counter[str] = Counter()
    for part in _parts(path):
        found, held = _read(part)
        metadata = {**found, **metadata}
        for tensor in held:
            kinds[tensor.tensor_type.name] += 1
            tensors[tensor.name] = _stored(part, tensor)
    quantised = [f"{count} of {kind}" for kind, count in sorted(kinds.items()) if kind not in _PLAIN]
    said = f"GGUF, {', '.join(quantised)} among {sum(kinds.values())} tensors" if quantised else None
    return Gguf(path, metadata, tensors, said)


def _parts(path: Path) -> list[Path]:
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    paths = [path.with_name(f"{found[1]}-{n + 1:05d}-of-{found[3]}.gguf") for n in range(int(found[3]))]
    for one in paths:
        if not one.is_file():
            raise CheckpointError(f"{one}: missing, a part of the model of {path.name}", hint="download it too")
    return paths


def _read(path: Path) -> tuple[dict[str, Any], list[ReaderTensor]]:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingPackageError(
            f"{path}: GGUF files are read by the package gguf, which is not installed",
            hint="in the root of the repository: pip install 'packages/ckpt[gguf]'",
        ) from None

    class Reader(GGUFReader):
        """With a plain array in place of numpy's memmap, every slice of which costs microseconds."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)

    try:
        check_header(path)
        reader = Reader(path, "c")  # copy-on-write: torch wants writable memory
        if reader.byte_order != "I":
            raise ValueError("of the other byte order")
        metadata = {key: _shortest(field.contents()) for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError) as error:
        raise CheckpointError(
            f"{path}: damaged, or not a GGUF file that can be read ({error})", hint="download or copy the file again"
        ) from None
    return metadata, reader.tensors


def _shortest(value: Any) -> Any:
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _stored(path: Path, tensor: ReaderTensor) -> Stored:
    from gguf.quants import _type_traits

    kind = tensor.tensor_type
    shape: Shape = tuple(int(n) for n in reversed(tensor.shape.tolist()))
    if kind.name in _PLAIN:
        return Stored(path, _PLAIN[kind.name], shape, partial(_plain, tensor.data, _PLAIN[kind.name], shape))
    if kind not in _type_traits:
        raise CheckpointError(f"{path}: {tensor.name} has the type {kind.name}, which the package gguf cannot decode")
    dtype = torch.bfloat16 if kind.name == "MXFP4" else torch.float32
    return Stored(path, dtype, shape, partial(_decoded, tensor, dtype, shape), costly=True)


def _plain(data: np.ndarray[Any, Any], dtype: torch.dtype, shape: Shape) -> Tensor:
    return torch.from_numpy(data.view(np.uint8)).view(dtype).view(shape)


def _decoded(tensor: ReaderTensor, dtype: torch.dtype, shape: Shape) -> Tensor:
    """A few rows at a time, so that little is needed beside the result."""
    from gguf import dequantize

    out = torch.empty(shape, dtype=dtype)
    data, rows = tensor.data.reshape(-1, tensor.data.shape[-1]), out.view(-1, shape[-1])
    step = max(1, _CHUNK // shape[-1])
    for begin in range(0, len(rows), step):
        rows[begin : begin + step] = torch.from_numpy(dequantize(data[begin : begin + step], tensor.tensor_type))
    return out
