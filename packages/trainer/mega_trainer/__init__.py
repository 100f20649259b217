"""The 5D-parallel trainer: its model, its groups, its schedule and its loop. `TrainingEngine` is it as a library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mega_trainer.engine import TrainingEngine as TrainingEngine

__all__ = ["TrainingEngine"]


def __getattr__(name: str) -> Any:
    """The engine, when it is asked for: it needs torch, as the configuration does not (PEP 562)."""
    if name == "TrainingEngine":
        from mega_trainer.engine import TrainingEngine

        return TrainingEngine
    raise AttributeError(name)
