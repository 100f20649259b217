"""What routers are told of a training step, and what they tell of it.

Legend: B sequences, S positions of each, N tokens of this rank, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mega_common.errors import TrainingError
from mega_common.model_config import ModelConfig, MoeConfig
from mega_trainer.comm import Group

if TYPE_CHECKING:
    from mega_trainer.batch import MicroBatch

SUMS = 6  # numbers of a layer before those of its experts


@dataclass(frozen=True)
class Routing:
    """What the routers of all layers share for one micro-batch of a training step.

    Attributes:
        matters: bool [B, S], the tokens that count; None: all.
        places: int64 [S], where they stand in their sequences, where context ranks have others; None: all are here.
        sequence_weight: of one sequence in the losses: (loss scale) / sequences of the step, over all ranks.
        batch_weight: of one micro-batch: (loss scale) / micro-batches of the step.
        loads: by layer, what its router did with this rank's tokens. Set, not added to: a forward may be repeated.
            For a layer fp64 [6 + E]: tokens, dropped choices, entropies, the two losses as weighted, choices that the
            dispatch lost, and then the choices of each expert.
    """

    matters: Tensor | None
    places: Tensor | None
    sequence_weight: float
    batch_weight: float
    loads: dict[int, Tensor] = field(default_factory=dict)

    def lose(self, layer: int, choices: Tensor) -> None:
        """Tell how many choices found no room on their way to the experts."""
        self.loads[layer][SUMS - 1] = choices


@dataclass(frozen=True)
class Routes:
    """The experts of a micro-batch's tokens, as they were chosen elsewhere, or to be told: of L layers with experts, K each.

    Attributes:
        layers: numbers of those layers.
        places: as in `Routing`.
        given: int64 [B, S, L, K], of whole sequences, -1 where the model is to choose; None: everywhere.
        told: int64 [B, S, L, K], one more than what is chosen for this rank's tokens in its layers, 0 for others.
    """

    layers: Sequence[int]
    places: Tensor | None
    given: Tensor | None
    told: Tensor

    def applied(self, layer: int, chosen: Tensor, tokens: Tokens) -> Tensor:
        """The experts of this rank's tokens, int64 [N, K], where the router's own choice is `chosen`."""
        if layer not in self.layers:  # one that predicts further tokens
            return chosen
        number = self.layers.index(layer)
        if self.given is not None:
            given = self.given[tokens.row, tokens.place, number]
            chosen = torch.where(given >= 0, given, chosen)
        here = tokens.matter  # rows that fill up a rank's share are no tokens
        self.told[tokens.row[here], tokens.place[here], number] = chosen[here] + 1
        return chosen


@dataclass(frozen=True)
class Tokens:
    """This rank's N tokens of a micro-batch.

    Attributes:
        row, place: int64 [N], sequence in the micro-batch, and position in it.
        matter: bool [N].
        sequences, length: B, and the positions of a sequence.
    """

    row: Tensor
    place: Tensor
    matter: Tensor
    sequences: int
    length: int


def routings(batches: Sequence[MicroBatch], data: Group, loss_scale: float) -> list[Routing]:
    """What the routers need to know of each of a rank's micro-batches of a step; `data` are the ranks with others."""
    sequences = sum(len(batch.tokens) for batch in batches) * data.size
    return [
        Routing(batch.matters, batch.places, loss_scale / sequences, loss_scale / len(batches)) for batch in batches
    ]


def summed_loads(routings: Sequence[Routing]) -> dict[int, Tensor]:
    """The loads of all micro-batches, by layer."""
    layers = routings[0].loads if routings else {}
    return {layer: torch.stack([one.loads[layer] for one in routings]).sum(0) for layer in layers}


def table_of_loads(loads: Mapping[int, Tensor], config: ModelConfig, device: torch.device) -> Tensor:
    """This rank's loads, where others have other layers: fp64 [layers, 6 + E], each row as in `Routing.loads`."""
    if config.moe is None:
        return torch.zeros(0, SUMS, dtype=torch.float64, device=device)
    none = torch.zeros(SUMS + config.moe.num_experts, dtype=torch.float64, device=device)
    return torch.stack([loads.get(layer, none) for layer in expert_layers(config)])


def expert_layers(config: ModelConfig) -> list[int]:
    """The layers with experts, those that predict further tokens too."""
    return [layer for layer in range(config.num_layers + config.mtp_layers) if config.has_experts(layer)]


def routing_metrics(moe: MoeConfig | None, table: Tensor, loss_scale: float) -> dict[str, float]:
    """A step in numbers, from the sum of all ranks' `table_of_loads`, in host memory; none without experts.

    `aux_loss` and `z_loss` as they are in what training makes small; `expert_load_max` and `expert_load_min`: most and
    fewest choices of an expert, in multiples of the mean of its layer; `drop_rate`: of the choices; `router_entropy`: of
    a token's distribution over the experts, in nats, the mean of tokens and layers.

    Raises:
        TrainingError: when the dispatch lost choices.
    """
    if moe is None:
        return {}
    tokens, dropped, entropy, aux, z, lost = table[:, :SUMS].sum(0).tolist()
    if lost:
        raise TrainingError(
            f"parallel.dispatch_bound: {lost:.0f} choices of experts found no room on their way, so the step is not what "
            "it should be; nothing of it is saved",
            hint="set a larger bound, or leave it out: all then travel. The same command goes on from the last checkpoint",
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
