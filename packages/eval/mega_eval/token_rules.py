"""Rules of one request about single tokens: biases, the tokens that are allowed, words that are banned, a minimum length.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mega_eval.text import Limits


@dataclass(frozen=True)
class TokenRules:
    """Changes to the scores of tokens before one is drawn.

    Attributes:
        bias: added to the score of a token, by token id.
        allowed: the only tokens that may be drawn; None: all.
        bad_words: token sequences that must not be generated, none of them empty.
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: frozenset[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()

    def apply(self, scores: Tensor, generated: Sequence[int], limits: Limits) -> Tensor:
        """Return the scores [V] under the rules; minus infinity where a token must not follow.

        Tokens that end the text are banned before `limits.min_new_tokens`.
        """
        ruled = scores.clone()
        for token, bias in self.bias.items():
            ruled[token] += bias
        if self.allowed is not None:
            kept = torch.tensor(sorted(self.allowed), device=scores.device)
            ruled = torch.full_like(ruled, float("-inf")).index_copy(0, kept, ruled[kept])
        banned = self._banned(generated)
        if len(generated) < limits.min_new_tokens:
            banned |= {*limits.ends, *limits.stop_tokens}
        if not banned:
            return ruled
        return ruled.index_fill(0, torch.tensor(sorted(banned), device=scores.device), float("-inf"))

    def _banned(self, generated: Sequence[int]) -> set[int]:
        """Tokens that would complete a bad word."""
        found = set()
        for *before, last in self.bad_words:
            if not before or list(generated[-len(before) :]) == before:
                found.add(last)
        return found
