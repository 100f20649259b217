"""A rank of `mega train` that meets with faults: `python faulty.py RUN ...`, started by torchrun.

FAULTS, for example `0:1:5:kill 1:0:8:hang`: in which start of the run, on which rank, in which step, and what: `kill`, `node`
(with its launcher), `stop`, `raise`, `hang` in a forward, or `slow` from then on.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from mega_cli.main import main
from mega_trainer.model.decoder import Decoder
from mega_trainer.run import training_loop, training_run
from mega_trainer.run.training_context import TrainingContext


def faults(text: str, run: Path, rank: str) -> dict[int, str]:
    """Those of this rank in the coming start, by step."""
    starts = Path(yaml.safe_load(run.read_text())["output"]) / "starts.jsonl"
    coming = str(len(starts.read_text().splitlines()) if starts.exists() else 0)
    told = (fault.split(":") for fault in text.split())
    return {int(step): kind for when, who, step, kind in told if (when, who) == (coming, rank)}


def plant(kinds: dict[int, str]) -> None:
    """Have this process meet with them."""
    steps, step, whole, at = training_run.run_training_loop, training_loop.train_step, Decoder.run_stage, [0]

    def noted(job: TrainingContext) -> str | None:
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

        training_loop.train_step = faulty
        return steps(job)

    def forward(model: Decoder, *args: Any) -> Any:
        if kinds.get(at[0]) == "hang":
            time.sleep(1000)
        if any(kind == "slow" and begin <= at[0] for begin, kind in kinds.items()):
            time.sleep(0.1)
        return whole(model, *args)

    training_run.run_training_loop = noted
    Decoder.run_stage = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    plant(faults(os.environ.get("FAULTS", ""), Path(sys.argv[1]), os.environ["RANK"]))
    main(["train", *sys.argv[1:]])
