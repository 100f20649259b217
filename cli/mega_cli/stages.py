"""Stages of a workflow at work: which must run and why, running one, and the state that outlives the process.

The state is a readable JSON file, replaced atomically at every change. It keeps of each stage what its last attempt ran
with (command, settings, code, input files) and what came out, files as content digests.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from mega_cli.fingerprint import Digests, FileRecord, code_digest, expand
from mega_cli.settings import Settings, Verdict, named_files, settings_change, settings_of
from mega_cli.workflow_config import Stage, Workflow
from mega_common import files
from mega_common.config import Config
from mega_common.errors import MegaError
from mega_common.files import locked_file, write_json
from mega_common.log import logger
from mega_common.parsing import parse_json

# -P: a file of the user's beside the workflow must not be imported in place of a library.
MEGA = (sys.executable, "-P", "-m", "mega_cli.main")

REFUSING = ("data", "ckpt")  # commands that write over nothing, not even over what they finished before a kill
RUN_FILES = {"checkpoints", "assets", "metrics.jsonl", "run.yaml", "logs", "tensorboard", "wandb", ".lock"}


class WorkflowError(MegaError):
    """A workflow that cannot go on: an input is missing, a stage did not make what it promised, another run holds it."""


class Attempt(Config):
    """The last attempt at a stage. `inputs` and `outputs` map file names to SHA-256; times in seconds.

    `command` is the stage's `identity`; `settings` is all that its run.yaml says, where it has one, and `named` the files
    that a training finds there; None: of a version that did not keep them.
    """

    status: Literal["running", "done", "failed", "interrupted"]
    command: list[str]
    settings: dict[str, Any] | None = None
    code: str
    inputs: dict[str, str]
    named: dict[str, str] | None = None
    outputs: dict[str, str] = {}
    started: str
    seconds: float = 0.0
    exit_status: int | None = None


class State(Config):
    """What the state file holds: the last attempt of each stage, and the files read whole so far."""

    version: Literal[1] = 1
    stages: dict[str, Attempt] = {}
    files: dict[str, FileRecord] = {}


class Runner:
    """Runs the stages of one workflow in `base`, the folder that its paths are relative to.

    With `verify`, no file is taken for unchanged by its size and time.
    """

    def __init__(
        self, workflow: Workflow, base: Path, state_path: Path, *, verify: bool = False, program: Sequence[str] = MEGA
    ) -> None:
        self.workflow, self.base, self.state_path, self.program = workflow, base, state_path, program
        state = load_state(state_path)
        self.attempts = dict(state.stages)
        self.digests = Digests(base, {} if verify else state.files)
        self._settings = functools.cache(lambda name: settings_of(workflow.stages[name], base))

    def save(self) -> None:
        """Replace the state file."""
        stages = {name: attempt for name, attempt in self.attempts.items() if name in self.workflow.stages}
        write_json(self.state_path, State(stages=stages, files=self.digests.records).model_dump())

    def judge(self, name: str, *, force: bool = False) -> Verdict | None:
        """Whether a stage must run, when all stages that it needs are done; None when it is up to date.

        What was left behind is set aside when it is wrong: made from other inputs or settings, or damaged. Otherwise a
        stage goes on with it by its command's own means.

        Raises:
            WorkflowError: when one of its declared inputs is not there.
            ConfigError: when its run.yaml cannot be used.
        """
        stage, last = self.workflow.stages[name], self.attempts.get(name)
        if force:
            return Verdict("forced", start_over=True)
        if last is None:
            return Verdict("never run", start_over=False)
        changed = self._change(name, last)
        if last.status != "done":
            what = {"running": "was killed", "failed": f"failed with status {last.exit_status}"}
            reason = what.get(last.status, "was interrupted")
            blocked = last.status != "failed" and stage.command[0] in REFUSING
            wrong = changed is not None and changed.start_over
            return Verdict(f"{reason}, {changed.reason}" if changed else reason, start_over=wrong or blocked)
        if changed is None and code_digest(stage.command[0]) != last.code:
            return Verdict("the code changed", start_over=stage.run != "train")
        return changed or self._damage(stage, last)

    def _change(self, name: str, last: Attempt) -> Verdict | None:
        """What differs from what the last attempt ran with, and whether that makes wrong what it left behind."""
        stage = self.workflow.stages[name]
        if stage.identity != last.command:
            return Verdict("its command changed", start_over=True)
        if reason := difference("input", last.inputs, self.inputs(stage)):
            return Verdict(reason, start_over=True)
        if last.named is not None and (reason := difference("input", last.named, self.named(name))):
            return Verdict(reason, start_over=True)
        return settings_change(stage, last.settings, self._settings(name), done=last.status == "done")

    def _damage(self, stage: Stage, last: Attempt) -> Verdict | None:
        """What became of the outputs. Training makes again what is gone, and may have gone on by hand."""
        now = self.digests.of(stage.outputs)
        if stage.run != "train":
            reason = difference("output", last.outputs, now)
            return Verdict(reason, start_over=True) if reason else None
        reason = difference("output", last.outputs, {name: now[name] for name in last.outputs if name in now})
        damaged = any(now.get(name, digest) != digest for name, digest in last.outputs.items())
        return Verdict(reason, start_over=damaged) if reason else None

    def inputs(self, stage: Stage) -> dict[str, str]:
        """Digests of all that a stage reads."""
        for pattern in stage.inputs:
            if not any(expand(self.base, [pattern])):
                raise WorkflowError(f"{self.base / pattern}: a stage reads this, but there is no such file")
        made = [output for need in stage.needs for output in self.workflow.stages[need].outputs]
        return self.digests.of([*stage.inputs, *stage.read_arguments(self.base), *made])

    def named(self, name: str) -> dict[str, str]:
        """Digests of what the run.yaml of a training names, as far as it lies here."""
        stage, settings = self.workflow.stages[name], self._settings(name)
        files = named_files(settings) if stage.run == "train" and settings is not None else []
        return self.digests.of(stage.found(self.base, files))

    def attempt(self, name: str, verdict: Verdict, lock: int) -> int:
        """Run a stage and return the exit status to end with: 0 when it is done.

        Raises:
            WorkflowError: when the command ended well but an output is missing.
        """
        stage = self.workflow.stages[name]
        if verdict.start_over and stage.on_change == "start-over":
            self._set_aside(name)
        now, start = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        fresh = Attempt(
            status="running", command=stage.identity, settings=self._settings(name),
            code=code_digest(stage.command[0]), inputs=self.inputs(stage), named=self.named(name), started=now,
        )  # fmt: skip
        self._record(name, fresh)
        logger.info("%s: mega %s", name, " ".join(stage.command))
        status, stopped_by = run_child([*self.program, *stage.command], self.base, lock)
        ended = {"seconds": round(time.monotonic() - start, 3), "exit_status": status}
        if stopped_by is not None or status == os.EX_TEMPFAIL:
            self._record(name, fresh.model_copy(update={"status": "interrupted", **ended}))
            logger.info("%s: interrupted; run the workflow again to go on", name)
            return status if stopped_by is None else 128 + stopped_by
        missing = [output for output in stage.outputs if not any(expand(self.base, [output]))]
        if status == 0 and not missing:
            outputs = self.digests.of(stage.outputs)
            self._record(name, fresh.model_copy(update={"status": "done", "outputs": outputs, **ended}))
            return 0
        self._record(name, fresh.model_copy(update={"status": "failed", **ended}))
        if status == 0:
            raise WorkflowError(f"stage {name!r} ended with status 0 but did not make {', '.join(missing)}")
        logger.error("%s: failed with status %d; run the workflow again to take it up", name, status)
        return status

    def _record(self, name: str, attempt: Attempt) -> None:
        self.attempts[name] = attempt
        self.save()

    def _set_aside(self, name: str) -> None:
        """Move away what the stage made: it starts from nothing, and nothing is lost.

        Raises:
            MegaError: when another process trains in the folder of its run, or its checkpoints cannot be renamed.
        """
        run = self._begun(name)
        paths = [*(run_files(run, self.base) if run else ()), *self._made(name)]
        folder = self.base / run["output"] if run else None
        with files.locked(folder) if folder is not None and folder.is_dir() else contextlib.nullcontext():
            for path in paths:
                set_aside(path)

    def _made(self, name: str) -> Iterator[Path]:
        """The outputs of a stage; with each file of a token data set that whole set."""
        for pattern in self.workflow.stages[name].outputs:
            for path in [self.base / pattern] if (self.base / pattern).exists() else self.base.glob(pattern):
                yield path
                if path.suffix in (".bin", ".idx"):
                    yield from data_set_files(path.with_suffix(""))

    def _begun(self, name: str) -> Settings | None:
        """The settings of the run that a stage begins; None for one that goes on with what a stage before it trained."""
        folders = {other: self._trained_in(other) for other in self.workflow.order(name)}
        folder, now = folders.pop(name), self._settings(name)
        begins = now is not None and now["output"] == folder and folder not in folders.values()
        return now if begins else None

    def _trained_in(self, name: str) -> str | None:
        last = self.attempts.get(name)
        if last is None or last.settings is None or last.command[0] != "train":
            return None
        return str(last.settings["output"])


def set_aside(path: Path) -> None:
    """Move what is there to the first free NAME.old-N."""
    if not path.exists():
        return
    number = 1
    while (old := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    path.rename(old)
    logger.info("%s: set aside as %s", path, old.name)


def run_files(settings: Settings, base: Path) -> Iterator[Path]:
    """What a new run would go on from or take over: the whole folder of the old one, if there is nothing else in it.

    Raises:
        WorkflowError: when the checkpoints are where nothing can be renamed.
    """
    folder, kept = base / settings["output"], settings["checkpoint"]["path"]
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    yield from (
        [folder] if names <= RUN_FILES else [folder / part for part in ("checkpoints", "assets", "metrics.jsonl")]
    )
    if kept is not None and "://" in kept:
        raise WorkflowError(f"{kept}: checkpoints there cannot be set aside", hint="give another checkpoint.path")
    if kept is not None:
        yield base / kept


def data_set_files(prefix: Path) -> list[Path]:
    """The files of a token data set, there or not."""
    from mega_data.files.indexed import bin_path, idx_path, names_beside
    from mega_data.files.info import info_path, quarantine_path

    own = [path_of(prefix) for path_of in (bin_path, idx_path, info_path, quarantine_path)]
    return [*own, *names_beside(prefix).values()]


def load_state(path: Path) -> State:
    """The state as it was saved, or an empty one.

    Raises:
        WorkflowError: when the file is not a state.
    """
    if not path.exists():
        return State()
    try:
        return State.parse(parse_json(path.read_bytes()), source=str(path))
    except (ValueError, MegaError) as error:
        raise WorkflowError(
            f"{path}: not the state of a workflow ({error})", hint="move it away: every stage will run again"
        ) from None


def difference(what: str, before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """The first file that differs and how, and the number of others."""
    found = [f"{what} {name} is new" for name in now if name not in before]
    found += [f"{what} {name} is gone" for name in before if name not in now]
    found += [f"{what} {name} changed" for name in now if name in before and now[name] != before[name]]
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return found[0] + others if found else None


def locked(path: Path) -> contextlib.AbstractContextManager[int]:
    """Hold the lock file of a workflow, and give its descriptor, which each stage inherits.

    Raises:
        WorkflowError: when another process holds it, naming it.
    """
    told = "this workflow is being run already, by {}, or by a stage of it"
    hint = f"the lock is {path}; it ends with its holder"
    return locked_file(path, lambda holder: WorkflowError(told.format(holder), hint=hint))


def run_child(command: list[str], folder: Path, lock: int) -> tuple[int, int | None]:
    """Run a stage's process and return its exit status, and the signal that stopped the workflow meanwhile if any.

    The child has a process group of its own, so each signal reaches it once, from here, and as it would have without a
    workflow: what a terminal sends goes to the group, a SIGTERM to the one process. It also inherits the lock: should
    this process be killed, nobody starts the same stage beside a child that still writes.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int) -> None:
        if child is not None and child.poll() is None:
            (os.kill if number == signal.SIGTERM else os.killpg)(child.pid, number)

    def handle(number: int, _: FrameType | None) -> None:
        received.append(number)
        pass_on(number)

    with _handling(handle):
        child = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, process_group=0, pass_fds=[lock])
        for number in received:
            pass_on(number)
        status = child.wait()
    return (status if status >= 0 else 128 - status), (received[0] if received else None)


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
