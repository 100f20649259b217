"""A model on several ranks: blocks of ranks hold one copy of it, and each copy takes its share of the samples.

The first rank has the work and hands it out; the others follow it, so that all see the same samples in the same order.
Ranks of a block share the weights (tensor ranks) or the experts, and compute the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch.distributed as dist

from mega_common.model_config import ModelConfig
from mega_data.tokenizer import Tokenizer
from mega_eval.generate import Completion, generate
from mega_eval.sampling import Sampling
from mega_eval.score import Pair, Score, batches, score_batch
from mega_eval.text import Limits
from mega_trainer.layout import Layout, check_degrees
from mega_trainer.mesh import Groups, build_groups
from mega_trainer.model.decoder import Decoder


def connect(model: ModelConfig, rank: int, world_size: int, *, tp: int, ep: int) -> Groups:
    """This rank's groups, where `tp` ranks share each weight and `ep` ranks the experts. For all ranks together.

    Raises:
        ConfigError: when the model cannot be shared so.
    """
    check_degrees(model, tp=tp, ep=ep)
    return build_groups(Layout(tp=tp, dp=world_size // tp, ep=ep), rank, heads=model.shared_heads)


@dataclass(frozen=True)
class Prompts:
    """How texts become prompts, and tokens texts again.

    Attributes:
        tokenizer: the model's.
        longest: tokens of a prompt at most; of a longer one the last are kept. None: all.
    """

    tokenizer: Tokenizer
    longest: int | None = None

    @property
    def prefix(self) -> int | None:
        """The token that begins a text, or in a vocabulary without one that which ends it."""
        return self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokens of a text. One that is spelt with its first special token, as chat templates do, gets no second."""
        bos = self.tokenizer.bos_id
        spelt = bos is not None and text.startswith(self.tokenizer.decode([bos]))
        ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens and not spelt)
        return ids if self.longest is None else ids[-self.longest :]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@dataclass(frozen=True)
class Replicas:
    """Scores and generates on all ranks.

    Attributes:
        model: this rank's part of a copy, in eval mode.
        prompts: the tokenizer.
        batch_size: prompts that a copy continues together, and on a GPU rows that it scores together.
        rank, world_size: this rank, and how many there are.
        block: ranks of a copy.
    """

    model: Decoder
    prompts: Prompts
    batch_size: int = 1
    rank: int = 0
    world_size: int = 1
    block: int = 1

    def score(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, Score]]:
        """The scores of some pairs with their numbers, as they come. For the first rank.

        Raises:
            DataError, CheckpointError: as `score.score` does.
        """
        self._tell("score", pairs)
        for found in self._score(pairs):
            yield from found.items()

    def generate(self, prompts: Sequence[str], longest: int, limits: Limits, sampling: Sampling) -> list[Completion]:
        """Continue prompts of `longest` tokens at most. For the first rank.

        Raises:
            DataError: as `generate.generate` does.
        """
        self._tell("generate", prompts, longest, limits, sampling)
        return self._generate(prompts, longest, limits, sampling)

    def follow(self) -> None:
        """Do the first rank's work with it until that has no more. For all other ranks."""
        while (work := self._heard()) is not None:
            name, arguments = work
            if name == "score":
                for _ in self._score(*arguments):
                    pass
            else:
                self._generate(*arguments)

    def close(self) -> None:
        """Let the others go. For the first rank."""
        self._send(None)

    def _score(self, pairs: Sequence[Pair]) -> Iterator[dict[int, Score]]:
        together = 1 if self.model.head_weight.device.type == "cpu" else self.batch_size
        plan, copies = batches(self.model, pairs, together), self.world_size // self.block
        while share := list(islice(plan, copies)):
            mine = share[self.rank // self.block :][:1]
            found = {number: one for batch in mine for number, one in score_batch(self.model, batch)}
            yield {number: one for part in self._gathered(found) for number, one in part.items()}

    def _generate(self, prompts: Sequence[str], longest: int, limits: Limits, sampling: Sampling) -> list[Completion]:
        # a draw depends on the number of its prompt among all
        copies = 1 if sampling.temperature > 0 else self.world_size // self.block
        text, mine = replace(self.prompts, longest=longest), prompts[self.rank // self.block % copies :: copies]
        found = generate(self.model, text, mine, limits, sampling, batch_size=self.batch_size) if mine else []
        parts = self._gathered(found)
        return [parts[number % copies][number // copies] for number in range(len(prompts))] if self.rank == 0 else []

    def _tell(self, name: str, *arguments: Any) -> None:
        self._send((name, arguments))

    def _send(self, work: object) -> None:
        if self.world_size > 1:
            dist.broadcast_object_list([work])

    def _heard(self) -> Any:
        heard = [None]
        dist.broadcast_object_list(heard)
        return heard[0]

    def _gathered(self, found: Any) -> list[Any]:
        """On the first rank what each copy has found; elsewhere nothing."""
        if self.world_size == 1:
            return [found]
        everything: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(found if self.rank % self.block == 0 else None, everything)
        return (everything or [])[:: self.block]
