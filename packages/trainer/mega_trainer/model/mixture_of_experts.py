"""Mixture-of-experts (MoE) feed-forward (arXiv:1701.06538, arXiv:2401.06066).

Legend: B batch, S sequence, D model width, F width of an expert, E experts, M rows of this rank's experts, Q = expert_tp,
P = ep, T tensor-parallel ranks.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from mega_common.model_config import MoeConfig
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.model.expert_router import ExpertRouter
from mega_trainer.model.feed_forward import FeedForward, make_activation
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.lora_adapters import build_expert_adapter
from mega_trainer.parallel.expert_parallel import (
    AllToAllDispatcher,
    add_grouped_bias,
    gather_token_shares,
    run_through_experts,
    take_token_share,
)
from mega_trainer.parallel.expert_routing import RoutedTokens
from mega_trainer.parallel.parallel_linear import apply_grouped_linear


class MixtureOfExperts(nn.Module):
    """Mixture-of-experts layer: weighted sum of each token's experts' outputs, plus a shared expert's, if any.

    With `zero_experts`, a token's weights of experts without weights multiply the token itself. With `shortcut`, the
    output of the routed experts follows that of the shared expert, and is not added to it.

    With `latent_size` L, tokens are projected to [N, L] before the dispatch, and back to [N, D] after the combine.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        moe, name, groups = build.config.moe, f"model.layers.{layer}.mlp", build.groups
        assert moe is not None
        self.tp, self.sp, self.moe = groups.tp, build.sp, moe
        self.sharers = groups.cp.size * (groups.tp.size if build.sp else 1)  # ranks that share a sequence's positions
        self.router = ExpertRouter(build, layer)
        self.experts = GroupedExperts(build, f"{name}.experts")
        self.dispatch = build.dispatcher or AllToAllDispatcher(
            moe.num_experts, groups.ep, groups.expert_tp.size, build.dispatch_bound, build.interleaver
        )
        self.linear, self.into_latent, self.out_of_latent = build.unsharded_linear, None, None
        if moe.latent_size:
            width, config = moe.latent_size, build.config
            # partial_grad: every tensor rank has different tokens
            whole = partial(build.build_replicated, partial_grad=True)
            self.into_latent = whole(f"{name}.fc1_latent_proj.weight", (width, config.hidden_size), std=config.init_std)
            self.out_of_latent = whole(
                f"{name}.fc2_latent_proj.weight", (config.hidden_size, width), std=build.residual_init_std
            )
        self.norm = build.build_residual_norm(f"{name}.output_norm") if moe.output_norm else None
        self.shared, self.shared_gate, self.shared_scaling = None, None, moe.shared_scaling
        if moe.shared_ffn_hidden_size:
            self.shared = FeedForward(build, f"{name}.shared_expert", moe.shared_ffn_hidden_size)
        if moe.shared_gate:
            shape = (1, build.config.hidden_size)
            self.shared_gate = build.build_replicated(
                f"{name}.shared_expert_gate.weight", shape, std=build.config.init_std
            )

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Map hidden states [B, S or S/T, D] to the experts' output, of an equal shape or, with a shortcut, of width 2 D.
        S/T is the length under sequence parallelism.
        """
        flat = x.flatten(0, 1)
        # tensor ranks split the tokens, so that no expert computes a token twice
        own = flat if self.sp else take_token_share(flat, self.tp)
        chosen, weights, own = self.router(own, self._describe_tokens(x, context), context.routing, context.routes)
        chosen, unchanged = split_zero_experts(own, chosen, weights, self.moe)
        own = own if self.into_latent is None else self.linear(own, self.into_latent)
        dispatch = self.dispatch.dispatch_tokens(own, chosen, weights)
        # overlaps with the exchange
        shared = None if self.shared is None else self._run_shared_expert(x, self.shared, context)
        y, dropped = run_through_experts(dispatch, self.experts)
        if context.routing is not None:
            context.routing.record_dropped_choices(self.router.layer, dropped)
        y = y if self.out_of_latent is None else self.linear(y, self.out_of_latent)
        y = y if unchanged is None else y + unchanged
        y = (y if self.sp else gather_token_shares(y, self.tp, flat.shape[0])).view_as(x)
        if shared is not None:
            y = torch.cat([shared, y], -1) if self.moe.shortcut else y + shared
        return y if self.norm is None else self.norm(y)

    def _run_shared_expert(self, x: Tensor, expert: FeedForward, context: ForwardContext) -> Tensor:
        y: Tensor = expert(x, context)
        y = y if self.shared_scaling == 1 else y * self.shared_scaling
        return y if self.shared_gate is None else y * torch.sigmoid(nn.functional.linear(x, self.shared_gate))

    def _describe_tokens(self, x: Tensor, context: ForwardContext) -> RoutedTokens:
        """Return rows, positions and loss mask of this rank's tokens."""
        rows, length = x.shape[:2]
        first = self.tp.rank * length if self.sp else 0
        part = slice(first, first + length)
        positions = torch.arange(part.start, part.stop, device=x.device)
        mask = torch.ones(rows, length, dtype=torch.bool, device=x.device)
        if context.routing is not None and context.routing.affects_loss_mask is not None:
            mask = context.routing.affects_loss_mask[:, part]
        source = context.routing or context.routes
        if source is not None and source.token_indices is not None:
            positions = source.token_indices[part]
        row = torch.arange(rows, device=x.device).repeat_interleave(length)
        ids = [] if context.tokens is None else [context.tokens[:, part].flatten()]
        fields = [row, positions.repeat(rows), mask.flatten(), *ids]
        row, position, mask, *ids = fields if self.sp else [take_token_share(field, self.tp) for field in fields]
        return RoutedTokens(row, position, mask, rows, length * self.sharers, *ids)


def split_zero_experts(x: Tensor, chosen: Tensor, weights: Tensor, moe: MoeConfig) -> tuple[Tensor, Tensor | None]:
    """Return the choices with -1 for zero experts, and these experts' weighted output [N, D]; None if the model has none.
    Zero experts have no weights, and return their input x [N, D]. Choices are int64 [N, K].
    """
    if not moe.zero_experts:
        return chosen, None
    zero = chosen >= moe.num_experts
    return chosen.masked_fill(zero, -1), x * (weights * zero).sum(-1, keepdim=True).to(x.dtype)


class GroupedExperts(nn.Module):
    """Routed experts of this rank, each with its slice of the expert's hidden width (`expert_tp`).
    Outputs must be summed over the ranks that share an expert.

    Gradients are summed over the ranks that hold the same experts.
    """

    def __init__(self, build: LayerBuilder, name: str) -> None:
        super().__init__()
        config = build.config
        self.activate, self.saved = make_activation(build), build.saved
        self.linear = partial(apply_grouped_linear, kernels=build.linear_kernels, deferred=build.deferred)
        self.weighted_inputs = config.moe is not None and config.moe.weighted_inputs
        self.first_part = build.groups.expert_tp.rank == 0
        parts = ["gate_proj", "up_proj"] if config.has_gated_mlp else ["up_proj"]
        self.up, self.up_bias = build.build_expert_input_projections(
            [f"{name}.{part}" for part in parts], bias=config.mlp_bias
        )
        self.down, self.down_bias = build.build_expert_output_projection(f"{name}.down_proj", bias=config.mlp_bias)
        fused = f"{name}.gate_up_proj" if config.has_gated_mlp else f"{name}.up_proj"
        self.up_adapter = build_expert_adapter(build, fused, parts=len(parts))
        self.down_adapter = build_expert_adapter(build, f"{name}.down_proj", columns=True)

    def forward(self, x: Tensor, weights: Tensor, rows: GroupedRows) -> Tensor:
        """Map rows sorted by expert [M, D] and their weights [M] to weighted expert outputs [M, D], partial over `expert_tp`."""
        after: Tensor | None = weights
        if self.weighted_inputs:
            x, after = x * weights.to(x.dtype).unsqueeze(-1), None
        h = self.linear(x, self.up, rows)
        h = h if self.up_adapter is None else self.up_adapter(x, h, rows)
        h = h if self.up_bias is None else add_grouped_bias(h, self.up_bias, rows)
        # weighted before the last GEMM, which is linear, so that the outputs are not needed for the weights' gradients
        h = self.saved.recompute_output("activation", self.activate, h, *(() if after is None else (after,)))
        y = self.linear(h, self.down, rows)
        y = y if self.down_adapter is None else self.down_adapter(h, y, rows)
        if self.down_bias is None:
            return y
        # added by one of the parts
        bias = self.down_bias if self.first_part else self.down_bias * 0
        return add_grouped_bias(y, bias, rows, after)
