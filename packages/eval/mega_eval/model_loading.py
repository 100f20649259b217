"""Loading of models for inference, of their tokenizers and of the tokens that end a text.

A path may be a mega checkpoint, a run folder (its latest checkpoint), a HuggingFace folder or a GGUF file.
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
from mega_ckpt.lora_adapter import AdaptedWeightSource, SavedAdapter
from mega_ckpt.source import (
    WeightSource,
    copy_assets,
    load_adapter_weights,
    load_weights,
    open_weight_source,
    open_weights_with_adapter,
    warn_of_unsupported_parts,
)
from mega_ckpt.tensor_pieces import TensorPiece, boxes_by_name
from mega_common.bounded_parsing import read_utf8_text
from mega_common.errors import CheckpointError, ConfigError, DataError
from mega_common.lora_config import is_adapter_tensor
from mega_common.model_config import ModelConfig
from mega_common.object_store import Location
from mega_common.progress_logging import logger
from mega_data.extension_tokenizer import RECORD_FILE, find_recorded_tokenizer
from mega_data.tokenizer import Tokenizer
from mega_eval.sampling import (
    GENERATION_KEYS,
    list_unsupported_generation_settings,
    parse_sampling_settings,
    parse_token_ids,
)
from mega_eval.sharded_decoders import PipelineDecoder
from mega_trainer.config.extensions import load_extensions, load_model_extensions
from mega_trainer.data.data_check import parse_tokenizer_vocab
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import select_model_class
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.lora_layers import LoraAdapterPool, PerRowAdapters, PerRowAdapterSelection
from mega_trainer.parallel.parameter_info import get_parameter_info, iterate_saved_buffers


@dataclass(frozen=True)
class LoraAdapterSet:
    """LoRA adapters of one base model that stay separate from its weights; each text selects one by name."""

    adapters: Mapping[str, SavedAdapter]
    pool: LoraAdapterPool

    @classmethod
    def open_adapters(cls, base: str | Location, folders: Mapping[str, str]) -> LoraAdapterSet:
        """Open LoRA adapters trained on top of one base model.
        `folders` maps names to run folders, checkpoints with `lora`, or PEFT folders.

        Raises:
            CheckpointError: when an adapter is of another model, or changes parts that texts with other adapters share.
        """
        found = {
            name: _check_separable(open_weights_with_adapter(folder, base), str(base), folder)
            for name, folder in folders.items()
        }
        modules = {name: adapter.modules for name, adapter in found.items()}
        return cls(found, LoraAdapterPool(PerRowAdapterSelection(list(found)), modules))

    def load_adapter_weights(self, model: nn.Module) -> None:
        """Load the weights of all LoRA adapters into `model`, which was built with this set's `pool`."""
        layers = [layer for layer in model.modules() if isinstance(layer, PerRowAdapters)]
        for name, adapter in self.adapters.items():
            modules = [module for layer in layers if (module := layer.find_adapter(name)) is not None]
            pieces = [piece for module in modules for piece in list_parameter_pieces(module, adapters=True)]
            load_adapter_weights(adapter, boxes_by_name(pieces))


def add_lora_adapter(
    model: Decoder, base: str | Location, folder: str, name: str, selection: PerRowAdapterSelection
) -> None:
    """Load a LoRA adapter into a loaded model, between two forward passes.
    `model` was loaded from `base` on one rank; rows select the adapter by `name` through `selection`.

    Raises:
        CheckpointError: as `LoraAdapterSet.open_adapters`.
    """
    adapter = _check_separable(open_weights_with_adapter(folder, base), str(base), folder)
    pool = LoraAdapterPool(selection, {name: adapter.modules})
    # a second model without storage has the adapter's layers where the model needs them
    build = LayerBuilder(model.config, ParallelGroups(), dtype=model.dtype, device=torch.device("meta"), choice=pool)
    layers = [
        (path, layer)
        for path, layer in select_model_class(model.config)(build).named_modules()
        if isinstance(layer, PerRowAdapters)
    ]
    for _, layer in layers:
        module = layer.find_adapter(name)
        assert module is not None
        _allocate_parameters(module, model.device)
        load_adapter_weights(adapter, boxes_by_name(list_parameter_pieces(module, adapters=True)))
    for path, layer in layers:
        owner, _, attribute = path.rpartition(".")
        present = getattr(model.get_submodule(owner), attribute)
        if present is None:
            setattr(model.get_submodule(owner), attribute, layer.eval().requires_grad_(False))
        else:
            module = layer.find_adapter(name)
            assert module is not None
            present.add_adapter(name, module.eval().requires_grad_(False))
    selection.add_adapter_name(name)


def _allocate_parameters(module: nn.Module, device: torch.device) -> None:
    """Give the parameters of a module on the meta device storage on `device`."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            real = nn.Parameter(torch.zeros_like(parameter, device=device), requires_grad=False)
            real.__dict__.update(parameter.__dict__)  # its description
            setattr(owner, name, real)


def remove_lora_adapter(model: nn.Module, name: str, selection: PerRowAdapterSelection) -> None:
    """Remove a LoRA adapter, which no request uses, from `model` between two forward passes."""
    selection.remove_adapter_name(name)
    for layer in model.modules():
        if isinstance(layer, PerRowAdapters):
            layer.remove_adapter(name)


def list_parameter_pieces(model: nn.Module, *, adapters: bool) -> list[tuple[Tensor, Sequence[TensorPiece]]]:
    """Return a model's LoRA parameters, or all others, with their positions in the checkpoint's tensors.

    `adapters` True selects the LoRA parameters.
    """
    every = [(parameter.detach(), get_parameter_info(parameter).pieces) for parameter in model.parameters()]
    return [entry for entry in every if any(is_adapter_tensor(piece.name) for piece in entry[1]) == adapters]


def _check_separable(source: AdaptedWeightSource, base: str, folder: str) -> SavedAdapter:
    """Return the adapter of `source` if it can stay separate from the base weights."""
    adapter = source.adapter
    _check_tokenizer(source, folder)
    whole = [name for name in adapter.shapes if not is_adapter_tensor(name)]
    experts = [name for name, of in adapter.modules.items() if of.num_experts is not None]
    latent = [name for name in adapter.modules if name.endswith(".kv_b_proj")]
    encoder = [*adapter.modules] if source.model.encoder else []
    for names, why in (
        (whole, "is trained in full, not as a LoRA adapter"),
        (experts, "belongs to experts, whose tokens are sorted by expert and not by adapter"),
        (latent, "expands a latent that the KV cache stores instead of keys and values"),
        (encoder, "belongs to an encoder-decoder model, which reads one text at a time"),
    ):
        if names:
            raise CheckpointError(
                f"{folder}: a separate adapter is not supported for {names[0]}, which {why}",
                hint=f"merge it into the weights: mega ckpt merge-adapter {base} {folder} OUT, and use OUT as the model",
            )
    return adapter


def _check_tokenizer(source: AdaptedWeightSource, folder: str) -> None:
    """Refuse an adapter whose tokenizer differs from the tokenizer of its base, which encodes all texts.

    Raises:
        CheckpointError: when a token has different ids in the two.
    """
    files = [assets.get("tokenizer.json") for assets in (source.base.asset_files(), source.adapter.tokenizer)]
    base, own = (file.read_bytes() if isinstance(file, Path) else file for file in files)
    if (
        base is not None
        and own is not None
        and base != own
        and parse_tokenizer_vocab(base) != parse_tokenizer_vocab(own)
    ):
        raise CheckpointError(
            f"{folder}: the adapter's tokenizer.json conflicts with that of the base model, which encodes all texts",
            hint="merge the adapter into the weights (mega ckpt merge-adapter), and use the merged model",
        )


PRECISIONS: Mapping[str, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip

ModelKind = Literal["decoder", "encoder", "encoder-decoder", "reward model", "task head", "retrieval"]
# Description of each kind of model, and the commands that support it.
_SUPPORTED_COMMANDS: Mapping[ModelKind, tuple[str, str]] = {
    "decoder": ("a decoder", "use mega eval, mega generate or mega serve"),
    "encoder": (
        "an encoder, which does not generate text",
        "use mega eval --data for the masked-LM loss, or mega embed for text embeddings",
    ),
    "encoder-decoder": ("an encoder-decoder model", "use mega generate or mega serve"),
    "reward model": (
        "a reward model, which scores texts and predicts no tokens",
        "use mega eval --data with preference pairs for its accuracy",
    ),
    "task head": (
        "a model with a task head, which predicts labels or vectors of texts and no tokens",
        "convert it with mega ckpt convert --to hf, for transformers or sentence-transformers",
    ),
    "retrieval": (
        "a retrieval model (Retro), which requires retrieved neighbors of each text",
        "evaluate it in mega train on data with neighbors (train.eval_every)",
    ),
}


def classify_model(model: ModelConfig) -> ModelKind:
    """Return the kind of a model: decoder, encoder, encoder-decoder, retrieval, reward model or task head."""
    if model.score:
        return "reward model"
    if model.task_head:
        return "task head"
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
    extensions: Sequence[str] = (),
) -> Decoder:
    """Load a model for inference only: the whole model, or this rank's shards and layers.
    The model is at `path` and gets `dtype` and `device`; this rank's shards and layers are loaded under the process
    groups `groups`.

    Weights are read one tensor at a time, so peak memory is the model plus one tensor.

    Args:
        path: checkpoint, run folder, HuggingFace folder or GGUF file.
        dtype: dtype of the weights in memory.
        device: device of the model.
        groups: process groups of the ranks that share the model.
        kinds: kinds of model that the caller supports; others are refused.
        adapter: LoRA adapter to merge into the weights.
        lora_adapters: LoRA adapters to keep separate; each row of a batch selects at most one.
        mtp: load the MTP layers, which are left out by default.
        extensions: extensions with the code of the model's own blocks; installed ones are found by their names.

    Raises:
        CheckpointError: when there is no complete checkpoint, or its tensors do not match its configuration.
        ConfigError: for a model of another kind than `kinds`, without the MTP layers that `mtp` requires, or of an
            extension that is missing.
    """
    source = open_inference_source(path, adapter, extensions)
    stages, ranks = (1, 1) if groups is None else (groups.pp.size, groups.tp.size * groups.pp.size * groups.ep.size)
    _check_loadable(path, source.model, kinds, mtp=mtp, stages=stages, ranks=ranks)
    warn_of_unsupported_parts(source)
    config = source.model if mtp else source.model.model_copy(update={"mtp_layers": 0})
    pool = None if lora_adapters is None else lora_adapters.pool
    added = load_model_extensions(config, extensions, str(path))
    build = LayerBuilder(
        config, groups or ParallelGroups(), dtype=dtype, device=torch.device(device), choice=pool,
        blocks=added.make_block_factories(config), functions=added.bind_extension_functions(config),
    )  # fmt: skip
    model = PipelineDecoder(build) if build.groups.pp.size > 1 else select_model_class(config)(build)
    boxes = boxes_by_name([*list_parameter_pieces(model, adapters=False), *iterate_saved_buffers(model)])
    unused = sorted(set(source.tensor_names()) - canonical_tensors(source.model).keys())
    if unused:
        raise CheckpointError(
            f"{path}: the configuration of the model has no parameter for the tensor {unused[0]} "
            f"({len(unused)} such tensors)"
        )
    load_weights(source, boxes)
    if lora_adapters is not None:
        lora_adapters.load_adapter_weights(model)
    return model.eval().requires_grad_(False)


def open_inference_source(
    path: str | Location, adapter: str | Location | None, extensions: Sequence[str]
) -> WeightSource:
    """Open weights, with a LoRA adapter merged into them if there is one, by the families of mega and of extensions."""
    families = load_extensions(extensions).families
    if adapter is None:
        return open_weight_source(path, families=families)
    return open_weights_with_adapter(adapter, path, families=families)


def _check_loadable(
    path: str | Location, model: ModelConfig, kinds: tuple[ModelKind, ...], *, mtp: bool, stages: int, ranks: int = 1
) -> None:
    """Check that the caller and its pipeline stages support the kind of a model."""
    kind = classify_model(model)
    if kind not in kinds:
        description, hint = _SUPPORTED_COMMANDS[kind]
        raise ConfigError(f"{path}: this operation is not supported with {description}", hint=hint)
    if model.transformers is not None and ranks > 1:
        raise ConfigError(
            f"{path}: a model of implementation: transformers is not supported on several ranks of one copy, found {ranks}",
            hint="use tp = 1, pp = 1 and ep = 1",
        )
    if mtp and not model.mtp_layers:
        raise ConfigError(
            f"{path}: draft = mtp requires multi-token prediction (MTP) layers, and the model has none",
            hint="use draft = ngrams",
        )
    if mtp and stages > 1:
        raise ConfigError(
            f"{path}: draft = mtp is not supported with pipeline parallelism (pp = {stages})",
            hint="use pp = 1, or draft = ngrams",
        )
    if model.per_layer_input_size and stages > 1:
        raise ConfigError(
            f"{path}: a model with inputs of each layer is not supported with pipeline parallelism (pp = {stages})",
            hint="use pp = 1, and tp > 1 if it does not fit on one device",
        )
    if kind == "encoder-decoder" and stages > 1:
        raise ConfigError(
            f"{path}: an encoder-decoder model is not supported with pipeline parallelism (pp = {stages})",
            hint="use pp = 1",
        )


def load_tokenizer(
    path: str | Location, adapter: str | Location | None = None, extensions: Sequence[str] = ()
) -> Tokenizer:
    """Load the tokenizer that is stored with the weights at `path`.
    It is that of a LoRA `adapter` if its folder has one; `extensions` may have the family of the folder, or the tokenizer.

    Raises:
        CheckpointError: when there is neither a tokenizer.json nor the record of an extension's tokenizer.
        DataError: when the tokenizer cannot be used.
    """
    source = open_inference_source(path, adapter, extensions)
    assets = source.asset_files()
    file, record = assets.get("tokenizer.json"), assets.get(RECORD_FILE)
    if file is None and record is not None:
        content = record.read_bytes() if isinstance(record, Path) else record
        return Tokenizer(find_recorded_tokenizer(content, extensions, str(path)))
    if file is None:
        raise CheckpointError(
            f"{path}: tokenizer.json is missing",
            hint="pass the folder of the tokenizer, or copy its files into the folder of the weights",
        )
    if isinstance(file, Path):
        return Tokenizer(file)
    with tempfile.TemporaryDirectory() as folder:
        copy_assets(source, Path(folder))
        return Tokenizer(Path(folder))


def find_end_tokens(path: str | Location, tokenizer: Tokenizer, extensions: Sequence[str] = ()) -> frozenset[int]:
    """Return the ids of all tokens that end a text generated by the model.
    They come from the tokenizer and the model's generation_config.json and config.json. `extensions` may have the
    family of the folder.
    """
    found = {tokenizer.eos_id} if tokenizer.eos_id is not None else set()
    assets = open_inference_source(path, None, extensions).asset_files()
    for name in ("generation_config.json", "config.json"):
        found.update(parse_token_ids(_parse_json_asset(assets.get(name), name).get("eos_token_id")))
    return frozenset(found)


def load_sampling_settings(path: str | Location, extensions: Sequence[str] = ()) -> dict[str, Any]:
    """Return the sampling settings that the generation_config.json of a model gives.
    They are arguments of `Sampling`, read as transformers reads them. `extensions` may have the family of the folder.
    """
    return parse_sampling_settings(_load_generation_config(path, extensions))


def warn_unsupported_settings(path: str | Location, extensions: Sequence[str] = ()) -> None:
    """Log a warning that lists the unsupported settings in a model's generation_config.json.
    Only settings that would change the text are listed. `extensions` may have the family of the folder.
    """
    if unsupported := list_unsupported_generation_settings(_load_generation_config(path, extensions)):
        message = "%s: the generation settings %s are not supported; texts differ from those of transformers"
        logger.warning(message, path, ", ".join(unsupported))


def _load_generation_config(path: str | Location, extensions: Sequence[str]) -> Mapping[str, Any]:
    """Return generation_config.json, or without it the generation settings of config.json, as transformers does."""
    assets = open_inference_source(path, None, extensions).asset_files()
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
    """Raise DataError if sequences are too long for learned position embeddings; with other positions only warn.

    The warning is for more tokens than the model was trained for; `what` names the sequences in both messages.
    """
    if length <= config.max_position:
        return
    if config.position == "learned":
        raise DataError(f"{what} are more than the {config.max_position} positions of the model")
    logger.warning("%s are more than the %d positions that the model was trained for", what, config.max_position)


def select_device(name: str) -> torch.device:
    """Return the torch device called `name`: `cpu`, `cuda` or `cuda:N`; `auto` is a GPU if there is one.

    Raises:
        ConfigError: when the device does not exist or cannot be used.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"--device must be auto, cpu, cuda or cuda:N, found {name!r}", hint="use --device auto"
        ) from None
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r} cannot be used ({reason})", hint="use --device auto or cpu") from None
    return device
