"""Conversion of weights between formats (and of the optimizer state from Megatron), with memory for one tensor at a
time.

The output is written beside its place under a hidden name, made durable, and renamed: it is complete or not there. After a
kill, the same conversion goes on with the file that it was at.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.checkpoint import OPTIMIZER
from mega_ckpt.checkpoint_folders import wrap_disk_errors
from mega_ckpt.extend_vocabulary import ExtendedVocabularySource, add_tokens
from mega_ckpt.formats.disk_source import DiskSource
from mega_ckpt.formats.hf_source import HfSource
from mega_ckpt.formats.hf_write import plan_hf_folder, write_hf_folder
from mega_ckpt.formats.megatron_dist_write import write_dist_checkpoint
from mega_ckpt.formats.megatron_legacy_write import write_legacy_checkpoint
from mega_ckpt.formats.megatron_source import TRACKER, MegatronSource
from mega_ckpt.formats.megatron_write import MegatronWriter, check_parallel_sizes, write_release
from mega_ckpt.formats.peft_adapter import CONFIG as PEFT_CONFIG
from mega_ckpt.formats.peft_adapter import write_peft_folder
from mega_ckpt.lora_adapter import AdaptedSource
from mega_ckpt.manifest import MANIFEST
from mega_ckpt.model_card import build_cards
from mega_ckpt.resumable_folder import WriteJournal, open_resumable
from mega_ckpt.source import (
    MegaSource,
    WeightSource,
    cast_dtype,
    load_with_adapter,
    open_weight_source,
    resolve_checkpoint,
    warn_of_unsupported_parts,
)
from mega_ckpt.storage import open_storage_folder
from mega_ckpt.store import Checkpoint
from mega_ckpt.stream_checkpoint import split_blocks, write_weights
from mega_ckpt.training_state import ConvertedTraining, OptimizerNotConverted
from mega_common.errors import CheckpointError
from mega_common.object_store import Location, RemotePath, parse_location
from mega_common.progress_logging import ProgressBar, logger

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = ("hf", "mega", "megatron", "peft")


@dataclass(frozen=True)
class ConvertOptions:
    """Changes to apply during a conversion.

    Attributes:
        dtype: to cast floating-point weights to; None leaves each as it is.
        family: HuggingFace `model_type` to write; None chooses.
        max_shard: most bytes of tensors in a HuggingFace file; None keeps the files of the source, or takes 5 GB.
        megatron_format: `torch_dist`, or `torch` for a file a rank.
        tp, pp: ranks that the files of `torch` are for, and that Megatron has to be able to load `torch_dist` with.
        implementation: the `--transformer-impl` that the files of `torch` are for: `transformer_engine` or `local`.
        settings: fields of `ModelConfig` that a checkpoint of Megatron lacks, or that replace what it says.
        adapter: a run's or a folder of PEFT's, to be put into the weights.
        vocab_size: tokens of the vocabulary, the new ones' rows the mean of the others'; None leaves it.
        tokens: to add to the tokenizer, with rows of that kind.
        averaged: take the averages that a run has kept of its weights (`train.ema`).
    """

    dtype: torch.dtype | None = None
    family: str | None = None
    max_shard: int | None = None
    megatron_format: str = "torch_dist"
    tp: int = 1
    pp: int = 1
    implementation: str = "transformer_engine"
    settings: Mapping[str, Any] | None = None
    adapter: str | None = None
    averaged: bool = False
    vocab_size: int | None = None
    tokens: tuple[str, ...] = ()


@wrap_disk_errors()
def convert_checkpoint(
    source: str | Location,
    destination: str | Location,
    to: str,
    *,
    options: ConvertOptions = ConvertOptions(),
    verify: bool = False,
    check: Callable[[Location], object] | None = None,
    overwrite: bool = False,
) -> None:
    """Write the model at `source` to the folder `destination` in the format `to`.

    Args:
        source: a mega checkpoint, a run folder (its newest checkpoint), a HuggingFace or a Megatron folder.
        destination: the folder to make; a mega checkpoint may be a URL.
        to: the format: "hf", "mega" or "megatron"; "peft" for the adapter alone of a run that trained one.
        options: what to change on the way.
        verify: read the output back and compare every element before it gets its name.
        check: called with the folder of the output before it gets its name; its error is the conversion's. (On an object
            store the name comes first, and goes again when there is an error.)
        overwrite: replace `destination`, once the new one is complete.

    Raises:
        CheckpointError: when the source cannot be used, the target format cannot express the model, or `destination`
            exists and `overwrite` is not given. Nothing is left behind then.
        KeyboardInterrupt: the same call goes on with the file that it was at.
    """
    if to not in FORMATS:
        raise CheckpointError(f"cannot convert to {to!r}", hint=f"known formats: {', '.join(FORMATS)}")
    final = _absolute(parse_location(destination))
    _check_destination(final, _absolute(parse_location(source)), to, overwrite)
    if to == "peft" and (options.tokens or options.vocab_size):
        raise CheckpointError(
            f"{source}: new tokens are rows of the base, which a folder of PEFT's has not got",
            hint="add them to the base and train the adapter beside that, or convert --to hf",
        )
    given = _open_input(source, options)
    if to == "peft" and not isinstance(given, AdaptedSource):
        raise CheckpointError(
            f"{source}: holds no adapter, which is what PEFT's folders hold", hint="convert it --to hf"
        )
    warn_of_unsupported_parts(given)
    if to == "megatron":
        _prepare_megatron(given, options)  # before anything is written
    training = _read_training_state(given, options) if to == "mega" else None
    quantised = given.quantization if isinstance(given, DiskSource) else None
    if quantised:
        logger.info("the weights of %s are quantised (%s); what is written is not", source, quantised)
    with open_resumable(final, _conversion_identity(source, to, options)) as journal:
        try:
            if to == "mega":
                write_weights(
                    given, journal.folder, "writing mega", dtype=options.dtype, training=training, journal=journal,
                    provenance={"quantised": quantised} if quantised else None,
                )  # fmt: skip
            elif isinstance(journal.folder, Path):
                _WRITERS[to](given, journal.folder, options, journal)
            if verify and to != "peft":
                _compare_weights(
                    given, open_weight_source(journal.result_folder, settings=options.settings), options.dtype
                )
                if training is not None:
                    _compare_optimizer(training, Checkpoint.open_folder(journal.result_folder))
            if check is not None:
                check(journal.result_folder)
        except KeyboardInterrupt:
            if journal.finished:
                logger.warning("%d file(s) are finished; the same command goes on", len(journal.finished))
            raise


def _open_input(source: str | Location, options: ConvertOptions) -> WeightSource:
    """Open the weights to convert."""
    if options.adapter is not None:
        return load_with_adapter(options.adapter, source)
    given = open_weight_source(source, settings=options.settings, averaged=options.averaged)
    if options.tokens:
        return add_tokens(given, options.tokens, options.vocab_size)
    return given if options.vocab_size is None else ExtendedVocabularySource(given, options.vocab_size)


def _write_peft(source: WeightSource, folder: Path, options: ConvertOptions, journal: WriteJournal) -> None:
    assert isinstance(source, AdaptedSource)
    write_peft_folder(source.adapter, source.base, folder)


def _conversion_identity(source: str | Location, to: str, options: ConvertOptions) -> dict[str, Any]:
    """Return everything that determines the output, as JSON."""
    folder = resolve_checkpoint(source)
    return {
        "source": str(_absolute(folder)),
        "files": _file_stamps(folder),
        "adapter": None if options.adapter is None else _file_stamps(resolve_checkpoint(options.adapter)),
        "to": to,
        "options": {name: str(value) for name, value in dataclasses.asdict(options).items()},
    }


def _file_stamps(source: Location) -> dict[str, str]:
    """Return a stamp for each file of the source that changes when the file changes."""
    if isinstance(source, Path) and source.is_file():
        return {
            name: stamp
            for name, stamp in open_storage_folder(source.parent).file_stamps().items()
            if name == source.name
        }
    return open_storage_folder(source).file_stamps()


def _write_hf(source: WeightSource, folder: Path, options: ConvertOptions, journal: WriteJournal) -> None:
    plan = plan_hf_folder(source, family=options.family, dtype=options.dtype, max_shard=options.max_shard)
    if isinstance(source, MegaSource):
        parameters = sum(math.prod(source.tensor_shape(name)) for name in source.tensor_names())
        plan = dataclasses.replace(
            plan, others={**plan.others, **build_cards(source.checkpoint, parameters, plan.others)}
        )
    if source.model.moe and source.model.moe.sinkhorn:
        logger.warning(
            "model.moe.sinkhorn balanced the choice of experts in training alone: like validation and `mega eval`, the "
            "exported model chooses them by score"
        )
    with ProgressBar("writing HuggingFace", total=plan.total_bytes, unit="bytes") as bar:
        journal.advance = bar.advance
        write_hf_folder(source, plan, folder, bar.advance, journal.write_once)


def _read_training_state(source: WeightSource, options: ConvertOptions) -> ConvertedTraining | None:
    """Return the optimizer state to carry over, if the source has any; log why not."""
    if not isinstance(source, MegatronSource | HfSource):
        return None
    stored = source.tensor_dtype(source.tensor_names()[0])
    try:
        if isinstance(source, HfSource):
            training = source.read_training_state(options.dtype or stored)
        elif options.dtype is not None:
            raise OptimizerNotConverted("they are cast, and training goes on with what it had")
        else:
            training = source.read_training_state()
    except OptimizerNotConverted as why:
        logger.warning("only the weights are converted: %s", why)
        return None
    if training is not None:
        logger.info(
            "the optimizer's state after step %d comes along; the learning rate, its schedule, Adam's settings and the "
            "generators' states do not: run.yaml has its own",
            training.step,
        )
    return training


def _prepare_megatron(source: WeightSource, options: ConvertOptions) -> MegatronWriter:
    """Return Megatron's tensors and settings of a source, for parallel sizes that Megatron can load."""
    writing = MegatronWriter(source, options.tp, options.pp, options.dtype, options.implementation)
    ranks, local = options.megatron_format == "torch", options.implementation == "local"
    check_parallel_sizes(source.model, writing.parts, options.tp, options.pp, ranks=ranks, local=local)
    return writing


def _write_megatron(source: WeightSource, folder: Path, options: ConvertOptions, journal: WriteJournal) -> None:
    writing = _prepare_megatron(source, options)
    with ProgressBar("writing Megatron", total=writing.total_bytes, unit="bytes") as bar:
        journal.advance = bar.advance
        write_release(writing, folder, MEGATRON_FORMATS[options.megatron_format], bar.advance, journal.write_once)


MEGATRON_FORMATS = {"torch_dist": write_dist_checkpoint, "torch": write_legacy_checkpoint}
_WRITERS: Mapping[str, Callable[[WeightSource, Path, ConvertOptions, WriteJournal], None]] = {
    "hf": _write_hf, "megatron": _write_megatron, "peft": _write_peft,
}  # fmt: skip


def _compare_weights(one: WeightSource, other: WeightSource, dtype: torch.dtype | None) -> None:
    """Check that `other` equals `one` bit for bit after the cast."""
    names = list(one.tensor_names())
    total = sum(other.tensor_dtype(name).itemsize * torch.Size(other.tensor_shape(name)).numel() for name in names)
    with ProgressBar("comparing", total=total, unit="bytes") as bar:
        for name in names:
            kind = cast_dtype(one, name, dtype)
            for offset, shape in split_blocks(one.tensor_shape(name), kind):
                left, right = (each.read_tensor_slice(name, offset, shape) for each in (one, other))
                _check_equal(name, left.to(kind), right)
                bar.advance(right.nbytes)


def _compare_optimizer(training: ConvertedTraining, made: Checkpoint) -> None:
    """Check that the optimizer state in a mega checkpoint equals `training` bit for bit."""
    total = sum(4 * math.prod(made.tensor_shape(key)) for key in made.tensor_keys(OPTIMIZER))
    with ProgressBar("comparing the optimizer", total=total, unit="bytes") as bar:
        for kind, held in training.tensors.items():
            for name in held.tensor_names():
                key = f"{OPTIMIZER}{kind}/{name}"
                for offset, shape in split_blocks(held.tensor_shape(name), torch.float32):
                    right = made.read_tensor(key, offset, shape)
                    _check_equal(key, held.read_tensor_slice(name, offset, shape).float(), right)
                    bar.advance(right.nbytes)


def _check_equal(name: str, read: Tensor, written: Tensor) -> None:
    if read.dtype != written.dtype or not torch.equal(_as_bytes(read), _as_bytes(written)):
        raise CheckpointError(f"{name}: what was written is not what was read", hint="is the disk sound?")


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor as bytes, so that NaN compares equal to itself."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _absolute(path: Location) -> Location:
    return Path(os.path.abspath(path)) if isinstance(path, Path) else path


def _check_destination(final: Location, source: Location, to: str, overwrite: bool) -> None:
    """Reject a destination that cannot be created or must not be replaced."""
    if isinstance(final, RemotePath):
        if to != "mega":
            raise CheckpointError(
                f"{final}: on an object store only checkpoints of mega are made", hint="convert here, and upload that"
            )
        if (final / MANIFEST).is_file():
            raise CheckpointError(f"{final}: exists already", hint="choose another place, or remove it")
        return
    if not final.exists():
        return
    if not overwrite:
        raise CheckpointError(f"{final}: exists already", hint="choose another folder, or overwrite it")
    if not _is_replaceable(final, source):
        raise CheckpointError(f"{final}: is not a folder of a model, or holds the source; it is not replaced")


def _is_replaceable(final: Path, source: Location) -> bool:
    """Return whether `final` is a model folder that neither is nor contains the source."""
    holds_model = any((final / name).is_file() for name in ("config.json", "manifest.json", PEFT_CONFIG, TRACKER))
    held = isinstance(source, Path) and final.resolve() in (source.resolve(), *source.resolve().parents)
    return holds_model and not held
