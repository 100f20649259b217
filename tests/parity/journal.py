"""Verdicts that outlive a run of the suite: one that was killed goes on behind them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

from mega_trainer.verify.case_comparison import CaseVerdict
from mega_trainer.verify.layout_case import LayoutCase


class Journal:
    """Verdicts of one state of the sources, in a file of JSON lines; those of another state are forgotten.

    Args:
        path: of the file. A line that a kill has cut short is no verdict.
        sources: folders whose Python files the verdicts depend on.
    """

    def __init__(self, path: Path, sources: Sequence[Path]) -> None:
        self._path, state = path, _state(sources)
        self._held: dict[str, tuple[dict[str, float], list[str], str]] = {}
        first, *lines = path.read_text().splitlines() if path.exists() else [""]
        if first != state:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{state}\n")
            return
        for line in lines:
            try:
                key, *verdict = json.loads(line)
                self._held[key] = tuple(verdict)
            except ValueError:
                continue

    def __contains__(self, case: LayoutCase) -> bool:
        return _key(case) in self._held

    def verdict(self, case: LayoutCase) -> CaseVerdict:
        """What was found of it."""
        return CaseVerdict(case, *self._held[_key(case)])

    def add(self, verdicts: Iterable[CaseVerdict]) -> None:
        """Keep them."""
        with self._path.open("a") as stream:
            for one in verdicts:
                key = _key(one.case)
                self._held[key] = one.errors, one.missing, one.failure
                stream.write("\n" + json.dumps([key, *self._held[key]]))


def _key(case: LayoutCase) -> str:
    return sha256(json.dumps([case.raw, case.ranks, case.steps, case.closed], sort_keys=True).encode()).hexdigest()


def _state(sources: Sequence[Path]) -> str:
    files = sorted(path for folder in sources for path in folder.rglob("*.py"))
    return sha256(b"".join(str(path).encode() + path.read_bytes() for path in files)).hexdigest()
