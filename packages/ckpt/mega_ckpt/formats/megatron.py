"""Reading a checkpoint of Megatron-Core, in either of its formats: finds the folder, its settings and its tensors.

Neither Megatron nor a GPU is needed, and nothing is unpickled but through `pickles`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.formats import megatron_dist, megatron_legacy
from mega_ckpt.formats.megatron_args import read_args
from mega_ckpt.formats.megatron_contents import Contents
from mega_ckpt.formats.megatron_names import parts_of
from mega_ckpt.formats.megatron_optimizer import read_training
from mega_ckpt.formats.megatron_placed import Placed
from mega_ckpt.formats.megatron_provider import provider_args
from mega_ckpt.names import tensors_of
from mega_ckpt.pieces import Shape
from mega_ckpt.training import Training
from mega_common.errors import CheckpointError
from mega_common.log import logger
from mega_common.model_config import ModelConfig

WEIGHTS = ("weights", "model_weights")  # of a folder of NeMo 2, and of an unpacked archive of NeMo 1
TRACKER = "latest_checkpointed_iteration.txt"


def is_megatron(folder: Path) -> bool:
    """Whether `folder` looks like a checkpoint of Megatron, or holds some."""
    hugging = (folder / "config.json").exists() and not (
        folder / megatron_dist.FORMAT
    ).exists()  # beside weights of FSDP, say
    return (
        (folder / TRACKER).exists()
        or ((folder / ".metadata").exists() and not hugging)
        or (folder / megatron_dist.COMMON).exists()
        or _weights_in(folder) is not None
        or any(folder.glob("mp_rank_*/model_optim_rng.pt"))
        or any(folder.glob("mp_rank_*/model_rng.pt"))
        or any(folder.glob("iter_[0-9]*"))
    )


def iteration_folder(folder: Path) -> Path:
    """The folder of one iteration: `folder` itself, or the one that its tracker file names, or in which NeMo has weights.

    Raises:
        CheckpointError: when the tracker is empty or names none that is there.
    """
    tracker = folder / TRACKER
    if (inside := _weights_in(folder)) is not None:
        return inside
    if not tracker.exists():
        found = sorted(path.name for path in folder.glob("iter_[0-9]*") if path.is_dir())
        if not found or (folder / ".metadata").exists():
            return folder
        raise CheckpointError(f"{folder}: there is no {TRACKER}", hint=f"give the folder itself: {folder / found[-1]}")
    text = tracker.read_text(errors="replace").strip()
    if text != "release" and not text.isdecimal():
        what = "is empty" if not text else f"says {text[:40]!r}"
        raise CheckpointError(
            f"{tracker}: {what}, instead of an iteration or 'release'", hint="give the iter_ folder itself"
        )
    named = folder / (text if text == "release" else f"iter_{int(text):07d}")
    if not named.is_dir():
        raise CheckpointError(f"{tracker}: says {text}, but there is no {named.name}", hint="was the save interrupted?")
    return named


def _weights_in(folder: Path) -> Path | None:
    """The folder in which NeMo has the weights, if that is how it is."""
    held = (folder / name for name in WEIGHTS)
    return next(
        (one for one in held if any((one / file).exists() for file in (".metadata", megatron_dist.COMMON))), None
    )


def read_contents(folder: Path) -> Contents:
    """Look at a checkpoint of Megatron without reading its tensors.

    Raises:
        CheckpointError: when it is in neither format, or damaged.
    """
    folder = iteration_folder(folder)
    if (folder / ".metadata").exists():
        return megatron_dist.read(folder)
    if any(folder.glob("mp_rank_*")):
        return megatron_legacy.read(folder)
    raise CheckpointError(
        f"{folder}: neither a torch_dist checkpoint (.metadata) nor one of mp_rank_ folders",
        hint="other formats (zarr, fsdp_dtensor): save it again with --ckpt-format torch_dist, in NeMo with dist_ckpt_format: torch_dist",
    )


class MegatronSource:
    """The weights in a checkpoint of Megatron.

    Args:
        folder: what holds the tracker file, or the folder of one iteration.
        settings: fields of `ModelConfig` that are not in the checkpoint, or replace what it says.

    Raises:
        CheckpointError: naming file, setting or tensor, when it cannot be used.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.contents = read_contents(folder)
        args = self.contents.args or provider_args(iteration_folder(folder))
        self.model: ModelConfig = read_args(args, folder, settings)
        if not args.get("vocab_size") and "vocab_size" not in (settings or {}):
            rows = self.model.vocab_size
            logger.warning("%s: does not say how many tokens there are; all %d padded rows are taken", folder, rows)
        layers = self.model.num_layers + self.model.mtp_layers
        if layers > self.contents.count:
            raise CheckpointError(f"{folder}: {layers} layers, but only {self.contents.count} tensors")
        self._shapes = tensors_of(self.model)
        self._parts = parts_of(self.model)
        self._weights = Placed(self._parts, self.contents.tensors(self._parts), folder)

    def keys(self) -> Sequence[str]:
        """Canonical names, in the order of the forward pass."""
        return list(self._shapes)

    def shape(self, name: str) -> Shape:
        """Global shape of a tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Its stored dtype."""
        return self._weights.dtype(name)

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        shape = self.shape(name)
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A rectangle of it: a view of the file where it is in one piece there, else put together."""
        return self._weights.read_slice(name, offset, shape)

    def training(self) -> Training:
        """What a run goes on from beside the weights.

        Raises:
            StaysBehindError: why it cannot be taken from this checkpoint.
        """
        return read_training(self.contents, self._parts, self.folder, self.model, self.dtype(self.keys()[0]))

    def buffers(self) -> Sequence[str]:
        """None: everything is a weight."""
        return []

    def read_buffer(self, name: str) -> Tensor:
        """There are none."""
        raise KeyError(name)

    def assets(self) -> Mapping[str, Path | bytes]:
        """None: Megatron keeps the tokenizer elsewhere."""
        return {}
