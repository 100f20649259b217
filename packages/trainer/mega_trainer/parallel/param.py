"""A parameter's description of itself: where its elements live, how it starts, over whom its gradient is summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mega_ckpt.pieces import Piece
from mega_common.errors import ConfigError
from mega_trainer.comm import Group
from mega_trainer.kernels.base import Factor
from mega_trainer.kernels.nf4 import BLOCK, Packing, unpacked

# Where the next part of a parameter's gradient belongs, and whether to add it to what is there or write over it. To be
# called once for each part, which must then be put there.
MainGrad = Callable[[], tuple[Tensor, bool]]


@dataclass(frozen=True)
class Normal:
    """A start that is drawn from a normal distribution around zero."""

    std: float

    def draw(self, out: Tensor, stream: torch.Generator) -> Tensor:
        """Numbers in the shape of `out`, which is written over."""
        return out.normal_(0.0, self.std, generator=stream)


@dataclass(frozen=True)
class Uniform:
    """A start that is drawn evenly between two numbers, and then perhaps changed element by element."""

    low: float
    high: float
    then: Callable[[Tensor], Tensor] | None = None

    def draw(self, out: Tensor, stream: torch.Generator) -> Tensor:
        """Numbers in the shape of `out`, which is written over."""
        out.uniform_(self.low, self.high, generator=stream)
        return out if self.then is None else self.then(out)


@dataclass(frozen=True)
class ParamInfo:
    """What the rest of the trainer needs to know of a parameter.

    Attributes:
        pieces: where its elements live in the canonical tensors; padding belongs to no piece.
        std: standard deviation of the normal distribution it starts from; None for a constant `fill`.
        fill: the constant it starts from when `std` and `uniform` are None.
        data: the group over which the data-parallel gradient is summed and ZeRO slices are cut.
        grad_sync: further groups whose ranks each see a part of its gradient, to be summed.
        replicas: groups whose ranks hold the same values, so that norms count it on the first rank alone.
        parts: the ranks of a pipeline stage that hold the rest of such tensors, over which norms are summed.
        split: the ranks that hold the rest of each of its matrices, where those are not the tensor ranks.
        straight: a backward may add its gradient to the buffer right where it is made. Not where there are several uses
            of it in a micro-batch, whose gradients are summed before that, whoever keeps it.
        uniform: what it starts from instead, if that is no normal distribution.
    """

    pieces: tuple[Piece, ...]
    data: Group
    std: float | None = None
    fill: float = 0.0
    grad_sync: tuple[Group, ...] = ()
    replicas: tuple[Group, ...] = ()
    parts: Group | None = None
    split: Group | None = None
    straight: bool = True
    uniform: Uniform | None = None

    @property
    def start(self) -> Normal | Uniform | None:
        """What draws the numbers it starts from; None: all are `fill`."""
        return self.uniform or (None if self.std is None else Normal(self.std))


def make_parameter(
    shape: Sequence[int],
    pieces: Sequence[Piece],
    *,
    data: Group,
    dtype: torch.dtype,
    device: torch.device,
    std: float | None = None,
    fill: float = 0.0,
    grad_sync: Sequence[Group] = (),
    replicas: Sequence[Group] = (),
    parts: Group | None = None,
    split: Group | None = None,
    straight: bool = True,
    uniform: Uniform | None = None,
    packing: Packing | None = None,
) -> nn.Parameter:
    """A parameter of the local `shape`, not initialised, with its description attached.

    One with a `packing` is kept in few bits (`PackedWeight`): the parameter itself has its shape and dtype, and one zero in memory.

    Raises:
        ConfigError: when a row of such a one is not cut evenly into blocks.
    """
    if packing is None:
        parameter = nn.Parameter(torch.zeros(tuple(shape), dtype=dtype, device=device))
    else:
        parameter = nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(tuple(shape)))
        parameter.prepared = PackedWeight(pieces[0].name, shape, dtype, device, packing)  # type: ignore[attr-defined]
    sync = tuple(group for group in grad_sync if group.size > 1)
    copies = tuple(group for group in replicas if group.size > 1)
    parameter.mega = ParamInfo(  # type: ignore[attr-defined]
        tuple(pieces), data, std, fill, sync, copies, parts, split, straight, uniform
    )
    return parameter


def local_of(parameter: Tensor) -> Tensor:
    """What this rank keeps of a parameter, as a view: all its elements, under ZeRO-3 its rows; of a packed one its bits."""
    packed = packed_of(parameter)
    values = parameter.detach() if packed is None else packed.packed
    return values.to_local() if isinstance(values, DTensor) else values


def info_of(parameter: Tensor) -> ParamInfo:
    """The description that `make_parameter` attached."""
    info: ParamInfo = parameter.mega  # type: ignore[attr-defined]
    return info


def trains(parameter: Tensor) -> bool:
    """Whether it takes a gradient; a frozen one has neither that nor state of an optimizer."""
    return parameter.requires_grad


def freeze(model: nn.Module, moves: Callable[[str], bool]) -> None:
    """Freeze the parameters whose canonical tensors are not to be trained.

    Raises:
        ConfigError: when tensors that lie in one parameter are not treated alike.
    """
    for parameter in model.parameters():
        names = dict.fromkeys(piece.name for piece in info_of(parameter).pieces)
        moving = [name for name in names if moves(name)]
        if moving and len(moving) < len(names):
            still = next(name for name in names if name not in moving)
            raise ConfigError(
                f"{still} is frozen and {moving[0]} is not, and the two are one matrix in memory",
                hint=f"train or freeze all of {', '.join(names)}",
            )
        parameter.requires_grad_(bool(moving) or not names)


def is_matrix(parameter: Tensor) -> bool:
    """Whether it multiplies vectors: no bias and no norm, of which experts and heads have stacks."""
    names = [piece.name for piece in info_of(parameter).pieces]
    return parameter.dim() > 1 and not any(name.endswith((".bias", "norm.weight")) for name in names)


def main_grad_of(weight: Tensor) -> MainGrad | None:
    """What takes the gradient of a parameter whose gradients lie in a flat buffer; others return theirs to autograd."""
    taker: MainGrad | None = getattr(weight, "main_grad", None)
    return taker


class PreparedWeight:
    """What a back end has prepared of a parameter for its products, until the weight changes."""

    def __init__(self) -> None:
        self._made: Factor | None = None

    def of(self, weight: Tensor, prepare: Callable[[Tensor], Factor]) -> Factor:
        """What `prepare` makes of it, once."""
        if self._made is None:
            self._made = prepare(weight.detach())
        return self._made

    def forget(self) -> None:
        """The weight has changed."""
        self._made = None


class PackedWeight:
    """The elements of a frozen parameter in few bits, which each product makes numbers of anew.

    Args:
        name: of the parameter, for a message.
        shape, dtype: of those numbers.
        device: of the bits.
        packing: makes either of the other.

    Raises:
        ConfigError: when a row is not cut evenly into blocks.
    """

    def __init__(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, packing: Packing
    ) -> None:
        *rows, width = shape
        if width % BLOCK:
            raise ConfigError(
                f"lora.quantize: {name} has rows of {width} on a rank, and {BLOCK} neighbours in a row have one scale",
                hint=f"choose parallel.tp (expert_tp for experts) so that {BLOCK} divides it, or leave lora.quantize out",
            )
        self.dtype, self.packing = dtype, packing
        self.packed = torch.zeros(*rows, width // 2, dtype=torch.uint8, device=device)
        self.scales = torch.zeros(*rows, width // BLOCK, dtype=torch.float32, device=device)

    def of(self, weight: Tensor, prepare: Callable[[Tensor], Factor]) -> Factor:
        """What `prepare` makes of the numbers, each time."""
        return prepare(self.values())

    def values(self) -> Tensor:
        """The numbers, in memory of their own."""
        return self.packing.unpack(self.packed, self.scales, self.dtype)

    @contextmanager
    def written(self) -> Iterator[Tensor]:
        """Zeros to be written over, which are packed in the end."""
        values = torch.zeros(unpacked(self.packed.shape), dtype=self.dtype, device=self.packed.device)
        yield values
        packed, scales = self.packing.pack(values)
        self.packed.copy_(packed)
        self.scales.copy_(scales)

    @property
    def nbytes(self) -> int:
        """Of bits and scales."""
        return self.packed.nbytes + self.scales.nbytes


def packed_of(parameter: Tensor) -> PackedWeight | None:
    """What keeps a parameter in few bits, if that is how it is kept."""
    keeper = getattr(parameter, "prepared", None)
    return keeper if isinstance(keeper, PackedWeight) else None


def keeper_of(weight: Tensor) -> PreparedWeight | PackedWeight | None:
    """What makes factors of products of a parameter; none where it is one itself."""
    keeper: PreparedWeight | PackedWeight | None = getattr(weight, "prepared", None)
    return keeper


class Kept(nn.Module):
    """A tensor of the model that no gradient moves, whole on every rank of its stage. Zero until it is loaded.

    Args:
        name: canonical.
        shape, dtype, device: of `values`.
    """

    values: Tensor

    def __init__(self, name: str, shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.pieces = (Piece.whole(name, shape),)
        self.register_buffer("values", torch.zeros(*shape, dtype=dtype, device=device))


def kept_of(model: nn.Module) -> Iterator[tuple[Tensor, Sequence[Piece]]]:
    """Such tensors of a model, with their pieces."""
    for module in model.modules():
        if isinstance(module, Kept):
            yield module.values, module.pieces
