"""The best layouts of a run for a number of GPUs: all that are legal, by predicted time, those that fit.

Every combination of degrees, schedule, micro-batch and recomputation is timed by its work alone; from the fastest on, they are
then checked as `mega train --check` would, their memory is planned, and their schedule simulated, until enough fit.
What does not fit is tried with activations in host memory, of as few layers as it takes; where nothing fits that keeps any, all is
tried with the optimizer's state there. What a run computes stays: its batch, its model, and its precision unless others are asked for. Memory is what
tensors can have of a GPU (`Machine.room`).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import yaml

from mega_common.config import apply_overrides
from mega_common.errors import ConfigError
from mega_trainer.config import RunConfig
from mega_trainer.plan.advice import run_shape
from mega_trainer.plan.candidates import RECOMPUTE, RoughMemory, Settings, candidates, pipelines
from mega_trainer.plan.flops import Parameters, count_parameters
from mega_trainer.plan.machine import Machine
from mega_trainer.plan.memory import memory
from mega_trainer.plan.shape import RunShape
from mega_trainer.plan.step_time import Planned, StepTime
from mega_trainer.plan.work import Habits
from mega_trainer.sections import ParallelConfig

TRIES = 60  # layouts whose memory is planned and whose schedule is simulated, at most
WORSE = 1.25  # as many times the best one's time: no more is looked for there
GAIN = 0.01  # of a step's time that a change must gain to be worth telling
LENIENT = 0.7  # of what the rough estimate was off by at least, where it was tried, when another is left out for it
ROUGHLY = 1.15  # of a GPU's memory: what the rough estimate may exceed it by


class NoneFits(ConfigError):
    """No layout fits, as planned."""


@dataclass(frozen=True)
class Layout:
    """A layout that fits.

    Attributes:
        settings: what it sets, by path; a run with them is legal.
        time: of a step, predicted.
        memory: bytes of the rank that needs most.
    """

    settings: Settings
    time: StepTime
    memory: int


def reason(layout: Layout, best: Layout) -> str:
    """Where a layout's time goes: of the best one its parts, of another what is longer or shorter than there."""
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


def short(settings: Mapping[str, Any]) -> str:
    """Of a layout's settings those that are not as they are by default, in a few words."""
    plain = {**ParallelConfig().model_dump(exclude={"tp", "pp", "zero"}), "activations": 0}
    words = []
    for path, value in settings.items():
        key = path.rpartition(".")[2]
        told = value["kind"] if isinstance(value, dict) else value
        hidden = key == "cp_kind" and settings["parallel.cp"] == 1
        if told is not None and told != plain.get(key) and not hidden:
            words.append(key if told is True else f"{key} {told}")
    return " ".join(words)


def yaml_of(layout: Layout) -> str:
    """The sections of run.yaml that make a layout: `parallel`, `batch.micro` and `recompute`."""
    given = {path: value for path, value in layout.settings.items() if value is not None}
    nested = apply_overrides({}, overrides(given))
    if not nested.get("offload", {}).get("activations"):
        nested.pop("offload", None)
    return yaml.safe_dump(nested, sort_keys=False)


def habits_of(config: RunConfig) -> Habits:
    """What this trainer does under that configuration."""
    parallel = config.parallel
    return Habits(
        passes=1.0 if config.compile else 2.0,
        dispatch="node" if parallel.dispatch == "deepep" else "rank",
        gradient_bytes=2 if parallel.grad_reduce_dtype == "bf16" else 4,
    )


def planned(config: RunConfig, ranks: int, machine: Machine, count: Parameters | None = None) -> Planned:
    """A run on so many ranks of that machine.

    Raises:
        ConfigError: when the machine has no rate for the run's precision.
    """
    return Planned.of(config.model, run_shape(config, ranks), machine, machine.reached, habits_of(config), count)


def with_settings(config: RunConfig, settings: Mapping[str, object]) -> RunConfig:
    """The run with those settings.

    Raises:
        ConfigError: when that is no legal run.
    """
    raw = config.model_dump(mode="json", by_alias=True, exclude_none=True)
    return RunConfig.parse(apply_overrides(raw, overrides(settings)))


def overrides(settings: Mapping[str, object]) -> Iterator[str]:
    """As `--set` takes them."""
    return (f"{path}={json.dumps(value)}" for path, value in settings.items())


@dataclass(frozen=True)
class _Rough:
    """A layout as it is seen before its memory is planned and its schedule simulated.

    Attributes:
        seconds: of a step, at least.
        memory: bytes of a rank, about.
        settings, run: as in `candidates`.
    """

    seconds: float
    memory: float
    settings: Settings
    run: RunShape

    @property
    def kind(self) -> tuple[object, ...]:
        """Layouts of a kind are misjudged alike."""
        run = self.run
        return run.recompute, run.zero, run.schedule, run.pp > 1, run.ep > 1


def best_layouts(
    config: RunConfig,
    ranks: int,
    machine: Machine,
    *,
    keep: int = 8,
    tell: Callable[[str], object] = lambda text: None,
    fixed: Collection[str] = (),
    precisions: Collection[str] = (),
) -> list[Layout]:
    """The fastest layouts of that run that fit, fastest first, at most `keep`; `tell` hears how the search goes.

    Settings whose paths are `fixed` stay as they are. Other `precisions` than the run's own are looked at where they are given.

    Raises:
        NoneFits: when none is legal and fits.
    """
    kinds: list[Settings] = [{}, *({"precision": name} for name in precisions if name != config.precision)]

    def searched(more: Settings) -> list[Layout]:
        return [
            replace(layout, settings={**layout.settings, **kind, **more})
            for kind in kinds
            for layout in _found(with_settings(config, {**kind, **more}), ranks, machine, keep, tell, fixed)
        ]

    found = searched({})
    best = min(found, key=lambda layout: layout.time.seconds, default=None)
    short_of_memory = best is None or best.settings.get("recompute") == {"kind": "full"}
    if short_of_memory and not config.optimizer.offload and "optimizer.offload" not in fixed:
        found += searched({"optimizer.offload": True})
    if not found:
        raise NoneFits(
            f"no layout of this run fits {ranks} GPUs of {machine.memory_gb:g} GB",
            hint="more GPUs, a batch.global that more data ranks divide, or a shorter data.seq_length",
        )
    return sorted(found, key=lambda layout: layout.time.seconds)[:keep]


def _found(
    config: RunConfig,
    ranks: int,
    machine: Machine,
    keep: int,
    tell: Callable[[str], object],
    fixed: Collection[str],
) -> list[Layout]:
    """As `best_layouts`, of that precision and that place of the optimizer's state."""
    count = count_parameters(config.model)
    rough = sorted(_rough(config, ranks, machine, count, tell, fixed), key=lambda layout: layout.seconds)
    found: list[Layout] = []
    tried, misjudged = 0, dict[tuple[object, ...], float]()  # what memory was at least, of what it was taken for
    for candidate in rough:
        best = min((layout.time.seconds for layout in found), default=math.inf)
        enough = best if len(found) >= keep else WORSE * best  # no layout takes less than its rough time
        if candidate.seconds > enough or tried == TRIES:
            break
        lenient = LENIENT if found or tried < TRIES / 2 else 1.0  # after so many in vain: the likely ones
        if lenient * misjudged.get(candidate.kind, 0.0) * candidate.memory > machine.room:
            continue
        tried += 1
        tell(f"{tried} of the fastest of {len(rough)} layouts looked at, {len(found)} fit")
        settings = {path: value for path, value in candidate.settings.items() if path not in fixed}
        layout = _looked_at(config, settings, ranks, machine, count)
        if layout is None:
            continue
        share = layout.memory / candidate.memory
        misjudged[candidate.kind] = min(share, misjudged.get(candidate.kind, share))
        if layout.memory > machine.room:
            layout = _lightened(config, settings, ranks, machine, count)
        found += [layout] if layout is not None else []
    return found


def _lightened(config: RunConfig, settings: Settings, ranks: int, machine: Machine, count: Parameters) -> Layout | None:
    """The run with those settings and activations of as few layers in host memory as make it fit, if any do."""
    if settings.get("offload.activations") != 0 or settings.get("recompute", {}).get("kind") == "full":
        return None
    stages = settings["parallel.pp"] * settings["parallel.virtual_stages"]

    def moved(layers: int) -> Layout | None:
        return _looked_at(config, {**settings, "offload.activations": layers}, ranks, machine, count)

    def fits(layers: int) -> bool:
        layout = moved(layers)
        return layout is not None and layout.memory <= machine.room

    numbers = range(1, math.ceil(config.model.num_layers / stages) + 1)
    least = bisect_left(numbers, True, key=fits)
    return moved(numbers[least]) if least < len(numbers) else None


def _rough(
    config: RunConfig,
    ranks: int,
    machine: Machine,
    count: Parameters,
    tell: Callable[[str], object],
    fixed: Collection[str],
) -> Iterator[_Rough]:
    """The candidates that may fit."""
    efficiency, habits = machine.reached, habits_of(config)
    given = {"batch.micro": config.batch.micro, "recompute": {"kind": config.recompute.kind}}
    kept = {path: value for path, value in given.items() if path in fixed}
    timed, rough = 0, RoughMemory.of(config.model, count)
    for settings, run in candidates(config, ranks, machine):
        needed = rough.bytes(run)
        if any(settings[path] != value for path, value in kept.items()) or needed > ROUGHLY * machine.room:
            continue
        if run.zero == 2 and rough.bytes(replace(run, zero=1)) <= machine.room / ROUGHLY:
            continue  # whole gradients fit, and are faster
        timed += 1
        if timed % 500 == 0:
            tell(f"{timed} layouts timed")
        seconds = Planned.of(config.model, run, machine, efficiency, habits, count).least_seconds()
        yield _Rough(seconds, needed, settings, run)


def _looked_at(
    config: RunConfig, settings: Settings, ranks: int, machine: Machine, count: Parameters | None
) -> Layout | None:
    """The run with those settings, if it is legal."""
    try:
        changed = with_settings(config, settings)
        changed.check_ranks(ranks)
    except ConfigError:
        return None
    most = max(sum(kinds.values()) for kinds in memory(changed.model, run_shape(changed, ranks)))
    return Layout(settings, planned(changed, ranks, machine, count).time(), most)


def fitting(
    config: RunConfig, settings: Settings, ranks: int, machine: Machine, count: Parameters | None = None
) -> Layout | None:
    """The run with those settings, if it is legal and fits the memory of that machine."""
    layout = _looked_at(config, settings, ranks, machine, count)
    return layout if layout is not None and layout.memory <= machine.room else None


def faster(config: RunConfig, ranks: int, machine: Machine, *, keep: int = 3) -> list[Layout]:
    """What single changes would make a run faster that still fits: those that gain most, at most `keep`."""
    count, now = count_parameters(config.model), planned(config, ranks, machine)
    seconds, limit = now.time().seconds, now.least_seconds()
    gains: list[tuple[float, Settings]] = []
    for settings in _changes(config, machine):
        try:
            changed = with_settings(config, settings)
            changed.check_ranks(ranks)
        except ConfigError:
            continue
        gains.append((planned(changed, ranks, machine, count).least_seconds(), settings))
    near = [settings for least, settings in sorted(gains, key=lambda gain: gain[0]) if least < limit]
    found = (fitting(config, settings, ranks, machine, count) for settings in near)
    gained = (layout for layout in found if layout is not None and layout.time.seconds < (1 - GAIN) * seconds)
    return sorted(islice(gained, keep), key=lambda layout: layout.time.seconds)


def _changes(config: RunConfig, machine: Machine) -> Iterator[Settings]:
    parallel, kinds = config.parallel, list(RECOMPUTE)
    if config.precision == "bf16" and machine.peak("fp8") > machine.peak("bf16"):
        yield {"precision": "fp8"}  # which the search leaves alone: it changes what is computed
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
    for schedule, virtual in pipelines(config.model.num_layers, parallel.pp):
        if (schedule, virtual) != (parallel.schedule, parallel.virtual_stages):
            yield {
                "parallel.schedule": schedule, "parallel.virtual_stages": virtual, "parallel.pipeline_layout": None,
            }  # fmt: skip
    if parallel.pp > 1:
        yield {"parallel.pp": parallel.pp // 2, "parallel.dp": None, "parallel.pipeline_layout": None}
    if parallel.ep > 1:
        yield {"parallel.ep": parallel.ep // 2}
    if parallel.zero != 1:
        yield {"parallel.zero": 1, "parallel.zero3_shard": None, "parallel.zero3_layers": None}
