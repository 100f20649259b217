"""Ranks of a layout that never talk: enough to build each one's part of a model and look at it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mega_common.model_config import ModelConfig
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.distributed.process_groups import ProcessGroupCache, build_parallel_groups
from mega_trainer.model.decoder import Decoder, PipelineStageLayers
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.pipeline.layer_partition import split_stage_layers


class _Nobody(ProcessGroupCache):
    def get_process_group(self, ranks: object) -> None:
        """No process group."""


def builders(config: ModelConfig, layout: ParallelLayout, **options: Any) -> Iterator[LayerBuilder]:
    """What each rank builds with."""
    for rank in range(layout.world_size):
        yield LayerBuilder(
            config, build_parallel_groups(layout, rank, heads=config.shared_head_counts, maker=_Nobody()), **options
        )


def decoders(config: ModelConfig, layout: ParallelLayout, **options: Any) -> Iterator[Decoder]:
    """Each rank's part of the model, not initialised."""
    layers = split_stage_layers(config.num_layers, layout.pp)
    for build in builders(config, layout, **options):
        at = build.groups.pp.rank
        yield Decoder(build, PipelineStageLayers(layers[at].start, layers[at].stop, at == 0, at == layout.pp - 1))
