"""Memory of preprocessing by the length and kind of one document, which should not decide about it.

Each run is a process of its own, whose largest resident set counts, over what it has before it begins. A document is a
line of JSON; `tokenizers`, which takes ten times as long, has shorter ones.

    python benchmarks/preprocess_memory.py [--workers 1 2]
"""

from __future__ import annotations

import argparse
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
LENGTHS = {"fastokens": (50, 100, 200), "tokenizers": (25, 50)}  # MB of one document, for each encoder
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
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
def most():  # not getrusage's, which begins with that of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
source, tokenizer, output, workers, encoder = sys.argv[1:]
before = most()
preprocess_corpus([source], Path(tokenizer), Path(output), workers=int(workers), encoder=encoder, overwrite=True)
print(most() - before)
"""


def peak(text: str, megabytes: int, workers: int, encoder: str, folder: Path) -> int:
    """MiB that a run takes for one document of so many MB."""
    with open(folder / "a.jsonl", "w") as stream:
        stream.write('{"text": "')
        for _ in range(megabytes * 1_000_000 // len(text.encode())):
            stream.write(json.dumps(text, ensure_ascii=False)[1:-1])
        stream.write('"}\n')
    words = [folder / "a.jsonl", folder / "tok", folder / "d", workers, encoder]
    done = subprocess.run([sys.executable, "-c", RUN, *map(str, words)], capture_output=True, text=True, check=True)
    return round(float(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    random.seed(0)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_tokenizer([KINDS["prose"](), KINDS["code in one line"]()], 8000, folder / "tok")
        for kind in args.kinds:
            text = KINDS[kind]()
            for encoder, lengths in LENGTHS.items():
                for workers in args.workers:
                    what = f"{kind}, {encoder}, {workers} workers"
                    found[what] = {f"MiB at {size} MB": peak(text, size, workers, encoder, folder) for size in lengths}
                    print(what, found[what], flush=True)
    record.write("preprocess_memory", found, ["tokenizers", "fastokens"])


if __name__ == "__main__":
    main()
