"""Slurm batch scripts of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mega_cli.launch.value_grammars import ENVIRONMENT, SAVE_SECONDS, torchrun_agent_command

# Shell code that waits for $step, and sends it TERM when USR1 announces the time limit; the caller closes the `if`.
WAIT = """limit=
on_time_limit() {
  limit=near
  kill -TERM "$step"
}
trap on_time_limit USR1

status=0
wait "$step" || status=$?
if [[ $limit ]]; then # the signal interrupted `wait`
  status=0
  wait "$step" || status=$?
"""


@dataclass(frozen=True)
class ContainerImage:
    """Container image of a Slurm job, and its mounts in addition to the folder that the job was submitted from."""

    image: str
    mounts: Sequence[str]

    def build_srun_container_arguments(self) -> tuple[list[str], list[str]]:
        """Return the options of srun, and the words before the command, that run it in the container.
        A .sif file is run by apptainer in the words before the command, any other image by options of pyxis. Both parts
        are shell code that the script expands.
        """
        if Path(self.image).suffix == ".sif":
            bound = [f"--bind={shlex.quote(mount)}" for mount in self.mounts]
            return [], ["apptainer", "exec", "--nv", '--bind="$PWD"', '--pwd="$PWD"', *bound, shlex.quote(self.image)]
        mounts = ",".join(['"$PWD:$PWD"', *map(shlex.quote, self.mounts)])
        options = [f"--container-image={shlex.quote(self.image)}", f"--container-mounts={mounts}"]
        return [*options, '--container-workdir="$PWD"'], []


@dataclass(frozen=True)
class SlurmJobPlan:
    """Settings of a Slurm batch script: sbatch options and flags, first commands, container and Python interpreter.
    `options` and `flags` are without `--`; `prologue` are commands to run first on each machine.
    """

    options: Mapping[str, str]
    flags: Sequence[str]
    prologue: Sequence[str]
    container: ContainerImage | None
    python: str


def slurm_batch_script(plan: SlurmJobPlan, nodes: int, gpus: int, train: str, array: int = 0) -> str:
    """Return the Slurm batch script of a training job, or of `array` jobs that are numbered from 0.
    `train` are the arguments of `mega train`, as shell code. A job saves before its time limit and requeues itself. The
    signal before its time limit is USR1, so that `scancel` (TERM) ends a job without requeueing it.
    """
    directives = [f"#SBATCH --{key}={shlex.quote(value)}" for key, value in plan.options.items()]
    directives += [f"#SBATCH --{flag}" for flag in plan.flags]
    directives += [f"#SBATCH --array=0-{array - 1}"] if array else []
    agent = torchrun_agent_command(
        plan.python, nodes, gpus, endpoint="$RENDEZVOUS", job="$SLURM_JOB_ID", index="SLURM_PROCID", train=train,
    )  # fmt: skip
    task = "\n".join(["", *plan.prologue, agent, ""])
    options, before = plan.container.build_srun_container_arguments() if plan.container else ([], [])
    # srun gives a task one core by default; when one machine exits, the others get time to save.
    step = ['srun --cpus-per-task="$SLURM_CPUS_PER_TASK"', f"--kill-on-bad-exit=0 --wait={SAVE_SECONDS}", *options]
    step += [" ".join([*before, "bash", "-c", shlex.quote(task)])]
    return f"""#!/bin/bash
{chr(10).join(directives)}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-{"%A-%a" if array else "%j"}.log
#SBATCH --signal=B:USR1@{SAVE_SECONDS}
set -euo pipefail

# Rendezvous address. Jobs that share a machine use different ports.
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RENDEZVOUS="$first:$((10000 + SLURM_JOB_ID % 20000))"
export {" ".join(f"{key}={value}" for key, value in ENVIRONMENT.items())}

{(" " + chr(92) + chr(10) + "  ").join(step)} &
step=$!

# Shortly before the time limit, let the ranks save.
{WAIT}fi

# 75: saved before the end. Requeue this job to resume.
if ((status == 75)) || [[ $limit && $status != 0 ]]; then
  echo "interrupted with status $status: requeueing"
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
exit "$status"
"""
