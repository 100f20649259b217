"""The arithmetic of what sees an image before a decoder: a vision tower and its projector, as far as each is trained."""

from __future__ import annotations

import math
from functools import partial

from mega_ckpt.names import tensors_of
from mega_common.lora import LoraConfig, is_trained
from mega_common.model_config import ModelConfig
from mega_common.vision import PROJECTOR, TOWER


def image_flops(model: ModelConfig, freeze: tuple[str, ...] = (), lora: LoraConfig | None = None) -> dict[str, float]:
    """Operations of an image, forward and backward, by part: products with weights, and attention's scores.

    A product with a weight is 2 rows K N operations forward, as many for the weight's gradient where it is trained, and as
    many for that of its input where something before it is: what is frozen up to its end counts forward only. Of a model
    whose images keep their shape it is one of image_size x image_size.
    """
    vision, parts, behind = model.vision, {"products": 0.0, "scores": 0.0}, False
    tower = model.tower
    if vision is None or tower is None:
        return parts
    trained = partial(is_trained, freeze=freeze, lora=lora)
    patches = vision.patches + vision.class_token
    for name, shape in tensors_of(model).items():  # in the order of the forward
        if not name.startswith((TOWER, PROJECTOR)) or not vision.computes(name):
            continue
        moves = trained(name)
        if len(shape) == 2 and "embed_positions" not in name:
            rows = vision.tokens if name.startswith(PROJECTOR) else patches
            rows = vision.patches if "embed_patches" in name else rows
            parts["products"] += 2.0 * rows * math.prod(shape) * (1 + moves + behind)
        if name.endswith("self_attn.o_proj.weight"):
            window = tower.window(int(name.removeprefix(f"{TOWER}layers.").partition(".")[0]))
            seen = patches if window is None else min(window, patches)
            parts["scores"] += 4.0 * patches * seen * vision.hidden_size * (1 + 2 * behind)
        behind = behind or moves
    return parts
