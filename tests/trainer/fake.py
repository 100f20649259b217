"""Ranks of a layout that never talk: enough to build each one's part of a model and look at it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mega_common.model_config import ModelConfig
from mega_trainer.layout import Layout
from mega_trainer.mesh import GroupMaker, build_groups
from mega_trainer.model.builder import Builder
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.stage import Stage
from mega_trainer.pipeline.stages import stage_layers


class _Nobody(GroupMaker):
    def handle(self, ranks: object) -> None:
        """No process group."""


def builders(config: ModelConfig, layout: Layout, **options: Any) -> Iterator[Builder]:
    """What each rank builds with."""
    for rank in range(layout.world_size):
        yield Builder(config, build_groups(layout, rank, heads=config.shared_heads, maker=_Nobody()), **options)


def decoders(config: ModelConfig, layout: Layout, **options: Any) -> Iterator[Decoder]:
    """Each rank's part of the model, not initialised."""
    layers = stage_layers(config.num_layers, layout.pp)
    for build in builders(config, layout, **options):
        at = build.groups.pp.rank
        yield Decoder(build, Stage(layers[at].start, layers[at].stop, at == 0, at == layout.pp - 1))
