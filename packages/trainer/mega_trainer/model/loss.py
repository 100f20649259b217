"""Head and cross entropy as one operation, over a vocabulary split among ranks, in chunks of tokens.

The logits of a whole sequence never exist: each chunk's are turned into its loss and, since the gradient of a softmax
is known as soon as the softmax is, into the gradients of hidden state and head at once, then dropped.

Legend: N tokens, D model width, V vocabulary, R = ceil(V / ranks) rows of the head on each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_trainer.comm import Group, all_reduce
from mega_trainer.kernels import products
from mega_trainer.kernels.fused import wide
from mega_trainer.kernels.leaves import Leaves
from mega_trainer.parallel.param import main_grad_of

# Elements of logits that are made at a time: on a GPU they should fill it with work, on a CPU be reused by its allocator. There
# leaves take fewer of them at once, compiled or not, so that what one holds stays in the cache: a plain one has them in fp32, too.
CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}
LEAF_ELEMENTS = {True: 1 << 20, False: 1 << 19}


class _HeadLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Labels,
        weights: Tensor,
        group: Group,
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
            logits = logits_of(hidden[chunk], head, bias, group, vocab_size, room)
            for at, some in enumerate(torch.split(logits, few)):
                part = slice(start + at * few, start + at * few + len(some))
                kept, losses[part] = labels.losses(some, part)
                if d_hidden is not None:
                    labels.turn(some, kept, weights[part], part)
            if d_hidden is not None:
                torch.mm(logits, head, out=d_hidden[chunk])
                if d_head is not None:
                    products.product(logits.t(), hidden[chunk], d_head, add=start > 0)
                if d_bias is not None:
                    d_bias += logits.sum(0, dtype=d_bias.dtype)
        if d_hidden is not None:
            ctx.save_for_backward(d_hidden, d_head, d_bias)
        ctx.dtype, ctx.main = head.dtype, main_grad_of(head)
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
            products.scaled(d_head, scale, ctx.dtype, out, add=add)
        if d_bias is not None:
            d_bias = torch.mul(d_bias, scale, out=torch.empty_like(d_bias, dtype=ctx.dtype))
        return d_hidden, whole, None, None, None, None, None, d_bias, None, None


Kept = tuple[Tensor, ...]  # the logarithm [n] of the sums of exponentials over all ranks first


class Labels(Protocol):
    """What the tokens of a vocabulary split over ranks are held against."""

    def losses(self, logits: Tensor, part: slice) -> tuple[Kept, Tensor]:
        """Of this rank's logits [n, R] of some tokens what `turn` is to have, and the losses [n] in at least fp32."""

    def turn(self, logits: Tensor, kept: Kept, weights: Tensor, part: slice) -> None:
        """The logits [n, R] into the gradient of the losses, weighted by [n], with respect to them."""


class OneLabel:
    """A label for each token, int64 [N], and its cross entropy."""

    def __init__(self, labels: Tensor, rows: int, group: Group, softcap: float | None, leaves: Leaves) -> None:
        self.here, target = place_of(labels, rows, group)
        self.target, self.group, self.softcap, self.leaves = target.unsqueeze(-1), group, softcap, leaves
        self.rows = torch.arange(len(labels), device=labels.device)

    def losses(self, logits: Tensor, part: slice) -> tuple[Kept, Tensor]:
        """See `Labels`."""
        keeps = not self.leaves.compiled  # a kernel makes the exponentials anew faster than it reads them
        sums, label, *exponentials = self.leaves(
            row_sums_leaf, logits, self.here[part], self.target[part], self.softcap, keeps
        )
        lse, label = over_ranks(sums, label, self.group)
        return (lse, *exponentials), lse - label

    def turn(self, logits: Tensor, kept: Kept, weights: Tensor, part: slice) -> None:
        """See `Labels`."""
        here, target = self.here[part], self.target[part]
        of_label = self.leaves(gradient_leaf, logits, here, target, weights, self.softcap, *kept)
        # not scatter_, which on a CPU copies the whole of them first
        logits[self.rows[: len(logits)], target.squeeze(1)] = of_label.squeeze(1)


def place_of(ids: Tensor, rows: int, group: Group) -> tuple[Tensor, Tensor]:
    """Which of some tokens of the vocabulary are among this rank's rows, and where; elsewhere some row."""
    local = ids - group.rank * rows
    return (local >= 0) & (local < rows), local.clamp(0, rows - 1)


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    group: Group,
    vocab_size: int,
    softcap: float | None = None,
    leaves: Leaves | None = None,
    bias: Tensor | None = None,
    weigh: Callable[[Tensor], Tensor] | None = None,
    soft: Labels | None = None,
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
            weights = weigh(-head_loss(hidden, head, labels, weights, group, vocab_size, softcap, leaves, bias)[1])
    leaves = leaves or Leaves()
    against = soft or OneLabel(labels, head.shape[0], group, softcap, leaves)
    step = few = chunk_of(hidden, head.shape[0])
    if hidden.device.type == "cpu":
        few = max(16, LEAF_ELEMENTS[leaves.compiled] // head.shape[0])
    result: tuple[Tensor, Tensor] = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden, head, against, weights, group, vocab_size, differentiable, bias, step, few
    )
    return result


def chunk_of(hidden: Tensor, rows: int) -> int:
    """Of how many tokens the logits over so many rows of the head are made at a time."""
    return max(16, CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cuda"]) // rows)


def logits_of(
    hidden: Tensor, head: Tensor, bias: Tensor | None, group: Group, vocab_size: int, room: Tensor | None = None
) -> Tensor:
    """[n, R], in `room` [n or more, R] where that is given; minus infinity for rows of padding."""
    logits = torch.mm(hidden, head.t(), out=None if room is None else room[: len(hidden)])
    own = vocab_size - group.rank * head.shape[0]
    if bias is not None:
        logits += bias
    if own < head.shape[0]:
        logits[:, max(0, own) :] = float("-inf")
    return logits


def row_sums_leaf(
    logits: Tensor, here: Tensor, target: Tensor, softcap: float | None, keeps: bool
) -> tuple[Tensor, ...]:
    """Of logits [n, R] the logarithm [n] of each row's sum of exponentials, and the logit [n] at its label.

    Both in at least fp32. `target` int64 [n, 1] is the label, among this rank's rows, or some row where that is not `here`
    [n], and its logit told as 0. One that `keeps` tells the exponentials [n, R], too, of what the logits are above [n, 1].
    """
    # where() rather than a product: a foreign label may point at a padding row, whose logit is minus infinity
    label = torch.where(here, capped(logits.gather(1, target), softcap).squeeze(-1), 0.0)
    values = capped(logits, softcap)
    if not keeps:
        return values.logsumexp(-1), label
    top = values.amax(-1, keepdim=True)
    top = torch.where(top.isinf(), 0.0, top)  # rows of padding alone
    shares = (values - top if values is logits else values.sub_(top)).exp_()
    return shares.sum(-1).log_().add_(top.squeeze(-1)), label, shares, top


def gradient_leaf(
    logits: Tensor,
    here: Tensor,
    target: Tensor,
    weights: Tensor,
    softcap: float | None,
    lse: Tensor,
    shares: Tensor | None = None,
    top: Tensor | None = None,
) -> Tensor:
    """Turn logits [n, R] into their gradient as if no label were among them, and return what it is at the label [n, 1].

    That is weight (softmax over all ranks' rows - 1 at the label); `lse` [n] is over all ranks. Exponentials that
    `row_sums_leaf` has kept are used up.
    """
    lse, weights, here = (t.to(lse.dtype).unsqueeze(-1) for t in (lse, weights, here))
    label = logits.gather(1, target)
    of_label = ((capped(label, softcap) - lse).exp_() - here) * weights
    if shares is None or top is None:
        out = capped(logits, softcap).sub_(lse).exp_().mul_(weights)
    else:
        out = shares.mul_((top - lse).exp_().mul_(weights))
    if softcap is not None:
        out, of_label = out.mul_(slope(logits, softcap)), of_label * slope(label, softcap)
    if out is not logits:
        logits.copy_(out)
    return of_label.to(logits.dtype)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """In at least fp32; what is minus infinity stays so."""
    values = wide(logits)
    if softcap is None:
        return values
    return torch.where(values == float("-inf"), values, torch.tanh(values / softcap) * softcap)


def slope(logits: Tensor, softcap: float) -> Tensor:
    """The derivative of the soft cap."""
    return 1 - torch.tanh(wide(logits) / softcap).square_()


def over_ranks(lse: Tensor, label: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """What `row_sums_leaf` tells of this rank's rows: of those of all ranks."""
    if group.size == 1:
        return lse, label
    top = lse.clone()
    all_reduce(top, group, "max")
    sums = torch.stack([(lse - top).exp_(), label])
    all_reduce(sums, group)
    return sums[0].log() + top, sums[1]


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
