"""Metadata of a GGUF file to write, the inverse of `gguf_architectures`.

The architecture is the first one that can express the model. The metadata are read back, as llama.cpp's converter names them,
and must describe the same model: no setting is lost silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.families import find_family_by_name, is_equivalent_config
from mega_ckpt.families.disk_layouts import DiskTensor, expand_tensor_rules
from mega_ckpt.formats.disk_source import LazyTensor
from mega_ckpt.formats.gguf_architectures import (
    ARCHITECTURES,
    GgufArchitecture,
    GgufMetadata,
    build_config_json_from_gguf,
    map_gguf_config_keys,
)
from mega_ckpt.formats.gguf_file import GgufModel
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig

ROPE_FACTORS = "rope_freqs.weight"
_WRITTEN = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen2moe", "qwen3moe")
_NO_OUTPUT_BIAS = ("qwen3", "qwen3moe")  # architectures whose attention has no bias after the output projection
_FAMILIES = {"llama": ("llama", "mixtral")}  # besides the family of the same architecture


@dataclass(frozen=True)
class GgufDescription:
    """Architecture, metadata and tensor names of a model in a GGUF file.

    Attributes:
        name: value of `general.architecture`.
        architecture: mapping of its names.
        metadata: metadata that begin with the name; numbers are integers or floats as the format has them.
        table: {tensor name: canonical tensors in it}.
        extra: tensors that hold settings, such as the factors of Llama 3's rope.
    """

    name: str
    architecture: GgufArchitecture
    metadata: Mapping[str, Any]
    table: Mapping[str, DiskTensor]
    extra: Mapping[str, Tensor]


def describe_model_as_gguf(model: ModelConfig, kind: str) -> GgufDescription:
    """Return the GGUF description of `model` in llama.cpp's first architecture that can express it; an error if none can.

    Args:
        model: configuration of the model.
        kind: name of the model's family, for errors.

    Raises:
        CheckpointError: naming what the closest architecture cannot express.
    """
    found: dict[str, list[str]] = {}
    for name in _WRITTEN:
        for family in _FAMILIES.get(name, (ARCHITECTURES[name].family,)):
            problems = find_family_by_name(family).unsupported_settings(model)
            if not problems:
                description, problems = _describe(name, family, model)
                if not problems:
                    return description
            found[family] = problems
    closest = min(found, key=lambda family: (family != kind, len(found[family])))
    raise CheckpointError(
        f"--to gguf does not support this model ({kind}); as {closest}: {'; '.join(found[closest])}",
        hint=f"supported by llama.cpp and mega: models that are expressed as {', '.join(found)}",
    )


def _describe(name: str, family: str, model: ModelConfig) -> tuple[GgufDescription, list[str]]:
    """Return the description of a model in an architecture, and what is lost when it is read back."""
    architecture = ARCHITECTURES[name]
    raw = find_family_by_name(family).write_config_json(model)
    metadata, extra = _encode_config(name, architecture, raw)
    table = expand_tensor_rules(architecture.tensor_rules(), canonical_tensors(model), model.num_layers)
    description = GgufDescription(name, architecture, metadata, table, extra)
    if unread := [tensor for tensor in table if name in _NO_OUTPUT_BIAS and tensor.endswith("attn_output.bias")]:
        return description, [f"llama.cpp does not read {unread[0]} of {name}"]
    file = GgufModel(
        Path(f"{name}.gguf"), {"general.architecture": name, **metadata}, _empty_tensors(description), None
    )
    try:
        config = build_config_json_from_gguf(file, architecture)
        read = find_family_by_name(config["model_type"]).read_config_json(config)
    except CheckpointError as error:
        return description, [error.message]
    if is_equivalent_config(read, model):
        return description, []
    return description, [
        f"{key} = {value!r} would be read as {getattr(read, key)!r}"
        for key, value in model
        if getattr(read, key) != value
    ]


def _empty_tensors(description: GgufDescription) -> dict[str, LazyTensor]:
    """Return the file's tensors, of which only those with settings can be read."""
    path = Path(f"{description.name}.gguf")
    shapes = {name: disk.shape for name, disk in description.table.items()}
    empty = {name: LazyTensor(path, torch.float32, shape, lambda: torch.empty(0)) for name, shape in shapes.items()}
    return empty | {
        name: LazyTensor(path, torch.float32, tuple(value.shape), lambda value=value: value)  # type: ignore[misc]
        for name, value in description.extra.items()
    }


def _encode_config(
    name: str, architecture: GgufArchitecture, raw: GgufMetadata
) -> tuple[GgufMetadata, dict[str, Tensor]]:
    """Return metadata, and tensors with settings, from the content of a config.json."""
    head = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    values = {**raw, "head_dim": head}
    found = {
        key: values[config]
        for key, config in map_gguf_config_keys(architecture).items()
        if values.get(config) is not None
    }
    found |= {"vocab_size": raw["vocab_size"], "attention.value_length": head, "rope.dimension_count": head}
    extra: dict[str, Tensor] = {}
    scaling = raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", "default")
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}
        if kind == "yarn":
            found["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    elif kind == "llama3":
        extra[ROPE_FACTORS] = _llama3_factors(scaling, raw["rope_theta"], head)
    return {f"{name}.{key}": _shortest(value) for key, value in found.items()}, extra


def _shortest(value: Any) -> Any:
    """Return a number as the reader returns it: floats as the shortest decimal of their fp32."""
    import numpy as np

    return float(str(np.float32(value))) if isinstance(value, float) else value


def _llama3_factors(scaling: Mapping[str, Any], theta: float, head: int) -> Tensor:
    """Return Llama 3.1's divisors of the rotary frequencies [head / 2] in fp32."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    lengths = 2 * math.pi * theta ** (torch.arange(0, head, 2, dtype=torch.float64) / head)
    smooth = ((scaling["original_max_position_embeddings"] / lengths - low) / (high - low)).clamp(0, 1)
    divisors: Tensor = (1 / ((1 - smooth) / scaling["factor"] + smooth)).float()
    return divisors
