"""DeepSpeed's own file of settings, `--deepspeed-config`, which counts for its engine beside the script's flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mega_cli.megatron_args.shell import MARK
from mega_common.parsing import parse_json

# Sections that say nothing of the numbers, or are read here; the script makes its optimizer and schedule itself.
KNOWN = frozenset(
    {"fp16", "bf16", "bfloat16", "zero_optimization", "optimizer", "scheduler", "activation_checkpointing", "aio",
     "flops_profiler", "tensorboard", "wandb", "comet", "csv_monitor", "comms_logger", "nebula", "checkpoint"}
)  # fmt: skip


@dataclass(frozen=True)
class DeepSpeedFile:
    """What the file says; of an empty `name` there is none.

    Attributes:
        name: as the script gives it.
        values: what is in it; null is what the script does not set.
    """

    name: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def number(self, path: str) -> float | None:
        """A number by its dotted path; None where the file does not say it, or says `auto`."""
        value = self._at(path)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def whole(self, path: str) -> int | None:
        """The same of a whole number."""
        value = self.number(path)
        return int(value) if value is not None and value == int(value) else None

    def enabled(self, section: str) -> bool:
        """Whether a section is on."""
        return self._at(f"{section}.enabled") is True

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer's state is kept in host memory, or on a disk."""
        device, old = self._at("zero_optimization.offload_optimizer.device"), self._at("zero_optimization.cpu_offload")
        return device in ("cpu", "nvme") or old is True

    @property
    def unread(self) -> list[str]:
        """Sections that are on and have no counterpart here."""
        return [name for name in self.values if name not in KNOWN and self.enabled(name)]

    def _at(self, path: str) -> Any:
        node: Any = self.values
        for key in path.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        return node


def read_deepspeed_file(name: str, text: str) -> DeepSpeedFile | None:
    """Read it; None where it is no JSON object, as where a program fills a template."""
    try:
        values = parse_json(MARK.sub("null", text))
    except ValueError:
        return None
    return DeepSpeedFile(name, values) if isinstance(values, dict) else None
