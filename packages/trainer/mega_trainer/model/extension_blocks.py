"""Checks of a block of an extension: of its tensors, found by building it without memory, and of its outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mega_ckpt.tensor_pieces import TensorShape
from mega_common.errors import ConfigError
from mega_common.extension_loader import check_call
from mega_common.model_config import ModelConfig
from mega_trainer.model.layer_builder import LayerBuilder, LayerFactory
from mega_trainer.model.recurrent_mixer import RecurrentMixer
from mega_trainer.model.token_shift import TokenShift
from mega_trainer.parallel.parameter_info import get_parameter_info


def list_block_tensors(
    config: ModelConfig, factory: LayerFactory, where: str, layer: int, *, recurrent: bool
) -> dict[str, TensorShape]:
    """Return the shapes of a layer's block's tensors by name after `model.layers.N.`; a ConfigError for an invalid block.
    They are in the order of its parameters. `where` names the block in errors, and `layer` is the number of a layer that has it.

    Raises:
        ConfigError: if the block is no module with a `forward(x, context)`, has a parameter that was not made by the builder or
            a buffer that would be saved, if a name belongs to another layer or is used twice; or if the block keeps a state in
            generation and is not declared `recurrent`.
    """
    module = factory(LayerBuilder(config, device=torch.device("meta")), layer)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{where} must be a torch.nn.Module, found {type(module).__name__}", hint="derive it from nn.Module"
        )
    check_call(f"{where}: its method forward", module.forward, "x, context")
    for part in module.modules():
        if isinstance(part, RecurrentMixer | TokenShift) and not recurrent:
            raise ConfigError(
                f"{where}: a {type(part).__name__} keeps a state from token to token, which the block does not declare",
                hint="return BlockTraits(recurrent=True, ...) from declares",
            )
    found: dict[str, TensorShape] = {}
    if buffers := [name for name, _ in module.named_buffers() if name in module.state_dict()]:
        raise ConfigError(
            f"{where}: the buffer {buffers[0]} would not be saved: a checkpoint has parameters alone",
            hint="register a constant with persistent=False, or build a parameter",
        )
    for name, parameter in module.named_parameters():
        try:
            pieces = get_parameter_info(parameter).pieces
        except AttributeError:
            raise ConfigError(
                f"{where}: the parameter {name} was not made by the builder, so no rank knows its part of it",
                hint="use build.build_column_linear, build_row_linear, build_head_parameters or build_replicated",
            ) from None
        for piece in pieces:
            before, prefix, suffix = piece.name.partition(f"model.layers.{layer}.")
            if before or not prefix:
                raise ConfigError(
                    f"{where}: the tensor {piece.name} must be named model.layers.N.NAME, with the number of its layer, here {layer}",
                    hint='use f"model.layers.{layer}.NAME"',
                )
            if suffix in found:
                raise ConfigError(
                    f"{where}: two parameters are named model.layers.N.{suffix}",
                    hint="give each parameter a name of its own",
                )
            found[suffix] = tuple(piece.global_shape)
    return found


def check_block_output(where: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    """Raise a ConfigError unless a block's output has the shape and dtype of its input; a forward hook of its module.

    Raises:
        ConfigError: if it does not; `where` names the block.
    """
    x = inputs[0]
    if not isinstance(output, Tensor) or output.shape != x.shape or output.dtype != x.dtype:
        found = f"{list(output.shape)} {output.dtype}" if isinstance(output, Tensor) else type(output).__name__
        raise ConfigError(
            f"{where} must return a tensor of the shape and dtype of its input, {list(x.shape)} {x.dtype}, found {found}",
            hint="correct its method forward; the result of a row-parallel layer has this shape",
        )
