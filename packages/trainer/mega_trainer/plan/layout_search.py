"""Search for the fastest layouts of a run on a number of GPUs that fit their memory.

Every combination of parallel degrees, schedule, micro-batch size and recompute setting gets a minimum time. From the fastest
on, candidates are checked as in `mega train --check`, their memory is predicted and their schedule simulated, until enough
fit. A candidate that does not fit is tried with the activations of as few layers as needed in host memory. If only full
recompute fits, or nothing, the search is repeated with optimizer states in host memory. The result of the training is
unchanged: batch, model, and precision unless `precisions` are given. The limit is `MachineSpec.usable_memory_bytes`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from mega_common.errors import ConfigError
from mega_common.strict_config import apply_config_overrides
from mega_trainer.config.fp8_config import OTHER_RECIPE, check_fp8_device
from mega_trainer.config.run_config import RunConfig, format_overrides
from mega_trainer.config.sections import ParallelConfig
from mega_trainer.pipeline.schedules import V_SHAPED
from mega_trainer.plan.device_memory import add_non_tensor_memory
from mega_trainer.plan.flops import ParameterCounts, count_parameters_by_layer
from mega_trainer.plan.layer_cost import PassWork, TrainerProfile
from mega_trainer.plan.layout_candidates import (
    HIDDEN_EXCHANGE,
    LayoutSettings,
    RoughMemoryEstimate,
    generate_layout_candidates,
)
from mega_trainer.plan.machine import CAPABILITIES, MachineSpec
from mega_trainer.plan.memory_advice import apply_settings, make_training_layout
from mega_trainer.plan.memory_prediction import iterate_memory
from mega_trainer.plan.other_trainers import SEARCH_MARGIN, OtherTrainer
from mega_trainer.plan.step_time import PlannedRun, PredictedStepTime
from mega_trainer.plan.training_layout import TrainingLayout

MAX_TRIES = 60  # layouts whose memory is predicted and whose schedule is simulated
MAX_SLOWDOWN = 1.25  # minimum time / best time, at which the search stops
LENIENCY = 0.7  # factor on the smallest ratio of predicted to rough memory, before a candidate is skipped by it
ROUGH_TOLERANCE = 1.15  # rough memory estimate / memory of a GPU, above which a candidate is dropped


class NoLayoutFitsError(ConfigError):
    """Error of a layout search: by prediction, no layout fits the memory of the GPUs."""


@dataclass(frozen=True)
class PlannedLayout:
    """Valid layout of a run, with its predicted step time and memory.

    Attributes:
        settings: values by path; a run with these settings is valid.
        time: predicted step time.
        memory: peak bytes of the rank with the highest peak.
    """

    settings: LayoutSettings
    time: PredictedStepTime
    memory: int


def explain_layout_time(layout: PlannedLayout, best: PlannedLayout) -> str:
    """Return a text with the largest parts of a layout's step time, or its largest differences from `best`."""
    whole, parts = layout.time.seconds, layout.time.parts
    if layout is best:
        return ", ".join(
            f"{kind} {100 * parts[kind] / whole:.0f} %" for kind in sorted(parts, key=lambda k: -parts[k])[:4]
        )
    kinds = sorted({*parts, *best.time.parts})
    changes = {kind: (parts.get(kind, 0.0) - best.time.parts.get(kind, 0.0)) / best.time.seconds for kind in kinds}
    most = sorted(changes, key=lambda kind: -abs(changes[kind]))[:3]
    return (
        ", ".join(f"{kind} {100 * changes[kind]:+.1f} %" for kind in most if abs(changes[kind]) >= 5e-4)
        or "the same work"
    )


def format_layout_settings(settings: Mapping[str, Any]) -> str:
    """Return the non-default settings of a layout as a short text."""
    plain = {**ParallelConfig().model_dump(exclude={"tp", "pp", "zero"}), "offloaded_layers": 0}
    words = []
    for path, value in settings.items():
        key = "offloaded_layers" if path == "offload.activations" else path.rpartition(".")[2]
        shown = value["kind"] if isinstance(value, dict) else value
        hidden = key == "cp_kind" and settings["parallel.cp"] == 1
        if shown is not None and shown != plain.get(key) and not hidden:
            words.append(key if shown is True else f"{key} {shown}")
    return " ".join(words)


def layout_to_yaml(layout: PlannedLayout) -> str:
    """Return run.yaml text with all settings of a layout, such as the sections `parallel` and `recompute`."""
    given = {path: value for path, value in layout.settings.items() if value is not None}
    nested = apply_config_overrides({}, format_overrides(given))
    if not nested.get("offload", {}).get("activations"):
        nested.pop("offload", None)
    return yaml.safe_dump(nested, sort_keys=False)


def make_trainer_profile(config: RunConfig) -> TrainerProfile:
    """Return the profile of mega as a trainer, for step-time prediction, under a configuration."""
    parallel = config.parallel
    return TrainerProfile(
        passes=1.0 if config.compile else 2.0,
        dispatch="node" if parallel.dispatch == "deepep" else "rank",
        gradient_bytes=2 if parallel.grad_reduce_dtype == "bf16" else 4,
    )


def make_planned_run(
    config: RunConfig, ranks: int, machine: MachineSpec, count: ParameterCounts | None = None,
    like: OtherTrainer | None = None
) -> PlannedRun:  # fmt: skip
    """Return the run of `config` on `ranks` ranks of a machine as a `PlannedRun`, for prediction of its step time.
    The step time is that of mega, or of the trainer `like`.

    Raises:
        ConfigError: when the GPU has no GEMMs in the run's precision.
    """
    check_machine_precision(config, machine)
    return PlannedRun.from_settings(
        config.model,
        make_training_layout(config, ranks),
        machine,
        machine.achieved_efficiency,
        make_trainer_profile(config) if like is None else like.profile,
        count,
    )


def check_machine_precision(config: RunConfig, machine: MachineSpec) -> None:
    """Raise `ConfigError` if the run computes in FP8 or NVFP4 and the GPU has no known peak in it.

    Raises:
        ConfigError: with a precision or a recipe that it has.
    """
    kind = config.gemm_precision
    if kind in ("fp8", "nvfp4") and not machine.supports_precision(kind):
        setting = "fp8.recipe" if kind == "nvfp4" else "precision"
        other = OTHER_RECIPE if kind == "nvfp4" and machine.supports_precision("fp8") else "set precision=bf16"
        raise ConfigError(
            f"{setting} = {kind} is not supported on {machine.gpu}, which has no known peak in {kind}",
            hint=f"{other}; if this GPU has {kind}, set its peak in the machine file, as tflops: {{{kind}: 1000}}",
        )


def check_machine_recipe(config: RunConfig, machine: MachineSpec) -> None:
    """Raise `ConfigError` if the GPU has no known peak in the run's FP8 or NVFP4, or mega no kernels for the FP8 recipe on it.

    Raises:
        ConfigError: with a recipe or a precision that it supports.
    """
    check_machine_precision(config, machine)
    if config.precision == "fp8" and machine.generation in CAPABILITIES:
        check_fp8_device(CAPABILITIES[machine.generation], config.fp8.recipe, experts=config.model.moe is not None)


@dataclass(frozen=True)
class _TimedCandidate:
    """Candidate layout before its memory is predicted and its schedule simulated.

    Attributes:
        seconds: minimum seconds of a step.
        memory: rough estimate of the bytes of a rank.
        settings, run: as in `generate_layout_candidates`.
    """

    seconds: float
    memory: float
    settings: LayoutSettings
    run: TrainingLayout

    @property
    def estimate_kind(self) -> tuple[object, ...]:
        """Kind of layout, within which errors of the rough memory estimate are similar."""
        run = self.run
        hides, interleaved = run.overlap_expert_exchange, run.virtual_stages > 1
        return run.recompute, run.zero, run.schedule, run.pp > 1, run.ep > 1, hides, interleaved


class _CandidateTimer:
    """Minimum times of candidate layouts; the work of a micro-batch is computed once for all layouts that share it."""

    def __init__(
        self, config: RunConfig, machine: MachineSpec, count: ParameterCounts, like: OtherTrainer | None
    ) -> None:
        alone = type(config.parallel)(dispatch=config.parallel.dispatch)
        self.base = make_planned_run(config.model_copy(update={"parallel": alone}), 1, machine, count, like)
        self.works: dict[tuple[object, ...], tuple[PassWork, list[float]]] = {}
        self.imbalances: dict[tuple[object, ...], float] = {}

    def estimate_seconds(self, run: TrainingLayout) -> float:
        """Return the minimum seconds of a step in the layout `run`."""
        planned = self.base.with_training_layout(run)
        key = (run.tp, run.cp, run.cp_kind, run.ep, run.expert_tp, run.micro_batch, run.recompute, run.zero == 3)
        if key not in self.works:
            self.works[key] = planned.predict_model_seconds(), planned.predict_part_seconds()
        work, parts = self.works[key]
        split = (*key, run.pp, run.virtual_stages, run.schedule in V_SHAPED)
        if split not in self.imbalances:
            self.imbalances[split] = planned.compute_rank_imbalance(parts)
        return planned.estimate_minimum_seconds(work, self.imbalances[split])


def find_best_layouts(
    config: RunConfig,
    ranks: int,
    machine: MachineSpec,
    *,
    keep: int = 8,
    report: Callable[[str], object] = lambda text: None,
    fixed: Collection[str] = (),
    precisions: Collection[str] = (),
    like: OtherTrainer | None = None,
) -> list[PlannedLayout]:
    """Return the layouts of a run that fit the memory by prediction, fastest first, at most `keep`.
    `report` is called with progress messages.

    Settings whose paths are in `fixed` are unchanged. `precisions` are searched in addition to the run's own. With `like`, time
    and memory are those of another trainer, of the layouts that it can run, with a margin (`SEARCH_MARGIN`) for its memory.

    Raises:
        NoLayoutFitsError: when no valid layout fits.
    """
    kinds: list[LayoutSettings] = [{}, *({"precision": name} for name in precisions if name != config.precision)]

    def search_variants(more: LayoutSettings) -> list[PlannedLayout]:
        return [
            replace(layout, settings={**layout.settings, **kind, **more})
            for kind in kinds
            for layout in _search_layouts(
                apply_settings(config, {**kind, **more}), ranks, machine, keep, report, fixed, like
            )
        ]

    found = search_variants({})
    best = min(found, key=lambda layout: layout.time.seconds, default=None)
    short_of_memory = best is None or best.settings.get("recompute") == {"kind": "full"}
    if short_of_memory and like is None and not config.optimizer.offload and "optimizer.offload" not in fixed:
        found += search_variants({"optimizer.offload": True})
    if not found:
        raise NoLayoutFitsError(
            f"no layout of this run fits {ranks} GPUs of {machine.memory_gb:g} GB",
            hint="use more GPUs, a batch.global that more data ranks divide, or a shorter data.seq_length",
        )
    return sorted(found, key=lambda layout: layout.time.seconds)[:keep]


def _search_layouts(
    config: RunConfig, ranks: int, machine: MachineSpec, keep: int, report: Callable[[str], object], fixed: Collection[str],
    like: OtherTrainer | None
) -> list[PlannedLayout]:  # fmt: skip
    """Return `find_best_layouts` for one precision and one placement of the optimizer states."""
    count = count_parameters_by_layer(config.model)
    rough = sorted(_time_candidates(config, ranks, machine, count, report, fixed, like), key=lambda each: each.seconds)
    found: list[PlannedLayout] = []
    limit = machine.usable_memory_bytes / (SEARCH_MARGIN if like else 1.0)
    tried, ratios = 0, dict[tuple[object, ...], float]()  # smallest ratio of predicted to rough memory
    for candidate in rough:
        best = min((layout.time.seconds for layout in found), default=math.inf)
        enough = best if len(found) >= keep else MAX_SLOWDOWN * best  # no layout is faster than its minimum time
        if candidate.seconds > enough or tried == MAX_TRIES:
            break
        leniency = LENIENCY if found or tried < MAX_TRIES / 2 else 1.0  # after many failures only likely candidates
        if leniency * ratios.get(candidate.estimate_kind, 0.0) * candidate.memory > limit:
            continue
        tried += 1
        report(f"checked {tried} of the fastest of {len(rough)} layouts, {len(found)} fit")
        settings = {path: value for path, value in candidate.settings.items() if path not in fixed}
        changed = _apply_layout(config, settings, ranks)
        if changed is None:
            continue
        memory = _predict_layout_memory(changed, ranks, like, limit)
        ratio = memory / candidate.memory
        ratios[candidate.estimate_kind] = min(ratio, ratios.get(candidate.estimate_kind, ratio))
        if memory > limit:
            fitting = None if like else _offload_until_fit(config, settings, ranks, limit)
            if fitting is None:
                continue
            settings, changed, memory = fitting
        time = make_planned_run(changed, ranks, machine, count, like).predict_step_time()
        found.append(PlannedLayout(settings, time, memory))
    return found


def _offload_until_fit(
    config: RunConfig, settings: LayoutSettings, ranks: int, limit: float
) -> tuple[LayoutSettings, RunConfig, int] | None:
    """Return settings with activations of as few layers as needed in host memory, the run with them, and its peak bytes.
    The result is None if the layout does not fit.
    """
    if settings.get("offload.activations") != 0 or settings.get("recompute", {}).get("kind") == "full":
        return None
    stages = settings["parallel.pp"] * settings["parallel.virtual_stages"]
    layers = math.ceil(config.model.num_layers / stages)
    fitting: dict[int, tuple[LayoutSettings, RunConfig, int]] = {}

    def fits_in_memory(number: int) -> bool:
        offloading = {**settings, "offload.activations": number}
        changed = _apply_layout(config, offloading, ranks)
        memory = math.inf if changed is None else _predict_layout_memory(changed, ranks, None, limit)
        if changed is not None and memory <= limit:
            fitting[number] = offloading, changed, int(memory)
        return number in fitting

    if not fits_in_memory(layers):
        return None
    numbers = range(1, layers)
    return fitting[(*numbers, layers)[bisect_left(numbers, True, key=fits_in_memory)]]


def _time_candidates(
    config: RunConfig, ranks: int, machine: MachineSpec, count: ParameterCounts, report: Callable[[str], object],
    fixed: Collection[str], like: OtherTrainer | None
) -> Iterator[_TimedCandidate]:  # fmt: skip
    """Yield the candidates that may fit, with their minimum time."""
    timer = _CandidateTimer(config, machine, count, like)
    hides = config.parallel.overlap_expert_exchange
    given = {"batch.micro": config.batch.micro, "recompute": {"kind": config.recompute.kind}, HIDDEN_EXCHANGE: hides}
    kept = {path: value for path, value in given.items() if path in fixed}
    timed, rough = 0, RoughMemoryEstimate.from_parameters(config.model, count)
    levels = (1, 2, 3) if like is None else like.zero
    for settings, run in generate_layout_candidates(config, ranks, machine, levels):
        if like is not None and not like.supports_layout(config.model, run):
            continue
        needed = rough.estimate_bytes(run)
        if (
            any(settings[path] != value for path, value in kept.items())
            or needed > ROUGH_TOLERANCE * machine.usable_memory_bytes
        ):
            continue
        zero1_limit = machine.usable_memory_bytes / ROUGH_TOLERANCE
        if run.zero == 2 and rough.estimate_bytes(replace(run, zero=1)) <= zero1_limit:
            continue  # ZeRO-1 fits, and is faster
        timed += 1
        if timed % 500 == 0:
            report(f"{timed} layouts timed")
        yield _TimedCandidate(timer.estimate_seconds(run), needed, settings, run)


def plan_layout(
    config: RunConfig, settings: LayoutSettings, ranks: int, machine: MachineSpec,
    count: ParameterCounts | None = None, like: OtherTrainer | None = None
) -> PlannedLayout | None:  # fmt: skip
    """Return a layout's predicted time and memory, whether it fits or not, in mega or `like`; None for invalid settings."""
    changed = _apply_layout(config, settings, ranks)
    if changed is None:
        return None
    memory = _predict_layout_memory(changed, ranks, like)
    return PlannedLayout(settings, make_planned_run(changed, ranks, machine, count, like).predict_step_time(), memory)


def _apply_layout(config: RunConfig, settings: LayoutSettings, ranks: int) -> RunConfig | None:
    """Return the run with given settings, or None if they are not legal."""
    try:
        changed = apply_settings(config, settings)
        changed.check_world_size(ranks)
    except ConfigError:
        return None
    return changed


def _predict_layout_memory(
    config: RunConfig, ranks: int, like: OtherTrainer | None, limit: float = math.inf
) -> int:  # fmt: skip
    """Return the peak bytes of the rank with the highest peak, or of the first one in pipeline order above `limit`."""
    shape, most = make_training_layout(config, ranks), 0
    kinds = iterate_memory(config.model, shape) if like is None else like.predict_memory(config.model, shape)
    for rank in kinds:
        most = max(most, sum(add_non_tensor_memory(shape, rank).values()))
        if most > limit:
            break
    return most


def plan_layout_if_fitting(
    config: RunConfig, settings: LayoutSettings, ranks: int, machine: MachineSpec, count: ParameterCounts | None = None
) -> PlannedLayout | None:
    """Return a layout's predicted time and memory in mega, or None if it is invalid or does not fit the machine's memory."""
    layout = plan_layout(config, settings, ranks, machine, count)
    return layout if layout is not None and layout.memory <= machine.usable_memory_bytes else None
