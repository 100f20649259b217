from __future__ import annotations

from pathlib import Path

from parity.cases import case
from parity.journal import Journal

from mega_trainer.verify.case_comparison import CaseVerdict


def test_verdicts_are_kept_over_a_kill_and_forgotten_with_the_sources_they_are_of(tmp_path: Path) -> None:
    sources, path = tmp_path / "sources", tmp_path / "build" / "parity.jsonl"
    sources.mkdir()
    (sources / "one.py").write_text("1")
    one, other, third = (case("dense", 2, parallel={"tp": 2}, micro=micro) for micro in (2, 4, 8))
    found = [CaseVerdict(one, {"loss": 1e-14, "norm": float("inf")}, []), CaseVerdict(other, {"loss": 0.5}, ["a", "b"])]
    journal = Journal(path, [sources])
    journal.add(found[:1])
    journal.add(found[1:])
    path.write_text(path.read_text() + '\n["cut sho')
    again = Journal(path, [sources])
    assert [one in again, other in again, third in again] == [True, True, False]
    assert [again.verdict(one), again.verdict(other)] == found
    again.add([CaseVerdict(third, {"loss": 0.0}, [])])
    assert third in Journal(path, [sources])
    (sources / "one.py").write_text("2")
    assert one not in Journal(path, [sources])
