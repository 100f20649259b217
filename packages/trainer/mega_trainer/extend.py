"""Interface for extensions: what a module outside of mega declares, and the parts it is written from.

An extension is a module with a constant `EXTENSION = Extension(...)`; docs/extensions.md explains each kind. This module
exports all that extensions need, and changes only with `EXTENSION_API`. The parts import torch when they are first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mega_common.extension_entries import (
    ActivationFunction,
    Block,
    BlockTraits,
    Callback,
    CustomTokenizer,
    DataKind,
    Extension,
    Kernel,
    NoOptions,
    NormFunction,
    Objective,
    Optimizer,
    PositionFunction,
    Sampler,
    Schedule,
    ScoreFunction,
)
from mega_common.extension_loader import EXTENSION_API
from mega_common.model_config import ModelConfig
from mega_common.strict_config import ConfigProblem, StrictConfig
from mega_trainer.config.extensions import load_extensions
from mega_trainer.config.sections import OptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor

    from mega_ckpt.canonical_tensors import canonical_tensors
    from mega_ckpt.families.config_entries import (
        AllowedValuesEntry,
        ConfigMismatchError,
        FixedFieldsEntry,
        KeyEntry,
        KeyValueHeadsEntry,
        MultiHeadEntry,
    )
    from mega_ckpt.families.disk_layouts import TensorRule, weight_bias_rules
    from mega_ckpt.families.family import ModelFamily
    from mega_ckpt.families.llama_decoders import LLAMA
    from mega_ckpt.families.rope_entries import RopeEntry
    from mega_data.kinds.dataset_kind import DatasetContext, DatasetSamples, TrainingSample
    from mega_data.kinds.running_text import build_text_samples
    from mega_data.sampling.dataset_parts import DatasetPart
    from mega_trainer.kernels.gated_delta_rule import DeltaRuleInputs
    from mega_trainer.kernels.kernel_interface import Kernels
    from mega_trainer.kernels.selective_scan import ScanInputs, ScanPass
    from mega_trainer.kernels.sequence_chunks import SequenceChunks
    from mega_trainer.model.attention import AttentionCore
    from mega_trainer.model.feed_forward import FeedForward
    from mega_trainer.model.forward_context import ForwardContext
    from mega_trainer.model.layer_builder import LayerBuilder
    from mega_trainer.model.norms import Norm
    from mega_trainer.model.recurrent_mixer import RecurrentMixer, ShortConvolution
    from mega_trainer.model.token_shift import TokenShift
    from mega_trainer.optim.elementwise import ElementwiseUpdate
    from mega_trainer.parallel.parameter_info import UniformInit
    from mega_trainer.parallel.recurrent_state import pass_recurrent_states
    from mega_trainer.parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear, SplitHeads
    from mega_trainer.run.step_callbacks import FinishedStep
    from mega_trainer.verify.verification import verify_run

# Parts that import torch or numpy, by the module that has them.
_PARTS = {
    "mega_ckpt.canonical_tensors": "canonical_tensors",
    "mega_ckpt.families.config_entries": "AllowedValuesEntry ConfigMismatchError FixedFieldsEntry KeyEntry KeyValueHeadsEntry MultiHeadEntry",
    "mega_ckpt.families.disk_layouts": "TensorRule weight_bias_rules",
    "mega_ckpt.families.family": "ModelFamily",
    "mega_ckpt.families.llama_decoders": "LLAMA",
    "mega_ckpt.families.rope_entries": "RopeEntry",
    "mega_data.kinds.dataset_kind": "DatasetContext DatasetSamples TrainingSample",
    "mega_data.kinds.running_text": "build_text_samples",
    "mega_data.sampling.dataset_parts": "DatasetPart",
    "mega_trainer.kernels.gated_delta_rule": "DeltaRuleInputs",
    "mega_trainer.kernels.kernel_interface": "Kernels",
    "mega_trainer.kernels.selective_scan": "ScanInputs ScanPass",
    "mega_trainer.kernels.sequence_chunks": "SequenceChunks",
    "mega_trainer.model.attention": "AttentionCore",
    "mega_trainer.model.feed_forward": "FeedForward",
    "mega_trainer.model.forward_context": "ForwardContext",
    "mega_trainer.model.layer_builder": "LayerBuilder",
    "mega_trainer.model.norms": "Norm",
    "mega_trainer.model.recurrent_mixer": "RecurrentMixer ShortConvolution",
    "mega_trainer.model.token_shift": "TokenShift",
    "mega_trainer.optim.elementwise": "ElementwiseUpdate",
    "mega_trainer.parallel.parameter_info": "UniformInit",
    "mega_trainer.parallel.recurrent_state": "pass_recurrent_states",
    "mega_trainer.parallel.tensor_parallel": "ColumnParallelLinear RowParallelLinear SplitHeads",
    "mega_trainer.run.step_callbacks": "FinishedStep",
    "mega_trainer.verify.verification": "verify_run",
}
_MODULES = {name: module for module, names in _PARTS.items() for name in names.split()}

__all__ = [
    "EXTENSION_API", "LLAMA", "ActivationFunction", "AllowedValuesEntry", "AttentionCore", "Block", "BlockTraits",
    "Callback", "ColumnParallelLinear", "ConfigMismatchError", "ConfigProblem", "CustomTokenizer", "DataKind",
    "DatasetContext", "DatasetPart", "DatasetSamples", "DeltaRuleInputs", "ElementwiseUpdate", "Extension", "FeedForward",
    "FinishedStep", "FixedFieldsEntry", "ForwardContext", "Kernel", "Kernels", "KeyEntry", "KeyValueHeadsEntry",
    "LayerBuilder", "ModelConfig", "ModelFamily", "MultiHeadEntry", "NoOptions", "Norm", "NormFunction", "Objective",
    "Optimizer", "OptimizerConfig", "PositionFunction", "RecurrentMixer", "RopeEntry", "RowParallelLinear", "Sampler",
    "ScanInputs", "ScanPass", "Schedule", "ScoreFunction", "SequenceChunks", "ShortConvolution", "SplitHeads",
    "StrictConfig", "TensorRule", "TokenShift", "TrainingSample", "UniformInit", "build_text_samples",
    "canonical_tensors", "compute_logits", "load_extensions", "pass_recurrent_states", "verify_run", "weight_bias_rules",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import and return a part on first access (PEP 562), so that an extension without torch stays without it."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"mega_trainer.extend has no {name!r}")


def __dir__() -> list[str]:
    """Return the names that an extension may use, those imported on first access included."""
    return sorted(__all__)


def compute_logits(run: Mapping[str, Any], tokens: Tensor, seed: int = 0) -> Tensor:
    """Return the logits [B, S, V] of a run's model with random weights in fp64, for a test of an extension.

    Args:
        run: run.yaml as a mapping; the data may be left out.
        tokens: int64 [B, S].
        seed: of the weights.
    """
    import torch

    from mega_trainer.config.run_config import RunConfig, resolve_run_config
    from mega_trainer.model.decoder import Decoder
    from mega_trainer.model.layer_builder import LayerBuilder
    from mega_trainer.model.weight_init import initialize_weights

    config = RunConfig.parse(resolve_run_config({"data": {"train": "none"}, **run}))
    blocks = config.registry.make_block_factories(config.model)
    functions = config.registry.bind_extension_functions(config.model)
    build = LayerBuilder(config.model, dtype=torch.float64, blocks=blocks, functions=functions)
    model, positions = Decoder(build).eval(), torch.arange(tokens.shape[1])[None]
    initialize_weights(model, seed)
    with torch.no_grad():
        states = model(model.embed_inputs(tokens, positions), model.make_forward_context(positions, tokens=tokens))
        return model.compute_logits(states)
