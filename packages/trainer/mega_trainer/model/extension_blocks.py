"""Tensors of a block of an extension, found by building it without memory."""

from __future__ import annotations

import torch

from mega_ckpt.tensor_pieces import TensorShape
from mega_common.errors import ConfigError
from mega_common.model_config import ModelConfig
from mega_trainer.model.layer_builder import LayerBuilder, LayerFactory
from mega_trainer.model.recurrent_mixer import RecurrentMixer
from mega_trainer.model.token_shift import TokenShift
from mega_trainer.parallel.parameter_info import get_parameter_info


def list_block_tensors(config: ModelConfig, factory: LayerFactory, *, recurrent: bool) -> dict[str, TensorShape]:
    """Return the shape of each tensor of a layer's block, by its name after `model.layers.N.`.
    They are in the order of its parameters.

    Raises:
        ConfigError: if a parameter was not made by the builder, its name belongs to another layer, or two have one name; or if
            the block keeps a state in generation and is not declared `recurrent`.
    """
    module = factory(LayerBuilder(config, device=torch.device("meta")), 0)
    for part in module.modules():
        if isinstance(part, RecurrentMixer | TokenShift) and not recurrent:
            raise ConfigError(
                f"a {type(part).__name__} keeps a state from token to token, which the block does not declare",
                hint="return BlockTraits(recurrent=True, ...) from declares",
            )
    found: dict[str, TensorShape] = {}
    for name, parameter in module.named_parameters():
        try:
            pieces = get_parameter_info(parameter).pieces
        except AttributeError:
            raise ConfigError(
                f"the parameter {name} was not made by the builder, so no rank knows its part of it",
                hint="use build.build_column_linear, build_row_linear, build_head_parameters or build_replicated",
            ) from None
        for piece in pieces:
            before, layer, suffix = piece.name.partition("model.layers.0.")
            if before or not layer:
                raise ConfigError(
                    f"the tensor {piece.name} must be named model.layers.N.NAME, with the number of its layer",
                    hint='use f"model.layers.{layer}.NAME"',
                )
            if suffix in found:
                raise ConfigError(
                    f"two parameters are named model.layers.N.{suffix}", hint="give each parameter a name of its own"
                )
            found[suffix] = tuple(piece.global_shape)
    return found
