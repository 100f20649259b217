"""Memory of preprocessing by the length and kind of one document: a constant for each worker, and so much a byte of it.

Each run is a process of its own, whose largest resident set counts; the lines through two lengths give the two numbers.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import record

from mega_data.tokenizer import train_tokenizer

MIB = 1 << 20
SHORT, LONG = 8, 32  # MiB of one document
KINDS: dict[str, Callable[[], str]] = {
    "prose": lambda: " ".join("".join(random.choices("abcdefgh", k=random.randint(2, 9))) for _ in range(180_000)),
    "letters": lambda: "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=MIB)),
    "digits": lambda: "".join(random.choices("0123456789", k=MIB)),
    "code in one line": lambda: "".join(
        random.choices(["if(a[i]<b){return foo(x,y);}", "for(var k=0;k<n;k++){s+=t[k]}", '"use strict";'], k=46_000)
    ),
    "Chinese": lambda: "".join(chr(random.randint(0x4E00, 0x9FFF)) for _ in range(MIB // 3)),
}
RUN = """
import re, sys
from pathlib import Path
from mega_data.preprocess import preprocess
def most():  # not getrusage's, which begins with that of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
source, tokenizer, output, workers = sys.argv[1:]
before = most()
preprocess([source], Path(tokenizer), Path(output), workers=int(workers), overwrite=True)
print(most() - before)
"""


def peak(text: str, size: int, workers: int, folder: Path) -> float:
    """MiB that a run takes for one document of `size` MiB."""
    length = len(text.encode())
    with open(folder / "a.jsonl", "w") as stream:
        stream.write('{"text": "')
        for _ in range(size * MIB // length):
            stream.write(json.dumps(text, ensure_ascii=False)[1:-1])
        stream.write('"}\n')
    words = [folder / "a.jsonl", folder / "tok", folder / "d", workers]
    done = subprocess.run([sys.executable, "-c", RUN, *map(str, words)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    random.seed(0)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_tokenizer([KINDS["prose"](), KINDS["code in one line"]()], 8000, folder / "tok")
        for kind, make in KINDS.items():
            text = make()
            for workers in (1, 2):
                short, long = (peak(text, size, workers, folder) for size in (SHORT, LONG))
                slope = (long - short) / (LONG - SHORT)
                constant = short - SHORT * slope
                found[f"{kind}, {workers} workers"] = {"MiB": round(constant), "bytes a byte of it": round(slope, 1)}
                print(kind, workers, found[f"{kind}, {workers} workers"], flush=True)
    record.write("preprocess_memory", found, ["tokenizers"])


if __name__ == "__main__":
    main()
