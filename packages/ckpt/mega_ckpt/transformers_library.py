"""The transformers library: its import, its errors, and vision encoders with projectors that it builds from a config.json.

The classes are those of the installed library: no code from a folder or from the hub runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mega_common.errors import CheckpointError, MegaError, MissingPackageError
from mega_common.vision_config import PROJECTOR, TOWER

TOWER_MODULES = ("vision_tower", "vision_model", "vision_encoder", "visual")  # attributes of encoders in transformers
TEXT_MODULES = ("language_model", "text_model")


def import_transformers() -> Any:
    """Return the transformers package, which must be installed; its download of kernels is turned off.

    Raises:
        MissingPackageError: when it is not installed.
    """
    os.environ.setdefault("USE_HUB_KERNELS", "NO")
    try:
        import transformers
    except ImportError:
        raise MissingPackageError(
            "implementation: transformers requires the package transformers", hint="pip install transformers"
        ) from None
    return transformers


@contextmanager
def convert_transformers_errors(kind: str, doing: str) -> Iterator[None]:
    """Context manager that turns errors of transformers, except out of memory, into a `CheckpointError`.
    The error names the model type `kind` and the operation `doing`. Errors of mega are raised unchanged.
    """
    try:
        yield
    except (MegaError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"model_type {kind}: transformers cannot {doing} ({type(error).__name__}: {line})",
            hint="check the model with transformers alone; mega adds no code to it",
        ) from error


def list_module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module, tied ones once, and its persistent buffers, by name."""
    parameters = dict(module.named_parameters())
    every = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    state = module.state_dict()
    buffers = {name: value for name, value in module.named_buffers() if name in state and name not in every}
    return {**{name: parameter.detach() for name, parameter in parameters.items()}, **buffers}


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
    config.get_text_config().num_hidden_layers = 0  # the text model is discarded
    if getattr(config, "audio_config", None) is not None:
        config.audio_config = None  # sound is not supported; its tensors are carried
    with convert_transformers_errors(kind, "build the vision encoder"), torch.device("meta"):
        whole = auto.from_config(config)
    body = getattr(whole, "model", whole)
    for name in TEXT_MODULES:
        if name in body._modules:
            setattr(body, name, nn.Module())
    return body


def materialize_vision_module(body: Any) -> None:
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


def to_canonical_vision_tensor_name(name: str) -> str:
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
    found = {
        to_canonical_vision_tensor_name(name): tuple(value.shape) for name, value in list_module_tensors(body).items()
    }
    if len(found) != len(list_module_tensors(body)):
        raise CheckpointError(f"model_type {raw.get('model_type')}: tensors of the vision encoder have the same names")
    return found
