"""Tensors of a model that an adapter of PEFT's replaces, or changes where mega keeps no adapter beside them.

    lm_head.weight, model.embed_tokens.weight, ...bias    saved whole (modules_to_save, bias), or as `base_layer.weight`
    model.embed_tokens.lora_embedding_A [r, V], _B [D, r] LoRA of an embedding
    lm_head.lora_A.weight, .lora_B.weight                 LoRA of any other matrix
    q_proj.lora_B.bias [N]                                lora_bias: scaled, and added to the base's bias
    model.embed_tokens.token_adapter.trainable_tokens_delta [n, D]  new rows of some tokens

Legend: D model width, V vocabulary, N output width, r rank, n tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mega_ckpt.families import Family
from mega_ckpt.families.layouts import TRANSPOSED, DiskTensor
from mega_ckpt.formats.peft_options import scale_of
from mega_ckpt.lora import MAGNITUDE, A, B
from mega_ckpt.names import EMBEDDING, HEAD
from mega_ckpt.pieces import Shape, crop
from mega_ckpt.untied import UntiedSource
from mega_common.errors import CheckpointError

if TYPE_CHECKING:
    from mega_ckpt.source import Source

Read = Callable[[str], Tensor]
_EMBEDDING_A, _EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"
_ROWS = (".token_adapter.trainable_tokens_delta", ".trainable_tokens_delta")
_BIAS = ".lora_B.bias"


@dataclass(frozen=True)
class TensorChange:
    """Changes to one tensor as transformers has it, W; keys are names of tensors in the adapter's file.

    Attributes:
        saved: W itself.
        down, up: A and B; with `embedding` W gains (B A) transposed.
        scale: factor of B A, or of `bias`.
        magnitude: length of each row of the result, or with `embedding` of each column (DoRA).
        rows, tokens: new rows of W, and their numbers.
        bias: what is added to W, a bias.
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

    def applied(self, held: Tensor, read: Read) -> Tensor:
        """Return the new W, in the type of `held`, which has outputs as rows."""
        out = held if self.saved is None else read(self.saved).to(held.dtype)
        if self.rows is not None:
            out = out.index_copy(0, torch.tensor(self.tokens), read(self.rows).to(held.dtype))
        if self.bias is not None:
            out = out + self.scale * read(self.bias).to(held.dtype)
        if self.down is not None and self.up is not None:
            product = read(self.up).to(held.dtype) @ read(self.down).to(held.dtype)
            out = out + self.scale * (product.t() if self.embedding else product)
        if self.magnitude is not None:
            lengths = read(self.magnitude).to(held.dtype)
            axis = 0 if self.embedding else 1  # an embedding's magnitudes are those of its columns
            out = out * (lengths / torch.linalg.vector_norm(out, dim=axis)).unsqueeze(axis)
        return out


@dataclass(frozen=True)
class Changed:
    """Changed tensors of a model, worked out as they are read.

    Attributes:
        base: the weights that change, without ties.
        changes: changes by the names of transformers' tensors.
        table: those tensors.
        read_file: reads a tensor of the adapter's file.
        untied: whether embedding and output layer differ, though the base has them tied.
    """

    base: Source
    changes: Mapping[str, TensorChange]
    table: Mapping[str, DiskTensor]
    read_file: Read
    untied: bool

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the canonical tensors that change, with their shapes."""
        names = dict.fromkeys(slab.name for name in self.changes for slab in self.table[name].slabs)
        return {name: self.base.shape(name) for name in names}

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """Return a rectangle of a canonical tensor."""
        held = self.base.read(name)
        out = held.to(torch.promote_types(held.dtype, torch.float32), copy=True)
        for key, change in self.changes.items():
            disk = self.table[key]
            if any(slab.name == name for slab in disk.slabs):
                for slab, view in disk.views(self._changed(disk, change, out.dtype)):
                    if slab.name == name:
                        crop(out, slab.offset, slab.shape).copy_(view)
        return crop(out, offset, shape)

    def _changed(self, disk: DiskTensor, change: TensorChange, dtype: torch.dtype) -> Tensor:
        held = torch.empty(disk.shape, dtype=dtype)
        for slab, view in disk.views(held):
            view.copy_(self.base.read_slice(slab.name, slab.offset, slab.shape))
        turned = disk.layout == TRANSPOSED and held.ndim == 2 and change.saved is None
        return change.applied(held.t(), self.read_file).t() if turned else change.applied(held, self.read_file)


def changes_of(
    config: Mapping[str, Any], left: MutableMapping[str, str], shapes: Mapping[str, Shape], read: Read,
    base: Source, family: Family, where: str,
) -> Changed:  # fmt: skip
    """Take the tensors out of `left` that replace or change tensors of `base`.

    Args:
        config: adapter_config.json.
        left: keys of the file by name in transformers.
        shapes: shapes by key.
        read: reads a tensor by its key.

    Raises:
        CheckpointError: when one has another shape than the base's tensor.
    """
    tied = base.model.tie_embeddings
    held: Source = UntiedSource(base) if tied else base
    table = family.table(held.model)
    ranks = {name: shape[0] for name, shape in shapes.items() if name.endswith((A, _EMBEDDING_A))}
    changes: dict[str, TensorChange] = {}
    for name, disk in table.items():
        change = _change(name, disk, left, ranks, config)
        if change != TensorChange():
            _check_shapes(change, disk, shapes, where)
            changes[name] = change
    untied = tied and _separate_ends(changes, table, config)
    _check_ends(changes, table, base, untied, f"{where}: ", family)
    return Changed(held, changes, table, read, untied)


def _change(
    name: str, disk: DiskTensor, left: MutableMapping[str, str], ranks: Mapping[str, int], config: Mapping[str, Any]
) -> TensorChange:
    """Return the change to a tensor, whose keys are taken out of `left`."""
    module, _, kind = name.rpartition(".")
    wrapped = left.pop(f"{module}.base_layer.{kind}", None)
    out = TensorChange(saved=left.pop(name, wrapped))
    if kind == "bias" and module + _BIAS in left:
        key = left.pop(module + _BIAS)
        rank = ranks[key.removesuffix(_BIAS) + A]
        return replace(out, bias=key, scale=scale_of(config, module, rank))
    if kind != "weight" or len(disk.shape) != 2:
        return out
    for down, up in ((_EMBEDDING_A, _EMBEDDING_B), (A, B)):
        if module + down in left and module + up in left:
            scale = scale_of(config, module, ranks[left[module + down]])
            keys = left.pop(module + down), left.pop(module + up), left.pop(module + MAGNITUDE, None)
            out = replace(out, down=keys[0], up=keys[1], magnitude=keys[2], scale=scale, embedding=down == _EMBEDDING_A)
    for suffix in _ROWS:
        if module + suffix in left:
            out = replace(out, rows=left.pop(module + suffix), tokens=_tokens(config, module))
    return out


def _tokens(config: Mapping[str, Any], module: str) -> tuple[int, ...]:
    """Return the numbers of an embedding's trained tokens, in the order of their rows."""
    given = config.get("trainable_token_indices") or config.get("token_indices") or []
    if isinstance(given, Mapping):
        given = next((rows for name, rows in given.items() if f".{module}".endswith(f".{name}")), [])
    return tuple(int(token) for token in given)


def _check_shapes(change: TensorChange, disk: DiskTensor, shapes: Mapping[str, Shape], where: str) -> None:
    """Refuse tensors of another shape than their place in the base.

    Raises:
        CheckpointError: naming the tensor and both shapes.
    """
    rows, *columns = disk.shape
    if disk.layout == TRANSPOSED and columns:
        rows, columns = columns[0], [rows]
    into, out = (rows, columns) if change.embedding else ((columns or [0])[0], [rows])
    expected: dict[str | None, Shape] = {
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
                hint="give the base that the adapter was trained beside; if new tokens were added, add them to the base "
                "first: mega ckpt convert --vocab-size",
            )


def _separate_ends(
    changes: dict[str, TensorChange], table: Mapping[str, DiskTensor], config: Mapping[str, Any]
) -> bool:
    """Return whether the changes make embedding and output layer differ that the base has tied.

    PEFT changes both together for rows of tokens and with `ensure_weight_tying`.
    """
    embedding, head = _stored_as(EMBEDDING, table), _stored_as(HEAD, table)
    first, last = changes.get(embedding), changes.get(head)
    if config.get("ensure_weight_tying") or (first is not None and first.rows is not None):
        changes.pop(head, None)
        if first is None and last is not None:
            changes[embedding] = last
        return False
    return first is not None or last is not None


def _check_ends(
    changes: Mapping[str, TensorChange],
    table: Mapping[str, DiskTensor],
    base: Source,
    untied: bool,
    where: str,
    family: Family,
) -> None:
    """Refuse to change an embedding that a model uses elsewhere, too: in an encoder, or in the head of one.

    Raises:
        CheckpointError: naming the tensor.
    """
    changed = [name for name in changes if table[name].slabs[0].name in (EMBEDDING, HEAD)]
    if changed and (base.model.encoder or (untied and not base.model.causal)):
        raise CheckpointError(
            f"{where}a change of {changed[0]} is not supported in a {family.name} model, which uses its embedding twice",
            hint="merge the adapter with PEFT (merge_and_unload, save_pretrained)",
        )


def _stored_as(name: str, table: Mapping[str, DiskTensor]) -> str:
    return next(disk.name for disk in table.values() if disk.slabs[0].name == name)
