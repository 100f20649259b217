"""From a folder to something that can be asked: a model ready for inference, its tokenizer, the tokens that end a text.

A folder is a mega checkpoint, a run (its newest checkpoint) or a HuggingFace folder; nothing below depends on which.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from mega_ckpt.names import tensors_of
from mega_ckpt.pieces import boxes_of
from mega_ckpt.source import copy_assets, load_weights, open_adapted, open_source, tell_unread
from mega_common.errors import CheckpointError, ConfigError, DataError
from mega_common.log import logger
from mega_common.model_config import ModelConfig
from mega_common.parsing import parse_json
from mega_common.remote import Place
from mega_data.tokenizer import Tokenizer
from mega_eval.adapters import Beside, held_by
from mega_eval.generation_config import GENERATION_KEYS, sampling_settings, token_list, unsupported_settings
from mega_eval.stages import StagedDecoder
from mega_trainer.mesh import Groups
from mega_trainer.model.builder import Builder
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.encoder_decoder import model_class
from mega_trainer.parallel.param import kept_of

PRECISIONS: Mapping[str, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip

Kind = Literal["decoder", "encoder", "encoder-decoder", "reward model", "retrieval"]
# What a model is that cannot be asked this, and what it can be asked.
_ELSEWHERE: Mapping[Kind, tuple[str, str]] = {
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


def kind_of(model: ModelConfig) -> Kind:
    """What can be asked of a model."""
    if model.score:
        return "reward model"
    if model.retro:
        return "retrieval"
    if model.encoder:
        return "encoder-decoder"
    return "decoder" if model.causal else "encoder"


def load_model(
    path: str | Place,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    groups: Groups | None = None,
    kinds: tuple[Kind, ...] = ("decoder",),
    adapter: str | Place | None = None,
    beside: Beside | None = None,
    mtp: bool = False,
) -> Decoder:
    """The whole model at `path`, or this rank's part of it under `groups`, in `dtype` on `device`, for inference only.

    Weights are read one tensor at a time, so that memory is needed for the model and one tensor more. Layers that
    predict further tokens are left out, unless `mtp` asks for them. `kinds` are those of model that the caller has a use for; others are refused.
    `adapter` is put into the weights, those `beside` them stay apart, for each row to have one or none.

    Raises:
        CheckpointError: when there is no complete checkpoint, or its tensors are not those of its configuration.
        ConfigError: for a model of another kind than `kinds`, or without the layers that `mtp` asks for.
    """
    source = open_source(path) if adapter is None else open_adapted(adapter, path)
    kind = kind_of(source.model)
    if kind not in kinds:
        raise ConfigError(f"{path}: {_ELSEWHERE[kind][0]}", hint=_ELSEWHERE[kind][1])
    tell_unread(source)
    if mtp and not source.model.mtp_layers:
        raise ConfigError(f"{path}: it has no layers that predict further tokens, to guess by", hint="draft: ngrams")
    if mtp and groups is not None and groups.pp.size > 1:
        raise ConfigError(f"{path}: layers that predict further tokens guess on one stage alone", hint="pp: 1")
    config = source.model if mtp else source.model.model_copy(update={"mtp_layers": 0})
    if kind == "encoder-decoder" and groups is not None and groups.pp.size > 1:
        raise ConfigError(f"{path}: a model of an encoder and a decoder is asked on one stage", hint="pp: 1")
    choice = None if beside is None else beside.choice
    build = Builder(config, groups or Groups(), dtype=dtype, device=torch.device(device), choice=choice)
    model = StagedDecoder(build) if build.groups.pp.size > 1 else model_class(config)(build)
    boxes = boxes_of([*held_by(model, adapters=False), *kept_of(model)])
    unused = sorted(set(source.keys()) - tensors_of(source.model).keys())
    if unused:
        raise CheckpointError(f"{path}: the model has no place for the tensor {unused[0]} ({len(unused)} such)")
    load_weights(source, boxes)
    if beside is not None:
        beside.load(model)
    return model.eval().requires_grad_(False)


def load_tokenizer(path: str | Place, adapter: str | Place | None = None) -> Tokenizer:
    """Load the tokenizer that travels with the weights at `path`, or with an `adapter` beside them if that has one.

    Raises:
        CheckpointError: when there is none.
        DataError: when it cannot be used.
    """
    source = open_source(path) if adapter is None else open_adapted(adapter, path)
    file = source.assets().get("tokenizer.json")
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


def end_tokens(path: str | Place, tokenizer: Tokenizer) -> frozenset[int]:
    """Every token that ends a text: the tokenizer's own, and those that the model's configuration files add."""
    found = {tokenizer.eos_id} if tokenizer.eos_id is not None else set()
    assets = open_source(path).assets()
    for name in ("generation_config.json", "config.json"):
        found.update(token_list(_mapping(assets.get(name)).get("eos_token_id")))
    return frozenset(found)


def own_sampling(path: str | Place) -> dict[str, Any]:
    """Return the settings of `Sampling` that the model's own files give, read as transformers reads them."""
    return sampling_settings(_generation_config(path))


def warn_of_unsupported(path: str | Place) -> None:
    """Warn once of generation settings in the model's own files that change the text and are not supported."""
    if unsupported := unsupported_settings(_generation_config(path)):
        message = (
            "%s: its generation config sets %s, which mega does not support; texts differ from those of transformers"
        )
        logger.warning(message, path, ", ".join(unsupported))


def _generation_config(path: str | Place) -> Mapping[str, Any]:
    """Return generation_config.json, or, where there is none, the generation settings of config.json, as transformers does."""
    assets = open_source(path).assets()
    if "generation_config.json" in assets:
        return _mapping(assets["generation_config.json"])
    raw = _mapping(assets.get("config.json"))
    return {name: value for name, value in raw.items() if name in GENERATION_KEYS}


def _mapping(asset: Path | bytes | None) -> Mapping[str, Any]:
    if asset is None:
        return {}
    try:
        raw = parse_json(asset.read_bytes() if isinstance(asset, Path) else asset)
    except ValueError as error:
        raise CheckpointError(f"{asset if isinstance(asset, Path) else 'assets'}: not valid JSON ({error})") from None
    return raw if isinstance(raw, dict) else {}


def check_length(config: ModelConfig, length: int, what: str) -> None:
    """Refuse sequences that the model has no positions for; warn of those that it was not made for.

    Raises:
        DataError: naming `what`.
    """
    if length <= config.max_position:
        return
    if config.position == "learned":
        raise DataError(f"{what} are more than the {config.max_position} positions that the model has")
    logger.warning("%s are more than the %d positions that the model was made for", what, config.max_position)


def device_named(name: str) -> torch.device:
    """The device called `name`; `auto` is a GPU where there is one.

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
