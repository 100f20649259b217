from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mega_cli.launch import app
from mega_common.errors import ConfigError

CONFIG = {"parallel": {"tp": 4, "pp": 2, "cp": 1}, "batch": {"micro": 2, "global": 64}}


def launch(tmp_path: Path, *args: str, config: dict[str, Any] = CONFIG) -> str:
    run = tmp_path / "big_run.yaml"
    run.write_text(yaml.safe_dump(config))
    result = CliRunner().invoke(app, [args[0], str(run), *args[1:]], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_slurm_script_is_bash_with_the_numbers_given(tmp_path: Path) -> None:
    script = launch(
        tmp_path, "slurm", "--nodes", "4", "--gpus-per-node", "8", "--partition", "gpu", "--time", "1:00:00"
    )
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash"
    for directive in ("nodes=4", "gpus-per-node=8", "ntasks-per-node=1", "partition=gpu", "time=1:00:00", "requeue"):
        assert f"#SBATCH --{directive}" in lines
    assert "account" not in script
    assert "--nnodes=4 --nproc-per-node=8" in script
    assert f"mega_cli.main train {tmp_path / 'big_run.yaml'}" in script


def fake(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{body}\n")
    (folder / name).chmod(0o755)


def start_job(tmp_path: Path, trainer: str) -> subprocess.Popen[str]:
    """The generated script as a process, with Slurm's commands and torchrun replaced by small stand-ins."""
    (tmp_path / "job.sh").write_text(launch(tmp_path, "slurm", "--nodes", "1"))
    fake(tmp_path, "scontrol", 'echo "scontrol $*" >> log; [[ $1 == show ]] && echo node7; true')
    fake(tmp_path, "srun", 'shift; exec "$@"')
    fake(tmp_path, "torchrun", trainer)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n"}
    return subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE)


def test_slurm_job_saves_and_queues_itself_again_before_its_limit(tmp_path: Path) -> None:
    job = start_job(tmp_path, "trap 'echo saved >> log; exit 1' TERM; echo up >> log; while true; do sleep 0.05; done")
    log = tmp_path / "log"
    while not log.exists() or "up" not in log.read_text():
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(20) == 0
    assert log.read_text().splitlines()[-2:] == ["saved", "scontrol requeue 42"]


@pytest.mark.parametrize("status", [0, 3])
def test_slurm_job_ends_with_the_status_of_the_training(tmp_path: Path, status: int) -> None:
    job = start_job(tmp_path, f'echo "$@" > args; exit {status}')
    assert job.wait(20) == status
    assert "requeue" not in (tmp_path / "log").read_text()
    assert "--rdzv-endpoint=node7:29500 --rdzv-id=42" in (tmp_path / "args").read_text()


def test_kubernetes_manifest_is_consistent(tmp_path: Path) -> None:
    text = launch(tmp_path, "kubernetes", "--nodes", "2", "--image", "trainer:7", "--volume", "disk")
    config, service, job = yaml.safe_load_all(text)
    assert [part["kind"] for part in (config, service, job)] == ["ConfigMap", "Service", "Job"]
    assert {part["metadata"]["name"] for part in (config, service, job)} == {"big-run"}
    assert yaml.safe_load(config["data"]["run.yaml"]) == CONFIG
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["image"] == "trainer:7"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=big-run-0.big-run:29500"} <= set(container["command"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["subdomain"] == service["metadata"]["name"]


def test_output_goes_to_a_file(tmp_path: Path) -> None:
    assert launch(tmp_path, "slurm", "--nodes", "1", "--output", str(tmp_path / "job.sh")) == ""
    assert (tmp_path / "job.sh").read_text().startswith("#!/bin/bash")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"parallel": {"tp": 3}}, "tp 3 x cp 1 x pp 1 = 3 does not divide the 16 ranks"),
        ({"parallel": {"tp": 0}}, "parallel.tp = 0"),
        ({"parallel": {"tp": 2}, "batch": {"micro": 3, "global": 64}}, "batch.global = 64"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        launch(tmp_path, "slurm", "--nodes", "2", config=config)
