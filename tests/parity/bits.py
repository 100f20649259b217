"""What ranks do for the tests that compare bits: the same step made in two ways, and runs that stop and go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from mega_ckpt.tensor_pieces import merge_sharded_tensors
from mega_trainer.verify.case_trainer import (
    CaseOutcome,
    CaseTrainer,
    make_case_process_groups,
    train_cases_in_one_process,
)
from mega_trainer.verify.layout_case import STEPS, LayoutCase
from mega_trainer.verify.restore_comparison import (
    STEPS_AFTER,
    STEPS_BEFORE,
    add_rank_zero_group,
    find_case_group,
    find_differing_tensors,
    overwrite_training_state,
    save_case_checkpoint,
)


def pairs(cases: Sequence[tuple[LayoutCase, LayoutCase]], *, norms: bool, steps: int = STEPS) -> list[list[str] | None]:
    """On each rank: what differs in bits between the two cases of each pair.

    The first of a pair has one rank, and then stands for all, or as many as the second and holds at least the same.
    After one step only what was computed before the update is compared.
    """
    rank, maker = dist.get_rank(), make_case_process_groups(case for pair in cases for case in pair)
    singles = {_key(plain): (plain, steps) for plain, _ in cases if plain.ranks == 1}
    made = dict(zip(singles, train_cases_in_one_process(list(singles.values())), strict=True))
    out: list[list[str] | None] = []
    for plain, other in cases:
        if rank >= other.ranks:
            out.append(None)
            continue
        if _key(plain) not in made:
            made[_key(plain)] = CaseTrainer.build(plain, rank, maker).run(steps)
        mine = CaseTrainer.build(other, rank, maker).run(steps)
        if steps == 1:
            mine.tensors = {}
        out.append(differing(mine, made[_key(plain)], norms=norms))
    return out


def _key(one: LayoutCase) -> str:
    return f"{one.raw} {one.closed} {one.ranks} {one.bucket}"


def differing(mine: CaseOutcome, reference: CaseOutcome, *, norms: bool) -> list[str]:
    """What differs in bits between two outcomes."""
    found = [] if mine.losses == reference.losses else ["losses"]
    found += ["norms"] if norms and mine.norms != reference.norms else []
    found += [f"gradients/{name}" for name in find_differing_tensors(mine.gradients, reference.gradients)]
    return found + find_differing_tensors(mine.tensors, reference.tensors)


def resumed(cases: Sequence[LayoutCase], folder: Path, others: Sequence[LayoutCase] = ()) -> list[list[str] | None]:
    """On each rank: what differs in bits between a run, and one that is saved, thrown away and restored half way.

    With `others` it is restored in those layouts, each of as many ranks as the case.
    """
    rank, maker = dist.get_rank(), add_rank_zero_group(make_case_process_groups([*cases, *others]))
    out: list[list[str] | None] = []
    for number, (case, other) in enumerate(zip(cases, others or cases, strict=True)):
        if rank >= case.ranks:
            out.append(None)
            continue
        straight = CaseTrainer.build(case, rank, maker).run(STEPS_BEFORE + STEPS_AFTER)
        if others:  # which hold other parts of it
            parts = [straight.tensors] * dist.get_world_size(find_case_group(maker, case))
            dist.all_gather_object(parts, straight.tensors, group=find_case_group(maker, case))
            straight.tensors = merge_sharded_tensors(parts)
        first = CaseTrainer.build(case, rank, maker)
        losses = first.run(STEPS_BEFORE).losses
        saved = save_case_checkpoint(first, maker, folder / str(number))
        second = CaseTrainer.build(other, rank, maker)
        overwrite_training_state(second)
        second.state.restore_checkpoint(saved, find_case_group(maker, other))
        rest = second.run(STEPS_AFTER)
        straight.gradients = {}
        rest.gradients = {}
        rest.losses = losses + rest.losses
        out.append(differing(rest, straight, norms=False))
    return out


def told(cases: Sequence[object], results: Sequence[Sequence[list[str] | None]]) -> Mapping[str, list[str]]:
    """What the ranks found, by case, where they found anything."""
    found = {
        str(case): sorted({name for names in ranks if names for name in names})
        for case, ranks in zip(cases, zip(*results, strict=True), strict=True)
    }
    return {case: names for case, names in found.items() if names}
