"""`mega ckpt`: convert, inspect, verify, compare and combine checkpoints; push and pull models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mega_common.bounded_parsing import read_utf8_text
from mega_common.errors import ConfigError
from mega_common.progress_logging import logger

if TYPE_CHECKING:
    from mega_common.object_store import Location

app = typer.Typer(
    no_args_is_help=True, help="Convert, inspect, verify, compare, prune, average, push and pull checkpoints."
)


class ConversionTarget(StrEnum):
    """Formats to convert to."""

    HF = "hf"
    MEGA = "mega"
    MEGATRON = "megatron"
    PEFT = "peft"


class MegatronCheckpointFormat(StrEnum):
    """Checkpoint formats of Megatron-Core."""

    TORCH_DIST = "torch_dist"
    TORCH = "torch"


class MegatronLayerSpec(StrEnum):
    """Layer specifications of Megatron-Core (`local` or Transformer Engine)."""

    TRANSFORMER_ENGINE = "transformer_engine"
    LOCAL = "local"


class WeightDtype(StrEnum):
    """Dtypes to cast floating-point weights to."""

    FP64 = "fp64"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Checkpoint = Annotated[
    str,
    typer.Argument(
        help="A mega checkpoint, or a run folder (latest checkpoint); a path or a URL such as s3://bucket/run."
    ),
]

Looked = Annotated[
    str,
    typer.Argument(help="A mega checkpoint, a run folder (latest checkpoint), a HuggingFace folder or a GGUF file."),
]

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
        help="Target format. hf: HuggingFace folder (safetensors). mega: checkpoint to train from. megatron: Megatron-Core checkpoint. peft: LoRA adapter only."
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
    MegatronLayerSpec,
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
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing destination, after the conversion is complete.")
]


@app.command("convert", epilog="Example: mega ckpt convert runs/llama3-8b out/hf --to hf --dtype bf16 --verify")
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
    transformer_impl: TransformerImpl = MegatronLayerSpec.TRANSFORMER_ENGINE,
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
    verify: Verify = False,
    verify_data: VerifyData = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a model's weights, configuration and tokenizer. The destination appears when it is complete.

    From Megatron to mega the optimizer state is converted too, if its format does not depend on the ranks that wrote it.

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
    )
    verify = verify or verify_data is not None
    check = (
        _build_logits_check(source, verify_data)
        if verify and not (options.settings or ema or vocab_size or add_tokens)
        else None
    )
    converting.convert_checkpoint(
        source, destination, to.value, options=options, verify=verify, check=check, overwrite=overwrite
    )
    print(destination)


@app.command(
    "merge-adapter", epilog="Example: mega ckpt merge-adapter models/SmolLM2-135M runs/tuned out/merged --dtype bf16"
)
def merge_adapter_command(
    base: Convertible,
    adapter: Annotated[str, typer.Argument(help="LoRA adapter: a run that trained one, or a PEFT folder.")],
    destination: Converted,
    to: To = ConversionTarget.HF,
    dtype: Cast = None,
    overwrite: Overwrite = False,
) -> None:
    """Merge a LoRA adapter into the weights of its base model; the result needs no adapter.

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


def _build_logits_check(source: str, data: Path | None) -> Callable[[Location], None] | None:
    """Return a function that compares the logits of `source` and of the converted model, or None if that is not possible."""
    try:
        from mega_eval.logit_comparison import compare_logits
    except ModuleNotFoundError as error:
        if data is not None or error.name not in ("mega_eval", "mega_trainer", "mega_data"):
            raise
        logger.warning("--verify compares tensors, but not logits: %s is not installed", error.name)
        return None
    from mega_ckpt.source import read_model_config

    if read_model_config(source).retro is not None:
        logger.warning("--verify compares tensors, but not logits: a retrieval model requires neighbors of each text")
        return None

    def check_logits(made: Location) -> None:
        logger.info("%s", compare_logits(source, made, data))

    return check_logits


@app.command("inspect", epilog="Example: mega ckpt inspect runs/llama3-8b/checkpoints/step-00001000 --json")
def inspect_command(path: Looked, as_json: Json = False) -> None:
    """Print settings, step, state and tensor names of a checkpoint, a HuggingFace folder or a GGUF file.

    Tensor data are not read.
    """
    from mega_ckpt.formats.megatron_source import is_megatron_folder
    from mega_ckpt.inspect_foreign import inspect_foreign, inspect_megatron, is_foreign_model
    from mega_ckpt.source import resolve_checkpoint
    from mega_ckpt.verify import inspect_checkpoint

    folder = resolve_checkpoint(path)
    if isinstance(folder, Path) and is_megatron_folder(folder):
        _print_report(inspect_megatron(folder), as_json)
    else:
        _print_report(inspect_foreign(folder) if is_foreign_model(folder) else inspect_checkpoint(folder), as_json)


@app.command("verify", epilog="Example: mega ckpt verify runs/llama3-8b --finite")
def verify_command(
    path: Looked,
    finite: Annotated[bool, typer.Option("--finite", help="Also check for NaN and infinities.")] = False,
    as_json: Json = False,
) -> None:
    """Compare every byte of a checkpoint with its checksums. Exit status 2 if it is damaged.

    HuggingFace and GGUF models have no checksums: for them, the check is that every tensor can be read.
    """
    from mega_ckpt.inspect_foreign import is_foreign_model, verify_foreign
    from mega_ckpt.source import resolve_checkpoint
    from mega_ckpt.verify import verify_checkpoint

    folder = resolve_checkpoint(path)
    report = (verify_foreign if is_foreign_model(folder) else verify_checkpoint)(folder, finite=finite)
    _print_report(report, as_json)
    if not report.ok:
        raise typer.Exit(2)


@app.command("diff", epilog="Example: mega ckpt diff runs/a runs/b/checkpoints/step-00000500")
def diff_command(
    a: Checkpoint,
    b: Checkpoint,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints: settings, and every tensor bit for bit. Exit status 2 if they differ."""
    from mega_ckpt.source import resolve_checkpoint
    from mega_ckpt.verify import diff_checkpoints

    found = diff_checkpoints(resolve_checkpoint(a), resolve_checkpoint(b))
    _print_report(found, as_json)
    if not found.is_identical:
        raise typer.Exit(2)


@app.command("prune", epilog="Example: mega ckpt prune runs/llama3-8b/checkpoints/step-00001000 out/weights")
def prune_command(
    source: Checkpoint,
    destination: Annotated[str, typer.Argument(help="Folder to create; a path or a URL.")],
) -> None:
    """Copy the weights of a mega checkpoint, without optimizer and trainer state.

    The copy has a fraction of the size, and can be used for inference or to initialise a run.
    """
    from mega_ckpt.derive_checkpoint import prune_checkpoint

    prune_checkpoint(source, destination)
    print(destination)


@app.command(
    "average",
    epilog="Example: mega ckpt average runs/a runs/b models/Llama-3.2-1B --output out/mean --weights 0.5,0.3,0.2",
)
def average_command(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Two or more models: mega checkpoints, run folders (latest checkpoint) or HuggingFace folders."
        ),
    ],
    output: Annotated[str, typer.Option(help="mega checkpoint to create, with the dtype of the first source.")],
    weights: Annotated[
        str | None,
        typer.Option(help="Weight of each source, e.g. 0.5,0.3,0.2; normalised to sum 1. Default: equal weights."),
    ] = None,
) -> None:
    """Compute the weighted mean of the weights of several checkpoints of one model."""
    from mega_ckpt.derive_checkpoint import average_checkpoints

    average_checkpoints(sources, output, weights=_parse_numbers(weights) if weights is not None else None)
    print(output)


@app.command("upcycle", epilog="Example: mega ckpt upcycle models/Llama-3.2-1B out/moe --experts 8 --top-k 2")
def upcycle_command(
    source: Checkpoint,
    destination: Annotated[str, typer.Argument(help="mega checkpoint to create.")],
    experts: Annotated[int, typer.Option(help="Experts per layer, e.g. 8.", min=1)],
    top_k: Annotated[int, typer.Option(help="Experts per token, e.g. 2.", min=1)],
    expert_ffn: Annotated[
        int | None,
        typer.Option(
            help="Width of an expert; must divide the width of the dense feed-forward block. Default: the dense width.",
            min=1,
        ),
    ] = None,
    aux_loss: Annotated[float, typer.Option(help="Weight of the load balancing loss in later training.", min=0)] = 0.01,
    seed: Annotated[int, typer.Option(help="Random seed of the router weights.")] = 1234,
) -> None:
    """Convert a dense model to a mixture of experts: copies or slices of its feed-forward blocks, and a new router.

    The result computes the same function as the dense model until it is trained further.
    """
    from mega_ckpt.upcycle_moe import upcycle_to_moe

    upcycle_to_moe(
        source, destination, experts=experts, top_k=top_k, expert_ffn=expert_ffn, aux_loss=aux_loss, seed=seed
    )
    print(destination)


@app.command(
    "shrink", epilog="Example: mega ckpt shrink models/Llama-3.1-8B out/4b --ffn 9216 --hidden 3072 --data data/wiki"
)
def shrink_command(
    source: Convertible,
    destination: Annotated[str, typer.Argument(help="mega checkpoint to create.")],
    data: Annotated[str, typer.Option(metavar="PREFIX", help="Data set on which importance is measured.")],
    layers: Annotated[int | None, typer.Option(help="Number of layers to keep; default: all.", min=1)] = None,
    ffn: Annotated[int | None, typer.Option(help="New width of the feed-forward blocks, e.g. 9216.", min=1)] = None,
    heads: Annotated[
        int | None, typer.Option(help="New number of query heads; key/value heads are reduced in proportion.", min=1)
    ] = None,
    hidden: Annotated[int | None, typer.Option(help="New hidden size, e.g. 3072.", min=1)] = None,
    windows: Annotated[int, typer.Option(help="Sequences of the data set to use.", min=1)] = 256,
    seq_length: Annotated[
        int | None, typer.Option(help="Tokens per sequence; default: the model's maximum, at most 2048.", min=2)
    ] = None,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Prune a dense decoder to a smaller model: remove the least important layers, heads and channels (Minitron).

    Importance is measured on a data set. Train the result afterwards, best with `objective: {kind: distill}` and SOURCE as the teacher.
    """
    from mega_ckpt.shrink_model import ShrinkSizes, shrink_model, shrunk_config
    from mega_ckpt.source import open_weight_source
    from mega_eval.model_loading import load_inference_model, select_device
    from mega_eval.pruning_importance import measure_importance

    opened, sizes = open_weight_source(source), ShrinkSizes(layers, ffn, heads, hidden)
    shrunk_config(opened.model, sizes)  # before any work
    model = load_inference_model(source, device=select_device(device))
    found = measure_importance(model, Path(data), seq_length or min(2048, model.config.max_position), windows=windows)
    kept = shrink_model(opened, destination, found, sizes)
    removed = sorted(set(range(opened.model.num_layers)) - set(kept.layers.tolist()))
    if removed:
        logger.info("removed layers: %s", ", ".join(map(str, removed)))
    print(destination)


RepoId = Annotated[str, typer.Argument(help="Repository on the hub: user/name.")]


@app.command(
    "push",
    epilog="Example: mega ckpt push out/hf ada/llama3-8b --private --message 'After 1,000 steps'. Log in: hf auth login",
)
def push_command(
    folder: Annotated[Path, typer.Argument(help="HuggingFace folder, e.g. from `mega ckpt convert --to hf`.")],
    repo_id: RepoId,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to; default: main.")] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
) -> None:
    """Upload a HuggingFace folder to the HuggingFace hub. Weights are uploaded as safetensors only, never as pickle files."""
    from mega_ckpt.hub import push_to_hub

    print(push_to_hub(folder, repo_id, private=private, revision=revision, message=message))


@app.command("pull", epilog="Example: mega ckpt pull meta-llama/Llama-3.2-1B models/Llama-3.2-1B --revision main")
def pull_command(
    repo_id: RepoId,
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; default: main.")] = None,
) -> None:
    """Download a model from the HuggingFace hub, except pickled weights. After an interruption, the same command resumes."""
    from mega_ckpt.hub import pull_from_hub

    pull_from_hub(repo_id, folder, revision=revision)
    print(folder)


def _print_report(result: Any, as_json: bool) -> None:
    print(json.dumps(dataclasses.asdict(result), default=str, indent=1) if as_json else result)


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


def _parse_numbers(text: str) -> list[float]:
    """Parse a comma-separated list such as '0.5,0.3,0.2'.

    Raises:
        ConfigError: for anything else.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--weights must be comma-separated numbers, found {text!r}", hint="--weights 0.5,0.3,0.2"
        ) from None
