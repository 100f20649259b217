"""Inspection and verification of models without a mega manifest: HuggingFace folders, GGUF files, Megatron checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from mega_ckpt.formats import litgpt
from mega_ckpt.formats.gguf_file import SUFFIX, is_gguf_file
from mega_ckpt.formats.gguf_source import GgufSource
from mega_ckpt.formats.hf_source import CONFIG, HfSource
from mega_ckpt.formats.megatron_source import MegatronSource, find_megatron_iteration_folder
from mega_ckpt.manifest import MANIFEST
from mega_ckpt.source import open_weight_source
from mega_ckpt.storage import open_storage_folder
from mega_ckpt.stream_checkpoint import split_into_contiguous_slices
from mega_ckpt.verify import CheckpointSummary, VerifyReport, group_weights_by_dtype
from mega_ckpt.weight_source import OptimizerNotConverted
from mega_common.errors import CheckpointError
from mega_common.object_store import Location
from mega_common.progress_logging import ProgressBar


def is_hf_or_gguf_model(path: Location) -> bool:
    """Return whether a HuggingFace or LitGPT folder or a GGUF file, rather than a mega checkpoint, is at `path`."""
    if (path / MANIFEST).is_file():
        return False
    described = any((path / name).is_file() for name in (CONFIG, litgpt.FILE))
    return described or (isinstance(path, Path) and (is_gguf_file(path) or any(path.glob(f"*{SUFFIX}"))))


def inspect_hf_or_gguf_model(path: Location) -> CheckpointSummary:
    """Return the summary of a HuggingFace or LitGPT folder or a GGUF file, with its tensors' dtypes after dequantization.
    The summary also has model, formats of files and quantization.

    Raises:
        CheckpointError: when it cannot be used.
    """
    source = _open_foreign(path)
    groups = group_weights_by_dtype(source)
    return CheckpointSummary(
        folder=path,
        step=0,
        model=source.model.model_dump(mode="json", exclude_defaults=True),
        state={"format": ", ".join(sorted({file.name.rpartition(".")[2] for file in source.weight_files()}))},
        provenance={"quantised": source.quantization} if source.quantization else {},
        parameters=sum(group.elements for group in groups),
        bytes=_total_bytes(source),
        files=len(source.weight_files()),
        groups=groups,
    )


def verify_hf_or_gguf_model(path: Location, *, finite: bool = False) -> VerifyReport:
    """Read every tensor of a HuggingFace folder or a GGUF file, and report each that cannot be read.
    Tensors are dequantized. With `finite`, NaN and infinities are reported, too.

    These formats have no checksums, so only damage such as truncated files and invalid scales is found.

    Raises:
        CheckpointError: when it cannot be opened.
    """
    source = _open_foreign(path)
    names = list(source.tensor_names())
    report = VerifyReport(path, 0, len(source.weight_files()), len(names), _total_bytes(source), checksums=False)
    total = sum(math.prod(source.tensor_shape(name)) * source.tensor_dtype(name).itemsize for name in names)
    with ProgressBar(f"reading {path.name}", total=total, unit="bytes") as bar:
        for name in names:
            try:
                count = 0
                for offset, shape in split_into_contiguous_slices(source.tensor_shape(name), source.tensor_dtype(name)):
                    part = source.read_tensor_slice(name, offset, shape)
                    count += int((~torch.isfinite(part.float())).sum()) if finite else 0
                    bar.advance(part.nbytes)
                if count:
                    report.not_finite[name] = count
            except CheckpointError as error:
                report.problems.append(error.message)
    return report


def _open_foreign(path: Location) -> HfSource | GgufSource:
    source = open_weight_source(path)
    assert isinstance(source, (HfSource, GgufSource))  # callers check `is_hf_or_gguf_model`
    return source


def _total_bytes(source: HfSource | GgufSource) -> int:
    return sum(open_storage_folder(file.parent).open_file(file.name).file_size() for file in source.weight_files())


_SIZES = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "ep": "expert_model_parallel_size"}


def inspect_megatron(folder: Path) -> CheckpointSummary:
    """Summarize a Megatron checkpoint: format, iteration, model, weights and sizes.

    Raises:
        CheckpointError: when it is damaged, or its settings are missing or not supported.
    """
    source, files = (
        MegatronSource(folder),
        [path for path in find_megatron_iteration_folder(folder).rglob("*") if path.is_file()],
    )
    contents, groups = source.contents, group_weights_by_dtype(source)
    saved_with = {name: contents.args[key] for name, key in _SIZES.items() if key in contents.args}
    return CheckpointSummary(
        folder=folder,
        step=contents.iteration or 0,
        model=source.model.model_dump(mode="json", exclude_defaults=True),
        state={
            "format": f"Megatron {contents.kind}",
            "saved with": saved_with,
            "optimizer": _describe_optimizer(source),
        },
        provenance={},
        parameters=sum(group.elements for group in groups),
        bytes=sum(path.stat().st_size for path in files),
        files=len(files),
        groups=groups,
    )


def _describe_optimizer(source: MegatronSource) -> str:
    """Describe the optimizer state that a conversion to mega carries over, or the reason why it cannot."""
    try:
        return f"{', '.join(source.read_training_state().tensors)}: converted with --to mega"
    except OptimizerNotConverted as error:
        return f"not converted: {error}"
