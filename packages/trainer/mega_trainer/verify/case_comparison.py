"""Comparison of cases with one process: losses, gradient norms, gradients, weights and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mega_ckpt.tensor_pieces import ShardedTensor, TensorBox, copy_overlap
from mega_trainer.distributed.process_groups import ProcessGroupCache
from mega_trainer.verify.case_trainer import (
    CPU,
    BatchFunction,
    CaseOutcome,
    CaseTrainer,
    NamedTensors,
    SingleProcessOutcomes,
    get_rank_and_world,
    make_case_process_groups,
)
from mega_trainer.verify.layout_case import LayoutCase

FLOOR = 1e-4  # a tensor smaller than this share of the largest of its kind is measured against that one
TOLERANCE = 1e-10  # relative, in fp64
ILL_CONDITIONED = 1e-7  # no error of an implementation is as small as this
ContextFactory = Callable[[], AbstractContextManager[Any]]
BoxesByName = dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]  # name: (offset, shape) of each box


def assemble_tensor(held: ShardedTensor) -> Tensor:
    """Return a whole floating-point tensor assembled from slices that ranks hold; NaN in elements that no rank holds."""
    boxes = [
        box if box.tensor.is_floating_point() else TensorBox(box.offset, box.tensor.double()) for box in held.boxes
    ]
    out = boxes[0].tensor.new_full(held.shape, float("nan"))
    for box in boxes:
        copy_overlap(TensorBox((0,) * out.dim(), out), box)
    return out


def select_tensor_slice(tensor: Tensor, box: TensorBox) -> Tensor:
    """Return the slice of a whole tensor that a rank's `box` covers."""
    return tensor[tuple(slice(o, o + n) for o, n in zip(box.offset, box.tensor.shape, strict=True))]


def compute_relative_tensor_errors(mine: NamedTensors, reference: NamedTensors) -> dict[str, float]:
    """Return by tensor the largest error of this rank's slices, relative to the reference's largest element."""
    wholes = {name: assemble_tensor(held).double() for name, held in reference.items()}
    scales = {name: tensor.abs().max().item() for name, tensor in wholes.items()}
    largest: dict[str, float] = {}
    for name, scale in scales.items():
        largest[_tensor_kind(name)] = max(largest.get(_tensor_kind(name), 0.0), scale)
    return {
        name: max(
            nan_as_infinity(((box.tensor.double() - select_tensor_slice(wholes[name], box)).abs().max() / scale).item())
            for box in held.boxes
            if box.tensor.numel()
        )
        for name, held in mine.items()
        if any(box.tensor.numel() for box in held.boxes)
        for scale in [max(scales[name], FLOOR * largest[_tensor_kind(name)])]
    }


def _tensor_kind(name: str) -> str:
    return name.rpartition("/")[0]


def nan_as_infinity(error: float) -> float:
    """Return a relative error, with NaN replaced by infinity so that it compares as the largest."""
    return math.inf if math.isnan(error) else error


def compute_largest_tensor_error(mine: NamedTensors, reference: NamedTensors) -> float:
    """Return the largest relative error of all tensors, as `compute_relative_tensor_errors` measures it."""
    return max(compute_relative_tensor_errors(mine, reference).values(), default=0.0)


def compare_outcomes(mine: CaseOutcome, reference: CaseOutcome) -> dict[str, float]:
    """Return the largest relative errors of losses, gradient norms, and each kind of tensor."""
    numbers = {
        "loss": _number_error(mine.losses, reference.losses),
        "norm": _number_error(mine.norms, reference.norms),
    }
    kinds = reference.tensors_by_kind()
    return numbers | {
        kind: compute_largest_tensor_error(held, kinds[kind]) for kind, held in mine.tensors_by_kind().items()
    }


def _number_error(mine: Sequence[float], reference: Sequence[float]) -> float:
    pairs = zip(mine, reference, strict=True)
    return max(nan_as_infinity(abs(a - b) / abs(b)) if b else math.inf if a else 0.0 for a, b in pairs)


def list_held_tensor_slices(outcome: CaseOutcome) -> BoxesByName:
    """Return the offset and shape of each slice that this rank holds of weights, state and gradients, by name."""
    held = {**outcome.tensors, **{f"gradients/{name}": held for name, held in outcome.gradients.items()}}
    return {name: [(box.offset, tuple(box.tensor.shape)) for box in it.boxes] for name, it in held.items()}


def find_missing_tensors(ranks: Iterable[BoxesByName], shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return names of tensors that all ranks together do not hold completely, or that `shapes` does not have."""
    held = {name: np.zeros(shape, dtype=bool) for name, shape in shapes.items()}
    strange = []
    for rank in ranks:
        for name, boxes in rank.items():
            if name not in held:
                strange.append(name)
                continue
            for offset, shape in boxes:
                held[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = True
    return strange + [name for name, there in held.items() if not there.all()]


@dataclass(frozen=True)
class RankFindings:
    """Findings of one rank about a tested layout: errors of its tensor slices, these slices, and all tensors' shapes."""

    errors: dict[str, float]
    boxes: BoxesByName
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class CaseVerdict:
    """Findings of all ranks about a tested layout: largest error of each kind, and tensors not held completely.

    Attributes:
        failure: of ranks that raised an error or waited for each other; no errors are known then.
    """

    case: LayoutCase
    errors: dict[str, float]
    missing: list[str]
    failure: str = ""

    @property
    def largest_error(self) -> float:
        """Largest relative error of the tested layout; infinity if it did not run."""
        return math.inf if self.failure else max(self.errors.values(), default=0.0)

    def describe_problem(self, tolerance: float) -> str:
        """Return the tested layout and its problems by `describe_errors` as text; "" if there are none."""
        errors = self.describe_errors(tolerance)
        return f"{self.case}: {errors}" if errors else ""

    def describe_errors(self, tolerance: float) -> str:
        """Return the tested layout's errors above `tolerance`, missing tensors or failure as text; "" if there are none."""
        wrong = [f"{kind} {error:.1e}" for kind, error in self.errors.items() if not error <= tolerance]
        wrong += [f"not covered: {name}" for name in self.missing[:3]]
        wrong += [self.failure] if self.failure else []
        return ", ".join(wrong)


def compare_cases_with_one_process(
    cases: Sequence[LayoutCase],
    batches: BatchFunction | None = None,
    device: torch.device = CPU,
    context: ContextFactory = nullcontext,
) -> Iterator[RankFindings | None]:
    """Train each case on its first ranks; yield this rank's findings against one process, or None if not needed.

    Args:
        context: makes the context of each case, but not of one process, for a bug that is planted on purpose.
    """
    references = SingleProcessOutcomes(((one, one.steps) for one in cases), batches=batches, device=device)
    return compare_cases_with_outcomes(cases, references, batches, device, context)


def compare_cases_with_outcomes(
    cases: Sequence[LayoutCase],
    references: SingleProcessOutcomes,
    batches: BatchFunction | None = None,
    device: torch.device = CPU,
    context: ContextFactory = nullcontext,
) -> Iterator[RankFindings | None]:
    """Yield this rank's findings of each case against given results of one process, or None if it is not needed.

    A collective call.
    """
    (rank, _), maker = get_rank_and_world(), make_case_process_groups(cases)
    for case in cases:
        try:
            with context():
                found = _examine_case(case, rank, maker, references, batches, device) if rank < case.ranks else None
            yield found
        except Exception as error:
            raise AssertionError(f"{case} on rank {rank}") from error


def _examine_case(
    case: LayoutCase,
    rank: int,
    maker: ProcessGroupCache,
    references: SingleProcessOutcomes,
    batches: BatchFunction | None,
    device: torch.device,
) -> RankFindings:
    mine = CaseTrainer.build(case, rank, maker, batches=batches, device=device).run(case.steps)
    return compare_with_reference_outcome(mine, references.get_outcome(case, case.steps))


def compare_with_reference_outcome(mine: CaseOutcome, reference: CaseOutcome) -> RankFindings:
    """Return the findings of this rank's results against those of one process."""
    shapes = {name: tuple(it.shape) for name, it in reference.tensors.items()}
    shapes |= {f"gradients/{name}": tuple(it.shape) for name, it in reference.gradients.items()}
    return RankFindings(compare_outcomes(mine, reference), list_held_tensor_slices(mine), shapes)


def merge_rank_findings(case: LayoutCase, found: Iterable[RankFindings | None]) -> CaseVerdict:
    """Return the verdict of a tested layout from the findings of its ranks."""
    parts = [one for one in found if one is not None]
    errors = {kind: max(nan_as_infinity(one.errors[kind]) for one in parts) for kind in parts[0].errors}
    return CaseVerdict(case, errors, find_missing_tensors((one.boxes for one in parts), parts[0].shapes))


def merge_findings_by_case(cases: Sequence[LayoutCase], results: Sequence[Any]) -> list[CaseVerdict]:
    """Return the verdict of every case from every rank's results."""
    return [merge_rank_findings(case, found) for case, found in zip(cases, zip(*results, strict=True), strict=True)]
