"""Commands of `mega launch`; they check the run before they write a script."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from mega_cli.launch.array_jobs import indexed_job_manifest, plan_array_job, slurm_array_script
from mega_cli.launch.kubernetes import KubernetesTrainingJobPlan, build_training_job_manifests
from mega_cli.launch.kubernetes_serving import KubernetesServerPlan, parse_serve_options, serving_manifests
from mega_cli.launch.slurm import ContainerImage, SlurmJobPlan, slurm_batch_script
from mega_cli.launch.value_grammars import KUBERNETES, PATH, SLURM, TEXT, check_option_value, check_option_values
from mega_cli.workflow_config import reject_workflow_as_run_yaml
from mega_common.errors import ConfigError
from mega_common.progress_logging import logger
from mega_common.strict_config import apply_config_overrides, load_yaml_mapping

app = typer.Typer(
    no_args_is_help=True,
    help="Write a Slurm script or Kubernetes manifest that trains, tokenizes or serves on a cluster. Nothing is submitted.",
)

Run = Annotated[
    Path, typer.Argument(help="Configuration file, e.g. run.yaml; with --stage a workflow file, with --serve a model.")
]
RunOrSweep = Annotated[
    Path,
    typer.Argument(help="Configuration file, e.g. run.yaml; with --stage a workflow file; or the folder of a sweep."),
]
Nodes = Annotated[
    int, typer.Option(min=1, help="Number of machines, e.g. 4; with --stage, number of jobs that tokenize a part each.")
]
Stage = Annotated[
    str | None, typer.Option(help="Tokenize in parts instead of training: name of a stage that runs 'data preprocess'.")
]
Gpus = Annotated[int, typer.Option(min=1, help="GPUs (and ranks) per machine.")]
Output = Annotated[Path | None, typer.Option(help="File to write, e.g. job.sh; default: standard output.")]
Name = Annotated[str | None, typer.Option(help="Job name, e.g. llama-8b; default: name of the configuration file.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. --set batch.micro=2. Repeatable."),
]


@app.command("slurm")
def slurm_command(
    run: RunOrSweep,
    nodes: Nodes,
    gpus_per_node: Gpus = 8,
    output: Output = None,
    name: Name = None,
    set_: Set = None,
    stage: Stage = None,
    time: Annotated[
        str,
        typer.Option(help="Time limit of a job, e.g. 1-12:00:00; the job requeues itself until the training is done."),
    ] = "24:00:00",
    partition: Annotated[str | None, typer.Option(help="Slurm partition, e.g. gpu.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm account.")] = None,
    cpus_per_task: Annotated[
        int | None, typer.Option(min=1, help="CPU cores per machine.", show_default="4 per GPU; with --stage 8")
    ] = None,
    mem: Annotated[
        str | None,
        typer.Option(
            help="Memory per machine, e.g. 500G; 0 is all.", show_default="the cluster's default; with --exclusive 0"
        ),
    ] = None,
    exclusive: Annotated[bool, typer.Option("--exclusive", help="Allocate whole machines.")] = False,
    prologue: Annotated[
        list[str] | None,
        typer.Option(help="Bash command to run first on each machine, e.g. 'module load cuda'. Repeatable."),
    ] = None,
    container: Annotated[
        str | None, typer.Option(help="Container image: a .sif file is run with apptainer, any other name with pyxis.")
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FROM:TO",
            help="Mount a path in the container, e.g. /data:/data. The current folder is mounted always. Repeatable.",
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            help="Python interpreter with mega.", show_default="this one; with --prologue or --container python3"
        ),
    ] = None,
) -> None:
    """Write a Slurm batch script that trains on several machines, saves before the time limit, and requeues itself.

    With --stage, write an array job: each job tokenizes a part of a data set, and the last one joins the parts. With the
    folder of `mega sweep --prepare`, each job of the array trains one run of the sweep.

    Examples:

      mega launch slurm run.yaml --nodes 4 --output job.sh && sbatch job.sh

      mega launch slurm sweeps/lr --nodes 1 --output sweep.sh && sbatch sweep.sh

      mega launch slurm run.yaml --nodes 4 --prologue 'module load cuda' --prologue 'source venv/bin/activate'

      mega launch slurm workflow.yaml --stage tokenize --nodes 64 --output tokenize.sh && sbatch tokenize.sh
    """
    reject_control_characters(run, set_)
    given = {
        "name": name, "time": time, "partition": partition, "account": account, "mem": mem, "container": container,
        "python": python,
    }  # fmt: skip
    for option, value in given.items():
        check_option_value(option, value, SLURM[option])
    check_option_values("prologue", prologue or [], SLURM["prologue"])
    check_option_values("mount", mount or [], SLURM["mount"])
    runs = list_sweep_runs(run, set_ or [], stage) if run.is_dir() else []
    if stage is None:
        for file in runs or [run]:
            check_run_for_rank_count(file, set_ or [], nodes * gpus_per_node)
        machines = {"nodes": nodes, "ntasks-per-node": 1, "gpus-per-node": gpus_per_node}
    else:
        machines = {"ntasks": 1}
    options = {
        "job-name": name or to_dns_label(stage or run.stem), **machines,
        "cpus-per-task": cpus_per_task or (8 if stage else 4 * gpus_per_node),
        "mem": mem or ("0" if exclusive else None), "time": time, "partition": partition, "account": account,
    }  # fmt: skip
    plan = SlurmJobPlan(
        options={key: str(value) for key, value in options.items() if value is not None},
        flags=["exclusive"] if exclusive else [],
        prologue=prologue or [],
        container=ContainerImage(container, mount or []) if container else None,
        python=python or ("python3" if prologue or container else sys.executable),
    )
    if stage is not None:
        _write(slurm_array_script(plan, plan_array_job(run, stage, nodes)), output)
        return
    train = shlex.join([str(run), *(f"--set={item}" for item in set_ or [])])
    if runs:
        train = f"{shlex.quote(str(run))}/run-$(printf %03d $SLURM_ARRAY_TASK_ID).yaml"
    _write(slurm_batch_script(plan, nodes, gpus_per_node, train, len(runs)), output)


@app.command("kubernetes")
def kubernetes_command(
    run: Run,
    nodes: Nodes,
    gpus_per_node: Annotated[
        int, typer.Option(min=0, help="GPUs (and ranks) per machine; with --serve GPUs per pod, 0 for a CPU.")
    ] = 8,
    output: Output = None,
    name: Name = None,
    set_: Set = None,
    stage: Stage = None,
    cpus: Annotated[int, typer.Option(min=1, help="With --stage: CPU cores per pod.")] = 8,
    image: Annotated[
        str | None,
        typer.Option(
            help="Container image with mega, e.g. registry.example/mega-trainer:1.",
            show_default="mega-trainer:latest; with --serve mega-eval:latest",
        ),
    ] = None,
    volume: Annotated[str, typer.Option(help="PersistentVolumeClaim with the data; mounted at /workspace.")] = "mega",
    shared_memory: Annotated[str, typer.Option(help="Size of /dev/shm per pod.")] = "16Gi",
    jobset: Annotated[
        bool,
        typer.Option(
            "--jobset",
            help="Write a JobSet (requires the JobSet operator), which restarts all pods after too many replacements.",
        ),
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a model instead of training: RUN is its path on the volume.")
    ] = False,
    max_nodes: Annotated[
        int | None, typer.Option(min=1, help="With --serve: largest number of pods; --nodes is the smallest.")
    ] = None,
    serve_options: Annotated[
        str,
        typer.Option(help="With --serve: options of `mega serve`, e.g. '--precision bf16 --max-length 8192'."),
    ] = "",
) -> None:
    """Write a Kubernetes manifest that trains on several machines: an Indexed Job, one pod per machine, and a Service.

    The configuration is stored in a ConfigMap; its relative paths are relative to the volume. No operator is required,
    except for --jobset. With --stage, each pod tokenizes a part of a data set, and the last one joins the parts.

    With --serve, write a Deployment of `mega serve` with probes, a Service, and an autoscaler that follows the metrics of the
    server (it requires the Prometheus operator and prometheus-adapter). The API key is in a Secret of the same name.

    Examples:

      mega launch kubernetes run.yaml --nodes 4 --image registry.example/mega-trainer:1 | kubectl apply -f -

      mega launch kubernetes run.yaml --nodes 64 --jobset | kubectl apply -f -

      mega launch kubernetes workflow.yaml --stage tokenize --nodes 64 | kubectl apply -f -

      mega launch kubernetes models/llama-8b --serve --nodes 1 --max-nodes 8 --gpus-per-node 1 | kubectl apply -f -
    """
    reject_control_characters(run, set_)
    if image is None:
        image = "mega-eval:latest" if serve else "mega-trainer:latest"
    for option, value in {"image": image, "volume": volume, "shared-memory": shared_memory}.items():
        check_option_value(option, value, KUBERNETES[option])
    if name is not None and name != to_dns_label(name):
        raise ConfigError(f"--name must be a DNS label, found {name!a}", hint=f"--name {to_dns_label(name)}")
    job = name or to_dns_label(stage or (run.name if serve else run.stem))
    _check_serve_use(
        serve,
        for_serving={"max-nodes": max_nodes, "serve-options": serve_options},
        for_training={"stage": stage, "jobset": jobset, "set": set_},
    )
    if serve:
        words, batch_size, drain = parse_serve_options(str(run), serve_options)
        most = nodes if max_nodes is None else max_nodes
        if most < nodes:
            raise ConfigError(f"--max-nodes {most} must be at least --nodes {nodes}", hint=f"--max-nodes {nodes}")
        serving = KubernetesServerPlan(
            job, str(run), nodes, most, gpus_per_node, image, volume, shared_memory, words, batch_size, drain
        )
        _write(serving_manifests(serving), output)
        return
    if gpus_per_node == 0:
        raise ConfigError("--gpus-per-node 0 is supported with --serve only", hint="use --gpus-per-node 1")
    if stage is None:
        check_run_for_rank_count(run, set_ or [], nodes * gpus_per_node)
    if stage is not None:
        _write(indexed_job_manifest(plan_array_job(run, stage, nodes), job, image, volume, cpus), output)
        return
    plan = KubernetesTrainingJobPlan(job, nodes, gpus_per_node, image, volume, shared_memory, set_ or [], jobset)
    _write(build_training_job_manifests(plan, run.read_text(encoding="utf-8")), output)


def _check_serve_use(serve: bool, *, for_serving: Mapping[str, object], for_training: Mapping[str, object]) -> None:
    """Refuse options of training with --serve, and options of serving without it."""
    for name, value in (for_training if serve else for_serving).items():
        if value:
            raise ConfigError(
                f"--{name} is not supported {'with' if serve else 'without'} --serve",
                hint=f"leave out --{name}" + ("" if serve else ", or add --serve"),
            )


def reject_control_characters(run: Path, overrides: list[str] | None) -> None:
    """Raise ConfigError for control characters in run.yaml's path or `--set` overrides, which launch scripts contain.

    Raises:
        ConfigError: if one has a control character.
    """
    check_option_value("run", str(run), PATH)
    check_option_values("set", overrides or [], TEXT)


def list_sweep_runs(folder: Path, overrides: list[str], stage: str | None) -> list[Path]:
    """Return the run.yaml files of the sweep in a folder, in order; a ConfigError if there are none.

    Raises:
        ConfigError: if the folder has none, or an option does not apply to a sweep.
    """
    runs = sorted(folder.glob("run-*.yaml"), key=lambda path: (len(path.name), path.name))
    if not runs:
        hint = "give a run.yaml, or the folder that mega sweep run.yaml ... --prepare --output FOLDER writes"
        raise ConfigError(f"{folder}: is a folder without the runs of a sweep (run-000.yaml and so on)", hint=hint)
    if overrides or stage is not None:
        option = "--set" if overrides else "--stage"
        raise ConfigError(f"{option} is not supported with a sweep", hint="give --set to mega sweep")
    return runs


def check_run_for_rank_count(run: Path, overrides: list[str], ranks: int) -> None:
    """Raise ConfigError if run.yaml's settings are not valid for `ranks` ranks; only warn if its base model is elsewhere.
    Data is not checked: it need not be on this machine.

    Raises:
        ConfigError: with all problems.
    """
    from mega_trainer.config.run_config import load_run_config

    if run.is_dir():
        hint = "give a run.yaml; to serve the model in the folder, add --serve"
        raise ConfigError(f"{run}: is a folder, and training requires a file of settings", hint=hint)
    raw = apply_config_overrides(load_yaml_mapping(run), overrides)
    reject_workflow_as_run_yaml(run, raw, "give a run.yaml, or --stage NAME to launch a stage of the workflow")
    model = raw.get("model")
    if isinstance(model, dict) and "from" in model and not Path(str(model["from"])).exists():
        logger.warning("model.from = %s does not exist on this machine, so the run is not checked", model["from"])
        return
    load_run_config(run, overrides).check_world_size(ranks)


def to_dns_label(text: str) -> str:
    """Return `text` as a Kubernetes name: at most 40 lowercase letters, digits and dashes, first a letter."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    label = label if label[:1].isalpha() else f"run-{label}"
    return label[:40].strip("-")


def _write(text: str, output: Path | None) -> None:
    if output is None:
        print(text, end="")
    else:
        output.write_text(text, encoding="utf-8")
