"""Models as modules of the transformers library: construction from config.json, folders of weights in and out.

Tensors have the names of the module's parameters and persistent buffers. Where transformers stores a model under other
names or shapes (experts fused in memory and separate on disk), its own conversion runs in both directions.

Only classes of the installed library are used: no code from a folder or from the hub.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mega_ckpt.canonical_tensors import abbreviate_name_list
from mega_ckpt.formats.hf_source import CONFIG, LAYOUT, read_asset_files
from mega_ckpt.formats.hf_weight_files import INDEX, read_json_mapping, set_config_dtype
from mega_ckpt.tensor_pieces import TensorShape, crop_tensor
from mega_ckpt.transformers_library import (
    convert_transformers_errors,
    import_transformers,
    list_module_tensors,
)
from mega_ckpt.weight_source import WeightSource, choose_cast_dtype, write_file_durably
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location
from mega_common.progress_logging import logger
from mega_common.transformers_config import TransformersModuleConfig

WIDE = 1 << 40  # longest sequence of a model that declares none
_SIZES = {
    "num_layers": ("num_hidden_layers", "n_layers", "num_layers", "n_layer", "decoder_layers"),
    "hidden_size": ("hidden_size", "d_model", "n_embd", "dim"),
    "max_position": ("max_position_embeddings", "n_positions", "max_seq_len"),
}


def get_causal_lm_class(model_type: str) -> Any:
    """Return transformers' class of causal language models for a model type; a CheckpointError if it has none.

    Raises:
        CheckpointError: when the installed transformers has none.
    """
    transformers = import_transformers()
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type not in names:
        raise CheckpointError(
            f"model_type {model_type!r} is not supported with implementation: transformers, since transformers "
            f"{transformers.__version__} has no causal language model of this type",
            hint="install a transformers that has it; code from the hub (trust_remote_code) is never run",
        )
    with convert_transformers_errors(model_type, f"import {names[model_type]}"):
        return getattr(transformers, names[model_type])


def build_transformers_config(raw: Mapping[str, Any]) -> Any:
    """Return the configuration object of transformers for the content of a config.json.

    Raises:
        CheckpointError: when it is not one of a known model type, or is quantized.
    """
    kind = raw.get("model_type")
    module = get_causal_lm_class(str(kind))
    if raw.get("quantization_config"):
        raise CheckpointError(
            f"model_type {kind}: quantized weights (quantization_config) are not supported with implementation: transformers",
            hint="give a folder of weights that are not quantized",
        )
    with convert_transformers_errors(str(kind), "read config.json"):
        cls = import_transformers().CONFIG_MAPPING[str(kind)]
        found = cls.from_dict(dict(raw))
        wanted = module.config_class  # the text part of a configuration with several parts
        return found if isinstance(found, wanted) else found.get_text_config()


def build_uninitialized_module(described: TransformersModuleConfig, dtype: torch.dtype) -> Any:
    """Return a transformers module in host memory with uninitialised parameters of `dtype`.
    Memory is used only once the parameters are written.

    Buffers have the values that transformers computes.
    """
    kind = described.model_type
    cls, config = get_causal_lm_class(kind), build_transformers_config(described.config)
    from transformers.initialization import no_init_weights

    with convert_transformers_errors(kind, "build the model"), no_init_weights(), torch.random.fork_rng(devices=[]):
        module = cls._from_config(config, dtype=dtype, **_kernel_choice(dtype))
    with convert_transformers_errors(kind, "tie its weights"):
        module.tie_weights()  # skipped with the initialisation
    return module


def _kernel_choice(dtype: torch.dtype) -> dict[str, str]:
    """Return the settings of a module for which its default kernels have no fp64."""
    return {"experts_implementation": "eager"} if dtype == torch.float64 else {}


def build_randomly_initialized_module(described: TransformersModuleConfig, dtype: torch.dtype, seed: int) -> Any:
    """Return a transformers module in host memory with the library's random initial weights, drawn from `seed`."""
    kind = described.model_type
    cls, config = get_causal_lm_class(kind), build_transformers_config(described.config)
    with convert_transformers_errors(kind, "initialise the model"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cls._from_config(config, dtype=dtype)


def read_transformers_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the model configuration of a module of transformers from the content of its config.json.

    Raises:
        CheckpointError: when transformers cannot build it.
    """
    config = build_transformers_config(raw)
    bare = TransformersModuleConfig(config=dict(raw), tensors={})
    module = build_uninitialized_module(bare, torch.bfloat16)
    tensors = {name: tuple(value.shape) for name, value in list_module_tensors(module).items()}
    text = config.get_text_config()
    sizes = {name: _find_size(text, keys) for name, keys in _SIZES.items()}
    with convert_transformers_errors(bare.model_type, "name its embeddings"):
        # Mllama has no logits for its image tokens, the last rows of the embedding
        ends = (module.get_input_embeddings(), module.get_output_embeddings())
        vocab = min(int(end.weight.shape[0]) for end in ends if getattr(end, "weight", None) is not None)
    width = sizes["hidden_size"] or 1
    return ModelConfig.model_validate(
        {
            "num_layers": sizes["num_layers"] or 1,
            "hidden_size": width,
            "ffn_hidden_size": width,
            "num_attention_heads": 1,
            "vocab_size": vocab,
            "max_position": sizes["max_position"] or WIDE,
            "position": "none",
            "transformers": TransformersModuleConfig(config=dict(raw), tensors=tensors),
        }
    )


def _find_size(config: Any, keys: Sequence[str]) -> int | None:
    found = (getattr(config, key, None) for key in keys)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


class TransformersSource:
    """Reader of a model's weights that transformers loads from a HuggingFace folder, whole, at the first access.

    Raises:
        CheckpointError: from the constructor, for a URL, or a model that transformers cannot build.
    """

    def __init__(self, folder: Location) -> None:
        if not isinstance(folder, Path):
            raise CheckpointError(
                f"{folder}: implementation: transformers requires a local folder",
                hint="copy the folder to a local disk",
            )
        self.folder = folder
        self.model = read_transformers_model_config(read_json_mapping(folder / CONFIG))
        self._loaded: dict[str, Tensor] = {}

    def tensor_names(self) -> Sequence[str]:
        """Return the tensor names of the transformers module."""
        return list(self._tensors)

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the shape of a tensor of the transformers module."""
        return tuple(self._tensors[name].shape)

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor of the transformers module."""
        return self._tensors[name].dtype

    def read_tensor(self, name: str) -> Tensor:
        """Return a whole tensor of the transformers module."""
        return self._tensors[name]

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Return `tensor[offset : offset + shape]` of a tensor of the transformers module.
        The tensor is `name`.
        """
        return crop_tensor(self._tensors[name], offset, shape)

    def buffer_names(self) -> Sequence[str]:
        """Return an empty list: persistent buffers of a transformers module are among its tensors."""
        return []

    def read_buffer(self, name: str) -> Tensor:
        """Raise KeyError: a transformers module has no buffers other than its tensors."""
        raise KeyError(name)

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return the files of a HuggingFace folder other than weights, such as those of the tokenizer."""
        return read_asset_files(self.folder)

    @property
    def _tensors(self) -> dict[str, Tensor]:
        if not self._loaded:
            self._loaded = self._load_tensors()
        return self._loaded

    def _load_tensors(self) -> dict[str, Tensor]:
        described = self.model.transformers
        assert described is not None
        kind = described.model_type
        with convert_transformers_errors(kind, f"load {self.folder}"):
            module, found = get_causal_lm_class(kind).from_pretrained(
                self.folder, config=build_transformers_config(described.config), dtype="auto", local_files_only=True,
                use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
        wrong = {key: sorted(map(str, found.get(key) or ())) for key in ("missing_keys", "mismatched_keys")}
        if names := [*wrong["missing_keys"], *wrong["mismatched_keys"]]:
            raise CheckpointError(
                f"{self.folder}: the tensor {abbreviate_name_list(names)} of {kind} is missing or has another shape",
                hint="download the folder again",
            )
        if unread := sorted(found.get("unexpected_keys") or ()):
            logger.warning(
                "%s: %s has no parameter for %s: neither trained nor saved",
                self.folder,
                kind,
                abbreviate_name_list(unread),
            )
        return list_module_tensors(module)


def write_transformers_folder(
    source: WeightSource, folder: Path, *, dtype: torch.dtype | None = None, max_shard: int | None = None
) -> None:
    """Write the weights of a module of transformers into `folder` as transformers itself stores them.
    The files that accompany the weights are written, too.

    Args:
        dtype: dtype of the output; None: as stored.
        max_shard: maximum bytes of tensors per file; default: that of transformers.
    """
    described = source.model.transformers
    assert described is not None
    kinds = {name: choose_cast_dtype(source, name, dtype) for name in source.tensor_names()}
    floating = [kind for kind in kinds.values() if kind.is_floating_point]
    module = build_uninitialized_module(described, floating[0])
    for name in list_module_tensors(module):
        _set_tensor(module, name, source.read_tensor(name).to(kinds[name], copy=True))
    shard = {} if max_shard is None else {"max_shard_size": max_shard}
    with convert_transformers_errors(described.model_type, f"write {folder}"):
        module.tie_weights()
        module.save_pretrained(folder, **shard)
    assets = {name: content for name, content in source.asset_files().items() if name not in (LAYOUT, INDEX)}
    for name in {"generation_config.json"} - assets.keys():
        (folder / name).unlink(missing_ok=True)
    for name, content in assets.items():
        write_file_durably(folder / name, _with_dtype(content, floating[0]) if name == CONFIG else content)


def _set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter, and those tied to it, or a buffer of a module to `value`."""
    owner, _, key = name.rpartition(".")
    old = getattr(module.get_submodule(owner), key)
    if isinstance(old, nn.Parameter):
        old.data = value
    else:
        setattr(module.get_submodule(owner), key, value)


def _with_dtype(content: Path | bytes, dtype: torch.dtype) -> bytes:
    """Return a config.json unchanged if it names the dtype of the weights, else with that dtype."""
    data = content.read_bytes() if isinstance(content, Path) else content
    raw = json.loads(data)
    changed = set_config_dtype(raw, dtype)
    return data if changed == raw else (json.dumps(changed, indent=2) + "\n").encode()
