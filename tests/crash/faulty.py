"""A rank of `mega train` that meets with faults: `python faulty.py RUN ...`, started by torchrun.

FAULTS, for example `0:1:5:kill 1:0:8:hang`: in which attempt of the launcher's, on which rank, in which step, and what:
`kill`, `node` (with its launcher), `stop`, `raise`, `hang` in a forward, or `slow` from then on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

from mega_cli.main import main
from mega_trainer import train
from mega_trainer.model.decoder import Decoder


def faults(text: str, attempt: str, rank: str) -> dict[int, str]:
    """Those of this rank, by step."""
    told = (fault.split(":") for fault in text.split())
    return {int(step): kind for when, who, step, kind in told if (when, who) == (attempt, rank)}


def plant(kinds: dict[int, str]) -> None:
    """Have this process meet with them."""
    steps, step, whole, at = train.steps, train.train_step, Decoder.whole, [0]

    def noted(job: train.Job) -> str | None:
        def faulty(*args: Any, **more: Any) -> Any:
            at[0] = job.state.step + 1
            match kinds.get(at[0]):
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "node":
                    os.kill(os.getppid(), signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "raise":
                    raise ValueError("planted")
            return step(*args, **more)

        train.train_step = faulty
        return steps(job)

    def forward(model: Decoder, *args: Any) -> Any:
        if kinds.get(at[0]) == "hang":
            time.sleep(1000)
        if any(kind == "slow" and begin <= at[0] for begin, kind in kinds.items()):
            time.sleep(0.1)
        return whole(model, *args)

    train.steps = noted
    Decoder.whole = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    plant(faults(os.environ.get("FAULTS", ""), os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]))
    main(["train", *sys.argv[1:]])
