"""Killed at random times, by any engine and number of workers, preprocessing ends with the files of a straight run.

PYTHONPATH=tests python tests/crash/test_preprocess.py     # fifty times each engine on one, two and four workers
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.tokenizer import train_tokenizer

pytestmark = pytest.mark.long

# As the command, but for smaller steps; so that in the second a run takes there is much to go on with.
RUN = """
import sys
from pathlib import Path
import mega_data.preprocessing.text_batches as batches, mega_data.preprocessing.dataset_output as output
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
if __name__ == "__main__":
    output.RECORD_INTERVAL, batches.BATCH = 0.05, 1 << 15
    engine, workers, shards, tokenizer, whole, *inputs = sys.argv[1:]
    preprocess_corpus(inputs, Path(tokenizer), Path(whole), append_eod=True, on_bad_line="skip", workers=int(workers),
                      engine=engine, shards=int(shards) or None)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("killed"))


def filled(folder: Path) -> Path:
    """With text, a tokenizer, the program, and `straight`, made by a run that nobody disturbed."""
    source = random.Random(1)
    words = ["".join(source.choices("abcdefghijklmnop", k=source.randint(2, 9))) for _ in range(3000)]
    texts = [" ".join(source.choices(words, k=source.randint(0, 400))) for _ in range(1500)]
    records = [json.dumps({"text": text}) + ("\noops\n" if not i % 97 else "\n") for i, text in enumerate(texts)]
    for name in range(3):
        (folder / f"{name}.jsonl").write_text("".join(records[500 * name : 500 * name + 500]))
    train_tokenizer(texts[:300], 2000, folder / "tok")
    (folder / "run.py").write_text(RUN)
    preprocess_corpus(inputs(folder), folder / "tok", folder / "straight" / "d", append_eod=True, on_bad_line="skip")
    return folder


def inputs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def content(folder: Path) -> dict[str, bytes]:
    """All there is in a folder, hidden files and folders too."""
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def start(folder: Path, output: Path, engine: str, workers: int, address: str | None) -> subprocess.Popen[bytes]:
    shards = {"threads": 0, "processes": 6, "ray": 6}[engine]
    words = [engine, workers, shards, folder / "tok", output / "d", *inputs(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)} | (
        {"RAY_ADDRESS": address} if address else {}
    )
    return subprocess.Popen([sys.executable, folder / "run.py", *map(str, words)], env=environment)


def workers_of_ray() -> list[int]:
    """Processes that are at a part."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (path / "cmdline").read_bytes().startswith(b"ray::made"):
                found.append(int(path.name))
    return found


@contextlib.contextmanager
def cluster(engine: str, workers: int) -> Iterator[str | None]:
    """A Ray cluster of this machine with so many cores, which outlives the runs that are killed; nothing for others."""
    if engine != "ray":
        yield None
        return
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # else anything else on this machine comes first
        context = ray.init(num_cpus=workers, log_to_driver=False)
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


def killed(folder: Path, tmp_path: Path, engine: str, workers: int, most: int) -> None:
    """Make the data set again and again, killed at random times, until that were so many."""
    source = random.Random(f"{engine} {workers}")
    straight = content(folder / "straight")
    with cluster(engine, workers) as address:
        began = time.monotonic()
        assert start(folder, tmp_path / "first", engine, workers, address).wait() == 0
        longest = time.monotonic() - began
        assert content(tmp_path / "first") == straight
        kills = rounds = 0
        while kills < most:
            rounds += 1
            output = tmp_path / str(rounds)
            while True:
                process = start(folder, output, engine, workers, address)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(source.uniform(0, longest))
                if process.poll() is None and engine == "ray" and source.random() < 0.5 and (busy := workers_of_ray()):
                    with contextlib.suppress(ProcessLookupError):  # of a worker Ray makes another one
                        os.kill(source.choice(busy), signal.SIGKILL)
                    kills += 1
                elif process.poll() is None:
                    process.kill()
                    kills += 1
                status = process.wait()
                assert status in (0, -signal.SIGKILL)
                if status == 0 or content(output) == straight:  # killed when it had nothing more to do
                    break
            assert content(output) == straight
        print(f"{engine}, {workers} workers: {kills} kills, {rounds} data sets")


@pytest.mark.parametrize(("engine", "workers"), [("threads", 2), ("processes", 4), ("ray", 2)])
def test_killed_at_random_times(folder: Path, tmp_path: Path, engine: str, workers: int) -> None:
    """`killed` asserts after each round that the data set is the one of an undisturbed run."""
    killed(folder, tmp_path, engine, workers, 8)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        made = filled(Path(scratch))
        for engine in ("threads", "processes", "ray"):
            for workers in (1, 2, 4):
                killed(made, made / f"{engine}-{workers}", engine, workers, 50)
