"""Routing state of a training step: loss mask, loads and metrics of the routers, rollout routing replay (R3).

Legend: B sequences, S positions of each, N tokens of this rank, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mega_common.errors import TrainingError
from mega_common.model_config import ModelConfig, MoeConfig
from mega_trainer.distributed.comm import CommGroup

SUMS = 6  # numbers of a layer before the loads of its experts


@dataclass(frozen=True)
class MicroBatchRouting:
    """Expert routing of one micro-batch in a step: the routers' masks and loss weights, and the loads that they record.

    Attributes:
        affects_loss_mask: bool [B, S], tokens that can affect the loss; None: all.
        token_indices: int64 [S], positions of this rank's tokens under context parallelism; None: all tokens are here.
        sequence_weight: weight of one sequence in the losses: (loss scale) / sequences of the step, over all ranks.
        batch_weight: weight of one micro-batch: (loss scale) / micro-batches of the step.
        loads: routing statistics of this rank's tokens, by layer: fp64 [6 + E], tokens, choices dropped over capacity, sum
            of entropies, the two weighted losses, choices dropped by the dispatch, then the choices of each expert.
            Overwritten, not added to, since a forward may be repeated.
        indexer_losses: this rank's part of the weighted loss of the indexers of sparse attention, by layer.
    """

    affects_loss_mask: Tensor | None
    token_indices: Tensor | None
    sequence_weight: float
    batch_weight: float
    loads: dict[int, Tensor] = field(default_factory=dict)
    indexer_losses: dict[int, Tensor] = field(default_factory=dict)

    def record_dropped_choices(self, layer: int, choices: Tensor) -> None:
        """Record the number of expert choices that the expert-parallel dispatch of a layer has dropped, a scalar."""
        self.loads[layer][SUMS - 1] = choices


@dataclass(frozen=True)
class RoutingReplay:
    """Experts of a micro-batch's tokens for rollout routing replay (R3): those given to be used, and those recorded.

    Legend: L layers with experts, K experts per token.

    Attributes:
        layers: numbers of the layers.
        token_indices: as in `MicroBatchRouting`.
        given: int64 [B, S, L, K], experts to use, of whole sequences; -1: the router chooses; None: it always does.
        recorded: int64 [B, S, L, K], 1 + the experts of this rank's tokens in its layers, 0 for other tokens and layers.
    """

    layers: Sequence[int]
    token_indices: Tensor | None
    given: Tensor | None
    recorded: Tensor

    def apply_replay(self, layer: int, expert_ids: Tensor, tokens: RoutedTokens) -> Tensor:
        """Return the experts of this rank's tokens in a layer, the given ones or else the router's, and record them.
        The given ones are those of rollout routing replay (R3); `expert_ids` are the router's, int64 [N, K]. In an MTP
        layer, return `expert_ids` and record nothing.
        """
        if layer not in self.layers:  # an MTP layer
            return expert_ids
        number = self.layers.index(layer)
        if self.given is not None:
            given = self.given[tokens.row, tokens.position, number]
            expert_ids = torch.where(given >= 0, given, expert_ids)
        valid = tokens.affects_loss_mask  # false for the padding of a rank's token share
        self.recorded[tokens.row[valid], tokens.position[valid], number] = expert_ids[valid] + 1
        return expert_ids


@dataclass(frozen=True)
class RoutedTokens:
    """The N tokens of a micro-batch that this rank routes: their sequence, position and mask.

    Attributes:
        row, position: int64 [N], sequence in the micro-batch, and position in the sequence.
        affects_loss_mask: bool [N].
        sequences, length: B and S.
        token_ids: int64 [N], or None if the forward pass has none.
    """

    row: Tensor
    position: Tensor
    affects_loss_mask: Tensor
    sequences: int
    length: int
    token_ids: Tensor | None = None


class RoutedBatch(Protocol):
    """Interface of the fields of a `MicroBatch` that expert routing depends on."""

    @property
    def tokens(self) -> Tensor:
        """Token ids of the micro-batch, int64 [B, S]."""

    @property
    def affects_loss_mask(self) -> Tensor | None:
        """Mask of the tokens with an unmasked label at or after them, which can change the loss, bool [B, S]; None: all."""

    @property
    def token_indices(self) -> Tensor | None:
        """Positions of this rank's tokens within the whole samples, int64 [S]; None if it has all tokens."""


def make_step_routings(batches: Sequence[RoutedBatch], data: CommGroup, loss_scale: float) -> list[MicroBatchRouting]:
    """Return the routing state of each of this rank's micro-batches in a step; `data` is the data-parallel group."""
    sequences = sum(len(batch.tokens) for batch in batches) * data.size
    return [
        MicroBatchRouting(
            batch.affects_loss_mask, batch.token_indices, loss_scale / sequences, loss_scale / len(batches)
        )
        for batch in batches
    ]


def sum_expert_loads(routings: Sequence[MicroBatchRouting]) -> dict[int, Tensor]:
    """Return each layer's routing statistics `MicroBatchRouting.loads`, fp64 [6 + experts], summed over micro-batches."""
    layers = routings[0].loads if routings else {}
    return {layer: torch.stack([one.loads[layer] for one in routings]).sum(0) for layer in layers}


def sum_indexer_losses(routings: Sequence[MicroBatchRouting], like: Tensor) -> Tensor:
    """Return this rank's part of the weighted loss of sparse attention's indexers, a scalar of the dtype of `like`.
    It is summed over layers and micro-batches, and 0 without an indexer that is trained.
    """
    losses = [loss.to(like) for one in routings for loss in one.indexer_losses.values()]
    return torch.stack(losses).sum() if losses else like.new_zeros(())


def tabulate_expert_loads(loads: Mapping[int, Tensor], config: ModelConfig, device: torch.device) -> Tensor:
    """Return this rank's expert routing statistics, fp64 [layers, 6 + experts]; layers of other ranks are zeros.
    A layer has six sums (tokens, dropped choices, losses and so on), then the choices of each expert.
    """
    if config.moe is None:
        return torch.zeros(0, SUMS, dtype=torch.float64, device=device)
    none = torch.zeros(SUMS + config.moe.num_router_outputs, dtype=torch.float64, device=device)
    return torch.stack([loads.get(layer, none) for layer in list_expert_layers(config)])


def list_expert_layers(config: ModelConfig) -> list[int]:
    """Return the numbers of the layers that have experts, MTP layers included."""
    return [layer for layer in range(config.num_layers + config.mtp_layers) if config.is_moe_layer(layer)]


def compute_routing_metrics(moe: MoeConfig | None, table: Tensor, loss_scale: float) -> dict[str, float]:
    """Return a step's expert routing metrics, such as load balance; raise if the dispatch dropped choices.
    `table` has the routing statistics by layer summed over all ranks. The result is empty without experts.

    `aux_loss` and `z_loss` are weighted as in the training loss. `expert_load_max` and `expert_load_min` are the most and
    fewest choices of an expert, relative to the mean of its layer. `drop_rate` is the share of dropped choices.
    `router_entropy` is the entropy of a token's distribution over the experts, in nats, averaged over tokens and layers.

    Args:
        table: in host memory.

    Raises:
        TrainingError: when the dispatch dropped choices.
    """
    if moe is None:
        return {}
    tokens, dropped, entropy, aux, z, lost = table[:, :SUMS].sum(0).tolist()
    if lost:
        raise TrainingError(
            f"parallel.dispatch_bound is too small: {lost:.0f} expert choices did not fit, so the step is wrong and was not "
            "saved",
            hint="set a larger bound, or remove it; then run the same command again to resume from the last checkpoint",
        )
    counts = table[:, SUMS:]
    relative = counts / counts.mean(-1, keepdim=True).clamp(min=1)
    return {
        "aux_loss": aux / loss_scale,
        "z_loss": z / loss_scale,
        "expert_load_max": relative.max().item(),
        "expert_load_min": relative.min().item(),
        "drop_rate": dropped / max(tokens * moe.top_k, 1.0),
        "router_entropy": entropy / max(tokens, 1.0),
    }
