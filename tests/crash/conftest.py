"""The small run that the trainer's tests train."""

from trainer.conftest import settings

__all__ = ["settings"]
