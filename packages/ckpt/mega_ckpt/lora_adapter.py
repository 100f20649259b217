"""LoRA adapters on disk, and weights with an adapter merged in.

Two formats: the checkpoint of a LoRA run, which has only the trained tensors and the identity of the base; and a PEFT
folder (`formats.peft_adapter`). Both are read as a `SavedAdapter` with canonical names. `AdaptedWeightSource` merges an adapter
into its base when tensors are read:

    W + s B A      or, with a magnitude m per row (DoRA), m (W + s B A) / |W + s B A|
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from mega_ckpt.canonical_tensors import EMBEDDING, HEAD, abbreviate_name_list, canonical_tensors
from mega_ckpt.checkpoint import AVERAGE, WEIGHTS, Checkpoint
from mega_ckpt.lora_tensors import MAGNITUDE, A, AdaptedModule, B, adapted_modules, adapter_tensor_shapes
from mega_ckpt.tensor_pieces import TensorShape, crop_tensor, split_slice_by_elements
from mega_ckpt.weight_source import DerivedWeightSource, WeightSource
from mega_common.errors import CheckpointError
from mega_common.lora_config import LoraConfig, is_adapter_tensor
from mega_common.model_config import ModelConfig
from mega_common.object_store import parse_location

AVERAGES_HINT = "use the weights themselves (leave out --ema), or give a run that was trained with train.ema"
# Globs of the files of a tokenizer and its chat templates, which PEFT users save with an adapter.
ADAPTER_TOKENIZER_FILES: tuple[str, ...] = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
SAMPLE = 1024  # elements of each tensor in the digest of a base


class UntiedWeightSource(DerivedWeightSource):
    """Reader of a base model's weights that presents tied embeddings as two untied tensors.
    The tensor `lm_head.weight` is read from the embedding.
    """

    def __init__(self, base: WeightSource) -> None:
        super().__init__(base, base.model.model_copy(update={"tie_embeddings": False}))

    def tensor_names(self) -> Sequence[str]:
        """Return the tensor names of the model with untied embeddings, in the order of the forward pass.
        They are the base model's, and the output layer's.
        """
        names = {*self.base.tensor_names(), HEAD}
        return [name for name in canonical_tensors(self.model) if name in names]

    def tensor_shape(self, name: str) -> TensorShape:
        """Return the global shape of a tensor of the model with untied embeddings.
        The output layer `lm_head.weight` has the shape of the embedding.
        """
        return self.base.tensor_shape(_stored_name(name))

    def tensor_dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor of the model with untied embeddings.
        The output layer `lm_head.weight` has the dtype of the embedding.
        """
        return self.base.tensor_dtype(_stored_name(name))

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` of a tensor of the model with untied embeddings.
        The tensor is `name`.
        """
        return self.base.read_tensor_slice(_stored_name(name), offset, shape)


def _stored_name(name: str) -> str:
    return EMBEDDING if name == HEAD else name


@dataclass(frozen=True)
class SavedAdapter:
    """A LoRA adapter read from disk.
    It has its configuration, its tensors and the identity of the base model it was trained on.

    Attributes:
        lora: configuration of the adapter.
        modules: the adapted projections.
        shapes: shapes of the adapter's tensors, and of tensors that replace those of the base, by canonical name.
        read_tensor_slice: reads a rectangle of one of them, by name, offset and shape.
        base_fingerprint: path and digest of the base, as returned by `fingerprint_base_model`; empty or partial if unknown.
        unties_embeddings: the adapter has a separate output layer for a base with tied embeddings.
        tokenizer: files of the adapter's tokenizer, which replaces that of the base; may be empty.
    """

    lora: LoraConfig
    modules: Mapping[str, AdaptedModule]
    shapes: Mapping[str, TensorShape]
    read_tensor_slice: Callable[[str, TensorShape, TensorShape], Tensor]
    base_fingerprint: Mapping[str, str]
    unties_embeddings: bool = False
    tokenizer: Mapping[str, Path | bytes] = field(default_factory=dict)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, *, averaged: bool = False) -> SavedAdapter:
        """Return the LoRA adapter in a mega checkpoint of a run with `lora`.
        With `averaged`, it is the exponential moving average kept by `train.ema`.

        Raises:
            CheckpointError: when its tensors conflict with its configuration.
        """
        lora = LoraConfig.parse(checkpoint.trainer_state["settings"]["lora"], source=f"{checkpoint.folder}: lora")
        shapes = {key.removeprefix(WEIGHTS): checkpoint.tensor_shape(key) for key in checkpoint.tensor_keys(WEIGHTS)}
        modules = check_adapter_modules(checkpoint.model, lora, shapes, str(checkpoint.folder))
        base = dict(checkpoint.trainer_state.get("base", {}))
        prefix = AVERAGE if averaged and find_ema_weight_names(checkpoint) else WEIGHTS
        return cls(lora, modules, shapes, lambda name, *box: checkpoint.read_tensor(prefix + name, *box), base)

    def read_tensor(self, name: str) -> Tensor:
        """Read a whole tensor of a LoRA adapter.
        It may also be a base model's tensor that was trained in full along with the adapter (`modules_to_save`).
        """
        return self.read_tensor_slice(name, (0,) * len(self.shapes[name]), self.shapes[name])


def find_ema_weight_names(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the names of the weights with an exponential moving average in the checkpoint; a CheckpointError if none.

    Raises:
        CheckpointError: when there are none.
    """
    names = frozenset(key.removeprefix(AVERAGE) for key in checkpoint.tensor_keys(AVERAGE))
    if not names:
        raise CheckpointError(
            f"{checkpoint.folder}: has no exponential moving average (EMA) of the weights", hint=AVERAGES_HINT
        )
    return names


def is_adapter_checkpoint(checkpoint: Checkpoint) -> bool:
    """Return whether a mega checkpoint contains a LoRA adapter instead of a full model."""
    return bool(checkpoint.trainer_state.get("settings", {}).get("lora"))


def check_adapter_modules(
    model: ModelConfig, lora: LoraConfig, shapes: Mapping[str, TensorShape], where: str
) -> dict[str, AdaptedModule]:
    """Return {name: AdaptedModule} of the projections of `model` that `lora` adapts, and check the adapter's tensors.

    Raises:
        CheckpointError: naming a tensor that is missing or unknown in `shapes`, or of another shape.
    """
    modules = adapted_modules(model, lora)
    hint = "give the model that the adapter was trained for"
    expected, stored = adapter_tensor_shapes(modules), {name for name in shapes if is_adapter_tensor(name)}
    if missing := expected.keys() - stored:
        raise CheckpointError(f"{where}: the tensor {abbreviate_name_list(missing)} is missing", hint=hint)
    if unknown := stored - expected.keys():
        raise CheckpointError(
            f"{where}: the tensor {abbreviate_name_list(unknown)} is not part of the adapter's configuration", hint=hint
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CheckpointError(f"{where}: {name} has shape {list(shapes[name])} instead of {list(shape)}", hint=hint)
    return modules


def check_initial_adapter(
    adapter: SavedAdapter, modules: Mapping[str, AdaptedModule], trains: Callable[[str], bool], where: str
) -> None:
    """Raise CheckpointError if a run's LoRA settings would drop a tensor of its initial adapter or change its scale.

    Args:
        adapter: the initial adapter, saved at `where`.
        modules: adapted projections of the run.
        trains: returns whether the run trains a tensor, by its canonical name.

    Raises:
        CheckpointError: naming a tensor that the run does not train, or a projection whose scale differs.
    """
    merge = "merge it first (mega ckpt merge-adapter), and train from the merged weights"
    if adapter.unties_embeddings:
        raise CheckpointError(
            f"{where}: an adapter with untied embeddings conflicts with model.tie_embeddings = True", hint=merge
        )
    run_tensors = adapter_tensor_shapes(modules)
    dropped = [
        name for name in adapter.shapes if not (name in run_tensors if is_adapter_tensor(name) else trains(name))
    ]
    if dropped:
        raise CheckpointError(
            f"{where}: the adapter's tensor {abbreviate_name_list(dropped)} is not trained by this run",
            hint=f"add its module to lora.modules or lora.modules_to_save, or {merge}",
        )
    for module, of in modules.items():
        saved = adapter.modules.get(module)
        if saved is not None and not math.isclose(saved.scale, of.scale, rel_tol=1e-6):
            raise CheckpointError(
                f"{where}: the adapter of {module} was trained with scale {saved.scale:g}, which conflicts with scale "
                f"{of.scale:g} from lora.alpha",
                hint="set lora.alpha, lora.alphas and lora.rslora as the adapter was trained",
            )


class AdaptedWeightSource(DerivedWeightSource):
    """Reader of a base model's weights with a LoRA adapter merged in, in the base's dtypes.
    The sum is computed in fp32 or wider.

    Raises:
        CheckpointError: from the constructor, when the adapter belongs to another model than the base.
    """

    def __init__(self, base: WeightSource, adapter: SavedAdapter) -> None:
        base = UntiedWeightSource(base) if adapter.unties_embeddings else base
        super().__init__(base, base.model)
        self.adapter = adapter
        self._adapted: dict[str, tuple[str, int]] = {}  # {adapted tensor: (its module, its first row in B)}
        for module, of in adapter.modules.items():
            row = 0
            for name in of.weights:
                self._adapted[name] = (module, row)
                row += base.tensor_shape(name)[-2]
        self._replaced = {name for name in adapter.shapes if not is_adapter_tensor(name)}
        for name in self._replaced:
            if name not in base.tensor_names() or base.tensor_shape(name) != adapter.shapes[name]:
                raise CheckpointError(
                    f"the adapter replaces {name} {list(adapter.shapes[name])}, which the base does not have in that shape",
                    hint="give the base that the adapter was trained on",
                )

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` of a base model's tensor with the LoRA adapter merged in.
        For stacked experts, the result is a slice of each expert.
        """
        if name in self._replaced:
            return self.adapter.read_tensor_slice(name, offset, shape).to(self.tensor_dtype(name))
        if name not in self._adapted:
            return self.base.read_tensor_slice(name, offset, shape)
        module, first = self._adapted[name]
        of, merged = self.adapter.modules[module], self._merged_slice(name, offset, shape)
        if of.has_magnitude:
            rows = (
                merged
                if shape[1] == of.in_features
                else self._merged_slice(name, (offset[0], 0), (shape[0], of.in_features))
            )
            magnitude = self.adapter.read_tensor_slice(module + MAGNITUDE, (first + offset[0],), shape[:1])
            merged = merged * (magnitude.to(merged.dtype) / torch.linalg.vector_norm(rows, dim=1)).unsqueeze(1)
        return merged.to(self.tensor_dtype(name))

    def _merged_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Return a rectangle of W + s B A."""
        base = self.base.read_tensor_slice(name, offset, shape)
        module, first = self._adapted[name]
        wide = torch.promote_types(base.dtype, torch.float32)
        *stack, row, column = offset
        *deep, rows, columns = shape
        a, b = (self.adapter.read_tensor(module + suffix).to(wide) for suffix in (A, B))
        a = crop_tensor(a, (*stack, 0, column), (*deep, a.shape[-2], columns))
        b = crop_tensor(b, (*stack, first + row, 0), (*deep, rows, b.shape[-1]))
        return base.to(wide) + self.adapter.modules[module].scale * (b @ a)

    def asset_files(self) -> Mapping[str, Path | bytes]:
        """Return the files other than weights of a base model with a LoRA adapter.
        They are the base model's, with the adapter's tokenizer in place of the base's if it came with one.
        """
        files = self.base.asset_files()
        if not self.adapter.tokenizer:
            return files
        kept = [name for name in files if not any(fnmatch(name, glob) for glob in ADAPTER_TOKENIZER_FILES)]
        return {name: files[name] for name in kept} | dict(self.adapter.tokenizer)


def compute_row_norms(base: WeightSource, name: str, first: int, rows: int) -> Tensor:
    """Return the L2 norms of rows of a base model's matrix, with which DoRA magnitudes are initialized.
    The result is fp64 [rows], for rows `first` to `first + rows` of the matrix `name`.
    """
    matrix = base.read_tensor_slice(name, (first, 0), (rows, base.tensor_shape(name)[1]))
    norms: Tensor = torch.linalg.vector_norm(matrix.double(), dim=1)
    return norms


def fingerprint_base_model(path: str, source: WeightSource) -> dict[str, str]:
    """Return a LoRA base model's `path`, and a `digest` of the names, shapes, dtypes and first elements of its tensors."""
    where, digest = parse_location(path), xxhash.xxh3_128()
    for name in source.tensor_names():
        offset, shape = next(split_slice_by_elements(source.tensor_shape(name), SAMPLE))
        digest.update(f"{name} {source.tensor_shape(name)} {source.tensor_dtype(name)}\n".encode())
        digest.update(
            source.read_tensor_slice(name, offset, shape).contiguous().flatten().view(torch.uint8).numpy().tobytes()
        )
    return {"path": os.path.abspath(path) if isinstance(where, Path) else path, "digest": digest.hexdigest()}


def check_adapter_base(saved: Mapping[str, str] | None, given: Mapping[str, str], where: str) -> None:
    """Raise CheckpointError if a base model is not the one that an adapter was trained on, by their digests."""
    if saved and saved.get("digest") and saved["digest"] != given["digest"]:
        raise CheckpointError(
            f"{where}: the adapter was trained on {saved.get('path')}, and {given['path']} has other weights",
            hint="give the base that the adapter was trained on",
        )
