"""Descriptions of models and vision encoders that run as modules of the transformers library."""

from __future__ import annotations

from typing import Any

from pydantic import NonNegativeInt

from mega_common.strict_config import StrictConfig


class TransformersModuleConfig(StrictConfig):
    """Model that runs as a module of the transformers library: its config.json, and the shape of each tensor.

    Tensors are the parameters, tied ones once, and the persistent buffers, by the names that transformers gives them.
    """

    config: dict[str, Any]
    tensors: dict[str, tuple[NonNegativeInt, ...]]

    @property
    def model_type(self) -> str:
        """Model type of transformers, such as `llama`."""
        return str(self.config.get("model_type"))


class VisionModuleConfig(StrictConfig):
    """Vision encoder and projector of a vision-language model that run as modules of the transformers library.

    Attributes:
        config: content of the whole model's config.json.
        tensors: shape of each tensor of the encoder and the projector, by canonical name.
        image_processor: settings of transformers' image processor; empty if the folder has none.
        processor: settings of transformers' processor, which writes the text of an image.
        tokens: special tokens that the processor reads from its tokenizer, by name.
        grid_positions: rotary positions of an image are those of the rows and columns of its features (M-RoPE).
    """

    config: dict[str, Any]
    tensors: dict[str, tuple[NonNegativeInt, ...]]
    image_processor: dict[str, Any] = {}
    processor: dict[str, Any] = {}
    tokens: dict[str, str] = {}
    grid_positions: bool = False

    @property
    def model_type(self) -> str:
        """Model type of the whole vision-language model in transformers, such as `internvl`."""
        return str(self.config.get("model_type"))
