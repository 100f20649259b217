"""Description of a model that runs as a module of the transformers library (`implementation: transformers`)."""

from __future__ import annotations

from typing import Any

from pydantic import NonNegativeInt

from mega_common.strict_config import StrictConfig


class TransformersModuleConfig(StrictConfig):
    """Content of the model's config.json, and shape of each of its tensors by the name that transformers gives it.

    Tensors are the parameters, tied ones once, and the persistent buffers.
    """

    config: dict[str, Any]
    tensors: dict[str, tuple[NonNegativeInt, ...]]

    @property
    def model_type(self) -> str:
        """Model type of transformers, such as `llama`."""
        return str(self.config.get("model_type"))
