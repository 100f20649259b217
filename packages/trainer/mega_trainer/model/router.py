"""Which experts a token goes to, and the losses that keep their loads even.

Two losses, each a sum over the layers and a mean over the sequences of a step, so that neither micro-batches nor ranks
change them. Of one sequence with T tokens that matter, K experts each of E, and n_e choices of expert e:

    load balancing   E / (K T^2) sum_e n_e sum_t p_te   (arXiv:2101.03961, for K = 1), p normalised to a sum of one
    z                1 / T sum_t logsumexp(logits_t)^2  (arXiv:2202.08906)

With the scope `batch` the first one's sums are over a micro-batch of all data ranks, and the mean over micro-batches.

A token matters when a label at or behind it in its sequence counts in the loss: those after the last such label, as
padding is, influence nothing, take no part in these sums, and are sent to no expert.

Legend: B sequences, N tokens of this rank, K experts of a token, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_common.model_config import MoeConfig
from mega_trainer.comm import Group, all_gather, all_reduce
from mega_trainer.kernels.products import wide_product
from mega_trainer.model.builder import Builder
from mega_trainer.model.routing import Routes, Routing, Tokens
from mega_trainer.model.sinkhorn import balanced
from mega_trainer.parallel.param import Kept


class Router(nn.Module):
    """Scores, choice and weights of the experts; see `MoeConfig` for the kinds.

    Its logits are in at least fp32. Every tensor rank has tokens of its own, so the gradients of its weights are parts.
    """

    def __init__(self, build: Builder, layer: int) -> None:
        super().__init__()
        moe, name, groups = build.config.moe, f"model.layers.{layer}.mlp.gate", build.groups
        assert moe is not None
        self.moe, self.layer = moe, layer
        shape, std = (moe.num_experts, build.config.hidden_size), build.config.init_std
        self.weight = build.replicated(f"{name}.weight", shape, std=std, partial_grad=True)
        self.bias = build.replicated(f"{name}.bias", (moe.num_experts,), partial_grad=True) if moe.router_bias else None
        wide = torch.promote_types(build.dtype, torch.float32)
        self.selection = (
            Kept(f"{name}.e_score_correction_bias", (moe.num_experts,), dtype=wide, device=build.device)
            if moe.selection_bias
            else None
        )
        self.sequence_groups, self.data_group = (groups.tp, groups.cp), groups.dp

    def forward(
        self, x: Tensor, tokens: Tokens, routing: Routing | None, routes: Routes | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, D] to the experts of each token, int64 [N, K] with -1 for none, their weights [N, K], and x for those.

        Where the choice is given by `routes`, the weights are those of this router's scores all the same.

        The losses' gradients, if there are any, come into the backward with that of the weights.
        """
        logits, x = router_logits(x, self.weight)
        logits = logits if self.bias is None else logits + self.bias
        scores = logits.softmax(-1) if self.moe.score == "softmax" else logits.sigmoid()
        bias = None if self.selection is None else self.selection.values
        chosen = choose(self._choice_scores(logits.detach(), scores.detach(), tokens, routing), self.moe, bias)
        if routes is not None:
            chosen = routes.applied(self.layer, chosen, tokens)
        weights = scores.gather(1, chosen)
        if self.moe.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        weights = weights * self.moe.scaling
        chosen = chosen.masked_fill(~tokens.matter.unsqueeze(-1), -1)
        if routing is None:
            return chosen, weights, x
        kept = chosen
        if self.moe.capacity_factor is not None:
            kept = within_capacity(chosen, tokens, self.moe, self.sequence_groups)
        return kept, self._with_losses(weights, logits, scores, chosen, kept, tokens, routing), x

    def _choice_scores(self, logits: Tensor, scores: Tensor, tokens: Tokens, routing: Routing | None) -> Tensor:
        """What the choice is by, [N, E]: the scores, or in training, where that is asked for, what balances the experts."""
        if not self.moe.sinkhorn or routing is None:
            return scores
        return balanced(logits, tokens, self.sequence_groups)

    def _with_losses(
        self,
        weights: Tensor,
        logits: Tensor,
        scores: Tensor,
        chosen: Tensor,
        kept: Tensor,
        tokens: Tokens,
        routing: Routing,
    ) -> Tensor:
        """The weights, with the losses in their backward; what there is to tell goes to `routing`."""
        table, matter = counted(chosen, tokens, self.moe.num_experts), tokens.matter
        p = (scores / scores.sum(-1, keepdim=True)).masked_fill(~matter.unsqueeze(-1), 0.0)
        squares = torch.logsumexp(logits, -1).square().masked_fill(~matter, 0.0)
        aux, z = self._losses(p, squares, table, tokens, routing)
        entropy, dropped = -torch.special.xlogy(p, p).sum(), (chosen >= 0).sum() - (kept >= 0).sum()
        sums = torch.stack(
            [value.detach().double() for value in (matter.sum(), dropped, entropy, aux, z, p.new_zeros(()))]
        )
        routing.loads[self.layer] = torch.cat([sums, table[:, :-1].sum(0).double()])
        joined: Tensor = _Join.apply(weights, aux + z)  # type: ignore[no-untyped-call]
        return joined

    def _losses(
        self, p: Tensor, squares: Tensor, table: Tensor, tokens: Tokens, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """This rank's part of the load balancing and the z-loss, weighted; sums over all ranks are of constants alone."""
        moe = self.moe
        if not moe.aux_loss and not moe.z_loss:
            return p.new_zeros(()), p.new_zeros(())
        table, weight = summed(table.to(p.dtype), self.sequence_groups), routing.sequence_weight
        z = (squares / table[:, -1].clamp(min=1)[tokens.row]).sum() * (weight * moe.z_loss)
        if moe.aux_loss_scope == "batch":
            whole, weight = summed(table.sum(0, keepdim=True), (self.data_group,)), routing.batch_weight
            table = whole.expand_as(table)
        shares = table[:, :-1] / table[:, -1:].clamp(min=1).square()  # n_e / T^2
        aux = (p * shares[tokens.row]).sum() * (weight * moe.aux_loss * moe.num_experts / moe.top_k)
        return aux, z


class _Logits(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return wide_product(x, weight.t()), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        if x.dtype != torch.bfloat16:
            dx = torch.addmm(dx.to(dy.dtype), dy, weight.to(dy.dtype))
            return dx.to(x.dtype), dy.t().mm(x.to(dy.dtype)).to(weight.dtype)
        high = dy.to(x.dtype)
        both = torch.cat([high, (dy - high).to(x.dtype)], 1)
        dweight = wide_product(both.t(), x).view(2, *weight.shape).sum(0)
        return torch.addmm(dx, both, weight.repeat(2, 1)), dweight.to(weight.dtype)


def router_logits(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x W^T in at least fp32, without a copy of x in fp32: [N, D] x [E, D] -> [N, E]; and x, for who else needs it.

    The gradient of that x is added within the product for this one's. Of bf16 the logits' gradient too is multiplied as
    bf16, as a sum of two such numbers: it keeps 16 bits.
    """
    logits, same = _Logits.apply(x, weight)  # type: ignore[no-untyped-call]
    return logits, same


class _Join(Function):
    """The weights as they are; a loss of weight one joins their backward."""

    @staticmethod
    def forward(ctx: object, weights: Tensor, loss: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: object, dweights: Tensor) -> tuple[Tensor, Tensor]:
        return dweights, dweights.new_ones(())


def balance(routers: Sequence[Router], loads: Tensor, layers: Sequence[int]) -> None:
    """Move the selection biases towards an even load (arXiv:2408.15664): those of experts with less than the mean up.

    `loads` are the choices of each expert in a step, [layers, E].
    """
    for router in routers:
        if router.selection is not None:
            counts = loads[layers.index(router.layer)]
            step = torch.sign(counts.mean() - counts) * router.moe.bias_rate
            router.selection.values += step.to(router.selection.values)


def choose(scores: Tensor, moe: MoeConfig, bias: Tensor | None) -> Tensor:
    """The experts of each token, int64 [N, K], the best first, from scores [N, E] and the bias [E] of the choice."""
    if bias is not None:
        scores = scores + bias
    if moe.groups > 1:
        grouped = scores.view(len(scores), moe.groups, -1)
        best = 1 if moe.group_score == "max" else min(2, grouped.shape[-1])
        groups = grouped.topk(best, -1).values.sum(-1).topk(moe.top_groups, -1).indices
        allowed = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, groups, True)
        scores = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
    return scores.topk(moe.top_k, -1).indices


def counted(chosen: Tensor, tokens: Tokens, num_experts: int) -> Tensor:
    """Of each sequence, this rank's choices of every expert and, last, its tokens that matter: int64 [B, E + 1]."""
    width = num_experts + 1
    cell = torch.where(chosen < 0, tokens.sequences * width, tokens.row.unsqueeze(-1) * width + chosen)
    token = torch.where(tokens.matter, tokens.row * width + num_experts, tokens.sequences * width)
    cells = torch.cat([cell.flatten(), token])
    sums = cells.new_zeros(tokens.sequences * width + 1).scatter_add_(0, cells, torch.ones_like(cells))
    return sums[:-1].view(tokens.sequences, width)


def within_capacity(chosen: Tensor, tokens: Tokens, moe: MoeConfig, groups: Sequence[Group]) -> Tensor:
    """`chosen` [N, K] without what is too much: of a sequence of T tokens an expert takes ceil(capacity_factor K T / E).

    Those that come first in the sequence, whichever ranks hold them (`groups` share the sequence's tokens).
    """
    assert moe.capacity_factor is not None
    everyone = torch.cat([chosen, tokens.row.unsqueeze(-1), tokens.place.unsqueeze(-1)], 1)
    for group in groups:
        everyone = all_gather(everyone, group)
    choices, row, place = everyone[:, :-2], everyone[:, -2], everyone[:, -1]
    lengths = row.new_zeros(tokens.sequences).scatter_add_(0, row, (choices >= 0).any(-1).long())
    capacity = torch.ceil(lengths.double() * (moe.capacity_factor * moe.top_k / moe.num_experts))
    # all choices, sorted by sequence, expert and place; how many of its expert's come before each
    size, k = tokens.length, moe.top_k
    key = ((row * (moe.num_experts + 1)).unsqueeze(-1) + choices + 1) * size + place.unsqueeze(-1)
    order = key.flatten().argsort()
    expert = key.flatten()[order] // size
    before = torch.arange(len(order), device=order.device) - torch.searchsorted(expert, expert)
    rank = torch.empty_like(before).scatter_(0, order, before).view(-1, k)
    full = rank >= capacity[row].unsqueeze(-1)
    return chosen.masked_fill(_own(full, groups), -1)


def _own(everyone: Tensor, groups: Sequence[Group]) -> Tensor:
    """This rank's rows of what was gathered over the groups, one after the other."""
    for group in reversed(groups):
        everyone = everyone.chunk(group.size)[group.rank]
    return everyone


def summed(tensor: Tensor, groups: Sequence[Group]) -> Tensor:
    """The sum over all ranks of some groups, one after the other."""
    tensor = tensor.clone()
    for group in groups:
        all_reduce(tensor, group)
    return tensor
