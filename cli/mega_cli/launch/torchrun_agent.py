"""Command of the torchrun agent that runs on each machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

SAVE_SECONDS = 120  # between the signal before the end of a job and its end
RENDEZVOUS_SECONDS = 600  # timeout of machines that wait for others, which may still pull an image

RESTARTS = 10  # restarts of the ranks after a failure

ENVIRONMENT = {
    # Seconds that the agent gives its ranks to save after a signal.
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_SECONDS - 10),
    # Restarted ranks must not read stale keys of the earlier ranks in the agents' store.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def torchrun_agent_command(
    python: str, nodes: int, gpus: int, *, endpoint: str, job: str, index: str, train: Sequence[str]
) -> str:
    """Return the shell command, with line breaks, that starts the torchrun agent of one machine; it starts `gpus` ranks
    of `mega train`.

    Args:
        python: the interpreter with mega.
        nodes, gpus: number of machines, and ranks per machine.
        endpoint, job: address and id of the rendezvous; shell code to be expanded.
        index: name of the environment variable with the machine's number; machine 0 hosts the rendezvous.
        train: arguments of `mega train`.
    """
    lines = [
        f"exec {shlex.quote(python)} -m mega_trainer.launch.elastic",
        f"--nnodes={nodes} --nproc-per-node={gpus} --max-restarts={RESTARTS}",
        f'--rdzv-backend=c10d --rdzv-endpoint="{endpoint}" --rdzv-id="{job}"',
        f'--rdzv-conf="is_host=$(({index} == 0)),read_timeout={RENDEZVOUS_SECONDS},join_timeout={RENDEZVOUS_SECONDS}"',
        f"-m mega_cli.main train {shlex.join(train)}",
    ]
    return " \\\n  ".join(lines)
