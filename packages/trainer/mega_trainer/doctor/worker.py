"""Process in which parts of `mega doctor` run: alone, as launcher of ranks, or as one of the ranks.

Run as `python -m mega_trainer.doctor.worker PART,PART PROCESSES FOLDER`; `FOLDER/examination.json` has the `ExaminationPlan`. Results go
to `FOLDER/PART.json`, a line each, as soon as they are known: a part that crashes or hangs keeps what it has found. A part that
has ended leaves `FOLDER/PART.done`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from mega_common.errors import MegaError, TrainingError
from mega_common.parent_death import kill_with_parent
from mega_common.progress_logging import configure_logging, logger
from mega_trainer.distributed.device import select_rank_device
from mega_trainer.distributed.process_groups import RankInfo
from mega_trainer.doctor.check_result import CheckResult, make_upper_bound_check_result
from mega_trainer.doctor.collective_checks import measure_collectives
from mega_trainer.doctor.kernel_checks import iterate_kernel_checks
from mega_trainer.doctor.speed_checks import measure_speeds
from mega_trainer.doctor.training_checks import (
    check_checkpoint_save_and_load,
    check_layout_parity,
    check_plan_predictions,
)
from mega_trainer.launch.local_ranks import join_process_group, rank_from_environment, run_local_ranks
from mega_trainer.plan.machine import load_machine

COMMAND = [sys.executable, "-m", "mega_trainer.doctor.worker"]
PLAN = "examination.json"
TIMEOUT_SECONDS = 60.0  # of collectives
FAILURES = {"is killed": "signal 9", "raises": "failed on purpose"}  # how a rank fails, and the launcher's words for it
END_SECONDS = 30.0  # of a failed job, from the failure on
BAD_RANK = 1


@dataclass(frozen=True)
class ExaminationPlan:
    """Machine, device and number of ranks of an examination by `mega doctor`, for its parts.

    Attributes:
        device: as in run.yaml: auto, cpu or cuda.
        ranks: of the parts that several ranks run.
        machine: name of the machine in the planner's table, or None for an unknown one.
    """

    device: str
    ranks: int
    machine: str | None

    def write_plan(self, folder: Path) -> None:
        """Write the plan to `folder`/examination.json."""
        (folder / PLAN).write_text(json.dumps(asdict(self)))

    @classmethod
    def read_plan(cls, folder: Path) -> ExaminationPlan:
        """Return the plan that `folder`/examination.json holds."""
        return cls(**json.loads((folder / PLAN).read_text()))


def main(arguments: Sequence[str]) -> int:
    """Run the parts of the examination that `arguments` name and return the exit status."""
    kill_with_parent()  # no rank outlives the launcher
    parts, processes, folder = arguments[0].split(","), int(arguments[1]), Path(arguments[2])
    ranks, plan = rank_from_environment(os.environ), ExaminationPlan.read_plan(folder)
    if ranks is None and parts == ["failures"]:
        results = chain.from_iterable(check_rank_failure(kind, processes, folder) for kind in FAILURES)
        _write_results(folder, "failures", results)
        return 0
    if ranks is None and processes > 1:
        return run_local_ranks([*COMMAND, *arguments], processes, folder / "ranks")
    ranks = ranks or RankInfo()
    configure_logging(rank=ranks.rank, world_size=ranks.world_size)
    logger.setLevel("WARNING")
    with join_process_group(ranks, plan.device, TIMEOUT_SECONDS):
        for part in parts:
            _write_results(folder if ranks.rank == 0 else None, part, run_doctor_part(part, folder, plan, ranks))
    return 0


def run_doctor_part(part: str, folder: Path, plan: ExaminationPlan, ranks: RankInfo) -> Iterator[CheckResult]:
    """Yield the results of a part of the examination, on this rank."""
    place = select_rank_device(plan.device, ranks.local_rank)
    table = None if plan.machine is None else load_machine(plan.machine)
    match part:
        case "kernels":
            yield from (check.run_check(place) for check in iterate_kernel_checks())
        case "speed":
            yield from measure_speeds(place, table)
        case "collectives":
            yield from measure_collectives(place, table)
        case "plan":
            yield from check_plan_predictions(folder, place.type, ranks, table)
        case "parity":
            yield from check_layout_parity(place, ranks)
        case "checkpoint":
            yield from check_checkpoint_save_and_load(folder, place.type, ranks)
        case _:
            run_failing_all_reduces(part, folder, place)


def check_rank_failure(kind: str, processes: int, folder: Path) -> Iterator[CheckResult]:
    """Yield check results of a job in which one rank is made to fail: the time until all ranks end, and the error.

    The launcher's error must name the rank and the cause. `kind` is a key of `FAILURES`.
    """
    message = "no error"
    try:
        run_local_ranks([*COMMAND, kind, str(processes), str(folder)], processes, folder / f"{kind}-ranks")
    except TrainingError as error:
        message = str(error)
    seconds = time.time() - (folder / kind).stat().st_mtime
    yield make_upper_bound_check_result("failures", f"a rank {kind}: all ranks end", seconds, END_SECONDS, "s")
    words = f"rank {BAD_RANK}", FAILURES[kind]
    named = all(word in message for word in words)
    first = message.splitlines()[0]
    yield CheckResult("failures", f"a rank {kind}: error", "ok" if named else "failed", first, ", ".join(words))


def run_failing_all_reduces(kind: str, folder: Path, device: torch.device) -> None:
    """Run all-reduces without end, while rank `BAD_RANK` kills itself or raises, as `kind` says."""
    value = torch.zeros(1, device=device)
    dist.all_reduce(value)
    if dist.get_rank() == BAD_RANK:
        (folder / kind).touch()
        if kind == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"rank {BAD_RANK} failed on purpose")
    while True:
        dist.all_reduce(value)
        value.item()


def _write_results(folder: Path | None, part: str, results: Iterator[CheckResult]) -> None:
    """Write results to the part's file as they come; every rank computes them, and only the one with a folder writes."""
    for result in results:
        if folder is not None:
            with open(folder / f"{part}.json", "a", encoding="utf-8") as stream:
                stream.write(json.dumps(result.to_json()) + "\n")
    if folder is not None:
        (folder / f"{part}.done").touch()


def _run_and_exit(arguments: Sequence[str]) -> NoReturn:
    """Run `main` and exit without interpreter shutdown, in which communicators may wait for other ranks."""
    status = 1
    try:
        status = main(arguments)
    except MegaError as error:
        print(f"error: {error}", file=sys.stderr)
        status = error.exit_status
    except Exception:  # noqa: BLE001 - the examination reports it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _run_and_exit(sys.argv[1:])
