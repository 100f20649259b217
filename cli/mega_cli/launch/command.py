"""Commands of `mega launch`, and the check of the run before a script is written."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from mega_cli.launch.array_jobs import indexed_job_manifest, plan_array_job, slurm_array_script
from mega_cli.launch.kubernetes import PodPlan, run_manifests
from mega_cli.launch.slurm import ContainerImage, SlurmJobPlan, slurm_batch_script
from mega_cli.launch.value_grammars import KUBERNETES, PATH, SLURM, TEXT, check_option_value, check_option_values
from mega_common.errors import ConfigError
from mega_common.progress_logging import logger
from mega_common.strict_config import apply_overrides, load_yaml_mapping

app = typer.Typer(no_args_is_help=True, help="Write the batch script or manifest that runs a training on a cluster.")

Run = Annotated[Path, typer.Argument(help="The run's configuration, as for 'mega train'; with --stage a workflow.")]
Nodes = Annotated[int, typer.Option(min=1, help="Number of machines; with --stage, of jobs that make a part each.")]
Stage = Annotated[
    str | None, typer.Option(help="Tokenize instead: the stage of a workflow that runs 'data preprocess', in parts.")
]
Gpus = Annotated[int, typer.Option(min=1, help="GPUs, and so ranks, on each machine.")]
Output = Annotated[Path | None, typer.Option(help="Write to this file rather than to standard output.")]
Name = Annotated[str | None, typer.Option(help="Name of the job; default: the configuration file's.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting: a.b=value. Repeatable.")
]


@app.command("slurm")
def slurm_command(
    run: Run,
    nodes: Nodes,
    gpus_per_node: Gpus = 8,
    output: Output = None,
    name: Name = None,
    set_: Set = None,
    stage: Stage = None,
    time: Annotated[str, typer.Option(help="Time limit of one job; it queues itself again until done.")] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="Partition to ask for.")] = None,
    account: Annotated[str | None, typer.Option(help="Account to charge.")] = None,
    cpus_per_task: Annotated[
        int | None, typer.Option(min=1, help="CPU cores on each machine.", show_default="4 a GPU; with --stage 8")
    ] = None,
    mem: Annotated[
        str | None,
        typer.Option(help="Memory on each machine, as in 500G; 0 is all.", show_default="the cluster's; exclusive: 0"),
    ] = None,
    exclusive: Annotated[bool, typer.Option("--exclusive", help="Ask for whole machines.")] = False,
    prologue: Annotated[
        list[str] | None,
        typer.Option(help="A line of bash before training on each machine, as in 'module load cuda'. Repeatable."),
    ] = None,
    container: Annotated[
        str | None, typer.Option(help="Image to train in: a .sif file by apptainer, anything else by pyxis.")
    ] = None,
    mount: Annotated[
        list[str] | None, typer.Option(help="FROM:TO, to be seen in the container beside this folder. Repeatable.")
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(help="Interpreter with mega.", show_default="this one; with prologue or container python3"),
    ] = None,
) -> None:
    """Write a Slurm batch script: ranks on each node, a save before the time limit, and requeueing.

    With --stage an array: each job makes a part of a data set, and whichever is last joins them.

    Examples:

      mega launch slurm run.yaml --nodes 4 --output job.sh && sbatch job.sh

      mega launch slurm run.yaml --nodes 4 --prologue 'module load cuda' --prologue 'source venv/bin/activate'

      mega launch slurm workflow.yaml --stage tokenize --nodes 64 --output tokenize.sh && sbatch tokenize.sh
    """
    check_script_values(run, set_)
    given = {
        "name": name, "time": time, "partition": partition, "account": account, "mem": mem, "container": container,
        "python": python,
    }  # fmt: skip
    for option, value in given.items():
        check_option_value(option, value, SLURM[option])
    check_option_values("prologue", prologue or [], SLURM["prologue"])
    check_option_values("mount", mount or [], SLURM["mount"])
    if stage is None:
        check_launched_run(run, set_ or [], nodes * gpus_per_node)
        machines = {"nodes": nodes, "ntasks-per-node": 1, "gpus-per-node": gpus_per_node}
    else:
        machines = {"ntasks": 1}
    asked = {
        "job-name": name or to_dns_label(stage or run.stem), **machines,
        "cpus-per-task": cpus_per_task or (8 if stage else 4 * gpus_per_node),
        "mem": mem or ("0" if exclusive else None), "time": time, "partition": partition, "account": account,
    }  # fmt: skip
    plan = SlurmJobPlan(
        options={key: str(value) for key, value in asked.items() if value is not None},
        flags=["exclusive"] if exclusive else [],
        prologue=prologue or [],
        container=ContainerImage(container, mount or []) if container else None,
        python=python or ("python3" if prologue or container else sys.executable),
    )
    if stage is not None:
        _write(slurm_array_script(plan, plan_array_job(run, stage, nodes)), output)
        return
    _write(
        slurm_batch_script(plan, nodes, gpus_per_node, [str(run), *(f"--set={item}" for item in set_ or [])]), output
    )


@app.command("kubernetes")
def kubernetes_command(
    run: Run,
    nodes: Nodes,
    gpus_per_node: Gpus = 8,
    output: Output = None,
    name: Name = None,
    set_: Set = None,
    stage: Stage = None,
    cpus: Annotated[int, typer.Option(min=1, help="CPU cores of each pod, with --stage.")] = 8,
    image: Annotated[str, typer.Option(help="Container image with the trainer.")] = "mega-trainer:latest",
    volume: Annotated[
        str, typer.Option(help="PersistentVolumeClaim with the data; it is mounted at /workspace.")
    ] = "mega",
    shared_memory: Annotated[str, typer.Option(help="Size of /dev/shm in each pod.")] = "16Gi",
    jobset: Annotated[
        bool,
        typer.Option(
            "--jobset",
            help="A JobSet, whose operator must be there: all pods begin anew where they were replaced too often.",
        ),
    ] = False,
) -> None:
    """Write a Kubernetes manifest: an Indexed Job with a pod for each machine, and the Service through which they meet.

    The configuration travels in a ConfigMap; relative paths in it are relative to the volume. No operator is needed but for
    --jobset.
    With --stage a pod makes each part of a data set, and whichever is last joins them.

    Examples:

      mega launch kubernetes run.yaml --nodes 4 --image registry.example/mega-trainer:1 | kubectl apply -f -

      mega launch kubernetes run.yaml --nodes 64 --jobset | kubectl apply -f -

      mega launch kubernetes workflow.yaml --stage tokenize --nodes 64 | kubectl apply -f -
    """
    check_script_values(run, set_)
    for option, value in {"image": image, "volume": volume, "shared-memory": shared_memory}.items():
        check_option_value(option, value, KUBERNETES[option])
    if stage is None:
        check_launched_run(run, set_ or [], nodes * gpus_per_node)
    if name is not None and name != to_dns_label(name):
        raise ConfigError(f"--name must be a DNS label, found {name!a}", hint=f"--name {to_dns_label(name)}")
    job = name or to_dns_label(stage or run.stem)
    if stage is not None:
        _write(indexed_job_manifest(plan_array_job(run, stage, nodes), job, image, volume, cpus), output)
        return
    plan = PodPlan(job, nodes, gpus_per_node, image, volume, shared_memory, set_ or [], jobset)
    _write(run_manifests(plan, run.read_text(encoding="utf-8")), output)


def check_script_values(run: Path, overrides: list[str] | None) -> None:
    """Check the values that every script contains.

    Raises:
        ConfigError: when one has a control character.
    """
    check_option_value("run", str(run), PATH)
    check_option_values("set", overrides or [], TEXT)


def check_launched_run(run: Path, overrides: list[str], ranks: int) -> None:
    """Check the run for that number of ranks. Data is not checked: it need not be on this machine.

    Raises:
        ConfigError: with everything that is wrong.
    """
    from mega_trainer.config.run_config import load_run_config

    model = apply_overrides(load_yaml_mapping(run), overrides).get("model")
    if isinstance(model, dict) and "from" in model and not Path(str(model["from"])).exists():
        logger.warning("model.from = %s is not on this machine: the run is not checked", model["from"])
        return
    load_run_config(run, overrides).check_world_size(ranks)


def to_dns_label(text: str) -> str:
    """Return `text` as a name that Kubernetes accepts for a Service and, with a number appended, for a pod."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    label = label if label[:1].isalpha() else f"run-{label}"
    return label[:40].strip("-")


def _write(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")
