"""A vision tower of the house's own layers (arXiv:2010.11929), and a projector behind it: LLaVA's (arXiv:2310.03744), Gemma 3's.

Both are whole on every tensor and context rank of the first stage; each of these computes its share of the images, and
the features are gathered. So a weight's gradient is the sum over those ranks, and each image counts once in it.

Legend: n images, P patches (and the class token), C tower width, D model width, B batch, S sequence.
"""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor, nn

from mega_common.vision import PROJECTOR, TOWER
from mega_trainer.device import to_device
from mega_trainer.kernels.masks import ALL, Mask
from mega_trainer.model.activation import plain
from mega_trainer.model.block import Block
from mega_trainer.model.builder import Builder
from mega_trainer.model.context import Context
from mega_trainer.model.norms import Norm
from mega_trainer.model.vision.build import TowerBuilder
from mega_trainer.model.vision.images import Images, gathered, placed, sharing
from mega_trainer.model.vision.native import Deal, Merger, NativeTower
from mega_trainer.parallel.tensor import sequence_part


class _Everything:
    """A `Sight`: every patch of an image sees every other."""

    def mask(self, window: int | None) -> Mask:
        """See `Sight`."""
        return ALL


class Tower(nn.Module):
    """Patches of images to what a layer makes of them. The layers behind that one are held, and compute nothing."""

    def __init__(self, build: Builder) -> None:
        super().__init__()
        vision = build.config.vision
        assert vision is not None
        own, width = TowerBuilder.of(build, TOWER), vision.hidden_size
        self.config, self.saved = vision, own.saved
        self.patches = own.matrix("embed_patches", (width, 3 * vision.patch_size**2), bias=vision.patch_bias)
        std = own.config.init_std
        self.first = own.replicated("model.class_embedding", (width,), std=std) if vision.class_token else None
        places = (vision.patches + vision.class_token, width)
        self.positions = own.replicated("model.embed_positions.weight", places, std=std)
        self.pre_norm = own.norm("model.pre_norm") if vision.pre_norm else nn.Identity()
        self.layers = nn.ModuleList(Block(own, layer) for layer in range(vision.num_layers))
        self.norm = own.norm("model.norm")

    def forward(self, pixels: Tensor) -> Tensor:
        """[n, 3, H, W] -> [n, P, C]."""
        vision, context = self.config, Context(_Everything())
        x: Tensor = self.patches(patches_of(pixels, vision.patch_size))
        if self.first is not None:
            x = torch.cat([self.first.expand(len(x), 1, -1), x], 1)
        x = self.pre_norm(x + self.positions)
        for index in range(vision.used_layers):
            x = self.saved.layer(index, self.layers[index], x, context)
        x = self.norm(x) if vision.feature_norm else x
        return x[:, 1:] if vision.class_token and not vision.feature_class else x


class Projector(nn.Module):
    """W2 act(W1 x + b1) + b2 of a tower's features, or of the means of squares of them; behind those of a tile the end of a line.

    That end, the same for all, is a row of each tile and so dealt and gathered with it, whose gradient then counts once.
    """

    def __init__(self, build: Builder) -> None:
        super().__init__()
        vision, width = build.config.vision, build.config.hidden_size
        assert vision is not None
        own, bias = TowerBuilder.of(build, PROJECTOR), vision.projector_bias
        self.activation, self.pool = vision.projector_activation, vision.pool
        self.into = own.matrix("linear_1", (width, vision.hidden_size), bias=bias)
        self.out = own.matrix("linear_2", (width, width), bias=bias)
        lines = vision.pinpoints is not None
        self.newline = own.replicated("model.newline", (width,), std=width**-0.5) if lines else None

    def forward(self, features: Tensor) -> Tensor:
        """[n, P, C] -> [n, P / pool^2, D], or of tiles [n, P + 1, D]."""
        y: Tensor = self.out(plain(self.into(pooled(features, self.pool)), self.activation))
        return y if self.newline is None else torch.cat([y, self.newline.expand(len(y), 1, -1)], 1)


class NormProjector(nn.Module):
    """W norm(x) of a tower's features x, or of the means of squares of them; the norm multiplies by 1 + weight (Gemma 3)."""

    def __init__(self, build: Builder) -> None:
        super().__init__()
        vision = build.config.vision
        assert vision is not None
        own, self.pool = TowerBuilder.of(build, PROJECTOR), vision.pool
        weight = own.replicated("model.norm.weight", (vision.hidden_size,))
        self.norm = Norm(own.kernels, weight, None, vision.norm_eps, zero_centered=True)
        self.out = own.matrix("linear", (build.config.hidden_size, vision.hidden_size), bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """[n, P, C] -> [n, P / pool^2, D]."""
        y: Tensor = self.out(self.norm(pooled(features, self.pool)))
        return y


PROJECTORS = {"mlp": Projector, "norm": NormProjector, "merger": Merger}


class Vision(nn.Module):
    """Puts what it sees in a micro-batch's images in the place of the embeddings of their placeholders."""

    def __init__(self, build: Builder) -> None:
        super().__init__()
        self.groups, self.sp, self.dtype = build.groups, build.sp, build.dtype
        vision = build.config.vision
        assert vision is not None
        self.config, self.projector = vision, PROJECTORS[vision.projector](build)
        self.tower = NativeTower(build) if vision.native else Tower(build)

    @classmethod
    def of(cls, build: Builder) -> Vision | None:
        """That of the builder's model, if it has one."""
        return None if build.config.vision is None else cls(build)

    def forward(self, x: Tensor, images: Images) -> Tensor:
        """Embeddings [B, S or S/T, D] -> the same shape."""
        features = self.see(images, x.device) if images.features is None else images.features
        part = sequence_part(images.rows.shape[1], self.groups.tp, sp=self.sp)
        return placed(x, features, images.rows[:, part])

    def see(self, images: Images, device: torch.device) -> Tensor:
        """The features of all images, one after another: [n P, D]. A collective call of the ranks that share them."""
        rank, ranks = sharing((self.groups.cp, self.groups.tp))
        if isinstance(self.tower, NativeTower):
            deal = Deal(list(images.pixels), self.config, rank, ranks)
            every = self._everyones(self.projector(self.tower(deal, device)))
            return every[to_device(deal.rows, device)]
        own = images.dealt(rank, ranks).to(device, self.dtype)
        return self._everyones(self.projector(self.tower(own))).flatten(0, 1)

    def _everyones(self, features: Tensor) -> Tensor:
        features = gathered(features, self.groups.tp, partial=self.sp)
        return gathered(features, self.groups.cp, partial=True)


def pooled(features: Tensor, pool: int) -> Tensor:
    """The means of squares of pool x pool patches of square images: [n, P, C] -> [n, P / pool^2, C]."""
    side = isqrt(features.shape[1])
    if pool == 1:
        return features
    return torch.unflatten(features, 1, (side // pool, pool, side // pool, pool)).mean((2, 4)).flatten(1, 2)


def patches_of(pixels: Tensor, size: int) -> Tensor:
    """Images [n, 3, H, W] cut in squares, row by row: [n, H/size W/size, 3 size size]."""
    n, colours, height, width = pixels.shape
    cut = pixels.view(n, colours, height // size, size, width // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
