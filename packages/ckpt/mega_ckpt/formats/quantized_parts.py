"""Plan of the tensors that replace the weights of linear layers in a quantized HuggingFace folder."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_ckpt.families.disk_layouts import TRANSPOSED, DiskTensor
from mega_ckpt.formats.weight_quantization import SHAPE, LinearQuantizer, make_quantizer
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.errors import CheckpointError
from mega_common.progress_logging import logger

_SMALL_PARTS = {"weight_scale", "scales", "biases"}
TensorTypes = Mapping[str, tuple[torch.dtype, TensorShape]]
_LINEAR = re.compile(r"model\.layers\..*_proj\.weight")  # canonical names of the weights that are quantized


@dataclass(frozen=True)
class QuantizedPart:
    """One tensor of a quantized weight: codes, scales or the shape.

    Attributes:
        weight: disk name of the weight.
        part: end of the tensor's name, after the name of the layer.
        dtype: dtype that the weight would have without quantization.
        quantizer: encodes the weight.
    """

    weight: str
    part: str
    dtype: torch.dtype
    quantizer: LinearQuantizer

    @property
    def layer(self) -> str:
        """Name of the layer, with the dot that ends it."""
        return self.weight.removesuffix("weight")

    def iter_blocks(
        self, shape: TensorShape, rows: Iterable[Tensor], other_parts: dict[str, Tensor]
    ) -> Iterator[Tensor]:
        """Yield one part of a quantized weight, such as its codes, from blocks of its rows in fp32.
        The weight has the shape `shape`. Complete smaller parts are put into `other_parts` by disk name, so that scales
        are computed once.
        """
        if self.part == SHAPE:
            yield torch.tensor(shape)
            return
        kept: defaultdict[str, list[Tensor]] = defaultdict(list)
        for block in rows:
            encoded = self.quantizer.encode(block, self.dtype)
            yield encoded.pop(self.part)
            for part in encoded.keys() & _SMALL_PARTS:
                kept[self.layer + part].append(encoded[part])
        other_parts |= {name: torch.cat(blocks) for name, blocks in kept.items()}


def select_quantizer(quantize: str, table: Mapping[str, DiskTensor]) -> LinearQuantizer:
    """Return the quantization with a name of `weight_quantization`, after a check that the linear layers support it.
    `quantize` is the name, and `table` maps disk names to the canonical tensors in them.

    Raises:
        CheckpointError: naming a linear layer whose weight is not stored as a matrix [O, I] of its own.
    """
    linear = _find_linear_weights(table)
    for name, disk in linear.items():
        if len(disk.shape) != 2 or disk.layout == TRANSPOSED or not name.endswith(".weight"):
            raise CheckpointError(
                f"--quantize {quantize} requires a matrix (out, in) for each linear layer, but the family of this model "
                f"stores {name} {list(disk.shape)} in another layout",
                hint="choose another --family, or leave out --quantize",
            )
    if not linear:
        raise CheckpointError(f"--quantize {quantize}: the model has no linear layers to quantize")
    quantizer = make_quantizer(quantize, {name: disk.shape for name, disk in linear.items()})
    logger.info("%d weights are quantized: %s", len(linear), quantizer.description)
    return quantizer


def list_quantized_parts(
    quantizer: LinearQuantizer, table: Mapping[str, DiskTensor], tensors: TensorTypes
) -> dict[str, QuantizedPart]:
    """Return the parts of the quantized weights, by disk name; `tensors` are the unquantized dtypes and shapes."""
    return {
        f"{name.removesuffix('weight')}{part}": QuantizedPart(name, part, tensors[name][0], quantizer)
        for name, disk in _find_linear_weights(table).items()
        for part in quantizer.layouts(disk.shape, tensors[name][0])
    }


def _find_linear_weights(table: Mapping[str, DiskTensor]) -> dict[str, DiskTensor]:
    return {name: disk for name, disk in table.items() if any(_LINEAR.fullmatch(slab.name) for slab in disk.slabs)}


def find_ignored_layers(table: Mapping[str, DiskTensor], tensors: TensorTypes) -> list[str]:
    """Return the names of the modules that have a matrix among `tensors`, and are not quantized."""
    linear = _find_linear_weights(table)
    matrices = [name for name, (_, shape) in tensors.items() if len(shape) == 2 and name.endswith(".weight")]
    return sorted({"lm_head"} | {name.removesuffix(".weight") for name in matrices if name not in linear})


def replace_quantized(
    tensors: TensorTypes, table: Mapping[str, DiskTensor], quantized: Mapping[str, QuantizedPart]
) -> dict[str, tuple[torch.dtype, TensorShape]]:
    """Return dtypes and shapes of the tensors to write, in which quantized weights are replaced by their parts."""
    weights = {part.weight for part in quantized.values()}
    found = {name: kind for name, kind in tensors.items() if name not in weights}
    for name, part in quantized.items():
        found[name] = part.quantizer.layouts(table[part.weight].shape, part.dtype)[part.part]
    return found
