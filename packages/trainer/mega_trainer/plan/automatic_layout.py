"""Automatic layout of a run without a `parallel` section: that of its checkpoint, or the best one found by the search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.plan.layout_candidates import HIDDEN_EXCHANGE, LayoutSettings
from mega_trainer.plan.layout_search import NoLayoutFitsError, find_best_layouts, format_layout_settings
from mega_trainer.plan.machine import load_machine
from mega_trainer.plan.memory_advice import apply_settings

# settings that are chosen together with `parallel`, unless the run sets them
CHOSEN = ("batch.micro", "recompute", "offload.activations", "optimizer.offload")


def choose_parallel_layout(
    config: RunConfig, ranks: int, machine: str, saved: Mapping[str, Any] | None
) -> tuple[LayoutSettings, str]:
    """Return {path: value} of a layout for a run without `parallel`, empty if none fits, and a line that describes it.
    The layout is for `ranks` ranks of a machine.

    A resumed run keeps the layout of its `saved` configuration if that is legal on its ranks. Otherwise the layout is the best
    result of `mega plan --search` without hidden expert exchanges, which no GPU has run yet. The search is deterministic and
    equal on all ranks. If no layout fits by prediction, nothing is set, as the prediction may be too high.

    Raises:
        ConfigError: for an unknown machine.
    """
    given = [path for path in CHOSEN if _is_given(config, path)]
    if saved is not None:
        kept = {path: value for path, value in _saved_layout(saved).items() if path not in given}
        if _is_legal(config, kept, ranks):
            return kept, f"run.yaml has no section `parallel`; layout of the checkpoint: {format_layout_settings(kept)}"
    try:
        best = find_best_layouts(config, ranks, load_machine(machine), fixed=[*given, HIDDEN_EXCHANGE])[0]
    except NoLayoutFitsError as error:
        return {}, f"run.yaml has no section `parallel`, and {error.message}; using data parallelism only"
    return best.settings, (
        f"run.yaml has no section `parallel`; fastest layout for {ranks} ranks of {machine} (mega plan --search): "
        f"{format_layout_settings(best.settings)}, predicted {best.time.seconds:.3g} s/step"
    )


def _is_given(config: RunConfig, path: str) -> bool:
    """Return whether a run sets this path."""
    section, _, key = path.partition(".")
    return section in config.model_fields_set and (not key or key in getattr(config, section).model_fields_set)


def _saved_layout(saved: Mapping[str, Any]) -> LayoutSettings:
    """Return the layout settings of a saved configuration."""
    parallel = {f"parallel.{key}": value for key, value in saved["parallel"].items()}
    return {
        **parallel, "batch.micro": saved["batch"]["micro"], "recompute": saved["recompute"],
        "offload.activations": saved["offload"]["activations"],
    }  # fmt: skip


def _is_legal(config: RunConfig, settings: LayoutSettings, ranks: int) -> bool:
    """Return whether the run with these settings is legal on `ranks` ranks."""
    try:
        apply_settings(config, settings).check_world_size(ranks)
    except ConfigError:
        return False
    return True
