"""Jobs that make a data set in parts: run with stand-ins for what a cluster offers, by the interpreter of the tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from mega_cli.launch.command import app
from mega_data.preprocessing.preprocess_corpus import preprocess_corpus
from mega_data.tokenizer import train_tokenizer


@pytest.fixture
def workflow(tmp_path: Path) -> Path:
    """A workflow that tokenizes, in a folder of its own with text and tokenizer."""
    folder = tmp_path / "my work"
    folder.mkdir()
    texts = [f"document {i} " + "the cat sat " * (i % 9) for i in range(80)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(texts, 300, folder / "tok")
    stages = {
        "tokens": {
            "run": "data preprocess",
            "with": {"input": "text.jsonl", "tokenizer": "tok", "output": "data/d", "append-eod": True},
            "outputs": ["data/d.bin", "data/d.idx"],
        },
        "look": {"run": "data inspect", "args": ["data/d"], "needs": ["tokens"], "outputs": ["x"]},
    }
    (folder / "workflow.yaml").write_text(yaml.safe_dump({"stages": stages}))
    return folder / "workflow.yaml"


def launch(*words: str | Path) -> str:
    result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def straight(folder: Path) -> bytes:
    preprocess_corpus([folder / "text.jsonl"], folder / "tok", folder / "straight", append_eod=True)
    return (folder / "straight.bin").read_bytes()


def job(tmp_path: Path, script: str, number: int) -> subprocess.Popen[bytes]:
    """One job of the array, by stand-ins for Slurm's commands."""
    (tmp_path / "job.sh").write_text(script)
    for name, body in (("srun", 'while [[ $1 == -* ]]; do shift; done; exec "$@"'), ("scontrol", 'echo "$*" >> log')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "1"}
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path), **slurm}
    return subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=env)


def test_an_array_makes_the_data_set(tmp_path: Path, workflow: Path) -> None:
    script = launch(
        "slurm", workflow, "--stage", "tokens", "--nodes", "2", "--partition", "cpu", "--python", sys.executable
    )
    asked = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --array=1-2", "#SBATCH --partition=cpu", "#SBATCH --cpus-per-task=8"} <= set(asked)
    assert "gpus" not in script
    assert [job(tmp_path, script, number).wait() for number in (2, 1)] == [0, 0]
    assert (workflow.parent / "data" / "d.bin").read_bytes() == straight(workflow.parent)


def test_a_job_near_its_time_limit_queues_itself_again(tmp_path: Path, workflow: Path) -> None:
    waiting = tmp_path / "python"
    waiting.write_text("#!/bin/bash\ntouch began; sleep 60 & wait\n")
    waiting.chmod(0o755)
    script = launch("slurm", workflow, "--stage", "tokens", "--nodes", "2", "--python", waiting)
    process = job(tmp_path, script, 2)
    while not (workflow.parent / "began").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    assert process.wait() == 0
    assert (tmp_path / "log").read_text() == "requeue 77_2\n"


def test_pods_make_the_data_set(tmp_path: Path, workflow: Path) -> None:
    (manifest,) = yaml.safe_load_all(launch("kubernetes", workflow, "--stage", "tokens", "--nodes", "2"))
    assert (manifest["metadata"]["name"], manifest["spec"]["completions"]) == ("tokens", 2)
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    (tmp_path / "python3").symlink_to(sys.executable)
    for index in (1, 0):
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(container["command"], env={**env, "JOB_COMPLETION_INDEX": str(index)}, cwd=tmp_path, check=True)
    assert (workflow.parent / "data" / "d.bin").read_bytes() == straight(workflow.parent)


@pytest.mark.parametrize(
    ("stage", "message"), [("tokes", "no stage 'tokes'\n  did you mean 'tokens'"), ("look", "runs 'mega data inspect'")]
)
def test_what_is_not_made_in_parts_is_refused(workflow: Path, stage: str, message: str) -> None:
    for command in ("slurm", "kubernetes"):
        result = CliRunner().invoke(app, [command, str(workflow), "--stage", stage, "--nodes", "2"])
        assert message in str(result.exception)
