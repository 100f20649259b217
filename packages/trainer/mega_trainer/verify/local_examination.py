"""Examination of cases on processes of this machine, with failures of ranks as verdicts of their case."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

from mega_trainer.launch.function_ranks import RankError, iterate_rank_results
from mega_trainer.verify.case_comparison import (
    ILL_CONDITIONED,
    TOLERANCE,
    CaseVerdict,
    ContextFactory,
    compare_cases_with_one_process,
    merge_rank_findings,
)
from mega_trainer.verify.case_trainer import CPU
from mega_trainer.verify.layout_case import LayoutCase, group_cases_by_rank_count

MOST_CASES = 100  # per start of processes
AMPLIFICATION = 200  # largest error of a layout, as a multiple of the rounding of other micro-batches in one process
CASE_SECONDS = 300.0  # longest time of one case, and of the start of processes


def verify_layout_cases(
    cases: Sequence[LayoutCase],
    *,
    context: ContextFactory = nullcontext,
    seconds: float = CASE_SECONDS,
    most: int = MOST_CASES,
) -> Iterator[CaseVerdict]:
    """Yield the verdict of each case against one process, cases with few ranks first.

    Args:
        context: as for `compare_cases_with_one_process`.
        seconds: time limit of each case; ranks that wait for each other longer have failed.
        most: number of cases per start of processes.
    """
    for group in group_cases_by_rank_count(cases, most):
        done = 0
        while done < len(group):
            rest = group[done:]
            try:
                arguments = (rest, None, CPU, context)
                for found in iterate_rank_results(
                    compare_cases_with_one_process, rest[0].ranks, *arguments, timeout=seconds
                ):
                    yield merge_rank_findings(group[done], found)
                    done += 1
            except (RankError, TimeoutError) as error:
                yield CaseVerdict(group[done], {}, [], describe_rank_error(error))
                done += 1


def describe_rank_error(error: Exception) -> str:
    """Return one line about an error of a rank: the exception, and the function that raised it."""
    if isinstance(error, TimeoutError):
        return f"{error}: ranks wait for each other, as for a collective call that not all of them make"
    text = str(error).split("\n\nThe above exception")[0].strip().splitlines()
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', "\n".join(text))
    where = [frame for frame in frames if "/torch/" not in frame[0]]
    own = [frame for frame in where if not re.search("/(mega_[a-z]+|site-packages|python3[.0-9]*)/", frame[0])]
    called = "".join(f", called from {file}:{line}" for file, line, _ in own[-1:] if own[-1] != where[-1])
    return text[-1].strip() + (f" (in {where[-1][2]}, {where[-1][0]}:{where[-1][1]}{called})" if where else "")


def compute_error_tolerance(verdict: CaseVerdict) -> float:
    """Return the largest error that rounding explains in a tested layout, measured by a run in one process if needed.

    It is at least `TOLERANCE`. The error of other micro-batches in one process shows by how much a model magnifies
    rounding within the steps of the case. A layout sums over ranks, so it rounds more often, and may be
    `AMPLIFICATION` times as far off.
    """
    if not TOLERANCE < verdict.largest_error <= ILL_CONDITIONED:
        return TOLERANCE
    twin = replace(verdict.case.single, micro=1)
    rounding = next(verify_layout_cases([twin])).largest_error
    return min(max(TOLERANCE, AMPLIFICATION * rounding), ILL_CONDITIONED)
