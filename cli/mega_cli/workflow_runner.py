"""Execution of workflow stages: judging which must run, running them, and saving the state.

The state is a JSON file, replaced atomically at every change. For each stage it has the command, settings, code, inputs
and outputs of the last attempt; files are recorded by content digest.
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

from mega_cli.file_digests import CachedFileDigest, FileDigests, compute_code_digest, iterate_files_matching_patterns
from mega_cli.workflow_config import (
    FlatSettings,
    StageRerunReason,
    WorkflowConfig,
    WorkflowStage,
    find_settings_rerun_reason,
    list_files_named_by_settings,
    load_stage_settings,
)
from mega_common import atomic_files as files
from mega_common.atomic_files import lock_file_exclusively, write_json_atomically
from mega_common.bounded_parsing import parse_json_text
from mega_common.errors import MegaError
from mega_common.progress_logging import logger
from mega_common.strict_config import StrictConfig

# -P: Python must not import files next to the workflow instead of libraries.
MEGA = (sys.executable, "-P", "-m", "mega_cli.main")

NO_OVERWRITE = ("data", "ckpt")  # commands that do not overwrite outputs, not even those of an attempt that was killed
RUN_FILES = {"checkpoints", "assets", "metrics.jsonl", "run.yaml", "logs", "tensorboard", "wandb", ".lock"}


class WorkflowError(MegaError):
    """Raised if a workflow cannot continue: an input or a stage's output is missing, or another run has the lock."""


class WorkflowStageAttempt(StrictConfig):
    """Record of the last attempt at a workflow stage: status, command, settings, file digests, times and exit status.
    `inputs` and `outputs` map the names of files read and written to SHA-256; times in seconds.

    `command` is the stage's `words_required_unchanged_to_resume`, `settings` are all settings of its run.yaml, and
    `named` are the files that the run.yaml of a training names. None: saved by a version without that record.
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


class WorkflowState(StrictConfig):
    """Content of a workflow's state file: the last attempt of each stage, and digests of the files read so far."""

    version: Literal[1] = 1
    stages: dict[str, WorkflowStageAttempt] = {}
    files: dict[str, CachedFileDigest] = {}


class WorkflowRunner:
    """Executor of the stages of one workflow; `base` is the folder that its paths are relative to.

    With `verify`, files of unchanged size and modification time are read again too.
    """

    def __init__(
        self,
        workflow: WorkflowConfig,
        base: Path,
        state_path: Path,
        *,
        verify: bool = False,
        program: Sequence[str] = MEGA,
    ) -> None:
        self.workflow, self.base, self.state_path, self.program = workflow, base, state_path, program
        state = load_workflow_state(state_path)
        self.attempts = dict(state.stages)
        self.digests = FileDigests(base, {} if verify else state.files)
        self._settings = functools.cache(lambda name: load_stage_settings(workflow.stages[name], base))

    def save_state(self) -> None:
        """Write the workflow's state file, which replaces the earlier one atomically."""
        stages = {name: attempt for name, attempt in self.attempts.items() if name in self.workflow.stages}
        write_json_atomically(self.state_path, WorkflowState(stages=stages, files=self.digests.records).model_dump())

    def find_stage_rerun_reason(self, name: str, *, force: bool = False) -> StageRerunReason | None:
        """Return why a stage must run when all stages that it needs are done, or None if the stage is up to date.

        With `start_over`, existing outputs are invalid (made from other inputs or settings, or damaged) and are moved
        away first. Otherwise the command of the stage resumes from them.

        Raises:
            WorkflowError: if one of its declared inputs is missing.
            ConfigError: if its run.yaml is invalid.
        """
        stage, last = self.workflow.stages[name], self.attempts.get(name)
        if force:
            return StageRerunReason("forced", start_over=True)
        if last is None:
            return StageRerunReason("never run", start_over=False)
        changed = self._find_change(name, last)
        if last.status != "done":
            reasons = {"running": "was killed", "failed": f"failed with status {last.exit_status}"}
            reason = reasons.get(last.status, "was interrupted")
            blocked = last.status != "failed" and stage.command_arguments[0] in NO_OVERWRITE
            invalid = changed is not None and changed.start_over
            return StageRerunReason(f"{reason}, {changed.reason}" if changed else reason, start_over=invalid or blocked)
        if changed is None and compute_code_digest(stage.command_arguments[0]) != last.code:
            return StageRerunReason("the code changed", start_over=stage.run != "train")
        return changed or self._find_damage(stage, last)

    def _find_change(self, name: str, last: WorkflowStageAttempt) -> StageRerunReason | None:
        """Return a difference to the last attempt, and if it invalidates the outputs; None without one."""
        stage = self.workflow.stages[name]
        if stage.words_required_unchanged_to_resume != last.command:
            return StageRerunReason("its command changed", start_over=True)
        if reason := describe_digest_difference("input", last.inputs, self.hash_stage_inputs(stage)):
            return StageRerunReason(reason, start_over=True)
        if last.named is not None and (
            reason := describe_digest_difference("input", last.named, self.hash_files_of_run_yaml(name))
        ):
            return StageRerunReason(reason, start_over=True)
        return find_settings_rerun_reason(stage, last.settings, self._settings(name), done=last.status == "done")

    def _find_damage(self, stage: WorkflowStage, last: WorkflowStageAttempt) -> StageRerunReason | None:
        """Return the damage to the outputs, if any. Training recreates missing files, and may have been continued by hand."""
        now = self.digests.hash_matching_files(stage.outputs)
        if stage.run != "train":
            reason = describe_digest_difference("output", last.outputs, now)
            return StageRerunReason(reason, start_over=True) if reason else None
        reason = describe_digest_difference(
            "output", last.outputs, {name: now[name] for name in last.outputs if name in now}
        )
        damaged = any(now.get(name, digest) != digest for name, digest in last.outputs.items())
        return StageRerunReason(reason, start_over=damaged) if reason else None

    def hash_stage_inputs(self, stage: WorkflowStage) -> dict[str, str]:
        """Return {file name: SHA-256} of all files that a stage reads; WorkflowError if a declared input is missing."""
        for pattern in stage.inputs:
            if not any(iterate_files_matching_patterns(self.base, [pattern])):
                raise WorkflowError(
                    f"{self.base / pattern}: the input of a stage does not exist",
                    hint="correct `inputs` in the workflow, or add the stage that writes it to `needs`",
                )
        needed = [output for need in stage.needs for output in self.workflow.stages[need].outputs]
        return self.digests.hash_matching_files([*stage.inputs, *stage.existing_file_arguments(self.base), *needed])

    def hash_files_of_run_yaml(self, name: str) -> dict[str, str]:
        """Return {file name: SHA-256} of local files that the run.yaml of a training stage refers to.
        The stage is `name`; the result is empty for other stages.
        """
        stage, settings = self.workflow.stages[name], self._settings(name)
        files = list_files_named_by_settings(settings) if stage.run == "train" and settings is not None else []
        return self.digests.hash_matching_files(stage.existing_inputs(self.base, files))

    def attempt_stage(self, name: str, verdict: StageRerunReason, lock: int) -> int:
        """Run a workflow stage's command, record the attempt in the state file, and return the exit status, 0 if done.
        Outputs that are invalid are renamed first, if `verdict` starts the stage over. `lock` is a file descriptor that
        the process inherits.

        Raises:
            WorkflowError: if the command succeeded but an output is missing.
        """
        stage = self.workflow.stages[name]
        if verdict.start_over and stage.on_change == "start-over":
            self._set_aside(name)
        now, start = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        fresh = WorkflowStageAttempt(
            status="running", command=stage.words_required_unchanged_to_resume, settings=self._settings(name),
            code=compute_code_digest(stage.command_arguments[0]), inputs=self.hash_stage_inputs(stage), named=self.hash_files_of_run_yaml(name), started=now,
        )  # fmt: skip
        self._record(name, fresh)
        logger.info("%s: mega %s", name, " ".join(stage.command_arguments))
        status, stopped_by = run_stage_process([*self.program, *stage.command_arguments], self.base, lock)
        ended = {"seconds": round(time.monotonic() - start, 3), "exit_status": status}
        if stopped_by is not None or status == os.EX_TEMPFAIL:
            self._record(name, fresh.model_copy(update={"status": "interrupted", **ended}))
            logger.info("%s: interrupted; run the workflow again to resume", name)
            return status if stopped_by is None else 128 + stopped_by
        missing = [output for output in stage.outputs if not any(iterate_files_matching_patterns(self.base, [output]))]
        if status == 0 and not missing:
            outputs = self.digests.hash_matching_files(stage.outputs)
            self._record(name, fresh.model_copy(update={"status": "done", "outputs": outputs, **ended}))
            return 0
        self._record(name, fresh.model_copy(update={"status": "failed", **ended}))
        if status == 0:
            raise WorkflowError(
                f"stage {name!r} succeeded, but did not write its output {', '.join(missing)}",
                hint="correct `outputs` of the stage in the workflow",
            )
        logger.error("%s: failed with status %d; after a fix, run the workflow again to resume", name, status)
        return status

    def _record(self, name: str, attempt: WorkflowStageAttempt) -> None:
        self.attempts[name] = attempt
        self.save_state()

    def _set_aside(self, name: str) -> None:
        """Rename the outputs of the stage, so that it starts over without loss of data.

        Raises:
            MegaError: if another process trains in the folder of its run, or its checkpoints cannot be renamed.
        """
        run = self._new_run_settings(name)
        paths = [*(find_previous_run_files(run, self.base) if run else ()), *self._stage_outputs(name)]
        folder = self.base / run["output"] if run else None
        with files.lock_folder(folder) if folder is not None and folder.is_dir() else contextlib.nullcontext():
            for path in paths:
                rename_to_numbered_backup(path)

    def _stage_outputs(self, name: str) -> Iterator[Path]:
        """Yield the outputs of a stage; for a file of a token data set, all files of the set."""
        for pattern in self.workflow.stages[name].outputs:
            for path in [self.base / pattern] if (self.base / pattern).exists() else self.base.glob(pattern):
                yield path
                if path.suffix in (".bin", ".idx"):
                    from mega_data.token_files.dataset_info import list_dataset_files

                    yield from list_dataset_files(path.with_suffix(""))

    def _new_run_settings(self, name: str) -> FlatSettings | None:
        """Return the settings of the run that a stage starts, or None if it continues the run of an earlier stage."""
        folders = {other: self._trained_in(other) for other in self.workflow.ordered_stages(name)}
        folder, now = folders.pop(name), self._settings(name)
        starts_run = now is not None and now["output"] == folder and folder not in folders.values()
        return now if starts_run else None

    def _trained_in(self, name: str) -> str | None:
        last = self.attempts.get(name)
        if last is None or last.settings is None or last.command[0] != "train":
            return None
        return str(last.settings["output"])


def rename_to_numbered_backup(path: Path) -> None:
    """Rename a path to the first free NAME.old-N in its folder, if the path exists."""
    if not path.exists():
        return
    number = 1
    while (old := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    path.rename(old)
    logger.info("%s: moved to %s", path, old.name)


def find_previous_run_files(settings: FlatSettings, base: Path) -> Iterator[Path]:
    """Yield the paths that a new training run with these settings would resume from or overwrite.
    They are checkpoints and logs, or the whole run folder if it has no other files.

    Raises:
        WorkflowError: if the checkpoints are in an object store, which cannot rename.
    """
    folder, kept = base / settings["output"], settings["checkpoint"]["path"]
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    yield from (
        [folder] if names <= RUN_FILES else [folder / part for part in ("checkpoints", "assets", "metrics.jsonl")]
    )
    if kept is not None and "://" in kept:
        raise WorkflowError(
            f"{kept}: the checkpoints of the earlier run cannot be moved away in an object store",
            hint="choose another checkpoint.path",
        )
    if kept is not None:
        yield base / kept


def load_workflow_state(path: Path) -> WorkflowState:
    """Return the workflow state saved in this file, or an empty one if the file does not exist.

    Raises:
        WorkflowError: if the file is not a valid state.
    """
    if not path.exists():
        return WorkflowState()
    try:
        return WorkflowState.parse(parse_json_text(path.read_bytes()), source=str(path))
    except (ValueError, MegaError) as error:
        raise WorkflowError(
            f"{path}: invalid state file of a workflow ({error})", hint="delete or move it; then all stages run again"
        ) from None


def describe_digest_difference(what: str, before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Return the first new, missing or changed file of two {file name: digest} mappings as text; None if equal.
    The number of further differences is included. `what` names the kind of file in the text.
    """
    found = [f"{what} {name} is new" for name in now if name not in before]
    found += [f"{what} {name} is gone" for name in before if name not in now]
    found += [f"{what} {name} changed" for name in now if name in before and now[name] != before[name]]
    others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return found[0] + others if found else None


def hold_workflow_lock(path: Path) -> contextlib.AbstractContextManager[int]:
    """Return a context manager that holds a workflow's lock file and yields its file descriptor.
    Processes of stages inherit the descriptor.

    Raises:
        WorkflowError: if another process holds it.
    """
    message = "the workflow is already running: {} or one of its stages holds the lock"
    hint = f"wait until it exits, or stop it; the lock file is {path}"
    return lock_file_exclusively(path, lambda holder: WorkflowError(message.format(holder), hint=hint))


def run_stage_process(command: list[str], folder: Path, lock: int) -> tuple[int, int | None]:
    """Run a workflow stage's command in `folder`; return its exit status and the signal that stopped the workflow.
    The signal is None if none was received. The child has its own process group and receives each signal once,
    forwarded from here: signals of a terminal go to the group, SIGTERM to the process. The child inherits the lock: if
    this process is killed, no other process can start the same stage while the child still writes.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def forward_signal(number: int) -> None:
        if child is not None and child.poll() is None:
            (os.kill if number == signal.SIGTERM else os.killpg)(child.pid, number)

    def handle_signal(number: int, _: FrameType | None) -> None:
        received.append(number)
        forward_signal(number)

    with handle_stop_signals(handle_signal):
        child = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, process_group=0, pass_fds=[lock])
        for number in received:
            forward_signal(number)
        status = child.wait()
    return (status if status >= 0 else 128 - status), (received[0] if received else None)


@contextlib.contextmanager
def handle_stop_signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Context manager that calls `handler` for SIGINT, SIGTERM and SIGHUP in its block."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
