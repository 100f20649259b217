"""Verification, inspection and comparison of checkpoints without loading them.

All three stream: they hold a few slabs of a tensor in memory, never a whole checkpoint.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from mega_ckpt.checkpoint import Checkpoint
from mega_ckpt.manifest import DTYPE_NAMES, DTYPES, MANIFEST, Manifest
from mega_ckpt.shard_files import tensor_bytes
from mega_ckpt.storage import open_storage_folder
from mega_ckpt.tensor_pieces import TensorShape, split_slice_by_elements
from mega_ckpt.weight_source import WeightSource
from mega_common.errors import CheckpointError
from mega_common.object_store import Location
from mega_common.progress_logging import ProgressBar, format_with_decimal_unit, logger

SLAB_ELEMENTS = 1 << 22
READ_BYTES = 1 << 22


@dataclass
class VerifyReport:
    """Result of the verification of a checkpoint.
    `problems` are messages that name file and tensor; `extra` are files that the manifest does not list.

    Formats without `checksums` are only checked for tensors that can be read.
    """

    folder: Location
    step: int
    files: int
    tensors: int
    bytes: int
    problems: list[str] = field(default_factory=list)
    not_finite: dict[str, int] = field(default_factory=dict)
    extra: list[str] = field(default_factory=list)
    checksums: bool = True

    @property
    def ok(self) -> bool:
        """True if the verification found no problem, and no NaN or infinity where it looked for them."""
        return not self.problems and not self.not_finite

    def __str__(self) -> str:
        lines = [
            f"{self.folder}: step {self.step}, {self.tensors} tensors, {format_with_decimal_unit(self.bytes)}B in {self.files} files"
        ]
        lines += [f"  {problem}" for problem in self.problems]
        lines += [f"  {key}: {count} elements are not finite" for key, count in self.not_finite.items()]
        lines += [f"  {name}: not part of the checkpoint" for name in self.extra]
        intact = "all checksums match" if self.checksums else "all tensors can be read; the format has no checksums"
        lines += [f"  {intact}" if self.ok else "  damaged"]
        return "\n".join(lines)


def verify_checkpoint(folder: Location, *, finite: bool = False) -> VerifyReport:
    """Return a report on every byte of a mega checkpoint against the manifest's checksums; damaged files raise nothing.
    With `finite`, NaN and infinities are looked for, too, in an undamaged checkpoint.

    Raises:
        CheckpointError: when the manifest is missing or damaged, so that no file can be verified.
    """
    manifest = Manifest.read_from_folder(folder)
    size = sum(entry.bytes for entry in manifest.files.values())
    report = VerifyReport(folder, manifest.step, len(manifest.files), len(manifest.tensors), size)
    inside = f"{manifest.folder}/" if manifest.folder else ""
    report.extra = sorted(
        set(open_storage_folder(folder).list_files()) - {inside + name for name in manifest.files} - {MANIFEST}
    )
    checkpoint = Checkpoint(folder, manifest)
    with ProgressBar(f"verifying {folder.name}", total=size, unit="bytes") as bar:
        for name in manifest.files:
            report.problems += _file_problems(checkpoint, name, bar)
    if finite and not report.problems:
        report.not_finite = {key: count for key in manifest.tensors if (count := _count_not_finite(checkpoint, key))}
    return report


def _file_problems(checkpoint: Checkpoint, name: str, bar: ProgressBar) -> list[str]:
    """Return the problems of the damaged tensors of a file, or the damage of the file itself if no tensor is damaged."""
    path, entry = checkpoint.files / name, checkpoint.manifest.files[name]
    try:
        checkpoint.check_file_in_manifest(name)
    except CheckpointError as error:
        return [error.message]
    digest = xxhash.xxh3_128()
    ranges = open_storage_folder(checkpoint.files).open_file(name)
    for begin in range(0, entry.bytes, READ_BYTES):
        block = tensor_bytes(ranges.read_range(begin, min(begin + READ_BYTES, entry.bytes)))
        digest.update(block)
        bar.advance(len(block))
    found = []
    for key, chunk in checkpoint.chunks_in_file(name):
        try:
            checkpoint.mmap_tensor_chunk(key, chunk)
        except CheckpointError as error:
            found.append(error.message)
    if not found and digest.hexdigest() != entry.checksum:
        found = [f"{path}: damaged: its checksum does not match"]
    return list(dict.fromkeys(found))


def _count_not_finite(checkpoint: Checkpoint, key: str) -> int:
    if not checkpoint.tensor_dtype(key).is_floating_point:
        return 0
    return sum(int((~torch.isfinite(part.float())).sum()) for part in _iter_slabs(checkpoint, key))


def _iter_slabs(checkpoint: Checkpoint, key: str) -> Iterator[Tensor]:
    for offset, shape in split_slice_by_elements(checkpoint.tensor_shape(key), SLAB_ELEMENTS):
        yield checkpoint.read_tensor(key, offset, shape)


@dataclass(frozen=True)
class TensorDiff:
    """Difference of one tensor between checkpoints a and b.
    It has the tensor's shapes and dtypes in both and, for equal shapes, the largest absolute and relative differences.

    `max_rel` is |a - b| / max(|a|, |b|). A NaN on one side only counts as infinite.
    """

    key: str
    shapes: tuple[TensorShape, TensorShape]
    dtypes: tuple[str, str]
    max_abs: float | None
    max_rel: float | None


@dataclass
class CheckpointDiff:
    """Differences between checkpoints a and b.
    `settings` is {path: (value in a, value in b)}, with None for a value that one side lacks.
    """

    a: Location
    b: Location
    settings: dict[str, tuple[Any, Any]]
    only_in_a: list[str]
    only_in_b: list[str]
    tensors: list[TensorDiff]
    equal: int = 0

    @property
    def is_identical(self) -> bool:
        """True if all settings and all bits of all tensors of both checkpoints are equal."""
        return not (self.settings or self.only_in_a or self.only_in_b or self.tensors)

    def __str__(self) -> str:
        lines = [f"a: {self.a}", f"b: {self.b}"]
        lines += [f"  {path}: {a!r} -> {b!r}" for path, (a, b) in self.settings.items()]
        lines += [f"  {key}: only in a" for key in self.only_in_a]
        lines += [f"  {key}: only in b" for key in self.only_in_b]
        for one in self.tensors:
            parts = [f"{list(one.shapes[0])} -> {list(one.shapes[1])}"] if one.shapes[0] != one.shapes[1] else []
            parts += [f"{one.dtypes[0]} -> {one.dtypes[1]}"] if one.dtypes[0] != one.dtypes[1] else []
            parts += [f"max abs {one.max_abs:.3g}, max rel {one.max_rel:.3g}"] if one.max_abs is not None else []
            lines.append(f"  {one.key}: {', '.join(parts)}")
        lines.append(f"{self.equal} tensors are equal bit for bit; {len(self.tensors)} differ")
        return "\n".join(lines)


def diff_checkpoints(a: Location, b: Location) -> CheckpointDiff:
    """Compare two mega checkpoints: settings (step, model, state) and every tensor, bit for bit.

    Raises:
        CheckpointError: when one of them is missing or damaged.
    """
    left, right = Checkpoint.open_folder(a), Checkpoint.open_folder(b)
    settings = dict(_different_settings(_settings(left.manifest), _settings(right.manifest)))
    keys, others = set(left.tensor_keys()), set(right.tensor_keys())
    out = CheckpointDiff(a, b, settings, sorted(keys - others), sorted(others - keys), [])
    common = sorted(keys & others)
    with ProgressBar("comparing", total=len(common), unit="tensors") as bar:
        for key in common:
            found = _tensor_diff(left, right, key)
            out.tensors += [found] if found else []
            out.equal += not found
            bar.advance(1)
    return out


def _settings(manifest: Manifest) -> dict[str, Any]:
    return manifest.model_dump(mode="json", include={"step", "model", "state"})


def _different_settings(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for name in sorted({*a, *b}):
            yield from _different_settings(a.get(name), b.get(name), f"{path}.{name}" if path else name)
    elif a != b:
        yield path, (a, b)


def _tensor_diff(left: Checkpoint, right: Checkpoint, key: str) -> TensorDiff | None:
    """Return the difference of one tensor, or None if it is equal bit for bit."""
    shapes, dtypes = (
        (left.tensor_shape(key), right.tensor_shape(key)),
        (left.tensor_entry(key).dtype, right.tensor_entry(key).dtype),
    )
    if shapes[0] != shapes[1]:
        return TensorDiff(key, shapes, dtypes, None, None)
    same, max_abs, max_rel = dtypes[0] == dtypes[1], 0.0, 0.0
    for a, b in zip(_iter_slabs(left, key), _iter_slabs(right, key), strict=True):
        if same and tensor_bytes(a) == tensor_bytes(b):
            continue
        same = False
        x, y = a.double(), b.double()
        diff = (x - y).abs()
        diff[(x == y) | (x.isnan() & y.isnan())] = 0
        diff = diff.nan_to_num(nan=math.inf, posinf=math.inf)
        relative = torch.where(diff > 0, diff / torch.maximum(x.abs(), y.abs()).nan_to_num(nan=1.0), diff)
        max_abs = max(max_abs, float(diff.max()) if diff.numel() else 0.0)
        max_rel = max(max_rel, float(relative.nan_to_num(nan=math.inf).max()) if diff.numel() else 0.0)
    return None if same else TensorDiff(key, shapes, dtypes, max_abs, max_rel)


@dataclass
class TensorGroup:
    """Totals of a checkpoint's tensors with one key prefix and dtype: numbers of tensors, elements and bytes."""

    prefix: str
    dtype: str
    tensors: int = 0
    elements: int = 0
    bytes: int = 0


@dataclass
class CheckpointSummary:
    """Summary of the contents of a checkpoint: step, model, trainer state, provenance, sizes and groups of tensors."""

    folder: Location
    step: int
    model: dict[str, Any]
    state: dict[str, Any]
    provenance: dict[str, Any]
    parameters: int
    bytes: int
    files: int
    groups: list[TensorGroup]

    def __str__(self) -> str:
        lines = [f"{self.folder}: step {self.step}, {format_with_decimal_unit(self.parameters)} parameters"]
        lines += [f"{format_with_decimal_unit(self.bytes)}B in {self.files} files"]
        lines += [f"original quantization: {kind}" for kind in [self.provenance.get("quantised")] if kind]
        lines += ["", "model"]
        lines += [f"  {name:24} {value}" for name, value in self.model.items()]
        lines += ["", "state"] + [f"  {name:24} {_truncate(value)}" for name, value in self.state.items()]
        lines += ["", f"{'tensors':26} {'dtype':8} {'count':>7} {'elements':>10} {'bytes':>10}"]
        for one in self.groups:
            sizes = f"{one.tensors:7} {format_with_decimal_unit(one.elements):>10} {format_with_decimal_unit(one.bytes) + 'B':>10}"
            lines.append(f"  {one.prefix:24} {one.dtype:8} {sizes}")
        return "\n".join(lines)


def group_weights_by_dtype(source: WeightSource) -> list[TensorGroup]:
    """Return the totals of a source's weights (tensors, elements, bytes), one group per dtype."""
    groups: dict[str, TensorGroup] = {}
    for name in source.tensor_names():
        dtype, count = source.tensor_dtype(name), math.prod(source.tensor_shape(name))
        group = groups.setdefault(DTYPE_NAMES[dtype], TensorGroup("weights", DTYPE_NAMES[dtype]))
        group.tensors += 1
        group.elements += count
        group.bytes += count * dtype.itemsize
    return list(groups.values())


def inspect_checkpoint(folder: Location) -> CheckpointSummary:
    """Summarize a mega checkpoint from its manifest alone, without reading tensors; log a warning if files are missing.

    Raises:
        CheckpointError: when the manifest is missing or damaged.
    """
    manifest = Manifest.read_from_folder(folder)
    if missing := [name for name in manifest.files if isinstance(folder, Path) and not (folder / name).exists()]:
        logger.warning("%s: %d of %d files are missing: %s", folder, len(missing), len(manifest.files), missing[0])
    groups: dict[tuple[str, str], TensorGroup] = defaultdict(lambda: TensorGroup("", ""))
    for key, tensor in manifest.tensors.items():
        prefix = "/".join(key.split("/")[:-1]) or "(none)"
        group, count = groups[prefix, tensor.dtype], math.prod(tensor.shape)
        group.prefix, group.dtype = prefix, tensor.dtype
        group.tensors += 1
        group.elements += count
        group.bytes += count * DTYPES[tensor.dtype].itemsize
    return CheckpointSummary(
        folder=folder,
        step=manifest.step,
        model=manifest.model.model_dump(mode="json", exclude_defaults=True),
        state=dict(manifest.state),
        provenance=dict(manifest.provenance),
        parameters=sum(group.elements for group in groups.values() if group.prefix == "weights"),
        bytes=sum(entry.bytes for entry in manifest.files.values()),
        files=len(manifest.files),
        groups=sorted(groups.values(), key=lambda group: (group.prefix, group.dtype)),
    )


def _truncate(value: object, width: int = 80) -> str:
    text = str(value)
    return text if len(text) <= width else text[: width - 1] + "…"
