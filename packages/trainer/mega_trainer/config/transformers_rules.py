"""Settings that a model of `implementation: transformers` does not support, each with the way that does. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from mega_common.errors import ConfigError
from mega_common.strict_config import ConfigProblem

if TYPE_CHECKING:
    from mega_trainer.config.run_config import RunConfig

WITH = "with model.implementation = transformers"
DATA_KINDS = frozenset({"text", "documents", "conversations", "fim"})


def find_transformers_problems(run: RunConfig) -> Iterator[ConfigProblem]:
    """Yield settings of a run that its model, a module of transformers, does not support."""
    for path, used, value, hint in _unsupported_settings(run):
        if used:
            yield ConfigProblem(path, f"is not supported {WITH}", value, hint)
    for kind in sorted(run.data.dataset_kinds - DATA_KINDS):
        yield ConfigProblem("data.kind", f"is not supported {WITH}", kind, "set data.kind=text")
    if run.data.reset_position_ids != run.data.reset_attention_mask:
        key = "reset_position_ids" if run.data.reset_attention_mask else "reset_attention_mask"
        hint = f"set data.{key}=true"
        rule = f"is required {WITH}, which separates documents by their positions"
        yield ConfigProblem(f"data.{key}", rule, False, hint)
    if run.data.seq_length > run.model.max_position:
        rule = f"must be at most the {run.model.max_position} positions that config.json declares"
        hint = "change it in config.json if the model extrapolates, or set a shorter data.seq_length"
        yield ConfigProblem("data.seq_length", rule, run.data.seq_length, hint)


def _unsupported_settings(run: RunConfig) -> Iterator[tuple[str, bool, Any, str]]:
    """Yield (path, in use, value, hint) of each setting that needs mega's own layers."""
    parallel, zero = run.parallel, "set parallel.zero=3, which shards over data ranks"
    own = "change to a model type that mega has (docs/families.md), without implementation: transformers"
    for key in ("tp", "pp", "cp", "ep", "virtual_stages"):
        degree = getattr(parallel, key)
        yield f"parallel.{key}", degree > 1, degree, f"remove parallel.{key} and {zero}; or {own}"
    yield "parallel.sp", parallel.sp, True, f"remove parallel.sp and {zero}"
    yield "precision", run.precision == "fp8", "fp8", f"set precision=bf16; or {own}"
    kind = run.recompute.kind
    yield "recompute.kind", kind == "selective", kind, "set recompute.kind=full"
    yield "recompute.layers", run.recompute.layers is not None, run.recompute.layers, "remove recompute.layers"
    moved = run.offload.activations
    yield "offload.activations", moved > 0, moved, "remove offload.activations and set recompute.kind=full"
    yield "objective.kind", run.objective.kind != "cross_entropy", run.objective.kind, own
    yield "optimizer.name", run.optimizer.name != "adamw", run.optimizer.name, "set optimizer.name=adamw"
    decoupled = run.optimizer.decoupled_lr
    yield (
        "optimizer.decoupled_lr",
        decoupled is not None,
        decoupled,
        "remove optimizer.decoupled_lr and set optimizer.lr_factors",
    )
    yield "lora", run.lora is not None, None, f"remove lora and set train.freeze to train some tensors alone; or {own}"
    yield "eval.tasks", bool(run.eval.tasks), run.eval.tasks, "remove eval.tasks and run mega eval on the checkpoints"
    for key in ("linear", "attention", "conv", "scan", "delta"):
        chosen = getattr(run.kernels, key)
        yield f"kernels.{key}", chosen not in ("auto", "torch"), chosen, f"remove kernels.{key}"
    added = run.kernels.functions
    yield "kernels.functions", bool(added), added, "remove kernels.functions"


def pop_implementation(model: dict[str, Any]) -> Literal["mega", "transformers"]:
    """Remove `implementation` from the `model` section and return it; default: `mega`.

    Raises:
        ConfigError: for an unknown one, or for other fields next to `transformers`.
    """
    found = model.pop("implementation", "mega")
    if found not in ("mega", "transformers"):
        raise ConfigError(
            f"model.implementation must be mega or transformers, found {found!r}",
            hint="set implementation: transformers for a model type that mega does not have",
        )
    if found == "transformers" and model:
        raise ConfigError(
            f"model.{next(iter(model))} is not supported with model.implementation = transformers",
            hint="change config.json in the folder instead",
        )
    return "transformers" if found == "transformers" else "mega"
