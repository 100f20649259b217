"""Description of a parameter: location of its elements, initialisation, and the groups its gradient is summed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mega_ckpt.tensor_pieces import TensorPiece
from mega_common.errors import ConfigError
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.kernel_interface import GemmOperand
from mega_trainer.kernels.nf4_quantizer import BLOCK, WeightQuantizer, get_unpacked_4bit_shape

# Returns the destination of the next part of a parameter's gradient, and whether to add to its values or overwrite them.
# To be called once for each part, which must then be written there.
MainGrad = Callable[[], tuple[Tensor, bool]]


@dataclass(frozen=True)
class NormalInit:
    """Initialisation from a normal distribution around zero."""

    std: float

    def draw_values(self, out: Tensor, stream: torch.Generator) -> Tensor:
        """Fill `out` with normally distributed numbers from the generator and return it."""
        return out.normal_(0.0, self.std, generator=stream)


@dataclass(frozen=True)
class UniformInit:
    """Initialisation from a uniform distribution between `low` and `high`, mapped by the function `then` if given."""

    low: float
    high: float
    then: Callable[[Tensor], Tensor] | None = None

    def draw_values(self, out: Tensor, stream: torch.Generator) -> Tensor:
        """Fill `out` with uniformly distributed numbers from the generator, apply `then`, and return them."""
        out.uniform_(self.low, self.high, generator=stream)
        return out if self.then is None else self.then(out)


@dataclass(frozen=True)
class ParameterInfo:
    """Description of a parameter for initialisation, gradient reduction, norms and checkpoints.
    It has the parameter's place in canonical tensors, its groups and initial values.

    Attributes:
        pieces: location of the elements in the canonical tensors; padding belongs to no piece.
        data: the group over which the gradient is reduced and ZeRO slices are cut.
        std: standard deviation of the initial normal distribution; None: no normal distribution.
        fill: initial constant, if `std` and `uniform` are None.
        grad_sync: other groups whose ranks each have a part of the gradient, to be summed.
        replicas: groups whose ranks hold the same values; norms count them on the first rank only.
        parts: the ranks of a pipeline stage that hold the other parts of the tensors; norms are summed over them.
        split: the ranks that hold the other parts of each matrix, if not the tensor ranks.
        accumulate_in_place: the GEMM of a backward may write to the main gradient. Must be False for weights used more
            than once per micro-batch.
        uniform: initial uniform distribution, instead of a normal one.
        all_pieces: `pieces` of all data ranks, if ZeRO-3 leaves this rank only some rows; else None.
    """

    pieces: tuple[TensorPiece, ...]
    data: CommGroup
    std: float | None = None
    fill: float = 0.0
    grad_sync: tuple[CommGroup, ...] = ()
    replicas: tuple[CommGroup, ...] = ()
    parts: CommGroup | None = None
    split: CommGroup | None = None
    accumulate_in_place: bool = True
    uniform: UniformInit | None = None
    all_pieces: tuple[TensorPiece, ...] | None = None

    @property
    def gathered_pieces(self) -> tuple[TensorPiece, ...]:
        """Location of the elements of all data ranks in the canonical tensors; equal on these ranks."""
        return self.pieces if self.all_pieces is None else self.all_pieces

    @property
    def initializer(self) -> NormalInit | UniformInit | None:
        """Random initialisation of the parameter, or None if all elements are `fill`."""
        return self.uniform or (None if self.std is None else NormalInit(self.std))


def make_parameter(
    shape: Sequence[int],
    pieces: Sequence[TensorPiece],
    *,
    data: CommGroup,
    dtype: torch.dtype,
    device: torch.device,
    std: float | None = None,
    fill: float = 0.0,
    grad_sync: Sequence[CommGroup] = (),
    replicas: Sequence[CommGroup] = (),
    parts: CommGroup | None = None,
    split: CommGroup | None = None,
    accumulate_in_place: bool = True,
    uniform: UniformInit | None = None,
    packing: WeightQuantizer | None = None,
) -> nn.Parameter:
    """Return a parameter of zeros (with `packing` a placeholder) of the local `shape`, with its `ParameterInfo` attached.
    `pieces` locate it in canonical tensors, `data` is its data-parallel group.

    With `packing` the values are in a `QuantizedFrozenWeight`; the parameter has the shape and dtype, and one zero in memory.

    Raises:
        ConfigError: when `packing` is given and a row is not a multiple of its blocks.
    """
    if packing is None:
        parameter = nn.Parameter(torch.zeros(tuple(shape), dtype=dtype, device=device))
    else:
        parameter = nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(tuple(shape)))
        parameter.prepared = QuantizedFrozenWeight(pieces[0].name, shape, dtype, device, packing)  # type: ignore[attr-defined]
    sync = tuple(group for group in grad_sync if group.size > 1)
    copies = tuple(group for group in replicas if group.size > 1)
    parameter.mega = ParameterInfo(  # type: ignore[attr-defined]
        tuple(pieces), data, std, fill, sync, copies, parts, split, accumulate_in_place, uniform
    )
    return parameter


def get_local_values(parameter: Tensor) -> Tensor:
    """Return a view of this rank's elements of a parameter: its rows under ZeRO-3, packed bytes if quantised."""
    packed = get_quantized_weight(parameter)
    values = parameter.detach() if packed is None else packed.packed
    return values.to_local() if isinstance(values, DTensor) else values


def get_parameter_info(parameter: Tensor) -> ParameterInfo:
    """Return the `ParameterInfo` that `make_parameter` attached to the parameter."""
    info: ParameterInfo = parameter.mega  # type: ignore[attr-defined]
    return info


def is_trainable(parameter: Tensor) -> bool:
    """Return whether a parameter is trainable, that is, not frozen."""
    return parameter.requires_grad


def freeze_parameters(model: nn.Module, trainable: Callable[[str], bool]) -> None:
    """Freeze the parameters for whose canonical tensor names `trainable` returns False, and unfreeze all others.

    Raises:
        ConfigError: when only some of the tensors fused in one parameter are trainable.
    """
    for parameter in model.parameters():
        names = dict.fromkeys(piece.name for piece in get_parameter_info(parameter).pieces)
        trained = [name for name in names if trainable(name)]
        if trained and len(trained) < len(names):
            frozen = next(name for name in names if name not in trained)
            raise ConfigError(
                f"{frozen} is frozen and {trained[0]} is not, but the two are fused into one matrix",
                hint=f"train or freeze all of {', '.join(names)}",
            )
        parameter.requires_grad_(bool(trained) or not names)


def is_weight_matrix(parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix or stack of matrices (experts, heads), not a bias, norm or decay."""
    names = [piece.name for piece in get_parameter_info(parameter).gathered_pieces]
    return parameter.dim() > 1 and not any(
        name.endswith((".bias", "norm.weight", ".A_log", ".position_bias")) for name in names
    )


def get_main_grad_function(weight: Tensor) -> MainGrad | None:
    """Return a function that returns the flat-buffer view for a weight's gradient and whether to add, or None for autograd."""
    main: MainGrad | None = getattr(weight, "main_grad", None)
    return main


class GemmOperandCache:
    """Cache of the GEMM operand that a back end prepares from a parameter, such as its fp8 copy.
    It is valid until the weight changes.
    """

    def __init__(self) -> None:
        self._operand: GemmOperand | None = None

    def gemm_operand(self, weight: Tensor, prepare: Callable[[Tensor], GemmOperand]) -> GemmOperand:
        """Return the GEMM operand that `prepare` makes from the weight, from the cache if it is there."""
        if self._operand is None:
            self._operand = prepare(weight.detach())
        return self._operand

    def invalidate(self) -> None:
        """Discard the cached GEMM operand, after the weight has changed."""
        self._operand = None


class QuantizedFrozenWeight:
    """Frozen parameter whose elements are quantised (QLoRA) and are unpacked again for each GEMM.

    Args:
        name: name of the parameter, for error messages.
        shape, dtype: of the unpacked values.
        device: of the packed elements.
        packing: packs and unpacks.

    Raises:
        ConfigError: when a row is not a multiple of the block size.
    """

    def __init__(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, packing: WeightQuantizer
    ) -> None:
        *rows, width = shape
        if width % BLOCK:
            raise ConfigError(
                f"lora.quantize requires rows of a multiple of {BLOCK} elements; those of {name} have {width} on a rank",
                hint=f"choose parallel.tp (expert_tp for experts) so that {BLOCK} divides them, or remove lora.quantize",
            )
        self.dtype, self.packing = dtype, packing
        self.packed = torch.zeros(*rows, width // 2, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(*rows, width // BLOCK, dtype=torch.float32, device=device)

    def gemm_operand(self, weight: Tensor, prepare: Callable[[Tensor], GemmOperand]) -> GemmOperand:
        """Return the GEMM operand that `prepare` makes from the values, unpacked at each call; `weight` is not read."""
        return prepare(self.unpack_values())

    def unpack_values(self) -> Tensor:
        """Return the dequantised values of the weight, in new memory."""
        return self.packing.unpack_weight(self.packed, self.scales, self.dtype)

    @contextmanager
    def fill_and_quantize(self) -> Iterator[Tensor]:
        """Yield a zero tensor to be filled with the weight's values, and quantise it at the end of the `with` block."""
        values = torch.zeros(get_unpacked_4bit_shape(self.packed.shape), dtype=self.dtype, device=self.packed.device)
        yield values
        packed, scales = self.packing.pack_weight(values)
        self.packed.copy_(packed)
        self.scales.copy_(scales)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the packed elements and their scales."""
        return self.packed.nbytes + self.scales.nbytes


def get_quantized_weight(parameter: Tensor) -> QuantizedFrozenWeight | None:
    """Return the `QuantizedFrozenWeight` of a quantised parameter, or None for other parameters."""
    prepared = getattr(parameter, "prepared", None)
    return prepared if isinstance(prepared, QuantizedFrozenWeight) else None


def get_weight_preparer(weight: Tensor) -> GemmOperandCache | QuantizedFrozenWeight | None:
    """Return the object that supplies a parameter's GEMM operand, or None if the parameter itself is the operand.
    The object is a `GemmOperandCache` or a `QuantizedFrozenWeight`.
    """
    prepared: GemmOperandCache | QuantizedFrozenWeight | None = getattr(weight, "prepared", None)
    return prepared


class NonTrainableBuffer(nn.Module):
    """Non-trainable tensor of the model that checkpoints contain.
    It is whole on every rank of its pipeline stage, and has the value `fill` until loaded.

    Args:
        name: canonical name.
        shape, dtype, device: of `values`.
        fill: initial value.
    """

    values: Tensor

    def __init__(
        self, name: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device, fill: float = 0.0
    ) -> None:
        super().__init__()
        self.fill, self.pieces = fill, (TensorPiece.whole_tensor(name, shape),)
        self.register_buffer("values", torch.full(shape, fill, dtype=dtype, device=device))

    def reset_values(self) -> None:
        """Fill the tensor with its initial value."""
        self.values.fill_(self.fill)


@runtime_checkable
class ModuleWithSavedBuffers(Protocol):
    """Interface of a module with buffers of its own that checkpoints contain."""

    def saved_buffers(self) -> Iterator[tuple[Tensor, Sequence[TensorPiece]]]:
        """Yield the module's buffers that checkpoints contain, with their positions in canonical tensors."""


def iterate_saved_buffers(model: nn.Module) -> Iterator[tuple[Tensor, Sequence[TensorPiece]]]:
    """Yield the non-trainable tensors of a model that checkpoints contain, with their canonical positions."""
    for module in model.modules():
        if isinstance(module, NonTrainableBuffer):
            yield module.values, module.pieces
        elif isinstance(module, ModuleWithSavedBuffers):
            yield from module.saved_buffers()
