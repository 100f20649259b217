"""Optimizer offload to host memory in DeepSpeed's, Accelerate's and FSDP's settings, as `optimizer.offload`."""

from __future__ import annotations

from mega_cli.moving_in.settings_file import SettingsFile

ON_DISK = "nvme"
WEIGHTS_STAY = "weights and gradients stay on the device; the optimizer is kept in host memory"


def set_optimizer_offload(given: SettingsFile, *keys: str) -> None:
    """Set `optimizer.offload` of run.yaml from the keys with the optimizer state's device (cpu, nvme or true); disk
    becomes host memory, with a note.
    """
    for key in keys:
        device = given.take_value(key)
        if str(device).lower() in ("cpu", ON_DISK, "true"):
            given.set_key("optimizer.offload", True, key)
        if str(device).lower() == ON_DISK:
            given.add_note("changes meaning", "optimizer state is kept in host memory, not on disk", f"{key}: {device}")


def set_fsdp_offload(given: SettingsFile, *keys: str) -> None:
    """Set `optimizer.offload` of run.yaml if one of FSDP's offload keys is true; a note says that mega keeps weights
    and gradients on the device.
    """
    for key in keys:
        value = given.take_value(key)
        if str(value).lower() in ("true", "yes", "1"):
            given.set_key("optimizer.offload", True, key)
            given.add_note("changes meaning", WEIGHTS_STAY, f"{key}: {value}")
