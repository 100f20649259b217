"""Vocab-parallel losses: fused output projection and cross entropy or distillation, over a vocabulary split among
ranks, in chunks of tokens.

The logits of a whole sequence never exist: each chunk's are turned into its loss and, since the gradient of a softmax
is known as soon as the softmax is, into the gradients of hidden state and head at once, then dropped.

Legend: N tokens, D model width, V vocabulary, R = ceil(V / ranks) rows of the head on each rank.

The loss of a token is t^2 KL(teacher || student), both at temperature t (Hinton et al. 2015, arXiv:1503.02531), the teacher's
distribution being that of its K likeliest tokens, made to sum to one.

Legend: N or n tokens, D model width, V vocabulary, R rows of the head on each rank, K tokens of the teacher's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_trainer.data.micro_batch import TeacherSoftLabels
from mega_trainer.distributed.comm import CommGroup, all_gather, all_reduce
from mega_trainer.kernels import gemm_accumulation
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.leaf_compiler import LeafCompiler
from mega_trainer.parallel.parameter_info import get_main_grad

# Elements of logits that are made at a time: on a GPU they should fill it with work, on a CPU be reused by its allocator. There
# leaves take fewer of them at once, compiled or not, so that what one holds stays in the cache: a plain one has them in fp32, too.
CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}
LEAF_ELEMENTS = {True: 1 << 20, False: 1 << 19}


class _FusedLinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: LossTargets,
        weights: Tensor,
        group: CommGroup,
        vocab_size: int,
        differentiable: bool,
        bias: Tensor | None,
        step: int,
        few: int,
    ) -> tuple[Tensor, Tensor]:
        losses = hidden.new_empty(hidden.shape[0], dtype=_at_least_fp32(hidden.dtype))
        d_hidden = torch.empty_like(hidden) if differentiable else None
        d_head = torch.empty_like(head, dtype=losses.dtype) if differentiable and head.requires_grad else None
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=losses.dtype)
        room = hidden.new_empty(min(step, len(hidden)), len(head))  # of all chunks: a CPU pays most for new memory
        for start in range(0, hidden.shape[0], step):
            chunk = slice(start, start + step)
            logits = compute_local_logits(hidden[chunk], head, bias, group, vocab_size, room)
            for at, some in enumerate(torch.split(logits, few)):
                part = slice(start + at * few, start + at * few + len(some))
                kept, losses[part] = labels.compute_losses(some, part)
                if d_hidden is not None:
                    labels.logits_to_gradient(some, kept, weights[part], part)
            if d_hidden is not None:
                torch.mm(logits, head, out=d_hidden[chunk])
                if d_head is not None:
                    gemm_accumulation.gemm_into(logits.t(), hidden[chunk], d_head, add=start > 0)
                if d_bias is not None:
                    d_bias += logits.sum(0, dtype=d_bias.dtype)
        if d_hidden is not None:
            ctx.save_for_backward(d_hidden, d_head, d_bias)
        ctx.dtype, ctx.main = head.dtype, get_main_grad(head)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # not in low precision: rounding the scale itself would change all gradients alike
        d_hidden, d_head, d_bias = ctx.saved_tensors
        d_hidden = torch.mul(d_hidden.to(scale.dtype), scale, out=torch.empty_like(d_hidden))
        whole = None
        if d_head is not None and ctx.main is None:
            whole = torch.mul(d_head, scale, out=torch.empty_like(d_head, dtype=ctx.dtype))
        elif d_head is not None:
            out, add = ctx.main()
            gemm_accumulation.write_scaled(d_head, scale, ctx.dtype, out, add=add)
        if d_bias is not None:
            d_bias = torch.mul(d_bias, scale, out=torch.empty_like(d_bias, dtype=ctx.dtype))
        return d_hidden, whole, None, None, None, None, None, d_bias, None, None


SavedTensors = tuple[Tensor, ...]  # the logarithm [n] of the sums of exponentials over all ranks first


class LossTargets(Protocol):
    """Interface of the targets that logits over a vocabulary split among ranks are compared with."""

    def compute_losses(self, logits: Tensor, part: slice) -> tuple[SavedTensors, Tensor]:
        """Return the state that `logits_to_gradient` needs, and the losses [n] in at least fp32, from this rank's
        logits [n, R].
        """

    def logits_to_gradient(self, logits: Tensor, kept: SavedTensors, weights: Tensor, part: slice) -> None:
        """Overwrite the logits [n, R] with the gradient of the losses, weighted by [n], with respect to them."""


class LabelTargets:
    """Cross-entropy targets: one label per token, int64 [N]."""

    def __init__(
        self, labels: Tensor, rows: int, group: CommGroup, softcap: float | None, leaves: LeafCompiler
    ) -> None:
        self.here, target = locate_local_rows(labels, rows, group)
        self.target, self.group, self.softcap, self.leaves = target.unsqueeze(-1), group, softcap, leaves
        self.rows = torch.arange(len(labels), device=labels.device)

    def compute_losses(self, logits: Tensor, part: slice) -> tuple[SavedTensors, Tensor]:
        """Return the cross entropies; see `LossTargets`."""
        keeps = not self.leaves.compiled  # a kernel makes the exponentials anew faster than it reads them
        sums, label, *exponentials = self.leaves(
            row_logsumexp_leaf, logits, self.here[part], self.target[part], self.softcap, keeps
        )
        lse, label = combine_over_ranks(sums, label, self.group)
        return (lse, *exponentials), lse - label

    def logits_to_gradient(self, logits: Tensor, kept: SavedTensors, weights: Tensor, part: slice) -> None:
        """Overwrite the logits with their gradient; see `LossTargets`."""
        here, target = self.here[part], self.target[part]
        of_label = self.leaves(loss_gradient_leaf, logits, here, target, weights, self.softcap, *kept)
        # not scatter_, which on a CPU copies the whole of them first
        logits[self.rows[: len(logits)], target.squeeze(1)] = of_label.squeeze(1)


def locate_local_rows(ids: Tensor, rows: int, group: CommGroup) -> tuple[Tensor, Tensor]:
    """Return the tokens of the vocabulary that are among this rank's rows (bool), and their row numbers; arbitrary rows
    for the others.
    """
    local = ids - group.rank * rows
    return (local >= 0) & (local < rows), local.clamp(0, rows - 1)


def fused_linear_cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    group: CommGroup,
    vocab_size: int,
    softcap: float | None = None,
    leaves: LeafCompiler | None = None,
    bias: Tensor | None = None,
    weigh: Callable[[Tensor], Tensor] | None = None,
    soft: LossTargets | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cross entropy of `hidden` through `head` against `labels`.

    Args:
        hidden: [N, D]; the same on every rank of `group`. Its gradient is this rank's part, to be summed over them.
        head: this rank's rows [R, D] of the output matrix; rows past `vocab_size` are padding and take no part.
        labels: int64 [N]; where the weight is zero any value in [0, V) will do.
        weights: fp32 [N], the weight of each token in the sum.
        group: the ranks that split the vocabulary.
        vocab_size: V, unpadded.
        softcap: logits become cap tanh(logits / cap) (arXiv:2408.00118).
        leaves: compute what is no product.
        bias: this rank's part [R] of what is added to logits.
        weigh: makes of the log-probabilities [N] the weights instead; for these the products are made once before.
        soft: what the tokens are held against in place of their labels.

    Returns:
        The weighted sum of the losses (a scalar to differentiate), and each token's loss [N] in at least fp32.
    """
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    if weigh is not None:
        with torch.no_grad():
            weights = weigh(
                -fused_linear_cross_entropy(hidden, head, labels, weights, group, vocab_size, softcap, leaves, bias)[1]
            )
    leaves = leaves or LeafCompiler()
    against = soft or LabelTargets(labels, head.shape[0], group, softcap, leaves)
    step = few = tokens_per_chunk(hidden, head.shape[0])
    if hidden.device.type == "cpu":
        few = max(16, LEAF_ELEMENTS[leaves.compiled] // head.shape[0])
    result: tuple[Tensor, Tensor] = _FusedLinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, head, against, weights, group, vocab_size, differentiable, bias, step, few
    )
    return result


def tokens_per_chunk(hidden: Tensor, rows: int) -> int:
    """Return the number of tokens whose logits over `rows` rows of the head are computed at a time."""
    return max(16, CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cuda"]) // rows)


def compute_local_logits(
    hidden: Tensor, head: Tensor, bias: Tensor | None, group: CommGroup, vocab_size: int, out: Tensor | None = None
) -> Tensor:
    """Return this rank's logits [n, R], in `out` [n or more, R] if given; minus infinity for padding rows."""
    logits = torch.mm(hidden, head.t(), out=None if out is None else out[: len(hidden)])
    own = vocab_size - group.rank * head.shape[0]
    if bias is not None:
        logits += bias
    if own < head.shape[0]:
        logits[:, max(0, own) :] = float("-inf")
    return logits


def row_logsumexp_leaf(
    logits: Tensor, here: Tensor, target: Tensor, softcap: float | None, keeps: bool
) -> tuple[Tensor, ...]:
    """Return the log-sum-exp [n] of each row of logits [n, R], and the logit [n] at its label.

    Both in at least fp32. `target` int64 [n, 1] is the label, among this rank's rows, or some row where that is not `here`
    [n], and its logit told as 0. One that `keeps` tells the exponentials [n, R], too, of what the logits are above [n, 1].
    """
    # where() rather than a product: a foreign label may point at a padding row, whose logit is minus infinity
    label = torch.where(here, apply_softcap(logits.gather(1, target), softcap).squeeze(-1), 0.0)
    values = apply_softcap(logits, softcap)
    if not keeps:
        return values.logsumexp(-1), label
    top = values.amax(-1, keepdim=True)
    top = torch.where(top.isinf(), 0.0, top)  # rows of padding alone
    shares = (values - top if values is logits else values.sub_(top)).exp_()
    return shares.sum(-1).log_().add_(top.squeeze(-1)), label, shares, top


def loss_gradient_leaf(
    logits: Tensor,
    here: Tensor,
    target: Tensor,
    weights: Tensor,
    softcap: float | None,
    lse: Tensor,
    shares: Tensor | None = None,
    top: Tensor | None = None,
) -> Tensor:
    """Overwrite logits [n, R] with their gradient as if no label were among them, and return the gradient at the label
    [n, 1].

    That is weight (softmax over all ranks' rows - 1 at the label); `lse` [n] is over all ranks. Exponentials that
    `row_logsumexp_leaf` has kept are used up.
    """
    lse, weights, here = (t.to(lse.dtype).unsqueeze(-1) for t in (lse, weights, here))
    label = logits.gather(1, target)
    of_label = ((apply_softcap(label, softcap) - lse).exp_() - here) * weights
    if shares is None or top is None:
        out = apply_softcap(logits, softcap).sub_(lse).exp_().mul_(weights)
    else:
        out = shares.mul_((top - lse).exp_().mul_(weights))
    if softcap is not None:
        out, of_label = out.mul_(softcap_derivative(logits, softcap)), of_label * softcap_derivative(label, softcap)
    if out is not logits:
        logits.copy_(out)
    return of_label.to(logits.dtype)


def apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """Return the soft-capped logits in at least fp32; minus infinity is kept."""
    values = upcast_to_fp32(logits)
    if softcap is None:
        return values
    return torch.where(values == float("-inf"), values, torch.tanh(values / softcap) * softcap)


def softcap_derivative(logits: Tensor, softcap: float) -> Tensor:
    """Return the derivative of the soft cap."""
    return 1 - torch.tanh(upcast_to_fp32(logits) / softcap).square_()


def combine_over_ranks(lse: Tensor, label: Tensor, group: CommGroup) -> tuple[Tensor, Tensor]:
    """Combine the log-sum-exp and label logits of this rank's vocabulary rows with those of all ranks."""
    if group.size == 1:
        return lse, label
    top = lse.clone()
    all_reduce(top, group, "max")
    sums = torch.stack([(lse - top).exp_(), label])
    all_reduce(sums, group)
    return sums[0].log() + top, sums[1]


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class TeacherTargets:
    """Loss targets from a teacher's distribution; implements `LossTargets`."""

    def __init__(self, soft: TeacherSoftLabels, rows: int, group: CommGroup, softcap: float | None) -> None:
        self.here, self.target = locate_local_rows(soft.ids.flatten(0, 1), rows, group)
        self.log_shares = (soft.log_probs.flatten(0, 1) / soft.temperature).log_softmax(-1)
        self.group, self.softcap, self.temperature = group, softcap, soft.temperature

    def compute_losses(self, logits: Tensor, part: slice) -> tuple[SavedTensors, Tensor]:
        """Return the distillation losses; see `LossTargets`."""
        scaled, told = apply_softcap(logits, self.softcap) / self.temperature, self.log_shares[part]
        shares = told.exp()
        held = torch.where(self.here[part], scaled.gather(1, self.target[part]), 0.0)
        lse, mean = combine_over_ranks(scaled.logsumexp(-1), (shares * held).sum(-1), self.group)
        return (lse,), self.temperature**2 * ((shares * told).sum(-1) - mean + lse)

    def logits_to_gradient(self, logits: Tensor, kept: SavedTensors, weights: Tensor, part: slice) -> None:
        """Overwrite the logits with t (student - teacher); see `LossTargets`."""
        (lse,) = kept
        out = (apply_softcap(logits, self.softcap) / self.temperature - lse[:, None]).exp_()
        shares = torch.where(self.here[part], self.log_shares[part].exp(), 0.0)
        out.scatter_add_(1, self.target[part], -shares.to(out.dtype))
        out.mul_(self.temperature * weights.to(out.dtype)[:, None])
        logits.copy_(out if self.softcap is None else out.mul_(softcap_derivative(logits, self.softcap)))


@torch.no_grad()
def topk_log_probs(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    group: CommGroup,
    vocab_size: int,
    softcap: float | None,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Return the top-K next tokens in descending order: ids int64 [N, K], and log-probabilities [N, K] in at least
    fp32.

    Args:
        hidden: [N, D]; the same on every rank of `group`.
        head, bias, group, vocab_size, softcap: as in `fused_linear_cross_entropy`.
        count: K.
    """
    rows = head.shape[0]
    found = []
    for chunk in torch.split(hidden, tokens_per_chunk(hidden, rows)):
        logits = apply_softcap(compute_local_logits(chunk, head, bias, group, vocab_size), softcap)
        lse, _ = combine_over_ranks(logits.logsumexp(-1), torch.zeros_like(logits[:, 0]), group)
        values, ids = logits.topk(min(count, rows))
        values, ids = (all_gather(each.contiguous(), group, -1) for each in (values, ids + group.rank * rows))
        top = values.topk(count)
        found.append((ids.gather(1, top.indices), top.values - lse[:, None]))
    ids, log_probs = (torch.cat(each) for each in zip(*found, strict=True))
    return ids, log_probs
