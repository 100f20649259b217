"""`mega ckpt`: convert, inspect, verify, compare and combine checkpoints; push and pull models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mega_cli.ckpt_convert import Convertible, convert_command, merge_adapter_command
from mega_common.errors import ConfigError
from mega_common.progress_logging import logger

app = typer.Typer(
    no_args_is_help=True, help="Convert, inspect, verify, compare, prune, average, push and pull checkpoints."
)

app.command("convert", epilog="Example: mega ckpt convert runs/llama3-8b out/hf --to hf --dtype bf16 --verify")(
    convert_command
)
app.command(
    "merge-adapter", epilog="Example: mega ckpt merge-adapter models/SmolLM2-135M runs/tuned out/merged --dtype bf16"
)(merge_adapter_command)


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Checkpoint = Annotated[
    str,
    typer.Argument(
        help="A mega checkpoint, or a run folder (latest checkpoint); a path or a URL such as s3://bucket/run."
    ),
]

Inspected = Annotated[
    str,
    typer.Argument(help="A mega checkpoint, a run folder (latest checkpoint), a HuggingFace folder or a GGUF file."),
]


@app.command("inspect", epilog="Example: mega ckpt inspect runs/llama3-8b/checkpoints/step-00001000 --json")
def inspect_command(path: Inspected, as_json: Json = False) -> None:
    """Print settings, step, state and tensor names of a checkpoint, a HuggingFace folder or a GGUF file.

    Tensor data are not read.
    """
    from mega_ckpt.formats.megatron_source import is_megatron_folder
    from mega_ckpt.inspect_foreign import inspect_hf_or_gguf_model, inspect_megatron, is_hf_or_gguf_model
    from mega_ckpt.source import resolve_run_to_checkpoint
    from mega_ckpt.verify import inspect_checkpoint

    folder = resolve_run_to_checkpoint(path)
    if isinstance(folder, Path) and is_megatron_folder(folder):
        _print_report(inspect_megatron(folder), as_json)
    else:
        inspect = inspect_hf_or_gguf_model if is_hf_or_gguf_model(folder) else inspect_checkpoint
        _print_report(inspect(folder), as_json)


@app.command("verify", epilog="Example: mega ckpt verify runs/llama3-8b --finite")
def verify_command(
    path: Inspected,
    finite: Annotated[bool, typer.Option("--finite", help="Also check for NaN and infinities.")] = False,
    as_json: Json = False,
) -> None:
    """Check a checkpoint by its checksums, a HuggingFace or GGUF model by reading it. Exit status 2 if it is damaged.

    HuggingFace and GGUF models have no checksums: for them, the check is that every tensor can be read.
    """
    from mega_ckpt.inspect_foreign import is_hf_or_gguf_model, verify_hf_or_gguf_model
    from mega_ckpt.source import resolve_run_to_checkpoint
    from mega_ckpt.verify import verify_checkpoint

    folder = resolve_run_to_checkpoint(path)
    report = (verify_hf_or_gguf_model if is_hf_or_gguf_model(folder) else verify_checkpoint)(folder, finite=finite)
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
    from mega_ckpt.source import resolve_run_to_checkpoint
    from mega_ckpt.verify import diff_checkpoints

    found = diff_checkpoints(resolve_run_to_checkpoint(a), resolve_run_to_checkpoint(b))
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
    from mega_ckpt.derive_checkpoint import copy_checkpoint_without_training_state

    copy_checkpoint_without_training_state(source, destination)
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
    """Compute the weighted mean of several checkpoints of one model, and write it as a mega checkpoint."""
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
    """Upload a HuggingFace folder to the HuggingFace hub, with weights as safetensors only, never as pickle files."""
    from mega_ckpt.hub import push_to_hub

    print(push_to_hub(folder, repo_id, private=private, revision=revision, message=message))


@app.command("pull", epilog="Example: mega ckpt pull meta-llama/Llama-3.2-1B models/Llama-3.2-1B --revision main")
def pull_command(
    repo_id: RepoId,
    folder: Annotated[Path, typer.Argument(help="Folder to create.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; default: main.")] = None,
) -> None:
    """Download a model from the HuggingFace hub, except pickled weights. Re-running the command resumes."""
    from mega_ckpt.hub import pull_from_hub

    pull_from_hub(repo_id, folder, revision=revision)
    print(folder)


def _print_report(result: Any, as_json: bool) -> None:
    print(json.dumps(dataclasses.asdict(result), default=str, indent=1) if as_json else result)


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
