"""A mixture of experts in place of the feed-forward block (arXiv:1701.06538, arXiv:2401.06066).

Legend: B batch, S sequence, D model width, F width of an expert, E experts, M rows of this rank's experts, Q = expert_tp,
P = ep, T tensor-parallel ranks.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from mega_trainer.kernels.grouped import Rows
from mega_trainer.model.activation import activate
from mega_trainer.model.adapters import expert_adapter
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.mlp import Mlp
from mega_trainer.model.router import Router
from mega_trainer.model.routing import Tokens
from mega_trainer.parallel.expert import AllToAll, all_shares, grouped_bias, own_share, through
from mega_trainer.parallel.linear import grouped_linear


class Moe(nn.Module):
    """The weighted sum of each token's experts, and the expert that all tokens pass, if there is one.

    With `latent_size` the experts' tokens are [N, L], by a projection before they are sent and one behind their sum.
    """

    def __init__(self, build: Builder, layer: int) -> None:
        super().__init__()
        moe, name, groups = build.config.moe, f"model.layers.{layer}.mlp", build.groups
        assert moe is not None
        self.tp, self.sp = groups.tp, build.sp
        self.sharers = groups.cp.size * (groups.tp.size if build.sp else 1)  # ranks that share a sequence's positions
        self.router = Router(build, layer)
        self.experts = Experts(build, f"{name}.experts")
        self.dispatch = build.dispatcher or AllToAll(
            moe.num_experts, groups.ep, groups.expert_tp.size, build.dispatch_bound
        )
        self.linear, self.into_latent, self.out_of_latent = build.linear, None, None
        if moe.latent_size:
            width, config = moe.latent_size, build.config
            # every tensor rank has tokens of its own
            whole = partial(build.replicated, partial_grad=True)
            self.into_latent = whole(f"{name}.fc1_latent_proj.weight", (width, config.hidden_size), std=config.init_std)
            self.out_of_latent = whole(
                f"{name}.fc2_latent_proj.weight", (config.hidden_size, width), std=build.residual_std
            )
        self.shared = self.shared_gate = None
        if moe.shared_ffn_hidden_size:
            self.shared = Mlp(build, f"{name}.shared_expert", moe.shared_ffn_hidden_size)
        if moe.shared_gate:
            shape = (1, build.config.hidden_size)
            self.shared_gate = build.replicated(f"{name}.shared_expert_gate.weight", shape, std=build.config.init_std)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """[B, S or S/T, D] -> the same shape."""
        flat = x.flatten(0, 1)
        # every tensor rank has tokens of its own, so that no expert computes anything twice
        own = flat if self.sp else own_share(flat, self.tp)
        chosen, weights, own = self.router(own, self._tokens(x, context), context.routing, context.routes)
        own = own if self.into_latent is None else self.linear(own, self.into_latent)
        delivery = self.dispatch.send(own, chosen, weights)
        shared = None if self.shared is None else self._shared(x, self.shared, context)  # beside the exchange
        y, lost = through(delivery, self.experts)
        if context.routing is not None:
            context.routing.lose(self.router.layer, lost)
        y = y if self.out_of_latent is None else self.linear(y, self.out_of_latent)
        y = (y if self.sp else all_shares(y, self.tp, flat.shape[0])).view_as(x)
        return y if shared is None else y + shared

    def _shared(self, x: Tensor, expert: Mlp, context: Context) -> Tensor:
        y: Tensor = expert(x, context)
        return y if self.shared_gate is None else y * torch.sigmoid(nn.functional.linear(x, self.shared_gate))

    def _tokens(self, x: Tensor, context: Context) -> Tokens:
        """What this rank's tokens are."""
        rows, length = x.shape[:2]
        first = self.tp.rank * length if self.sp else 0
        part = slice(first, first + length)
        places = torch.arange(part.start, part.stop, device=x.device)
        matter = torch.ones(rows, length, dtype=torch.bool, device=x.device)
        if context.routing is not None:
            matter = matter if context.routing.matters is None else context.routing.matters[:, part]
        shared = context.routing or context.routes
        if shared is not None and shared.places is not None:
            places = shared.places[part]
        row = torch.arange(rows, device=x.device).repeat_interleave(length)
        fields = [row, places.repeat(rows), matter.flatten()]
        row, place, matter = fields if self.sp else [own_share(field, self.tp) for field in fields]
        return Tokens(row, place, matter, rows, length * self.sharers)


class Experts(nn.Module):
    """This rank's E/P experts, of each F/Q of its width: the sum over its parts is the expert's output.

    Their gradients are summed over the ranks that hold the same, wherever those stand.
    """

    def __init__(self, build: Builder, name: str) -> None:
        super().__init__()
        config = build.config
        self.activate, self.saved = partial(activate, config=config, kernels=build.kernels), build.saved
        self.linear = partial(grouped_linear, kernels=build.linear_kernels, deferred=build.deferred)
        self.first_part = build.groups.expert_tp.rank == 0
        parts = ["gate_proj", "up_proj"] if config.gated else ["up_proj"]
        self.up, self.up_bias = build.expert_rows([f"{name}.{part}" for part in parts], bias=config.mlp_bias)
        self.down, self.down_bias = build.expert_columns(f"{name}.down_proj", bias=config.mlp_bias)
        fused = f"{name}.gate_up_proj" if config.gated else f"{name}.up_proj"
        self.up_adapter = expert_adapter(build, fused, parts=len(parts))
        self.down_adapter = expert_adapter(build, f"{name}.down_proj", columns=True)

    def forward(self, x: Tensor, weights: Tensor, rows: Rows) -> Tensor:
        """Rows sorted by expert and their weights, [M, D] and [M] -> the weighted outputs [M, D]."""
        h = self.linear(x, self.up, rows)
        h = h if self.up_adapter is None else self.up_adapter(x, h, rows)
        h = h if self.up_bias is None else grouped_bias(h, self.up_bias, rows)
        # weighted before the last product, which is linear: so a row's output is not needed for its weight's gradient
        h = self.saved.again("activation", self.activate, h, weights)
        y = self.linear(h, self.down, rows)
        y = y if self.down_adapter is None else self.down_adapter(h, y, rows)
        if self.down_bias is None:
            return y
        # once among the parts
        bias = self.down_bias if self.first_part else self.down_bias * 0
        return grouped_bias(y, bias, rows, weights)
