"""Makes the parallel layers of a model, each parameter with its pieces, its start and its gradient's groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from mega_ckpt.lora import Adapted
from mega_ckpt.names import HEAD, SCORE
from mega_ckpt.pieces import Piece
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_trainer.comm import Group
from mega_trainer.kernels.base import Kernels
from mega_trainer.kernels.leaves import Leaves
from mega_trainer.kernels.nf4 import Packing
from mega_trainer.kernels.torch import TorchKernels
from mega_trainer.mesh import Groups
from mega_trainer.model.adapters import Choice, column_adapter, row_adapter
from mega_trainer.model.norms import EachHeadNorm, HeadsNorm, Norm
from mega_trainer.model.recompute import SavedActivations
from mega_trainer.parallel.context import Kind
from mega_trainer.parallel.deferred import Deferred
from mega_trainer.parallel.expert import Dispatcher
from mega_trainer.parallel.linear import Linear
from mega_trainer.parallel.lora import Adapter, Selected
from mega_trainer.parallel.param import Uniform, make_parameter, packed_of
from mega_trainer.parallel.tensor import (
    ColumnLinear,
    Heads,
    RowLinear,
    VocabEmbedding,
    split_heads,
    vocab_parameter,
)


@dataclass(frozen=True)
class Builder:
    """What every layer of one model is made from.

    Attributes:
        config: the architecture.
        groups: who splits what; groups of one by default.
        kernels: the back end.
        leaves: computes what is neither a back end's nor a product.
        by_layer: that of the products of linear layers, for the layers where it is another.
        products: that of the linear layers to be made.
        sp: split the residual stream over the sequence among the tensor ranks.
        cp_kind: how attention reaches the tokens of other context ranks.
        dispatcher: brings tokens to their experts; None: `AllToAll`.
        dispatch_bound: how much of an even load may go to each rank's experts; None: as much as there is.
        dtype, device: of parameters and activations.
        deferred: takes the products for weight gradients, where a pipeline puts them off.
        saved: decides what layers keep for the backward.
        adapts: the projections that have adapters of low rank beside them.
        choice: several adapters in their place, for inference.
        packed: the canonical tensors that are kept in few bits.
        packing: how.
    """

    config: ModelConfig
    groups: Groups = field(default_factory=Groups)
    kernels: Kernels = field(default_factory=TorchKernels)
    leaves: Leaves = field(default_factory=Leaves)
    by_layer: Mapping[int, Kernels] = field(default_factory=dict)
    products: Kernels | None = None
    sp: bool = False
    cp_kind: Kind = "ring"
    dispatcher: Dispatcher | None = None
    dispatch_bound: float | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    deferred: Deferred | None = None
    saved: SavedActivations = field(default_factory=SavedActivations)
    adapts: Mapping[str, Adapted] = field(default_factory=dict)
    choice: Choice | None = None
    packed: frozenset[str] = frozenset()
    packing: Packing | None = None

    @property
    def linear(self) -> Linear:
        """For layers that split no weight: Y = X W^T + b by the kernels, its product for dW put off where others' are."""
        return Linear(self.linear_kernels, self.deferred)

    @property
    def linear_kernels(self) -> Kernels:
        """The back end of linear layers."""
        return self.products or self.kernels

    @property
    def unrounded(self) -> Builder:
        """For linear layers that are not in fp8 in any layer, such as those with a few numbers for each head."""
        return replace(self, products=None)

    def of_layer(self, layer: int) -> Builder:
        """For what is in that layer."""
        return replace(self, products=self.by_layer.get(layer))

    @property
    def residual_std(self) -> float:
        """Standard deviation for projections into the residual stream (GPT-2's scaling, when asked for)."""
        config = self.config
        sums = sum(half is not None for kind in config.kinds[: config.num_layers] for half in kind)
        sums += sum(map(config.crosses, range(config.num_layers)))
        return config.init_std / (math.sqrt(sums) if config.scale_residual_init else 1.0)

    def column(self, blocks: Sequence[Heads], *, bias: bool) -> ColumnLinear:
        """A fused column-parallel layer of several [count * size, D] projections, named without `.weight`."""
        config = self.config
        weights = self.heads(_suffixed(blocks, "weight"), (config.hidden_size,), std=config.init_std)
        biases = self.heads(_suffixed(blocks, "bias")) if bias else []
        layer = ColumnLinear(self.linear_kernels, weights, biases, self.groups.tp, sp=self.sp, deferred=self.deferred)
        layer.adapter = column_adapter(self, blocks, config.hidden_size)
        return layer

    def split(self, name: str, rows: int, width: int) -> nn.Parameter:
        """A weight [rows/T, width] split by rows, for an input that every tensor rank has whole already."""
        return self.heads([Heads(f"{name}.weight", rows)], (width,), std=self.config.init_std)[0]

    def split_adapter(self, name: str, rows: int, width: int) -> Adapter | Selected | None:
        """The adapter beside such a weight, where it has one."""
        return column_adapter(self, [Heads(name, rows)], width, whole=True)

    def heads(self, blocks: Sequence[Heads], tail: tuple[int, ...] = (), **start: Any) -> list[nn.Parameter]:
        """This rank's heads of several tensors [count * size, *tail], one block after another.

        One parameter for all neighbouring blocks that are shared by as many ranks; usually that is one. `start` says how
        they begin, as for `make_parameter`.
        """
        out, tp = [], self.groups.tp
        for _, run in groupby(blocks, lambda block: max(1, tp.size // block.count)):
            alike = list(run)
            shape, pieces = split_heads(alike, tail, tp)
            same = (self.groups.sharing(alike[0].count),)
            out.append(self.parameter(shape, pieces, grad_sync=same, replicas=same, **start))
        if len(out) > 1 and any(map(packed_of, out)):
            raise ConfigError(
                f"lora.quantize: of {blocks[-1].name} tensor ranks share heads, which are whole numbers in memory there",
                hint=f"parallel.tp of at most {min(block.count for block in blocks)}, or leave lora.quantize out",
            )
        return out

    def row(self, name: str, width: int, *, bias: bool) -> RowLinear:
        """A row-parallel projection [D, width] into the residual stream."""
        config, tp = self.config, self.groups.tp
        own, out = width // tp.size, config.hidden_size
        piece = Piece(f"{name}.weight", (out, width), (0, tp.rank * own), (0, 0), (out, own))
        weight = self.parameter((out, own), [piece], std=self.residual_std)
        offset = self.replicated(f"{name}.bias", (out,)) if bias else None
        layer = RowLinear(self.linear_kernels, weight, offset, tp, sp=self.sp, deferred=self.deferred)
        layer.adapter = row_adapter(self, name, width)
        return layer

    def expert_rows(self, names: Sequence[str], *, bias: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Fused projections [F, D] of this rank's experts, split by rows: [E/P, n F/Q, D], and their biases [E/P, n F/Q]."""
        own, width, into = self._expert_widths()
        out: list[nn.Parameter] = []
        for suffix, tail in (("weight", (into,)), ("bias", ()))[: 1 + bias]:
            pieces = [
                self.expert_piece(f"{name}.{suffix}", (width, *tail), axis=0, place=i) for i, name in enumerate(names)
            ]
            std = self.config.init_std if suffix == "weight" else None
            out.append(self.expert_parameter((own * len(names), *tail), pieces, std=std))
        return out[0], out[1] if bias else None

    def expert_columns(self, name: str, *, bias: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
        """A projection [D, F] of this rank's experts, split by columns: [E/P, D, F/Q], and its bias, whole: [E/P, D]."""
        own, width, out = self._expert_widths()
        piece = self.expert_piece(f"{name}.weight", (out, width), axis=1)
        weight = self.expert_parameter((out, own), [piece], std=self.residual_std)
        if not bias:
            return weight, None
        same = (self.groups.expert_tp,)
        whole = self.expert_piece(f"{name}.bias", (out,), axis=None)
        return weight, self.expert_parameter((out,), [whole], replicas=same)

    def _expert_widths(self) -> tuple[int, int, int]:
        """F/Q and F of an expert, and D, or the width of the latent that it works on."""
        moe = self.config.moe
        assert moe is not None
        return (
            moe.ffn_hidden_size // self.groups.expert_tp.size,
            moe.ffn_hidden_size,
            moe.latent_size or self.config.hidden_size,
        )

    def expert_piece(
        self, name: str, shape: Sequence[int], *, axis: int | None, place: int = 0, among: int = 1
    ) -> Piece:
        """This rank's part of a stack of `shape`, split over the ranks of `expert_tp` by one of its axes.

        Locally it is the part number `place` of several, one after another on the first axis; so it is in the tensor
        `name`, if that has several `among` it.
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
        return Piece(name, whole, (first, *offset), (0, *start), (experts // holders, *own))

    def expert_parameter(
        self, shape: Sequence[int], pieces: Sequence[Piece], *, std: float | None = None, replicas: Sequence[Group] = ()
    ) -> nn.Parameter:
        """One of this rank's experts, each of `shape`; the rest as `ParamInfo` has it."""
        groups = self.groups
        return make_parameter(
            (pieces[0].shape[0], *shape), pieces, data=groups.expert_data, dtype=self.dtype, device=self.device,
            std=std, parts=groups.ep, split=groups.expert_tp, grad_sync=replicas, replicas=replicas,
            packing=self._packing_of(pieces),
        )  # fmt: skip

    def _packing_of(self, pieces: Sequence[Piece]) -> Packing | None:
        """What keeps a parameter in few bits. Tensors in one that are not all kept so are not all frozen, which is refused."""
        return self.packing if pieces and all(piece.name in self.packed for piece in pieces) else None

    def replicated(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        fill: float = 0.0,
        std: float | None = None,
        partial_grad: bool = False,
    ) -> nn.Parameter:
        """A parameter that every tensor rank holds whole.

        Its gradient is summed over them where each sees only a part: a part of the sequence (sequence parallelism) or,
        with `partial_grad`, a part of the heads.
        """
        tp = self.groups.tp
        sync: tuple[Group, ...] = (tp,) if self.sp or partial_grad else ()
        pieces = [Piece.whole(name, shape)]
        return self.parameter(shape, pieces, fill=fill, std=std, grad_sync=sync, replicas=(tp,))

    def norm(self, name: str) -> Norm:
        """The norm of the residual stream that the configuration asks for."""
        config, shape = self.config, (self.config.hidden_size,)
        layer = config.norm == "layernorm"
        bias = self.replicated(f"{name}.bias", shape) if layer and config.norm_bias else None
        weight = self.replicated(f"{name}.weight", shape, fill=self.norm_fill)
        return Norm(self.kernels, weight, bias, config.norm_eps, zero_centered=config.zero_centered_norm, layer=layer)

    @property
    def norm_fill(self) -> float:
        """What the weight of a norm starts from."""
        return 0.0 if self.config.zero_centered_norm else 1.0

    def qk_norm(self, name: str, heads: int) -> Norm | HeadsNorm | EachHeadNorm:
        """The norm of queries or keys that the configuration asks for: over each head, or over all of them."""
        size, eps, centered = self.config.head_size, self.config.norm_eps, self.config.zero_centered_norm
        if self.config.qk_norm_span == "all":
            weight = self.heads([Heads(f"{name}.weight", heads, size)], fill=self.norm_fill)[0]
            return HeadsNorm(weight, eps, self.groups.tp, zero_centered=centered)
        if self.config.qk_norm_span == "each":
            weight = self.heads([Heads(f"{name}.weight", heads)], (size,), fill=self.norm_fill)[0]
            return EachHeadNorm(weight, eps, zero_centered=centered)
        # a rank sees only its own heads, so the gradient is partial
        weight = self.replicated(f"{name}.weight", (size,), fill=self.norm_fill, partial_grad=True)
        return Norm(self.kernels, weight, None, eps, zero_centered=centered)

    def sinks(self, name: str) -> nn.Parameter:
        """This rank's part [H/T] of a number for each head."""
        return self.heads([Heads(name, self.config.num_attention_heads)], std=self.config.init_std)[0]

    def vocabulary(self, name: str, *, shared: Sequence[Group] = ()) -> nn.Parameter:
        """A [V, D] parameter split by rows; `shared` groups hold copies of it (a tied embedding on two stages)."""
        # where a backward is cut in two, its gradient comes with the first half and is put in its place with the second
        config = self.config
        straight = not (config.tie_embeddings or config.mtp_layers or config.has_encoder or self.deferred)
        return vocab_parameter(
            name, self.config.vocab_size, self.config.hidden_size, group=self.groups.tp, data=self.groups.dp_cp,
            dtype=self.dtype, device=self.device, std=self.config.init_std, grad_sync=shared, replicas=shared,
            parts=self.groups.tp, straight=straight,
        )  # fmt: skip

    def head(self) -> nn.Parameter:
        """The output matrix [V/T, D]; of a reward model [1, D], whole on every tensor rank."""
        if not self.config.score:
            return self.vocabulary(HEAD)
        return self.replicated(SCORE, (1, self.config.hidden_size), std=self.config.init_std)

    def vocabulary_bias(self, name: str) -> nn.Parameter:
        """A [V] parameter, split as the rows of `vocabulary` are."""
        return vocab_parameter(
            name, self.config.vocab_size, group=self.groups.tp, data=self.groups.dp_cp, dtype=self.dtype, device=self.device,
            parts=self.groups.tp,
        )  # fmt: skip

    def embedding(self, weight: nn.Parameter) -> VocabEmbedding:
        """The token embedding over `weight`."""
        return VocabEmbedding(weight, self.groups.tp, sp=self.sp)

    def parameter(
        self,
        shape: Sequence[int],
        pieces: Sequence[Piece],
        *,
        fill: float = 0.0,
        std: float | None = None,
        uniform: Uniform | None = None,
        grad_sync: Sequence[Group] = (),
        replicas: Sequence[Group] = (),
    ) -> nn.Parameter:
        """One whose gradient is summed over all data ranks; the rest as `ParamInfo` has it."""
        return make_parameter(
            shape, pieces, data=self.groups.dp_cp, dtype=self.dtype, device=self.device,
            std=std, fill=fill, uniform=uniform, grad_sync=grad_sync, replicas=replicas, parts=self.groups.tp,
            packing=self._packing_of(pieces),
        )  # fmt: skip


def _suffixed(blocks: Sequence[Heads], suffix: str) -> list[Heads]:
    return [replace(block, name=f"{block.name}.{suffix}") for block in blocks]
