"""`mega launch`: the batch script or the manifest that starts one training run on a cluster. It submits nothing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from mega_common.config import Problem, load_yaml, raise_problems

app = typer.Typer(no_args_is_help=True, help="Write the batch script or manifest that runs a training on a cluster.")

SAVE_SECONDS = 120  # between the notice that a job will end and its end
PORT = 29500

Run = Annotated[Path, typer.Argument(help="The run's configuration, as for 'mega train'.")]
Nodes = Annotated[int, typer.Option(min=1, help="Number of machines.")]
Gpus = Annotated[int, typer.Option(min=1, help="GPUs, and so ranks, on each machine.")]
Output = Annotated[Path | None, typer.Option(help="Write to this file rather than to standard output.")]
Name = Annotated[str | None, typer.Option(help="Name of the job; default: the configuration file's.")]


@app.command()
def slurm(
    run: Run,
    nodes: Nodes,
    gpus_per_node: Gpus = 8,
    output: Output = None,
    name: Name = None,
    time: Annotated[str, typer.Option(help="Time limit of one job; it queues itself again until done.")] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="Partition to ask for.")] = None,
    account: Annotated[str | None, typer.Option(help="Account to charge.")] = None,
) -> None:
    """Write a Slurm batch script: torchrun on each node, a save before the time limit, and queueing again.

    Example: mega launch slurm run.yaml --nodes 4 --output job.sh && sbatch job.sh
    """
    check_layout(run, nodes * gpus_per_node)
    asked = {"job-name": name or job_name(run), "nodes": nodes, "ntasks-per-node": 1, "gpus-per-node": gpus_per_node}
    asked |= {"time": time, "partition": partition, "account": account}
    directives = "\n".join(f"#SBATCH --{key}={value}" for key, value in asked.items() if value is not None)
    _write(slurm_script(directives, run, nodes, gpus_per_node), output)


@app.command()
def kubernetes(
    run: Run,
    nodes: Nodes,
    gpus_per_node: Gpus = 8,
    output: Output = None,
    name: Name = None,
    image: Annotated[str, typer.Option(help="Container image with the trainer.")] = "mega-trainer:latest",
    volume: Annotated[
        str, typer.Option(help="PersistentVolumeClaim with the data; it is mounted at /workspace.")
    ] = "mega",
    shared_memory: Annotated[str, typer.Option(help="Size of /dev/shm in each pod.")] = "16Gi",
) -> None:
    """Write a Kubernetes manifest: an Indexed Job with a pod for each machine, and the Service by which they meet.

    The configuration travels in a ConfigMap; relative paths in it are relative to the volume. No operator is needed.

    Example: mega launch kubernetes run.yaml --nodes 4 --image registry.example/mega-trainer:1 | kubectl apply -f -
    """
    check_layout(run, nodes * gpus_per_node)
    job = name or job_name(run)
    pod = pod_spec(job, nodes, gpus_per_node, image=image, volume=volume, shared_memory=shared_memory)
    _write(yaml.safe_dump_all(manifests(job, nodes, pod, run.read_text()), sort_keys=False, width=120), output)


def check_layout(run: Path, ranks: int) -> None:
    """Check what can be known without the trainer: that the ranks can be laid out, and share the batch evenly.

    Raises:
        ConfigError: with everything that is wrong.
    """
    raw = load_yaml(run)
    parallel, batch = _section(raw, "parallel"), _section(raw, "batch")
    sizes = {axis: parallel.get(axis, 1) for axis in ("tp", "cp", "pp")}
    found = [
        Problem(f"parallel.{axis}", "must be a whole number from 1", size)
        for axis, size in sizes.items()
        if not isinstance(size, int) or size < 1
    ]
    if not found:
        model_ranks = sizes["tp"] * sizes["cp"] * sizes["pp"]
        named = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        if ranks % model_ranks:
            rule = f"{named} = {model_ranks} does not divide the {ranks} ranks of all nodes"
            found.append(Problem("parallel", rule, hint="change --nodes, --gpus-per-node or the sizes"))
        elif isinstance(micro := batch.get("micro", 1), int) and isinstance(whole := batch.get("global"), int):
            together = micro * (ranks // model_ranks)
            if whole % together:
                rule = f"must be a multiple of batch.micro x data-parallel ranks = {micro} x {ranks // model_ranks}"
                found.append(Problem("batch.global", rule, whole, f"{whole // together * together or together} fits"))
    if found:
        raise_problems(found, str(run))


def _section(raw: dict[str, Any], name: str) -> dict[str, Any]:
    section = raw.get(name)
    return section if isinstance(section, dict) else {}


def job_name(run: Path) -> str:
    """The file's name as a DNS label, which is what Kubernetes takes and Slurm does not mind."""
    return re.sub(r"[^a-z0-9]+", "-", run.stem.lower()).strip("-")[:40] or "mega"


def slurm_script(directives: str, run: Path, nodes: int, gpus: int) -> str:
    """The batch script. Its own signal is USR1, so that `scancel` (TERM) ends a job without queueing it again."""
    return f"""#!/bin/bash
{directives}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:USR1@{SAVE_SECONDS}
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# How long torchrun lets the ranks save after a signal, in seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={SAVE_SECONDS - 10}

srun --kill-on-bad-exit=1 torchrun \\
  --nnodes={nodes} --nproc-per-node={gpus} \\
  --rdzv-backend=c10d --rdzv-endpoint="$head:{PORT}" --rdzv-id="$SLURM_JOB_ID" \\
  -m mega_cli.main train {shlex.quote(str(run))} &
step=$!

# Shortly before the time limit: let the ranks save, then queue this job again to go on from there.
on_time_limit() {{
  echo "the time limit is near: saving and queueing again"
  kill -TERM "$step"
  wait "$step" || true
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
}}
trap on_time_limit USR1

wait "$step"
"""


def manifests(job: str, nodes: int, pod: dict[str, Any], config: str) -> list[dict[str, Any]]:
    """ConfigMap, headless Service and Job."""
    labels = {"app": job}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": job, "labels": labels}, "data": {"run.yaml": config}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": job, "labels": labels},
            # The ranks look for each other before any of them is ready.
            "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels,
                     "ports": [{"name": "rendezvous", "port": PORT}]},
        },
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job, "labels": labels},
            "spec": {
                "completionMode": "Indexed", "completions": nodes, "parallelism": nodes, "backoffLimit": 10 * nodes,
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]  # fmt: skip


def pod_spec(job: str, nodes: int, gpus: int, *, image: str, volume: str, shared_memory: str) -> dict[str, Any]:
    """One machine's pod. When another's is lost, torchrun starts its ranks again and they go on from the last save."""
    command = [
        "torchrun", f"--nnodes={nodes}", f"--nproc-per-node={gpus}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={job}-0.{job}:{PORT}", f"--rdzv-id={job}", "--max-restarts=10",
        "-m", "mega_cli.main", "train", "/config/run.yaml",
    ]  # fmt: skip
    container = {
        "name": "trainer",
        "image": image,
        "workingDir": "/workspace",
        "command": command,
        "env": [{"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(SAVE_SECONDS - 10)}],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "volumeMounts": [
            {"name": "config", "mountPath": "/config", "readOnly": True},
            {"name": "workspace", "mountPath": "/workspace"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    return {
        "subdomain": job,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": job}},
            {"name": "workspace", "persistentVolumeClaim": {"claimName": volume}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
        ],
    }


def _write(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")
