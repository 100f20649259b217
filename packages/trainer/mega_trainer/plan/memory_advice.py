"""Predicted memory savings of single changes of a run's settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mega_common.errors import ConfigError
from mega_common.strict_config import apply_config_overrides
from mega_trainer.config.run_config import RunConfig, format_overrides
from mega_trainer.plan.memory_prediction import predict_memory
from mega_trainer.plan.training_layout import TrainingLayout


def make_training_layout(config: RunConfig, world_size: int) -> TrainingLayout:
    """Return the layout of a run on `world_size` ranks: parallel degrees, batch sizes and memory options.
    Predictions of its step time and memory take them.
    """
    parallel, dp = config.parallel, config.data_parallel_size(world_size)
    return TrainingLayout(
        seq_length=config.data.seq_length, target_length=config.sequence_lengths[1],
        micro_batch=config.batch.micro, microbatches=config.micro_batches_per_step(dp), tp=parallel.tp,
        sp=parallel.sp, tp_comm_overlap=parallel.tp_comm_overlap, pp=parallel.pp, virtual_stages=parallel.virtual_stages, schedule=parallel.schedule,
        pipeline_layout=tuple(parallel.pipeline_layout) if parallel.pipeline_layout else None,
        cp=parallel.cp, cp_kind=parallel.cp_kind, ep=parallel.ep, expert_tp=parallel.expert_tp,
        dispatch_bound=parallel.dispatch_bound, overlap_expert_exchange=parallel.overlap_expert_exchange, dp=dp, zero=parallel.zero, zero3_shard=parallel.zero3_shard,
        zero3_layers=parallel.zero3_layers, zero3_gather=parallel.zero3_gather or "micro_batch",
        bucket_elements=parallel.bucket_elements,
        precision=config.gemm_precision, recompute=config.recompute.kind,
        modules=tuple(config.recompute.modules), recompute_layers=config.recompute.layers,
        offload=config.offload.activations, offload_min_bytes=config.offload.min_bytes,
        offload_optimizer=config.optimizer.offload, moments=config.optimizer.moments, muon=config.optimizer.name == "muon",
        soap_width=config.optimizer.soap.max_width if config.optimizer.name == "soap" else None, extensions=tuple(config.extensions), fp8_layers=config.layers_with_cached_fp8_weights,
        freeze=tuple(config.train.freeze), lora=None if config.lora is None else config.lora.model_dump_json(),
        ema=config.train.ema is not None, device="cpu" if config.device == "cpu" else "gpu",
    )  # fmt: skip


def apply_settings(config: RunConfig, settings: Mapping[str, object]) -> RunConfig:
    """Return a copy of a run configuration with `settings`, {dotted path: value}, applied.

    Raises:
        ConfigError: when the settings are invalid.
    """
    raw = config.model_dump(mode="json", by_alias=True, exclude_none=True)
    return RunConfig.parse(apply_config_overrides(raw, format_overrides(settings)))


@dataclass(frozen=True)
class MemoryAdvice:
    """Change of settings, as arguments of `--set`, and the bytes that it frees on the rank with the highest peak memory."""

    settings: tuple[str, ...]
    freed: int


@dataclass(frozen=True)
class PredictedMemoryNeeds:
    """Predicted memory of one rank in bytes by kind, and changes of settings that would free memory."""

    predicted: Mapping[str, int]
    suggestions: list[MemoryAdvice]

    @classmethod
    def predict_for_rank(cls, config: RunConfig, world_size: int, pipeline_rank: int) -> PredictedMemoryNeeds:
        """Return the predicted memory of a rank, with advice on freeing memory.
        The rank is in pipeline rank `pipeline_rank`; both are empty for a module of transformers.
        """
        if config.model.transformers is not None:
            return cls({}, [])
        predicted = predict_memory(config.model, make_training_layout(config, world_size))[pipeline_rank]
        return cls(predicted, find_memory_savings(config, world_size))


def find_memory_savings(config: RunConfig, world_size: int) -> list[MemoryAdvice]:
    """Return single changes of settings that would free over 2 % of the peak memory, largest savings first."""
    now = predict_peak_rank_bytes(config, world_size)
    found = []
    for changes in _iterate_changes(config):
        try:
            changed = apply_settings(config, changes)
            changed.check_world_size(world_size)
        except ConfigError:
            continue
        freed = now - predict_peak_rank_bytes(changed, world_size)
        if freed > 0.02 * now:
            found.append(
                MemoryAdvice(tuple(f"{path}={_format_value(value)}" for path, value in changes.items()), freed)
            )
    return sorted(found, key=lambda advice: -advice.freed)


def predict_peak_rank_bytes(config: RunConfig, world_size: int) -> int:
    """Return the predicted peak bytes of memory of the rank with the highest peak."""
    return max(sum(kinds.values()) for kinds in predict_memory(config.model, make_training_layout(config, world_size)))


def _iterate_changes(config: RunConfig) -> Iterator[Mapping[str, Any]]:
    """Yield single changes of settings, by path."""
    parallel, batch = config.parallel, config.batch
    if batch.micro > 1:
        yield {"batch.micro": max(n for n in range(1, batch.micro) if batch.micro % n == 0)}
    if config.recompute.kind == "none":
        yield {"recompute": {"kind": "selective"}}
    if config.recompute.kind != "full":
        yield {"recompute": {"kind": "full"}}
    for level in range(parallel.zero + 1, 4):
        yield {"parallel.zero": level}
    if parallel.zero3_gather == "step":
        yield {"parallel.zero3_gather": "micro_batch"}
    yield {"parallel.tp": 2 * parallel.tp, "parallel.sp": True}
    yield {"parallel.cp": 2 * parallel.cp}
    if config.layers_with_cached_fp8_weights:
        yield {"fp8.keep_weights": False}
    if not config.optimizer.offload:
        yield {"optimizer.offload": True}
    if config.recompute.kind != "full":
        yield {"offload.activations": config.model.num_layers // parallel.pp // parallel.virtual_stages}


def _format_value(value: object) -> str:
    """Return a value in the syntax of `--set`."""
    return str(value["kind"]) if isinstance(value, dict) else str(value).lower()
