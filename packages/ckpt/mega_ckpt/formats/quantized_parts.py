"""Plan of the tensors that replace the weights of linear layers in a quantized HuggingFace folder."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mega_ckpt.families.disk_layouts import TRANSPOSED, DiskTensor
from mega_ckpt.formats.calibrated_rounding import InputSecondMoments
from mega_ckpt.formats.weight_quantization import SHAPE, EncodedParts, LinearQuantizer, make_quantizer
from mega_ckpt.tensor_pieces import TensorShape
from mega_common.errors import CheckpointError

_SMALL_PARTS = {"weight_scale", "weight_zero_point", "scales", "biases"}
TensorTypes = Mapping[str, tuple[torch.dtype, TensorShape]]
_LINEAR = re.compile(r"model\.layers\..*_proj\.weight")  # canonical names of the weights that are quantized


@dataclass(frozen=True)
class QuantizedWeightPart:
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
        """Name prefix of the quantized layer's tensors, with a dot at the end."""
        return self.weight.removesuffix("weight")

    def encode_row_blocks(
        self, shape: TensorShape, rows: Iterable[Tensor], other_parts: dict[str, Tensor]
    ) -> Iterator[Tensor]:
        """Yield this part of a quantized weight from blocks of its rows in fp32, and put its smaller parts into `other_parts`.
        The weight has the shape `shape`. Complete smaller parts are put into `other_parts` by disk name, so that scales
        are computed once.
        """
        if self.part == SHAPE:
            yield torch.tensor(shape)
            return
        kept: defaultdict[str, list[Tensor]] = defaultdict(list)
        for block in rows:
            encoded = self.quantizer.encode(block, self.dtype, None)
            yield encoded.pop(self.part)
            for part in encoded.keys() & _SMALL_PARTS:
                kept[self.layer + part].append(encoded[part])
        other_parts |= {name: torch.cat(blocks) for name, blocks in kept.items()}


def select_quantizer(quantize: str, table: Mapping[str, DiskTensor]) -> LinearQuantizer:
    """Return the quantization named `quantize`; CheckpointError if a linear layer of the model does not support it.
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
    return make_quantizer(quantize, {name: disk.shape for name, disk in linear.items()})


def list_quantized_parts(
    quantizer: LinearQuantizer, table: Mapping[str, DiskTensor], tensors: TensorTypes
) -> dict[str, QuantizedWeightPart]:
    """Return the parts of the quantized weights, by disk name; `tensors` are the unquantized dtypes and shapes."""
    return {
        f"{name.removesuffix('weight')}{part}": QuantizedWeightPart(name, part, tensors[name][0], quantizer)
        for name, disk in _find_linear_weights(table).items()
        for part in quantizer.layouts(disk.shape, tensors[name][0])
    }


def _find_linear_weights(table: Mapping[str, DiskTensor]) -> dict[str, DiskTensor]:
    return {name: disk for name, disk in table.items() if any(_LINEAR.fullmatch(slab.name) for slab in disk.slabs)}


class Calibration(Protocol):
    """Interface of calibration data: second moments of the inputs of linear layers; its text form differs for other data."""

    @property
    def description(self) -> str:
        """Size and name of the data, for logs and model cards."""

    def iterate_moments(self) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Yield (canonical names of weights, X X^T [I, I]) for the weights that have the same inputs X [I, tokens]."""


def quantize_calibrated_weights(
    quantizer: LinearQuantizer,
    table: Mapping[str, DiskTensor],
    tensors: TensorTypes,
    calibration: Calibration,
    read_rows: Callable[[DiskTensor], Iterable[Tensor]],
) -> dict[str, EncodedParts]:
    """Return {disk name: parts} of the weights that the calibration data cover, rounded by the moments of their inputs (GPTQ).

    Args:
        tensors: unquantized dtypes and shapes.
        read_rows: returns consecutive rows of a weight, in fp32.
    """
    linear = _find_linear_weights(table)
    disk_names = {slab.name: name for name, disk in linear.items() for slab in disk.slabs}
    found: dict[str, EncodedParts] = {}
    for names, sums in calibration.iterate_moments():
        weights = sorted({disk_names[name] for name in names if name in disk_names})
        if not weights:
            continue
        moments = InputSecondMoments.prepare(sums)
        for weight in weights:
            encoded = [quantizer.encode(rows, tensors[weight][0], moments) for rows in read_rows(linear[weight])]
            found[weight] = {part: torch.cat([rows[part] for rows in encoded]) for part in encoded[0]}
    return found


def describe_rounding(
    quantized: Mapping[str, QuantizedWeightPart], encoded: int, calibration: Calibration | None
) -> str:
    """Return the codes, scales and rounding of quantized weights, of which `encoded` are calibrated, as text."""
    quantizer, count = next(iter(quantized.values())).quantizer, len({part.weight for part in quantized.values()})
    if calibration is None:
        return f"{quantizer.description}, rounded to the nearest without calibration data"
    others = f"; {count - encoded} of {count} weights are rounded to the nearest" if encoded < count else ""
    return f"{quantizer.description}, calibrated on {calibration.description} (GPTQ){others}"


def find_unquantized_layers(table: Mapping[str, DiskTensor], tensors: TensorTypes) -> list[str]:
    """Return the sorted names of the modules that have a matrix that is not quantized, and `lm_head`."""
    linear = _find_linear_weights(table)
    matrices = [name for name, (_, shape) in tensors.items() if len(shape) == 2 and name.endswith(".weight")]
    return sorted({"lm_head"} | {name.removesuffix(".weight") for name in matrices if name not in linear})


def replace_quantized_weights(
    tensors: TensorTypes, table: Mapping[str, DiskTensor], quantized: Mapping[str, QuantizedWeightPart]
) -> dict[str, tuple[torch.dtype, TensorShape]]:
    """Return dtypes and shapes of the tensors to write, in which quantized weights are replaced by their parts."""
    weights = {part.weight for part in quantized.values()}
    found = {name: kind for name, kind in tensors.items() if name not in weights}
    for name, part in quantized.items():
        found[name] = part.quantizer.layouts(table[part.weight].shape, part.dtype)[part.part]
    return found
