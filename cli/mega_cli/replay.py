"""`mega train --replay` and `--reproduce`: one step run again and compared with its record."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mega_ckpt.store import Location
    from mega_trainer.config.run_config import RunConfig

DIFFERENT = 1  # exit status, as of `cmp`
StartTraining = Callable[["RunConfig", Path, int | None], int]


def replay_step(config: RunConfig, step: int, nproc: int | None, start: StartTraining) -> int:
    """Re-run the steps up to `step` from the latest checkpoint before it; return exit status 1 if the metrics changed.
    The metrics are compared with the recorded ones.
    """
    from mega_trainer.job.step_replay import make_replay_run

    again, checkpoint = make_replay_run(config, step)
    return _run_and_compare(again, checkpoint, Path(config.output), nproc, start)


def reproduce_step(checkpoint: str, overrides: list[str], nproc: int | None, start: StartTraining) -> int:
    """Re-run the step after a checkpoint with its saved settings; return exit status 1 if the recorded metrics differ."""
    from mega_ckpt.store import parse_location
    from mega_trainer.job.step_replay import make_reproduction_run

    found = parse_location(checkpoint)
    again = make_reproduction_run(found, overrides)
    run = found.parent.parent
    recorded = run if isinstance(run, Path) and (run / "metrics.jsonl").exists() else Path(again.output).parent
    return _run_and_compare(again, found, recorded, nproc, start)


def _run_and_compare(
    again: RunConfig, checkpoint: Location | None, recorded: Path, nproc: int | None, start: StartTraining
) -> int:
    from mega_ckpt.store import Checkpoint
    from mega_trainer.job.step_replay import compare_replayed_steps, read_recorded_steps, write_replay_yaml

    is_first_rank, saved = os.environ.get("RANK", "0") == "0", {}
    if checkpoint is not None:
        saved = dict(Checkpoint.open_folder(checkpoint).manifest.provenance)
    nproc = nproc or saved.get("ranks")  # type: ignore[assignment]
    if is_first_rank:
        print(f"from {checkpoint or 'the first step'}")
        for line in _find_differences(again, checkpoint, saved, nproc) if checkpoint else ():
            print(line)
        path = write_replay_yaml(again)
    else:
        path = Path(again.output) / "replay.yaml"
    if status := start(again, path, nproc):
        return status
    if not is_first_rank:
        return 0
    found = list(compare_replayed_steps(read_recorded_steps(recorded), read_recorded_steps(Path(again.output))))
    print("\n".join(line for line, _ in found))
    return 0 if all(same for _, same in found) else DIFFERENT


def _find_differences(again: RunConfig, checkpoint: Location, saved: Mapping[str, Any], nproc: int | None) -> list[str]:
    """Return the differences in environment and data since the save; the run itself logs differences in settings."""
    from mega_trainer.data.data_check import find_run_tokenizer
    from mega_trainer.job.resume import inherit_data_order, read_saved_state
    from mega_trainer.job.step_replay import collect_provenance, diff_setting_values
    from mega_trainer.run.build_components import load_datasets

    if "data" not in saved:
        return ["differs: unknown, because the checkpoint has no record of its environment"]
    ranks = int(os.environ.get("WORLD_SIZE") or nproc or again.minimum_world_size)
    tokenizer = find_run_tokenizer(again.data, again.model.vocab_size)
    data = load_datasets(inherit_data_order(again, read_saved_state(checkpoint)), tokenizer)[0].fingerprint
    found = [f"differs: {line}" for line in diff_setting_values(saved, collect_provenance(ranks, data))]
    return found or ["versions, commit, machine, ranks and data are the same"]
