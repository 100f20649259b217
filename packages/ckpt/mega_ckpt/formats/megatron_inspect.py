"""What is in a checkpoint of Megatron, without reading its tensors."""

from __future__ import annotations

from pathlib import Path

from mega_ckpt.formats.megatron import MegatronSource, iteration_folder
from mega_ckpt.training import StaysBehindError
from mega_ckpt.verify import Summary, groups_of

_SIZES = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "ep": "expert_model_parallel_size"}


def inspect_megatron(folder: Path) -> Summary:
    """Tell what is in a checkpoint of Megatron: format, iteration, model, weights and sizes.

    Raises:
        CheckpointError: when it is damaged, or its settings are missing or not understood.
    """
    source, files = MegatronSource(folder), [path for path in iteration_folder(folder).rglob("*") if path.is_file()]
    contents, groups = source.contents, groups_of(source)
    saved_with = {name: contents.args[key] for name, key in _SIZES.items() if key in contents.args}
    return Summary(
        folder=folder,
        step=contents.iteration or 0,
        model=source.model.model_dump(mode="json", exclude_defaults=True),
        state={"format": f"Megatron {contents.kind}", "saved with": saved_with, "optimizer": _optimizer(source)},
        provenance={},
        parameters=sum(group.elements for group in groups),
        bytes=sum(path.stat().st_size for path in files),
        files=len(files),
        groups=groups,
    )


def _optimizer(source: MegatronSource) -> str:
    """What a conversion to mega takes along, or why not."""
    try:
        return f"{', '.join(source.training().tensors)}: these come along to mega"
    except StaysBehindError as why:
        return f"stays behind: {why}"
