"""The command that runs on each machine: torchrun's agent, which meets those of the other machines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

SAVE_SECONDS = 120  # between the notice that a job will end and its end
MEET_SECONDS = 600  # that machines wait for each other: an image may have to be fetched, a name to become known

RESTARTS = 10  # of the ranks, after one of them has failed

ENVIRONMENT = {
    # How long the agent lets its ranks save after a signal, in seconds.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_SECONDS - 10),
    # Ranks that are started again must not find what those before them left in the agents' own store.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def torchrun_agent_command(
    python: str, nodes: int, gpus: int, *, endpoint: str, job: str, index: str, train: Sequence[str]
) -> str:
    """Return the shell command, with line breaks, that starts the torchrun agent of one machine.

    Args:
        python: the interpreter that has mega.
        nodes, gpus: machines, and ranks on each.
        endpoint, job: where the machines meet, and as what; shell, to be expanded.
        index: name of the variable that numbers the machines; the first one hosts the meeting, whoever the others
            believe it to be.
        train: arguments of `mega train`.
    """
    lines = [
        f"exec {shlex.quote(python)} -m mega_trainer.launch.elastic",
        f"--nnodes={nodes} --nproc-per-node={gpus} --max-restarts={RESTARTS}",
        f'--rdzv-backend=c10d --rdzv-endpoint="{endpoint}" --rdzv-id="{job}"',
        f'--rdzv-conf="is_host=$(({index} == 0)),read_timeout={MEET_SECONDS},join_timeout={MEET_SECONDS}"',
        f"-m mega_cli.main train {shlex.join(train)}",
    ]
    return " \\\n  ".join(lines)
