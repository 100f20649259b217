"""Builder of a model's sharded parameters, with their checkpoint pieces, initialisation and gradient groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import nn

from mega_ckpt.lora_tensors import AdaptedModule
from mega_ckpt.tensor_pieces import TensorPiece
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.kernels.kernel_interface import Kernels
from mega_trainer.kernels.nf4_quantizer import WeightQuantizer
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.parallel.lora_layers import LoraAdapterPool
from mega_trainer.parallel.parallel_linear import DeferredWgradQueue
from mega_trainer.parallel.parameter_info import UniformInit, get_quantized_weight, make_parameter
from mega_trainer.parallel.tensor_parallel import SplitHeads, get_fused_heads_layout, make_vocab_parameter


@dataclass(frozen=True)
class ParameterBuilder:
    """Factory of a model's parameters, with the settings that all of them share.

    Attributes:
        config: the model's configuration.
        groups: process groups of the layout; default: groups of one.
        kernels: kernel back end.
        sp: split the residual stream over the sequence among the tensor ranks.
        dtype: of activations, and of parameters unless `stored_dtype` is set.
        stored_dtype: of parameters under ZeRO-3, which gathers them in `dtype`.
        device: of parameters and activations.
        deferred: queue for wgrad GEMMs, if the pipeline splits backwards.
        adapts: projections with a LoRA adapter.
        choice: several LoRA adapters instead, for inference.
        packed: canonical tensors that are quantised.
        packing: quantiser of the packed tensors.
    """

    config: ModelConfig
    groups: ParallelGroups = field(default_factory=ParallelGroups)
    kernels: Kernels = field(default_factory=TorchKernels)
    sp: bool = False
    dtype: torch.dtype = torch.float32
    stored_dtype: torch.dtype | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    deferred: DeferredWgradQueue | None = None
    adapts: Mapping[str, AdaptedModule] = field(default_factory=dict)
    choice: LoraAdapterPool | None = None
    packed: frozenset[str] = frozenset()
    packing: WeightQuantizer | None = None

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Dtype in which the model's parameters are stored."""
        return self.stored_dtype or self.dtype

    def build_head_parameters(
        self, blocks: Sequence[SplitHeads], tail: tuple[int, ...] = (), **start: Any
    ) -> list[nn.Parameter]:
        """Build the parameters, usually one, that join this tensor rank's heads of several tensors [count * size, *tail].

        Consecutive blocks whose heads are shared by the same number of ranks are one parameter; usually there is one.
        `start` is the initialisation, as for `make_parameter`.
        """
        out, tp = [], self.groups.tp
        for _, group in groupby(blocks, lambda block: max(1, tp.size // block.count)):
            run = list(group)
            shape, pieces = get_fused_heads_layout(run, tail, tp)
            sharers = (self.groups.head_sharing_group(run[0].count),)
            out.append(self.build_parameter(shape, pieces, grad_sync=sharers, replicas=sharers, **start))
        if len(out) > 1 and any(map(get_quantized_weight, out)):
            most = min(block.count for block in blocks)
            raise ConfigError(
                f"lora.quantize is not supported with parallel.tp = {tp.size}, more than the {most} heads of "
                f"{blocks[-1].name}: quantised heads cannot be shared by tensor ranks",
                hint=f"set parallel.tp to at most {most}, or remove lora.quantize",
            )
        return out

    def make_expert_piece(
        self, name: str, shape: Sequence[int], *, axis: int | None, place: int = 0, among: int = 1
    ) -> TensorPiece:
        """Return the position of this rank's slice in a canonical tensor that stacks experts.
        `name` is the tensor, a stack of experts of `shape`; each expert is split over `expert_tp` along `axis`.

        In the local parameter it is part number `place` of several, concatenated on the first axis; so it is in the
        canonical tensor `name`, if that has `among` > 1 parts.
        """
        assert self.config.moe is not None
        groups, experts = self.groups, self.config.moe.num_experts
        holders = groups.ep.size // groups.expert_tp.size
        first = groups.ep.rank // groups.expert_tp.size * (experts // holders)
        own = [n // groups.expert_tp.size if i == axis else n for i, n in enumerate(shape)]
        offset = [groups.expert_tp.rank * n if i == axis else 0 for i, n in enumerate(own)]
        start = [place * own[0], *(0 for _ in own[1:])]
        if among > 1:
            offset[0] += place * shape[0]
        whole = (experts, among * shape[0], *shape[1:])
        return TensorPiece(name, whole, (first, *offset), (0, *start), (experts // holders, *own))

    def build_expert_parameter(
        self,
        shape: Sequence[int],
        pieces: Sequence[TensorPiece],
        *,
        std: float | None = None,
        replicas: Sequence[CommGroup] = (),
    ) -> nn.Parameter:
        """Build a parameter that stacks this rank's experts, each of `shape`.
        `pieces` locate the experts in canonical tensors, `std` is for their initial values, and `replicas` are groups
        that hold copies.
        """
        groups = self.groups
        return make_parameter(
            (pieces[0].shape[0], *shape), pieces, data=groups.expert_data, dtype=self.parameter_dtype, device=self.device,
            std=std, parts=groups.ep, split=groups.expert_tp, grad_sync=replicas, replicas=replicas,
            packing=self._packing_of(pieces),
        )  # fmt: skip

    def _packing_of(self, pieces: Sequence[TensorPiece]) -> WeightQuantizer | None:
        """Return the quantiser of a parameter whose tensors are all packed, else None.

        A mix of packed and other tensors is refused by `freeze_parameters`, since not all are frozen.
        """
        return self.packing if pieces and all(piece.name in self.packed for piece in pieces) else None

    def build_replicated(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        fill: float = 0.0,
        std: float | None = None,
        partial_grad: bool = False,
    ) -> nn.Parameter:
        """Build a parameter that every tensor rank holds whole, with its gradient summed over them if it is partial.

        It is partial if it comes from a rank's part of the sequence (sequence parallelism) or, with `partial_grad`, from
        its heads or tokens.
        """
        tp = self.groups.tp
        sync: tuple[CommGroup, ...] = (tp,) if self.sp or partial_grad else ()
        pieces = [TensorPiece.whole_tensor(name, shape)]
        return self.build_parameter(shape, pieces, fill=fill, std=std, grad_sync=sync, replicas=(tp,))

    def build_vocab_parameter(
        self, name: str, width: int | None = None, *, rows: int | None = None, shared: Sequence[CommGroup] = ()
    ) -> nn.Parameter:
        """Build a [vocabulary or `rows`, D or `width`] parameter split by rows over tensor ranks.
        The `shared` groups hold copies of it (a tied embedding on two stages).
        """
        # not in place if used twice per micro-batch, or if a split backward computes it before the weight half
        config = self.config
        accumulate_in_place = not (config.tie_embeddings or config.mtp_layers or config.has_encoder or self.deferred)
        return make_vocab_parameter(
            name, rows or config.vocab_size, width or config.embedding_width, group=self.groups.tp, data=self.groups.dp_cp,
            dtype=self.parameter_dtype, device=self.device, std=config.init_std, grad_sync=shared, replicas=shared,
            parts=self.groups.tp, accumulate_in_place=accumulate_in_place,
        )  # fmt: skip

    def build_vocab_bias(self, name: str) -> nn.Parameter:
        """Build a bias [vocabulary], split over tensor ranks like the rows of the embedding."""
        return make_vocab_parameter(
            name, self.config.vocab_size, group=self.groups.tp, data=self.groups.dp_cp, dtype=self.parameter_dtype, device=self.device,
            parts=self.groups.tp,
        )  # fmt: skip

    def build_parameter(
        self,
        shape: Sequence[int],
        pieces: Sequence[TensorPiece],
        *,
        fill: float = 0.0,
        std: float | None = None,
        uniform: UniformInit | None = None,
        grad_sync: Sequence[CommGroup] = (),
        replicas: Sequence[CommGroup] = (),
    ) -> nn.Parameter:
        """Build a parameter located by `pieces`, whose gradient is summed over all data and context ranks.
        The other arguments set initial values and further groups to sum over.
        """
        return make_parameter(
            shape, pieces, data=self.groups.dp_cp, dtype=self.parameter_dtype, device=self.device,
            std=std, fill=fill, uniform=uniform, grad_sync=grad_sync, replicas=replicas, parts=self.groups.tp,
            packing=self._packing_of(pieces),
        )  # fmt: skip
