"""Convert weights between formats, and from Megatron the optimizer too: memory for one tensor, not for the model.

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

from mega_ckpt.adapter import AdaptedSource
from mega_ckpt.card import cards
from mega_ckpt.checkpoint import OPTIMIZER
from mega_ckpt.commits import disk_errors
from mega_ckpt.formats.disk import DiskSource
from mega_ckpt.formats.hf import HfSource
from mega_ckpt.formats.hf_write import plan_folder, write_folder
from mega_ckpt.formats.megatron import TRACKER, MegatronSource
from mega_ckpt.formats.megatron_dist_write import write_dist
from mega_ckpt.formats.megatron_legacy_write import write_legacy
from mega_ckpt.formats.megatron_sizes import check_sizes
from mega_ckpt.formats.megatron_write import Writing, write_release
from mega_ckpt.formats.peft import CONFIG as PEFT_CONFIG
from mega_ckpt.formats.peft import write_peft
from mega_ckpt.journal import Journal, continued
from mega_ckpt.manifest import MANIFEST
from mega_ckpt.source import MegaSource, Source, cast_dtype, checkpoint_folder, open_adapted, open_source, tell_unread
from mega_ckpt.storage import folder_at
from mega_ckpt.store import Checkpoint
from mega_ckpt.stream import blocks, write_weights
from mega_ckpt.training import StaysBehindError, Training
from mega_ckpt.vocabulary import ExtendedSource, with_tokens
from mega_common.errors import CheckpointError
from mega_common.log import ProgressBar, logger
from mega_common.remote import Place, Remote, place

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = ("hf", "mega", "megatron", "peft")


@dataclass(frozen=True)
class Options:
    """What to change on the way.

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


@disk_errors()
def convert(
    source: str | Place,
    destination: str | Place,
    to: str,
    *,
    options: Options = Options(),
    verify: bool = False,
    check: Callable[[Place], object] | None = None,
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
    final = _absolute(place(destination))
    _check_destination(final, _absolute(place(source)), to, overwrite)
    if to == "peft" and (options.tokens or options.vocab_size):
        raise CheckpointError(
            f"{source}: new tokens are rows of the base, which a folder of PEFT's has not got",
            hint="add them to the base and train the adapter beside that, or convert --to hf",
        )
    given = _opened(source, options)
    if to == "peft" and not isinstance(given, AdaptedSource):
        raise CheckpointError(
            f"{source}: holds no adapter, which is what PEFT's folders hold", hint="convert it --to hf"
        )
    tell_unread(given)
    if to == "megatron":
        _megatron(given, options)  # before anything is written
    training = _training(given, options) if to == "mega" else None
    quantised = given.quantised if isinstance(given, DiskSource) else None
    if quantised:
        logger.info("the weights of %s are quantised (%s); what is written is not", source, quantised)
    with continued(final, _identity(source, to, options)) as journal:
        try:
            if to == "mega":
                write_weights(
                    given, journal.folder, "writing mega", dtype=options.dtype, training=training, journal=journal,
                    provenance={"quantised": quantised} if quantised else None,
                )  # fmt: skip
            elif isinstance(journal.folder, Path):
                _WRITERS[to](given, journal.folder, options, journal)
            if verify and to != "peft":
                _compare(given, open_source(journal.made, settings=options.settings), options.dtype)
                if training is not None:
                    _compare_state(training, Checkpoint.open(journal.made))
            if check is not None:
                check(journal.made)
        except KeyboardInterrupt:
            if journal.finished:
                logger.warning("%d file(s) are finished; the same command goes on", len(journal.finished))
            raise


def _opened(source: str | Place, options: Options) -> Source:
    """What is to be converted."""
    if options.adapter is not None:
        return open_adapted(options.adapter, source)
    given = open_source(source, settings=options.settings, averaged=options.averaged)
    if options.tokens:
        return with_tokens(given, options.tokens, options.vocab_size)
    return given if options.vocab_size is None else ExtendedSource(given, options.vocab_size)


def _write_peft(source: Source, folder: Path, options: Options, journal: Journal) -> None:
    assert isinstance(source, AdaptedSource)
    write_peft(source.adapter, source.base, folder)


def _identity(source: str | Place, to: str, options: Options) -> dict[str, Any]:
    """All that decides what is written."""
    folder = checkpoint_folder(source)
    return {
        "source": str(_absolute(folder)),
        "files": _stamps(folder),
        "adapter": None if options.adapter is None else _stamps(checkpoint_folder(options.adapter)),
        "to": to,
        "options": {name: str(value) for name, value in dataclasses.asdict(options).items()},
    }


def _stamps(source: Place) -> dict[str, str]:
    """What changes when a file of the source does."""
    if isinstance(source, Path) and source.is_file():
        return {name: stamp for name, stamp in folder_at(source.parent).stamps().items() if name == source.name}
    return folder_at(source).stamps()


def _write_hf(source: Source, folder: Path, options: Options, journal: Journal) -> None:
    plan = plan_folder(source, family=options.family, dtype=options.dtype, max_shard=options.max_shard)
    if isinstance(source, MegaSource):
        parameters = sum(math.prod(source.shape(name)) for name in source.keys())  # noqa: SIM118
        plan = dataclasses.replace(plan, others={**plan.others, **cards(source.checkpoint, parameters, plan.others)})
    if source.model.moe and source.model.moe.sinkhorn:
        logger.warning(
            "model.moe.sinkhorn balanced the choice of experts in training alone: like validation and `mega eval`, the "
            "exported model chooses them by score"
        )
    with ProgressBar("writing HuggingFace", total=plan.size, unit="bytes") as bar:
        journal.advance = bar.advance
        write_folder(source, plan, folder, bar.advance, journal.once)


def _training(source: Source, options: Options) -> Training | None:
    """What a run goes on from beside the weights, where another trainer's checkpoint has it; one line says what became of it."""
    if not isinstance(source, MegatronSource | HfSource):
        return None
    stored = source.dtype(source.keys()[0])
    try:
        if isinstance(source, HfSource):
            training = source.training(options.dtype or stored)
        elif options.dtype is not None:
            raise StaysBehindError("they are cast, and training goes on with what it had")
        else:
            training = source.training()
    except StaysBehindError as why:
        logger.warning("only the weights are converted: %s", why)
        return None
    if training is not None:
        logger.info(
            "the optimizer's state after step %d comes along; the learning rate, its schedule, Adam's settings and the "
            "generators' states do not: run.yaml has its own",
            training.step,
        )
    return training


def _megatron(source: Source, options: Options) -> Writing:
    """Megatron's tensors and settings of a source, for sizes that Megatron can load."""
    writing = Writing(source, options.tp, options.pp, options.dtype, options.implementation)
    ranks, local = options.megatron_format == "torch", options.implementation == "local"
    check_sizes(source.model, writing.parts, options.tp, options.pp, ranks=ranks, local=local)
    return writing


def _write_megatron(source: Source, folder: Path, options: Options, journal: Journal) -> None:
    writing = _megatron(source, options)
    with ProgressBar("writing Megatron", total=writing.size, unit="bytes") as bar:
        journal.advance = bar.advance
        write_release(writing, folder, MEGATRON_FORMATS[options.megatron_format], bar.advance, journal.once)


MEGATRON_FORMATS = {"torch_dist": write_dist, "torch": write_legacy}
_WRITERS: Mapping[str, Callable[[Source, Path, Options, Journal], None]] = {
    "hf": _write_hf, "megatron": _write_megatron, "peft": _write_peft,
}  # fmt: skip


def _compare(one: Source, other: Source, dtype: torch.dtype | None) -> None:
    """Check that `other` holds the elements of `one`, bit for bit after the cast."""
    names = list(one.keys())
    total = sum(other.dtype(name).itemsize * torch.Size(other.shape(name)).numel() for name in names)
    with ProgressBar("comparing", total=total, unit="bytes") as bar:
        for name in names:
            kind = cast_dtype(one, name, dtype)
            for offset, shape in blocks(one.shape(name), kind):
                left, right = (each.read_slice(name, offset, shape) for each in (one, other))
                _check_same(name, left.to(kind), right)
                bar.advance(right.nbytes)


def _compare_state(training: Training, made: Checkpoint) -> None:
    """The same for the optimizer's state in a checkpoint of mega."""
    total = sum(4 * math.prod(made.shape(key)) for key in made.keys(OPTIMIZER))
    with ProgressBar("comparing the optimizer", total=total, unit="bytes") as bar:
        for kind, held in training.tensors.items():
            for name in held.keys():  # noqa: SIM118
                key = f"{OPTIMIZER}{kind}/{name}"
                for offset, shape in blocks(held.shape(name), torch.float32):
                    right = made.read(key, offset, shape)
                    _check_same(key, held.read_slice(name, offset, shape).float(), right)
                    bar.advance(right.nbytes)


def _check_same(name: str, read: Tensor, written: Tensor) -> None:
    if read.dtype != written.dtype or not torch.equal(_bits(read), _bits(written)):
        raise CheckpointError(f"{name}: what was written is not what was read", hint="is the disk sound?")


def _bits(tensor: Tensor) -> Tensor:
    """Bytes, so that NaN equals itself."""
    return tensor.contiguous().flatten().view(torch.uint8)


def _absolute(path: Place) -> Place:
    return Path(os.path.abspath(path)) if isinstance(path, Path) else path


def _check_destination(final: Place, source: Place, to: str, overwrite: bool) -> None:
    """Refuse what cannot be made, or would be lost."""
    if isinstance(final, Remote):
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
    if not _replaceable(final, source):
        raise CheckpointError(f"{final}: is not a folder of a model, or holds the source; it is not replaced")


def _replaceable(final: Path, source: Place) -> bool:
    """Whether `final` is a folder that holds a model, and neither is nor holds the source."""
    holds_model = any((final / name).is_file() for name in ("config.json", "manifest.json", PEFT_CONFIG, TRACKER))
    held = isinstance(source, Path) and final.resolve() in (source.resolve(), *source.resolve().parents)
    return holds_model and not held
