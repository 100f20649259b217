"""A request under way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from mega_eval.cache import Memory
from mega_eval.draft import Trust
from mega_eval.grammar import Grammar
from mega_eval.text import Continuation, Limits

if TYPE_CHECKING:
    from mega_eval.engine import Request, Scored


@dataclass(eq=False)
class Row:
    """A request under way. `done` of its tokens are in the cache, in `pages`; the full ones of these have `names`.

    Images, whose tokens see one another, are at `blocks`. It had `begun` tokens when the first of these keys was computed. While it runs its states have a `place`. Of a model with an
    encoder its tokens are the decoder's, and `memory` what there is of the prompt. `ahead` is kept for layers that guess.
    """

    number: int
    request: Request
    text: Continuation
    tokens: list[int]
    grammar: Grammar | None
    blocks: list[range] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    trust: Trust = field(default_factory=Trust)
    done: int = 0
    begun: int = 0
    place: int | None = None
    pages: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    memory: Memory | None = None
    ahead: list[Tensor] = field(default_factory=list)
    prompt: list[Scored | None] = field(default_factory=lambda: [None])

    @property
    def generates(self) -> bool:
        """Whether all of its tokens but the last are computed."""
        return self.done == len(self.tokens) - 1 and bool(self.text.tokens)

    @property
    def pending(self) -> int:
        """Tokens to be computed, guesses of the next among them."""
        return len(self.tokens) + len(self.drafts) - self.done

    def whole_images(self, count: int) -> int:
        """So many of the next tokens, or more where these would end within an image whose tokens see one another."""
        end = self.done + count
        return next((block.stop for block in self.blocks if block.start < end < block.stop), end) - self.done

    def wanted(self, count: int) -> int:
        """After how many of the next `count` tokens, the last of them, the model's logits are of use."""
        if self.request.prompt_logprobs and self.done < len(self.request.prompt):
            return count
        return 1 + len(self.drafts) if count == self.pending else 0

    def so_far(self, count: int) -> Request:
        """What a drafter is asked to go on with, by so many tokens."""
        request, new = self.request, len(self.text.tokens)
        return replace(
            request, prompt=self.tokens, limits=Limits(min(count, self.text.room - 1)), drawn=request.drawn + new,
            logprobs=None, prompt_logprobs=False, grammar=None, adapter=None,
        )  # fmt: skip
