"""The largest micro-batch: the search, trials by a stand-in, and a real one within a limit of memory."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_common.errors import ConfigError, TrainingError
from mega_data.token_files.indexed_writer import IndexedWriter
from mega_trainer.config.run_config import RunConfig
from mega_trainer.job.micro_batch_search import candidate_micro_batch_sizes, find_micro_batch, search_largest_fit

RAW = {
    "model": {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8},
    "data": {"train": "tokens", "seq_length": 8}, "parallel": {"tp": 2}, "batch": {"micro": 1, "global": 24},
}  # fmt: skip
# In place of `mega train`: runs out of memory in the given way above a size.
STAND_IN = """
import json, os, re, signal, sys
limit, end = int(sys.argv[1]), sys.argv[2]
size = int(re.search(r"batch={micro: (\\d+), global: \\d+}", " ".join(sys.argv))[1])
output = next(word for word in sys.argv if word.startswith("--set=output=")).split("=", 2)[2]
if size > limit:
    if end in ("killed", "crashed"):
        os.kill(os.getpid(), signal.SIGKILL if end == "killed" else signal.SIGSEGV)
    sys.exit("rank 0: out of memory on cuda:0" if end == "told" else "no such file")
open(output + "/metrics.jsonl", "w").write(json.dumps({"memory_bytes": 1e9 * size, "tokens_per_second": 10.0}))
"""


def found(limit: int, end: str) -> int:
    command = [sys.executable, "-S", "-E", "-c", STAND_IN, str(limit), end]
    return find_micro_batch(RunConfig.parse(RAW), Path("run.yaml"), ["precision=fp32"], command, 4)


@pytest.mark.parametrize("end", ["told", "killed"])
def test_a_trial_that_ends_for_its_memory_is_a_finding(end: str) -> None:
    assert found(5, end) == 4
    with pytest.raises(ConfigError, match=r"batch\.micro = 1, the smallest of .* does not fit"):
        found(0, end)


@pytest.mark.parametrize(("end", "told"), [("crashed", "-11:\n"), ("otherwise", "1:\n  | no such file")])
def test_what_ends_a_trial_is_its_size_where_a_smaller_one_trains(
    end: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="mega")
    assert found(5, end) == 4
    assert f"batch.micro = 6: too large, while a smaller one trains: exit status {told}" in caplog.text
    with pytest.raises(TrainingError, match=f"a trial ended with exit status {told}".replace("|", r"\|")):
        found(0, end)


@given(st.integers(1, 400), st.integers(0, 500))
def test_the_largest_size_that_fits_is_found_in_few_trials(share: int, limit: int) -> None:
    sizes = [n for n in range(1, share + 1) if share % n == 0]
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert search_largest_fit(sizes, fits) == max((n for n in sizes if n <= limit), default=None)
    assert len(tried) == len(set(tried)) <= 2 * len(sizes).bit_length() + 1 + share.bit_length()


def test_sizes_divide_the_share_of_a_data_rank() -> None:
    assert candidate_micro_batch_sizes(RunConfig.parse(RAW), 4) == [1, 2, 3, 4, 6, 12]


@pytest.mark.long
def test_a_limit_of_memory_is_found(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "tokens", np.dtype(np.uint16)) as writer:
        writer.add_document((np.arange(20_000) % 64).astype(np.uint16))
    model = {**RAW["model"], "num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 32768, "vocab_size": 64}
    raw = {
        "model": model, "data": {"train": str(tmp_path / "tokens"), "seq_length": 512, "split": [1, 0, 0]}, "precision": "fp32",
        "batch": {"micro": 1, "global": 4}, "device": "cpu", "output": str(tmp_path / "run"),
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(json.dumps(raw))
    done = subprocess.run(
        [sys.executable, "-m", "mega_cli.main", "train", str(tmp_path / "run.yaml"), "--find-micro-batch"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (1400 << 20, 1400 << 20)), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == f"mega train {tmp_path}/run.yaml --set batch.micro=2\n", done.stderr
    assert re.search(r"batch\.micro = 4: (out of memory|too large)", done.stderr)
    assert not (tmp_path / "run").exists()
