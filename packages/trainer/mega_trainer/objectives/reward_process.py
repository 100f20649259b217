"""Rewards of sampled answers by a function of the user's, which runs in a separate process with a time limit.

The function has the arguments (prompt: str, answer: str, record: dict) and returns a number. The processes exchange JSON
lines; what the function prints goes to standard error. `python -m mega_trainer.objectives.reward_process SOURCE NAME` is the
worker, where SOURCE is a file or an installed module. No torch.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import runpy
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import IO, Any

from mega_common.errors import ConfigError
from mega_common.progress_logging import logger

START_SECONDS = 60.0  # time limit of loading the file


class RewardProcess:
    """Process that computes rewards by a function of the user, restarted after a call over the time limit.
    `spec` names the function, such as `rewards.py:exact` or `package.rewards:exact`; `timeout` is in seconds.

    Raises:
        ConfigError: when the file or module cannot be loaded or does not have the function.
    """

    def __init__(self, spec: str, timeout: float) -> None:
        self._spec, self._timeout = spec, timeout
        self._start_worker()

    def close(self) -> None:
        """End the process that computes rewards."""
        self._worker.kill()
        self._worker.wait()
        for stream in (self._worker.stdin, self._worker.stdout):
            if stream is not None:
                stream.close()

    def compute_reward(self, prompt: str, answer: str, record: Mapping[str, Any]) -> float | None:
        """Return the reward of an answer to a prompt, or None, with a warning, if the reward function fails.
        It fails if it raises an error, returns no finite number or exceeds the time limit.
        """
        request = json.dumps({"prompt": prompt, "answer": answer, "record": record})
        assert self._worker.stdin is not None
        try:
            self._worker.stdin.write(request.encode() + b"\n")
            self._worker.stdin.flush()
            reply = self._read_reply(self._timeout)
        except OSError:
            reply = {"error": "ended its process"}
        if "reward" in reply:
            return float(reply["reward"])
        logger.warning("objective.rewards = %s %s, for the answer %r to %r", self._spec, reply["error"], answer, prompt)
        if reply.get("failed") is None:
            self.close()
            self._start_worker()
        return None

    def _start_worker(self) -> None:
        source, _, name = self._spec.rpartition(":")
        command = [sys.executable, "-m", "mega_trainer.objectives.reward_process", source, name]
        # its own session: Ctrl-C, which ends a run after the step, must not change the step's rewards
        self._worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._rest = b""
        reply = self._read_reply(START_SECONDS)
        if "ready" not in reply:
            self.close()
            raise ConfigError(
                f"objective.rewards = {self._spec} {reply['error']}", hint="correct the file, module or function"
            )

    def _read_reply(self, timeout: float) -> dict[str, Any]:
        """Return the worker's next line, or an error if none arrives within `timeout` seconds or the worker ends."""
        assert self._worker.stdout is not None
        end, descriptor = time.monotonic() + timeout, self._worker.stdout.fileno()
        while b"\n" not in self._rest:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                return {"error": f"gave no result within {timeout:g} s (objective.reward_timeout)"}
            read = os.read(descriptor, 1 << 16)
            if not read:
                return {"error": "ended its process"}
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply


class RewardPool:
    """Several `RewardProcess`es, which divide the calls of a step among them.

    Raises:
        ConfigError: when the file cannot be loaded or does not have the function.
    """

    def __init__(self, spec: str, timeout: float, workers: int) -> None:
        self._processes = [RewardProcess(spec, timeout) for _ in range(workers)]

    def compute_rewards(self, calls: Sequence[tuple[str, str, Mapping[str, Any]]]) -> list[float | None]:
        """Return the reward of each (prompt, answer, record), computed in parallel; None where the function fails.
        See `RewardProcess.compute_reward`.
        """
        free = SimpleQueue[RewardProcess]()
        for process in self._processes:
            free.put(process)

        def compute(call: tuple[str, str, Mapping[str, Any]]) -> float | None:
            process = free.get()
            try:
                return process.compute_reward(*call)
            finally:
                free.put(process)

        with ThreadPoolExecutor(len(self._processes), thread_name_prefix="rewards") as threads:
            return list(threads.map(compute, calls))

    def close(self) -> None:
        """End the processes that compute rewards."""
        for process in self._processes:
            process.close()


def _call_function(function: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to a request: the reward, or the failure of the function."""
    try:
        returned = function(request["prompt"], request["answer"], request["record"])
        if not isinstance(returned, str | bytes) and not hasattr(returned, "__float__"):
            return {"failed": True, "error": f"must return a number, and the function returned {returned!r:.80}"}
        reward = float(returned)
    except Exception as error:  # noqa: BLE001 - the function is the user's
        return {"failed": True, "error": f"raised {type(error).__name__}: {error}"}
    if not math.isfinite(reward):
        return {"failed": True, "error": f"must return a finite number, found {reward}"}
    return {"reward": reward}


def is_module_name(source: str) -> bool:
    """Return whether the source of a reward function is named like a module (`package.rewards`), not a file."""
    return not source.endswith(".py") and all(part.isidentifier() for part in source.split("."))


def _load_function(source: str, name: str) -> Any:
    """Return a function of a file or an installed module; KeyError if it has none of this name."""
    if is_module_name(source):
        return vars(importlib.import_module(source))[name]
    return runpy.run_path(source)[name]


def run_reward_worker(source: str, name: str, requests: IO[str], replies: IO[str]) -> None:
    """Load a reward function, and answer each JSON line of `requests` with its reward in a line of `replies`.
    The first line of `replies` says whether the function was loaded.
    """

    def send(reply: Mapping[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    try:
        function = _load_function(source, name)
    except KeyError:
        send({"error": f"must name a function of {source}, found no {name!r}"})
        return
    except Exception as error:  # noqa: BLE001 - the code is the user's
        send({"error": f"cannot be loaded: {type(error).__name__}: {error}"})
        return
    send({"ready": True})
    for line in requests:
        send(_call_function(function, json.loads(line)))


if __name__ == "__main__":
    own, sys.stdout = sys.stdout, sys.stderr  # output of the function must not mix with replies
    run_reward_worker(sys.argv[1], sys.argv[2], sys.stdin, own)
