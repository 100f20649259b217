"""Interface of weights that can be read in any format, and helpers for all formats."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mega_ckpt.tensor_pieces import TensorShape
from mega_common.atomic_files import add_path_to_errors
from mega_common.model_config import ModelConfig

VISION = "vision encoder"
# Tensors that some families carry as buffers, but that are weights of parts that mega does not run.
_UNSUPPORTED_PARTS = {
    VISION: r"(model\.)?(visual|vision_tower|vision_model|embed_vision)\.(?!(.*\.)?(head\..*|inv_freq|position_ids)$)",
    "audio encoder": r"(model\.)?(audio_tower|embed_audio)\.",
    "multi-token prediction block": r"(model\.)?mtp\.",
}


class WeightSource(Protocol):
    """Interface for reading a model's weights by canonical name, each tensor whole and global (unsharded)."""

    @property
    def model(self) -> ModelConfig:
        """Configuration of the model whose weights are read."""

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical names of the model's tensors, in the order of the forward pass."""

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global (unsharded) shape of a tensor of the model, by its canonical name."""

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor of the model, by its canonical name."""

    def read_tensor(self, name: str) -> Tensor:
        """Read a whole tensor of the model, by its canonical name.
        The result may be a view of the file: copy it before changing it.
        """

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` of the canonical tensor `name`.
        Only the bytes that are needed are read. The result may be a view of the file.
        """

    def buffer_names(self) -> Sequence[str]:
        """Return the names of the buffers: tensors of a HuggingFace folder that are not weights, such as masks."""

    def read_buffer(self, name: str) -> Tensor:
        """Read one buffer of a HuggingFace folder (a tensor that is not a weight), unchanged."""

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return the files that accompany a model's weights.
        They are the tokenizer, config.json and so on, as {relative path: file or content}.
        """


class DerivedWeightSource:
    """Base of weight sources that change tensors of another source, `base`; all other tensors are those of `base`."""

    def __init__(self, base: WeightSource, model: ModelConfig) -> None:
        self.base, self.model = base, model

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical tensor names of the base source, in the order of the forward pass."""
        return self.base.tensor_names()

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global (unsharded) shape of a tensor in the base source."""
        return self.base.tensor_shape(name)

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in the base source."""
        return self.base.tensor_dtype(name)

    def read_tensor(self, name: str) -> Tensor:
        """Read a whole tensor of the derived weights by its canonical name."""
        shape = self.tensor_shape(name)
        return self.read_tensor_slice(name, (0,) * len(shape), shape)

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` of a tensor in the base source, unless a subclass changes it."""
        return self.base.read_tensor_slice(name, offset, shape)

    def buffer_names(self) -> Sequence[str]:
        """Return the names of the buffers of the base source."""
        return self.base.buffer_names()

    def read_buffer(self, name: str) -> Tensor:
        """Read one buffer of the base source."""
        return self.base.read_buffer(name)

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return the files that accompany the base source's weights (tokenizer, config.json and so on)."""
        return self.base.asset_files()


def choose_cast_dtype(source: WeightSource, name: str, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a cast to `dtype` gives a tensor: for None, integers and a router's selection bias, its own.
    Updates of the selection bias are small, and published folders have it in fp32.
    """
    stored = source.tensor_dtype(name)
    fixed = not stored.is_floating_point or name.endswith("e_score_correction_bias")
    return stored if dtype is None or fixed else dtype


def find_unsupported_parts(buffers: Iterable[str]) -> dict[str, list[str]]:
    """Group the tensors in `buffers` that belong to model components that mega does not run, {component: tensor names}."""
    found: dict[str, list[str]] = {}
    for name in buffers:
        part = next((part for part, pattern in _UNSUPPORTED_PARTS.items() if re.match(pattern, name)), None)
        if part is not None:
            found.setdefault(part, []).append(name)
    return found


def write_file_durably(path: Path, content: Path | bytes) -> None:
    """Write or copy a small file and flush it to disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, Path):
        content = content.read_bytes()
    with add_path_to_errors(path), open(path, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


MOMENTS = ("exp_avg", "exp_avg_sq")
LOW = (torch.bfloat16, torch.float16)  # dtypes of weights for which the optimizer keeps fp32 main weights


class OptimizerNotConverted(Exception):
    """Exception for another trainer's optimizer state that cannot be converted; the message is the reason."""


class TensorReader(Protocol):
    """Interface for reading tensors by canonical name, without a model configuration (see `WeightSource`)."""

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical names of all tensors that can be read."""

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global (unsharded) shape of a tensor, by its canonical name."""

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` of a tensor, by its canonical name."""


@dataclass(frozen=True)
class ConvertedTrainingState:
    """Optimizer and trainer state converted from another trainer's checkpoint, to resume from, without the weights.

    Attributes:
        step: number of optimizer steps, including skipped ones.
        state: the trainer state.
        tensors: tensors by kind, as named in mega checkpoints: `exp_avg`, `exp_avg_sq`, and `main` for 16-bit weights.
    """

    step: int
    state: Mapping[str, Any]
    tensors: Mapping[str, TensorReader]


def make_trainer_state(
    model: ModelConfig, *, samples: int, updates: int, loss_scale: list[float] | None = None
) -> dict[str, Any]:
    """Return the JSON trainer state for a run of `model` that consumed `samples` and made `updates` optimizer updates."""
    return {
        "consumed_samples": samples,
        "optimizer_steps": updates,
        "loss_average": 0.0,
        "loss_seen": 0,
        "loss_scale": loss_scale,
        "settings": {"model": model.model_dump(mode="json", by_alias=True)},
    }
