"""A model whose layers several ranks share: each passes the residual stream on, and the last stage tells all what it says.

All ranks of a pipeline are asked the same, in the same order, and answer the same, so that whoever scores or generates need not
know of them. One of them computes at a time: this is for models that one device cannot hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.stage import Stage
from mega_trainer.pipeline.stages import stage_layers


class StagedDecoder(Decoder):
    """This rank's layers, of a model of `build.groups.pp` ranks, for inference.

    Legend: B batch, S sequence, D model width, V vocabulary.

    Args:
        build: what layers are made from.
        owners: the rank of each stage; by default every rank has one.
        own: the layers of this rank's stages, by the number of the stage.
    """

    def __init__(
        self, build: Builder, owners: Sequence[int] | None = None, own: Mapping[int, range] | None = None
    ) -> None:
        pp = build.groups.pp
        self._owners = owners or range(pp.size)
        self._own = own or {pp.rank: stage_layers(build.config.num_layers, pp.size)[pp.rank]}
        super().__init__(build, Stage(0, 0, self._owners[0] == pp.rank, self._owners[-1] == pp.rank))
        self.layers = nn.ModuleList(self._layer(build, index) for layers in self._own.values() for index in layers)

    def embed(self, tokens: Tensor, positions: Tensor, *more: Any, **named: Any) -> Tensor:
        """The residual stream [B, S, D]; on other ranks than the first stage's, room for it."""
        if self.stage.embeds:
            return super().embed(tokens, positions, *more, **named)
        return torch.empty(*tokens.shape, self.config.hidden_size, dtype=self.dtype, device=tokens.device)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream [B, S, D] behind the last of this rank's layers."""
        pp, layers = self.groups.pp, iter(self.layers)
        for stage, own in self._own.items():
            before, behind = self._neighbours(stage)
            if before != pp.rank:
                x = torch.empty_like(x)
                dist.recv(x, pp.ranks[before], group=pp.handle)
            for _ in own:
                x = next(layers)(x, context)
            if behind != pp.rank:
                dist.send(x.contiguous(), pp.ranks[behind], group=pp.handle)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Logits [B, S, V] of the last stage's residual stream, on every rank."""
        pp = self.groups.pp
        if self.stage.heads:
            found = super().logits(x).contiguous()
        else:
            found = torch.empty(*x.shape[:-1], self.config.vocab_size, dtype=self.dtype, device=x.device)
        dist.broadcast(found, pp.ranks[self._owners[-1]], group=pp.handle)
        return found

    def _neighbours(self, stage: int) -> tuple[int, int]:
        """The ranks of the stages before and behind one; at the ends its own, which have nobody to hear and to tell."""
        last = len(self._owners) - 1
        return self._owners[max(0, stage - 1)], self._owners[min(last, stage + 1)]
