"""`mega run` with real commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = "{model: {preset: tiny}, data: {train: tokens}, parallel: {tp: 2}, batch: {global: 24}}"


def mega(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "mega_cli.main", "run", *args]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_the_command_runs_real_stages(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "flow.yaml").write_text(
        """
stages:
  script: {run: launch slurm, args: [run.yaml], with: {nodes: 1, output: job.sh}, outputs: [job.sh]}
  manifest: {run: launch kubernetes, args: [run.yaml], with: {nodes: 3, output: job.yaml}, outputs: [job.yaml]}
"""
    )
    assert (
        "# script: never run\nmega launch slurm --nodes 1 --output job.sh run.yaml"
        in mega(tmp_path, "flow.yaml", "--dry-run").stdout
    )
    assert not (tmp_path / "job.sh").exists()
    assert mega(tmp_path, "flow.yaml").returncode == 0
    assert (tmp_path / "job.sh").exists()
    status = mega(tmp_path, "flow.yaml", "--status", "--json")
    assert json.loads(status.stdout)["manifest"] == {"run": False, "why": "up to date"}
    failed = mega(tmp_path, "flow.yaml", "--set", "stages.script.with.gpus-per-node=3")
    assert failed.returncode == 2
    assert "does not divide 3" in failed.stderr
    assert (
        "script    would run: failed with status 2, its command changed"
        in mega(tmp_path, "flow.yaml", "--status").stdout
    )


@pytest.mark.parametrize("example", ["quickstart", "experts"])
def test_an_example_runs_again_when_a_file_is_added_to_its_corpus(example: str, tmp_path: Path) -> None:
    for folder in EXAMPLES.iterdir():
        shutil.copytree(folder, tmp_path / folder.name)
    corpus = tmp_path / "quickstart/corpus"
    corpus.mkdir()
    (corpus / "one.py").write_text("def one():\n    return 1\n" * 20)
    command = ("workflow.yaml", "--until", "tokens", "--set", "stages.tokenizer.with.vocab-size=260")
    assert mega(tmp_path / example, *command).returncode == 0
    (corpus / "two.py").write_text("def two():\n    return 2\n" * 20)
    again = mega(tmp_path / example, *command)
    assert again.returncode == 0, again.stderr
    size = (tmp_path / example / "data/corpus.bin").stat().st_size
    assert size > (tmp_path / example / "data/corpus.bin.old-1").stat().st_size > 0


def test_the_schema_has_every_key_of_a_stage_by_the_name_it_is_written_with(tmp_path: Path) -> None:
    stage = json.loads(mega(tmp_path, "--schema").stdout)["$defs"]["WorkflowStage"]
    assert {"run", "args", "with", "needs", "inputs", "outputs", "on_change"} == set(stage["properties"])
    assert stage["required"] == ["run", "outputs"]
    assert stage["additionalProperties"] is False
