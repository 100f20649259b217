"""Single changes of a run's layout: those that make it faster, and those that make it fit the GPUs' memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.plan.flops import count_parameters_by_layer
from mega_trainer.plan.layout_candidates import RECOMPUTE, LayoutSettings, list_pipeline_schedules
from mega_trainer.plan.layout_search import PlannedLayout, make_planned_run, plan_layout_if_fitting
from mega_trainer.plan.machine import MachineSpec
from mega_trainer.plan.memory_advice import apply_settings

MIN_GAIN = 0.01  # smallest relative gain of a change that is reported


def find_faster_layout_changes(
    config: RunConfig, ranks: int, machine: MachineSpec, *, keep: int = 3
) -> list[PlannedLayout]:
    """Return layouts that differ from the run's by a single change, are faster by prediction and still fit.
    The largest gains come first, at most `keep`.
    """
    count, now = count_parameters_by_layer(config.model), make_planned_run(config, ranks, machine)
    seconds, limit = now.predict_step_time().seconds, now.estimate_minimum_seconds()
    gains: list[tuple[float, LayoutSettings]] = []
    for settings in _iterate_changes(config, machine):
        try:
            changed = apply_settings(config, settings)
            changed.check_world_size(ranks)
            planned = make_planned_run(changed, ranks, machine, count)
        except ConfigError:
            continue
        gains.append((planned.estimate_minimum_seconds(), settings))
    near = [settings for least, settings in sorted(gains, key=lambda gain: gain[0]) if least < limit]
    found = (plan_layout_if_fitting(config, settings, ranks, machine, count) for settings in near)
    gained = (layout for layout in found if layout is not None and layout.time.seconds < (1 - MIN_GAIN) * seconds)
    return sorted(islice(gained, keep), key=lambda layout: layout.time.seconds)


def find_fitting_layout_changes(
    config: RunConfig, ranks: int, machine: MachineSpec, *, keep: int = 3
) -> list[PlannedLayout]:
    """Return layouts that fit the memory and differ from the run's by a change that frees memory.
    The change is the recompute setting or another way to free memory. The fastest layouts come first, at most `keep`;
    none if no such change is enough.
    """
    count = count_parameters_by_layer(config.model)
    found = (
        plan_layout_if_fitting(config, settings, ranks, machine, count) for settings in _iterate_memory_changes(config)
    )
    fitting = [layout for layout in found if layout is not None]
    return sorted(fitting, key=lambda layout: layout.time.seconds)[:keep]


def _iterate_memory_changes(config: RunConfig) -> Iterator[LayoutSettings]:
    """Yield changes of a run's settings that free memory and leave its ranks as they are."""
    parallel, batch = config.parallel, config.batch
    recomputes: list[LayoutSettings] = [{"recompute": {"kind": kind}} for kind in RECOMPUTE[1:]]
    stages = parallel.pp * parallel.virtual_stages
    smaller: LayoutSettings = {"batch.micro": 1} if batch.micro > 1 else {}
    yield from recomputes
    yield {"offload.activations": math.ceil(config.model.num_layers / stages)}
    if smaller:
        yield smaller
        yield from ({**smaller, **recompute} for recompute in recomputes)
    for level in range(parallel.zero + 1, 4 if parallel.pp == 1 else 3):
        yield {"parallel.zero": level}
        yield from ({"parallel.zero": level, **recompute} for recompute in recomputes)
    if not config.optimizer.offload:
        yield {"optimizer.offload": True}
        yield from ({"optimizer.offload": True, **smaller, **recompute} for recompute in recomputes)


def _iterate_changes(config: RunConfig, machine: MachineSpec) -> Iterator[LayoutSettings]:
    """Yield single changes of a run's layout settings."""
    parallel, kinds = config.parallel, list(RECOMPUTE)
    if config.precision == "bf16" and machine.supports_precision("fp8"):
        yield {"precision": "fp8"}  # not part of the search, since it changes the training
    yield from ({"recompute": {"kind": kind}} for kind in kinds[: kinds.index(config.recompute.kind)])
    yield {"batch.micro": 2 * config.batch.micro}
    if config.batch.micro % 2 == 0:
        yield {"batch.micro": config.batch.micro // 2}
    if parallel.tp > 1:
        yield {"parallel.tp": parallel.tp // 2, "parallel.sp": parallel.tp > 2, "parallel.dp": None}
        if not parallel.sp:
            yield {"parallel.sp": True}
    if parallel.cp > 1:
        yield {"parallel.cp": parallel.cp // 2, "parallel.dp": None}
        yield from ({"parallel.cp_kind": kind} for kind in ("ring", "alltoall") if kind != parallel.cp_kind)
    for schedule, virtual in list_pipeline_schedules(config.model.num_layers, parallel.pp):
        if (schedule, virtual) != (parallel.schedule, parallel.virtual_stages):
            yield {
                "parallel.schedule": schedule, "parallel.virtual_stages": virtual, "parallel.pipeline_layout": None,
            }  # fmt: skip
    if parallel.pp > 1:
        yield {"parallel.pp": parallel.pp // 2, "parallel.dp": None, "parallel.pipeline_layout": None}
    if parallel.ep > 1 and not parallel.overlap_expert_exchange:
        yield {"parallel.overlap_expert_exchange": True}
        yield {
            "parallel.overlap_expert_exchange": True, "parallel.schedule": "dualpipev", "parallel.virtual_stages": 2,
            "parallel.pipeline_layout": None,
        }  # fmt: skip
    if parallel.ep > 1:
        yield {"parallel.ep": parallel.ep // 2}
    if parallel.zero == 3 and parallel.zero3_gather != "step":
        yield {"parallel.zero3_gather": "step"}
    if parallel.zero != 1:
        names = ("zero3_shard", "zero3_layers", "zero3_gather")
        yield {"parallel.zero": 1, **dict.fromkeys([f"parallel.{name}" for name in names])}
