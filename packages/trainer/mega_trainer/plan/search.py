"""The best layouts of a run for a number of GPUs: all that are legal, by predicted time, those that fit.

Every combination of degrees, schedule, micro-batch and recomputation is timed by its work alone; from the fastest on, they are
then checked as `mega train --check` would, their memory is planned, and their schedule simulated, until enough fit.
What a run computes stays: its batch, its precision, its model. Memory is what tensors can have of a GPU (`Machine.room`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, Literal

import yaml

from mega_common.config import apply_overrides
from mega_common.errors import ConfigError
from mega_trainer.config import RunConfig
from mega_trainer.plan.advice import run_shape
from mega_trainer.plan.flops import Parameters, RecomputeKind, count_parameters
from mega_trainer.plan.layers import feed_width
from mega_trainer.plan.machine import Machine
from mega_trainer.plan.memory import RunShape, memory
from mega_trainer.plan.step_time import Planned, StepTime
from mega_trainer.plan.work import Habits
from mega_trainer.sections import ParallelConfig

LEAST_CHUNK = 2048  # tokens of a context rank: with fewer, attention does not hide what travels
TRIES = 60  # layouts whose memory is planned and whose schedule is simulated, at most
WORSE = 1.25  # as many times the best one's time: no more is looked for there
GAIN = 0.01  # of a step's time that a change must gain to be worth telling
LENIENT = 0.9  # of what the rough estimate was off by at least, where it was tried, when another is left out for it
ROUGHLY = 1.15  # of a GPU's memory: what the rough estimate may exceed it by
Settings = dict[str, Any]  # by path, as `--set` takes them


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
        return self.run.recompute, self.run.zero, self.run.pp > 1, self.run.ep > 1


def best_layouts(
    config: RunConfig,
    ranks: int,
    machine: Machine,
    *,
    keep: int = 8,
    tell: Callable[[str], object] = lambda text: None,
    fixed: Collection[str] = (),
) -> list[Layout]:
    """The fastest layouts of that run that fit, fastest first, at most `keep`; `tell` hears how the search goes.

    Settings whose paths are `fixed` stay as they are.

    Raises:
        NoneFits: when none is legal and fits.
    """
    count = count_parameters(config.model)
    rough = sorted(_rough(config, ranks, machine, count, tell, fixed), key=lambda layout: layout.seconds)
    found: list[Layout] = []
    tried, misjudged = 0, dict[tuple[object, ...], float]()  # what memory was at least, of what it was taken for
    for candidate in rough:
        best = min((layout.time.seconds for layout in found), default=math.inf)
        enough = best if len(found) >= keep else WORSE * best  # no layout takes less than its rough time
        if candidate.seconds > enough or tried == TRIES:
            break
        if LENIENT * misjudged.get(candidate.kind, 0.0) * candidate.memory > machine.room:
            continue
        tried += 1
        tell(f"{tried} of the fastest of {len(rough)} layouts looked at, {len(found)} fit")
        settings = {path: value for path, value in candidate.settings.items() if path not in fixed}
        layout = _looked_at(config, settings, ranks, machine, count)
        if layout is None:
            continue
        share = layout.memory / candidate.memory
        misjudged[candidate.kind] = min(share, misjudged.get(candidate.kind, share))
        if layout.memory <= machine.room:
            found.append(layout)
    if not found:
        raise NoneFits(
            f"no layout of this run fits {ranks} GPUs of {machine.memory_gb:g} GB: {len(rough)} came near, "
            f"{tried} were planned",
            hint="more GPUs, a batch.global that more data ranks divide, a shorter data.seq_length, or optimizer.offload",
        )
    return sorted(found, key=lambda layout: layout.time.seconds)[:keep]


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
    timed = 0
    for settings, run in candidates(config, ranks, machine):
        needed = rough_memory(config, count, run)
        if any(settings[path] != value for path, value in kept.items()) or needed > ROUGHLY * machine.room:
            continue
        if run.zero == 2 and rough_memory(config, count, replace(run, zero=1)) <= machine.room / ROUGHLY:
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
    parallel, kinds = config.parallel, list(_RECOMPUTE)
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
    for schedule, virtual in _pipelines(config.model.num_layers, parallel.pp):
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


def candidates(config: RunConfig, ranks: int, machine: Machine) -> Iterator[tuple[Settings, RunShape]]:
    """Combinations of settings that the numbers allow, with the shapes of their runs. Tensor ranks share a node."""
    model, batch, length = config.model, config.batch.global_, config.data.seq_length
    base = run_shape(config.model_copy(update={"parallel": type(config.parallel)()}), 1)
    experts = model.moe.num_experts if model.moe else 1
    degrees = [n for n in _divisors(ranks) if n <= max(model.num_layers, machine.ranks_per_node, length // LEAST_CHUNK)]
    for tp, pp, cp in product(degrees, repeat=3):
        fits = (
            model.num_attention_heads % tp == 0
            and length % (2 * cp * tp) == 0
            and (cp == 1 or length // cp >= LEAST_CHUNK)
        )
        if tp > machine.ranks_per_node or pp > model.num_layers or ranks % (tp * pp * cp) or not fits:
            continue
        dp = ranks // (tp * pp * cp)
        kinds: list[Literal["ring", "alltoall"]] = ["ring", "alltoall"] if cp > 1 else ["ring"]
        micros = [n for n in sorted({1, 2, 4, 8, config.batch.micro}) if batch % (n * dp) == 0]
        eps = _divisors(math.gcd(experts, dp * cp * tp))
        choices = product(
            micros, eps, _pipelines(model.num_layers, pp), [1, 2, 3] if pp == 1 else [1, 2], _RECOMPUTE, kinds
        )
        for micro, ep, (schedule, virtual), zero, recompute, kind in choices:
            run = replace(
                base, micro_batch=micro, microbatches=batch // (micro * dp), tp=tp, sp=tp > 1, pp=pp, virtual_stages=virtual,
                schedule=schedule, pipeline_layout=None, cp=cp, cp_kind=kind, ep=ep, dp=dp, zero=zero, recompute=recompute,
                recompute_layers=None, offload=0, expert_tp=1, modules=("norm", "activation"),
            )  # fmt: skip
            yield settings_of(run), run


_RECOMPUTE: tuple[RecomputeKind, ...] = ("none", "selective", "full")


def settings_of(run: RunShape) -> Settings:
    """What makes a run of that shape, by path."""
    return {
        "parallel.tp": run.tp, "parallel.sp": run.sp, "parallel.pp": run.pp, "parallel.virtual_stages": run.virtual_stages,
        "parallel.schedule": run.schedule, "parallel.pipeline_layout": None, "parallel.cp": run.cp, "parallel.cp_kind": run.cp_kind,
        "parallel.ep": run.ep, "parallel.expert_tp": run.expert_tp, "parallel.dp": run.dp, "parallel.zero": run.zero,
        "parallel.zero3_shard": None, "parallel.zero3_layers": None, "batch.micro": run.micro_batch,
        "recompute": {"kind": run.recompute}, "offload.activations": 0,
    }  # fmt: skip


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _pipelines(layers: int, pp: int) -> list[tuple[str, int]]:
    """Schedules and virtual stages: as few layers a stage as one, by steps of a factor of two."""
    if pp == 1:
        return [("1f1b", 1)]
    most = layers // pp
    virtual = sorted({1, *(most // part for part in (1, 2, 3, 4, 8) if most // part > 1)})
    return [*(("1f1b", stages) for stages in virtual), ("zb-h1", 1), *([("zbv", 2)] if most >= 2 else [])]


def rough_memory(config: RunConfig, count: Parameters, run: RunShape) -> float:
    """Bytes of the first pipeline rank, about: enough to leave out what cannot fit before `memory` counts all that is kept."""
    model, layers = config.model, config.model.num_layers
    block = run.ep * run.expert_tp
    dense = sum(layer.split / run.tp + layer.whole for layer in count.layers) / run.pp + count.embedding / run.tp
    experts = count.experts / block / run.pp
    apart = 0.0 if config.optimizer.offload else 12.0
    if run.zero == 3:
        states = (6 + apart) * (dense / run.sharers + experts / max(1, run.dp * run.cp * run.tp // block))
    else:
        sums = 4 / run.sharers if run.zero == 2 else 4
        states = (2 + sums) * (dense + experts)
        states += apart * (dense / run.sharers + experts / max(1, run.dp * run.cp * run.tp // block))
    tokens, width = run.micro_batch * run.seq_length / run.cp, model.hidden_size
    residual = width / (run.tp if run.sp else 1)
    split = 2 * (model.num_attention_heads + model.kv_heads) * model.head_size
    again = run.recompute == "selective"
    split += (2 if again else 3) * max(feed_width(model, kind.feed) for kind in model.kinds)
    kept = residual if run.recompute == "full" else (2 if again else 4) * residual + split / run.tp
    flight = run.pp + (run.virtual_stages - 1) * run.pp / run.virtual_stages if run.pp > 1 else 1
    one = 4 * residual + split / run.tp if run.recompute == "full" else 0.0
    return states + 2 * tokens * (kept * layers / run.pp * min(flight, run.microbatches) + one)
