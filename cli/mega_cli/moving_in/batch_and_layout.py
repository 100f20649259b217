"""Batch, layout and optimizer offload: samples of a data rank, the number of data ranks, and state in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from mega_cli.moving_in.settings_file import ForeignSettingsFile


@dataclass(frozen=True)
class ModelParallelSizes:
    """Tensor, pipeline and context parallel sizes: ranks that share one copy of the model and read the same samples.

    Attributes:
        tp, pp: tensor and pipeline parallel sizes.
        cp: ranks that share the tokens of a sequence, by ring attention or by Ulysses.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1

    @property
    def ranks_per_model(self) -> int:
        """Number of ranks that hold one copy of the model."""
        return prod((self.tp, self.pp, self.cp))


def set_parallel_sizes(given: ForeignSettingsFile, split: ModelParallelSizes, origins: dict[str, str]) -> None:
    """Set the tensor, pipeline and context parallel sizes of run.yaml.
    The keys `parallel.tp`, `pp` and `cp` are set to the sizes of `split` that are not 1; `origins` has the comment for
    each key of run.yaml.
    """
    for key, origin in origins.items():
        size = getattr(split, key)
        given.set_key(f"parallel.{key}", size if size > 1 else None, origin)


def compute_data_parallel_size(given: ForeignSettingsFile, ranks: int | None, split: ModelParallelSizes) -> int | None:
    """Return the number of data-parallel ranks, None if that of ranks is unknown; a ConfigError if it is not whole.

    Raises:
        ConfigError: if the ranks are not a multiple of the ranks per model.
    """
    if ranks is None:
        return None
    if ranks % split.ranks_per_model:
        shown = f"tp = {split.tp} x pp = {split.pp} x cp = {split.cp}"
        given.refuse_combination(
            f"the number of ranks must be a multiple of {split.ranks_per_model} ({shown}), found {ranks}",
            "set a multiple of it with --nproc",
        )
    return ranks // split.ranks_per_model


def set_batch_sizes(given: ForeignSettingsFile, micro: int | None, rows: int | None, data_ranks: int | None) -> None:
    """Set `batch` of run.yaml from the batch sizes of one data-parallel rank.
    They are its samples per forward pass (`micro`) and per optimizer step (`rows`).

    Args:
        micro: rows of a rank in one forward pass.
        rows: rows of a data rank in one optimizer step.
        data_ranks: number of data-parallel ranks; None if unknown.
    """
    given.set_key("batch.micro", micro, "rows of a rank at once")
    if rows is None:
        return
    if data_ranks is None:
        text = "is for one data rank; multiply it by the number of data ranks, or give the number of ranks with --nproc"
        given.add_note("open", text, "batch.global")
    given.set_key("batch.global", rows * (data_ranks or 1), "micro x accumulation x data ranks")


def set_zero_stage(given: ForeignSettingsFile, key: str) -> None:
    """Set `parallel.zero` of run.yaml from the ZeRO stage of another settings file.

    Raises:
        ConfigError: if it is not a stage from 0 to 3.
    """
    stage = given.take_integer(key)
    if stage not in (None, 0, 1, 2, 3):
        given.refuse_value(key, "is not supported: the stages of ZeRO are 0, 1, 2 and 3", "correct the file")
    given.set_key("parallel.zero", stage, key)


ON_DISK = "nvme"
WEIGHTS_STAY = "weights and gradients stay on the device; the optimizer is kept in host memory"


def set_optimizer_offload(given: ForeignSettingsFile, *keys: str) -> None:
    """Set `optimizer.offload` of run.yaml from the device of the optimizer state in another settings file.
    The given file's `keys` name the device (cpu, nvme or true); disk becomes host memory, with a note.
    """
    for key in keys:
        device = given.take_value(key)
        if str(device).lower() in ("cpu", ON_DISK, "true"):
            given.set_key("optimizer.offload", True, key)
        if str(device).lower() == ON_DISK:
            given.add_note("changes meaning", "optimizer state is kept in host memory, not on disk", f"{key}: {device}")


def set_fsdp_offload(given: ForeignSettingsFile, *keys: str) -> None:
    """Set `optimizer.offload` of run.yaml if an FSDP offload key in the given file is true.
    One of `keys` must be true. A note says that mega keeps weights and gradients on the device.
    """
    for key in keys:
        value = given.take_value(key)
        if str(value).lower() in ("true", "yes", "1"):
            given.set_key("optimizer.offload", True, key)
            given.add_note("changes meaning", WEIGHTS_STAY, f"{key}: {value}")
