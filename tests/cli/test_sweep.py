"""The command: runs started, killed, resumed and failed, with a quick stand-in for `mega train`; and one run of the real one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from commands import typed

from mega_cli import sweep
from mega_cli.main import build_typer_app
from mega_common.errors import ConfigError
from mega_data.token_files.indexed_writer import IndexedWriter

pytest.importorskip("optuna")
TRAINER = """
import json, signal, sys, time
from pathlib import Path
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: sys.exit(75))
text = Path(sys.argv[2]).read_text()
lr = float(text.split("lr: ")[1].split("}")[0].split(",")[0])
folder = Path(sys.argv[2]).with_suffix("")
folder.mkdir(exist_ok=True)
(folder / "run.yaml").write_text("train: {steps: 5}\\ncheckpoint: {save: false}\\n")
with open(folder / "starts", "a") as starts:
    print(time.time(), file=starts, end=" ", flush=True)
    if lr == 9:
        sys.exit("error: the loss is not finite")
    with open(folder / "metrics.jsonl", "a") as metrics:
        for step in range(len(Path(metrics.name).read_text().splitlines()) + 1, 6):
            print(json.dumps({"step": step, "loss": lr / step}), file=metrics, flush=True)
            time.sleep(PAUSE)
    print(time.time(), file=starts, flush=True)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with run.yaml and tokens, in which runs are those of the stand-in."""
    monkeypatch.chdir(tmp_path)
    with IndexedWriter(tmp_path / "tokens", np.dtype(np.uint16)) as writer:
        for document in np.random.default_rng(0).integers(0, 61, (20, 40)):
            writer.add_document(document)
    settings = {
        "model": {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "vocab_size": 61},
        "data": {"train": "tokens", "seq_length": 16, "split": "1,0,0"}, "batch": {"micro": 2, "global": 2},
        "train": {"steps": 5}, "precision": "fp32", "device": "cpu", "output": "runs/a",
    }  # fmt: skip
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    stand_in(monkeypatch, 0.0)
    return tmp_path


def stand_in(monkeypatch: pytest.MonkeyPatch, pause: float) -> None:
    Path("trainer.py").write_text(f"PAUSE = {pause}\n{TRAINER}")
    monkeypatch.setattr(sweep, "MEGA", (sys.executable, "-S", str(Path("trainer.py").resolve())))


def mega(*words: object, status: int = 0) -> str:
    if status:
        from typer.testing import CliRunner

        result = CliRunner().invoke(build_typer_app(), [str(word) for word in words])
        assert result.exit_code == status, result.output or result.exception
        return result.stdout
    return typed(build_typer_app(), *words).stdout


def starts(run: int) -> list[float]:
    """The times at which a run started and ended."""
    return [float(word) for word in Path(f"sweeps/run/run-{run:03}/starts").read_text().split()]


def test_trials_run_once_and_a_failed_one_is_reported(here: Path) -> None:
    command = ("sweep", "run.yaml", "--grid", "optimizer.lr=3,9,1", "--set", "train.seed=7")
    rows = [line.split() for line in mega(*command, status=1).splitlines()]
    assert rows[1:4] == [
        ["1", "2", "0.2000", "1", "5", "done"], ["2", "0", "0.6000", "3", "5", "done"], ["1", "9", "0", "failed"],
    ]  # fmt: skip
    assert "error: the loss is not finite" in Path("sweeps/run/sweep.html").read_text()
    assert yaml.safe_load(Path("sweeps/run/run-002.yaml").read_text())["train"]["seed"] == 7
    mega(*command, status=1)
    assert [len(starts(run)) for run in range(3)] == [2, 1, 2]


def test_several_runs_at_the_same_time(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, 0.15)
    mega("sweep", "run.yaml", "--random", 4, "optimizer.lr=1..2", "--jobs", 2)
    times = [starts(run) for run in range(4)]
    overlaps = [sum(a < end and start < b for a, b in times) for start, end in times]
    assert max(overlaps) >= 2
    begun = sorted((start, 1) for start, _ in times) + sorted((end, -1) for _, end in times)
    level = [sum(change for _, change in sorted(begun)[: n + 1]) for n in range(8)]
    assert max(level) == 2


def wait_for_lock(path: Path) -> None:
    """Return when no process holds the lock of a folder; fail after 20 seconds."""
    with open(path) as stream:
        for _ in range(400):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.05)
    pytest.fail(f"{path} is still held")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_sweep_resumes_and_its_runs_end_with_it(
    here: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    stand_in(monkeypatch, 0.4)
    words = ["sweep", "run.yaml", "--grid", "optimizer.lr=1,2,3", "--seeds", "2"]
    code = f"from mega_cli import main, sweep; sweep.MEGA = {sweep.MEGA!r}; main.main({words!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    metrics = Path("sweeps/run/run-001/metrics.jsonl")
    while not metrics.exists() or not metrics.read_text():
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(30) == (75 if number == signal.SIGINT else -signal.SIGKILL)
    stand_in(monkeypatch, 0.0)
    wait_for_lock(here / "sweeps/run/.lock")  # which the runs inherit; after SIGKILL they save first
    out = mega("sweep", "run.yaml", "--grid", "optimizer.lr=1,2,3", "--seeds", "2")
    assert out.splitlines()[1].split()[:5] == ["1", "0", "0.2000", "±", "0.0000"]
    for run in range(6):
        lines = Path(f"sweeps/run/run-{run:03}/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [len(starts(run)) for run in range(6)] == [2, 3, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("optimizer.lr=1,2",), "requires one of --grid, --random N and --from"),
        (("--grid", "optimizer.lr=1..2"), "a range is not supported with a grid"),
        (("--grid", "optimizer.lrr=1"), "unknown key"),
        (("--grid", "optimizer.lr=1", "--metric", "valid_loss"), "requires validation"),
        (("--random", 3, "optimizer.lr=1..2", "--sampler", "tpe", "--prepare"), "conflicts with --sampler tpe"),
        (("--grid", "optimizer.lr=1", "--set", "data.train=none"), "must have the files .idx and .bin"),
    ],
)
def test_a_wrong_sweep_starts_nothing(here: Path, words: tuple[object, ...], message: str) -> None:
    error = typed(build_typer_app(), "sweep", "run.yaml", *words, fails=ConfigError).exception
    assert message in str(error)
    assert not list(here.glob("sweeps/*/run-*"))


def test_a_sweep_is_an_array_of_slurm_jobs(here: Path) -> None:
    """Each job trains the run of its number; afterwards the same command ranks the runs and starts none."""
    Path("sweep.yaml").write_text(yaml.safe_dump({"settings": {"optimizer.lr": [2, 1]}, "seeds": 2}))
    command = ("sweep", "run.yaml", "--from", "sweep.yaml", "--output", "sweeps/my lr", "--prepare")
    assert "waiting" in mega(*command)
    script = mega("launch", "slurm", "sweeps/my lr", "--nodes", 1, "--gpus-per-node", 1)
    assert "#SBATCH --array=0-3\n" in script
    assert "--output=%x-%A-%a.log" in script
    task = script[script.index("bash -c ") :].split(" &\n")[0].replace(f"exec {sys.executable}", "echo")
    for number in range(4):
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": str(number), "RENDEZVOUS": "a:1", "SLURM_JOB_ID": "1"}
        words = subprocess.run(["bash", "-c", task], env=environment, capture_output=True, text=True, check=True)
        path = words.stdout.split(" train ")[1].strip()
        assert path == f"sweeps/my lr/run-{number:03}.yaml"
        subprocess.run([*sweep.MEGA, "train", path], check=True)
    assert mega(*command).splitlines()[1].split()[:2] == ["1", "1"]
    for words, message in (
        (("--set", "a=1"), "--set is not supported"),
        (("--stage", "a"), "--stage is not supported"),
    ):
        refused = ("launch", "slurm", "sweeps/my lr", "--nodes", 1, *words)
        assert message in str(typed(build_typer_app(), *refused, fails=ConfigError).exception)


def test_a_real_run_is_ranked(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.chdir(here)
    out = mega("sweep", "run.yaml", "--grid", "optimizer.lr=1e-3", "--set", "log.tensorboard=false")
    assert out.splitlines()[1].split()[-2:] == ["5", "done"]
    assert Path("sweeps/run/run-000/checkpoints/step-00000005").is_dir()
