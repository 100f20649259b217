"""Checkpoints across layouts: saved in one, restored in another, compared bit by bit and in the steps that follow."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from mega_ckpt.store import Location, save_sharded_checkpoint
from mega_ckpt.tensor_pieces import merge_sharded_tensors
from mega_trainer.distributed.process_groups import ProcessGroupCache
from mega_trainer.verify.case_comparison import (
    RankFindings,
    assemble_tensor,
    compare_outcomes,
    list_held_tensor_slices,
    select_tensor_slice,
)
from mega_trainer.verify.case_trainer import (
    CaseOutcome,
    CaseTrainer,
    NamedTensors,
    SingleProcessOutcomes,
    copy_sharded_tensors_to_host,
    make_case_process_groups,
)
from mega_trainer.verify.layout_case import LayoutCase

STEPS_BEFORE, STEPS_AFTER = 2, 2  # a save
SPOILED = 3.0  # value of all tensors before a restore, so that what it leaves out is found


@dataclass(frozen=True)
class RestoreFindings:
    """Findings of one rank after restoring a checkpoint in another layout: differing tensors, errors of later steps.

    Attributes:
        differing: tensors that are not, bit by bit, those that were saved.
        steps: errors of the steps after it against one process that never stopped, and the boxes of this rank.
    """

    differing: list[str]
    steps: RankFindings


def find_differing_tensors(mine: NamedTensors, reference: NamedTensors) -> list[str]:
    """Return the names of tensors in which a bit differs, or of which the reference lacks a part that is here."""
    return [
        name
        for name, held in mine.items()
        for full in [assemble_tensor(reference[name])]
        if not all(torch.equal(box.tensor, select_tensor_slice(full, box)) for box in held.boxes)
    ]


def restore_in_other_layouts(
    pairs: Sequence[tuple[LayoutCase, LayoutCase]],
    folder: Path,
    contexts: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
) -> Iterator[RestoreFindings | None]:
    """Yield this rank's findings of each checkpoint that is restored in another layout, or None if it is not needed.

    Each pair trains in its first layout, saves, restores in the second, and trains on. A collective call.

    Args:
        folder: for the checkpoints.
        contexts: for each pair, the context in which the second trainer is built and restored.
    """
    rank = dist.get_rank()
    references = SingleProcessOutcomes((after, STEPS_BEFORE + STEPS_AFTER) for _, after in pairs)
    maker = add_rank_zero_group(make_case_process_groups(case for pair in pairs for case in pair))
    for number, (before, after) in enumerate(pairs):
        saved, held = cast(Location, folder), dict[str, Any]()
        if rank < before.ranks:
            first = CaseTrainer.build(before, rank, maker)
            held = dict(first.run(STEPS_BEFORE).tensors)
            saved = save_case_checkpoint(first, maker, folder / str(number))
        everywhere: list[tuple[Location, NamedTensors]] = [(saved, held)] * dist.get_world_size()
        dist.all_gather_object(everywhere, (saved, held))
        if rank >= after.ranks:
            yield None
            continue
        with contexts[number]() if contexts else nullcontext(), hide_checkpoint_progress_bars():
            second = CaseTrainer.build(after, rank, maker)
            overwrite_training_state(second)
            second.state.restore_checkpoint(everywhere[0][0], find_case_group(maker, after))
        wanted = merge_sharded_tensors(held for _, held in everywhere)
        differing = find_differing_tensors(copy_sharded_tensors_to_host(second.state.checkpoint_tensors()), wanted)
        yield RestoreFindings(differing, _train_on(second, references))


def _train_on(second: CaseTrainer, references: SingleProcessOutcomes) -> RankFindings:
    """Return the findings of the steps after a restore against one process that never stopped."""
    rest, straight = second.run(STEPS_AFTER), references.get_outcome(second.case, STEPS_BEFORE + STEPS_AFTER)
    rest.gradients = {}
    split = len(straight.losses) // (STEPS_BEFORE + STEPS_AFTER) * STEPS_BEFORE
    reference = CaseOutcome(straight.losses[split:], straight.norms[STEPS_BEFORE:], {}, straight.tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in straight.tensors.items()}
    return RankFindings(compare_outcomes(rest, reference), list_held_tensor_slices(rest), shapes)


def save_case_checkpoint(trainer: CaseTrainer, maker: ProcessGroupCache, folder: Path) -> Location:
    """Save a checkpoint and return its folder. A collective call of the ranks of the case."""
    state = trainer.state
    with hide_checkpoint_progress_bars():
        return save_sharded_checkpoint(
            folder, state.step, state.tensors_to_save(), model=trainer.config.model, state=state.checkpoint_state(),
            group=find_case_group(maker, trainer.case),
        )  # fmt: skip


def hide_checkpoint_progress_bars() -> AbstractContextManager[Any]:
    """Return a context that discards stderr, where saves and loads print progress bars."""
    return redirect_stderr(io.StringIO())


def overwrite_training_state(trainer: CaseTrainer) -> None:
    """Overwrite all weights and the optimizer state, so that what a restore leaves out is found."""
    with torch.no_grad():
        for held in trainer.state.checkpoint_tensors().values():
            for box in held.boxes:
                box.tensor.fill_(SPOILED)


def add_rank_zero_group(maker: ProcessGroupCache) -> ProcessGroupCache:
    """Add a process group of rank 0 alone, since to the checkpoint store no group means the whole world."""
    maker.groups_by_ranks[(0,)] = dist.new_group([0])
    return maker


def find_case_group(maker: ProcessGroupCache, case: LayoutCase) -> dist.ProcessGroup:
    """Return the process group of the ranks of a tested layout."""
    return maker.groups_by_ranks[tuple(range(case.ranks))]
