"""Predicted memory of weights and gradients that ZeRO-3 gathers and reduces while a stage runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mega_common.model_config import ModelConfig
from mega_trainer.pipeline.schedules import V_SHAPED
from mega_trainer.plan.flops import ParameterCounts, count_parameters_by_layer
from mega_trainer.plan.training_layout import TrainingLayout

if TYPE_CHECKING:
    from mega_trainer.plan.part_memory import ModelPartMemoryBytes, WeightCounts

# Smallest all-gather of ZeRO-3 per rank, in elements, since latency grows with the ranks: two layers of an 8B model on 1,024
# ranks, one on 8.
UNIT_ELEMENTS = 350_000


def count_zero3_unit_layers(model: ModelConfig, run: TrainingLayout, count: ParameterCounts | None = None) -> int:
    """Return the number of layers whose weights (experts excluded) ZeRO-3 gathers as one unit.
    The number is configured, or enough that a rank's share has `UNIT_ELEMENTS` elements.
    """
    layers = (count or count_parameters_by_layer(model)).layers
    mean = sum(layer.split / run.tp + layer.whole for layer in layers) / len(layers)
    return run.zero3_layers or math.ceil(UNIT_ELEMENTS * run.zero3_shard_ranks / mean)


@dataclass(frozen=True)
class Zero3StageMemory:
    """Elements of a stage that ZeRO-3 gathers and reduces together, for the bytes that it needs beside its shards.

    Attributes:
        run: layout of the run.
        layers: number of layers.
        weights: elements of all weights.
        embedding, head: elements of the weights at the ends, None where the stage does not have that end.
        trainable_head: elements of the trainable ones of the head.
        trainable_ends: elements of the trainable ones of both ends.
        unit: elements of the weights of the largest unit.
        unit_layers: layers of a unit.
        trainable_layer, trainable_unit: elements of the trainable weights of the largest layer (without experts) and unit.
        lends: the embedding is gathered once a step, as the output head's stage on the same rank uses it.
    """

    run: TrainingLayout
    layers: int
    weights: int
    embedding: int | None
    head: int | None
    trainable_head: int
    trainable_ends: int
    unit: int
    unit_layers: int
    trainable_layer: int
    trainable_unit: int
    lends: bool

    @classmethod
    def from_parts(
        cls,
        model: ModelConfig,
        run: TrainingLayout,
        layers: Sequence[ModelPartMemoryBytes],
        embedding: WeightCounts | None,
        head: WeightCounts | None,
    ) -> Zero3StageMemory:
        """Return the elements of a stage of some layers, with the weights of the embedding and the head if it has them."""
        count = min(len(layers), count_zero3_unit_layers(model, run)) if run.is_zero3_sharded else 0
        ends = [end for end in (embedding, head) if end is not None]
        every = [*(part.weights for part in layers), *ends]

        def largest(name: str) -> int:
            return max((getattr(part.weights, name) for part in layers), default=0)

        own = largest("trainable")
        return cls(
            run, len(layers), sum(each.dense + each.experts for each in every),
            embedding.dense if embedding else None, head.dense if head else None,
            head.trainable if head else 0, sum(end.trainable for end in ends),
            count * largest("dense") + largest("experts"), count, own, count * own + largest("trainable_experts"),
            embedding is not None and run.schedule in V_SHAPED and (model.tie_embeddings or model.mtp_layers > 0),
        )  # fmt: skip

    @property
    def gathered_bytes(self) -> int:
        """Bytes of weights that stay gathered for the whole step."""
        if not self.run.is_zero3_sharded:
            return 0
        once = self.run.zero3_gather == "step"
        return self.run.weight_bytes * (self.weights if once else (self.embedding or 0) * self.lends)

    @property
    def weight_half_bytes(self) -> int:
        """Bytes of deferred weight gradients of a ZeRO-3 unit and their reduce-scatter buffer; 0 if none are deferred."""
        if not (self.run.is_zero3_sharded and self.run.defers_wgrads):
            return 0
        sent = max(self.trainable_unit, self.trainable_ends)
        return self.run.weight_bytes * self.trainable_unit + self.run.gradient_bytes * sent

    def count_part_bytes(self) -> list[tuple[int, int]]:
        """Return the additional bytes in the forward and the backward of each part: embedding, layers, head.

        FSDP2 holds a unit's gathered weights and the all-gather buffer of this or the next unit; embedding and head stay
        gathered for the whole forward and backward of a stage. A backward holds the head's gradient to its end, the
        gradients of the unit so far, and the gradients of the previous unit in their reduce-scatter buffer; the first half
        of a split backward holds none of these. Weights that are gathered once a step need only the all-gather buffer.
        """
        run, first, last = self.run, self.embedding is not None, self.head is not None
        if not run.is_zero3_sharded:
            return [(0, 0)] * (first + self.layers + last)
        once, size, sums = run.zero3_gather == "step", run.weight_bytes, 0 if run.defers_wgrads else run.gradient_bytes
        ends = (self.embedding or 0) + (self.head or 0)
        root = 0 if once else ends - (self.embedding or 0) * self.lends
        head = 0 if run.defers_wgrads else self.trainable_head
        earlier = 0 if run.defers_wgrads else (self.unit_layers - 1) * self.trainable_layer
        gathered = 0 if once else 2 * self.unit
        within = (
            size * (root + (self.unit if once else gathered)),
            size * (root + gathered + head + earlier) + sums * self.trainable_unit * (self.layers > self.unit_layers),
        )
        at_start = size * (ends + root), size * (root + head) + sums * max(self.trainable_ends, self.trainable_unit)
        at_end = (0 if once else size * (root + self.unit),) * 2
        return [*([at_start] * first), *([within] * self.layers), *([at_end] * last)]
