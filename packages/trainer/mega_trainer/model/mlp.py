"""The feed-forward block, its width split over the tensor ranks.

Legend: B batch, S sequence, D model width, F feed-forward width, T tensor-parallel ranks.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from mega_trainer.model.activation import activate
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.parallel.tensor import Heads


class Mlp(nn.Module):
    """down(act(gate x) * up x), or down(act(up x)) without a gate.

    Args:
        build: of the model.
        name: of its tensors.
        width: F.
    """

    def __init__(self, build: Builder, name: str, width: int) -> None:
        super().__init__()
        config = build.config
        parts = ["gate_proj", "up_proj"] if config.gated else ["up_proj"]
        self.config, self.saved = config, build.saved
        self.activate = partial(activate, config=config, kernels=build.kernels)
        self.up = build.column([Heads(f"{name}.{part}", width) for part in parts], bias=config.mlp_bias)
        self.down = build.row(f"{name}.down_proj", width, bias=config.mlp_bias)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        """[B, S or S/T, D] -> the same shape. Tokens are alike: but for an adapter's dropout nothing of the context is asked."""
        dropout = None if context is None else context.dropout
        h = self.saved.again("activation", self.activate, self.up(x, dropout))
        y: Tensor = self.down(h, dropout)
        return y
