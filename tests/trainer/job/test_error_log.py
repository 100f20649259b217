"""What ranks tell of themselves lies in one place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed import HashStore

from mega_common.errors import ConfigError, TrainingInterrupted
from mega_trainer.job.error_log import ERRORS, RANKS, record_rank_errors
from mega_trainer.job.error_translation import convert_oom_and_lost_rank_errors
from mega_trainer.job.hang_watchdog import HangWatchdog
from mega_trainer.pages.run_log import read_jsonl_records


def test_what_ends_a_rank_is_recorded_with_its_place_but_not_what_it_was_asked_to(tmp_path: Path) -> None:
    def fail(error: Exception) -> None:
        with (
            pytest.raises(type(error)),
            record_rank_errors(tmp_path, 3),
            convert_oom_and_lost_rank_errors(3, lambda: "before the first step", NotImplemented),
            convert_oom_and_lost_rank_errors(3, lambda: "step 7", NotImplemented),
        ):
            raise error

    for error in (TrainingInterrupted("SIGINT"), ConfigError("a: wrong", hint="b"), ZeroDivisionError("c")):
        fail(error)
    told, ours = read_jsonl_records(tmp_path / ERRORS, "time")
    assert (told["rank"], told["error"], told["stack"]) == (3, "a: wrong\n  b", [])
    assert ours["error"].startswith("ZeroDivisionError: c\n  rank 3 on ")
    assert ours["error"].endswith(", step 7")
    assert ours["stack"][-1].endswith(" fail")


def test_the_first_rank_tells_how_all_are(tmp_path: Path) -> None:
    watch = HangWatchdog(HashStore(), 0, 1, lambda: 5, lambda: "forward", 60.0, tmp_path)
    watch._send_heartbeat()
    assert not watch._find_culprits()
    (sign,) = json.loads((tmp_path / RANKS).read_text())
    assert {key: sign[key] for key in ("rank", "step", "phase")} == {"rank": 0, "step": 5, "phase": ""}
