"""Adapters of low rank on disk, and weights with one put into them.

Two formats: a checkpoint of a run that trained one, which holds no more than what was trained and says what it is beside;
and a folder of PEFT's (`peft.py`). Both are read as an `Adapter`, by canonical names, and `AdaptedSource` is the model of
an adapter and its base, whose tensors are put together as they are asked for:

    W + s B A      or, with a magnitude m for each row (DoRA), m (W + s B A) / |W + s B A|
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from mega_ckpt.checkpoint import AVERAGE, WEIGHTS, Checkpoint
from mega_ckpt.lora import MAGNITUDE, A, Adapted, B, adapted, adapter_tensors
from mega_ckpt.names import some
from mega_ckpt.pieces import Shape, crop, cut
from mega_ckpt.untied import UntiedSource
from mega_common.errors import CheckpointError
from mega_common.lora import LoraConfig, is_adapter
from mega_common.model_config import ModelConfig
from mega_common.remote import place

if TYPE_CHECKING:
    from mega_ckpt.source import Source

# Files of a tokenizer and its chat template, which PEFT's users save beside an adapter.
ADAPTER_TOKENIZER_FILES: tuple[str, ...] = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
SAMPLE = 1024  # elements of each tensor that tell one base from another


@dataclass(frozen=True)
class Adapter:
    """What was trained beside a base.

    Attributes:
        lora: what the adapter is.
        modules: the projections that have one.
        shapes: of its tensors, and of those of the base that it replaces, by canonical name.
        read: gives a rectangle of one of them, by its offset and shape.
        base: where the base is, as far as is known, and its digest, as `base_of` tells them.
        unties: whether it makes an output layer of its own for a base with tied embeddings.
        tokenizer: files of the tokenizer that came with it, if any, which replaces the base's.
    """

    lora: LoraConfig
    modules: Mapping[str, Adapted]
    shapes: Mapping[str, Shape]
    read: Callable[[str, Shape, Shape], Tensor]
    base: Mapping[str, str]
    unties: bool = False
    tokenizer: Mapping[str, Path | bytes] = field(default_factory=dict)

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, *, averaged: bool = False) -> Adapter:
        """That in a checkpoint of a run with `lora`; `averaged` as `train.ema` has kept it.

        Raises:
            CheckpointError: when its tensors are not those of its configuration.
        """
        lora = LoraConfig.parse(checkpoint.state["settings"]["lora"], source=f"{checkpoint.folder}: lora")
        shapes = {key.removeprefix(WEIGHTS): checkpoint.shape(key) for key in checkpoint.keys(WEIGHTS)}
        modules = checked_modules(checkpoint.model, lora, shapes, str(checkpoint.folder))
        base = dict(checkpoint.state.get("base", {}))
        prefix = AVERAGE if averaged and averaged_names(checkpoint) else WEIGHTS
        return cls(lora, modules, shapes, lambda name, *box: checkpoint.read(prefix + name, *box), base)

    def whole(self, name: str) -> Tensor:
        """A tensor."""
        return self.read(name, (0,) * len(self.shapes[name]), self.shapes[name])


def averaged_names(checkpoint: Checkpoint) -> frozenset[str]:
    """The weights of which a checkpoint has averages.

    Raises:
        CheckpointError: when there are none.
    """
    names = frozenset(key.removeprefix(AVERAGE) for key in checkpoint.keys(AVERAGE))
    if not names:
        raise CheckpointError(
            f"{checkpoint.folder}: has no averages of weights", hint="a run with train.ema keeps them"
        )
    return names


def is_adapter_checkpoint(checkpoint: Checkpoint) -> bool:
    """Whether it holds an adapter, and no model."""
    return bool(checkpoint.state.get("settings", {}).get("lora"))


def checked_modules(
    model: ModelConfig, lora: LoraConfig, shapes: Mapping[str, Shape], where: str
) -> dict[str, Adapted]:
    """The projections of `model` that `lora` is for, when the adapter's tensors among `shapes` are all of theirs.

    Raises:
        CheckpointError: naming one that is missing, unknown or of another shape.
    """
    modules = adapted(model, lora)
    expected, held = adapter_tensors(modules), {name for name in shapes if is_adapter(name)}
    for what, names in (("has no tensor", expected.keys() - held), ("has a tensor", held - expected.keys())):
        if names:
            raise CheckpointError(f"{where}: {what} {some(names)}", hint="the adapter is of another model")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(shapes[name])} instead of {list(shape)}",
                hint="the adapter is of another model",
            )
    return modules


def check_start(adapter: Adapter, modules: Mapping[str, Adapted], trains: Callable[[str], bool], where: str) -> None:
    """Refuse to train from an adapter of which a run would drop a part, or scale it differently.

    Args:
        adapter: what the run starts from, at `where`.
        modules: projections with an adapter in the run.
        trains: whether the run trains a tensor, by its canonical name.

    Raises:
        CheckpointError: naming a tensor that the run does not train, or a projection whose scale differs.
    """
    merge = "or merge it first (mega ckpt merge-adapter), and train from the merged weights"
    if adapter.unties:
        raise CheckpointError(
            f"{where}: the adapter makes embedding and output layer differ, which model.tie_embeddings = True keeps equal",
            hint="merge it first (mega ckpt merge-adapter), and train from the merged weights",
        )
    own = adapter_tensors(modules)
    dropped = [name for name in adapter.shapes if not (name in own if is_adapter(name) else trains(name))]
    if dropped:
        raise CheckpointError(
            f"{where}: the adapter has {some(dropped)}, which this run does not train",
            hint=f"add its module to lora.modules or lora.modules_to_save, {merge}",
        )
    for module, of in modules.items():
        saved = adapter.modules.get(module)
        if saved is not None and not math.isclose(saved.scale, of.scale, rel_tol=1e-6):
            raise CheckpointError(
                f"{where}: the adapter of {module} was trained with a scale of {saved.scale:g}, "
                f"and lora.alpha makes it {of.scale:g}",
                hint="set lora.alpha, lora.alphas and lora.rslora as it was trained",
            )


class AdaptedSource:
    """A `Source`: a base with an adapter put into it, in the base's types. The sum is made in at least fp32.

    Raises:
        CheckpointError: from the constructor, when the adapter is of another model than the base.
    """

    def __init__(self, base: Source, adapter: Adapter) -> None:
        base = UntiedSource(base) if adapter.unties else base
        self.base, self.adapter = base, adapter
        self.model: ModelConfig = base.model
        self._homes: dict[str, tuple[str, int]] = {}  # of each changed tensor its module, and its first row in B
        for module, of in adapter.modules.items():
            row = 0
            for name in of.weights:
                self._homes[name] = (module, row)
                row += base.shape(name)[-2]
        self._replaced = {name for name in adapter.shapes if not is_adapter(name)}
        for name in self._replaced:
            if name not in base.keys() or base.shape(name) != adapter.shapes[name]:  # noqa: SIM118
                raise CheckpointError(f"the adapter replaces {name}, which the base has not got in that shape")

    def keys(self) -> Sequence[str]:
        """Those of the base."""
        return self.base.keys()

    def shape(self, name: str) -> Shape:
        """That of the base."""
        return self.base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """That of the base."""
        return self.base.dtype(name)

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        shape = self.shape(name)
        return self.read_slice(name, (0,) * len(shape), shape)

    def read_slice(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A rectangle of it; of a stack of experts, some of each."""
        if name in self._replaced:
            return self.adapter.read(name, offset, shape).to(self.dtype(name))
        if name not in self._homes:
            return self.base.read_slice(name, offset, shape)
        module, first = self._homes[name]
        of, made = self.adapter.modules[module], self._summed(name, offset, shape)
        if of.dora:
            whole = made if shape[1] == of.into else self._summed(name, (offset[0], 0), (shape[0], of.into))
            length = self.adapter.read(module + MAGNITUDE, (first + offset[0],), shape[:1])
            made = made * (length.to(made.dtype) / torch.linalg.vector_norm(whole, dim=1)).unsqueeze(1)
        return made.to(self.dtype(name))

    def _summed(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """A rectangle of W + s B A."""
        held = self.base.read_slice(name, offset, shape)
        module, first = self._homes[name]
        wide = torch.promote_types(held.dtype, torch.float32)
        *stack, row, column = offset
        *deep, rows, columns = shape
        a, b = (self.adapter.whole(module + suffix).to(wide) for suffix in (A, B))
        a = crop(a, (*stack, 0, column), (*deep, a.shape[-2], columns))
        b = crop(b, (*stack, first + row, 0), (*deep, rows, b.shape[-1]))
        return held.to(wide) + self.adapter.modules[module].scale * (b @ a)

    def buffers(self) -> Sequence[str]:
        """Those of the base."""
        return self.base.buffers()

    def read_buffer(self, name: str) -> Tensor:
        """One of them."""
        return self.base.read_buffer(name)

    def assets(self) -> Mapping[str, Path | bytes]:
        """Return the base's, with the tokenizer that came with the adapter if there is one."""
        held = self.base.assets()
        if not self.adapter.tokenizer:
            return held
        return {name: file for name, file in held.items() if name not in ADAPTER_TOKENIZER_FILES} | dict(
            self.adapter.tokenizer
        )


def row_lengths(base: Source, name: str, first: int, rows: int) -> Tensor:
    """The lengths fp64 [rows] of some rows of a matrix [N, D], which magnitudes start from."""
    held = base.read_slice(name, (first, 0), (rows, base.shape(name)[1]))
    lengths: Tensor = torch.linalg.vector_norm(held.double(), dim=1)
    return lengths


def base_of(path: str, source: Source) -> dict[str, str]:
    """What tells a base: its `path`, and a `digest` of the names, shapes, types and first elements of its tensors."""
    where, digest = place(path), xxhash.xxh3_128()
    for name in source.keys():  # noqa: SIM118
        offset, shape = next(cut(source.shape(name), SAMPLE))
        digest.update(f"{name} {source.shape(name)} {source.dtype(name)}\n".encode())
        digest.update(source.read_slice(name, offset, shape).contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {"path": os.path.abspath(path) if isinstance(where, Path) else path, "digest": digest.hexdigest()}


def check_base(saved: Mapping[str, str] | None, given: Mapping[str, str], where: str) -> None:
    """Refuse another base than the one that an adapter was trained beside.

    Raises:
        CheckpointError: when the digests of `base_of` differ.
    """
    if saved and saved.get("digest") and saved["digest"] != given["digest"]:
        raise CheckpointError(
            f"{where}: the adapter is of {saved.get('path')}, and {given['path']} has other weights",
            hint="give the weights that it was trained beside",
        )
