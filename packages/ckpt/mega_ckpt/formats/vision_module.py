"""Vision encoders and projectors as modules of the transformers library, built from a config.json without the text model.

The classes are those of the installed library: no code from a folder or from the hub runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mega_ckpt.formats.transformers_module import (
    convert_transformers_errors,
    import_transformers,
    list_module_tensors,
)
from mega_common.errors import CheckpointError
from mega_common.vision_config import PROJECTOR, TOWER

TOWER_MODULES = ("vision_tower", "vision_model", "vision_encoder", "visual")  # attributes of encoders in transformers
TEXT_MODULES = ("language_model", "text_model")


def build_vision_language_config(raw: Mapping[str, Any]) -> Any:
    """Return the configuration object of transformers for the config.json of a vision-language model.

    Raises:
        CheckpointError: when transformers does not know the type, rejects a setting, or the weights are quantized.
    """
    kind = str(raw.get("model_type"))
    with convert_transformers_errors(kind, "read config.json"):
        return import_transformers().CONFIG_MAPPING[kind].from_dict(dict(raw))


def build_vision_module(raw: Mapping[str, Any]) -> Any:
    """Return the vision encoder and the projector of a vision-language model of transformers on the meta device.
    It is the model's body, which has `get_image_features`, without the text model.

    Raises:
        CheckpointError: when transformers cannot build it.
    """
    kind, config = str(raw.get("model_type")), build_vision_language_config(raw)
    auto = import_transformers().AutoModelForImageTextToText
    with convert_transformers_errors(kind, "build the vision encoder"), torch.device("meta"):
        whole = auto.from_config(config)
    body = getattr(whole, "model", whole)
    for name in TEXT_MODULES:
        if name in body._modules:
            setattr(body, name, nn.Module())
    return body


def compute_vision_buffers(body: Any) -> None:
    """Give a module that `build_vision_module` returned uninitialised parameters in host memory, and its buffers' values.
    Memory of the parameters is used only once they are written.

    Raises:
        CheckpointError: when transformers cannot compute the buffers.
    """
    body.to_empty(device="cpu")
    for parameter in body.parameters():
        parameter._is_hf_initialized = True  # transformers writes the others alone
    with convert_transformers_errors(body.config.model_type, "compute the buffers of the vision encoder"):
        body.initialize_weights()


def name_vision_tensor(name: str) -> str:
    """Return the canonical name of a tensor of a vision module from its name in transformers.
    All tensors outside the encoder belong to the projector.
    """
    first, _, rest = name.partition(".")
    return f"{TOWER}{rest}" if first in TOWER_MODULES else f"{PROJECTOR}{name}"


def list_vision_tensors(raw: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return {canonical name: shape} of the encoder's and the projector's tensors, from a config.json.

    Raises:
        CheckpointError: when transformers cannot build the encoder, or its tensors share memory.
    """
    body = build_vision_module(raw)
    found = {name_vision_tensor(name): tuple(value.shape) for name, value in list_module_tensors(body).items()}
    if len(found) != len(list_module_tensors(body)):
        raise CheckpointError(f"model_type {raw.get('model_type')}: tensors of the vision encoder have the same names")
    return found
