"""Builder of a model's parallel layers: parameters with their checkpoint pieces, initialisation and gradient groups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from mega_ckpt.canonical_tensors import HEAD, SCORE
from mega_ckpt.lora_tensors import AdaptedModule
from mega_ckpt.tensor_pieces import TensorPiece
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.kernels.kernel_interface import Kernels
from mega_trainer.kernels.leaf_compiler import LeafCompiler
from mega_trainer.kernels.nf4_quantizer import WeightQuantizer
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.model.activation_checkpointing import SavedActivations
from mega_trainer.model.lora_adapters import LoraAdapterPool, build_column_adapter, build_row_adapter
from mega_trainer.model.norms import AllHeadsRMSNorm, Norm, PerHeadLayerNorm
from mega_trainer.parallel.context_parallel import ContextParallelKind
from mega_trainer.parallel.deferred_wgrad import DeferredWgradQueue
from mega_trainer.parallel.expert_parallel import ExpertDispatcher
from mega_trainer.parallel.lora_layers import LoraAdapterLayer, PerRowAdapters
from mega_trainer.parallel.parallel_linear import LinearFunction
from mega_trainer.parallel.parameter_info import UniformInit, get_packed_weight, make_parameter
from mega_trainer.parallel.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    SplitHeads,
    VocabParallelEmbedding,
    make_vocab_parameter,
    split_fused_heads,
)


@dataclass(frozen=True)
class LayerBuilder:
    """Settings and factory methods that every layer of one model is built from.

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
    groups: ParallelGroups = field(default_factory=ParallelGroups)
    kernels: Kernels = field(default_factory=TorchKernels)
    leaves: LeafCompiler = field(default_factory=LeafCompiler)
    by_layer: Mapping[int, Kernels] = field(default_factory=dict)
    products: Kernels | None = None
    sp: bool = False
    cp_kind: ContextParallelKind = "ring"
    dispatcher: ExpertDispatcher | None = None
    dispatch_bound: float | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    deferred: DeferredWgradQueue | None = None
    saved: SavedActivations = field(default_factory=SavedActivations)
    adapts: Mapping[str, AdaptedModule] = field(default_factory=dict)
    choice: LoraAdapterPool | None = None
    packed: frozenset[str] = frozenset()
    packing: WeightQuantizer | None = None

    @property
    def unsharded_linear(self) -> LinearFunction:
        """Linear operation for layers without sharded weights: Y = X W^T + b by the kernels, with the wgrad GEMM
        deferred where a pipeline defers it.
        """
        return LinearFunction(self.linear_kernels, self.deferred)

    @property
    def linear_kernels(self) -> Kernels:
        """Back end of the linear layers."""
        return self.products or self.kernels

    @property
    def without_fp8(self) -> LayerBuilder:
        """Builder for linear layers that are never in fp8, such as those with a few numbers per head."""
        return replace(self, products=None)

    def builder_for_layer(self, layer: int) -> LayerBuilder:
        """Return the builder for the modules of that layer."""
        return replace(self, products=self.by_layer.get(layer))

    @property
    def residual_init_std(self) -> float:
        """Standard deviation for projections into the residual stream (GPT-2's scaling, when asked for)."""
        config = self.config
        sums = sum(half is not None for kind in config.layer_kinds[: config.num_layers] for half in kind)
        sums += sum(map(config.has_cross_attention, range(config.num_layers)))
        return config.init_std / (math.sqrt(sums) if config.scale_residual_init else 1.0)

    def build_column_linear(self, blocks: Sequence[SplitHeads], *, bias: bool) -> ColumnParallelLinear:
        """Build a fused column-parallel layer of several [count * size, D] projections, named without `.weight`."""
        config = self.config
        weights = self.build_head_parameters(_suffixed(blocks, "weight"), (config.hidden_size,), std=config.init_std)
        biases = self.build_head_parameters(_suffixed(blocks, "bias")) if bias else []
        layer = ColumnParallelLinear(
            self.linear_kernels, weights, biases, self.groups.tp, sp=self.sp, deferred=self.deferred
        )
        layer.adapter = build_column_adapter(self, blocks, config.hidden_size)
        return layer

    def build_column_weight(self, name: str, rows: int, width: int) -> nn.Parameter:
        """Build a weight [rows/T, width] split by rows, for an input that every tensor rank already has whole."""
        return self.build_head_parameters([SplitHeads(f"{name}.weight", rows)], (width,), std=self.config.init_std)[0]

    def build_column_weight_adapter(self, name: str, rows: int, width: int) -> LoraAdapterLayer | PerRowAdapters | None:
        """Build the LoRA adapter of a weight of `build_column_weight`, or return None."""
        return build_column_adapter(self, [SplitHeads(name, rows)], width, whole=True)

    def build_head_parameters(
        self, blocks: Sequence[SplitHeads], tail: tuple[int, ...] = (), **start: Any
    ) -> list[nn.Parameter]:
        """Build this rank's heads of several tensors [count * size, *tail], one block after another.

        One parameter for all neighbouring blocks that are shared by as many ranks; usually that is one. `start` says how
        they begin, as for `make_parameter`.
        """
        out, tp = [], self.groups.tp
        for _, run in groupby(blocks, lambda block: max(1, tp.size // block.count)):
            alike = list(run)
            shape, pieces = split_fused_heads(alike, tail, tp)
            same = (self.groups.head_sharing_group(alike[0].count),)
            out.append(self.build_parameter(shape, pieces, grad_sync=same, replicas=same, **start))
        if len(out) > 1 and any(map(get_packed_weight, out)):
            raise ConfigError(
                f"lora.quantize: of {blocks[-1].name} tensor ranks share heads, which are whole numbers in memory there",
                hint=f"parallel.tp of at most {min(block.count for block in blocks)}, or leave lora.quantize out",
            )
        return out

    def build_row_linear(self, name: str, width: int, *, bias: bool) -> RowParallelLinear:
        """Build a row-parallel projection [D, width] into the residual stream."""
        config, tp = self.config, self.groups.tp
        own, out = width // tp.size, config.hidden_size
        piece = TensorPiece(f"{name}.weight", (out, width), (0, tp.rank * own), (0, 0), (out, own))
        weight = self.build_parameter((out, own), [piece], std=self.residual_init_std)
        offset = self.build_replicated(f"{name}.bias", (out,)) if bias else None
        layer = RowParallelLinear(self.linear_kernels, weight, offset, tp, sp=self.sp, deferred=self.deferred)
        layer.adapter = build_row_adapter(self, name, width)
        return layer

    def build_expert_rows(self, names: Sequence[str], *, bias: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Build fused projections [F, D] of this rank's experts, split by rows: [E/P, n F/Q, D], and their biases [E/P,
        n F/Q].
        """
        own, width, into = self._expert_widths()
        out: list[nn.Parameter] = []
        for suffix, tail in (("weight", (into,)), ("bias", ()))[: 1 + bias]:
            pieces = [
                self.make_expert_piece(f"{name}.{suffix}", (width, *tail), axis=0, place=i)
                for i, name in enumerate(names)
            ]
            std = self.config.init_std if suffix == "weight" else None
            out.append(self.build_expert_parameter((own * len(names), *tail), pieces, std=std))
        return out[0], out[1] if bias else None

    def build_expert_columns(self, name: str, *, bias: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Build a projection [D, F] of this rank's experts, split by columns: [E/P, D, F/Q], and its bias, whole: [E/P,
        D].
        """
        own, width, out = self._expert_widths()
        piece = self.make_expert_piece(f"{name}.weight", (out, width), axis=1)
        weight = self.build_expert_parameter((out, own), [piece], std=self.residual_init_std)
        if not bias:
            return weight, None
        same = (self.groups.expert_tp,)
        whole = self.make_expert_piece(f"{name}.bias", (out,), axis=None)
        return weight, self.build_expert_parameter((out,), [whole], replicas=same)

    def _expert_widths(self) -> tuple[int, int, int]:
        """Return F/Q and F of an expert, and D or the width of the latent that the expert works on."""
        moe = self.config.moe
        assert moe is not None
        return (
            moe.ffn_hidden_size // self.groups.expert_tp.size,
            moe.ffn_hidden_size,
            moe.latent_size or self.config.hidden_size,
        )

    def make_expert_piece(
        self, name: str, shape: Sequence[int], *, axis: int | None, place: int = 0, among: int = 1
    ) -> TensorPiece:
        """Return this rank's piece of a stack of expert tensors of `shape`, split over the ranks of `expert_tp` along
        `axis`.

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
        return TensorPiece(name, whole, (first, *offset), (0, *start), (experts // holders, *own))

    def build_expert_parameter(
        self,
        shape: Sequence[int],
        pieces: Sequence[TensorPiece],
        *,
        std: float | None = None,
        replicas: Sequence[CommGroup] = (),
    ) -> nn.Parameter:
        """Build a parameter of this rank's experts, each of `shape`; the other arguments are those of `ParameterInfo`."""
        groups = self.groups
        return make_parameter(
            (pieces[0].shape[0], *shape), pieces, data=groups.expert_data, dtype=self.dtype, device=self.device,
            std=std, parts=groups.ep, split=groups.expert_tp, grad_sync=replicas, replicas=replicas,
            packing=self._packing_of(pieces),
        )  # fmt: skip

    def _packing_of(self, pieces: Sequence[TensorPiece]) -> WeightQuantizer | None:
        """Return the quantiser of a parameter whose tensors are all kept in few bits, else None. A mix of packed and
        plain tensors in one parameter is refused elsewhere, since not all are frozen.
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
        """Build a parameter that every tensor rank holds whole.

        Its gradient is summed over them where each sees only a part: a part of the sequence (sequence parallelism) or,
        with `partial_grad`, a part of the heads.
        """
        tp = self.groups.tp
        sync: tuple[CommGroup, ...] = (tp,) if self.sp or partial_grad else ()
        pieces = [TensorPiece.whole_tensor(name, shape)]
        return self.build_parameter(shape, pieces, fill=fill, std=std, grad_sync=sync, replicas=(tp,))

    def build_residual_norm(self, name: str) -> Norm:
        """Build the norm of the residual stream that the configuration asks for."""
        config, shape = self.config, (self.config.hidden_size,)
        layer = config.norm == "layernorm"
        bias = self.build_replicated(f"{name}.bias", shape) if layer and config.norm_bias else None
        weight = self.build_replicated(f"{name}.weight", shape, fill=self.norm_init_value)
        return Norm(self.kernels, weight, bias, config.norm_eps, zero_centered=config.zero_centered_norm, layer=layer)

    @property
    def norm_init_value(self) -> float:
        """Initial value of a norm's weight."""
        return 0.0 if self.config.zero_centered_norm else 1.0

    def build_qk_norm(self, name: str, heads: int) -> Norm | AllHeadsRMSNorm | PerHeadLayerNorm:
        """Build the norm of queries or keys that the configuration asks for: over each head, or over all of them."""
        size, eps, centered = self.config.query_key_head_dim, self.config.norm_eps, self.config.zero_centered_norm
        if self.config.qk_norm_span == "all":
            weight = self.build_head_parameters([SplitHeads(f"{name}.weight", heads, size)], fill=self.norm_init_value)[
                0
            ]
            return AllHeadsRMSNorm(weight, eps, self.groups.tp, zero_centered=centered)
        if self.config.qk_norm_span == "each":
            weight = self.build_head_parameters(
                [SplitHeads(f"{name}.weight", heads)], (size,), fill=self.norm_init_value
            )[0]
            return PerHeadLayerNorm(weight, eps, zero_centered=centered)
        # a rank sees only its own heads, so the gradient is partial
        weight = self.build_replicated(f"{name}.weight", (size,), fill=self.norm_init_value, partial_grad=True)
        return Norm(self.kernels, weight, None, eps, zero_centered=centered)

    def build_attention_sinks(self, name: str) -> nn.Parameter:
        """Build this rank's attention sinks [H/T], one number per head."""
        return self.build_head_parameters(
            [SplitHeads(name, self.config.num_attention_heads)], std=self.config.init_std
        )[0]

    def build_vocab_parameter(self, name: str, *, shared: Sequence[CommGroup] = ()) -> nn.Parameter:
        """Build a [V, D] parameter split by rows; `shared` groups hold copies of it (a tied embedding on two stages)."""
        # where a backward is cut in two, its gradient comes with the first half and is put in its place with the second
        config = self.config
        accumulate_in_place = not (config.tie_embeddings or config.mtp_layers or config.has_encoder or self.deferred)
        return make_vocab_parameter(
            name, self.config.vocab_size, self.config.hidden_size, group=self.groups.tp, data=self.groups.dp_cp,
            dtype=self.dtype, device=self.device, std=self.config.init_std, grad_sync=shared, replicas=shared,
            parts=self.groups.tp, accumulate_in_place=accumulate_in_place,
        )  # fmt: skip

    def build_output_matrix(self) -> nn.Parameter:
        """Build the output matrix [V/T, D]; of a reward model [1, D], whole on every tensor rank."""
        if not self.config.score:
            return self.build_vocab_parameter(HEAD)
        return self.build_replicated(SCORE, (1, self.config.hidden_size), std=self.config.init_std)

    def build_vocab_bias(self, name: str) -> nn.Parameter:
        """Build a [V] parameter, split like the rows of `build_vocab_parameter`."""
        return make_vocab_parameter(
            name, self.config.vocab_size, group=self.groups.tp, data=self.groups.dp_cp, dtype=self.dtype, device=self.device,
            parts=self.groups.tp,
        )  # fmt: skip

    def build_token_embedding(self, weight: nn.Parameter) -> VocabParallelEmbedding:
        """Build the token embedding over `weight`."""
        return VocabParallelEmbedding(weight, self.groups.tp, sp=self.sp)

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
        """Build a parameter whose gradient is summed over all data ranks; the other arguments are those of `ParameterInfo`."""
        return make_parameter(
            shape, pieces, data=self.groups.dp_cp, dtype=self.dtype, device=self.device,
            std=std, fill=fill, uniform=uniform, grad_sync=grad_sync, replicas=replicas, parts=self.groups.tp,
            packing=self._packing_of(pieces),
        )  # fmt: skip


def _suffixed(blocks: Sequence[SplitHeads], suffix: str) -> list[SplitHeads]:
    return [replace(block, name=f"{block.name}.{suffix}") for block in blocks]
