"""A model whose layers several ranks share: each passes the residual stream on, and the last one tells all what it says.

All ranks of a pipeline are asked the same, in the same order, and answer the same, so that whoever scores or generates need not
know of them. One of them computes at a time: this is for models that one device cannot hold.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.stage import Stage
from mega_trainer.pipeline.stages import stage_layers


class StagedDecoder(Decoder):
    """This rank's layers, of a model of `build.groups.pp` stages, for inference.

    Legend: B batch, S sequence, D model width, V vocabulary.
    """

    def __init__(self, build: Builder) -> None:
        pp = build.groups.pp
        layers = stage_layers(build.config.num_layers, pp.size)[pp.rank]
        super().__init__(build, Stage(layers.start, layers.stop, pp.rank == 0, pp.rank == pp.size - 1))

    def embed(self, tokens: Tensor, positions: Tensor, *more: Any, **named: Any) -> Tensor:
        """The residual stream [B, S, D]; behind the first stage, room for it."""
        if self.stage.embeds:
            return super().embed(tokens, positions, *more, **named)
        return torch.empty(*tokens.shape, self.config.hidden_size, dtype=self.dtype, device=tokens.device)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """The residual stream [B, S, D] behind this rank's layers."""
        pp = self.groups.pp
        if not self.stage.embeds:
            dist.recv(x, pp.ranks[pp.rank - 1], group=pp.handle)
        x = super().forward(x, context)
        if not self.stage.heads:
            dist.send(x.contiguous(), pp.ranks[pp.rank + 1], group=pp.handle)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Logits [B, S, V] of the last stage's residual stream, on every rank."""
        pp = self.groups.pp
        if self.stage.heads:
            found = super().logits(x).contiguous()
        else:
            found = torch.empty(*x.shape[:-1], self.config.vocab_size, dtype=self.dtype, device=x.device)
        dist.broadcast(found, pp.ranks[-1], group=pp.handle)
        return found
