"""Weight file and options of a PEFT adapter, and its changes to tensors that have no LoRA adapter in mega.

    lm_head.weight, model.embed_tokens.weight, ...bias    saved whole (modules_to_save, bias), or as `base_layer.weight`
    model.embed_tokens.lora_embedding_A [r, V], _B [D, r] LoRA of an embedding
    lm_head.lora_A.weight, .lora_B.weight                 LoRA of any other matrix
    q_proj.lora_B.bias [N]                                lora_bias: scaled, and added to the base's bias
    model.embed_tokens.token_adapter.trainable_tokens_delta [n, D]  new rows of some tokens

Legend: D model width, V vocabulary, N output width, r rank, n tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from mega_ckpt.canonical_tensors import EMBEDDING, HEAD
from mega_ckpt.families import ModelFamily
from mega_ckpt.families.disk_layouts import TRANSPOSED, DiskTensor
from mega_ckpt.formats.safetensors_file import SafetensorsFile
from mega_ckpt.formats.torch_archive import load_state_tensors
from mega_ckpt.lora_adapter import UntiedWeightSource
from mega_ckpt.lora_tensors import MAGNITUDE, A, B
from mega_ckpt.tensor_pieces import TensorShape, crop_tensor
from mega_ckpt.weight_source import WeightSource
from mega_common.errors import CheckpointError
from mega_common.object_store import Location
from mega_common.strict_config import ConfigProblem, StrictConfig, find_config_problems, format_setting_value

ReadTensor = Callable[[str], Tensor]
WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
_MERGE = "merge the adapter with PEFT (merge_and_unload, save_pretrained) and give mega the merged folder"
_TYPES = ("LORA", "TRAINABLE_TOKENS")
# Applied, or derived from the tensors.
_APPLIED = frozenset([
    "peft_type", "r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "use_dora", "bias", "lora_bias", "init_lora_weights",
    "fan_in_fan_out", "target_modules", "exclude_modules", "target_parameters", "layers_to_transform", "layers_pattern", "modules_to_save",
    "trainable_token_indices", "token_indices", "ensure_weight_tying", "lora_dropout",
])  # fmt: skip
# Only for initialization, training or bookkeeping.
_WITHOUT_EFFECT = frozenset([
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version", "runtime_config", "init_weights",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config", "megatron_core", "qalora_group_size",
    "merge_weights", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr",
])  # fmt: skip
_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_BIASES = ("none", "all", "lora_only", None)


Alpha = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _PeftOptions(StrictConfig):
    """Types of the options of an adapter_config.json that mega computes with."""

    lora_alpha: Alpha = 8
    alpha_pattern: dict[str, Alpha] | None = None
    lora_dropout: float | None = Field(None, ge=0, lt=1, allow_inf_nan=False)
    target_parameters: list[str] | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None

    def problems(self) -> Iterator[ConfigProblem]:
        """Yield keys of `alpha_pattern` that are not regular expressions."""
        for pattern in self.alpha_pattern or {}:
            try:
                re.compile(pattern)
            except re.error as error:
                yield ConfigProblem("alpha_pattern", f"the key {pattern!r} is not a regular expression ({error})")


def check_peft_options(config: Mapping[str, Any], where: object) -> None:
    """Raise CheckpointError if PEFT's adapter_config.json has options that mega does not support.
    These are options that change the adapter's result in a way that mega does not implement; `config` is the file's
    content.

    Raises:
        CheckpointError: naming the option and its value.
    """
    kind = config.get("peft_type", "LORA")
    if kind not in _TYPES:
        raise CheckpointError(
            f"{where}: peft_type = {format_setting_value(kind)} is not supported (only {' and '.join(_TYPES)})",
            hint=_MERGE,
        )
    for key, value in config.items():
        supported = key in _APPLIED or key in _WITHOUT_EFFECT
        if not supported and value is not None and value is not False and value not in ({}, [], ""):
            raise CheckpointError(f"{where}: {key} = {format_setting_value(value):.120} is not supported", hint=_MERGE)
    for problem in find_config_problems(
        _PeftOptions, {key: config[key] for key in _PeftOptions.model_fields.keys() & config.keys()}
    ):
        raise CheckpointError(f"{where}: {problem}", hint=_MERGE)
    if config.get("bias") not in _BIASES:
        raise CheckpointError(f"{where}: bias = {format_setting_value(config['bias'])} is not supported", hint=_MERGE)
    init = config.get("init_lora_weights")
    if init not in _INITS:
        raise CheckpointError(
            f"{where}: init_lora_weights = {format_setting_value(init)} is not supported, since PEFT may change the base weights with it",
            hint="save the adapter with path_initial_model_for_weight_conversion, as a plain LoRA adapter",
        )


def get_lora_alpha_of_module(config: Mapping[str, Any], module: str) -> float:
    """Return the LoRA alpha that an adapter_config.json gives a module, by its name in transformers.
    The alpha is from the first pattern in `alpha_pattern` that matches, else `lora_alpha`. For a weight in
    `target_parameters`, PEFT matches the name of the parameter.
    """
    patterns, parameter = config.get("alpha_pattern") or {}, f"{module}.weight"
    if any(f".{parameter}".endswith(f".{target}") for target in config.get("target_parameters") or ()):
        module = parameter
    own = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return float(next(own, config.get("lora_alpha", 8)))


def get_lora_scale_of_module(config: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the scale of the LoRA product B A of a module: alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""
    return get_lora_alpha_of_module(config, module) / (math.sqrt(rank) if config.get("use_rslora") else rank)


_EMBEDDING_A, _EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"
_ROWS = (".token_adapter.trainable_tokens_delta", ".trainable_tokens_delta")
_BIAS = ".lora_B.bias"


@dataclass(frozen=True)
class AdapterWeightsFile:
    """Tensors of a PEFT adapter's weights file: their shapes by key, and a function that reads one by key."""

    shapes: Mapping[str, TensorShape]
    read: Callable[[str], Tensor]


def open_adapter_weights(folder: Location) -> AdapterWeightsFile:
    """Open the weights of a PEFT folder: adapter_model.safetensors, or adapter_model.bin if that is missing.

    Raises:
        CheckpointError: when both are missing, or the file is damaged.
    """
    if not (folder / WEIGHTS).is_file() and isinstance(folder, Path) and (folder / PICKLED).is_file():
        state = load_state_tensors(folder / PICKLED)
        return AdapterWeightsFile({key: stored.shape for key, stored in state.items()}, lambda key: state[key].read())
    file = SafetensorsFile.open_file(folder / WEIGHTS)
    return AdapterWeightsFile({key: entry.shape for key, entry in file.header.entries.items()}, file.read_tensor)


def check_lora_factors(shapes: Mapping[str, TensorShape], folder: Location) -> None:
    """Raise CheckpointError if a LoRA factor A or B in a PEFT file is flattened or empty instead of a matrix."""
    for key, shape in shapes.items():
        if key.endswith((A, B, ".lora_embedding_A", ".lora_embedding_B")) and (len(shape) < 2 or 0 in shape):
            raise CheckpointError(
                f"{folder / WEIGHTS}: {key} must be a matrix, but has shape {list(shape)}",
                hint="gather an adapter trained with ZeRO-3 or FSDP before it is saved",
            )


@dataclass(frozen=True)
class PeftTensorChange:
    """Changes that a PEFT adapter makes to one tensor W as stored by transformers.
    Keys are names of tensors in the adapter's file.

    Attributes:
        saved: replacement of W.
        down, up: A and B; B A is added to W, with `embedding` transposed.
        scale: scale of B A, or of `bias`.
        magnitude: norm of each row of the result, or with `embedding` of each column (DoRA).
        rows, tokens: new rows of W, and their indices.
        bias: addend of W, if W is a bias.
    """

    saved: str | None = None
    down: str | None = None
    up: str | None = None
    embedding: bool = False
    scale: float = 1.0
    magnitude: str | None = None
    rows: str | None = None
    tokens: tuple[int, ...] = ()
    bias: str | None = None

    def apply_change(self, base: Tensor, read: ReadTensor) -> Tensor:
        """Return the tensor W with the changes of a PEFT adapter.
        The argument `base` is the original W with outputs as rows, whose dtype is kept, and `read` reads a tensor of
        the adapter's file.
        """
        out = base if self.saved is None else read(self.saved).to(base.dtype)
        if self.rows is not None:
            out = out.index_copy(0, torch.tensor(self.tokens), read(self.rows).to(base.dtype))
        if self.bias is not None:
            out = out + self.scale * read(self.bias).to(base.dtype)
        if self.down is not None and self.up is not None:
            product = read(self.up).to(base.dtype) @ read(self.down).to(base.dtype)
            out = out + self.scale * (product.t() if self.embedding else product)
        if self.magnitude is not None:
            lengths = read(self.magnitude).to(base.dtype)
            axis = 0 if self.embedding else 1  # an embedding has a magnitude per column
            out = out * (lengths / torch.linalg.vector_norm(out, dim=axis)).unsqueeze(axis)
        return out


@dataclass(frozen=True)
class PeftChangedTensors:
    """Tensors of a model changed by a PEFT adapter, computed as they are read.

    Attributes:
        base: the original weights, with untied embeddings.
        changes: changes by name of the tensor in transformers.
        table: tensors by name in transformers.
        read_file: reads a tensor of the adapter's file.
        untied: the changes untie the embedding and output layer of the base.
    """

    base: WeightSource
    changes: Mapping[str, PeftTensorChange]
    table: Mapping[str, DiskTensor]
    read_file: ReadTensor
    untied: bool

    @property
    def tensor_shapes(self) -> dict[str, TensorShape]:
        """{canonical name: shape} of the tensors that change."""
        names = dict.fromkeys(slab.name for name in self.changes for slab in self.table[name].slabs)
        return {name: self.base.tensor_shape(name) for name in names}

    def read_tensor_slice(self, name: str, offset: TensorShape, shape: TensorShape) -> Tensor:
        """Read `tensor[offset : offset + shape]` of the changed canonical tensor `name`, in fp32 or wider."""
        original = self.base.read_tensor(name)
        out = original.to(torch.promote_types(original.dtype, torch.float32), copy=True)
        for key, change in self.changes.items():
            disk = self.table[key]
            if any(slab.name == name for slab in disk.slabs):
                for slab, view in disk.slice_views(self._apply_to_disk(disk, change, out.dtype)):
                    if slab.name == name:
                        crop_tensor(out, slab.offset, slab.shape).copy_(view)
        return crop_tensor(out, offset, shape)

    def _apply_to_disk(self, disk: DiskTensor, change: PeftTensorChange, dtype: torch.dtype) -> Tensor:
        base = torch.empty(disk.shape, dtype=dtype)
        for slab, view in disk.slice_views(base):
            view.copy_(self.base.read_tensor_slice(slab.name, slab.offset, slab.shape))
        transposed = disk.layout == TRANSPOSED and base.ndim == 2 and change.saved is None
        if transposed:
            return change.apply_change(base.t(), self.read_file).t()
        return change.apply_change(base, self.read_file)


def take_peft_tensor_changes(
    config: Mapping[str, Any], left: MutableMapping[str, str], shapes: Mapping[str, TensorShape], read: ReadTensor,
    base: WeightSource, family: ModelFamily, where: str,
) -> PeftChangedTensors:  # fmt: skip
    """Remove from `left` the keys of a PEFT file that replace or change tensors of `base`, and return the changed tensors.

    Args:
        config: adapter_config.json.
        left: keys of the file by name in transformers.
        shapes: shapes by key.
        read: reads a tensor by its key.

    Raises:
        CheckpointError: when one has another shape than the base's tensor.
    """
    tied = base.model.tie_embeddings
    untied_base: WeightSource = UntiedWeightSource(base) if tied else base
    table = family.disk_tensor_table(untied_base.model)
    ranks = {name: shape[0] for name, shape in shapes.items() if name.endswith((A, _EMBEDDING_A))}
    changes: dict[str, PeftTensorChange] = {}
    for name, disk in table.items():
        change = _take_change(name, disk, left, ranks, config)
        if change != PeftTensorChange():
            _check_shapes(change, disk, shapes, where)
            changes[name] = change
    untied = tied and _unties_embeddings(changes, table, config)
    _check_embedding_use(changes, table, base, untied, f"{where}: ", family)
    return PeftChangedTensors(untied_base, changes, table, read, untied)


def _take_change(
    name: str, disk: DiskTensor, left: MutableMapping[str, str], ranks: Mapping[str, int], config: Mapping[str, Any]
) -> PeftTensorChange:
    """Return the change to a tensor, and remove its keys from `left`."""
    module, _, kind = name.rpartition(".")
    wrapped = left.pop(f"{module}.base_layer.{kind}", None)
    out = PeftTensorChange(saved=left.pop(name, wrapped))
    if kind == "bias" and module + _BIAS in left:
        key = left.pop(module + _BIAS)
        rank = ranks[key.removesuffix(_BIAS) + A]
        return replace(out, bias=key, scale=get_lora_scale_of_module(config, module, rank))
    if kind != "weight" or len(disk.shape) != 2:
        return out
    for down, up in ((_EMBEDDING_A, _EMBEDDING_B), (A, B)):
        if module + down in left and module + up in left:
            scale = get_lora_scale_of_module(config, module, ranks[left[module + down]])
            keys = left.pop(module + down), left.pop(module + up), left.pop(module + MAGNITUDE, None)
            out = replace(out, down=keys[0], up=keys[1], magnitude=keys[2], scale=scale, embedding=down == _EMBEDDING_A)
    for suffix in _ROWS:
        if module + suffix in left:
            out = replace(out, rows=left.pop(module + suffix), tokens=_token_ids(config, module))
    return out


def _token_ids(config: Mapping[str, Any], module: str) -> tuple[int, ...]:
    """Return the ids of an embedding's trained tokens, in row order."""
    given = config.get("trainable_token_indices") or config.get("token_indices") or []
    if isinstance(given, Mapping):
        given = next((rows for name, rows in given.items() if f".{module}".endswith(f".{name}")), [])
    return tuple(int(token) for token in given)


def _check_shapes(change: PeftTensorChange, disk: DiskTensor, shapes: Mapping[str, TensorShape], where: str) -> None:
    """Reject tensors whose shape differs from their counterpart in the base.

    Raises:
        CheckpointError: naming the tensor and both shapes.
    """
    rows, *columns = disk.shape
    if disk.layout == TRANSPOSED and columns:
        rows, columns = columns[0], [rows]
    into, out = (rows, columns) if change.embedding else ((columns or [0])[0], [rows])
    expected: dict[str | None, TensorShape] = {
        change.saved: disk.shape,
        change.magnitude: (columns[0] if change.embedding else rows,),
        change.rows: (len(change.tokens), *columns),
        change.bias: disk.shape,
    }
    if change.down is not None and change.up is not None:
        expected |= {
            change.down: (shapes[change.down][0], into),
            change.up: (*out, shapes[change.down][0]),
        }
    for key, shape in expected.items():
        if key is not None and shapes[key] != shape:
            raise CheckpointError(
                f"{where}: {key} has shape {list(shapes[key])}, but {disk.name} of the base requires {list(shape)}",
                hint="give the base that the adapter was trained on; if tokens were added for it, add them to the base first: "
                "mega ckpt convert --vocab-size",
            )


def _unties_embeddings(
    changes: dict[str, PeftTensorChange], table: Mapping[str, DiskTensor], config: Mapping[str, Any]
) -> bool:
    """Return whether the changes untie the embedding and output layer of the base.

    PEFT changes both together for rows of tokens, and with `ensure_weight_tying`.
    """
    embedding, head = _stored_as(EMBEDDING, table), _stored_as(HEAD, table)
    first, last = changes.get(embedding), changes.get(head)
    if config.get("ensure_weight_tying") or (first is not None and first.rows is not None):
        changes.pop(head, None)
        if first is None and last is not None:
            changes[embedding] = last
        return False
    return first is not None or last is not None


def _check_embedding_use(
    changes: Mapping[str, PeftTensorChange],
    table: Mapping[str, DiskTensor],
    base: WeightSource,
    untied: bool,
    where: str,
    family: ModelFamily,
) -> None:
    """Reject a change of an embedding that the model uses elsewhere: in an encoder or its head.

    Raises:
        CheckpointError: naming the tensor.
    """
    changed = [name for name in changes if table[name].slabs[0].name in (EMBEDDING, HEAD)]
    if changed and (base.model.encoder or (untied and not base.model.causal)):
        raise CheckpointError(
            f"{where}an adapter of {changed[0]} is not supported in a {family.name} model, which uses its embedding twice",
            hint="merge the adapter with PEFT (merge_and_unload, save_pretrained)",
        )


def _stored_as(name: str, table: Mapping[str, DiskTensor]) -> str:
    return next(disk.name for disk in table.values() if disk.slabs[0].name == name)
