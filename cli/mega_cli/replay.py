"""`mega train --replay` and `--reproduce`: a step is made once more, and compared with its record."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mega_ckpt.store import Place
    from mega_trainer.config import RunConfig

DIFFERENT = 1  # exit status, as of `cmp`
Start = Callable[["RunConfig", Path, int | None], int]


def replay(config: RunConfig, step: int, nproc: int | None, start: Start) -> int:
    """Make the steps up to `step` again, from the newest checkpoint before it. Returns the exit status."""
    from mega_trainer.job.repeat import replayed

    again, checkpoint = replayed(config, step)
    return _made(again, checkpoint, Path(config.output), nproc, start)


def reproduce(checkpoint: str, overrides: list[str], nproc: int | None, start: Start) -> int:
    """Make the step after a checkpoint again, by the settings saved in it. Returns the exit status."""
    from mega_ckpt.store import place
    from mega_trainer.job.repeat import reproduced

    found = place(checkpoint)
    again = reproduced(found, overrides)
    run = found.parent.parent
    recorded = run if isinstance(run, Path) and (run / "metrics.jsonl").exists() else Path(again.output).parent
    return _made(again, found, recorded, nproc, start)


def _made(again: RunConfig, checkpoint: Place | None, recorded: Path, nproc: int | None, start: Start) -> int:
    from mega_ckpt.store import Checkpoint
    from mega_trainer.job.repeat import compared, recorded_steps, write_run

    leads, saved = os.environ.get("RANK", "0") == "0", {}
    if checkpoint is not None:
        saved = dict(Checkpoint.open(checkpoint).manifest.provenance)
    nproc = nproc or saved.get("ranks")  # type: ignore[assignment]
    if leads:
        print(f"from {checkpoint or 'the first step'}")
        for line in _differences(again, checkpoint, saved, nproc) if checkpoint else ():
            print(line)
        path = write_run(again)
    else:
        path = Path(again.output) / "replay.yaml"
    if status := start(again, path, nproc):
        return status
    if not leads:
        return 0
    found = list(compared(recorded_steps(recorded), recorded_steps(Path(again.output))))
    print("\n".join(line for line, _ in found))
    return 0 if all(same for _, same in found) else DIFFERENT


def _differences(again: RunConfig, checkpoint: Place, saved: Mapping[str, Any], nproc: int | None) -> list[str]:
    """What differs from when the checkpoint was saved, before anything is trained; of settings the run itself tells."""
    from mega_trainer.build import load_data
    from mega_trainer.job.repeat import differences, provenance
    from mega_trainer.state import continued, state_of
    from mega_trainer.tokens import run_tokenizer

    if "data" not in saved:
        return ["differs: unknown, as it does not tell what it was made with"]
    ranks = int(os.environ.get("WORLD_SIZE") or nproc or again.ranks_asked)
    tokenizer = run_tokenizer(again.data, again.model.vocab_size)
    data = load_data(continued(again, state_of(checkpoint)), tokenizer)[0].fingerprint
    found = [f"differs: {line}" for line in differences(saved, provenance(ranks, data))]
    return found or ["versions, commit, machine, ranks and data are the same"]
