"""Results of a benchmark, with what one needs to judge them: when, on which machine, with which versions and commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mega_common.atomic_files import write_json_atomically

HERE = Path(__file__).parent


def write(name: str, results: object, packages: Sequence[str] = ()) -> Path:
    """Write `benchmarks/results/NAME.json`; `packages` are those whose versions matter."""
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
        "commit": commit(),
        "results": results,
    }
    path = HERE / "results" / f"{name}.json"
    write_json_atomically(path, record)
    return path


def machine() -> dict[str, Any]:
    """CPU model, cores this process may use, memory in GB, and how busy the machine is: its load over one minute."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(memory / 1e9, 1),
        "load": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """The commit of the working tree, `+` behind it when there are changes; `unknown` of a copy without its history."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(HERE), *args], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (
            "+" if git("status", "--porcelain", "--untracked-files=no") else ""
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
