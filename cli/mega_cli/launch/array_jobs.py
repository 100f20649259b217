"""Array jobs for a workflow stage that tokenizes text in parts: a Slurm array or a Kubernetes Indexed Job."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mega_cli.launch.kubernetes import GROUP, dump_kubernetes_yaml
from mega_cli.launch.slurm import WAIT, SlurmJobPlan
from mega_cli.launch.value_grammars import escape_kubernetes_references
from mega_cli.workflow_config import WorkflowConfig, reject_run_yaml_as_workflow, suggest_nearest
from mega_common.errors import ConfigError
from mega_common.strict_config import load_yaml_mapping

COMMAND = "data preprocess"
NOTICE_SECONDS = 60  # signal before the time limit; progress of a part is saved every few seconds
CONTAINER = "data"


@dataclass(frozen=True)
class ArrayJobPlan:
    """Array of `count` jobs that run the mega command `words` in `folder`, each on one of `count` shards of data."""

    words: Sequence[str]
    count: int
    folder: Path

    def build_job_command(self, python: str, number: str) -> str:
        """Return the shell command of one job of the array.
        `number` is shell code that expands to the job's number, from 1.
        """
        enter = "" if self.folder == Path() else f"cd {shlex.quote(str(self.folder))}\n"
        command = shlex.join([python, "-m", "mega_cli.main", *self.words])
        return f'{enter}exec {command} --shard "{number}/{self.count}"'


def plan_array_job(workflow: Path, name: str, count: int) -> ArrayJobPlan:
    """Return the plan to run the `data preprocess` stage `name` of a workflow as `count` parallel jobs.

    Raises:
        ConfigError: if the workflow has no such stage, or it runs another command.
    """
    raw = load_yaml_mapping(workflow)
    reject_run_yaml_as_workflow(workflow, raw)
    stages = WorkflowConfig.parse(raw, source=str(workflow)).stages
    if name not in stages:
        raise ConfigError(f"{workflow}: the workflow has no stage {name!r}", hint=suggest_nearest(name, stages))
    if stages[name].run != COMMAND:
        raise ConfigError(
            f"{workflow}: --stage requires a stage that runs 'mega {COMMAND}', but {name!r} runs 'mega {stages[name].run}'",
            hint="to launch a training, give its run.yaml without --stage",
        )
    return ArrayJobPlan(stages[name].command_arguments, count, workflow.parent)


def slurm_array_script(plan: SlurmJobPlan, parts: ArrayJobPlan) -> str:
    """Return the Slurm batch script of an array of `data preprocess` jobs.
    A job near its time limit requeues itself and resumes.
    """
    directives = [f"#SBATCH --{key}={shlex.quote(value)}" for key, value in plan.options.items()]
    directives += [f"#SBATCH --{flag}" for flag in plan.flags]
    task = "\n".join(["", *plan.prologue, parts.build_job_command(plan.python, "$SLURM_ARRAY_TASK_ID"), ""])
    options, before = plan.container.build_srun_container_arguments() if plan.container else ([], [])
    step = ['srun --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK"', *options]
    step += [" ".join([*before, "bash", "-c", shlex.quote(task)])]
    return f"""#!/bin/bash
{chr(10).join(directives)}
#SBATCH --array=1-{parts.count}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A-%a.log
#SBATCH --signal=B:USR1@{NOTICE_SECONDS}
set -euo pipefail

{(" " + chr(92) + chr(10) + "  ").join(step)} &
step=$!

{WAIT}  if ((status != 0)); then
    scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"
    exit 0
  fi
fi
exit "$status"
"""


def indexed_job_manifest(parts: ArrayJobPlan, job: str, image: str, volume: str, cpus: int) -> str:
    """Return the manifest of a Kubernetes Indexed Job with one pod per shard of the data.
    If a shard's input is invalid, only its pod fails.
    """
    words, folder = (
        [escape_kubernetes_references(word) for word in parts.words],
        Path(escape_kubernetes_references(str(parts.folder))),
    )
    escaped = replace(parts, words=words, folder=folder)
    container = {
        "name": CONTAINER,
        "image": image,
        "workingDir": "/workspace",
        "command": ["sh", "-c", escaped.build_job_command("python3", "$((JOB_COMPLETION_INDEX + 1))")],
        "resources": {"requests": {"cpu": cpus}},
        "volumeMounts": [{"name": "workspace", "mountPath": "/workspace"}],
    }
    pod = {
        "restartPolicy": "Never",
        "securityContext": {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [container],
        "volumes": [{"name": "workspace", "persistentVolumeClaim": {"claimName": volume}}],
    }
    user_error = {"containerName": CONTAINER, "operator": "In", "values": [2]}
    spec: dict[str, Any] = {
        "completionMode": "Indexed", "completions": parts.count, "parallelism": parts.count,
        "backoffLimitPerIndex": 10,
        "podFailurePolicy": {"rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailIndex", "onExitCodes": user_error},
        ]},
        "template": {"metadata": {"labels": {"app": job}}, "spec": pod},
    }  # fmt: skip
    metadata = {"name": job, "labels": {"app": job}}
    return dump_kubernetes_yaml([{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}])
