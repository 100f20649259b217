"""Which settings would make a run need less memory, and by how much: as predicted, not tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mega_common.errors import ConfigError
from mega_trainer.config import RunConfig
from mega_trainer.fp8 import layers_kept
from mega_trainer.plan.memory import memory
from mega_trainer.plan.shape import RunShape


def run_shape(config: RunConfig, world_size: int) -> RunShape:
    """How a run on so many ranks is split and fed."""
    parallel, dp = config.parallel, config.data_parallel(world_size)
    return RunShape(
        seq_length=config.data.seq_length, target_length=config.lengths[1],
        micro_batch=config.batch.micro, microbatches=config.microbatches(dp), tp=parallel.tp,
        sp=parallel.sp, pp=parallel.pp, virtual_stages=parallel.virtual_stages, schedule=parallel.schedule,
        pipeline_layout=tuple(parallel.pipeline_layout) if parallel.pipeline_layout else None,
        cp=parallel.cp, cp_kind=parallel.cp_kind, ep=parallel.ep, expert_tp=parallel.expert_tp,
        dispatch_bound=parallel.dispatch_bound, dp=dp, zero=parallel.zero, zero3_shard=parallel.zero3_shard,
        zero3_layers=parallel.zero3_layers, bucket_elements=parallel.bucket_elements,
        precision=config.precision, recompute=config.recompute.kind,
        modules=tuple(config.recompute.modules), recompute_layers=config.recompute.layers,
        offload=config.offload.activations, offload_min_bytes=config.offload.min_bytes,
        offload_optimizer=config.optimizer.offload, muon=config.optimizer.name == "muon", eight_bits=layers_kept(config),
        freeze=tuple(config.train.freeze), lora=None if config.lora is None else config.lora.model_dump_json(),
        ema=config.train.ema is not None, device="cpu" if config.device == "cpu" else "gpu",
    )  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """A change of settings, as `--set` takes them, and the bytes that it frees on the rank that needs most."""

    settings: tuple[str, ...]
    freed: int


@dataclass(frozen=True)
class Needs:
    """What a run should take on a rank: bytes by kind, as `memory` tells them; and what would free some of them."""

    predicted: Mapping[str, int]
    advices: list[Advice]

    @classmethod
    def of(cls, config: RunConfig, world_size: int, pipeline_rank: int) -> Needs:
        """Of a rank of that pipeline rank."""
        predicted = memory(config.model, run_shape(config, world_size))[pipeline_rank]
        return cls(predicted, advices(config, world_size))


def advices(config: RunConfig, world_size: int) -> list[Advice]:
    """What would free memory of a run that fits its ranks, by one change each; most first."""
    now = _most(config, world_size)
    found = []
    for changes in _changes(config):
        raw = config.model_dump(mode="json", by_alias=True, exclude_none=True)
        for path, value in changes.items():
            _set(raw, path, value)
        try:
            changed = RunConfig.parse(raw)
            changed.check_ranks(world_size)
        except ConfigError:
            continue
        freed = now - _most(changed, world_size)
        if freed > 0.02 * now:
            found.append(Advice(tuple(f"{path}={_written(value)}" for path, value in changes.items()), freed))
    return sorted(found, key=lambda advice: -advice.freed)


def _most(config: RunConfig, world_size: int) -> int:
    return max(sum(kinds.values()) for kinds in memory(config.model, run_shape(config, world_size)))


def _changes(config: RunConfig) -> Iterator[Mapping[str, Any]]:
    parallel, batch = config.parallel, config.batch
    if batch.micro > 1:
        yield {"batch.micro": max(n for n in range(1, batch.micro) if batch.micro % n == 0)}
    if config.recompute.kind == "none":
        yield {"recompute": {"kind": "selective"}}
    if config.recompute.kind != "full":
        yield {"recompute": {"kind": "full"}}
    for level in range(parallel.zero + 1, 4):
        yield {"parallel.zero": level}
    yield {"parallel.tp": 2 * parallel.tp, "parallel.sp": True}
    yield {"parallel.cp": 2 * parallel.cp}
    if layers_kept(config):
        yield {"fp8.keep_weights": False}
    if not config.optimizer.offload:
        yield {"optimizer.offload": True}
    if config.recompute.kind != "full":
        yield {"offload.activations": config.model.num_layers // parallel.pp // parallel.virtual_stages}


def _set(raw: dict[str, Any], path: str, value: object) -> None:
    *sections, key = path.split(".")
    for section in sections:
        raw = raw[section]
    raw[key] = value


def _written(value: object) -> str:
    return str(value["kind"]) if isinstance(value, dict) else str(value).lower()
