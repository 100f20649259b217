"""What is in a checkpoint of Megatron, without reading its tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

from mega_ckpt.formats.megatron import MegatronSource, iteration_folder
from mega_ckpt.formats.megatron_optimizer import StaysBehindError
from mega_ckpt.manifest import DTYPE_NAMES
from mega_ckpt.verify import Group, Summary

_SIZES = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "ep": "expert_model_parallel_size"}


def inspect_megatron(folder: Path) -> Summary:
    """Tell what is in a checkpoint of Megatron: format, iteration, model, weights and sizes.

    Raises:
        CheckpointError: when it is damaged, or its settings are missing or not understood.
    """
    source, files = MegatronSource(folder), [path for path in iteration_folder(folder).rglob("*") if path.is_file()]
    contents, groups = source.contents, defaultdict[str, Group](lambda: Group("weights", ""))
    for name in source.keys():  # noqa: SIM118
        dtype, count = source.dtype(name), math.prod(source.shape(name))
        group = groups[DTYPE_NAMES[dtype]]
        group.dtype = DTYPE_NAMES[dtype]
        group.tensors += 1
        group.elements += count
        group.bytes += count * dtype.itemsize
    saved_with = {name: contents.args[key] for name, key in _SIZES.items() if key in contents.args}
    return Summary(
        folder=folder,
        step=contents.iteration or 0,
        model=source.model.model_dump(mode="json", exclude_defaults=True),
        state={"format": f"Megatron {contents.kind}", "saved with": saved_with, "optimizer": _optimizer(source)},
        provenance={},
        parameters=sum(group.elements for group in groups.values()),
        bytes=sum(path.stat().st_size for path in files),
        files=len(files),
        groups=list(groups.values()),
    )


def _optimizer(source: MegatronSource) -> str:
    """What a conversion to mega takes along, or why not."""
    try:
        return f"{', '.join(source.training().tensors)}: these come along to mega"
    except StaysBehindError as why:
        return f"stays behind: {why}"
