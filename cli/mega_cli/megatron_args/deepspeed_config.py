"""DeepSpeed's configuration file, `--deepspeed-config`, which configures its engine in addition to the script's flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mega_cli.megatron_args.shell_words import MARK
from mega_common.bounded_parsing import parse_json_text

# Sections without effect on the numerics, or read here; optimizer and schedule are made by the script itself.
KNOWN = frozenset(
    {"fp16", "bf16", "bfloat16", "zero_optimization", "optimizer", "scheduler", "activation_checkpointing", "aio",
     "flops_profiler", "tensorboard", "wandb", "comet", "csv_monitor", "comms_logger", "nebula", "checkpoint"}
)  # fmt: skip


@dataclass(frozen=True)
class DeepSpeedConfigFile:
    """Values of the DeepSpeed configuration file that a launch script names; `name` is empty without a file.

    Attributes:
        name: path as given in the script.
        values: content of the file; None for values that the script does not set.
    """

    name: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def get_number(self, path: str) -> float | None:
        """Return the number at a dotted path of the file, or None if it is missing or `auto`."""
        value = self._at(path)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def get_integer(self, path: str) -> int | None:
        """Return the integer at a dotted path of the file, or None if it is missing or `auto`."""
        value = self.get_number(path)
        return int(value) if value is not None and value == int(value) else None

    def is_section_enabled(self, section: str) -> bool:
        """Return True if a section of the file has `enabled: true`."""
        return self._at(f"{section}.enabled") is True

    @property
    def offloads_optimizer(self) -> bool:
        """True if the file offloads the optimizer state to host memory or disk."""
        device, old = self._at("zero_optimization.offload_optimizer.device"), self._at("zero_optimization.cpu_offload")
        return device in ("cpu", "nvme") or old is True

    @property
    def untranslated_sections(self) -> list[str]:
        """Names of the file's enabled sections that have no counterpart in mega."""
        return [name for name in self.values if name not in KNOWN and self.is_section_enabled(name)]

    def _at(self, path: str) -> Any:
        node: Any = self.values
        for key in path.split("."):
            node = node.get(key) if isinstance(node, Mapping) else None
        return node


def read_deepspeed_file(name: str, text: str) -> DeepSpeedConfigFile | None:
    """Parse the text of a DeepSpeed configuration file; return None if it is not a JSON object, such as a template that
    a program fills.
    """
    try:
        values = parse_json_text(MARK.sub("null", text))
    except ValueError:
        return None
    return DeepSpeedConfigFile(name, values) if isinstance(values, dict) else None
