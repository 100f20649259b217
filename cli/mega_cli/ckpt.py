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
    typer.Argument(help="A mega checkpoint, or a run folder for its newest one; a path, or a URL: s3://bucket/run."),
]

Looked = Annotated[
    str,
    typer.Argument(help="A mega checkpoint, a run folder for its newest one, a HuggingFace folder or a GGUF file."),
]

Convertible = Annotated[
    str,
    typer.Argument(
        help="A mega checkpoint, a run folder (its newest checkpoint), a HuggingFace or Megatron folder, a GGUF file; mega "
        "also as URL."
    ),
]
Converted = Annotated[str, typer.Argument(help="The folder to make; a URL with --to mega.")]
To = Annotated[
    ConversionTarget,
    typer.Option(
        help="hf: config.json and safetensors. mega: a checkpoint to train from. megatron: a release. peft: an adapter alone."
    ),
]
Cast = Annotated[WeightDtype | None, typer.Option(help="Cast the weights; default: as they are.")]
Family = Annotated[
    str | None, typer.Option(help="model_type to write (llama, qwen3, ...); default: the first that fits.")
]
MaxShardSize = Annotated[
    str | None, typer.Option(help="Most bytes in one safetensors file: 500MB, 5GB, ...; default: as the source.")
]
FormatOption = Annotated[
    MegatronCheckpointFormat, typer.Option("--format", help="Of Megatron: torch_dist, or torch for a file a rank.")
]
Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks that Megatron's files are for.")]
Pp = Annotated[int, typer.Option(min=1, help="Pipeline stages that Megatron's files are for.")]
TransformerImpl = Annotated[
    MegatronLayerSpec, typer.Option(help="Megatron's flag of that name; --format torch depends on it.")
]
Settings = Annotated[
    Path | None, typer.Option(help="YAML with settings of the model that a Megatron checkpoint lacks or has wrong.")
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Compare every element, and the logits of both sides, before all is named.")
]
VerifyData = Annotated[
    Path | None,
    typer.Option(
        metavar="PREFIX", help="Take tokens of this data set for the logits; default: a text, by the model's tokenizer."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the destination once all is done.")]


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
        int | None, typer.Option(min=1, help="Tokens of the vocabulary: new ones begin as the mean of the others.")
    ] = None,
    add_tokens: Annotated[
        str | None,
        typer.Option(metavar="FILE|TOKEN,...", help="Add tokens to the tokenizer and rows for them; FILE: one a line."),
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="The averages that a run with train.ema keeps of its weights.")
    ] = False,
    verify: Verify = False,
    verify_data: VerifyData = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a model's weights and the files that belong to it. The result appears when it is complete.

    From Megatron to mega the optimizer's state comes along, where its form does not depend on the ranks that wrote it.

    After a kill or an interrupt, the same command goes on with the file that it was at.
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
    adapter: Annotated[str, typer.Argument(help="A run that trained one, or a folder of PEFT's.")],
    destination: Converted,
    to: To = ConversionTarget.HF,
    dtype: Cast = None,
    overwrite: Overwrite = False,
) -> None:
    """Merge a LoRA adapter into the weights of its base model; the result needs no adapter.

    A run's adapter knows its base, so that `mega ckpt convert RUN OUT --to hf` does the same while that is in its place.
    """
    from mega_ckpt import convert as converting

    options = converting.ConvertOptions(dtype=converting.DTYPES[dtype.value] if dtype else None, adapter=adapter)
    converting.convert_checkpoint(base, destination, to.value, options=options, overwrite=overwrite)
    print(destination)


def _read_new_tokens(given: str) -> tuple[str, ...]:
    """Return the tokens of a file, one a line, or those of a comma-separated list."""
    told = read_utf8_text(Path(given), ConfigError).splitlines() if Path(given).is_file() else given.split(",")
    tokens = tuple(token for token in told if token.strip())
    if not tokens:
        raise ConfigError(f"--add-tokens {given}: names no token", hint="such as --add-tokens '<think>,</think>'")
    if twice := [token for token in dict.fromkeys(tokens) if tokens.count(token) > 1]:
        raise ConfigError(f"--add-tokens: {twice[0]!r} is there twice", hint="leave one out")
    return tokens


def _build_logits_check(source: str, data: Path | None) -> Callable[[Location], None] | None:
    """Return a function that compares the logits of a converted model with those of `source`, or None if the package
    that runs models is not installed.
    """
    from mega_common.progress_logging import logger

    try:
        from mega_eval.logit_comparison import compare_logits
    except ModuleNotFoundError as error:
        if data is not None or error.name not in ("mega_eval", "mega_trainer", "mega_data"):
            raise
        logger.warning("--verify compares tensors, but no logits: %s is not installed", error.name)
        return None
    from mega_ckpt.source import read_model_config

    if read_model_config(source).retro is not None:
        logger.warning("--verify compares tensors, but no logits: a model with retrieval needs neighbors for each text")
        return None

    def check_logits(made: Location) -> None:
        logger.info("%s", compare_logits(source, made, data))

    return check_logits


@app.command("inspect", epilog="Example: mega ckpt inspect runs/llama3-8b/checkpoints/step-00001000 --json")
def inspect_command(path: Looked, as_json: Json = False) -> None:
    """Show the contents of a checkpoint, a HuggingFace folder or a GGUF file: settings, step, state, tensors. Reads no
    tensor data.
    """
    from mega_ckpt.formats.megatron_source import is_megatron_folder
    from mega_ckpt.inspect_foreign import inspect_foreign, inspect_megatron, is_foreign_model
    from mega_ckpt.source import resolve_checkpoint
    from mega_ckpt.verify import inspect_checkpoint

    folder = resolve_checkpoint(path)
    if isinstance(folder, Path) and is_megatron_folder(folder):
        _print_progress(inspect_megatron(folder), as_json)
    else:
        _print_progress(inspect_foreign(folder) if is_foreign_model(folder) else inspect_checkpoint(folder), as_json)


@app.command("verify", epilog="Example: mega ckpt verify runs/llama3-8b --finite")
def verify_command(
    path: Looked,
    finite: Annotated[bool, typer.Option("--finite", help="Look for NaN and infinities too.")] = False,
    as_json: Json = False,
) -> None:
    """Compare every byte of a checkpoint with its checksums. Exit status 2 if something is damaged.

    HuggingFace and GGUF models have no checksums: there, every tensor is read.
    """
    from mega_ckpt.inspect_foreign import is_foreign_model, verify_foreign
    from mega_ckpt.source import resolve_checkpoint
    from mega_ckpt.verify import verify_checkpoint

    folder = resolve_checkpoint(path)
    report = (verify_foreign if is_foreign_model(folder) else verify_checkpoint)(folder, finite=finite)
    _print_progress(report, as_json)
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
    _print_progress(found, as_json)
    if not found.is_identical:
        raise typer.Exit(2)


@app.command("prune", epilog="Example: mega ckpt prune runs/llama3-8b/checkpoints/step-00001000 out/weights")
def prune_command(
    source: Checkpoint,
    destination: Annotated[str, typer.Argument(help="The folder to make; a path or a URL.")],
) -> None:
    """Copy a mega checkpoint without optimizer and trainer state: a fraction of its size, for starting a run or for
    inference.
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
        list[str], typer.Argument(help="Two or more of: mega checkpoint, run folder (its newest), HuggingFace folder.")
    ],
    output: Annotated[str, typer.Option(help="The mega checkpoint to make, in the dtype of the first source.")],
    weights: Annotated[
        str | None, typer.Option(help="Their shares, divided by their sum: 0.5,0.3,0.2; default: all alike.")
    ] = None,
) -> None:
    """Compute the weighted mean of the weights of several checkpoints of one model."""
    from mega_ckpt.derive_checkpoint import average_checkpoints

    average_checkpoints(sources, output, weights=_parse_numbers(weights) if weights is not None else None)
    print(output)


@app.command("upcycle", epilog="Example: mega ckpt upcycle models/Llama-3.2-1B out/moe --experts 8 --top-k 2")
def upcycle_command(
    source: Checkpoint,
    destination: Annotated[str, typer.Argument(help="The mega checkpoint to make.")],
    experts: Annotated[int, typer.Option(help="Experts of every layer.", min=1)],
    top_k: Annotated[int, typer.Option(help="Experts of a token.", min=1)],
    expert_ffn: Annotated[
        int | None, typer.Option(help="Width of an expert, of which a whole number make up the dense width.", min=1)
    ] = None,
    aux_loss: Annotated[
        float, typer.Option(help="Weight of the load balancing loss, for later training.", min=0)
    ] = 0.01,
    seed: Annotated[int, typer.Option(help="Of the router's weights.")] = 1234,
) -> None:
    """Make a mixture of experts of a dense model: copies or slices of its feed-forward blocks, and a new router.

    What it computes is what the dense model computes, until it is trained further.
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
    destination: Annotated[str, typer.Argument(help="The mega checkpoint to make.")],
    data: Annotated[str, typer.Option(metavar="PREFIX", help="A data set to see on what is important.")],
    layers: Annotated[int | None, typer.Option(help="Layers that stay; default: all.", min=1)] = None,
    ffn: Annotated[int | None, typer.Option(help="Width of the feed-forward blocks.", min=1)] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads; key/value heads go with theirs.", min=1)] = None,
    hidden: Annotated[int | None, typer.Option(help="Width of the residual stream.", min=1)] = None,
    windows: Annotated[int, typer.Option(help="Sequences of the data set that are looked at.", min=1)] = 256,
    seq_length: Annotated[int | None, typer.Option(help="Tokens of each; default: all it can, to 2048.", min=2)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Cut a smaller model out of a dense decoder: prune what contributes least on a data set (Minitron) and keep the
    other weights.

    Train it afterwards, best with `objective: {kind: distill}` and SOURCE as the teacher.
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
    gone = sorted(set(range(opened.model.num_layers)) - set(kept.layers.tolist()))
    if gone:
        logger.info("layers %s are left out", ", ".join(map(str, gone)))
    print(destination)


RepoId = Annotated[str, typer.Argument(help="The repository on the hub: user/name.")]


@app.command(
    "push",
    epilog="Example: mega ckpt push out/hf ada/llama3-8b --private --message 'After 1,000 steps'. Log in: hf auth login",
)
def push_command(
    folder: Annotated[Path, typer.Argument(help="A HuggingFace folder, such as `mega ckpt convert --to hf` makes.")],
    repo_id: RepoId,
    private: Annotated[bool, typer.Option("--private", help="Let nobody else see the repository.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to; default: main.")] = None,
    message: Annotated[str | None, typer.Option(help="What the commit says.")] = None,
) -> None:
    """Upload a HuggingFace folder to the HuggingFace hub. Weights are sent as safetensors, never as pickles."""
    from mega_ckpt.hub import push_to_hub

    print(push_to_hub(folder, repo_id, private=private, revision=revision, message=message))


@app.command("pull", epilog="Example: mega ckpt pull meta-llama/Llama-3.2-1B models/Llama-3.2-1B --revision main")
def pull_command(
    repo_id: RepoId,
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; default: main.")] = None,
) -> None:
    """Download a model from the HuggingFace hub. Pickled weights are never fetched; the same command resumes."""
    from mega_ckpt.hub import pull_from_hub

    pull_from_hub(repo_id, folder, revision=revision)
    print(folder)


def _print_progress(result: Any, as_json: bool) -> None:
    print(json.dumps(dataclasses.asdict(result), default=str, indent=1) if as_json else result)


def _parse_bytes(text: str) -> int:
    """Parse a size such as '5GB', in decimal units.

    Raises:
        ConfigError: for anything else.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    number, unit = text[:-2].strip(), text[-2:].upper()
    if unit not in units or not number.isdigit() or int(number) == 0:
        raise ConfigError(f"--max-shard-size {text}: expected a size such as 500MB or 5GB")
    return int(number) * units[unit]


def _parse_numbers(text: str) -> list[float]:
    """Parse a comma-separated list such as '0.5,0.3,0.2'.

    Raises:
        ConfigError: for anything else.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {text}: expected numbers with commas between, such as 0.5,0.3,0.2") from None
