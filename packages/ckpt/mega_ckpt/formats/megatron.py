"""Reading a checkpoint of Megatron-Core, in either of its formats: finds the folder, its settings and its tensors.

Neither Megatron nor a GPU is needed, and nothing is unpickled but through `pickles`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.formats import megatron_dist, megatron_legacy
from mega_ckpt.formats.megatron_args import read_args
from mega_ckpt.formats.megatron_contents import Contents, Held, overlap
from mega_ckpt.formats.megatron_names import Part, parts_of
from mega_ckpt.manifest import tiles
from mega_ckpt.names import some, tensors_of
from mega_ckpt.pieces import Box, Piece, Shape, copy_overlap
from mega_common.errors import CheckpointError
from mega_common.log import logger
from mega_common.model_config import ModelConfig

TRACKER = "latest_checkpointed_iteration.txt"


def is_megatron(folder: Path) -> bool:
    """Whether `folder` looks like a checkpoint of Megatron, or holds some."""
    return (
        (folder / TRACKER).exists()
        or (folder / ".metadata").exists()
        or any(folder.glob("mp_rank_*/model_optim_rng.pt"))
        or any(folder.glob("mp_rank_*/model_rng.pt"))
        or any(folder.glob("iter_[0-9]*"))
    )


def iteration_folder(folder: Path) -> Path:
    """The folder of one iteration: `folder` itself, or the one that its tracker file names.

    Raises:
        CheckpointError: when the tracker is empty or names none that is there.
    """
    tracker = folder / TRACKER
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
        hint="other formats (zarr, fsdp_dtensor): save it again with --ckpt-format torch_dist",
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
        self.model: ModelConfig = read_args(self.contents.args, folder, settings)
        if not self.contents.args.get("vocab_size") and "vocab_size" not in (settings or {}):
            rows = self.model.vocab_size
            logger.warning("%s: does not say how many tokens there are; all %d padded rows are taken", folder, rows)
        if self.model.num_layers > self.contents.count:
            raise CheckpointError(f"{folder}: {self.model.num_layers} layers, but only {self.contents.count} tensors")
        self._shapes = tensors_of(self.model)
        parts = parts_of(self.model)
        self._places = _places(parts, self.contents.tensors(parts), folder)

    def keys(self) -> Sequence[str]:
        """Canonical names, in the order of the forward pass."""
        return list(self._shapes)

    def shape(self, name: str) -> Shape:
        """Global shape of a tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Its stored dtype."""
        held, _ = self._places[name][0]
        return held.dtype

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        shape = self.shape(name)
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A rectangle of it: a view of the file where it is in one piece there, else put together."""
        found = [
            (target, stored, place)
            for held, piece in self._places[name]
            if (target := overlap(offset, shape, piece.global_offset, piece.shape))
            for place in [_moved(target[0], piece.local_start, piece.global_offset)]
            for stored in held.stored
            if overlap(place, target[1], stored.offset, stored.shape)
        ]
        if len(found) == 1:
            (start, extent), stored, place = found[0]
            inside = _moved(place, (0,) * len(place), stored.offset)
            return stored.read()[tuple(slice(at, at + n) for at, n in zip(inside, extent, strict=True))]
        out = torch.empty(shape, dtype=self.dtype(name))
        for (start, extent), stored, place in found:
            inner = out[tuple(slice(s - o, s - o + n) for s, o, n in zip(start, offset, extent, strict=True))]
            copy_overlap(Box(place, inner), Box(stored.offset, stored.read()))
        return out

    def buffers(self) -> Sequence[str]:
        """None: everything is a weight."""
        return []

    def read_buffer(self, name: str) -> Tensor:
        """There are none."""
        raise KeyError(name)

    def assets(self) -> Mapping[str, Path | bytes]:
        """None: Megatron keeps the tokenizer elsewhere."""
        return {}


def _places(parts: Sequence[Part], tensors: Mapping[str, Held], folder: Path) -> Mapping[str, list[tuple[Held, Piece]]]:
    """Where each canonical tensor is, when `tensors` are exactly those of the model."""
    missing = {part.name for part in parts} - tensors.keys()
    if missing:
        raise CheckpointError(f"{folder}: there is no tensor {some(missing)}, which its settings ask for")
    unknown = tensors.keys() - {part.name for part in parts}
    if unknown:
        raise CheckpointError(
            f"{folder}: the tensor {some(unknown)} is not one of a model with its settings",
            hint="a tensor that is not understood is refused rather than dropped",
        )
    out = defaultdict(list)
    for part in parts:
        held = tensors[part.name]
        fits = (
            held.shape[1:] == part.shape[1:] and held.shape[0] >= part.shape[0]
            if part.padded
            else held.shape == part.shape
        )
        if not fits:
            raise CheckpointError(
                f"{folder}: {part.name} has shape {list(held.shape)}, but the settings make it {list(part.shape)}"
            )
        if not tiles(held.shape, ((one.offset, one.shape) for one in held.stored)):
            raise CheckpointError(f"{folder}: the shards of {part.name} overlap or leave a part out")
        for piece in part.pieces:
            out[piece.name].append((held, piece))
    return out


def _moved(offset: Shape, to: Shape, origin: Shape) -> Shape:
    return tuple(o + t - g for o, t, g in zip(offset, to, origin, strict=True))
