"""The layout of a run that names none: the one it was saved under, or the search's best for its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mega_common.errors import ConfigError
from mega_trainer.config import RunConfig
from mega_trainer.plan.candidates import Settings
from mega_trainer.plan.machine import load_machine
from mega_trainer.plan.search import NoneFits, best_layouts, short, with_settings

CHOSEN = (
    "batch.micro",
    "recompute",
    "offload.activations",
    "optimizer.offload",
)  # besides `parallel`, where a run does not give them


def laid_out(config: RunConfig, ranks: int, machine: str, saved: Mapping[str, Any] | None) -> tuple[Settings, str]:
    """Settings for a run that has no `parallel` section, on so many ranks of a machine, and a line that tells them.

    A run that goes on keeps the layout of the configuration it was `saved` with, while that fits its ranks. Else it is what
    `mega plan --search` finds first, the same on every rank and at any time. Where none fits as planned, nothing is set, and the
    run may show that it does.

    Raises:
        ConfigError: when there is no such machine.
    """
    given = [path for path in CHOSEN if _given(config, path)]
    if saved is not None:
        kept = {path: value for path, value in _settings(saved).items() if path not in given}
        if _fits(config, kept, ranks):
            return kept, f"run.yaml has no `parallel`: the layout stays the checkpoint's, {short(kept)}"
    try:
        best = best_layouts(config, ranks, load_machine(machine), fixed=given)[0]
    except NoneFits as error:
        return {}, f"run.yaml has no `parallel`, and {error.message}: the ranks share the batch alone"
    return best.settings, (
        f"run.yaml has no `parallel`: the fastest that fits {ranks} ranks of {machine} by `mega plan --search` is "
        f"{short(best.settings)}; {best.time.seconds:.3g} s a step predicted"
    )


def _given(config: RunConfig, path: str) -> bool:
    section, _, key = path.partition(".")
    return section in config.model_fields_set and (not key or key in getattr(config, section).model_fields_set)


def _settings(saved: Mapping[str, Any]) -> Settings:
    """Of a whole configuration, what makes its layout."""
    parallel = {f"parallel.{key}": value for key, value in saved["parallel"].items()}
    return {
        **parallel, "batch.micro": saved["batch"]["micro"], "recompute": saved["recompute"],
        "offload.activations": saved["offload"]["activations"],
    }  # fmt: skip


def _fits(config: RunConfig, settings: Settings, ranks: int) -> bool:
    try:
        with_settings(config, settings).check_ranks(ranks)
    except ConfigError:
        return False
    return True
