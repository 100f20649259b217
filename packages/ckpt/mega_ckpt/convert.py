"""Conversion of weights between formats (and of the optimizer state of other trainers to mega), with memory for one
tensor at a time.

The output is written next to the destination under a hidden name, made durable, and renamed: it is complete or does not
exist. A killed conversion resumes with the unfinished file when it is called again.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import abbreviate_name_list
from mega_ckpt.checkpoint import OPTIMIZER
from mega_ckpt.checkpoint_folders import convert_os_errors_to_checkpoint_errors
from mega_ckpt.extend_vocabulary import ExtendedVocabularySource, add_tokens
from mega_ckpt.families import ModelFamily
from mega_ckpt.formats.disk_source import DiskWeightSource
from mega_ckpt.formats.gguf_file import SUFFIX
from mega_ckpt.formats.gguf_write import plan_gguf_folder, write_gguf_folder
from mega_ckpt.formats.hf_source import HfSource
from mega_ckpt.formats.hf_write import METADATA, plan_hf_folder, write_hf_folder
from mega_ckpt.formats.megatron_dist_write import write_megatron_dist_checkpoint
from mega_ckpt.formats.megatron_legacy_write import write_megatron_legacy_checkpoint
from mega_ckpt.formats.megatron_source import TRACKER, MegatronSource
from mega_ckpt.formats.megatron_write import (
    MegatronWriteInput,
    check_megatron_parallel_sizes,
    write_megatron_release_folder,
)
from mega_ckpt.formats.peft_adapter import CONFIG as PEFT_CONFIG
from mega_ckpt.formats.peft_adapter import write_peft_folder
from mega_ckpt.formats.quantized_parts import Calibration
from mega_ckpt.formats.transformers_module import write_transformers_folder
from mega_ckpt.lora_adapter import AdaptedWeightSource
from mega_ckpt.manifest import MANIFEST
from mega_ckpt.model_card import MODEL_CARD, add_quantization_to_readme, build_model_cards
from mega_ckpt.resumable_folder import WriteJournal, open_resumable_folder
from mega_ckpt.source import (
    Implementation,
    MegaWeightSource,
    open_weight_source,
    open_weights_with_adapter,
    resolve_run_to_checkpoint,
    warn_of_unsupported_parts,
)
from mega_ckpt.storage import open_storage_folder
from mega_ckpt.store import Checkpoint
from mega_ckpt.stream_checkpoint import split_into_contiguous_slices, write_weights_as_checkpoint
from mega_ckpt.tensor_pieces import TensorShape
from mega_ckpt.weight_source import ConvertedTrainingState, OptimizerNotConverted, WeightSource, choose_cast_dtype
from mega_common.errors import CheckpointError
from mega_common.object_store import Location, RemotePath, parse_location
from mega_common.progress_logging import ProgressBar, logger

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTIZATIONS: Mapping[str, tuple[str, ...]] = {
    "hf": ("fp8", "fp8-block", "int8", "int4", "int4-asym", "mxfp4"), "gguf": ("f16", "q8_0", "q4_0", "q4_k"), "mlx": ("int4", "int8"),
}  # fmt: skip


@dataclass(frozen=True)
class ConvertOptions:
    """Options of `convert_checkpoint`: changes to apply to the model and settings of the output format.

    Attributes:
        dtype: dtype to cast floating-point weights to; None: unchanged.
        family: HuggingFace `model_type` to write; None: that of the source, or the first that fits.
        max_shard: maximum bytes of tensors per HuggingFace file; None: the files of the source, or 5 GB.
        megatron_format: `torch_dist`, or `torch` for one file per rank.
        tp, pp: parallel sizes of the files of `torch`, and sizes with which Megatron must be able to load `torch_dist`.
        implementation: the `--transformer-impl` of the files of `torch`: `transformer_engine` or `local`.
        settings: fields of `ModelConfig` that are missing in a Megatron checkpoint, or override it.
        adapter: adapter to merge into the weights, of a run or a PEFT folder.
        vocab_size: size of the vocabulary; new rows are the mean of the old ones; None: unchanged.
        tokens: tokens to add to the tokenizer, with such rows.
        averaged: convert the exponential moving averages of the weights (`train.ema`).
        families: families of HuggingFace folders that extensions add.
        quantize: quantization of the weights, one of `QUANTIZATIONS`; None: unquantized, for GGUF f16.
        calibration: data by which the weights are rounded, for `quantize` of "hf" and "mlx"; None: to the nearest.
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
    families: tuple[ModelFamily, ...] = ()
    quantize: str | None = None
    calibration: Calibration | None = None


Options = ConvertOptions  # deprecated name


@convert_os_errors_to_checkpoint_errors()
def convert_checkpoint(
    source: str | Location, destination: str | Location, to: str, *, options: ConvertOptions = ConvertOptions(),
    verify: bool = False, check: Callable[[Location], object] | None = None, overwrite: bool = False,
) -> None:  # fmt: skip
    """Convert a model to a new folder in another format: "hf", "mega", "megatron", "peft", "gguf" or "mlx".

    Args:
        source: a mega checkpoint, a run folder (its latest checkpoint), a HuggingFace or a Megatron folder.
        destination: the folder to create; a mega checkpoint may be a URL.
        to: the format: "hf", "mega", "megatron", "gguf" or "mlx"; "peft" for the adapter of a LoRA run.
        options: changes to apply.
        verify: read the output back and compare every element before it is renamed to `destination`.
        check: called with the output folder before the rename; its error fails the conversion. (On an object store the
            output has its final name already, and is removed after an error.)
        overwrite: replace an existing `destination` once the output is complete.

    Raises:
        CheckpointError: when the source cannot be used, the target format cannot express the model, or `destination`
            exists without `overwrite`. Nothing is written then.
        KeyboardInterrupt: the same call resumes with the unfinished file.
    """
    _check_options(to, options, verify=verify)
    final = _absolute(parse_location(destination))
    _check_destination(final, _absolute(parse_location(source)), to, overwrite)
    weights = _open_input(source, to, options)
    if weights.model.transformers is not None:
        _check_transformers_options(weights.model.transformers.model_type, to, options)
    warn_of_unsupported_parts(weights)
    if to == "megatron":
        _prepare_megatron(weights, options)  # before anything is written
    training = _read_training_state(weights, options) if to == "mega" else None
    quantization = weights.quantization if isinstance(weights, DiskWeightSource) else None
    if quantization:
        result = "their values are quantized again" if options.quantize else "the output is not"
        logger.info("the weights of %s are quantized (%s); %s", source, quantization, result)
    identity = _conversion_identity(source, to, options)
    with _warn_of_non_finite_weights(weights, source), open_resumable_folder(final, identity) as journal:
        try:
            if to == "mega":
                write_weights_as_checkpoint(
                    weights, journal.folder, "writing mega", dtype=options.dtype, training=training, journal=journal,
                    provenance={"quantised": quantization} if quantization else None,
                )  # fmt: skip
            elif isinstance(journal.folder, Path):
                _WRITERS[to](weights, journal.folder, options, journal)
            if verify and to != "peft":
                _verify_output(weights, training, journal.result_folder, options)
            if check is not None:
                check(journal.result_folder)
        except KeyboardInterrupt:
            if journal.finished:
                logger.warning("%d file(s) are complete; run the same command to resume", len(journal.finished))
            raise


convert = convert_checkpoint  # deprecated name


def _check_options(to: str, options: ConvertOptions, *, verify: bool) -> None:
    """Reject a format that is not supported, and options that conflict with it."""
    if to not in ("mega", *_WRITERS):
        raise CheckpointError(f"format {to!r} is not supported", hint=f"use one of mega, {', '.join(_WRITERS)}")
    supported = QUANTIZATIONS.get(to, ())
    if options.quantize is not None and options.quantize not in supported:
        by_format = "; ".join(f"--to {name}: {', '.join(kinds)}" for name, kinds in QUANTIZATIONS.items())
        raise CheckpointError(f"--quantize {options.quantize} is not supported with --to {to}", hint=by_format)
    if verify and (options.quantize is not None or to == "gguf"):
        raise CheckpointError(
            "--verify compares exact weights, but those of the output are rounded", hint="use --perplexity instead"
        )
    if options.calibration is not None and (options.quantize is None or to == "gguf" or options.averaged):
        given = "--ema" if options.averaged else f"--to {to}" if to == "gguf" else f"--to {to} without --quantize"
        raise CheckpointError(
            f"--calibrate is not supported with {given}", hint="--to hf --quantize int4 --calibrate texts.txt"
        )
    if to == "gguf" and (options.dtype is not None or options.family is not None):
        given = "--dtype" if options.dtype is not None else "--family"
        raise CheckpointError(
            f"{given} is not supported with --to gguf", hint=f"use --quantize with one of {', '.join(supported)}"
        )


def _open_input(source: str | Location, to: str, options: ConvertOptions) -> WeightSource:
    """Open the weights to convert."""
    if to == "peft" and (options.tokens or options.vocab_size):
        raise CheckpointError(
            f"{source}: adding tokens is not supported with --to peft, since their rows belong to the base",
            hint="add them to the base and train the adapter on that, or convert --to hf",
        )
    if options.adapter is not None:
        return open_weights_with_adapter(options.adapter, source, families=options.families)
    weights = open_weight_source(
        source, settings=options.settings, averaged=options.averaged, families=options.families
    )
    if to == "peft" and not isinstance(weights, AdaptedWeightSource):
        raise CheckpointError(
            f"{source}: --to peft requires a LoRA adapter, but this checkpoint has the weights of a whole model",
            hint="use --to hf, or give a run that was trained with `lora`",
        )
    if options.tokens:
        return add_tokens(weights, options.tokens, options.vocab_size)
    return weights if options.vocab_size is None else ExtendedVocabularySource(weights, options.vocab_size)


def _check_transformers_options(kind: str, to: str, options: ConvertOptions) -> None:
    """Refuse formats and changes that require mega's own tensor names, for a module of transformers."""
    given = {"--to " + to: to not in ("hf", "mega"), "--family": bool(options.family)}
    given |= {"--quantize": options.quantize is not None}
    given |= {"--adapter": options.adapter is not None, "--vocab-size": options.vocab_size is not None}
    for option in (name for name, used in given.items() if used):
        raise CheckpointError(
            f"{option} is not supported with a model of implementation: transformers (model_type {kind})",
            hint="use --to hf, which writes the folder of transformers, and continue from there",
        )


@contextmanager
def _warn_of_non_finite_weights(weights: WeightSource, source: str | Location) -> Iterator[None]:
    """Log the tensors of `weights` that were read with NaN or infinities; `source` names the model."""
    found, read_slice = set[str](), weights.read_tensor_slice

    def read_and_check(name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        part = read_slice(name, offset, shape)
        # The sum is faster and needs no memory; torch has none of 8-bit floats.
        if part.itemsize > 1 and not part.sum().isfinite() and not part.isfinite().all():
            found.add(name)
        return part

    weights.read_tensor_slice = read_and_check  # type: ignore[method-assign]
    yield
    if found:
        names = abbreviate_name_list(found)
        logger.warning("%s: NaN or infinity in the tensor %s, which is converted unchanged", source, names)


def _write_peft(source: WeightSource, folder: Path, options: ConvertOptions, journal: WriteJournal) -> None:
    assert isinstance(source, AdaptedWeightSource)
    write_peft_folder(source.adapter, source.base, folder)


def _conversion_identity(source: str | Location, to: str, options: ConvertOptions) -> dict[str, Any]:
    """Return everything that determines the output, as JSON."""
    folder = resolve_run_to_checkpoint(source)
    return {
        "source": str(_absolute(folder)),
        "files": _file_stamps(folder),
        "adapter": None if options.adapter is None else _file_stamps(resolve_run_to_checkpoint(options.adapter)),
        "to": to,
        "options": {
            field.name: str(getattr(options, field.name))
            for field in dataclasses.fields(options)
            if field.name != "families"
        },
    }


def _file_stamps(source: Location) -> dict[str, str]:
    """Return a stamp for each file of the source that changes when the file changes."""
    if isinstance(source, Path) and source.is_file():
        stamps = open_storage_folder(source.parent).file_stamps()
        return {name: stamp for name, stamp in stamps.items() if name == source.name}
    return open_storage_folder(source).file_stamps()


def _write_hf(source: WeightSource, folder: Path, options: ConvertOptions, journal: WriteJournal) -> None:
    if source.model.transformers is not None:
        write_transformers_folder(source, folder, dtype=options.dtype, max_shard=options.max_shard)
        return
    _write_safetensors(source, folder, options, journal, METADATA)


def _write_mlx(source: WeightSource, folder: Path, options: ConvertOptions, journal: WriteJournal) -> None:
    mlx = options.quantize and f"mlx-{options.quantize}"
    _write_safetensors(source, folder, dataclasses.replace(options, quantize=mlx), journal, {"format": "mlx"})


def _write_safetensors(
    source: WeightSource, folder: Path, options: ConvertOptions, journal: WriteJournal, metadata: Mapping[str, str]
) -> None:
    plan = plan_hf_folder(
        source, family=options.family, dtype=options.dtype, max_shard=options.max_shard, quantize=options.quantize,
        calibration=options.calibration, metadata=metadata, families=options.families,
    )  # fmt: skip
    plan = dataclasses.replace(plan, others=_add_cards(source, plan.others, plan.quantization))
    if source.model.moe and source.model.moe.sinkhorn:
        logger.warning(
            "model.moe.sinkhorn applies only in training: like validation and `mega eval`, the exported model selects "
            "experts by score"
        )
    with ProgressBar("writing HuggingFace", total=plan.total_bytes, unit="bytes") as bar:
        journal.advance = bar.advance
        write_hf_folder(source, plan, folder, bar.advance, journal.write_once)


def _write_gguf(source: WeightSource, folder: Path, options: ConvertOptions, journal: WriteJournal) -> None:
    plan = plan_gguf_folder(source, options.quantize or "f16", options.max_shard)
    logger.info("writing %s", plan.quantization)
    cards = _add_cards(source, {}, plan.quantization)
    with ProgressBar("writing GGUF", total=plan.total_bytes, unit="bytes") as bar:
        journal.advance = bar.advance
        write_gguf_folder(source, plan, folder, bar.advance, journal.write_once, cards)


def _add_cards(
    source: WeightSource, others: Mapping[str, Path | bytes], quantization: str | None
) -> Mapping[str, Path | bytes]:
    """Add the cards of a training run, and a section on the quantization."""
    if isinstance(source, MegaWeightSource):
        parameters = sum(math.prod(source.tensor_shape(name)) for name in source.tensor_names())
        others = {**others, **build_model_cards(source.checkpoint, parameters, others)}
    return others if quantization is None else {**others, MODEL_CARD: add_quantization_to_readme(others, quantization)}


def _read_training_state(source: WeightSource, options: ConvertOptions) -> ConvertedTrainingState | None:
    """Return the optimizer state to carry over, else None; log it or the reason."""
    if not isinstance(source, MegatronSource | HfSource):
        return None
    stored = source.tensor_dtype(source.tensor_names()[0])
    try:
        if isinstance(source, HfSource):
            training = source.read_training_state(options.dtype or stored)
        elif options.dtype is not None:
            raise OptimizerNotConverted("the optimizer state is not supported with a cast of the weights (--dtype)")
        else:
            training = source.read_training_state()
    except OptimizerNotConverted as error:
        logger.warning("only the weights are converted: %s", error)
        return None
    if training is not None:
        logger.info(
            "the optimizer state of step %d is converted; the learning rate schedule, Adam's settings and random generator "
            "states are not: set them in run.yaml",
            training.step,
        )
    return training


def _prepare_megatron(source: WeightSource, options: ConvertOptions) -> MegatronWriteInput:
    """Return Megatron's tensors and settings of a source, for parallel sizes that Megatron can load."""
    writing = MegatronWriteInput(source, options.tp, options.pp, options.dtype, options.implementation)
    ranks, local = options.megatron_format == "torch", options.implementation == "local"
    check_megatron_parallel_sizes(source.model, writing.parts, options.tp, options.pp, ranks=ranks, local=local)
    return writing


def _write_megatron(source: WeightSource, folder: Path, options: ConvertOptions, journal: WriteJournal) -> None:
    writing = _prepare_megatron(source, options)
    with ProgressBar("writing Megatron", total=writing.total_bytes, unit="bytes") as bar:
        journal.advance = bar.advance
        write_megatron_release_folder(
            writing, folder, MEGATRON_FORMATS[options.megatron_format], bar.advance, journal.write_once
        )


MEGATRON_FORMATS = {"torch_dist": write_megatron_dist_checkpoint, "torch": write_megatron_legacy_checkpoint}
_WRITERS: Mapping[str, Callable[[WeightSource, Path, ConvertOptions, WriteJournal], None]] = {
    "hf": _write_hf, "megatron": _write_megatron, "peft": _write_peft, "mlx": _write_mlx,
    "gguf": _write_gguf,
}  # fmt: skip


def _verify_output(
    weights: WeightSource, training: ConvertedTrainingState | None, folder: Location, options: ConvertOptions
) -> None:
    """Read the output back and check that it equals the input bit for bit."""
    kind: Implementation = "mega" if weights.model.transformers is None else "transformers"
    output = open_weight_source(folder, settings=options.settings, implementation=kind, families=options.families)
    _compare_weights(weights, output, options.dtype)
    if training is not None:
        _compare_optimizer(training, Checkpoint.open_folder(folder))


def _compare_weights(source: WeightSource, output: WeightSource, dtype: torch.dtype | None) -> None:
    """Check that `output` equals `source` bit for bit after the cast."""
    names = list(source.tensor_names())
    total = sum(output.tensor_dtype(name).itemsize * torch.Size(output.tensor_shape(name)).numel() for name in names)
    with ProgressBar("comparing", total=total, unit="bytes") as bar:
        for name in names:
            kind = choose_cast_dtype(source, name, dtype)
            for offset, shape in split_into_contiguous_slices(source.tensor_shape(name), kind):
                read, written = (each.read_tensor_slice(name, offset, shape) for each in (source, output))
                _check_equal(name, read.to(kind), written)
                bar.advance(written.nbytes)


def _compare_optimizer(training: ConvertedTrainingState, output: Checkpoint) -> None:
    """Check that the optimizer state in a mega checkpoint equals `training` bit for bit."""
    total = sum(4 * math.prod(output.tensor_shape(key)) for key in output.tensor_keys(OPTIMIZER))
    with ProgressBar("comparing the optimizer", total=total, unit="bytes") as bar:
        for kind, tensors in training.tensors.items():
            for name in tensors.tensor_names():
                key = f"{OPTIMIZER}{kind}/{name}"
                for offset, shape in split_into_contiguous_slices(tensors.tensor_shape(name), torch.float32):
                    written = output.read_tensor(key, offset, shape)
                    _check_equal(key, tensors.read_tensor_slice(name, offset, shape).float(), written)
                    bar.advance(written.nbytes)


def _check_equal(name: str, read: Tensor, written: Tensor) -> None:
    if read.dtype != written.dtype or not torch.equal(_as_bytes(read), _as_bytes(written)):
        raise CheckpointError(f"{name}: the written tensor differs from the source", hint="check the disk")


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
                f"{final}: --to {to} is not supported on an object store",
                hint="convert to a local folder and upload that",
            )
        if (final / MANIFEST).is_file():
            raise CheckpointError(f"{final}: exists already", hint="choose another destination, or remove it")
        return
    if to == "gguf" and final.suffix == SUFFIX:
        raise CheckpointError(
            f"{final}: --to gguf creates a folder with the file", hint=f"give the name of a folder, e.g. {final.stem}"
        )
    if not final.exists():
        return
    if not overwrite:
        raise CheckpointError(f"{final}: exists already", hint="choose another folder, or add --overwrite")
    if not _is_replaceable(final, source):
        raise CheckpointError(
            f"{final}: only a model folder that does not contain the source can be replaced",
            hint="choose another folder",
        )


def _is_replaceable(final: Path, source: Location) -> bool:
    """Return whether `final` is a model folder that neither is nor contains the source."""
    has_model = any((final / name).is_file() for name in ("config.json", "manifest.json", PEFT_CONFIG, TRACKER)) or any(
        final.glob(f"*{SUFFIX}")
    )
    has_source = isinstance(source, Path) and final.resolve() in (source.resolve(), *source.resolve().parents)
    return has_model and not has_source
