"""Host time of a layer and of a dense training step in two source trees of mega, such as two commits.

    git worktree add /tmp/old COMMIT
    python benchmarks/source_trees.py /tmp/old [--new .] [--rounds 15]

The tensors are tiny, so that the time is that of Python and of torch's dispatch. Each side runs in a process of its own and the
trees take turns in every round, in processor time. On a busy machine that varies by a third from round to round, so the ratio
of the fastest rounds is given beside the median, and the number of calls of Python and C functions in a step, which does not vary.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import record
from host_overhead import LAYOUTS
from sides import Side, spread, times_in_turn

PACKAGES = (
    "packages/common",
    "packages/data",
    "packages/ckpt",
    "packages/trainer",
    "packages/eval",
    "cli",
    "benchmarks",
)
IMPORT = "import sys; sys.path[:0] = {paths!r}\n"
LAYER = "import host_overhead; host_overhead.serve({name!r})"
STEPS = 20
STEP = """
import bare_step, torch, train_step
torch.set_num_threads(1)
model = {**train_step.MODEL, "hidden_size": 16, "ffn_hidden_size": 32, "vocab_size": 32, "max_position": 8}
step = train_step.ours(train_step.settings("fp32", model, 1, 8, compiled=False))
"""
TIMED = STEP + "bare_step.answer_calls(step)"
COUNTED = (
    STEP
    + """
import json
for _ in range(3):
    step()
events = {"call": 0, "c_call": 0, "return": 0, "c_return": 0, "c_exception": 0}
def count(frame, event, argument):
    events[event] += 1
sys.setprofile(count)
step()
sys.setprofile(None)
for _ in sys.stdin:
    print(json.dumps({"python": events["call"], "c": events["c_call"]}), flush=True)
"""
)


def start_sides(trees: dict[str, Path], code: str) -> dict[str, Side]:
    """A process of each tree that runs `code`."""
    paths = {name: [str(tree.resolve() / package) for package in PACKAGES] for name, tree in trees.items()}
    return {name: Side("-c", IMPORT.format(paths=paths[name]) + code) for name in trees}


def count_calls(trees: dict[str, Path]) -> dict[str, Any]:
    """Calls of Python and C functions in one step of each tree."""
    sides = start_sides(trees, COUNTED)
    found = {name: side.run() for name, side in sides.items()}
    for side in sides.values():
        side.close()
    return found


def time_trees(trees: dict[str, Path], code: str, call: str, clock: str, rounds: int) -> dict[str, Any]:
    """Microseconds of each tree, and the ratio of the second to the first."""
    times = times_in_turn(start_sides(trees, code), call, rounds, clock)
    old, new = times.values()
    return {
        "microseconds": {name: round(1e6 * statistics.median(values)) for name, values in times.items()},
        "new over old": spread([a / b for a, b in zip(new, old, strict=True)]),
        "new over old, fastest rounds": round(min(new) / min(old), 3),
    }


def main() -> None:
    """See the top."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("--new", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    trees = {"old": options.old, "new": options.new}
    results = {
        f"layer, {name}": time_trees(trees, LAYER.format(name=name), "", "cpu", options.rounds) for name in LAYOUTS
    }
    results["dense step, 4 layers"] = time_trees(trees, TIMED, str(STEPS), "processor", options.rounds)
    results["dense step, calls"] = count_calls(trees)
    for name, result in results.items():
        print(name, result)
    print("written to", record.write("source_trees", results, ["torch"]))


if __name__ == "__main__":
    main()
