"""Look at models that have no manifest, HuggingFace folders and GGUF files: what is in them, and can all of it be read."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from mega_ckpt.formats import litgpt
from mega_ckpt.formats.gguf import GgufSource
from mega_ckpt.formats.gguf_file import SUFFIX, is_gguf
from mega_ckpt.formats.hf import CONFIG, HfSource
from mega_ckpt.manifest import MANIFEST
from mega_ckpt.source import open_source
from mega_ckpt.storage import folder_at
from mega_ckpt.stream import blocks
from mega_ckpt.verify import Report, Summary, groups_of
from mega_common.errors import CheckpointError
from mega_common.log import ProgressBar
from mega_common.remote import Place


def is_foreign(path: Place) -> bool:
    """Whether there is a HuggingFace folder or a GGUF file, and no checkpoint of mega."""
    if (path / MANIFEST).is_file():
        return False
    described = any((path / name).is_file() for name in (CONFIG, litgpt.FILE))
    return described or (isinstance(path, Path) and (is_gguf(path) or any(path.glob(f"*{SUFFIX}"))))


def inspect_foreign(path: Place) -> Summary:
    """Tell what is in a HuggingFace folder or a GGUF file: model, family, how it is quantised, tensors as they are read.

    Raises:
        CheckpointError: when it cannot be used.
    """
    source = _open(path)
    groups = groups_of(source)
    return Summary(
        folder=path,
        step=0,
        model=source.model.model_dump(mode="json", exclude_defaults=True),
        state={"format": ", ".join(sorted({file.name.rpartition(".")[2] for file in source.files()}))},
        provenance={"quantised": source.quantised} if source.quantised else {},
        parameters=sum(group.elements for group in groups),
        bytes=_bytes(source),
        files=len(source.files()),
        groups=groups,
    )


def verify_foreign(path: Place, *, finite: bool = False) -> Report:
    """Read every tensor of a HuggingFace folder or a GGUF file, decoded; with `finite`, look for NaN too.

    These formats have no checksums: what is found is a file that is cut off, a scale that is no number, and the like.

    Raises:
        CheckpointError: when it cannot be opened.
    """
    source = _open(path)
    names = list(source.keys())
    report = Report(path, 0, len(source.files()), len(names), _bytes(source), checksums=False)
    total = sum(math.prod(source.shape(name)) * source.dtype(name).itemsize for name in names)
    with ProgressBar(f"reading {path.name}", total=total, unit="bytes") as bar:
        for name in names:
            try:
                count = 0
                for offset, shape in blocks(source.shape(name), source.dtype(name)):
                    part = source.read_slice(name, offset, shape)
                    count += int((~torch.isfinite(part.float())).sum()) if finite else 0
                    bar.advance(part.nbytes)
                if count:
                    report.not_finite[name] = count
            except CheckpointError as error:
                report.problems.append(error.message)
    return report


def _open(path: Place) -> HfSource | GgufSource:
    source = open_source(path)
    assert isinstance(source, (HfSource, GgufSource))  # the caller has looked for manifests
    return source


def _bytes(source: HfSource | GgufSource) -> int:
    return sum(folder_at(file.parent).open(file.name).size() for file in source.files())
