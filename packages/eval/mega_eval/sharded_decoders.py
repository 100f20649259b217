"""Decoders for inference whose layers (pipeline stages) or weights (ZeRO-3) are sharded over several ranks.

All ranks make the same calls in the same order and return the same results, so callers use these models like any decoder.
Pipeline stages compute one at a time: this is for models that do not fit on one device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mega_trainer.distributed.comm import all_gather
from mega_trainer.model.decoder import Decoder, PipelineStageLayers
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.parallel.parameter_info import get_parameter_info
from mega_trainer.pipeline.layer_partition import split_stage_layers


class PipelineDecoder(Decoder):
    """Decoder for inference whose layers are divided over pipeline ranks.
    The ranks are in `build.groups.pp`; each has its own stages.

    Legend: B batch, S sequence, D model width, V vocabulary.

    Args:
        build: builder of layers.
        owners: rank of each stage; by default one stage per rank.
        own: layers of this rank's stages, by stage number.
    """

    def __init__(
        self, build: LayerBuilder, owners: Sequence[int] | None = None, own: Mapping[int, range] | None = None
    ) -> None:
        pp, config = build.groups.pp, build.config
        self._owners = owners or range(pp.size)
        stages = split_stage_layers(
            config.num_layers,
            pp.size,
            first_stage_layers=config.first_stage_layers,
            last_stage_layers=config.last_stage_layers,
        )
        self._own = own or {pp.rank: stages[pp.rank]}
        super().__init__(build, PipelineStageLayers(0, 0, self._owners[0] == pp.rank, self._owners[-1] == pp.rank))
        self.layers = nn.ModuleList(
            self._build_layer(build, index) for layers in self._own.values() for index in layers
        )

    def embed_inputs(self, tokens: Tensor, positions: Tensor, *more: Any, **named: Any) -> Tensor:
        """Return embedded tokens [B, S, D] on the first pipeline stage; an uninitialised buffer on other ranks."""
        if self.stage.embeds:
            return super().embed_inputs(tokens, positions, *more, **named)
        return torch.empty(*tokens.shape, self.config.hidden_size, dtype=self.dtype, device=tokens.device)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the hidden states [B, S, D] after this pipeline rank's layers.
        They are received from the previous pipeline stage and sent to the next.
        """
        pp, layers = self.groups.pp, iter(self.layers)
        for stage, own in self._own.items():
            before, behind = self._adjacent_ranks(stage)
            if before != pp.rank:
                x = x.new_empty(*x.shape[:-1], self.config.stream_width)
                dist.recv(x, pp.ranks[before], group=pp.process_group)
            for layer in own:
                x = self.add_deepstack(next(layers)(x, context), context, layer)
            if behind != pp.rank:
                dist.send(self.resize_stream_width(x).contiguous(), pp.ranks[behind], group=pp.process_group)
        return x

    def compute_logits(self, x: Tensor) -> Tensor:
        """Return the logits [B, S, V] of the last pipeline stage's hidden states, on every rank."""
        pp = self.groups.pp
        if self.stage.heads:
            found = super().compute_logits(x).contiguous()
        else:
            found = torch.empty(*x.shape[:-1], self.config.vocab_size, dtype=self.dtype, device=x.device)
        dist.broadcast(found, pp.ranks[self._owners[-1]], group=pp.process_group)
        return found

    def _adjacent_ranks(self, stage: int) -> tuple[int, int]:
        """Return the ranks of the previous and the next stage; the first and the last stage return their own rank."""
        last = len(self._owners) - 1
        return self._owners[max(0, stage - 1)], self._owners[min(last, stage + 1)]


class WeightGatheringDecoder(Decoder):
    """Part of a decoder for inference that gathers the weights of a model in training under ZeRO-3 as it needs them.
    Legend: B batch, S sequence, D model width, V vocabulary.
    """

    def set_training_parameters(self, live: Mapping[str, nn.Parameter]) -> None:
        """Set the sharded parameters of the model in training by the names of this model's parameters."""
        self._live, self._stubs = dict(live), dict(self.named_parameters())
        for index, layer in enumerate(self.layers):
            self._gather_for_layer(layer, f"layers.{index}.")

    def _gather_for_layer(self, layer: nn.Module, prefix: str) -> None:
        """Hold a layer's full weights while it runs."""
        held: list[ExitStack] = []

        def gather(*_: object) -> None:
            held.append(ExitStack())
            held[-1].enter_context(self._gather_weights(prefix))

        layer.register_forward_pre_hook(gather)
        layer.register_forward_hook(lambda *_: held.pop().close(), always_call=True)

    @property
    def device(self) -> torch.device:
        """Device on which the weights are gathered."""
        return next(iter(self._live.values())).device

    def embed_inputs(self, *given: Any, **named: Any) -> Tensor:
        """Return the embedded tokens, hidden states [B, S, D]."""
        with self._gather_weights("embedding.", "inputs."):
            return super().embed_inputs(*given, **named)

    def compute_logits(self, x: Tensor) -> Tensor:
        """Return logits [B, S, V], complete on every rank."""
        with self._gather_weights("head.", "head_bias", "embedding." if self.matrix is None else "matrix"):
            return super().compute_logits(x)

    @contextmanager
    def _gather_weights(self, *parts: str) -> Iterator[None]:
        """Hold the full weights whose names start with one of `parts` inside the `with` block."""
        used = [name for name in self._stubs if name.startswith(parts)]
        for name in used:
            self._set_parameter(name, nn.Parameter(self._all_gather_weight(self._live[name]), requires_grad=False))
        yield
        for name in used:
            self._set_parameter(name, self._stubs[name])

    def _set_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """Replace the parameter called `name`."""
        owner, _, last = name.rpartition(".")
        setattr(self.get_submodule(owner), last, parameter)

    def _all_gather_weight(self, parameter: nn.Parameter) -> Tensor:
        """Return all rows of a weight that is sharded evenly by rows (the last ranks may have fewer), in the compute
        dtype.
        """
        assert isinstance(parameter, DTensor)  # `live` holds its sharded parameters
        group, own = get_parameter_info(parameter).data, parameter.to_local().detach()
        rows = own.new_zeros(-(-parameter.shape[0] // group.size), *parameter.shape[1:], dtype=self.dtype)
        rows[: len(own)] = own
        return all_gather(rows, group, 0)[: parameter.shape[0]]


class GatheredDecoder(WeightGatheringDecoder):
    """Decoder for inference with all layers on every rank, whose sharded weights are gathered on use."""


class GatheredPipelineDecoder(WeightGatheringDecoder, PipelineDecoder):
    """Decoder for inference whose layers are divided over pipeline ranks, with weights that are gathered on use."""
