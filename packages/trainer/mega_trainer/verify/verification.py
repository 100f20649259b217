"""Verification of a run: a tiny model of its kind in a covering of layouts, compared with one process (`mega verify`)."""

from __future__ import annotations

import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig, resolve_run_config
from mega_trainer.launch.function_ranks import RankError, iterate_rank_results
from mega_trainer.verify.case_comparison import (
    TOLERANCE,
    CaseVerdict,
    ContextFactory,
    RankFindings,
    compare_with_reference_outcome,
    merge_rank_findings,
)
from mega_trainer.verify.case_trainer import CaseTrainer
from mega_trainer.verify.failure_location import TensorDifference, find_first_differing_tensor, find_smallest_failure
from mega_trainer.verify.kernel_comparison import KERNEL_BOUNDS, KernelFindings, compare_kernels
from mega_trainer.verify.layout_case import (
    GATHERS,
    STEPS,
    LayoutCase,
    choose_covering_cases,
    iterate_layouts,
    sample_memory_settings,
    sample_stages_and_batch,
)
from mega_trainer.verify.local_examination import (
    CASE_SECONDS,
    compute_error_tolerance,
    describe_rank_error,
    verify_layout_cases,
)
from mega_trainer.verify.restore_comparison import restore_in_other_layouts
from mega_trainer.verify.tiny_model import TinyModelRun, list_chunked_mixers

MOST_RANKS = 8
CANDIDATES = 300  # legal layouts that a covering is chosen from
MOST_RESTORES = 4
# Largest relative differences of bf16 from fp32 in the first step: loss, gradient norm.
BF16_BOUNDS = {"loss": 0.02, "norm": 0.2}
LAYOUT_KEYS = (
    "tp", "sp", "tp_comm_overlap", "pp", "virtual_stages", "schedule", "pipeline_layout", "cp", "cp_kind", "ep", "expert_tp", "dispatch_bound",
    "zero", "zero3_shard", "zero3_layers", "zero3_gather", "dp", "micro", "batch", "bucket", "recompute",
    "recompute_layers", "offload", "optimizer",
)  # fmt: skip


@dataclass(frozen=True)
class GenerationFindings:
    """Largest error of generated log-probabilities, a description, and the first activation that differs from training."""

    error: float
    name: str
    difference: TensorDifference | None = None


# Check of generation, which needs the inference engine: returns a sentence if it does not apply.
GenerationCheck = Callable[[LayoutCase], GenerationFindings | str]


@dataclass(frozen=True)
class VerifyCheckRow:
    """Result of one check of `mega verify`.

    Attributes:
        check: "layout", "restore", "chunk size", "bf16", "kernel" or "generation".
        name: layout, as `--only` accepts it, or description.
        ranks: number of processes.
        error, bound: largest relative difference, and the largest that passes; None where bits are compared or nothing ran.
        problem: what is wrong, or "".
        seconds: time that it took.
        skipped: reason why the check does not apply, or "".
        difference: first activation of generation that differs from training.
    """

    check: str
    name: str
    ranks: int
    error: float | None = None
    bound: float | None = None
    problem: str = ""
    seconds: float = 0.0
    skipped: str = ""
    difference: TensorDifference | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class LayoutFailureReport:
    """Smallest failing layout, and the first tensor that differs in it.

    Attributes:
        layout: as `--only` accepts it.
        problem: errors of the smallest layout.
        difference: first differing tensor of the first step; None if it shows only later, or if ranks raised an error.
    """

    layout: str
    ranks: int
    problem: str
    difference: TensorDifference | None

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


class Verification:
    """Checks of one run on processes of this machine.

    Args:
        tiny: the run, reduced to a tiny model.
        layouts: number of layouts of the covering.
        ranks: largest number of processes, at most `MOST_RANKS`.
        seed: of the draws of layouts.
        only: text of the only layout to run, such as `tp=2 pp=2`.
        context: as for `verify_layout_cases`.
        check_generation: compares generation with training.
    """

    def __init__(
        self,
        tiny: TinyModelRun,
        *,
        layouts: int = 12,
        ranks: int = 4,
        seed: int = 0,
        only: str | None = None,
        context: ContextFactory = nullcontext,
        check_generation: GenerationCheck | None = None,
    ) -> None:
        self._tiny, self._context, self._check_generation, self._only = tiny, context, check_generation, only
        self.cases = (
            choose_covering_layout_cases(tiny, layouts, ranks, seed) if only is None else [parse_layout(tiny, only)]
        )
        self.failures: list[CaseVerdict] = []

    @property
    def uncovered_parallel_degrees(self) -> list[str]:
        """Degrees that the run has and no layout of this verification, such as `tp`."""
        parallel = self._tiny.config.parallel
        degrees = ("tp", "pp", "cp", "ep", "expert_tp", "virtual_stages")
        used = {key for case in self.cases for key in degrees if case.layout[key] > 1}
        return [] if self._only else [key for key in degrees if getattr(parallel, key) > 1 and key not in used]

    @property
    def num_checks(self) -> int:
        """Number of rows that `run_checks` yields."""
        kernels = len(self._tiny.config.kernels.functions)
        return len(self.cases) + (0 if self._only else len(self._restore_pairs) + len(self._single_pairs) + kernels + 1)

    def run_checks(self) -> Iterator[VerifyCheckRow]:
        """Yield the result of each check as soon as it is known; failed layouts are kept in `failures`."""
        if self._only is None:
            yield from self._check_single_process()
            yield from self._check_kernels()
            if self._check_generation is not None:
                yield self._compare_generation(self._check_generation)
        begin = time.monotonic()
        for verdict in verify_layout_cases(self.cases, context=self._context):
            bound = compute_error_tolerance(verdict)
            problem = verdict.describe_errors(bound)
            if problem:
                self.failures.append(verdict)
            yield VerifyCheckRow(
                "layout", verdict.case.layout_text, verdict.case.ranks, None if verdict.failure else verdict.largest_error,
                bound, problem, time.monotonic() - begin,
            )  # fmt: skip
            begin = time.monotonic()
        if self._only is None:
            yield from self._check_restores()

    def explain_failure(self) -> LayoutFailureReport:
        """Find the smallest layout that fails like one of `failures`, and the first tensor that differs in it."""
        first = min(self.failures, key=lambda verdict: (verdict.case.ranks, len(verdict.case.layout_text.split())))
        known = {id(first.case): first}

        def find_failing(cases: Sequence[LayoutCase]) -> list[LayoutCase]:
            found = [
                verdict
                for verdict in verify_layout_cases(cases, context=self._context, seconds=CASE_SECONDS / 2)
                if verdict.describe_errors(compute_error_tolerance(verdict))
            ]
            known.update((id(verdict.case), verdict) for verdict in found)
            return [verdict.case for verdict in found]

        smallest = known[id(find_smallest_failure(first.case, find_failing))]
        problem = smallest.describe_errors(compute_error_tolerance(smallest))
        case = smallest.case
        difference = None if smallest.failure else find_first_differing_tensor(case, self._context)
        return LayoutFailureReport(case.layout_text, case.ranks, problem, difference)

    @property
    def _single_case(self) -> LayoutCase:
        layers = self._tiny.num_distinct_layers
        return make_tiny_layout_case(self._tiny, layers, 1, parallel={}, steps=count_stable_steps(self._tiny, layers))

    @property
    def _single_pairs(self) -> list[tuple[str, str, LayoutCase, LayoutCase]]:
        """Comparisons in one process: (check, name, case, reference)."""
        case, model = self._single_case, dict(self._single_case.model)
        first = replace(case, steps=1, clip=0.0)
        found = [("bf16", "bf16 against fp32", replace(first, precision="bf16"), replace(first, precision="fp32"))]
        for section in ("mamba", "mamba1", "delta", "kda", "lightning"):
            if section in model:
                stepwise = {**model, section: {**model[section], "chunk_size": 1}}
                name = f"{section}: token by token against chunks of {model[section]['chunk_size']}"
                found.append(("chunk size", name, replace(first, model=stepwise), first))
        for name in list_chunked_mixers(self._tiny.config):
            stepwise = {**model, "mixers": {**model["mixers"], name: {**model["mixers"][name], "chunk_size": 1}}}
            found.append(
                ("chunk size", f"{name}: token by token against chunks", replace(first, model=stepwise), first)
            )
        return found

    def _check_single_process(self) -> Iterator[VerifyCheckRow]:
        """Yield the comparisons in one process.

        Raises:
            ConfigError: when one process cannot train the tiny model.
        """
        pairs, begin, done = self._single_pairs, time.monotonic(), 0
        work = [(case, reference) for _, _, case, reference in pairs]
        try:
            for (check, name, case, _), (found,) in zip(
                pairs, iterate_rank_results(compare_case_pairs, 1, work, timeout=CASE_SECONDS), strict=False
            ):
                verdict = merge_rank_findings(case, [found])
                bounds = BF16_BOUNDS if check == "bf16" else dict.fromkeys(verdict.errors, TOLERANCE)
                wrong = [
                    f"{kind} {verdict.errors[kind]:.1e}"
                    for kind, bound in bounds.items()
                    if not verdict.errors[kind] <= bound
                ]
                kind = "loss" if check == "bf16" else max(bounds, key=verdict.errors.__getitem__)
                yield VerifyCheckRow(
                    check, name, 1, verdict.errors[kind], bounds[kind], ", ".join(wrong), time.monotonic() - begin
                )
                begin, done = time.monotonic(), done + 1
        except (RankError, TimeoutError) as error:
            text = f"one process cannot train the tiny model ({pairs[done][1]}): {describe_rank_error(error)}"
            raise ConfigError(text) from error

    def _check_kernels(self) -> Iterator[VerifyCheckRow]:
        """Yield the comparison of each kernel of an extension with mega's."""
        case, names, done = self._single_case, self._tiny.config.kernels.functions, 0
        begin = time.monotonic()
        try:
            for (found,) in iterate_rank_results(compare_kernels, 1, case, names, timeout=CASE_SECONDS):
                yield _judge_kernel(case, names[done], found, time.monotonic() - begin)
                done, begin = done + 1, time.monotonic()
        except (RankError, TimeoutError) as error:
            yield VerifyCheckRow("kernel", names[done], 1, problem=describe_rank_error(error))

    def _compare_generation(self, check: GenerationCheck) -> VerifyCheckRow:
        begin, title = time.monotonic(), "generation against training"
        try:
            found = check(replace(self._single_case, steps=1))
        except Exception:  # noqa: BLE001 whatever an extension raises is a failed check
            problem = describe_rank_error(RankError(traceback.format_exc()))
            return VerifyCheckRow("generation", title, 1, problem=problem)
        if isinstance(found, str):
            return VerifyCheckRow("generation", title, 1, skipped=found)
        problem = "" if found.error <= TOLERANCE else f"log-probabilities {found.error:.1e}"
        seconds = time.monotonic() - begin
        return VerifyCheckRow(
            "generation", found.name, 1, found.error, TOLERANCE, problem, seconds, difference=found.difference
        )

    @property
    def _restore_pairs(self) -> list[tuple[LayoutCase, LayoutCase]]:
        """Pairs of layouts of the same model and batch: saved in the first, restored in the second."""

        def trained(case: LayoutCase) -> tuple[Mapping[str, Any], int]:
            return case.model, case.batch

        found = [
            (before, after)
            for before, after in pairwise(sorted(self.cases, key=lambda case: (case.model["num_layers"], case.batch)))
            if trained(before) == trained(after)
        ]
        single = self._single_case
        alike = next((case for case in self.cases if case.ranks > 1 and trained(case) == trained(single)), None)
        return ([(replace(single, steps=STEPS), alike)] if alike else []) + found[: MOST_RESTORES - bool(alike)]

    def _check_restores(self) -> Iterator[VerifyCheckRow]:
        pairs = self._restore_pairs
        done, ranks = 0, max((case.ranks for pair in pairs for case in pair), default=1)
        while done < len(pairs):
            begin = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="mega-verify-") as folder:
                try:
                    for found in iterate_rank_results(
                        restore_in_other_layouts, ranks, pairs[done:], Path(folder), timeout=CASE_SECONDS
                    ):
                        parts = [one for one in found if one is not None]
                        yield _judge_restore(*pairs[done], parts, time.monotonic() - begin)
                        done, begin = done + 1, time.monotonic()
                except (RankError, TimeoutError) as error:
                    yield VerifyCheckRow("restore", _name_pair(*pairs[done]), ranks, problem=describe_rank_error(error))
                    done += 1


def _name_pair(before: LayoutCase, after: LayoutCase) -> str:
    return f"{before.layout_text} -> {after.layout_text}"


def _judge_kernel(case: LayoutCase, name: str, found: KernelFindings, seconds: float) -> VerifyCheckRow:
    """Return the result of the comparison of one kernel of an extension."""
    operation = case.config.registry.entries("kernels")[name].operation
    if found.precision is None or found.findings is None:
        skipped = f"supports no call of {operation} in the tiny model on a CPU"
        return VerifyCheckRow("kernel", f"{name} against mega's {operation}", 1, skipped=skipped)
    bound, verdict = KERNEL_BOUNDS[found.precision], merge_rank_findings(case, [found.findings])
    title = f"{name} against mega's {operation} in {found.precision}, {found.calls} calls"
    return VerifyCheckRow("kernel", title, 1, verdict.largest_error, bound, verdict.describe_errors(bound), seconds)


def _judge_restore(before: LayoutCase, after: LayoutCase, parts: Sequence[Any], seconds: float) -> VerifyCheckRow:
    """Return the result of one restore: bits of all tensors, and the steps after it."""
    verdict = merge_rank_findings(after, [part.steps for part in parts])
    if after.steps < STEPS:  # the steps after it would magnify rounding
        verdict = replace(verdict, errors={})
    wrong = sorted({name for part in parts for name in part.differing})
    bound = TOLERANCE if wrong else compute_error_tolerance(verdict)
    problem = f"not bitwise equal: {', '.join(wrong[:3])}" if wrong else verdict.describe_errors(bound)
    ranks = max(before.ranks, after.ranks)
    error = verdict.largest_error if verdict.errors else None
    return VerifyCheckRow("restore", _name_pair(before, after), ranks, error, bound, problem, seconds)


def verify_run(run: Mapping[str, Any], *, layouts: int = 4, ranks: int = 2) -> list[str]:
    """Return the problems of a run in a covering of layouts on processes of this machine, one line each.

    Generation is not compared; `mega verify` does that too.

    Args:
        run: content of run.yaml; the data may be left out.
        layouts, ranks: number of layouts, and their largest number of processes.

    Raises:
        ConfigError: for a run that is not valid, or that one process cannot train.
    """
    config = RunConfig.parse(resolve_run_config({"data": {"train": ["none"]}, **run}))
    verification = Verification(TinyModelRun.from_run(config), layouts=layouts, ranks=ranks)
    problems = [f"{row.check} {row.name}: {row.problem}" for row in verification.run_checks() if row.problem]
    if verification.failures:
        report = verification.explain_failure()
        problems.append(f"smallest failing layout: {report.layout}; first difference: {report.difference}")
    return problems


def compare_case_pairs(pairs: Sequence[tuple[LayoutCase, LayoutCase]]) -> Iterator[RankFindings]:
    """Yield the findings of each case's losses and gradients against its reference, both in this process."""
    for case, reference in pairs:
        mine, wanted = (CaseTrainer.build(one).run(one.steps) for one in (case, reference))
        mine.tensors = wanted.tensors = {}  # in bf16 the optimizer has main weights too
        yield compare_with_reference_outcome(mine, wanted)


def make_tiny_layout_case(tiny: TinyModelRun, layers: int, ranks: int, **fields: Any) -> LayoutCase:
    """Return the case of a layout with the tiny model of at least `layers` layers; `fields` override the run's."""
    model = tiny.model_fields(layers)
    own = tiny.case_fields()
    if "attention_dropout" in model and fields.get("parallel", {}).get("cp", 1) > 1 and model.get("encoder"):
        model["attention_dropout"] = 0.0
    return LayoutCase(tiny.name, model, ranks, **{**own, **fields})


def count_stable_steps(tiny: TinyModelRun, layers: int) -> int:
    """Return the number of steps to compare: 1 for many delta-rule layers, else `STEPS`.

    Many layers with delta rules magnify rounding by forty in each step.
    """
    return 1 if layers > 4 and (tiny.config.model.delta or tiny.config.model.kda) else STEPS


def choose_covering_layout_cases(tiny: TinyModelRun, count: int, ranks: int, seed: int) -> list[LayoutCase]:
    """Return a covering of the legal layouts of up to `ranks` ranks; the first is the nearest to the run's own layout.
    Tensor parallelism without sequence parallelism, which hides missing gradient sums, and context parallelism follow, if
    the model has such layouts and `count` allows it.
    """
    rng = random.Random(f"{seed} {ranks}")
    experts = tiny.config.model.moe is not None
    degrees = range(1, ranks + 1)
    every = [
        (number, parallel)
        for number in degrees
        for parallel in iterate_layouts(
            number,
            tps=degrees,
            cps={} if tiny.config.model.retro else dict.fromkeys(range(2, ranks + 1), degrees),
            eps=(1, 2, 4, 8) if experts else (),
            expert_tps=(1, 2, 4) if experts else (),
        )
    ]
    rng.shuffle(every)
    found: list[LayoutCase] = []
    for number, parallel in every:
        case = sample_layout_case(tiny, number, parallel, rng)
        if case.is_legal and _trains_each_stage(case):
            found.append(case)
        if len(found) == CANDIDATES:
            break
    if not found:
        rule = f"no layout of up to {ranks} processes is supported for this model"
        raise ConfigError(rule, hint="give the run.yaml of a run with the model, or more --ranks")
    own = tiny.config.parallel.model_dump()
    nearest = max(found, key=lambda case: (_likeness(case, own), case.ranks))
    chosen = [nearest]
    for needed in (_splits_heads_alone, _splits_context):
        if not any(map(needed, chosen)):
            chosen += [case for case in found if needed(case)][:1]
    others = [case for case in found if not any(case is one for one in chosen)]
    return [*chosen[:count], *choose_covering_cases(others, count - len(chosen))]


def _splits_heads_alone(case: LayoutCase) -> bool:
    return case.layout["tp"] > 1 and not case.layout["sp"]


def _splits_context(case: LayoutCase) -> bool:
    return bool(case.layout["cp"] > 1)


def sample_layout_case(tiny: TinyModelRun, ranks: int, parallel: dict[str, Any], rng: random.Random) -> LayoutCase:
    """Return the case of a layout with a random batch, uneven stages, recomputation, offload and buckets."""
    layers, fields = sample_stages_and_batch(ranks, parallel, rng)
    layers = max(layers, tiny.num_distinct_layers)
    chosen = fields["parallel"]
    chosen["tp_comm_overlap"] = chosen["sp"] and tiny.config.parallel.tp_comm_overlap
    if chosen.get("pipeline_layout") and sum(chosen["pipeline_layout"]) != layers:
        del chosen["pipeline_layout"]
    fields |= sample_memory_settings(rng)
    moe = tiny.config.model.moe
    if moe is not None and moe.aux_loss_scope == "batch":  # a loss of one micro-batch of all data ranks
        case = make_tiny_layout_case(tiny, layers, ranks, **fields)
        fields["micro"] = case.batch // case.layout["dp"]
    return make_tiny_layout_case(tiny, layers, ranks, steps=count_stable_steps(tiny, layers), **fields)


def _trains_each_stage(case: LayoutCase) -> bool:
    """Return whether no pipeline stage is frozen as a whole."""
    return not case.freeze or case.layout["pp"] == 1


def _likeness(case: LayoutCase, own: dict[str, Any]) -> int:
    """Return the number of settings that a layout shares with the run's `parallel` section, whatever the degrees."""
    layout = case.layout
    degrees = ("tp", "pp", "cp", "ep", "expert_tp", "virtual_stages")
    alike = [(layout[key] > 1) == (own[key] > 1) for key in degrees]
    alike += [layout.get(key, own[key]) == own[key] for key in ("sp", "schedule", "cp_kind", "zero")]
    return alike.count(True)


def parse_layout(tiny: TinyModelRun, text: str) -> LayoutCase:
    """Return the case of a layout, as `LayoutCase.layout_text` writes it: `tp=2 sp=True micro=4 batch=8`.

    Raises:
        ConfigError: for an unknown setting, or a layout that does not fit the model.
    """
    given: dict[str, Any] = {}
    for word in text.replace("--only", " ").split():
        key, _, value = word.partition("=")
        if key not in LAYOUT_KEYS or not value:
            raise ConfigError(
                f"--only {text!r}: {word} is not a setting of a layout",
                hint=f"use KEY=VALUE of {', '.join(LAYOUT_KEYS)}, as mega verify prints them",
            )
        given[key] = yaml.safe_load(value)
        if key in ("tp", "pp", "cp", "dp", "ep", "batch", "micro", "virtual_stages") and type(given[key]) is not int:
            raise ConfigError(
                f"--only {text!r}: {key} = {value!r} must be a whole number",
                hint="write settings with spaces: tp=2 dp=2",
            )
    dp, batch = given.pop("dp", 1), given.pop("batch", 8)
    fields: dict[str, Any] = {"batch": batch, "micro": given.pop("micro", max(1, batch // dp))}
    if "bucket" in given:
        fields["bucket"] = given.pop("bucket")
    recompute = {"kind": given.pop("recompute", "none"), "layers": given.pop("recompute_layers", None)}
    fields["recompute"] = {} if recompute["kind"] == "none" else recompute
    if offload := given.pop("offload", 0):
        fields["offload"] = {"activations": offload, "min_bytes": 0}
    given.pop("optimizer", None)
    ranks = dp * given.get("tp", 1) * given.get("pp", 1) * given.get("cp", 1)
    if ranks > MOST_RANKS:
        raise ConfigError(f"--only {text!r}: at most {MOST_RANKS} processes, found {ranks}", hint="use smaller degrees")
    if given.setdefault("zero", 0) == 3:
        given.setdefault("zero3_gather", GATHERS[0])
    stages = sum(given.get("pipeline_layout", ())) or given.get("pp", 1) * given.get("virtual_stages", 1)
    layers = max(stages, tiny.num_distinct_layers)
    case = make_tiny_layout_case(tiny, layers, ranks, parallel=given, steps=count_stable_steps(tiny, layers), **fields)
    _ = case.config
    return case
