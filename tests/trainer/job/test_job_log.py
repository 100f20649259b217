"""What ranks tell of themselves lies in one place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed import HashStore

from mega_common.errors import ConfigError, Interrupted
from mega_trainer.job.faults import faults_told
from mega_trainer.job.job_log import ERRORS, RANKS, errors_recorded
from mega_trainer.job.watch import Watch
from mega_trainer.pages.run_log import whole_lines


def test_what_ends_a_rank_is_recorded_with_its_place_but_not_what_it_was_asked_to(tmp_path: Path) -> None:
    def fail(error: Exception) -> None:
        with (
            pytest.raises(type(error)),
            errors_recorded(tmp_path, 3),
            faults_told(3, lambda: "before the first step", NotImplemented),
            faults_told(3, lambda: "step 7", NotImplemented),
        ):
            raise error

    for error in (Interrupted("SIGINT"), ConfigError("a: wrong", hint="b"), ZeroDivisionError("c")):
        fail(error)
    told, ours = whole_lines(tmp_path / ERRORS, "time")
    assert (told["rank"], told["error"], told["stack"]) == (3, "a: wrong\n  b", [])
    assert ours["error"].startswith("ZeroDivisionError: c\n  rank 3 on ")
    assert ours["error"].endswith(", step 7")
    assert ours["stack"][-1].endswith(" fail")


def test_the_first_rank_tells_how_all_are(tmp_path: Path) -> None:
    watch = Watch(HashStore(), 0, 1, lambda: 5, lambda: "forward", 60.0, tmp_path)
    watch._sign()
    assert not watch._judge()
    (sign,) = json.loads((tmp_path / RANKS).read_text())
    assert {key: sign[key] for key in ("rank", "step", "phase")} == {"rank": 0, "step": 5, "phase": ""}
