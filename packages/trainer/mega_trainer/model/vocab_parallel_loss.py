"""Vocab-parallel losses: fused output projection and cross entropy or distillation, over a vocabulary split among ranks.

The logits of a whole sequence never exist: in each chunk of tokens the logits are turned into the loss and, since the
gradient of a softmax is known with the softmax, directly into the gradients of hidden state and head.

The distillation loss of a token is t^2 KL(teacher || student), both at temperature t (Hinton et al. 2015,
arXiv:1503.02531), where the teacher's distribution is that of its top-K tokens, normalised to a sum of one.

Legend: N tokens, n tokens of a chunk, D model width, V vocabulary, R = ceil(V / ranks) rows of the head on each rank, K top
tokens of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from mega_trainer.data.micro_batch import TeacherSoftLabels, TokenLossFunction
from mega_trainer.distributed.comm import CommGroup, all_gather, all_reduce
from mega_trainer.kernels import gemm_accumulation
from mega_trainer.kernels.fused_elementwise import upcast_to_fp32
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.parallel.parameter_info import get_main_grad_function

# Elements of logits per chunk: enough to fill a GPU; on a CPU few enough that its allocator reuses the memory. On a CPU,
# leaves work on parts of a chunk that fit the cache; by `compiled`, since eager leaves also make fp32 copies.
CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}
LEAF_ELEMENTS = {True: 1 << 20, False: 1 << 19}


class _FusedLinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        targets: LossTargets,
        weights: Tensor,
        group: CommGroup,
        vocab_size: int,
        differentiable: bool,
        bias: Tensor | None,
        chunk_tokens: int,
        leaf_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        losses = hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
        d_hidden = torch.empty_like(hidden) if differentiable else None
        d_head = torch.empty_like(head, dtype=losses.dtype) if differentiable and head.requires_grad else None
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=losses.dtype)
        buffer = hidden.new_empty(min(chunk_tokens, len(hidden)), len(head))  # reused: new memory is expensive on a CPU
        for start in range(0, hidden.shape[0], chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = compute_local_logits(hidden[chunk], head, bias, group, vocab_size, buffer)
            for at, some in enumerate(torch.split(logits, leaf_tokens)):
                part = slice(start + at * leaf_tokens, start + at * leaf_tokens + len(some))
                saved, losses[part] = targets.compute_losses(some, part)
                if d_hidden is not None:
                    targets.logits_to_gradient(some, saved, weights[part], part)
            if d_hidden is not None:
                torch.mm(logits, head, out=d_hidden[chunk])
                if d_head is not None:
                    gemm_accumulation.gemm_into(logits.t(), hidden[chunk], d_head, add=start > 0)
                if d_bias is not None:
                    d_bias += logits.sum(0, dtype=d_bias.dtype)
        if d_hidden is not None:
            ctx.save_for_backward(d_hidden, d_head, d_bias)
        ctx.dtype, ctx.main = head.dtype, get_main_grad_function(head)
        ctx.mark_non_differentiable(losses)
        return (losses * weights).sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # the scale is not rounded to low precision: its error would be in all gradients
        d_hidden, d_head, d_bias = ctx.saved_tensors
        d_hidden = torch.mul(d_hidden.to(scale.dtype), scale, out=torch.empty_like(d_hidden))
        whole = None
        if d_head is not None and ctx.main is None:
            whole = torch.mul(d_head, scale, out=torch.empty_like(d_head, dtype=ctx.dtype))
        elif d_head is not None:
            out, add = ctx.main()
            gemm_accumulation.write_scaled_values(d_head, scale, ctx.dtype, out, add=add)
        if d_bias is not None:
            d_bias = torch.mul(d_bias, scale, out=torch.empty_like(d_bias, dtype=ctx.dtype))
        return d_hidden, whole, None, None, None, None, None, d_bias, None, None


SavedTensors = tuple[Tensor, ...]  # first the log-sum-exp [n] over all ranks


class LossTargets(Protocol):
    """Interface of the targets of a loss that is computed from logits over a vocabulary split among ranks."""

    def compute_losses(self, logits: Tensor, part: slice) -> tuple[SavedTensors, Tensor]:
        """Return the tensors that the gradient needs, and the losses [n], of some tokens from their logits.
        The tokens are in the slice `part`, the logits are [n, R] over this rank's vocabulary rows, and the losses have
        at least fp32. The tensors are for `logits_to_gradient`.
        """

    def logits_to_gradient(self, logits: Tensor, saved: SavedTensors, weights: Tensor, part: slice) -> None:
        """Overwrite the logits [n, R] of some tokens over this rank's vocabulary rows with the losses' gradient.
        The tokens are in the slice `part`; the losses are weighted by `weights` [n].
        """


class LabelTargets:
    """Cross-entropy targets: one label per token, int64 [N]."""

    def __init__(
        self, labels: Tensor, rows: int, group: CommGroup, softcap: float | None, leaves: FusibleFunctionCompiler
    ) -> None:
        self.is_local, target = map_to_local_vocab_rows(labels, rows, group)
        self.target, self.group, self.softcap, self.leaves = target.unsqueeze(-1), group, softcap, leaves
        self.rows = torch.arange(len(labels), device=labels.device)

    def compute_losses(self, logits: Tensor, part: slice) -> tuple[SavedTensors, Tensor]:
        """Return the tensors that the gradient needs, and the cross entropies [n] of some tokens' labels.
        The tokens are in the slice `part`, and the logits are [n, R] over this rank's vocabulary rows. The tensors are
        for `logits_to_gradient`.
        """
        save = not self.leaves.compiled  # a compiled kernel recomputes exponentials faster than it reads them
        sums, label, *exponentials = self.leaves(
            fusible_row_logsumexp, logits, self.is_local[part], self.target[part], self.softcap, save
        )
        lse, label = combine_logsumexp_over_ranks(sums, label, self.group)
        return (lse, *exponentials), lse - label

    def logits_to_gradient(self, logits: Tensor, saved: SavedTensors, weights: Tensor, part: slice) -> None:
        """Overwrite the logits [n, R] of some tokens with the gradient of their cross entropies.
        The tokens are in the slice `part`; the cross entropies are weighted by `weights` [n].
        """
        is_local, target = self.is_local[part], self.target[part]
        label_grad = self.leaves(fusible_cross_entropy_grad, logits, is_local, target, weights, self.softcap, *saved)
        # not scatter_, which copies all logits first on a CPU
        logits[self.rows[: len(logits)], target.squeeze(1)] = label_grad.squeeze(1)


def map_to_local_vocab_rows(ids: Tensor, rows: int, group: CommGroup) -> tuple[Tensor, Tensor]:
    """Return a mask of the token ids that are among this rank's vocabulary rows, and their local row numbers.
    The row numbers of other ids are arbitrary.
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
    leaves: FusibleFunctionCompiler | None = None,
    bias: Tensor | None = None,
    weigh: Callable[[Tensor], Tensor] | None = None,
    soft: LossTargets | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the tokens' cross entropies (or `soft` losses) and each token's loss [N]; keep no logits.
    They are computed from `hidden` and the output matrix `head`, split over `group`.

    Args:
        hidden: [N, D], equal on all ranks of `group`. Its gradient is partial, to be summed over the ranks.
        head: this rank's rows [R, D] of the output matrix; rows past `vocab_size` are padding and ignored.
        labels: int64 [N]; any value in [0, V) where the weight is zero.
        weights: fp32 [N], the weight of each token in the sum.
        group: the ranks that split the vocabulary.
        vocab_size: V, unpadded.
        softcap: logits become cap tanh(logits / cap) (arXiv:2408.00118).
        leaves: calls the fusible functions.
        bias: this rank's part [R] of the bias of the logits.
        weigh: computes the weights from the log-probabilities [N] instead, which takes an extra pass over the logits.
        soft: targets to use instead of the labels.

    Returns:
        The weighted sum of the losses (a scalar to differentiate), and each token's loss [N] in at least fp32.
    """
    differentiable = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    if weigh is not None:
        with torch.no_grad():
            weights = weigh(
                -fused_linear_cross_entropy(hidden, head, labels, weights, group, vocab_size, softcap, leaves, bias)[1]
            )
    leaves = leaves or FusibleFunctionCompiler()
    targets = soft or LabelTargets(labels, head.shape[0], group, softcap, leaves)
    chunk_tokens = leaf_tokens = logit_tokens_per_chunk(hidden, head.shape[0])
    if hidden.device.type == "cpu":
        leaf_tokens = max(16, LEAF_ELEMENTS[leaves.compiled] // head.shape[0])
    result: tuple[Tensor, Tensor] = _FusedLinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets, weights, group, vocab_size, differentiable, bias, chunk_tokens, leaf_tokens
    )
    return result


def logit_tokens_per_chunk(hidden: Tensor, rows: int) -> int:
    """Return the number of tokens whose logits are computed at a time, to limit memory.
    The logits are over `rows` local vocabulary rows.
    """
    return max(16, CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cuda"]) // rows)


def compute_local_logits(
    hidden: Tensor, head: Tensor, bias: Tensor | None, group: CommGroup, vocab_size: int, out: Tensor | None = None
) -> Tensor:
    """Return this rank's logits [n tokens, R vocabulary rows], minus infinity in padding rows, in `out` if given.
    `out` is [n or more, R].
    """
    logits = torch.mm(hidden, head.t(), out=None if out is None else out[: len(hidden)])
    own = vocab_size - group.rank * head.shape[0]
    if bias is not None:
        logits += bias
    if own < head.shape[0]:
        logits[:, max(0, own) :] = float("-inf")
    return logits


def fusible_row_logsumexp(
    logits: Tensor, is_local: Tensor, target: Tensor, softcap: float | None, save: bool
) -> tuple[Tensor, ...]:
    """Return the log-sum-exp [n] of each row of local logits [n, R], and the logit [n] at its label, in at least fp32.

    `target` int64 [n, 1] is the label's row on this rank; if the label is not `is_local` [n], it is an arbitrary row, and
    the logit is returned as 0. With `save`, also exp(logits - top) [n, R] and top [n, 1], the maximum of each row.
    """
    # where() instead of a product: another rank's label may point to a padding row, whose logit is minus infinity
    label = torch.where(is_local, apply_softcap(logits.gather(1, target), softcap).squeeze(-1), 0.0)
    values = apply_softcap(logits, softcap)
    if not save:
        return values.logsumexp(-1), label
    top = values.amax(-1, keepdim=True)
    top = torch.where(top.isinf(), 0.0, top)  # all rows of this rank are padding
    exponentials = (values - top if values is logits else values.sub_(top)).exp_()
    return exponentials.sum(-1).log_().add_(top.squeeze(-1)), label, exponentials, top


def fusible_cross_entropy_grad(
    logits: Tensor,
    is_local: Tensor,
    target: Tensor,
    weights: Tensor,
    softcap: float | None,
    lse: Tensor,
    exponentials: Tensor | None = None,
    top: Tensor | None = None,
) -> Tensor:
    """Overwrite logits [n, R] with the cross entropy's gradient, except at local labels, where it is returned [n, 1].

    The gradient is weight (softmax over all ranks' rows - 1 at the label); `lse` [n] is over all ranks. Exponentials
    saved by `fusible_row_logsumexp` are overwritten.
    """
    lse, weights, is_local = (t.to(lse.dtype).unsqueeze(-1) for t in (lse, weights, is_local))
    label = logits.gather(1, target)
    label_grad = ((apply_softcap(label, softcap) - lse).exp_() - is_local) * weights
    if exponentials is None or top is None:
        out = apply_softcap(logits, softcap).sub_(lse).exp_().mul_(weights)
    else:
        out = exponentials.mul_((top - lse).exp_().mul_(weights))
    if softcap is not None:
        out, label_grad = out.mul_(softcap_derivative(logits, softcap)), label_grad * softcap_derivative(label, softcap)
    if out is not logits:
        logits.copy_(out)
    return label_grad.to(logits.dtype)


def apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(logits / softcap), or the logits if `softcap` is None, in at least fp32; -inf stays -inf."""
    values = upcast_to_fp32(logits)
    if softcap is None:
        return values
    return torch.where(values == float("-inf"), values, torch.tanh(values / softcap) * softcap)


def softcap_derivative(logits: Tensor, softcap: float) -> Tensor:
    """Return the derivative of `apply_softcap` at the uncapped logits, 1 - tanh(logits / softcap)^2."""
    return 1 - torch.tanh(upcast_to_fp32(logits) / softcap).square_()


def combine_logsumexp_over_ranks(lse: Tensor, label: Tensor, group: CommGroup) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp and label logits over the whole vocabulary, combined from all ranks.
    Every rank has the values over its own vocabulary rows.
    """
    if group.size == 1:
        return lse, label
    top = lse.clone()
    all_reduce(top, group, "max")
    sums = torch.stack([(lse - top).exp_(), label])
    all_reduce(sums, group)
    return sums[0].log() + top, sums[1]


class TokenLossTargets(LabelTargets):
    """Targets of a loss of each label's log-probability and the log of its softmax normaliser (`LossTargets`).
    The loss is f(log p, log Z), with Z the sum of the exponentials of the logits.

    The gradient in the logits is (df/dlog Z - df/dlog p) softmax + df/dlog p at the label.
    """

    def __init__(
        self,
        function: TokenLossFunction,
        labels: Tensor,
        rows: int,
        group: CommGroup,
        softcap: float | None,
        leaves: FusibleFunctionCompiler,
    ) -> None:
        super().__init__(labels, rows, group, softcap, leaves)
        self.function = function

    def compute_losses(self, logits: Tensor, part: slice) -> tuple[SavedTensors, Tensor]:
        """Return the tensors that `logits_to_gradient` needs, and the losses [n] of some tokens.
        The tokens are those in the slice `part`, with logits [n, R] over this rank's vocabulary rows.
        """
        saved, cross_entropy = super().compute_losses(logits, part)
        with torch.enable_grad():
            log_probs, log_normalizers = (value.detach().requires_grad_() for value in (-cross_entropy, saved[0]))
            losses = self.function(log_probs, log_normalizers)
            gradients = torch.autograd.grad(
                losses.sum(), (log_probs, log_normalizers), allow_unused=True, materialize_grads=True
            )
        return (*saved, *gradients), losses.detach()

    def logits_to_gradient(self, logits: Tensor, saved: SavedTensors, weights: Tensor, part: slice) -> None:
        """Overwrite the logits [n, R] of some tokens with the gradient of their losses.
        The tokens are those in the slice `part`; their losses are weighted by `weights` [n].
        """
        *saved_softmax, d_label, d_normalizer = saved
        is_local, target, weights = self.is_local[part], self.target[part], weights.to(d_label.dtype)
        at_label = (d_label * weights * is_local)[:, None]
        if self.softcap is not None:
            at_label = at_label * softcap_derivative(logits.gather(1, target), self.softcap)
        of_softmax = self.leaves(
            fusible_cross_entropy_grad, logits, torch.zeros_like(is_local), target, (d_normalizer - d_label) * weights,
            self.softcap, *saved_softmax,
        )  # fmt: skip
        label_grad = (of_softmax + at_label).to(logits.dtype)
        logits[self.rows[: len(logits)], target.squeeze(1)] = label_grad.squeeze(1)


class TeacherTargets:
    """Loss targets from a teacher's top-k next-token distribution, for distillation; implements `LossTargets`."""

    def __init__(self, soft: TeacherSoftLabels, rows: int, group: CommGroup, softcap: float | None) -> None:
        self.is_local, self.target = map_to_local_vocab_rows(soft.ids.flatten(0, 1), rows, group)
        self.log_probs = (soft.log_probs.flatten(0, 1) / soft.temperature).log_softmax(-1)
        self.group, self.softcap, self.temperature = group, softcap, soft.temperature

    def compute_losses(self, logits: Tensor, part: slice) -> tuple[SavedTensors, Tensor]:
        """Return the tensors that the gradient needs, and the distillation losses [n] of some tokens.
        A loss is a divergence from the teacher. The tokens are in the slice `part`, and the logits are [n, R] over this
        rank's vocabulary rows. The tensors are for `logits_to_gradient`.
        """
        scaled, log_probs = apply_softcap(logits, self.softcap) / self.temperature, self.log_probs[part]
        probs = log_probs.exp()
        local = torch.where(self.is_local[part], scaled.gather(1, self.target[part]), 0.0)
        lse, mean = combine_logsumexp_over_ranks(scaled.logsumexp(-1), (probs * local).sum(-1), self.group)
        return (lse,), self.temperature**2 * ((probs * log_probs).sum(-1) - mean + lse)

    def logits_to_gradient(self, logits: Tensor, saved: SavedTensors, weights: Tensor, part: slice) -> None:
        """Overwrite the logits [n, R] of some tokens with the gradient of their distillation losses.
        The tokens are in the slice `part`; the gradient is t (student - teacher) at temperature t, weighted by
        `weights` [n].
        """
        (lse,) = saved
        out = (apply_softcap(logits, self.softcap) / self.temperature - lse[:, None]).exp_()
        probs = torch.where(self.is_local[part], self.log_probs[part].exp(), 0.0)
        out.scatter_add_(1, self.target[part], -probs.to(out.dtype))
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
    """Return ids and log-probabilities of the `count` most likely next tokens over all ranks' vocabulary, best first.
    They are int64 [N, K], and [N, K] in at least fp32.

    Args:
        hidden: [N, D], equal on all ranks of `group`.
        head, bias, group, vocab_size, softcap: as in `fused_linear_cross_entropy`.
        count: K.
    """
    rows = head.shape[0]
    found = []
    for chunk in torch.split(hidden, logit_tokens_per_chunk(hidden, rows)):
        logits = apply_softcap(compute_local_logits(chunk, head, bias, group, vocab_size), softcap)
        lse, _ = combine_logsumexp_over_ranks(logits.logsumexp(-1), torch.zeros_like(logits[:, 0]), group)
        values, ids = logits.topk(min(count, rows))
        values, ids = (all_gather(each.contiguous(), group, -1) for each in (values, ids + group.rank * rows))
        top = values.topk(count)
        found.append((ids.gather(1, top.indices), top.values - lse[:, None]))
    ids, log_probs = (torch.cat(each) for each in zip(*found, strict=True))
    return ids, log_probs
