"""What ranks do for the tests that compare bits: the same step made in two ways, and runs that stop and go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from parity.cases import STEPS, Case
from parity.worker import (
    Found,
    Held,
    Outcome,
    References,
    Trainer,
    alone,
    clone,
    compare,
    make_groups,
    part_of,
    places,
    whole_tensor,
)

from mega_ckpt.store import save_sharded_checkpoint
from mega_ckpt.tensor_pieces import merge_sharded_tensors
from mega_trainer.distributed.process_groups import ProcessGroupCache

BEFORE, AFTER = 2, 2  # steps before a save and after it


def unlike(mine: Held, reference: Held) -> list[str]:
    """Names of the tensors in which a bit differs, or of which the reference does not have all that is here."""
    return [
        name
        for name, held in mine.items()
        for full in [whole_tensor(reference[name])]
        if not all(torch.equal(box.tensor, part_of(full, box)) for box in held.boxes)
    ]


def pairs(cases: Sequence[tuple[Case, Case]], *, norms: bool, steps: int = STEPS) -> list[list[str] | None]:
    """On each rank: what differs in bits between the two cases of each pair.

    The first of a pair has one rank, and then stands for all, or as many as the second and holds at least the same.
    After one step only what was computed before the update is compared.
    """
    rank, maker = dist.get_rank(), make_groups(case for pair in cases for case in pair)
    singles = {_key(plain): (plain, steps) for plain, _ in cases if plain.ranks == 1}
    made = dict(zip(singles, alone(list(singles.values())), strict=True))
    out: list[list[str] | None] = []
    for plain, other in cases:
        if rank >= other.ranks:
            out.append(None)
            continue
        if _key(plain) not in made:
            made[_key(plain)] = Trainer.make(plain, rank, maker).run(steps)
        mine = Trainer.make(other, rank, maker).run(steps)
        if steps == 1:
            mine.tensors = {}
        out.append(differing(mine, made[_key(plain)], norms=norms))
    return out


def _key(one: Case) -> str:
    return f"{one.raw} {one.closed} {one.ranks} {one.bucket}"


def differing(mine: Outcome, reference: Outcome, *, norms: bool) -> list[str]:
    """What differs in bits between two outcomes."""
    found = [] if mine.losses == reference.losses else ["losses"]
    found += ["norms"] if norms and mine.norms != reference.norms else []
    found += [f"gradients/{name}" for name in unlike(mine.gradients, reference.gradients)]
    return found + unlike(mine.tensors, reference.tensors)


def resumed(cases: Sequence[Case], folder: Path, others: Sequence[Case] = ()) -> list[list[str] | None]:
    """On each rank: what differs in bits between a run, and one that is saved, thrown away and restored half way.

    With `others` it is restored in those layouts, each of as many ranks as the case.
    """
    rank, maker = dist.get_rank(), _with_single(make_groups([*cases, *others]))
    out: list[list[str] | None] = []
    for number, (case, other) in enumerate(zip(cases, others or cases, strict=True)):
        if rank >= case.ranks:
            out.append(None)
            continue
        straight = Trainer.make(case, rank, maker).run(BEFORE + AFTER)
        if others:  # which hold other parts of it
            parts = [straight.tensors] * dist.get_world_size(_group(maker, case))
            dist.all_gather_object(parts, straight.tensors, group=_group(maker, case))
            straight.tensors = merge_sharded_tensors(parts)
        first = Trainer.make(case, rank, maker)
        losses = first.run(BEFORE).losses
        saved = checkpoint(first, maker, folder / str(number))
        second = Trainer.make(other, rank, maker)
        spoil(second)
        second.state.restore_checkpoint(saved, _group(maker, other))
        rest = second.run(AFTER)
        straight.gradients = {}
        rest.gradients = {}
        rest.losses = losses + rest.losses
        out.append(differing(rest, straight, norms=False))
    return out


@dataclass(frozen=True)
class Moved:
    """What a rank found of a checkpoint of one layout, loaded in another.

    Attributes:
        unlike: tensors that are not, bit for bit, those that were saved.
        then: errors of the further steps against one process that never stopped, and what the rank holds.
    """

    unlike: list[str]
    then: Found


def moved(
    cases: Sequence[tuple[Case, Case]],
    folder: Path,
    restoring: Sequence[Callable[[], AbstractContextManager[Any]]] = (),
) -> list[Moved | None]:
    """On each rank: train in the first layout of a pair, save, load in the second, go on.

    `restoring` is what the second trainer is made and restored in, for each pair.
    """
    rank, references = dist.get_rank(), References((after, BEFORE + AFTER) for _, after in cases)
    maker = _with_single(make_groups(case for pair in cases for case in pair))
    out: list[Moved | None] = []
    for number, (before, after) in enumerate(cases):
        saved, held = Path(), {}
        if rank < before.ranks:
            first = Trainer.make(before, rank, maker)
            held = first.run(BEFORE).tensors
            saved = checkpoint(first, maker, folder / str(number))
        everywhere: list[tuple[Path, Held]] = [(saved, held)] * dist.get_world_size()
        dist.all_gather_object(everywhere, (saved, held))
        if rank >= after.ranks:
            out.append(None)
            continue
        with restoring[number]() if restoring else nullcontext():
            second = Trainer.make(after, rank, maker)
            spoil(second)
            second.state.restore_checkpoint(everywhere[0][0], _group(maker, after))
        broken = unlike(clone(second.state.checkpoint_tensors()), merge_sharded_tensors(held for _, held in everywhere))
        out.append(Moved(broken, _straight_on(second, references)))
    return out


def _straight_on(second: Trainer, references: References) -> Found:
    """The steps after a restore against one process that never stopped."""
    rest, straight = second.run(AFTER), references.of(second.case, BEFORE + AFTER)
    rest.gradients = {}
    reference = Outcome(straight.losses[BEFORE:], straight.norms[BEFORE:], {}, straight.tensors)
    shapes = {name: tuple(held.shape) for name, held in reference.tensors.items()}
    return Found(compare(rest, reference), places(rest), shapes)


def checkpoint(trainer: Trainer, maker: ProcessGroupCache, folder: Path) -> Path:
    """Save; a collective call of the case's ranks."""
    state = trainer.state
    return save_sharded_checkpoint(
        folder, state.step, state.tensors_to_save(), model=trainer.config.model, state=state.checkpoint_state(),
        group=_group(maker, trainer.case),
    )  # fmt: skip


def spoil(trainer: Trainer) -> None:
    """Make sure that whatever a restore leaves out is seen."""
    with torch.no_grad():
        for held in trainer.state.checkpoint_tensors().values():
            for box in held.boxes:
                box.tensor.fill_(3.0)


def _with_single(maker: ProcessGroupCache) -> ProcessGroupCache:
    """With a group of rank 0 alone: to the store, no group means the whole world."""
    maker.groups_by_ranks[(0,)] = dist.new_group([0])
    return maker


def _group(maker: ProcessGroupCache, case: Case) -> dist.ProcessGroup:
    return maker.groups_by_ranks[tuple(range(case.ranks))]


def told(cases: Sequence[object], results: Sequence[Sequence[list[str] | None]]) -> Mapping[str, list[str]]:
    """What the ranks found, by case, where they found anything."""
    found = {
        str(case): sorted({name for names in ranks if names for name in names})
        for case, ranks in zip(cases, zip(*results, strict=True), strict=True)
    }
    return {case: names for case, names in found.items() if names}
