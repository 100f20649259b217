"""`mega ckpt`: convert, inspect, verify, compare and combine checkpoints; send and fetch them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mega_common.errors import ConfigError
from mega_common.log import logger

if TYPE_CHECKING:
    from mega_common.remote import Place

app = typer.Typer(
    no_args_is_help=True, help="Convert, inspect, verify, compare, prune, average, push and pull checkpoints."
)


class Target(StrEnum):
    """Formats to convert to."""

    HF = "hf"
    MEGA = "mega"
    MEGATRON = "megatron"
    PEFT = "peft"


class MegatronFormat(StrEnum):
    """Formats of Megatron-Core."""

    TORCH_DIST = "torch_dist"
    TORCH = "torch"


class MegatronLayers(StrEnum):
    """Kinds of layers of Megatron-Core."""

    TRANSFORMER_ENGINE = "transformer_engine"
    LOCAL = "local"


class Dtype(StrEnum):
    """Types to cast floating-point weights to."""

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
    Target,
    typer.Option(
        help="hf: config.json and safetensors. mega: a checkpoint to train from. megatron: a release. peft: an adapter alone."
    ),
]
Cast = Annotated[Dtype | None, typer.Option(help="Cast the weights; default: as they are.")]
Family = Annotated[
    str | None, typer.Option(help="model_type to write (llama, qwen3, ...); default: the first that fits.")
]
MaxShardSize = Annotated[
    str | None, typer.Option(help="Most bytes in one safetensors file: 500MB, 5GB, ...; default: as the source.")
]
FormatOption = Annotated[
    MegatronFormat, typer.Option("--format", help="Of Megatron: torch_dist, or torch for a file a rank.")
]
Tp = Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks that Megatron's files are for.")]
Pp = Annotated[int, typer.Option(min=1, help="Pipeline stages that Megatron's files are for.")]
TransformerImpl = Annotated[
    MegatronLayers, typer.Option(help="Megatron's flag of that name; --format torch depends on it.")
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


@app.command(epilog="Example: mega ckpt convert runs/llama3-8b out/hf --to hf --dtype bf16 --verify")
def convert(
    source: Convertible,
    destination: Converted,
    to: To,
    dtype: Cast = None,
    family: Family = None,
    max_shard_size: MaxShardSize = None,
    megatron_format: FormatOption = MegatronFormat.TORCH_DIST,
    tp: Tp = 1,
    pp: Pp = 1,
    transformer_impl: TransformerImpl = MegatronLayers.TRANSFORMER_ENGINE,
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
    from mega_common.config import load_yaml

    options = converting.Options(
        dtype=converting.DTYPES[dtype.value] if dtype else None,
        family=family,
        max_shard=_bytes(max_shard_size) if max_shard_size else None,
        megatron_format=megatron_format.value,
        tp=tp,
        pp=pp,
        implementation=transformer_impl.value,
        settings=load_yaml(config) if config else None,
        averaged=ema,
        vocab_size=vocab_size,
        tokens=_tokens(add_tokens) if add_tokens is not None else (),
    )
    verify = verify or verify_data is not None
    check = (
        _logits_check(source, verify_data)
        if verify and not (options.settings or ema or vocab_size or add_tokens)
        else None
    )
    converting.convert(source, destination, to.value, options=options, verify=verify, check=check, overwrite=overwrite)
    print(destination)


@app.command(epilog="Example: mega ckpt merge-adapter models/SmolLM2-135M runs/tuned out/merged --dtype bf16")
def merge_adapter(
    base: Convertible,
    adapter: Annotated[str, typer.Argument(help="A run that trained one, or a folder of PEFT's.")],
    destination: Converted,
    to: To = Target.HF,
    dtype: Cast = None,
    overwrite: Overwrite = False,
) -> None:
    """Put an adapter of low rank into the weights that it was trained beside: a model that needs no adapter.

    A run's adapter knows its base, so that `mega ckpt convert RUN OUT --to hf` does the same while that is in its place.
    """
    from mega_ckpt import convert as converting

    options = converting.Options(dtype=converting.DTYPES[dtype.value] if dtype else None, adapter=adapter)
    converting.convert(base, destination, to.value, options=options, overwrite=overwrite)
    print(destination)


def _tokens(given: str) -> tuple[str, ...]:
    """Those of a file, one a line, or those named, between commas."""
    try:
        told = Path(given).read_text(encoding="utf-8").splitlines() if Path(given).is_file() else given.split(",")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{given}: cannot be read ({error})") from None
    tokens = tuple(token for token in told if token.strip())
    if not tokens:
        raise ConfigError(f"--add-tokens {given}: names no token", hint="such as --add-tokens '<think>,</think>'")
    if twice := [token for token in dict.fromkeys(tokens) if tokens.count(token) > 1]:
        raise ConfigError(f"--add-tokens: {twice[0]!r} is there twice", hint="leave one out")
    return tokens


def _logits_check(source: str, data: Path | None) -> Callable[[Place], None] | None:
    """Compares what was made with `source` by its logits; None where the package that runs models is not installed."""
    from mega_common.log import logger

    try:
        from mega_eval.compare import compare_logits
    except ModuleNotFoundError as error:
        if data is not None or error.name not in ("mega_eval", "mega_trainer", "mega_data"):
            raise
        logger.warning("--verify compares tensors, but no logits: %s is not installed", error.name)
        return None
    from mega_ckpt.source import model_at

    if model_at(source).retro is not None:
        logger.warning("--verify compares tensors, but no logits: a model with retrieval needs neighbors for each text")
        return None

    def check(made: Place) -> None:
        logger.info("%s", compare_logits(source, made, data))

    return check


@app.command(epilog="Example: mega ckpt inspect runs/llama3-8b/checkpoints/step-00001000 --json")
def inspect(path: Looked, as_json: Json = False) -> None:
    """Tell what is in a checkpoint or a HuggingFace or GGUF model: settings, step, state, tensors. Reads no tensors."""
    from mega_ckpt.foreign import inspect_foreign, is_foreign
    from mega_ckpt.formats.megatron import is_megatron
    from mega_ckpt.formats.megatron_inspect import inspect_megatron
    from mega_ckpt.source import checkpoint_folder
    from mega_ckpt.verify import inspect

    folder = checkpoint_folder(path)
    if isinstance(folder, Path) and is_megatron(folder):
        _tell(inspect_megatron(folder), as_json)
    else:
        _tell(inspect_foreign(folder) if is_foreign(folder) else inspect(folder), as_json)


@app.command(epilog="Example: mega ckpt verify runs/llama3-8b --finite")
def verify(
    path: Looked,
    finite: Annotated[bool, typer.Option("--finite", help="Look for NaN and infinities too.")] = False,
    as_json: Json = False,
) -> None:
    """Compare every byte of a checkpoint with its checksums. Exit status 2 when something is damaged.

    HuggingFace and GGUF models have no checksums: there, every tensor is read.
    """
    from mega_ckpt.foreign import is_foreign, verify_foreign
    from mega_ckpt.source import checkpoint_folder
    from mega_ckpt.verify import verify

    folder = checkpoint_folder(path)
    report = (verify_foreign if is_foreign(folder) else verify)(folder, finite=finite)
    _tell(report, as_json)
    if not report.ok:
        raise typer.Exit(2)


@app.command(epilog="Example: mega ckpt diff runs/a runs/b/checkpoints/step-00000500")
def diff(
    a: Checkpoint,
    b: Checkpoint,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints: settings, and every tensor bit for bit. Exit status 2 when they differ."""
    from mega_ckpt.source import checkpoint_folder
    from mega_ckpt.verify import diff

    found = diff(checkpoint_folder(a), checkpoint_folder(b))
    _tell(found, as_json)
    if not found.same:
        raise typer.Exit(2)


@app.command(epilog="Example: mega ckpt prune runs/llama3-8b/checkpoints/step-00001000 out/weights")
def prune(
    source: Checkpoint,
    destination: Annotated[str, typer.Argument(help="The folder to make; a path or a URL.")],
) -> None:
    """Copy a mega checkpoint without the optimizer and the trainer's state: a fraction of its size, to load from."""
    from mega_ckpt.combine import prune

    prune(source, destination)
    print(destination)


@app.command(
    epilog="Example: mega ckpt average runs/a runs/b models/Llama-3.2-1B --output out/mean --weights 0.5,0.3,0.2"
)
def average(
    sources: Annotated[
        list[str], typer.Argument(help="Two or more of: mega checkpoint, run folder (its newest), HuggingFace folder.")
    ],
    output: Annotated[str, typer.Option(help="The mega checkpoint to make, in the dtype of the first source.")],
    weights: Annotated[
        str | None, typer.Option(help="Their shares, divided by their sum: 0.5,0.3,0.2; default: all alike.")
    ] = None,
) -> None:
    """Take the weighted mean of the weights of several checkpoints of one model."""
    from mega_ckpt.combine import average

    average(sources, output, weights=_numbers(weights) if weights is not None else None)
    print(output)


@app.command(epilog="Example: mega ckpt upcycle models/Llama-3.2-1B out/moe --experts 8 --top-k 2")
def upcycle(
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
    """Make a mixture of experts of a dense model: copies of its feed-forward blocks, or slices of them, and a new router.

    What it computes is what the dense model computes, until it is trained further.
    """
    from mega_ckpt.upcycle import upcycle

    upcycle(source, destination, experts=experts, top_k=top_k, expert_ffn=expert_ffn, aux_loss=aux_loss, seed=seed)
    print(destination)


@app.command(epilog="Example: mega ckpt shrink models/Llama-3.1-8B out/4b --ffn 9216 --hidden 3072 --data data/wiki")
def shrink(
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
    """Cut a smaller model out of a dense decoder: what does least on a data set goes (Minitron), the rest keeps its weights.

    Train it afterwards, best with `objective: {kind: distill}` and SOURCE as the teacher.
    """
    from mega_ckpt.shrink import Sizes, shrink, shrunk_model
    from mega_ckpt.source import open_source
    from mega_eval.importance import importance
    from mega_eval.load import device_named, load_model

    opened, sizes = open_source(source), Sizes(layers, ffn, heads, hidden)
    shrunk_model(opened.model, sizes)  # before any work
    model = load_model(source, device=device_named(device))
    found = importance(model, Path(data), seq_length or min(2048, model.config.max_position), windows=windows)
    kept = shrink(opened, destination, found, sizes)
    gone = sorted(set(range(opened.model.num_layers)) - set(kept.layers.tolist()))
    if gone:
        logger.info("layers %s are left out", ", ".join(map(str, gone)))
    print(destination)


RepoId = Annotated[str, typer.Argument(help="The repository on the hub: user/name.")]


@app.command(
    epilog="Example: mega ckpt push out/hf ada/llama3-8b --private --message 'After 1,000 steps'. Log in: hf auth login"
)
def push(
    folder: Annotated[Path, typer.Argument(help="A HuggingFace folder, such as `mega ckpt convert --to hf` makes.")],
    repo_id: RepoId,
    private: Annotated[bool, typer.Option("--private", help="Let nobody else see the repository.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to commit to; default: main.")] = None,
    message: Annotated[str | None, typer.Option(help="What the commit says.")] = None,
) -> None:
    """Upload a HuggingFace folder to the HuggingFace hub. Weights go as safetensors; pickles are never sent."""
    from mega_ckpt.hub import push

    print(push(folder, repo_id, private=private, revision=revision, message=message))


@app.command(epilog="Example: mega ckpt pull meta-llama/Llama-3.2-1B models/Llama-3.2-1B --revision main")
def pull(
    repo_id: RepoId,
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; default: main.")] = None,
) -> None:
    """Download a model from the HuggingFace hub. Pickled weights are never fetched; the same command resumes."""
    from mega_ckpt.hub import pull

    pull(repo_id, folder, revision=revision)
    print(folder)


def _tell(result: Any, as_json: bool) -> None:
    print(json.dumps(dataclasses.asdict(result), default=str, indent=1) if as_json else result)


def _bytes(text: str) -> int:
    """'5GB' and the like, in decimal units.

    Raises:
        ConfigError: for anything else.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    number, unit = text[:-2].strip(), text[-2:].upper()
    if unit not in units or not number.isdigit() or int(number) == 0:
        raise ConfigError(f"--max-shard-size {text}: expected a size such as 500MB or 5GB")
    return int(number) * units[unit]


def _numbers(text: str) -> list[float]:
    """'0.5,0.3,0.2'.

    Raises:
        ConfigError: for anything else.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--weights {text}: expected numbers with commas between, such as 0.5,0.3,0.2") from None
