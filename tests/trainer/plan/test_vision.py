"""Operations of an image are those that torch counts, and those of a formula."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from parity.cases import MODELS, VARIANTS
from torch.utils.flop_counter import FlopCounterMode

from mega_common.lora_config import is_trainable_tensor
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_trainer.data.batch_images import BatchImages
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.vision.vision_encoder import ImageEmbedder
from mega_trainer.parallel.parameter_info import freeze_parameters
from mega_trainer.plan.flops import count_parameters_by_layer
from mega_trainer.plan.layer_flops import image_flops

FROZEN = {
    "nothing": [], "the tower": ["model.vision_tower.*"], "the projector": ["model.projector.*"],
    "what is before the last layer": ["model.vision_tower.[!ln]*", "model.vision_tower.layers.0.*"], "all": ["model.*"],
    "all but the projector of the last layer": ["model.vision_tower.*", "model.projector.deepstack.*"],
}  # fmt: skip


@pytest.mark.parametrize(
    "variant", VARIANTS["vision"], ids=["llava", "siglip", "tiles", "gemma", "qwen", "qwen3", "windows", "prompt"]
)
@pytest.mark.parametrize("frozen", FROZEN)
def test_products_of_an_image_are_those_that_torch_counts(variant: dict[str, object], frozen: str) -> None:
    config = ModelConfig.parse(
        {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, **MODELS["vision"], **variant}
    )
    patterns, images = tuple(FROZEN[frozen]), 3
    vision, built = config.vision, ImageEmbedder(LayerBuilder(config))
    assert vision is not None
    freeze_parameters(built, partial(is_trainable_tensor, freeze=patterns, lora=None))
    pixels = torch.randn(images, 3, vision.image_size, vision.image_size)
    with FlopCounterMode(display=False) as counted:
        features = built(BatchImages(pixels, torch.zeros(1, 1, dtype=torch.int64)), pixels.device)
        if features.requires_grad:
            features.sum().backward()
    products = {op: n for op, n in counted.get_flop_counts()["Global"].items() if "attention" not in str(op)}
    assert sum(products.values()) == images * image_flops(config, patterns)["products"]


def test_an_image_of_llava_and_of_gemma_by_a_formula() -> None:
    """12 C^2 + 4 P C operations a patch and layer for CLIP's width of 4 C, times 2; a frozen tower's are not told a second time."""
    llava, gemma = (ModelConfig.parse(load_model_preset(name)) for name in ("llava-1.5-7b", "gemma3-4b"))
    places, width, layers = 577, 1024, 23
    tower = 2 * places * layers * (12 * width**2 + 2 * places * width) + 2 * 576 * 3 * 14**2 * width
    projector = 2 * 576 * (1024 * 4096 + 4096 * 4096)
    assert sum(image_flops(llava).values()) == pytest.approx(3 * (tower + projector) - 2 * 576 * 3 * 14**2 * width)
    frozen = sum(image_flops(llava, ("model.vision_tower.*",)).values())
    assert frozen == pytest.approx(tower + 3 * projector - 2 * 576 * 1024 * 4096)
    qwen = ModelConfig.parse(load_model_preset("qwen2.5-vl-7b"))
    assert (
        image_flops(qwen)["scores"] == 3 * 4 * 576 * (28 * 64 + 4 * 576) * 1280
    )  # windows of 8 x 8 patches but in four layers
    assert count_parameters_by_layer(qwen).total == 8_292_166_656
    parts, pooled = image_flops(gemma), 2 * 256 * 1152 * 2560
    assert parts["scores"] == 3 * 27 * 4 * 4096**2 * 1152
    first, layer = 2 * 4096 * 3 * 14**2 * 1152, 2 * 4096 * (4 * 1152**2 + 2 * 1152 * 4304)
    assert parts["products"] == pytest.approx(3 * (27 * layer + pooled) + 2 * first)
    assert (
        count_parameters_by_layer(llava).active_parameters
        == count_parameters_by_layer(llava).total - count_parameters_by_layer(llava).vision
    )
