"""MoE router: expert choice per token, capacity, auxiliary losses, and load balance by bias update or Sinkhorn.

The two losses are summed over the layers and averaged over the sequences of a step, so that they do not depend on
micro-batches or ranks. For a sequence of T unmasked tokens, K experts of E per token, and n_e choices of expert e:

    load balancing   E / (K T^2) sum_e n_e sum_t p_te   (arXiv:2101.03961, for K = 1), p normalised to a sum of one
    z                1 / T sum_t logsumexp(logits_t)^2  (arXiv:2202.08906)

With the scope `batch` the sums of the first loss are over a micro-batch of all data ranks, and the mean over micro-batches.
This depends on the layout. The gradient of a micro-batch needs the load at its backward, and that of the whole global batch is
known only after the last forward of the step; a cumulative load of the micro-batches so far depends on their number and order.

A token is unmasked if a label at or after it in its sequence counts in the loss. Tokens after the last such label, such as
padding, influence nothing, are excluded from these sums, and are sent to no expert.

Sinkhorn scales the positive matrix exp(logits) of a sequence's T tokens and E experts by rows and columns until each token
has 1 / T of its sum and each expert 1 / E; a token then goes to the largest entries of its row. It is applied to each
sequence, so that it does not depend on micro-batches or ranks; Megatron's version, over all tokens of a rank's micro-batch,
is the same for one sequence.

In layers of `hash_layers` a stored table gives each token id its experts (arXiv:2106.04426), and the router's scores weight them.

Legend: B sequences, S positions of each, N tokens of this rank, K experts of a token, E experts, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mega_ckpt.canonical_tensors import EXPERT_TABLE
from mega_common.model_config import MoeConfig
from mega_trainer.distributed.comm import CommGroup, all_gather, all_reduce
from mega_trainer.distributed.device import to_host
from mega_trainer.kernels.gemm_accumulation import gemm_in_fp32
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.expert_routing import MicroBatchRouting, RoutedTokens, RoutingReplay
from mega_trainer.parallel.parameter_info import NonTrainableBuffer

TOLERANCE = 1e-4  # mean change of the column factors in a round at which the iteration stops
ROUNDS = 100  # most rounds: far more than needed, but rounding can keep a large factor changing
EPSILON = 1e-8
ROWS = 4096  # rows of a table that are drawn at once


def sinkhorn_choice_scores(logits: Tensor, tokens: RoutedTokens, groups: Sequence[CommGroup]) -> Tensor:
    """Return the Sinkhorn-normalised router scores [N, E] of this rank's tokens, zero for masked ones, from logits.
    `groups` are the ranks that share the sequence's tokens, which are gathered.
    """
    unused = tokens.sequences * tokens.length
    own = torch.where(tokens.affects_loss_mask, tokens.row * tokens.length + tokens.position, unused)
    cells = own
    for group in groups:
        logits, cells = all_gather(logits, group), all_gather(cells, group)
    table = logits.new_full((unused + 1, logits.shape[-1]), float("-inf"))
    table[cells] = logits
    table[-1] = float("-inf")
    scaled = sinkhorn_normalize(table[:-1].view(tokens.sequences, tokens.length, -1)).flatten(0, 1)
    return torch.cat([scaled, scaled.new_zeros(1, scaled.shape[-1])])[own]


def sinkhorn_normalize(logits: Tensor) -> Tensor:
    """Scale exp(router logits [B, S, E]) until a sequence's tokens, and its experts, have equal sums (Sinkhorn).
    The exponentials of each sequence are scaled by rows and columns; a row of -inf does not belong to a token.
    """
    top = logits.amax(-1, keepdim=True)
    valid = top > float("-inf")
    matrix = (logits - top.masked_fill(~valid, 0.0)).exp()  # the row scaling absorbs a factor per row
    count = valid.sum(1).clamp(min=1)
    columns, rows = logits.new_ones(len(logits), logits.shape[-1]), logits.new_ones(logits.shape[:2])
    moving = torch.ones(len(logits), 1, dtype=torch.bool, device=logits.device)
    for _ in range(ROUNDS):
        next_rows = 1 / (count * ((matrix * columns.unsqueeze(1)).sum(-1) + EPSILON))
        next_columns = 1 / (matrix.shape[-1] * ((matrix * next_rows.unsqueeze(-1)).sum(1) + EPSILON))
        change = (next_columns - columns).abs().mean(-1, keepdim=True)
        rows, columns = torch.where(moving, next_rows, rows), torch.where(moving, next_columns, columns)
        moving = moving & (change > TOLERANCE)
        if not to_host(moving.any()):
            break
    return columns.unsqueeze(1) * matrix * rows.unsqueeze(-1)


def sqrt_softplus(logits: Tensor) -> Tensor:
    """Return sqrt(log(1 + exp(logits))), with gradient zero where that is zero in floating point."""
    return F.softplus(logits).clamp(min=torch.finfo(logits.dtype).tiny).sqrt()


SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1), "sigmoid": torch.sigmoid, "sqrtsoftplus": sqrt_softplus,
}  # fmt: skip


class ExpertTable(NonTrainableBuffer):
    """Table of the experts of each token id, int64 [V, K], which is stored and not trained.
    Until loaded, it has different random experts for each token id, which depend on the table's name alone.
    """

    def __init__(self, build: LayerBuilder, name: str, moe: MoeConfig) -> None:
        self.name, self.experts = f"{name}.{EXPERT_TABLE}", moe.num_router_outputs
        shape = (build.config.vocab_size, moe.top_k)
        super().__init__(self.name, shape, dtype=torch.int64, device=build.device)
        self.reset_values()

    def reset_values(self) -> None:
        """Fill the table with random experts that depend on its name alone."""
        stream = torch.Generator().manual_seed(int.from_bytes(sha256(self.name.encode()).digest()[:7], "big"))
        for rows in torch.split(self.values, ROWS) if self.values.device.type != "meta" else ():
            order = torch.rand(len(rows), self.experts, generator=stream).topk(rows.shape[1], -1).indices
            rows.copy_(order)

    def forward(self, tokens: RoutedTokens) -> Tensor:
        """Return the stored experts of each token by its token id, int64 [N, K]."""
        assert tokens.token_ids is not None, "a forward pass of a model with moe.hash_layers requires token ids"
        experts: Tensor = self.values[tokens.token_ids]
        return experts


class ExpertRouter(nn.Module):
    """Router of a mixture-of-experts layer: scores the experts, selects K for each token and weights them.
    See `MoeConfig` for the kinds of routers.

    Logits are in at least fp32. Every tensor rank has different tokens, so the gradients of the weights are partial.
    """

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__()
        moe, name, groups = build.config.moe, f"model.layers.{layer}.mlp.gate", build.groups
        assert moe is not None
        self.moe, self.layer = moe, layer
        shape, std = (moe.num_router_outputs, build.config.hidden_size), build.config.init_std
        self.weight = build.build_replicated(f"{name}.weight", shape, std=std, partial_grad=True)
        self.bias = (
            build.build_replicated(f"{name}.bias", (moe.num_router_outputs,), partial_grad=True)
            if moe.router_bias
            else None
        )
        wide = torch.promote_types(build.dtype, torch.float32)
        self.hash_table = ExpertTable(build, name, moe) if build.config.is_hash_layer(layer) else None
        self.selection = (
            NonTrainableBuffer(
                f"{name}.e_score_correction_bias", (moe.num_router_outputs,), dtype=wide, device=build.device
            )
            if moe.selection_bias and self.hash_table is None
            else None
        )
        self.sequence_groups, self.data_group = (groups.tp, groups.cp), groups.dp

    def forward(
        self, x: Tensor, tokens: RoutedTokens, routing: MicroBatchRouting | None, routes: RoutingReplay | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return K experts of each token of x [N, D] (-1: none), their weights, the experts' input; record loads in `routing`.
        Experts are int64 [N, K], weights [N, K].

        With replayed experts (`routes`) the weights are still computed from this router's scores. The gradients of the
        auxiliary losses are attached to the weights.
        """
        logits, x = compute_router_logits(x, self.weight)
        logits = logits if self.bias is None else logits + self.bias
        if (cap := self.moe.logit_softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        if self.moe.score == "sparsemixer":
            scores = sparse_mixer_scores(logits, self.moe.jitter)
        else:
            scores = SCORES[self.moe.score](logits)
        if self.hash_table is not None:
            chosen = self.hash_table(tokens)
        else:
            bias = None if self.selection is None else self.selection.values
            choice = self._choice_scores(logits.detach(), scores.detach(), tokens, routing)
            chosen = select_experts(choice, self.moe, bias)
        if routes is not None:
            chosen = routes.apply_replay(self.layer, chosen, tokens)
        weights = scores.gather(1, chosen)
        if self.moe.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        weights = weights * self.moe.scaling
        chosen = chosen.masked_fill(~tokens.affects_loss_mask.unsqueeze(-1), -1)
        if routing is None:
            return chosen, weights, x
        kept = chosen
        if self.moe.capacity_factor is not None:
            kept = drop_choices_over_capacity(chosen, tokens, self.moe, self.sequence_groups)
        return kept, self._attach_losses(weights, logits, scores, chosen, kept, tokens, routing), x

    def _choice_scores(
        self, logits: Tensor, scores: Tensor, tokens: RoutedTokens, routing: MicroBatchRouting | None
    ) -> Tensor:
        """Return the scores by which experts are chosen, [N, E]; in training with Sinkhorn the balanced scores."""
        if not self.moe.sinkhorn or routing is None:
            return logits if self.moe.choice == "logits" else scores
        return sinkhorn_choice_scores(logits, tokens, self.sequence_groups)

    def _attach_losses(
        self,
        weights: Tensor,
        logits: Tensor,
        scores: Tensor,
        expert_ids: Tensor,
        kept: Tensor,
        tokens: RoutedTokens,
        routing: MicroBatchRouting,
    ) -> Tensor:
        """Return the weights with the auxiliary losses in their backward, and record the loads in `routing`."""
        table, valid = count_expert_choices(expert_ids, tokens, self.moe.num_router_outputs), tokens.affects_loss_mask
        scores = logits.softmax(-1) if self.moe.score == "sparsemixer" else scores
        p = (scores / scores.sum(-1, keepdim=True)).masked_fill(~valid.unsqueeze(-1), 0.0)
        squares = torch.logsumexp(logits, -1).square().masked_fill(~valid, 0.0)
        aux, z = self._auxiliary_losses(p, squares, table, tokens, routing)
        entropy, dropped = -torch.special.xlogy(p, p).sum(), (expert_ids >= 0).sum() - (kept >= 0).sum()
        sums = torch.stack(
            [value.detach().double() for value in (valid.sum(), dropped, entropy, aux, z, p.new_zeros(()))]
        )
        routing.loads[self.layer] = torch.cat([sums, table[:, :-1].sum(0).double()])
        return attach_auxiliary_loss(weights, aux + z)

    def _auxiliary_losses(
        self, p: Tensor, squares: Tensor, table: Tensor, tokens: RoutedTokens, routing: MicroBatchRouting
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's weighted load balancing loss and z-loss; only counts are summed over ranks."""
        moe = self.moe
        if not moe.aux_loss and not moe.z_loss:
            return p.new_zeros(()), p.new_zeros(())
        table, weight = all_reduce_over_groups(table.to(p.dtype), self.sequence_groups), routing.sequence_weight
        z = (squares / table[:, -1].clamp(min=1)[tokens.row]).sum() * (weight * moe.z_loss)
        if self.hash_table is not None:  # the loss cannot change the choice
            return p.new_zeros(()), z
        if moe.aux_loss_scope == "batch":
            whole, weight = all_reduce_over_groups(table.sum(0, keepdim=True), (self.data_group,)), routing.batch_weight
            table = whole.expand_as(table)
        shares = table[:, :-1] / table[:, -1:].clamp(min=1).square()  # n_e / T^2
        aux = (p * shares[tokens.row]).sum() * (weight * moe.aux_loss * moe.num_router_outputs / moe.top_k)
        return aux, z


def sparse_mixer_scores(logits: Tensor, jitter: float) -> Tensor:
    """Return SparseMixer's weights [N, E] of the two experts with the largest logits [N, E], 0 for the others.

    The first expert's weight is its share of a softmax over the experts whose logits are at most 2 `jitter` below the
    largest, relative to the larger of the two in absolute value; the second's is that among the experts without the first.
    Without the random choice in training of arXiv:2409.12136.
    """
    first = logits.argmax(-1, keepdim=True)
    rest = logits.scatter(-1, first, float("-inf"))
    second = rest.argmax(-1, keepdim=True)
    out = torch.zeros_like(logits)
    for chosen, candidates in ((first, logits), (second, rest)):
        with torch.no_grad():
            largest = candidates.gather(-1, chosen)
            far = (largest - logits) / torch.maximum(logits.abs(), largest) > 2 * jitter
        weights = candidates.masked_fill(far, float("-inf")).softmax(-1)
        out = out.scatter(-1, chosen, weights.gather(-1, chosen))
    return out


class _Logits(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return gemm_in_fp32(x, weight.t()), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dx: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        if x.dtype != torch.bfloat16:
            dx = torch.addmm(dx.to(dy.dtype), dy, weight.to(dy.dtype))
            return dx.to(x.dtype), dy.t().mm(x.to(dy.dtype)).to(weight.dtype)
        high = dy.to(x.dtype)
        both = torch.cat([high, (dy - high).to(x.dtype)], 1)
        dweight = gemm_in_fp32(both.t(), x).view(2, *weight.shape).sum(0)
        return torch.addmm(dx, both, weight.repeat(2, 1)), dweight.to(weight.dtype)


def compute_router_logits(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return router logits x W^T, [N, D] x [E, D] -> [N, E], and x for its other users.
    The logits are in at least fp32, without a copy of x in fp32.

    The backward adds the gradient of the returned x in the GEMM. For bf16, the logits' gradient is split into the sum of
    two bf16 numbers, which keeps 16 bits.
    """
    logits, same = _Logits.apply(x, weight)  # type: ignore[no-untyped-call]
    return logits, same


class _AttachLoss(Function):
    """Identity on the weights that adds a loss, with gradient one, to the backward."""

    @staticmethod
    def forward(ctx: object, weights: Tensor, loss: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: object, dweights: Tensor) -> tuple[Tensor, Tensor]:
        return dweights, dweights.new_ones(())


def attach_auxiliary_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return x unchanged; its backward adds a scalar loss to the training loss, with gradient one."""
    same: Tensor = _AttachLoss.apply(x, loss)  # type: ignore[no-untyped-call]
    return same


def update_selection_bias(routers: Sequence[ExpertRouter], loads: Tensor, layers: Sequence[int]) -> None:
    """Raise the routers' selection bias by `bias_rate` for experts below the mean load, lower it above (arXiv:2408.15664).
    `loads` are the choices of each expert in a step, [layers, E].
    """
    for router in routers:
        if router.selection is not None:
            counts = loads[layers.index(router.layer)]
            step = torch.sign(counts.mean() - counts) * router.moe.bias_rate
            router.selection.values += step.to(router.selection.values)


def select_experts(scores: Tensor, moe: MoeConfig, bias: Tensor | None) -> Tensor:
    """Choose K experts for each token, int64 [N, K], the best first, by scores [N, E] plus the selection bias [E]."""
    if bias is not None:
        scores = scores + bias
    if moe.groups > 1:
        grouped = scores.view(len(scores), moe.groups, -1)
        best = 1 if moe.group_score == "max" else min(2, grouped.shape[-1])
        groups = grouped.topk(best, -1).values.sum(-1).topk(moe.top_groups, -1).indices
        allowed = torch.zeros(grouped.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, groups, True)
        scores = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
    return scores.topk(moe.top_k, -1).indices


def count_expert_choices(expert_ids: Tensor, tokens: RoutedTokens, num_experts: int) -> Tensor:
    """Count each expert's choices by this rank's tokens in each sequence, then unmasked tokens: int64 [B, E + 1]."""
    width = num_experts + 1
    cell = torch.where(expert_ids < 0, tokens.sequences * width, tokens.row.unsqueeze(-1) * width + expert_ids)
    token = torch.where(tokens.affects_loss_mask, tokens.row * width + num_experts, tokens.sequences * width)
    cells = torch.cat([cell.flatten(), token])
    sums = cells.new_zeros(tokens.sequences * width + 1).scatter_add_(0, cells, torch.ones_like(cells))
    return sums[:-1].view(tokens.sequences, width)


def drop_choices_over_capacity(
    expert_ids: Tensor, tokens: RoutedTokens, moe: MoeConfig, groups: Sequence[CommGroup]
) -> Tensor:
    """Return `expert_ids` [N, K] with -1 for choices over an expert's capacity in a sequence; early positions win.

    An expert takes the first ceil(capacity_factor K T / E) choices of a sequence of T tokens, in the order of positions,
    whichever ranks hold them. `groups` are the ranks that share the sequence's tokens.
    """
    assert moe.capacity_factor is not None
    gathered = torch.cat([expert_ids, tokens.row.unsqueeze(-1), tokens.position.unsqueeze(-1)], 1)
    for group in groups:
        gathered = all_gather(gathered, group)
    choices, row, position = gathered[:, :-2], gathered[:, -2], gathered[:, -1]
    lengths = row.new_zeros(tokens.sequences).scatter_add_(0, row, (choices >= 0).any(-1).long())
    capacity = torch.ceil(lengths.double() * (moe.capacity_factor * moe.top_k / moe.num_experts))
    # sort all choices by sequence, expert and position, and count the earlier choices of the same expert
    size, k = tokens.length, moe.top_k
    key = ((row * (moe.num_experts + 1)).unsqueeze(-1) + choices + 1) * size + position.unsqueeze(-1)
    order = key.flatten().argsort()
    expert = key.flatten()[order] // size
    before = torch.arange(len(order), device=order.device) - torch.searchsorted(expert, expert)
    rank = torch.empty_like(before).scatter_(0, order, before).view(-1, k)
    full = rank >= capacity[row].unsqueeze(-1)
    return expert_ids.masked_fill(_own_rows(full, groups), -1)


def _own_rows(gathered: Tensor, groups: Sequence[CommGroup]) -> Tensor:
    """Return this rank's rows of a tensor gathered over the groups in order."""
    for group in reversed(groups):
        gathered = gathered.chunk(group.size)[group.rank]
    return gathered


def all_reduce_over_groups(tensor: Tensor, groups: Sequence[CommGroup]) -> Tensor:
    """Return the sum of `tensor` over all ranks of the groups, reduced in one group after the other."""
    tensor = tensor.clone()
    for group in groups:
        all_reduce(tensor, group)
    return tensor
