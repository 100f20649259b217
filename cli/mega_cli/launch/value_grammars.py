"""Grammars of option values in batch scripts and manifests.

A line break in a `#SBATCH` line would start a new command; other values that a cluster rejects are rejected here first.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from mega_common.errors import ConfigError


@dataclass(frozen=True)
class OptionValuePattern:
    """Regular expression that an option's whole value must match, a description of valid values, and an example."""

    pattern: str
    name: str
    example: str
    max_length: int = 4096


_DNS = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_IMAGE_HOST = r"([a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?(:[0-9]{1,5})?/)?"
_IMAGE_PART = r"[a-z0-9]+([._-]+[a-z0-9]+)*"
_DIGEST = r"[a-z0-9]+([+._-][a-z0-9]+)*:[0-9a-fA-F]{32,}"

TEXT = OptionValuePattern(
    r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]*", "one line without control characters", "train.steps=7", 1 << 16
)
PATH = OptionValuePattern(
    r"[^-\x00-\x1f\x7f-\x9f\u2028\u2029][^\x00-\x1f\x7f-\x9f\u2028\u2029]*", "a path", "configs/run.yaml"
)
SLURM = {
    "name": OptionValuePattern(r"\w[\w .,:=@+-]*", "a job name of letters, digits, spaces and . , : = @ + - _", "llama-8b", 200),
    "time": OptionValuePattern(
        r"[0-9]+(:[0-9]{1,2}){0,2}|[0-9]+-[0-9]{1,2}(:[0-9]{1,2}){0,2}|UNLIMITED|INFINITE", "a Slurm time limit", "1-12:00:00", 32
    ),
    "partition": OptionValuePattern(r"[\w.@+][\w.@+-]*(,[\w.@+][\w.@+-]*)*", "comma-separated partition names", "gpu"),
    "account": OptionValuePattern(r"[\w.@+][\w.@+-]*", "the name of an account", "team-a", 200),
    "mem": OptionValuePattern(r"[0-9]+([KMGTkmgt][Bb]?)?", "an amount of memory", "500G", 32),
    "prologue": OptionValuePattern(r"[^\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]*", "one line of bash", "module load cuda", 1 << 16),
    "container": PATH,
    "mount": OptionValuePattern(r"[^-\x00-\x1f\x7f-\x9f\u2028\u2029,:][^\x00-\x1f\x7f-\x9f\u2028\u2029,:]*(:[^\x00-\x1f\x7f-\x9f\u2028\u2029,:]+){1,2}", "FROM:TO without commas", "/data:/data"),
    "python": PATH,
}  # fmt: skip
KUBERNETES = {
    "image": OptionValuePattern(
        rf"{_IMAGE_HOST}{_IMAGE_PART}(/{_IMAGE_PART})*(:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(@{_DIGEST})?",
        "the name of a container image", "registry.example/mega-trainer:1", 512,
    ),
    "volume": OptionValuePattern(rf"{_DNS}(\.{_DNS})*", "the name of a PersistentVolumeClaim (DNS-1123 subdomain)", "mega", 253),
    "shared-memory": OptionValuePattern(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[kMGTPE]|[eE][0-9]{1,2})?", "a Kubernetes quantity", "16Gi", 32),
}  # fmt: skip


def check_option_value(option: str, value: str | None, grammar: OptionValuePattern) -> None:
    """Raise ConfigError unless a launch option's value matches its pattern; None, an option not given, passes.

    Raises:
        ConfigError: if it does not match the grammar.
    """
    if value is not None and not (len(value) <= grammar.max_length and re.fullmatch(grammar.pattern, value)):
        shown = ascii(value if len(value) <= 80 else f"{value[:80]}...")
        limit = f" of at most {grammar.max_length} characters" if len(value) > grammar.max_length else ""
        raise ConfigError(
            f"--{option} must be {grammar.name}{limit}, found {shown}",
            hint=f"example: {grammar.example}",
        )


def check_option_values(option: str, values: Iterable[str], grammar: OptionValuePattern) -> None:
    """Raise ConfigError unless each value of a repeatable launch option matches its pattern.

    Raises:
        ConfigError: if one does not match the grammar.
    """
    for value in values:
        check_option_value(option, value, grammar)


def escape_kubernetes_references(word: str) -> str:
    """Return a word with each `$` doubled, because Kubernetes expands `$(NAME)` in a container's command."""
    return word.replace("$", "$$")


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
    python: str, nodes: int, gpus: int, *, endpoint: str, job: str, index: str, train: str
) -> str:
    """Return the shell command, with line breaks, that starts the torchrun agent of one machine.
    The agent starts `gpus` ranks of `mega train`.

    Args:
        python: the interpreter with mega.
        nodes, gpus: number of machines, and ranks per machine.
        endpoint, job: address and id of the rendezvous; shell code to be expanded.
        index: name of the environment variable with the machine's number; machine 0 hosts the rendezvous.
        train: arguments of `mega train`; shell code to be expanded.
    """
    lines = [
        f"exec {shlex.quote(python)} -m mega_trainer.launch.elastic",
        f"--nnodes={nodes} --nproc-per-node={gpus} --max-restarts={RESTARTS}",
        f'--rdzv-backend=c10d --rdzv-endpoint="{endpoint}" --rdzv-id="{job}"',
        f'--rdzv-conf="is_host=$(({index} == 0)),read_timeout={RENDEZVOUS_SECONDS},join_timeout={RENDEZVOUS_SECONDS}"',
        f"-m mega_cli.main train {train}",
    ]
    return " \\\n  ".join(lines)
