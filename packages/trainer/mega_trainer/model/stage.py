"""Which part of a model a pipeline stage holds."""

from __future__ import annotations

from dataclasses import dataclass

from mega_common.model_config import ModelConfig


@dataclass(frozen=True)
class Stage:
    """Layers [first, last), with the embedding before and the head behind where it has them.

    Layers that predict further tokens go with the head. `ends_meet` says that embedding and head, if not in one stage,
    are in two of the same rank.
    """

    first: int
    last: int
    embeds: bool = True
    heads: bool = True
    ends_meet: bool = False

    @classmethod
    def whole(cls, config: ModelConfig) -> Stage:
        """All of the model."""
        return cls(0, config.num_layers)

    def apart(self, config: ModelConfig) -> bool:
        """Whether the head works with the embedding, and they are not both here."""
        return (config.tie_embeddings or config.mtp_layers > 0) and not (self.embeds and self.heads)

    def copies(self, config: ModelConfig) -> bool:
        """Whether each of the two ends has a copy of the embedding."""
        return self.apart(config) and not self.ends_meet

    def borrows(self, config: ModelConfig) -> bool:
        """Whether this is the head's, which is lent the embedding with each micro-batch."""
        return self.apart(config) and self.ends_meet and self.heads
