"""Manifest of a checkpoint: a byte-exact description of the folder in one JSON file, verified before use.

    step-00000100/
        manifest.json                        the manifest
        shard-00000-000.safetensors ...      tensors, split into chunks
        assets/                              tokenizer files and others, unchanged

The second line of `manifest.json` is the XXH3-128 checksum of every byte after that line, so that any flipped bit is
detected. The manifest describes all other files: a shard's header is not parsed but must equal, byte for byte, the one
that follows from the manifest.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

import torch
import xxhash
from pydantic import Field, JsonValue, NonNegativeInt, ValidationError

from mega_ckpt.storage import open_storage_folder
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.errors import CheckpointError, NoCheckpointError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location
from mega_common.strict_config import ConfigProblem, StrictConfig

MANIFEST = "manifest.json"
FORMAT_VERSION: Literal[1] = 1
MAX_MANIFEST_BYTES = 1 << 30
MAX_AXES = 8

# Names as in the safetensors format.
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

TensorBytes = Annotated[int, Field(ge=0, lt=1 << 62)]
Checksum = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]

_HEAD, _TAIL = b'{\n "checksum": "', b'",\n'


class TensorChunk(StrictConfig):
    """Rectangular slice [offset, offset + shape) of a tensor, stored as a range of bytes of a shard file.
    The slice is in row-major order at bytes [begin, end) of the file. The chunk has the XXH3-128 checksum of these
    bytes.
    """

    offset: tuple[TensorBytes, ...]
    shape: tuple[TensorBytes, ...]
    file: str
    begin: TensorBytes
    end: TensorBytes
    checksum: Checksum


class ManifestTensorEntry(StrictConfig):
    """Record of a global tensor in a checkpoint's manifest.
    It has the tensor's safetensors dtype name, its shape, and the chunks that tile it.
    """

    dtype: str
    shape: tuple[TensorBytes, ...]
    chunks: tuple[TensorChunk, ...]


class ManifestFileEntry(StrictConfig):
    """Record of a file in a checkpoint's manifest: length in bytes and XXH3-128 checksum of the whole file."""

    bytes: TensorBytes
    checksum: Checksum


class Manifest(StrictConfig):
    """Contents of a mega checkpoint, stored as `manifest.json`.
    `state` and `provenance` are JSON that only the trainer interprets.

    Attributes:
        folder: folder of the files, relative to the manifest; "" is the folder of the manifest. On an object store each
            save has a separate folder, so that one put of the manifest replaces a checkpoint of the same step.
    """

    format_version: Literal[1] = FORMAT_VERSION
    step: NonNegativeInt
    model: ModelConfig
    state: dict[str, JsonValue]
    provenance: dict[str, JsonValue] = {}
    folder: str = ""
    files: dict[str, ManifestFileEntry]
    tensors: dict[str, ManifestTensorEntry]

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield the manifest's inconsistencies: invalid model settings, file names, tensors and byte ranges.

        They are checked before any file that the manifest names is opened.
        """
        yield from self.model.problems()
        for name in [*self.files, *([self.folder] if self.folder else [])]:
            if not _is_plain_path(name):
                yield ConfigProblem("files", f"{name!r} must be the plain name of a file inside the checkpoint")
        ranges = defaultdict(list)
        for key, tensor in self.tensors.items():
            rule = _tensor_problem(key, tensor, self.files)
            if rule:
                yield ConfigProblem(key, rule)
            for chunk in tensor.chunks:
                ranges[chunk.file].append((chunk.begin, chunk.end, key))
        for name, found in ranges.items():
            if name in self.files:
                yield from _range_problems(name, sorted(found), self.files[name].bytes)

    def encode_json(self) -> bytes:
        """Return the bytes of `manifest.json`, one line per tensor.

        Raises:
            CheckpointError: when `state` or `provenance` has NaN or infinity, which JSON cannot express.
        """
        fields = self.model_dump(mode="json", exclude=set() if self.folder else {"folder"})
        rows = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in sorted(fields.pop("tensors").items())]
        try:
            lines = [f' "{name}": {json.dumps(value, allow_nan=False)}' for name, value in fields.items()]
        except ValueError as error:
            raise CheckpointError(f"the state to save must be JSON: {error}") from None
        body = (",\n".join([*lines, ' "tensors": {\n' + ",\n".join(rows) + "\n }"]) + "\n}\n").encode()
        return _HEAD + xxhash.xxh3_128_hexdigest(body).encode() + _TAIL + body

    @classmethod
    def decode_json(cls, data: bytes, source: Location) -> Manifest:
        """Verify the checksum of the bytes of a `manifest.json` and parse them; `source` is for error messages.

        Raises:
            CheckpointError: naming `source` and the tensor or field, for anything but a sound manifest.
        """
        start = len(_HEAD) + 32 + len(_TAIL)
        body = data[start:]
        if data[:start] != _HEAD + xxhash.xxh3_128_hexdigest(body).encode() + _TAIL:
            raise CheckpointError(
                f"{source}: damaged or changed since it was written: its checksum does not match",
                hint="copy the whole checkpoint again, or use another one",
            )
        try:
            manifest = cls.model_validate_json(b"{" + body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            raise CheckpointError(
                f"{source}: {'.'.join(map(str, first['loc'])) or 'the whole file'}: {first['msg']}",
                hint=f"this version of mega reads format {FORMAT_VERSION}; upgrade mega"
                if first["loc"] == ("format_version",)
                else None,
            ) from None
        problem = next(manifest.problems(), None)
        if problem:
            raise CheckpointError(f"{source}: {problem}")
        return manifest

    @classmethod
    def read_from_folder(cls, folder: Location) -> Manifest:
        """Read `manifest.json` of a checkpoint folder; NoCheckpointError if there is none.

        Raises:
            NoCheckpointError: when it is missing.
            CheckpointError: when it is damaged or cannot be read.
        """
        path = folder / MANIFEST
        try:
            if open_storage_folder(folder).file_size(MANIFEST) > MAX_MANIFEST_BYTES:
                raise CheckpointError(f"{path}: must have at most {MAX_MANIFEST_BYTES} bytes")
            return cls.decode_json(path.read_bytes(), path)
        except FileNotFoundError:
            raise _missing_manifest_error(folder) from None
        except NotADirectoryError:
            raise NoCheckpointError(
                f"{folder}: must be the folder of a mega checkpoint, not a file",
                hint="give a folder such as checkpoints/step-00000100",
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def _missing_manifest_error(folder: Location) -> NoCheckpointError:
    """Return the error for a path without a manifest, with a hint by what is there instead."""
    if not folder.exists():
        return NoCheckpointError(
            f"{folder}: no such folder",
            hint="give a folder such as runs/a/checkpoints/step-00000100, or the run's folder",
        )
    hint = "give a folder such as checkpoints/step-00000100, or a HuggingFace folder where the command accepts one"
    if (folder / "config.json").is_file():
        hint = f"it looks like a HuggingFace folder; convert it: mega ckpt convert {folder} OUTPUT --to mega"
    return NoCheckpointError(f"{folder}: not a mega checkpoint: {MANIFEST} is missing", hint=hint)


def make_checkpoint_manifest(
    step: int, model: ModelConfig, state: Mapping[str, Any], provenance: Mapping[str, Any] | None
) -> Manifest:
    """Create a manifest without tensors and files; CheckpointError if `state` or `provenance` is not JSON."""
    try:
        manifest = Manifest(
            step=step, model=model, state=dict(state), provenance=dict(provenance or {}), files={}, tensors={}
        )
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be saved: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None
    manifest.encode_json()
    return manifest


def is_exact_tiling(shape: TensorShape, boxes: Iterable[tuple[TensorShape, TensorShape]]) -> bool:
    """Return whether rectangular slices together contain every element of a tensor exactly once.
    The tensor has `shape`; slices are (offset, shape).

    The mixed derivative of a box's indicator function is a sum of signed points at its 2^axes corners, and determines a
    function that is zero far away. So the boxes tile iff their signed corners add up to those of the tensor. The cost is
    linear in the number of boxes; comparing all pairs would be quadratic.
    """
    corners: Counter[TensorShape] = Counter()
    outer = ((0,) * len(shape), shape)
    for sign, (offset, extent) in itertools.chain(((1, box) for box in boxes), [(-1, outer)]):
        for picks in itertools.product((0, 1), repeat=len(shape)):
            point = tuple(o + n * p for o, n, p in zip(offset, extent, picks, strict=True))
            corners[point] += -sign if sum(picks) % 2 else sign
    return not any(corners.values())


def _is_plain_path(name: str) -> bool:
    path = PurePosixPath(name)
    return (
        name.isprintable()
        and "\\" not in name
        and str(path) == name
        and not path.is_absolute()
        and not {"", ".", ".."} & set(path.parts)
        and bool(path.parts)
        and name != MANIFEST
    )


def _tensor_problem(key: str, tensor: ManifestTensorEntry, files: Mapping[str, ManifestFileEntry]) -> str | None:
    """Return the first rule that a tensor's entry breaks, or None."""
    if not key or not key.isprintable():
        return "the name of a tensor must be printable"
    if tensor.dtype not in DTYPES:
        return f"dtype {tensor.dtype!r} is not supported"
    if len(tensor.shape) > MAX_AXES or math.prod(n or 1 for n in tensor.shape) >= 1 << 62:
        return f"shape {list(tensor.shape)} is too large"
    width = DTYPES[tensor.dtype].itemsize
    for chunk in tensor.chunks:
        if not len(chunk.offset) == len(chunk.shape) == len(tensor.shape):
            return f"the chunk at {list(chunk.offset)} must have the tensor's number of axes"
        if any(o + n > g for o, n, g in zip(chunk.offset, chunk.shape, tensor.shape, strict=True)):
            return f"the chunk at {list(chunk.offset)} exceeds the tensor"
        if chunk.file not in files:
            return f"the chunk at {list(chunk.offset)} is in {chunk.file!r}, which is not a file of this checkpoint"
        if chunk.end - chunk.begin != math.prod(chunk.shape) * width or chunk.begin % width:
            return f"the shape of the chunk at {list(chunk.offset)} conflicts with its bytes in {chunk.file}"
        if chunk.end > files[chunk.file].bytes:
            return f"the chunk at {list(chunk.offset)} exceeds the file {chunk.file}"
    if not is_exact_tiling(tensor.shape, ((chunk.offset, chunk.shape) for chunk in tensor.chunks)):
        elements, total = sum(math.prod(c.shape) for c in tensor.chunks), math.prod(tensor.shape)
        return f"its chunks overlap or are incomplete ({elements} elements in chunks, {total} in the tensor)"
    return None


def _range_problems(name: str, found: list[tuple[int, int, str]], size: int) -> Iterator[ConfigProblem]:
    """Yield the gaps and overlaps between the chunks of a shard; chunks must be contiguous up to its end."""
    for (_, end, _), (begin, _, key) in itertools.pairwise(found):
        if begin != end:
            yield ConfigProblem(key, f"its bytes in {name} overlap with another tensor's or leave a gap")
    if found[-1][1] != size:
        yield ConfigProblem(found[-1][2], f"it must end at the end of {name}")
