"""Loading of models for inference, of their tokenizers and of the tokens that end a text.

A folder is a mega checkpoint, a run (its newest checkpoint) or a HuggingFace folder; nothing below depends on which.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.formats.hf_weight_files import decode_json_mapping
from mega_ckpt.lora_adapter import AdaptedSource, SavedAdapter
from mega_ckpt.source import (
    copy_assets,
    load_adapter_weights,
    load_weights,
    load_with_adapter,
    open_weight_source,
    warn_of_unsupported_parts,
)
from mega_ckpt.tensor_pieces import TensorPiece, boxes_by_name
from mega_common.bounded_parsing import read_utf8_text
from mega_common.errors import CheckpointError, ConfigError, DataError
from mega_common.lora_config import is_adapter_tensor
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location
from mega_common.progress_logging import logger
from mega_data.tokenizer import Tokenizer
from mega_eval.generation_config import (
    GENERATION_KEYS,
    list_unsupported_settings,
    parse_sampling_settings,
    parse_token_ids,
)
from mega_eval.sharded_decoders import PipelineDecoder
from mega_trainer.data.data_check import read_token_ids
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import select_model_class
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.lora_adapters import LoraAdapterPool
from mega_trainer.parallel.lora_layers import AdapterSelection, PerRowAdapters
from mega_trainer.parallel.parameter_info import get_parameter_info, non_trainable_buffers


@dataclass(frozen=True)
class LoraAdapterSet:
    """LoRA adapters of one base model, selected by name for each text."""

    adapters: Mapping[str, SavedAdapter]
    choice: LoraAdapterPool

    @classmethod
    def open_adapters(cls, base: str | Location, folders: Mapping[str, str]) -> LoraAdapterSet:
        """Open the adapters in `folders`: runs or checkpoints with `lora`, or PEFT folders, trained on top of `base`.

        Raises:
            CheckpointError: when one is of another model, or changes what texts with other adapters share.
        """
        found = {
            name: _check_separable(load_with_adapter(folder, base), str(base), folder)
            for name, folder in folders.items()
        }
        choice = LoraAdapterPool(AdapterSelection(list(found)), {name: one.modules for name, one in found.items()})
        return cls(found, choice)

    def load_adapter_weights(self, model: nn.Module) -> None:
        """Load the weights of all adapters into `model`, which was built for this choice."""
        layers = [layer for layer in model.modules() if isinstance(layer, PerRowAdapters)]
        for name, adapter in self.adapters.items():
            own = [one for layer in layers if (one := layer.find_adapter(name)) is not None]
            load_adapter_weights(
                adapter, boxes_by_name([held for one in own for held in list_parameter_pieces(one, adapters=True)])
            )


def list_parameter_pieces(model: nn.Module, *, adapters: bool) -> list[tuple[Tensor, Sequence[TensorPiece]]]:
    """Return the base parameters of a model, or those of its adapters, with the pieces that they hold."""
    every = [(parameter.detach(), get_parameter_info(parameter).pieces) for parameter in model.parameters()]
    return [held for held in every if any(is_adapter_tensor(piece.name) for piece in held[1]) == adapters]


def _check_separable(source: AdaptedSource, base: str, folder: str) -> SavedAdapter:
    """Return the adapter of `source` if it can stay separate from the base weights."""
    adapter = source.adapter
    _check_tokenizer(source, folder)
    whole = [name for name in adapter.shapes if not is_adapter_tensor(name)]
    experts = [name for name, of in adapter.modules.items() if of.num_experts is not None]
    latent = [name for name in adapter.modules if name.endswith(".kv_b_proj")]
    encoder = [*adapter.modules] if source.model.encoder else []
    for names, why in (
        (whole, "is replaced whole, and texts with other adapters need it as it was"),
        (experts, "are experts, whose tokens come sorted by expert, not by adapter"),
        (latent, "widens a latent that the cache keeps in place of keys and values"),
        (encoder, "is beside a model with an encoder, which reads one text at a time"),
    ):
        if names:
            raise CheckpointError(
                f"{folder}: {names[0]} {why}",
                hint=f"put it into the weights: mega ckpt merge-adapter {base} {folder} OUT, and serve OUT",
            )
    return adapter


def _check_tokenizer(source: AdaptedSource, folder: str) -> None:
    """Refuse an adapter whose tokenizer differs from the tokenizer of its base, which encodes all texts.

    Raises:
        CheckpointError: when a token has another number in one of the two.
    """
    files = [held.get("tokenizer.json") for held in (source.base.asset_files(), source.adapter.tokenizer)]
    base, own = (file.read_bytes() if isinstance(file, Path) else file for file in files)
    if base is not None and own is not None and base != own and read_token_ids(base) != read_token_ids(own):
        raise CheckpointError(
            f"{folder}: the adapter's tokenizer.json has other tokens than the base's, by which all texts are encoded",
            hint="put the adapter into the weights (mega ckpt merge-adapter), and serve the merged model",
        )


PRECISIONS: Mapping[str, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip

ModelKind = Literal["decoder", "encoder", "encoder-decoder", "reward model", "retrieval"]
# What a model is that cannot be asked this, and what it can be asked.
_ELSEWHERE: Mapping[ModelKind, tuple[str, str]] = {
    "decoder": ("a decoder, whose tokens see none behind them", "mega eval, mega generate and mega serve ask it"),
    "encoder": (
        "an encoder, which continues no text",
        "mega eval --data says how well it guesses masked tokens, mega embed makes vectors of texts",
    ),
    "encoder-decoder": (
        "a model of an encoder and a decoder, which cannot be asked this", "mega generate and mega serve ask it"
    ),
    "reward model": (
        "a reward model, which scores texts and tells no tokens",
        "mega eval --data with preference pairs tells how often it is right",
    ),
    "retrieval": (
        "a model that reads neighbours of its text, which no prompt brings",
        "mega train evaluates it on data with neighbours (train.eval_every)",
    ),
}  # fmt: skip


def classify_model(model: ModelConfig) -> ModelKind:
    """Return the kind of a model, which decides the tasks it supports."""
    if model.score:
        return "reward model"
    if model.retro:
        return "retrieval"
    if model.encoder:
        return "encoder-decoder"
    return "decoder" if model.causal else "encoder"


def load_inference_model(
    path: str | Location,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    groups: ParallelGroups | None = None,
    kinds: tuple[ModelKind, ...] = ("decoder",),
    adapter: str | Location | None = None,
    lora_adapters: LoraAdapterSet | None = None,
    mtp: bool = False,
) -> Decoder:
    """Load the model at `path`, or this rank's part of it under `groups`, in `dtype` on `device`, for inference only.

    Weights are read one tensor at a time, so that memory is needed for the model and one tensor more. Layers that
    predict further tokens are left out, unless `mtp` asks for them. `kinds` are those of model that the caller has a use for; others are refused.
    `adapter` is put into the weights, those `lora_adapters` them stay apart, for each row to have one or none.

    Raises:
        CheckpointError: when there is no complete checkpoint, or its tensors are not those of its configuration.
        ConfigError: for a model of another kind than `kinds`, or without the layers that `mtp` asks for.
    """
    source = open_weight_source(path) if adapter is None else load_with_adapter(adapter, path)
    kind = classify_model(source.model)
    if kind not in kinds:
        raise ConfigError(f"{path}: {_ELSEWHERE[kind][0]}", hint=_ELSEWHERE[kind][1])
    warn_of_unsupported_parts(source)
    if mtp and not source.model.mtp_layers:
        raise ConfigError(f"{path}: it has no layers that predict further tokens, to guess by", hint="draft: ngrams")
    if mtp and groups is not None and groups.pp.size > 1:
        raise ConfigError(f"{path}: layers that predict further tokens guess on one stage alone", hint="pp: 1")
    config = source.model if mtp else source.model.model_copy(update={"mtp_layers": 0})
    if kind == "encoder-decoder" and groups is not None and groups.pp.size > 1:
        raise ConfigError(f"{path}: a model of an encoder and a decoder is asked on one stage", hint="pp: 1")
    choice = None if lora_adapters is None else lora_adapters.choice
    build = LayerBuilder(config, groups or ParallelGroups(), dtype=dtype, device=torch.device(device), choice=choice)
    model = PipelineDecoder(build) if build.groups.pp.size > 1 else select_model_class(config)(build)
    boxes = boxes_by_name([*list_parameter_pieces(model, adapters=False), *non_trainable_buffers(model)])
    unused = sorted(set(source.tensor_names()) - canonical_tensors(source.model).keys())
    if unused:
        raise CheckpointError(f"{path}: the model has no place for the tensor {unused[0]} ({len(unused)} such)")
    load_weights(source, boxes)
    if lora_adapters is not None:
        lora_adapters.load_adapter_weights(model)
    return model.eval().requires_grad_(False)


def load_tokenizer(path: str | Location, adapter: str | Location | None = None) -> Tokenizer:
    """Load the tokenizer stored with the weights at `path`, or with an `adapter` if that has one.

    Raises:
        CheckpointError: when there is none.
        DataError: when it cannot be used.
    """
    source = open_weight_source(path) if adapter is None else load_with_adapter(adapter, path)
    file = source.asset_files().get("tokenizer.json")
    if file is None:
        raise CheckpointError(
            f"{path}: there is no tokenizer.json with these weights",
            hint="name the tokenizer's folder, or copy its files beside the weights",
        )
    if isinstance(file, Path):
        return Tokenizer(file)
    with tempfile.TemporaryDirectory() as folder:
        copy_assets(source, Path(folder))
        return Tokenizer(Path(folder))


def find_end_tokens(path: str | Location, tokenizer: Tokenizer) -> frozenset[int]:
    """Return all tokens that end a text: the tokenizer's own, and those of the model's configuration files."""
    found = {tokenizer.eos_id} if tokenizer.eos_id is not None else set()
    assets = open_weight_source(path).asset_files()
    for name in ("generation_config.json", "config.json"):
        found.update(parse_token_ids(_parse_json_asset(assets.get(name), name).get("eos_token_id")))
    return frozenset(found)


def load_sampling_settings(path: str | Location) -> dict[str, Any]:
    """Return the settings of `Sampling` in the model's own files, read as transformers reads them."""
    return parse_sampling_settings(_load_generation_config(path))


def warn_unsupported_settings(path: str | Location) -> None:
    """Warn once of unsupported generation settings in the model's files that change the text."""
    if unsupported := list_unsupported_settings(_load_generation_config(path)):
        message = (
            "%s: its generation config sets %s, which mega does not support; texts differ from those of transformers"
        )
        logger.warning(message, path, ", ".join(unsupported))


def _load_generation_config(path: str | Location) -> Mapping[str, Any]:
    """Return generation_config.json, or the generation settings of config.json if there is none, as transformers does."""
    assets = open_weight_source(path).asset_files()
    if "generation_config.json" in assets:
        return _parse_json_asset(assets["generation_config.json"], "generation_config.json")
    raw = _parse_json_asset(assets.get("config.json"), "config.json")
    return {name: value for name, value in raw.items() if name in GENERATION_KEYS}


def _parse_json_asset(asset: Path | bytes | None, name: str) -> Mapping[str, Any]:
    """Return a JSON asset as a mapping; empty if it is missing or not an object."""
    if asset is None:
        return {}
    content = read_utf8_text(asset, CheckpointError).encode() if isinstance(asset, Path) else asset
    return decode_json_mapping(content, asset if isinstance(asset, Path) else name)


def check_sequence_length(config: ModelConfig, length: int, what: str) -> None:
    """Refuse sequences longer than the learned positions; warn of those longer than the model was trained for.

    Raises:
        DataError: naming `what`.
    """
    if length <= config.max_position:
        return
    if config.position == "learned":
        raise DataError(f"{what} are more than the {config.max_position} positions that the model has")
    logger.warning("%s are more than the %d positions that the model was made for", what, config.max_position)


def select_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is a GPU if there is one.

    Raises:
        ConfigError: when there is no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used here ({reason})", hint="auto, cpu, cuda or cuda:N") from None
    return device
