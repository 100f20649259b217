"""Builder of the parameters of a vision encoder and a projector, which every tensor rank holds whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from mega_ckpt.tensor_pieces import TensorPiece
from mega_common.vision_config import TOWER
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.model.activation_checkpointing import ActivationCheckpointer
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.parameter_info import make_parameter


@dataclass(frozen=True)
class VisionLayerBuilder(LayerBuilder):
    """Builder of the vision encoder's layers, whose parameters every tensor rank holds whole.
    Their gradients are summed over tensor ranks.

    Attributes:
        prefix: prefix of the tensor names in place of `model.`.
        tp: the tensor ranks, over which gradients are summed; no layer is split over them.
    """

    prefix: str = TOWER
    tp: CommGroup = field(default_factory=lambda: CommGroup("tp"))

    @classmethod
    def from_layer_builder(cls, build: LayerBuilder, prefix: str) -> VisionLayerBuilder:
        """Return the builder of the vision encoder's (or projector's) layers, from the language model's builder.
        The names of its parameters begin with `prefix`.
        """
        tower, groups = build.config.vision_encoder_config, build.groups
        assert tower is not None
        return cls(
            tower, ParallelGroups(dp_cp=groups.dp_cp), build.kernels, leaves=build.leaves, dtype=build.dtype,
            stored_dtype=build.stored_dtype, device=build.device, deferred=build.deferred,
            saved=ActivationCheckpointer(build.saved.recompute), prefix=prefix, tp=groups.tp,
        )  # fmt: skip

    def build_parameter(
        self,
        shape: Sequence[int],
        pieces: Sequence[TensorPiece],
        *,
        grad_sync: Sequence[CommGroup] = (),
        replicas: Sequence[CommGroup] = (),
        **start: Any,
    ) -> nn.Parameter:
        """Build a parameter whole on every tensor rank, its gradient summed over them, its checkpoint names begun by `prefix`."""
        own = [replace(piece, name=piece.name.replace("model.", self.prefix, 1)) for piece in pieces]
        return make_parameter(
            shape, own, data=self.groups.dp_cp, dtype=self.parameter_dtype, device=self.device,
            grad_sync=(self.tp,), replicas=(self.tp,), parts=self.tp, **start,
        )  # fmt: skip

    def build_linear_layer(self, name: str, shape: tuple[int, int], *, bias: bool) -> ReplicatedLinear:
        """Build a linear layer with a weight of `shape` (out, in), whole on every rank."""
        weight = self.build_replicated(f"model.{name}.weight", shape, std=self.config.init_std)
        return ReplicatedLinear(self, weight, self.build_replicated(f"model.{name}.bias", shape[:1]) if bias else None)


class ReplicatedLinear(nn.Module):
    """Linear layer Y = X W^T + b with the whole weight W [N, K] on every tensor rank."""

    def __init__(self, build: LayerBuilder, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.linear, self.weight, self.bias = build.unsharded_linear, weight, bias

    def forward(self, x: Tensor) -> Tensor:
        """Map x [.., K] to Y = x W^T + b [.., N]."""
        return self.linear(x, self.weight, self.bias)
