"""Registers, spills and shared memory of the Triton kernels that the null GPU suite compiled, as ptxas made them: a table.

    python tests/null_gpu/kernel_resources.py CACHE

CACHE is the suite's TRITON_CACHE_DIR. Kernels of a kind, such as FlexAttention's forward, are one row with the most of each.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import triton

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
KIND = re.compile(r"triton_(?:\w{3}_fused_)?(flex_attention_backward|flex_attention)|triton_(\w{3})_")
NAMES = {"poi": "elementwise", "red": "reduction", "per": "reduction in one pass", "tem": "template"}


def kind_of(name: str) -> str:
    """Return what a kernel is: FlexAttention, a kind of Inductor's kernels, or a kernel of torch or mega by its name."""
    found = KIND.match(name)
    if found is None:
        return name.strip("_")
    return found[1] or NAMES.get(found[2], found[2])


def main(cache: Path) -> None:
    rows: dict[tuple[int, str], list[tuple[int, int, int]]] = defaultdict(list)
    for path in sorted(cache.rglob("*.cubin")):
        about = json.loads(path.with_suffix(".json").read_text())
        text = subprocess.run([CUOBJDUMP, "--dump-resource-usage", path], check=True, capture_output=True, text=True)
        used = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text.stdout))
        spilled = int(used["STACK"]) + int(used["LOCAL"])
        rows[about["target"]["arch"], kind_of(path.stem)].append((int(used["REG"]), spilled, int(about["shared"])))
    print(
        "| compute capability | kernel | variants | registers | bytes spilled | variants that spill | shared memory |"
    )
    print("|---|---|---|---|---|---|---|")
    for (capability, kind), found in sorted(rows.items()):
        most, spills = [max(column) for column in zip(*found, strict=True)], sum(spilled > 0 for _, spilled, _ in found)
        print(f"| {capability / 10} | {kind} | {len(found)} | {most[0]} | {most[1]} | {spills} | {most[2]:,} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
