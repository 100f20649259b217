"""`mega ckpt convert` and `mega ckpt merge-adapter`: conversion of models between formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mega_cli.model_options import ExtensionOption
from mega_common.bounded_parsing import read_utf8_text
from mega_common.errors import ConfigError
from mega_common.progress_logging import logger

if TYPE_CHECKING:
    from mega_ckpt.families import ModelFamily
    from mega_ckpt.formats.quantized_parts import Calibration
    from mega_common.object_store import Location


class ConversionTarget(StrEnum):
    """Target formats of `mega ckpt convert --to`: HuggingFace, mega, Megatron-Core, a PEFT adapter, GGUF or MLX."""

    HF = "hf"
    MEGA = "mega"
    MEGATRON = "megatron"
    PEFT = "peft"
    GGUF = "gguf"
    MLX = "mlx"


class WeightQuantization(StrEnum):
    """Quantizations of `mega ckpt convert --quantize`; each format supports some of them."""

    FP8 = "fp8"
    FP8_BLOCK = "fp8-block"
    INT8 = "int8"
    INT4 = "int4"
    INT4_ASYM = "int4-asym"
    MXFP4 = "mxfp4"
    F16 = "f16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_K = "q4_k"


class MegatronCheckpointFormat(StrEnum):
    """Checkpoint formats of Megatron-Core that `mega ckpt convert` can write: `torch_dist` or `torch`."""

    TORCH_DIST = "torch_dist"
    TORCH = "torch"


class MegatronTransformerImpl(StrEnum):
    """Values of Megatron's `--transformer-impl` in the run that will load a converted checkpoint.
    They are `local` or Transformer Engine layers.
    """

    TRANSFORMER_ENGINE = "transformer_engine"
    LOCAL = "local"


class WeightDtype(StrEnum):
    """Dtypes that `mega ckpt convert` can cast floating-point weights to."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


Convertible = Annotated[
    str,
    typer.Argument(
        help="A mega checkpoint, a run folder (latest checkpoint), a HuggingFace or Megatron folder or a GGUF file; mega "
        "checkpoints also by URL."
    ),
]


Converted = Annotated[str, typer.Argument(help="Folder to create; with --to mega also a URL.")]


To = Annotated[
    ConversionTarget,
    typer.Option(
        help="Target format. hf: HuggingFace folder (safetensors). mega: checkpoint to train from. megatron: Megatron-Core checkpoint. peft: LoRA adapter only. gguf: folder with a file for llama.cpp. mlx: folder for mlx-lm."
    ),
]


Cast = Annotated[WeightDtype | None, typer.Option(help="Dtype of the converted weights; default: unchanged.")]


Family = Annotated[
    str | None,
    typer.Option(
        help="With --to hf: model_type to write, e.g. llama or qwen3; default: the first that supports the model."
    ),
]


MaxShardSize = Annotated[
    str | None, typer.Option(help="Maximum size of a safetensors file, e.g. 5GB; default: as in the source.")
]


FormatOption = Annotated[
    MegatronCheckpointFormat,
    typer.Option(
        "--format",
        help="With --to megatron: torch_dist (distributed checkpoint), or torch (legacy, one file per rank).",
    ),
]


Tp = Annotated[int, typer.Option(min=1, help="With --to megatron: tensor-parallel size of the target.")]


Pp = Annotated[int, typer.Option(min=1, help="With --to megatron: pipeline-parallel size of the target.")]


TransformerImpl = Annotated[
    MegatronTransformerImpl,
    typer.Option(help="With --to megatron --format torch: value of Megatron's --transformer-impl in the target run."),
]


Settings = Annotated[
    Path | None,
    typer.Option(
        help="YAML file with model settings that are missing or wrong in a Megatron checkpoint, e.g. 'rope_theta: 500000'."
    ),
]


Verify = Annotated[
    bool,
    typer.Option(
        "--verify", help="Compare all elements and the logits of source and result before the result is published."
    ),
]


VerifyData = Annotated[
    Path | None,
    typer.Option(
        metavar="PREFIX",
        help="Data set for the comparison of logits; default: a built-in text and the model's tokenizer.",
    ),
]


Quantize = Annotated[
    WeightQuantization | None,
    typer.Option(
        help="Quantize the weights, rounded to the nearest or by --calibrate. hf (compressed-tensors, for vLLM): fp8, fp8-block, int8, int4, "
        "int4-asym (with zero points), mxfp4. gguf: f16 (default), q8_0, q4_0, q4_k. mlx: int8, int4."
    ),
]


Calibrate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|PREFIX",
        help="Text file or token data set: round the quantized weights so that the outputs of linear layers on it change "
        "least (GPTQ). Up to 32,768 tokens are used. With --to hf or mlx.",
    ),
]


Perplexity = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|PREFIX",
        help="Text file or token data set that was not trained on: print the perplexity of source and result.",
    ),
]


Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing destination, after the conversion is complete.")
]


def convert_command(
    source: Convertible,
    destination: Converted,
    to: To,
    dtype: Cast = None,
    family: Family = None,
    max_shard_size: MaxShardSize = None,
    megatron_format: FormatOption = MegatronCheckpointFormat.TORCH_DIST,
    tp: Tp = 1,
    pp: Pp = 1,
    transformer_impl: TransformerImpl = MegatronTransformerImpl.TRANSFORMER_ENGINE,
    config: Settings = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="New vocabulary size; new rows are initialised with the mean of the others."),
    ] = None,
    add_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|TOKEN,...",
            help="Add tokens to the tokenizer and the embedding, e.g. '<think>,</think>'; a FILE has one token per line.",
        ),
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="Convert the averaged weights (EMA) of a run with train.ema.")
    ] = False,
    extension: ExtensionOption = None,
    quantize: Quantize = None,
    calibrate: Calibrate = None,
    verify: Verify = False,
    verify_data: VerifyData = None,
    perplexity: Perplexity = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a model's weights, configuration and tokenizer to another format, at a destination that appears when complete.

    From Megatron to mega the optimizer state is converted too, if its format does not depend on the ranks that wrote it.

    With --perplexity the loss in quality is measured, by mega in fp32.

    After an interruption, the same command resumes with the next file.
    """
    from mega_ckpt import convert as converting
    from mega_common.strict_config import load_yaml_mapping

    options = converting.ConvertOptions(
        dtype=converting.DTYPES[dtype.value] if dtype else None,
        family=family,
        max_shard=_parse_bytes(max_shard_size) if max_shard_size else None,
        megatron_format=megatron_format.value,
        tp=tp,
        pp=pp,
        implementation=transformer_impl.value,
        settings=load_yaml_mapping(config) if config else None,
        averaged=ema,
        vocab_size=vocab_size,
        tokens=_read_new_tokens(add_tokens) if add_tokens is not None else (),
        families=_load_families(extension) if extension else (),
        quantize=quantize.value if quantize else None,
        calibration=_open_calibration(source, calibrate, perplexity) if calibrate is not None else None,
    )
    verify = verify or verify_data is not None
    checks: list[Callable[[Location], None] | None] = (
        [_build_perplexity_check(source, perplexity)] if perplexity is not None else []
    )
    if verify and not (options.settings or ema or vocab_size or add_tokens):
        checks.append(_build_logits_check(source, verify_data, extension or []))

    def check_result(made: Location) -> None:
        for check in filter(None, checks):
            check(made)

    converting.convert_checkpoint(
        source, destination, to.value, options=options, verify=verify, check=check_result, overwrite=overwrite
    )
    print(destination)


def merge_adapter_command(
    base: Convertible,
    adapter: Annotated[str, typer.Argument(help="LoRA adapter: a run that trained one, or a PEFT folder.")],
    destination: Converted,
    to: To = ConversionTarget.HF,
    dtype: Cast = None,
    overwrite: Overwrite = False,
) -> None:
    """Merge a LoRA adapter into the weights of its base model; the merged model is used without the adapter.

    If the base model is still at the path that the run was trained from, `mega ckpt convert RUN OUT --to hf` does the
    same.
    """
    from mega_ckpt import convert as converting

    options = converting.ConvertOptions(dtype=converting.DTYPES[dtype.value] if dtype else None, adapter=adapter)
    converting.convert_checkpoint(base, destination, to.value, options=options, overwrite=overwrite)
    print(destination)


def _read_new_tokens(given: str) -> tuple[str, ...]:
    """Return the tokens of a file with one token per line, or of a comma-separated list."""
    listed = read_utf8_text(Path(given), ConfigError).splitlines() if Path(given).is_file() else given.split(",")
    tokens = tuple(token for token in listed if token.strip())
    if not tokens:
        raise ConfigError(f"--add-tokens {given}: found no tokens", hint="--add-tokens '<think>,</think>'")
    if duplicates := [token for token in dict.fromkeys(tokens) if tokens.count(token) > 1]:
        raise ConfigError(f"--add-tokens: {duplicates[0]!r} is given twice", hint="leave one out")
    return tokens


def _load_families(extensions: list[str]) -> tuple[ModelFamily, ...]:
    """Return the families of HuggingFace folders that the extensions add."""
    from mega_trainer.config.extensions import load_extensions

    return tuple(load_extensions(extensions).families)


def _build_logits_check(source: str, data: Path | None, extensions: Sequence[str]) -> Callable[[Location], None] | None:
    """Return a function that compares the logits of `source` and of the converted model, or None if that is not possible."""
    try:
        from mega_eval.logit_comparison import compare_logits
    except ModuleNotFoundError as error:
        if data is not None or error.name not in ("mega_eval", "mega_trainer", "mega_data"):
            raise
        logger.warning("--verify compares tensors, but not logits: %s is not installed", error.name)
        return None
    from mega_ckpt.source import read_model_config

    families = _load_families([*extensions]) if extensions else ()
    if read_model_config(source, families=families).retro is not None:
        logger.warning("--verify compares tensors, but not logits: a retrieval model requires neighbors of each text")
        return None

    def check_logits(made: Location) -> None:
        logger.info("%s", compare_logits(source, made, data, extensions=extensions))

    return check_logits


def _open_calibration(source: str, data: Path, perplexity: Path | None) -> Calibration:
    """Return the calibration data of --calibrate, which must not be those of --perplexity."""
    from mega_eval.weight_calibration import TextCalibration

    _check_text_data("--calibrate", data, "calibration.txt")
    if perplexity is not None and perplexity.resolve() == data.resolve():
        raise ConfigError(
            f"--perplexity {perplexity} conflicts with --calibrate, which adapts the weights to the same text",
            hint="measure on a text that is not used otherwise",
        )
    return TextCalibration.open_calibration_data(source, data)


def _check_text_data(option: str, data: Path, example: str) -> None:
    if not data.is_file() and not data.with_name(f"{data.name}.bin").is_file():
        raise ConfigError(f"{option} {data}: neither a text file nor a token data set", hint=f"{option} {example}")


def _build_perplexity_check(source: str, data: Path) -> Callable[[Location], None]:
    """Return a function that prints the perplexity of `source` and of the converted model."""
    from mega_eval.perplexity_comparison import compare_perplexity

    _check_text_data("--perplexity", data, "held-out.txt")

    def print_perplexity(made: Location) -> None:
        print(compare_perplexity(source, made, data))

    return print_perplexity


def _parse_bytes(text: str) -> int:
    """Parse a size such as '5GB', in decimal units.

    Raises:
        ConfigError: for anything else.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    number, unit = text[:-2].strip(), text[-2:].upper()
    if unit not in units or not number.isdigit() or int(number) == 0:
        raise ConfigError(
            f"--max-shard-size must be a number with KB, MB, GB or TB, found {text!r}", hint="--max-shard-size 5GB"
        )
    return int(number) * units[unit]
