"""Builder of a model's parallel layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from mega_ckpt.canonical_tensors import HEAD, SCORE, SCORE_BIAS
from mega_ckpt.tensor_pieces import TensorPiece
from mega_trainer.kernels.kernel_interface import Kernels
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.model.activation_checkpointing import ActivationCheckpointer
from mega_trainer.model.lora_adapters import build_column_adapter, build_row_adapter
from mega_trainer.model.norms import AllHeadsRMSNorm, ExtensionNorm, Norm, PerHeadLayerNorm, PlainNorm
from mega_trainer.model.parameter_builder import ParameterBuilder
from mega_trainer.parallel.context_parallel import ContextParallelKind
from mega_trainer.parallel.expert_parallel import ExpertDispatcher
from mega_trainer.parallel.lora_layers import LoraAdapterLayer, PerRowAdapters
from mega_trainer.parallel.overlapped_linear import (
    OverlappedColumnFunction,
    OverlappedGemms,
    OverlappedRowFunction,
    OverlappedRowLinear,
)
from mega_trainer.parallel.parallel_linear import ParallelLinearFunction
from mega_trainer.parallel.pass_interleaver import PassInterleaver
from mega_trainer.parallel.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    SplitHeads,
    VocabParallelEmbedding,
)


@dataclass(frozen=True)
class LayerBuilder(ParameterBuilder):
    """Factory of the modules of a model's layers, with the settings that all of them share.

    Attributes:
        leaves: calls fusible functions outside the back end.
        by_layer: back end of the linear layers, for layers that have another one.
        products: back end of the linear layers of the current layer; None: `kernels`.
        overlapped: GEMMs of tensor-parallel layers that overlap with their collectives; None: collectives beside whole GEMMs.
        cp_kind: kind of context-parallel attention.
        dispatcher: dispatcher of tokens to experts; None: `AllToAllDispatcher`.
        interleaver: runs another pass while the all-to-all of experts is in flight; None: each pass runs alone.
        dispatch_bound: most rows of each rank's experts, as a multiple of an even load; None: unbounded.
        saved: policy of saved activations.
        blocks: mixers and feed-forward blocks of extensions, by name.
        functions: functions of extensions, with their options bound, by the field of `ModelConfig` that names one.
    """

    leaves: FusibleFunctionCompiler = field(default_factory=FusibleFunctionCompiler)
    by_layer: Mapping[int, Kernels] = field(default_factory=dict)
    products: Kernels | None = None
    overlapped: OverlappedGemms | None = None
    cp_kind: ContextParallelKind = "ring"
    dispatcher: ExpertDispatcher | None = None
    interleaver: PassInterleaver | None = None
    dispatch_bound: float | None = None
    saved: ActivationCheckpointer = field(default_factory=ActivationCheckpointer)
    blocks: Mapping[str, LayerFactory] = field(default_factory=dict)
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def unsharded_linear(self) -> ParallelLinearFunction:
        """Linear function Y = X W^T + b for weights that are not sharded; its wgrad GEMM is deferred if configured."""
        return ParallelLinearFunction(self.linear_kernels, self.deferred)

    @property
    def linear_kernels(self) -> Kernels:
        """Kernel back end of the linear layers, which may use fp8."""
        return self.products or self.kernels

    @property
    def without_fp8(self) -> LayerBuilder:
        """Copy of this builder whose linear layers never use fp8, for layers with few outputs per head."""
        return replace(self, products=None)

    def builder_for_layer(self, layer: int) -> LayerBuilder:
        """Return a copy of this layer builder with the linear back end and the attention heads of one layer.
        `layer` is the layer's number; some layers may be kept out of fp8.
        """
        return replace(self, products=self.by_layer.get(layer), config=self.config.get_layer_config(layer))

    @property
    def residual_init_std(self) -> float:
        """Standard deviation for projections into the residual stream, with GPT-2's scaling if configured."""
        config = self.config
        branches = sum(half is not None for kind in config.layer_kinds[: config.num_layers] for half in kind)
        branches += sum(map(config.has_cross_attention, range(config.num_layers)))
        return config.init_std / (math.sqrt(branches) if config.scale_residual_init else 1.0)

    def build_column_linear(self, blocks: Sequence[SplitHeads], *, bias: bool) -> ColumnParallelLinear:
        """Build a column-parallel linear layer that fuses projections split by heads, with their LoRA adapter, if any.
        The projections are [count * size, D], one for each of `blocks`.
        """
        config = self.config
        weights = self.build_head_parameters(_suffixed(blocks, "weight"), (config.hidden_size,), std=config.init_std)
        biases = self.build_head_parameters(_suffixed(blocks, "bias")) if bias else []
        layer = ColumnParallelLinear(
            self.linear_kernels, weights, biases, self.groups.tp, sp=self.sp, deferred=self.deferred
        )
        if self.overlapped is not None:
            layer.linear = OverlappedColumnFunction(
                self.linear_kernels, self.deferred, self.groups.tp, self.sp, overlapped=self.overlapped
            )
        layer.adapter = build_column_adapter(self, blocks, config.hidden_size)
        return layer

    def build_column_weight(self, name: str, rows: int, width: int) -> nn.Parameter:
        """Build a weight [rows/T, width] split by rows over T tensor ranks.
        Its input is one that every tensor rank already has unsplit.
        """
        return self.build_head_parameters([SplitHeads(f"{name}.weight", rows)], (width,), std=self.config.init_std)[0]

    def build_column_weight_adapter(self, name: str, rows: int, width: int) -> LoraAdapterLayer | PerRowAdapters | None:
        """Build the LoRA adapter of a weight made by `build_column_weight`, or return None if it is not adapted."""
        return build_column_adapter(self, [SplitHeads(name, rows)], width, whole=True)

    def build_row_linear(self, name: str, width: int, *, bias: bool) -> RowParallelLinear:
        """Build a row-parallel linear layer [D, width] for output to the residual stream, with its LoRA adapter, if any."""
        config, tp = self.config, self.groups.tp
        own, out = width // tp.size, config.hidden_size
        piece = TensorPiece(f"{name}.weight", (out, width), (0, tp.rank * own), (0, 0), (out, own))
        weight = self.build_parameter((out, own), [piece], std=self.residual_init_std)
        offset = self.build_replicated(f"{name}.bias", (out,)) if bias else None
        row_class = RowParallelLinear if self.overlapped is None else OverlappedRowLinear
        layer = row_class(self.linear_kernels, weight, offset, tp, sp=self.sp, deferred=self.deferred)
        if self.overlapped is not None:
            layer.linear = OverlappedRowFunction(
                self.linear_kernels, self.deferred, scatter=tp, overlapped=self.overlapped
            )
        layer.adapter = build_row_adapter(self, name, width)
        return layer

    def build_expert_input_projections(
        self, names: Sequence[str], *, bias: bool
    ) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Build the fused input projections, each [F, D], of this rank's experts, split by rows, and their bias or None.

        The weight is [E/P, n F/Q, D], the bias [E/P, n F/Q], for n names, P ranks along ep and Q along expert_tp.
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

    def build_expert_output_projection(self, name: str, *, bias: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Build the output projection of this rank's experts, split by columns, and its unsplit bias or None.
        The weight is [local experts, D, local columns], the bias [local experts, D].
        """
        own, width, out = self._expert_widths()
        piece = self.make_expert_piece(f"{name}.weight", (out, width), axis=1)
        weight = self.build_expert_parameter((out, own), [piece], std=self.residual_init_std)
        if not bias:
            return weight, None
        whole = self.make_expert_piece(f"{name}.bias", (out,), axis=None)
        return weight, self.build_expert_parameter((out,), [whole], replicas=(self.groups.expert_tp,))

    def _expert_widths(self) -> tuple[int, int, int]:
        """Return F/Q and F of an expert, and its input width: D, or that of the latent."""
        moe = self.config.moe
        assert moe is not None
        return (
            moe.ffn_hidden_size // self.groups.expert_tp.size,
            moe.ffn_hidden_size,
            moe.latent_size or self.config.hidden_size,
        )

    def build_residual_norm(self, name: str, width: int | None = None) -> Norm | PlainNorm | ExtensionNorm:
        """Build the model's norm (RMSNorm, LayerNorm or an extension's), of the residual stream or of `width`."""
        config, shape = self.config, (width or self.config.hidden_size,)
        if (normalize := self.functions.get("norm")) is not None:
            scale = self.build_replicated(f"{name}.weight", shape, fill=1.0) if config.norm_weight else None
            return ExtensionNorm(normalize, scale, config.norm_eps)
        layer = config.norm == "layernorm"
        if not config.norm_weight:
            return PlainNorm(config.norm_eps, layer=layer)
        bias = self.build_replicated(f"{name}.bias", shape) if layer and config.norm_bias else None
        weight = self.build_replicated(f"{name}.weight", shape, fill=self.norm_init_value)
        return Norm(self.kernels, weight, bias, config.norm_eps, zero_centered=config.zero_centered_norm, layer=layer)

    @property
    def norm_init_value(self) -> float:
        """Initial value of a norm's weight: 0 for zero-centred norms, else 1."""
        return 0.0 if self.config.zero_centered_norm else 1.0

    def build_qk_norm(self, name: str, heads: int) -> Norm | AllHeadsRMSNorm | PerHeadLayerNorm | PlainNorm:
        """Build the norm of queries or keys that the configuration asks for: over each head, or over all of them."""
        size, eps, centered = self.config.query_key_head_dim, self.config.norm_eps, self.config.zero_centered_norm
        if self.config.qk_norm_span == "plain":
            return PlainNorm(eps)
        if self.config.qk_norm_span == "all":
            return self.build_split_norm(name, heads, size)
        if self.config.qk_norm_span == "each":
            weight = self.build_head_parameters(
                [SplitHeads(f"{name}.weight", heads)], (size,), fill=self.norm_init_value
            )[0]
            return PerHeadLayerNorm(weight, eps, zero_centered=centered)
        # partial_grad: a rank's gradient is only from its own heads
        weight = self.build_replicated(f"{name}.weight", (size,), fill=self.norm_init_value, partial_grad=True)
        layer = self.config.qk_norm_span == "layernorm"
        bias = self.build_replicated(f"{name}.bias", (size,), partial_grad=True) if layer else None
        return Norm(self.kernels, weight, bias, eps, zero_centered=centered, layer=layer)

    def build_split_norm(self, name: str, count: int, size: int = 1) -> AllHeadsRMSNorm:
        """Build the RMSNorm of a vector of `count` parts of `size`, which the tensor ranks split."""
        block = SplitHeads(f"{name}.weight", count, size)
        (weight,) = self.build_head_parameters([block], fill=self.norm_init_value)
        centered = self.config.zero_centered_norm
        return AllHeadsRMSNorm(weight, self.config.norm_eps, self.groups.tp, zero_centered=centered)

    def build_attention_sinks(self, name: str) -> nn.Parameter:
        """Build this rank's attention sinks [H/T], one number per head, for H heads split over T tensor ranks."""
        return self.build_head_parameters(
            [SplitHeads(name, self.config.num_attention_heads)], std=self.config.init_std
        )[0]

    def build_output_matrix(self) -> nn.Parameter:
        """Build the output matrix: [V/T, D] split by vocabulary rows, or for a reward or task head whole [labels, D].
        T is the number of tensor ranks.
        """
        if not self.config.num_score_outputs:
            return self.build_vocab_parameter(HEAD)
        return self.build_replicated(
            SCORE, (self.config.num_score_outputs, self.config.hidden_size), std=self.config.init_std
        )

    def build_output_bias(self) -> nn.Parameter | None:
        """Build the bias of the output matrix, [V/T] or for a task head [labels], or None if the model has none."""
        if self.config.has_score_bias:
            return self.build_replicated(SCORE_BIAS, (self.config.num_score_outputs,))
        return self.build_vocab_bias("lm_head.bias") if self.config.has_output_bias else None

    def build_token_embedding(self, weight: nn.Parameter) -> VocabParallelEmbedding:
        """Build the token embedding that looks up rows of `weight`, split by vocabulary rows over tensor ranks."""
        return VocabParallelEmbedding(weight, self.groups.tp, sp=self.sp)


LayerFactory = Callable[[LayerBuilder, int], nn.Module]


def _suffixed(blocks: Sequence[SplitHeads], suffix: str) -> list[SplitHeads]:
    return [replace(block, name=f"{block.name}.{suffix}") for block in blocks]
