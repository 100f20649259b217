"""Policy-gradient losses of reinforcement learning on groups of sampled answers, as pure functions.

GRPO (arXiv:2402.03300), Dr. GRPO (arXiv:2503.20783), DAPO (arXiv:2503.14476), GSPO (arXiv:2507.18071) and RLOO
(arXiv:2402.14740) differ in the advantage of an answer, the ratio of the policies, and the normalization of the loss.

Legend: N answers, T positions, G answers of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mega_trainer.config.objective_config import LossNormalization, PolicyVariant

STD_EPSILON = 1e-6  # added to the standard deviation of a group's rewards


@dataclass(frozen=True)
class PolicySamples:
    """Log-probabilities of the tokens of N answers under the sampling policy and the reference, with the advantages.

    Attributes:
        old: [N, T], log-probabilities with which the tokens were sampled.
        mask: [N, T], 1 at the tokens of the answers, else 0.
        advantages: [N].
        scale: [N, 1], factor on the sum of an answer's token losses.
        reference: [N, T], log-probabilities under the reference model; None without a KL term.
    """

    old: Tensor
    mask: Tensor
    advantages: Tensor
    scale: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True)
class PolicyLoss:
    """Value of a policy loss (reinforcement learning), with its metrics.
    Each is a sum over tokens, with the answer's scale where it is part of the loss.

    Attributes:
        loss: scalar, of which the gradient is taken.
        clipped: number of tokens at which the clip removes the gradient.
        kl: sum of the estimate of the KL divergence from the reference, 0 without a reference.
        ratio_error: sum of |ratio of the policies - 1|.
    """

    loss: Tensor
    clipped: Tensor
    kl: Tensor
    ratio_error: Tensor


def compute_group_advantages(rewards: Tensor, group_size: int, variant: PolicyVariant) -> Tensor:
    """Return the advantages [N] of answers with rewards [N], relative to the `group_size` answers of their prompt.

    grpo, dapo, gspo: (r - mean) / (std + 1e-6), std with divisor G; dr_grpo: r - mean; rloo: r - mean of the other answers.
    """
    groups = rewards.view(-1, group_size)
    centered = groups - groups.mean(1, keepdim=True)
    if variant == "rloo":
        centered = centered * (group_size / (group_size - 1))
    elif variant != "dr_grpo":
        centered = centered / (groups.std(1, correction=0, keepdim=True) + STD_EPSILON)
    return centered.flatten()


def compute_answer_loss_factors(lengths: Tensor, normalization: LossNormalization, longest: int) -> Tensor:
    """Return the factors [N, 1] on the answers' sums of token losses, by `normalization`; empty answers do not count.
    `lengths` [N] are the answers' numbers of tokens.

    sequence: 1 / (n length), n the number of answers; token: 1 / sum of lengths; constant: 1 / (n `longest`); sum: 1 / n.
    """
    count = (lengths > 0).sum().clamp(min=1)
    ones = torch.ones_like(lengths)
    scales = {
        "sequence": ones / (count * lengths.clamp(min=1)),
        "token": ones / lengths.sum().clamp(min=1),
        "constant": ones / (count * longest),
        "sum": ones / count,
    }
    return scales[normalization].unsqueeze(1)


def compute_policy_loss(
    log_probs: Tensor, samples: PolicySamples, variant: PolicyVariant, clip: tuple[float, float], kl: float = 0.0
) -> PolicyLoss:
    """Return the policy loss (reinforcement learning) of sampled answers under the trained model.
    `log_probs` [N, T] are the log-probabilities of the answers' tokens under the model.

    With the ratio r = exp(new - old) of a token, for gspo of the mean over the answer's tokens, and the advantage A, a
    token's loss is -min(r A, clamp(r, 1 - clip[0], 1 + clip[1]) A); for rloo it is -A log_prob. `kl` times the estimate
    exp(ref - new) - (ref - new) - 1 is added to it.
    """
    mask, advantages = samples.mask, samples.advantages.unsqueeze(1)
    log_ratio = (log_probs - samples.old) * mask
    if variant == "gspo":
        lengths = mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = (log_ratio.sum(1, keepdim=True) / lengths).expand_as(mask)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - clip[0], 1 + clip[1])
    losses, clipped = (
        -torch.minimum(ratio * advantages, bounded * advantages),
        ratio * advantages > bounded * advantages,
    )
    if variant == "rloo":
        losses, clipped = -advantages * log_probs, torch.zeros_like(clipped)
    divergence = torch.zeros_like(losses)
    if samples.reference is not None:
        difference = (samples.reference - log_probs) * mask
        divergence = difference.exp() - difference - 1
    loss = ((losses + kl * divergence) * mask * samples.scale).sum()
    sums = [(each * mask).sum().detach() for each in (clipped, divergence, (ratio - 1).abs())]
    return PolicyLoss(loss, *sums)
