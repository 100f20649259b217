"""Copies from the device to the host."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mega_trainer

# Reads of tensors that are in host memory already, or outside of a job's steps.
ON_HOST = {
    "job/metrics_log.py": {"item"},  # a measurement, before the first step
    "optim/adamw.py": {"item"},  # AdamW's count of steps
    "parallel/expert_routing.py": {"item"},  # sums that `train_step` has copied
    "engine.py": {"item"},  # of `to_host`
    "distributed/device.py": {"cpu"},
}


def reads(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("cpu", "item"):
            yield node.func.attr


def test_the_host_waits_for_its_device_in_one_function() -> None:
    """The watchdog sees by the stack that a rank waits in `to_host`; in other places it seems to work."""
    root = Path(mega_trainer.__file__).parent
    folders = ("model", "parallel", "pipeline", "optim", "objectives", "kernels", "job", "run", "distributed")
    files = [root / "engine.py", *(path for folder in folders for path in sorted((root / folder).rglob("*.py")))]
    found = {str(path.relative_to(root)): set(reads(path)) for path in files}
    assert {name: calls for name, calls in found.items() if calls - ON_HOST.get(name, set())} == {}
