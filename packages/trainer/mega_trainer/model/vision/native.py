"""A tower for images of any shape, and the projector behind it: Qwen2.5-VL's (arXiv:2502.13923).

An image is cut in patches, of which the projector makes one feature of each square of m x m. In most layers patches see those
of their window alone, so a rank's patches stand window by window, images one after another, as documents do in a row.

Legend: U features of this rank's images, P = m^2 U patches, C tower width, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_common.vision import PROJECTOR, TOWER, NativeResolution, VisionConfig
from mega_trainer.device import to_device
from mega_trainer.kernels.base import Rotation
from mega_trainer.kernels.masks import ALL, Mask, Packed
from mega_trainer.model.block import Block
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.norms import Norm
from mega_trainer.model.rope import Rotary
from mega_trainer.model.vision.build import TowerBuilder

Grid = tuple[int, int]  # features of an image from top to bottom, and from left to right


@dataclass(frozen=True)
class Deal:
    """Which of a micro-batch's images each rank computes: neighbours, as even in features as images allow.

    Every rank has as many features, the last ones of nothing, and one at least: where one rank has a gradient of the tower,
    all must have one.

    Attributes:
        images: fp32 [3, H, W] each, in host memory.
        rank, ranks: this one, of those that share them.
    """

    images: Sequence[Tensor]
    vision: VisionConfig
    rank: int
    ranks: int

    @cached_property
    def native(self) -> NativeResolution:
        """What the tower does with them."""
        assert self.vision.native is not None
        return self.vision.native

    @cached_property
    def grids(self) -> list[Grid]:
        """Of every image."""
        return [self.vision.grid(*image.shape[1:]) for image in self.images]

    @cached_property
    def parts(self) -> list[range]:
        """The images of each rank."""
        sizes = np.array([high * wide for high, wide in self.grids], np.int64)
        middles = sizes.cumsum() - sizes / 2
        owners = np.minimum(middles * self.ranks // max(1, sizes.sum()), self.ranks - 1)
        return [range(*np.searchsorted(owners, [rank, rank + 1]).tolist()) for rank in range(self.ranks)]

    @cached_property
    def share(self) -> int:
        """U."""
        return max(1, *(sum(high * wide for high, wide in self.grids[part.start : part.stop]) for part in self.parts))

    @cached_property
    def orders(self) -> list[tuple[np.ndarray, list[int]]]:
        """Of every image its features window by window, int64 [h w], and how many each window has."""
        side = self.native.window // (self.vision.patch_size * self.native.merge)
        return [windows_of(grid, side) for grid in self.grids]

    @cached_property
    def rows(self) -> Tensor:
        """Where the features of all images, line by line and one image after another, stand among those of all ranks: int64 [n]."""
        found = [np.zeros(0 if len(self.images) else 1, np.int64)]  # one at least, which nobody asks for
        for rank, part in enumerate(self.parts):
            first = rank * self.share
            for order, _ in self.orders[part.start : part.stop]:
                found.append(first + np.argsort(order))
                first += len(order)
        return torch.from_numpy(np.concatenate(found))

    def patches(self) -> Tensor:
        """Those of this rank, window by window: fp32 [P, 3 frames size size]."""
        part, each = self.parts[self.rank], self.native.merge**2
        own = [self._cut(self.images[number])[self.orders[number][0]].flatten(0, 1) for number in part]
        cut = torch.cat(own) if own else torch.empty(0, self.vision.patch_elements)
        return F.pad(cut, (0, 0, 0, self.share * each - len(cut)))

    def places(self) -> Tensor:
        """Line and column of each of these patches in its image: int64 [P, 2]."""
        part, merge = self.parts[self.rank], self.native.merge
        inner = np.indices((merge, merge)).reshape(2, -1).T
        own = [np.zeros((0, 2), np.int64)]
        for number in part:
            units = np.stack(np.divmod(self.orders[number][0], self.grids[number][1]), -1)
            own.append((units[:, None] * merge + inner).reshape(-1, 2))
        found = np.concatenate(own)
        return torch.from_numpy(np.pad(found, ((0, self.share * merge**2 - len(found)), (0, 0))))

    def sight(self, device: torch.device) -> Windows:
        """Which patches of this rank see one another; those of nothing stand in windows of their own."""
        part, each = self.parts[self.rank], self.native.merge**2
        windows = [length * each for number in part for length in self.orders[number][1]]
        images = [high * wide * each for high, wide in self.grids[part.start : part.stop]]
        most, left = (self.native.window // self.vision.patch_size) ** 2, self.share * each - sum(images)
        filled = [most] * (left // most) + ([left % most] if left % most else [])
        return Windows(*(Packed.of(lengths + filled, ALL, device) for lengths in (images, windows)))

    def _cut(self, image: Tensor) -> Tensor:
        """[3, H, W] in patches, those of a feature together: [h w, m^2, 3 frames size size]."""
        size, merge, frames = self.vision.patch_size, self.native.merge, self.native.frames
        high, wide = self.vision.grid(*image.shape[1:])
        cut = image.reshape(3, high, merge, size, wide, merge, size).permute(1, 4, 2, 5, 0, 3, 6)
        return cut.unsqueeze(-3).expand(*(-1,) * 5, frames, -1, -1).reshape(high * wide, merge**2, -1)


@dataclass(frozen=True)
class Windows:
    """A `Sight`: patches see those of their window, in layers that have one, or of their image."""

    images: Packed
    windows: Packed

    def mask(self, window: int | None) -> Mask:
        """See `Sight`."""
        return self.images if window is None else self.windows


def windows_of(grid: Grid, side: int) -> tuple[np.ndarray, list[int]]:
    """The features of a grid by windows of side x side, those at the edges smaller: int64 [h w], and how many each has."""
    numbers = np.arange(grid[0] * grid[1]).reshape(grid)
    found = [
        numbers[top : top + side, left : left + side].ravel()
        for top in range(0, grid[0], side)
        for left in range(0, grid[1], side)
    ]
    return np.concatenate(found), [len(window) for window in found]


class NativeTower(nn.Module):
    """Patches of images to what the last layer makes of them."""

    def __init__(self, build: Builder) -> None:
        super().__init__()
        vision = build.config.vision
        assert vision is not None
        own = TowerBuilder.of(build, TOWER)
        self.saved, self.dtype = own.saved, build.dtype
        self.patches = own.matrix("embed_patches", (vision.hidden_size, vision.patch_elements), bias=False)
        self.layers = nn.ModuleList(Block(own, layer) for layer in range(vision.num_layers))
        self.rotary = Rotary(own.config.rope, own.config.head_size // 2, 1)

    def forward(self, deal: Deal, device: torch.device) -> Tensor:
        """This rank's patches: [P, C]."""
        turn = self._turn(to_device(deal.places(), device))
        context = Context(deal.sight(device), turn, turn)
        x: Tensor = self.patches(deal.patches().to(device, self.dtype).unsqueeze(0))
        for index, layer in enumerate(self.layers):
            x = self.saved.layer(index, layer, x, context)
        return x.squeeze(0)

    def _turn(self, places: Tensor) -> Rotation:
        """Half of a head's pairs by a patch's line, half by its column."""
        turns = [self.rotary.at(each[None], self.dtype) for each in places.unbind(1)]
        return Rotation(torch.cat([turn.cos for turn in turns], -1), torch.cat([turn.sin for turn in turns], -1))


class Merger(nn.Module):
    """W2 gelu(W1 x + b1) + b2 of the m^2 patches of a feature, each behind a norm, side by side."""

    def __init__(self, build: Builder) -> None:
        super().__init__()
        vision, width = build.config.vision, build.config.hidden_size
        assert vision is not None
        assert vision.native is not None
        own, self.joined = TowerBuilder.of(build, PROJECTOR), vision.hidden_size * vision.native.merge**2
        weight = own.replicated("model.norm.weight", (vision.hidden_size,), fill=1.0)
        self.norm = Norm(own.kernels, weight, None, vision.norm_eps)
        self.into = own.matrix("linear_1", (self.joined, self.joined), bias=True)
        self.out = own.matrix("linear_2", (width, self.joined), bias=True)

    def forward(self, x: Tensor) -> Tensor:
        """[P, C] -> [U, D]."""
        y: Tensor = self.out(F.gelu(self.into(self.norm(x).view(-1, self.joined))))
        return y
