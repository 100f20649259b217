"""A model on several ranks: some ranks hold a copy of it, and each copy takes its share of the samples.

The first rank has the work and hands it out; the others follow it, so that all see the same samples in the same order.
Ranks of a copy share the weights (tensor ranks), the experts or the layers, and compute the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch.distributed as dist

from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_data.tokenizer import Tokenizer
from mega_eval.generate import Completion, generate
from mega_eval.sampling import Sampling
from mega_eval.score import Pair, Score, batches, score_batch
from mega_eval.text import Limits
from mega_trainer.layout import Layout, check_degrees
from mega_trainer.mesh import Groups, build_groups
from mega_trainer.model.decoder import Decoder


@dataclass(frozen=True)
class Sharing:
    """How ranks share a copy of a model: `tp` of them each weight, `ep` the experts, `pp` the layers."""

    tp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def block(self) -> int:
        """Neighbours that hold the same layers of a copy."""
        return max(self.tp, self.ep)

    @property
    def size(self) -> int:
        """Ranks of a copy."""
        return self.block * self.pp


def connect(model: ModelConfig, rank: int, world_size: int, sharing: Sharing) -> Groups:
    """This rank's groups. For all ranks together.

    Raises:
        ConfigError: when the model cannot be shared so.
    """
    check_degrees(model, tp=sharing.tp, ep=sharing.ep)
    if sharing.pp > model.num_layers:
        raise ConfigError(
            f"pp = {sharing.pp}: this model has {model.num_layers} layers", hint="at most a rank for each"
        )
    data = world_size // sharing.pp // sharing.tp
    layout = Layout(tp=sharing.tp, pp=sharing.pp, dp=data, ep=sharing.ep)
    return build_groups(layout, rank, heads=model.shared_heads)


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
        sharing: how these share a copy.
        group: of all of them, where words are passed; by default torch's.
    """

    model: Decoder
    prompts: Prompts
    batch_size: int = 1
    rank: int = 0
    world_size: int = 1
    sharing: Sharing = Sharing()
    group: dist.ProcessGroup | None = None

    @property
    def copies(self) -> int:
        """Of the model."""
        return self.world_size // self.sharing.size

    @property
    def copy(self) -> int:
        """Number of this rank's; the ranks of a stage of all copies are neighbours."""
        return self.rank % (self.world_size // self.sharing.pp) // self.sharing.block

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
        together = 1 if self.model.device.type == "cpu" else self.batch_size
        plan = batches(self.model, pairs, together)
        while share := list(islice(plan, self.copies)):
            mine = share[self.copy :][:1]
            found = {number: one for batch in mine for number, one in score_batch(self.model, batch)}
            yield {number: one for part in self._gathered(found) for number, one in part.items()}

    def _generate(self, prompts: Sequence[str], longest: int, limits: Limits, sampling: Sampling) -> list[Completion]:
        # a draw depends on the number of its prompt among all
        copies = 1 if sampling.temperature > 0 else self.copies
        text, mine = replace(self.prompts, longest=longest), prompts[self.copy % copies :: copies]
        found = generate(self.model, text, mine, limits, sampling, batch_size=self.batch_size) if mine else []
        parts = self._gathered(found)
        return [parts[number % copies][number // copies] for number in range(len(prompts))] if self.rank == 0 else []

    def _tell(self, name: str, *arguments: Any) -> None:
        self._send((name, arguments))

    def _send(self, work: object) -> None:
        if self.world_size > 1:
            dist.broadcast_object_list([work], group=self.group)

    def _heard(self) -> Any:
        heard = [None]
        dist.broadcast_object_list(heard, group=self.group)
        return heard[0]

    def _gathered(self, found: Any) -> list[Any]:
        """On the first rank what each copy has found; elsewhere nothing."""
        if self.world_size == 1:
            return [found]
        everything: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        tells = self.rank == self.copy * self.sharing.block
        dist.gather_object(found if tells else None, everything, group=self.group)
        return (everything or [])[: self.copies * self.sharing.block : self.sharing.block]
