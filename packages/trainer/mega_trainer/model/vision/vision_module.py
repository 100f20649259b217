"""Vision encoder and projector of the transformers library, from images to the features that replace placeholders.

The module is whole on every tensor and context rank of the first stage, as `vision_encoder` describes; each rank encodes
its share of the images.

Legend: n images, U features of this rank's images, D model width.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mega_ckpt.tensor_pieces import TensorPiece
from mega_ckpt.transformers_library import (
    build_vision_module,
    convert_transformers_errors,
    list_module_tensors,
    materialize_vision_module,
    to_canonical_vision_tensor_name,
)
from mega_common.vision_config import TOWER
from mega_data.images.image_inputs import FEATURE_ORDER
from mega_trainer.distributed.device import to_device
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.vision.native_resolution import ImagePartition
from mega_trainer.model.vision.vision_builder import VisionLayerBuilder
from mega_trainer.parallel.parameter_info import make_parameter

STD = 0.02  # of random weights; fine-tuning reads all of them


class ModuleImagePartition(ImagePartition):
    """Partition of images among ranks, whose features come in the order of a vision module of transformers."""

    @cached_property
    def window_orders(self) -> list[tuple[np.ndarray, list[int]]]:
        """Feature numbers of every image in order, as one window."""
        sizes = [high * wide for high, wide in self.feature_grids]
        return [(np.arange(size), [size]) for size in sizes]

    def module_inputs_of_rank(self) -> list[Mapping[str, Tensor]]:
        """Return the module's inputs for each of this rank's images, in host memory."""
        own = [self.images[number] for number in self.image_ranges_by_rank[self.rank]]
        return [{name: torch.from_numpy(array) for name, array in image.arrays.items()} for image in own]


class TransformersVisionModule(nn.Module):
    """Vision encoder and projector of transformers: inputs of images to features of the model's width.

    Raises:
        CheckpointError: from the constructor, when transformers cannot build it.
    """

    keeps_buffers = True  # also where the parameters get new memory

    def __init__(self, build: LayerBuilder) -> None:
        super().__init__()
        vision = build.config.vision
        assert vision is not None
        assert vision.module is not None
        self.described, self.dtype = vision.module, build.dtype
        self.module = build_vision_module(vision.module.config)
        materialize_vision_module(self.module)
        self.accepted = inspect.signature(self.module.get_image_features).parameters
        own = VisionLayerBuilder.from_layer_builder(build, TOWER)
        for path, owner in self.module.named_modules():
            for name, old in owner._parameters.items():
                if old is not None:
                    owner._parameters[name] = self._place(own, f"{path}.{name}".removeprefix("."), old)
        for owner in self.module.modules():
            kept = {
                name: value for name, value in owner._buffers.items() if name not in owner._non_persistent_buffers_set
            }
            owner._buffers.update({name: _cast_floating(value, build.dtype) for name, value in kept.items()})
        if build.device.type != "meta":
            self._move_buffers(build.device)

    def saved_buffers(self) -> Iterator[tuple[Tensor, Sequence[TensorPiece]]]:
        """Yield the module's persistent buffers, which checkpoints contain, with their canonical positions."""
        parameters = dict(self.module.named_parameters())
        for name, value in list_module_tensors(self.module).items():
            if name not in parameters:
                yield value, (TensorPiece.whole_tensor(to_canonical_vision_tensor_name(name), value.shape),)

    def _move_buffers(self, device: torch.device) -> None:
        for owner in self.module.modules():
            owner._buffers.update(
                {name: value.to(device) for name, value in owner._buffers.items() if value is not None}
            )

    def _apply(self, fn: Any, recurse: bool = True) -> TransformersVisionModule:
        """Apply a function to the parameters alone, and move the buffers, whose values `to_empty` would discard."""
        kept = [(owner, dict(owner._buffers)) for owner in self.module.modules()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for owner, buffers in kept:
            owner._buffers.update(buffers)
        self._move_buffers(next(self.parameters()).device)
        return self

    def _place(self, own: VisionLayerBuilder, name: str, old: Tensor) -> nn.Parameter:
        """Return an uninitialised parameter of the run's dtype on its device, described for the trainer."""
        piece = TensorPiece.whole_tensor(to_canonical_vision_tensor_name(name), old.shape)
        scale = old.dim() == 1 and not name.endswith(("bias", "embedding", "newline"))
        start: dict[str, Any] = {} if name.endswith("bias") else {"fill": 1.0} if scale else {"std": STD}
        return make_parameter(
            old.shape, (piece,), data=own.groups.dp_cp, dtype=own.parameter_dtype, device=own.device, grad_sync=(own.tp,),
            replicas=(own.tp,), parts=own.tp, accumulate_in_place=False, **start,
        )  # fmt: skip

    def forward(self, images: Sequence[Mapping[str, Tensor]], features: int, device: torch.device) -> Tensor:
        """Map the inputs of this rank's images to features [U, D], padded to `features` rows.

        All parameters get a gradient, zero without images, so that all ranks reduce the same ones.
        """
        found = [self._encode(group, device) for group in _group_by_shape(images)]
        rows = torch.cat(found) if found else torch.zeros(0, self._width, dtype=self.dtype, device=device)
        rows = F.pad(rows, (0, 0, 0, features - len(rows)))
        trained = [parameter.flatten()[:1] * 0 for parameter in self.module.parameters() if parameter.requires_grad]
        return rows + torch.cat(trained).sum() if trained and torch.is_grad_enabled() else rows

    @property
    def _width(self) -> int:
        return int(self.module.config.get_text_config().hidden_size)

    def _encode(self, images: Sequence[Mapping[str, Tensor]], device: torch.device) -> Tensor:
        """Return the features [U, D] of images whose inputs have the same shapes."""
        inputs = {}
        for name in images[0]:
            if name in self.accepted:
                joined = to_device(torch.cat([image[name] for image in images]), device)
                inputs[name] = joined.to(self.dtype) if joined.is_floating_point() else joined
        with convert_transformers_errors(self.described.model_type, "encode images"):
            found = self.module.get_image_features(**inputs, return_dict=True)
            output = found.pooler_output
            if output is None:  # Llama 4's features before the projector
                output = self.module.multi_modal_projector(found.last_hidden_state)
        if FEATURE_ORDER in images[0]:
            each = output.reshape(len(images), -1, output.shape[-1])
            each = torch.cat([each, found.visual_indicator_features.expand(len(images), -1, -1)], 1)
            orders = to_device(torch.cat([image[FEATURE_ORDER] for image in images]), device)
            output = each[torch.arange(len(images), device=device)[:, None], orders]
        parts = [output] if isinstance(output, Tensor) else output
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _cast_floating(value: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return value if value is None or not value.is_floating_point() else value.to(dtype)


def _group_by_shape(images: Sequence[Mapping[str, Tensor]]) -> list[list[Mapping[str, Tensor]]]:
    """Return runs of images whose inputs have the same shapes after the first dimension."""
    groups: list[list[Mapping[str, Tensor]]] = []
    last = None
    for image in images:
        shapes = {name: value.shape[1:] for name, value in image.items()}
        if shapes != last:
            groups.append([])
        groups[-1].append(image)
        last = shapes
    return groups
