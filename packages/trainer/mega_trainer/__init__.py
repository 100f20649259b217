"""5D-parallel trainer: model, process groups, pipeline schedule and training loop; `TrainingEngine` is its library
interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mega_trainer.engine import TrainingEngine as TrainingEngine

__all__ = ["TrainingEngine"]


def __getattr__(name: str) -> Any:
    """Import and return `TrainingEngine` on first access (PEP 562), so that `import mega_trainer` for its configuration
    does not import torch.
    """
    if name == "TrainingEngine":
        from mega_trainer.engine import TrainingEngine

        return TrainingEngine
    raise AttributeError(name)
