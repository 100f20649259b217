"""Examination of a machine: runs the parts in processes of their own, within a time limit, and collects their results.

A part that crashes, such as by an illegal access on a GPU, or that hangs, fails; the parts after it run in a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mega_common.parent_death import kill_with_parent
from mega_trainer.distributed.device import select_rank_device
from mega_trainer.doctor.check_result import CheckResult
from mega_trainer.doctor.environment_checks import check_environment, detect_machine_name
from mega_trainer.doctor.training_checks import SMALL_MODEL, write_tokens
from mega_trainer.doctor.worker import COMMAND, ExaminationPlan

ALONE = ("kernels", "speed")  # parts of one process
TOGETHER = ("collectives", "checkpoint", "parity", "plan")  # parts of all ranks
POLL_SECONDS, KILL_SECONDS = 0.2, 5.0
SEQUENCE = 4096  # tokens of the longest sequence that a part trains on
LAST_LINES = 3  # of a failed part's output


class Examination:
    """Examination of this machine by `mega doctor`.
    It uses `ranks` ranks and takes at most `minutes` minutes.

    Args:
        folder: empty, for the results and logs of the parts.
        device: as in run.yaml: auto, cpu or cuda.
        progress: called with the name of a part that begins or runs.
    """

    def __init__(
        self, folder: Path, device: str, ranks: int, minutes: float, progress: Callable[[str], object]
    ) -> None:
        place = select_rank_device(device, 0)
        self.plan = ExaminationPlan(device, ranks, detect_machine_name(place))
        self._folder, self._progress = folder, progress
        self._end = time.monotonic() + 60 * minutes

    def run_checks(self) -> Iterator[CheckResult]:
        """Yield the results of all parts of the examination, as each part ends.

        Raises:
            KeyboardInterrupt: by Ctrl-C, after the processes of the present part have ended.
        """
        self._progress("environment")
        yield from check_environment(self.plan.device)
        self.plan.write_plan(self._folder)
        write_tokens(self._folder, int(str(SMALL_MODEL["vocab_size"])), SEQUENCE)
        ranks = self.plan.ranks
        yield from self._run_parts(ALONE, 1)
        together = TOGETHER if ranks > 1 else TOGETHER[1:]
        yield from self._run_parts(together, ranks)
        if ranks > 1:
            yield from self._run_parts(("failures",), ranks)
        else:
            for part in ("collectives", "failures"):
                yield CheckResult(part, "all", "skipped", "requires several ranks (--nproc)")

    def _run_parts(self, parts: Sequence[str], processes: int) -> Iterator[CheckResult]:
        """Run parts one after another in one child process, and those after a failed part in another one."""
        while parts:
            if time.monotonic() >= self._end:
                yield from (CheckResult(part, "all", "skipped", "no time left (--minutes)") for part in parts)
                return
            problem = self._run_child(parts, processes)
            done = [part for part in parts if (self._folder / f"{part}.done").exists()]
            for part in parts[: len(done) + 1]:
                yield from self._read_results(part)
            parts = parts[len(done) :]
            if parts:
                yield CheckResult(parts[0], "runs to its end", "failed", problem)
                parts = parts[1:]

    def _run_child(self, parts: Sequence[str], processes: int) -> str:
        """Run parts in a child process until it ends or the time is over; return what went wrong, if anything did."""
        log = self._folder / f"{parts[0]}.log"
        with open(log, "wb") as output:
            child = subprocess.Popen(
                [*COMMAND, ",".join(parts), str(processes), str(self._folder)],
                stdout=output, stderr=output, start_new_session=True, preexec_fn=kill_with_parent,
            )  # fmt: skip
        try:
            while child.poll() is None and time.monotonic() < self._end:
                waiting = [part for part in parts if not (self._folder / f"{part}.done").exists()]
                self._progress(waiting[0] if waiting else parts[-1])
                time.sleep(POLL_SECONDS)
            if child.poll() is None:
                return "not done in time (--minutes)"
        finally:
            _end_child(child)
        lines = log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        return f"exit status {child.returncode}: " + " ".join(line.strip() for line in lines)

    def _read_results(self, part: str) -> list[CheckResult]:
        path = self._folder / f"{part}.json"
        lines = path.read_text().splitlines() if path.exists() else []
        return [CheckResult.from_json(json.loads(line)) for line in lines]


def _end_child(child: subprocess.Popen[bytes]) -> None:
    """End a child process with its ranks: they die with the launcher that started them."""
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(KILL_SECONDS)
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
