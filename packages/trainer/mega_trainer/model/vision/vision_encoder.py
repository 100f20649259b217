"""Vision encoder built from the decoder's layers (arXiv:2010.11929), and projectors of LLaVA (arXiv:2310.03744) and Gemma 3.

Both are whole on every tensor and context rank of the first stage; each rank computes its share of the images, and the
features are gathered. So a weight's gradient is the sum over those ranks, in which each image counts once.

Legend: n images, P patches (and the class token), C vision encoder width, D model width, B batch, S sequence.
"""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor, nn

from mega_common.vision_config import PROJECTOR, TOWER
from mega_trainer.data.batch_images import (
    BatchImages,
    add_image_features,
    all_gather_image_features,
    get_combined_rank_and_size,
    insert_image_features,
)
from mega_trainer.distributed.device import to_device
from mega_trainer.kernels.attention_masks import ALL, AttentionMaskSpec
from mega_trainer.model.feed_forward import apply_ungated_activation
from mega_trainer.model.forward_context import ForwardContext
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.norms import Norm
from mega_trainer.model.transformer_layer import TransformerLayer
from mega_trainer.model.vision.native_resolution import ImagePartition, MergerProjector, NativeVisionEncoder
from mega_trainer.model.vision.vision_builder import VisionLayerBuilder
from mega_trainer.model.vision.vision_module import ModuleImagePartition, TransformersVisionModule
from mega_trainer.parallel.tensor_parallel import local_sequence_slice


class _FullAttention:
    """`AttentionMask` in which every patch of an image attends to every other."""

    def mask_for_window(self, window: int | None) -> AttentionMaskSpec:
        """Return the full mask; see `AttentionMask`."""
        return ALL


class VisionEncoder(nn.Module):
    """Vision encoder from image patches to the output of one of its layers; later layers are not computed.
    They are loaded, as checkpoints contain them.
    """

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        vision = build.config.vision
        assert vision is not None
        own, width = VisionLayerBuilder.from_layer_builder(build, TOWER), vision.hidden_size
        self.config, self.saved = vision, own.saved
        self.patches = own.build_linear_layer(
            "embed_patches", (width, 3 * vision.patch_size**2), bias=vision.patch_bias
        )
        std = own.config.init_std
        self.first = own.build_replicated("model.class_embedding", (width,), std=std) if vision.class_token else None
        shape = (vision.patches_per_image + vision.class_token, width)
        self.positions = own.build_replicated("model.embed_positions.weight", shape, std=std)
        self.pre_norm = own.build_residual_norm("model.pre_norm") if vision.pre_norm else nn.Identity()
        self.layers = nn.ModuleList(TransformerLayer(own, layer) for layer in range(vision.num_layers))
        self.norm = own.build_residual_norm("model.norm")

    def forward(self, pixels: Tensor) -> Tensor:
        """Map images [n, 3, H, W] to features [n, P, C] of patches, and with `feature_class` of the class token."""
        vision, context = self.config, ForwardContext(_FullAttention())
        x: Tensor = self.patches(cut_image_patches(pixels, vision.patch_size))
        if self.first is not None:
            x = torch.cat([self.first.expand(len(x), 1, -1), x], 1)
        x = self.pre_norm(x + self.positions)
        for index in range(vision.num_used_layers):
            x = self.saved.run_layer(index, self.layers[index], x, context)
        x = self.norm(x) if vision.feature_norm else x
        return x[:, 1:] if vision.class_token and not vision.feature_class else x


class MlpProjector(nn.Module):
    """MLP projector W2 act(W1 x + b1) + b2 from vision features to the language model's width.
    x are the features of a vision encoder, or their pooled means.

    For tiles it appends a learned end-of-line feature to each tile, so that it is gathered with the tile and its gradient
    counts once.
    """

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        vision, width = build.config.vision, build.config.hidden_size
        assert vision is not None
        own, bias = VisionLayerBuilder.from_layer_builder(build, PROJECTOR), vision.projector_bias
        self.activation, self.pool = vision.projector_activation, vision.pool
        self.into = own.build_linear_layer("linear_1", (width, vision.hidden_size), bias=bias)
        self.out = own.build_linear_layer("linear_2", (width, width), bias=bias)
        lines = vision.pinpoints is not None
        self.newline = own.build_replicated("model.newline", (width,), std=width**-0.5) if lines else None

    def forward(self, features: Tensor) -> Tensor:
        """Map vision features to the language model's width, and append a newline feature to those of a tile.
        [n, P, C] of n images -> [n, P / pool^2, D], or of image tiles -> [n, P + 1, D].
        """
        y: Tensor = self.out(apply_ungated_activation(self.into(pool_features(features, self.pool)), self.activation))
        return y if self.newline is None else torch.cat([y, self.newline.expand(len(y), 1, -1)], 1)


class NormProjector(nn.Module):
    """Projector W norm(x) from vision features to the language model's width.
    x are the features of a vision encoder, or their pooled means; the norm multiplies by 1 + weight (Gemma 3).
    """

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        vision = build.config.vision
        assert vision is not None
        own, self.pool = VisionLayerBuilder.from_layer_builder(build, PROJECTOR), vision.pool
        weight = own.build_replicated("model.norm.weight", (vision.hidden_size,))
        self.norm = Norm(own.kernels, weight, None, vision.norm_eps, zero_centered=True)
        self.out = own.build_linear_layer("linear", (build.config.hidden_size, vision.hidden_size), bias=False)

    def forward(self, features: Tensor) -> Tensor:
        """Map vision features [n, P, C] of n images to the language model's width, [n, P / pool^2, D]."""
        y: Tensor = self.out(self.norm(pool_features(features, self.pool)))
        return y


PROJECTORS = {"mlp": MlpProjector, "norm": NormProjector, "merger": MergerProjector}


class ImageEmbedder(nn.Module):
    """Vision encoder and projector, whose features replace the token embeddings of image placeholders.
    With DeepStack, features of L other layers of the encoder are added to the outputs of the first L decoder layers.
    """

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        self.groups, self.sp, self.dtype = build.groups, build.sp, build.dtype
        vision = build.config.vision
        assert vision is not None
        self.config, self.width = vision, build.config.hidden_size
        self.tower: nn.Module
        if vision.module is not None:
            self.tower = TransformersVisionModule(build)
            return
        self.projector = PROJECTORS[vision.projector](build)
        self.tower = NativeVisionEncoder(build) if vision.native else VisionEncoder(build)

    @classmethod
    def from_layer_builder(cls, build: LayerBuilder) -> ImageEmbedder | None:
        """Return the image embedder of the builder's model, or None for text models."""
        return None if build.config.vision is None else cls(build)

    def insert_features(self, x: Tensor, images: BatchImages) -> Tensor:
        """Return token embeddings with those of image placeholders replaced by the features of the images.
        The embeddings x are [B, S or S/T, D] (S/T under sequence parallelism over T ranks); the images have features.
        """
        assert images.features is not None
        return insert_image_features(x, images.features[:, : self.width], self._local_rows(images))

    def add_deepstack(self, x: Tensor, images: BatchImages, layer: int) -> Tensor:
        """Return a decoder layer's outputs x [B, S or S/T, D], plus its DeepStack features, if any, at image placeholders.
        Layers after the first L have none.
        """
        if layer >= len(self.config.deepstack_layers):
            return x
        assert images.features is not None
        part = images.features[:, (1 + layer) * self.width : (2 + layer) * self.width]
        return add_image_features(x, part, self._local_rows(images))

    def _local_rows(self, images: BatchImages) -> Tensor:
        """Return the feature row of each token of this rank's residual stream, negative for text: [B, S or S/T]."""
        return images.rows[:, local_sequence_slice(images.rows.shape[1], self.groups.tp, sp=self.sp)]

    def forward(self, images: BatchImages, device: torch.device) -> Tensor:
        """Return the features of all images, [n P, D] or with DeepStack [n P, (1 + L) D]; a collective call.
        All ranks that share the images must call.
        """
        rank, ranks = get_combined_rank_and_size((self.groups.cp, self.groups.tp))
        if isinstance(self.tower, TransformersVisionModule):
            share = ModuleImagePartition(list(images.pixels), self.config, rank, ranks)
            gathered = self._all_gather(self.tower(share.module_inputs_of_rank(), share.features_per_rank, device))
            return gathered[to_device(share.feature_rows, device)]
        if isinstance(self.tower, NativeVisionEncoder):
            assert isinstance(self.projector, MergerProjector)
            partition = ImagePartition(list(images.pixels), self.config, rank, ranks)
            gathered = self._all_gather(self.projector.merge_layers(self.tower(partition, device)))
            return gathered[to_device(partition.feature_rows, device)]
        own = to_device(images.select_rank_images(rank, ranks).to(self.dtype), device)
        features = self._all_gather(self.projector(self.tower(own))).flatten(0, 1)
        # Not a view: FSDP hooks the result of a forward, and an operation in place would lose the hooks.
        return features.clone()

    def _all_gather(self, features: Tensor) -> Tensor:
        features = all_gather_image_features(features, self.groups.tp, partial=self.sp)
        return all_gather_image_features(features, self.groups.cp, partial=True)


def pool_features(features: Tensor, pool: int) -> Tensor:
    """Average pool x pool squares of patches of square images: [n, P, C] -> [n, P / pool^2, C]."""
    side = isqrt(features.shape[1])
    if pool == 1:
        return features
    return torch.unflatten(features, 1, (side // pool, pool, side // pool, pool)).mean((2, 4)).flatten(1, 2)


def cut_image_patches(pixels: Tensor, size: int) -> Tensor:
    """Cut images [n, 3, H, W] into square patches of `size` pixels, row by row: [n, H/size W/size, 3 size size]."""
    n, colours, height, width = pixels.shape
    cut = pixels.view(n, colours, height // size, size, width // size, size)
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
