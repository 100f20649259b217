"""Makes the parameters of a vision tower and a projector, which every tensor rank holds whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from mega_ckpt.pieces import Piece
from mega_common.vision import TOWER
from mega_trainer.comm import Group
from mega_trainer.mesh import Groups
from mega_trainer.model.builder import Builder
from mega_trainer.model.recompute import SavedActivations
from mega_trainer.parallel.param import make_parameter


@dataclass(frozen=True)
class TowerBuilder(Builder):
    """Makes parameters that every tensor rank holds whole and has a part of the gradient of.

    Attributes:
        prefix: what stands for `model.` in their names.
        tp: the tensor ranks, who share no layer of it.
    """

    prefix: str = TOWER
    tp: Group = field(default_factory=lambda: Group("tp"))

    @classmethod
    def of(cls, build: Builder, prefix: str) -> TowerBuilder:
        """For the tower of that builder's model."""
        tower, groups = build.config.tower, build.groups
        assert tower is not None
        return cls(
            tower, Groups(dp_cp=groups.dp_cp), build.kernels, build.leaves, dtype=build.dtype, device=build.device,
            deferred=build.deferred, saved=SavedActivations(build.saved.recompute), prefix=prefix, tp=groups.tp,
        )  # fmt: skip

    def parameter(
        self,
        shape: Sequence[int],
        pieces: Sequence[Piece],
        *,
        grad_sync: Sequence[Group] = (),
        replicas: Sequence[Group] = (),
        **start: Any,
    ) -> nn.Parameter:
        """See `Builder.parameter`."""
        own = [replace(piece, name=piece.name.replace("model.", self.prefix, 1)) for piece in pieces]
        return make_parameter(
            shape, own, data=self.groups.dp_cp, dtype=self.dtype, device=self.device,
            grad_sync=(self.tp,), replicas=(self.tp,), parts=self.tp, **start,
        )  # fmt: skip

    def matrix(self, name: str, shape: tuple[int, int], *, bias: bool) -> WholeLinear:
        """A linear layer of `shape` (out, in), whole on every rank."""
        weight = self.replicated(f"model.{name}.weight", shape, std=self.config.init_std)
        return WholeLinear(self, weight, self.replicated(f"model.{name}.bias", shape[:1]) if bias else None)


class WholeLinear(nn.Module):
    """Y = X W^T + b with all of W [N, K] on every rank."""

    def __init__(self, build: Builder, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.linear, self.weight, self.bias = build.linear, weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """[.., K] -> [.., N]."""
        return self.linear(x, self.weight, self.bias)
