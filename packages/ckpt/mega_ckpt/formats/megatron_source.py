"""Weight source of a Megatron-Core checkpoint in either of its formats: locates the folder, its settings and its
tensors.

It needs neither Megatron nor a GPU, and all pickles are loaded with `safe_pickles`.

    iter_0000100/run_config.yaml                      Megatron-Bridge: section `model`
    checkpoint/context/model.yaml, checkpoint/weights NeMo 2: section `config`

Both have the fields of Megatron-Core's TransformerConfig, most of which have the names of the arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_ckpt.canonical_tensors import canonical_tensors
from mega_ckpt.formats import megatron_dist, megatron_legacy
from mega_ckpt.formats.megatron_args import read_megatron_args
from mega_ckpt.formats.megatron_contents import MegatronContents, MegatronTensorReader, read_megatron_optimizer_state
from mega_ckpt.formats.megatron_names import list_megatron_tensor_mappings
from mega_ckpt.tensor_pieces import TensorShape
from mega_ckpt.weight_source import ConvertedTrainingState
from mega_common.errors import CheckpointError
from mega_common.model_config import ModelConfig
from mega_common.progress_logging import logger
from mega_common.strict_config import load_yaml_mapping

BRIDGE, NEMO = "run_config.yaml", "context/model.yaml"
_RENAMED = {
    "num_moe_experts": "num_experts",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "norm_epsilon",
}
_GATED = {"silu": {"swiglu": True}, "quick_gelu": {"quick_geglu": True}}
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    "gelu": {"bias_gelu_fusion": False}, "squared_relu": {"squared_relu": True}, "openai_gelu": {"openai_gelu": True},
}  # fmt: skip


def read_nemo_or_bridge_args(folder: Path) -> dict[str, Any]:
    """Return Megatron's `args` from the model settings of NeMo or Megatron-Bridge in a checkpoint; empty if it has none.
    The checkpoint's iteration folder is `folder`.

    Raises:
        CheckpointError: when Megatron's arguments cannot express the activation.
    """
    for path, section in ((folder / BRIDGE, "model"), (folder.parent / NEMO, "config")):
        if path.is_file():
            fields = load_yaml_mapping(path).get(section)
            return _args(fields, path) if isinstance(fields, Mapping) else {}
    return {}


def _args(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    out = {_RENAMED.get(key, key): value for key, value in fields.items() if not isinstance(value, Mapping)}
    heads, groups = fields.get("num_attention_heads"), fields.get("num_query_groups")
    return out | _activation(fields, path) | {
        "group_query_attention": groups is not None and groups != heads,
        "untie_embeddings_and_output_weights": not fields.get("share_embeddings_and_output_weights", True),
    }  # fmt: skip


def _activation(fields: Mapping[str, Any], path: Path) -> dict[str, Any]:
    value = fields.get("activation_func") or "gelu"
    name = str(value.get("_target_") if isinstance(value, Mapping) else value).rpartition(".")[2].strip("'<> ")
    gated = fields.get("gated_linear_unit")
    supported = _GATED if gated else _PLAIN
    if name not in supported:
        gate = " with gated_linear_unit" if gated else ""
        raise CheckpointError(f"{path}: activation_func = {name}{gate} is not supported (only {', '.join(supported)})")
    return dict(supported[name])


WEIGHTS = ("weights", "model_weights")  # subfolder of a NeMo 2 folder, and of an unpacked NeMo 1 archive
TRACKER = "latest_checkpointed_iteration.txt"


def is_megatron_folder(folder: Path) -> bool:
    """Return whether `folder` looks like a Megatron checkpoint or a folder of them, by the names of files in it."""
    # with config.json, .metadata may be that of FSDP
    huggingface = (folder / "config.json").exists() and not (folder / megatron_dist.FORMAT).exists()
    return (
        (folder / TRACKER).exists()
        or ((folder / ".metadata").exists() and not huggingface)
        or (folder / megatron_dist.COMMON).exists()
        or _nemo_weights_folder(folder) is not None
        or any(folder.glob("mp_rank_*/model_optim_rng.pt"))
        or any(folder.glob("mp_rank_*/model_rng.pt"))
        or any(folder.glob("iter_[0-9]*"))
    )


def find_megatron_iteration_folder(folder: Path) -> Path:
    """Return the folder of one iteration: `folder` itself, the one that its tracker file names, or NeMo's weights folder.

    Raises:
        CheckpointError: when the tracker is missing, empty or names a missing folder.
    """
    tracker = folder / TRACKER
    if (inside := _nemo_weights_folder(folder)) is not None:
        return inside
    if not tracker.exists():
        found = sorted(path.name for path in folder.glob("iter_[0-9]*") if path.is_dir())
        if not found or (folder / ".metadata").exists():
            return folder
        raise CheckpointError(f"{folder}: {TRACKER} is missing", hint=f"give one iteration: {folder / found[-1]}")
    text = tracker.read_text(errors="replace").strip()
    if text != "release" and not text.isdecimal():
        raise CheckpointError(
            f"{tracker}: must be an iteration or 'release', not {text[:40]!r}", hint="give an iter_ folder instead"
        )
    named = folder / (text if text == "release" else f"iter_{int(text):07d}")
    if not named.is_dir():
        raise CheckpointError(
            f"{tracker}: {text} requires the folder {named.name}, which is missing", hint="give an iter_ folder instead"
        )
    return named


def _nemo_weights_folder(folder: Path) -> Path | None:
    """Return NeMo's weights folder, or None."""
    held = (folder / name for name in WEIGHTS)
    return next(
        (one for one in held if any((one / file).exists() for file in (".metadata", megatron_dist.COMMON))), None
    )


def open_megatron_checkpoint(folder: Path) -> MegatronContents:
    """Open a Megatron checkpoint of either format (`torch_dist` or `torch`) without reading its tensors.

    Raises:
        CheckpointError: when it is damaged or has neither format.
    """
    folder = find_megatron_iteration_folder(folder)
    if (folder / ".metadata").exists():
        return megatron_dist.open_megatron_dist_checkpoint(folder)
    if any(folder.glob("mp_rank_*")):
        return megatron_legacy.open_megatron_legacy_checkpoint(folder)
    raise CheckpointError(
        f"{folder}: must be a torch_dist checkpoint (.metadata) or have mp_rank_ folders",
        hint="save other formats (zarr, fsdp_dtensor) again with --ckpt-format torch_dist, in NeMo with dist_ckpt_format: torch_dist",
    )


class MegatronSource:
    """Reader of a model's weights from a Megatron checkpoint, by canonical names.

    Args:
        folder: folder of the tracker file, or of one iteration.
        settings: fields of `ModelConfig` that are missing in the checkpoint, or override it.

    Raises:
        CheckpointError: naming the unsupported or damaged file, setting or tensor.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.contents = open_megatron_checkpoint(folder)
        args = self.contents.args or read_nemo_or_bridge_args(find_megatron_iteration_folder(folder))
        self.model: ModelConfig = read_megatron_args(args, folder, settings)
        if not args.get("vocab_size") and "vocab_size" not in (settings or {}):
            rows = self.model.vocab_size
            logger.warning("%s: vocab_size is missing; all %d padded rows are used as the vocabulary", folder, rows)
        layers = self.model.num_layers + self.model.mtp_layers
        if layers > self.contents.count:
            raise CheckpointError(f"{folder}: {layers} layers, but only {self.contents.count} tensors")
        self._shapes = canonical_tensors(self.model)
        self._parts = list_megatron_tensor_mappings(self.model)
        self._weights = MegatronTensorReader(self._parts, self.contents.tensors(self._parts), folder)

    def tensor_names(self) -> Sequence[str]:
        """Return the canonical tensor names, in the order of the forward pass."""
        return list(self._shapes)

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global (unsharded) shape of a canonical tensor."""
        return self._shapes[name]

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor of the Megatron checkpoint."""
        return self._weights.tensor_dtype(name)

    def read_tensor(self, name: str) -> Tensor:
        """Read a whole canonical tensor from the Megatron checkpoint."""
        shape = self.tensor_shape(name)
        return self.read_tensor_slice(name, (0,) * len(shape), shape)

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` of a model's weight from a Megatron checkpoint.
        The result is a view of the file if the slice is stored contiguously in one chunk, else assembled.
        """
        return self._weights.read_tensor_slice(name, offset, shape)

    def read_training_state(self) -> ConvertedTrainingState:
        """Return the optimizer and trainer state in the Megatron checkpoint, to resume from.

        Raises:
            OptimizerNotConverted: with the reason, if the state cannot be converted.
        """
        return read_megatron_optimizer_state(
            self.contents, self._parts, self.folder, self.model, self.tensor_dtype(self.tensor_names()[0])
        )

    def buffer_names(self) -> Sequence[str]:
        """Return an empty list: all tensors of a Megatron checkpoint are weights."""
        return []

    def read_buffer(self, name: str) -> Tensor:
        """Raise KeyError: Megatron checkpoints have no buffers."""
        raise KeyError(name)

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return an empty mapping: Megatron checkpoints contain no tokenizer or other files to copy."""
        return {}
