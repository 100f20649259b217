"""Head and cross entropy as one operation, over a vocabulary split among ranks, in chunks of tokens.

The logits of a whole sequence never exist: each chunk's are turned into its loss and, since the gradient of a softmax
is known as soon as the softmax is, into the gradients of hidden state and head at once, then dropped.

Legend: N tokens, D model width, V vocabulary, R = ceil(V / ranks) rows of the head on each rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_trainer.comm import Group, all_reduce
from mega_trainer.kernels import products
from mega_trainer.parallel.param import main_grad_of

# Elements of one chunk's logits: on a CPU they should stay in its cache, on a GPU fill it with work.
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}


class _HeadLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        weights: Tensor,
        group: Group,
        vocab_size: int,
        softcap: float | None,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = head.shape[0]
        step = max(16, CHUNK_ELEMENTS.get(hidden.device.type, 1 << 27) // rows)
        losses = hidden.new_empty(hidden.shape[0], dtype=_at_least_fp32(hidden.dtype))
        d_hidden = torch.empty_like(hidden) if differentiable else None
        d_head = torch.empty_like(head, dtype=losses.dtype) if differentiable else None
        for start in range(0, hidden.shape[0], step):
            part = slice(start, start + step)
            losses[part], softmax, target, mine, share, slope = _chunk(
                hidden[part], head, labels[part], group, vocab_size, softcap
            )
            if d_hidden is not None and d_head is not None:
                weight = weights[part].to(losses.dtype)
                d_logits = _gradient(softmax, weight, share, target, mine, slope, hidden.dtype)
                torch.mm(d_logits, head, out=d_hidden[part])
                products.product(d_logits.t(), hidden[part], d_head, add=start > 0)
        if d_hidden is not None and d_head is not None:
            ctx.save_for_backward(d_hidden, d_head)
        ctx.dtype, ctx.main = head.dtype, main_grad_of(head)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # not in low precision: rounding the scale itself would change all gradients alike
        d_hidden, d_head = ctx.saved_tensors
        d_hidden = torch.mul(d_hidden.to(scale.dtype), scale, out=torch.empty_like(d_hidden))
        if ctx.main is None:
            whole = torch.mul(d_head, scale, out=torch.empty_like(d_head, dtype=ctx.dtype))
            return d_hidden, whole, None, None, None, None, None, None
        out, add = ctx.main()
        products.scaled(d_head, scale, ctx.dtype, out, add=add)
        return d_hidden, None, None, None, None, None, None, None


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    group: Group,
    vocab_size: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of `hidden` through `head` against `labels`.

    Args:
        hidden: [N, D]; the same on every rank of `group`. Its gradient is this rank's part, to be summed over them.
        head: this rank's rows [R, D] of the output matrix; rows past `vocab_size` are padding and take no part.
        labels: int64 [N]; where the weight is zero any value in [0, V) will do.
        weights: fp32 [N], the weight of each token in the sum.
        group: the ranks that split the vocabulary.
        vocab_size: V, unpadded.
        softcap: logits become cap tanh(logits / cap) (arXiv:2408.00118).

    Returns:
        The weighted sum of the losses (a scalar to differentiate), and each token's loss [N] in at least fp32.
    """
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    result: tuple[Tensor, Tensor] = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head, labels, weights, group, vocab_size, softcap, differentiable
    )
    return result


def _chunk(
    hidden: Tensor, head: Tensor, labels: Tensor, group: Group, vocab_size: int, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Losses [n], softmax over this rank's rows alone [n, R], local label [n], whether the label is ours [n].

    And this rank's share [n] of the softmax over all rows, and the derivative [n, R] of the soft cap, if there is one.
    """
    rows, wide = head.shape[0], _at_least_fp32(hidden.dtype)
    first = group.rank * rows
    logits, slope = hidden @ head.t(), None
    if softcap is not None:
        bent = logits.to(wide).div_(softcap).tanh_()
        slope = 1 - bent.square()
        logits = bent.mul_(softcap)
    if first + rows > vocab_size:
        logits[:, max(0, vocab_size - first) :] = float("-inf")
    local = labels - first
    mine = (local >= 0) & (local < rows)
    target = local.clamp(0, rows - 1)
    # where() rather than a product: a foreign label may point at a padding row, whose logit is minus infinity
    label_logit = torch.where(mine, logits.gather(1, target.unsqueeze(-1)).squeeze(-1).to(wide), 0.0)
    softmax, own = _softmax(logits, wide, empty=first >= vocab_size)
    top = own.clone()
    all_reduce(top, group, "max")
    sums = torch.stack([(own - top).exp_(), label_logit])
    all_reduce(sums, group)
    share = (own - top).exp_() / sums[0]
    return sums[0].log() + top - sums[1], softmax, target, mine, share, slope


def _softmax(logits: Tensor, wide: torch.dtype, *, empty: bool) -> tuple[Tensor, Tensor]:
    """Softmax of each row of [n, R], and the logarithm of its sum [n]: one pass over the logits, and one for the largest.

    `empty`: all logits are minus infinity, since all rows are padding.
    """
    if empty:
        return torch.zeros_like(logits, dtype=wide), torch.full_like(logits[:, 0], float("-inf"), dtype=wide)
    softmax = torch.softmax(logits, -1, dtype=wide)
    top, place = logits.max(-1)
    return softmax, top.to(wide) - softmax.gather(1, place.unsqueeze(-1)).squeeze(-1).log()


def _gradient(
    softmax: Tensor,
    weight: Tensor,
    share: Tensor,
    target: Tensor,
    mine: Tensor,
    slope: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient [n, R] of the logits, of `dtype`: weight (softmax over all rows - 1 at the label)."""
    factor, target = (weight * share).unsqueeze(-1), target.unsqueeze(-1)
    of_label = softmax.gather(1, target) * factor - (weight * mine).unsqueeze(-1)
    if slope is not None:
        softmax, of_label = softmax.mul_(slope), of_label * slope.gather(1, target)
    out = torch.mul(softmax, factor, out=torch.empty_like(softmax, dtype=dtype))
    return out.scatter_(1, target, of_label.to(dtype))


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
