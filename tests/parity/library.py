"""The trainer as a library in any layout, against one process: log-probabilities, routes, and a step by a loss of them.

`python tests/parity/library.py [N]` holds every layout of up to eight ranks against it, or N of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from parity.cases import Case, all_layouts, covering
from parity.full import TOLERANCE, batches
from parity.worker import clone, difference, make_groups
from ranks import run_ranks
from torch import Tensor

from mega_trainer.build import connect
from mega_trainer.config import RunConfig
from mega_trainer.engine import TrainingEngine
from mega_trainer.ranks import Ranks

# whose attention draws dropout, too; which the library refuses; which has a decoder of the others beside its tower; which reads neighbours
SKIPPED = ("tied", "encoder", "t5", "vision", "retro")


def sequences(vocab: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    sizes = [length + 1, 2, *rng.integers(2, length + 2, 9).tolist()]
    return [rng.integers(0, vocab, size).tolist() for size in sizes]


def policy_loss(given: list[Tensor]) -> Tensor:
    """A clipped ratio of probabilities, which is no sum over tokens that weights known before could make."""
    return -torch.stack(
        [torch.exp(each - each.detach() + 0.1 * each.tanh()).clamp(0.8, 1.3).mean() for each in given]
    ).mean()


def quiet(case: Case) -> Case:
    """The case without draws, and without what depends on which tokens stand in a row together: losses and biases of routers."""
    model, moe = {**case.model, "residual_dropout": 0.0, "embedding_dropout": 0.0}, case.model.get("moe")
    if moe:
        model["moe"] = {**moe, "aux_loss": 0.0, "z_loss": 0.0, "bias_rate": 0.0}
    return replace(case, model=model, clip=1.0)


def layouts(ranks: int) -> list[Case]:
    found = [quiet(case) for case in all_layouts() if case.ranks == ranks and case.name not in SKIPPED]
    return [case for case in found if not (case.model.get("moe") or {}).get("sinkhorn")]


def engine_of(case: Case, ranks: Ranks, maker: Any = None) -> TrainingEngine:
    config = RunConfig.parse(case.raw, source=str(case))
    return TrainingEngine(config, connect(config, ranks, maker))


def outcome(engine: TrainingEngine) -> tuple[list[Tensor], float, float, dict[str, Any]]:
    work = sequences(engine.config.model.vocab_size, engine.config.data.seq_length)
    told = engine.log_probs(work)
    if moe := engine.config.model.moe:  # the experts of all tokens, and log-probabilities by others
        routes = engine.routes(work)
        told += [each.double() for each in routes]
        told += engine.log_probs(work, routes=[(each + 1) % moe.num_experts for each in routes])
    result = engine.train_step(work, policy_loss, lr=1e-2)
    return told, result.loss, result.grad_norm, clone(engine._state.tensors())


def against_one_process(cases: Sequence[Case]) -> list[str]:
    rank, maker, wrong, alone = dist.get_rank(), make_groups(cases), [], {}
    for case in cases:
        key = str(case.single.raw)
        alone[key] = alone.get(key) or outcome(engine_of(case.single, Ranks()))
        told, loss, norm, tensors = outcome(engine_of(case, Ranks(rank, case.ranks), maker))
        one_told, one_loss, one_norm, one_tensors = alone[key]
        errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(told, one_told, strict=True)]
        errors += [abs(loss / one_loss - 1), abs(norm / one_norm - 1), difference(tensors, one_tensors)]
        if not max(errors) < 1e-10:
            wrong.append(f"{case}: {max(errors):.1e}")
    return wrong


def main() -> int:
    """All of them, or as many as asked for; 1 when one disagrees."""
    cases = [case for ranks in range(1, 9) for case in layouts(ranks)]
    if len(sys.argv) > 1:
        cases = covering(cases, int(sys.argv[1]))
    wrong = []
    for part in batches(cases):
        found = run_ranks(against_one_process, part[0].ranks, part, timeout=3600)
        wrong += sorted({problem for one in found for problem in one})
        print(f"{len(part)} layouts on {part[0].ranks} ranks", *wrong, sep="\n", flush=True)
    print(f"{len(cases)} layouts, {len(wrong)} of them wrong (tolerance {TOLERANCE:g})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
