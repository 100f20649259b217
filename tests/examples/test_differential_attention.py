"""The example of differential attention: every layout computes what one process computes."""

from __future__ import annotations

from typing import Any

import torch
from extension_cases import CONTEXT, LAYOUTS, extended_cases, find_differences

from mega_ckpt.canonical_tensors import count_model_parameters
from mega_trainer.distributed.process_groups import ParallelGroups
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler
from mega_trainer.model.decoder import Decoder
from mega_trainer.plan.flops import compute_forward_flops_per_token
from mega_trainer.plan.memory_advice import make_training_layout
from mega_trainer.plan.memory_prediction import predict_memory
from mega_trainer.run.build_components import choose_kernels, make_layer_builder

FILE = "differential_attention.py"
RUN = {"model": {"mixers": {"differential": {}}, "layers": ["differential+mlp"]}}


def test_every_layout_computes_what_one_process_computes() -> None:
    assert not find_differences(extended_cases(FILE, RUN, LAYOUTS + CONTEXT))


def test_adapters_and_muon_need_nothing_of_the_mixer() -> None:
    layouts: list[tuple[dict[str, Any], str]] = [({"tp": 2, "sp": True}, "none"), ({"tp": 2, "zero": 3}, "full")]
    adapted = extended_cases(FILE, RUN, layouts, lora={"rank": 2, "modules": ["q_proj", "v_proj", "o_proj"]})
    assert not find_differences([*adapted, *extended_cases(FILE, RUN, layouts[:1], optimizer="muon")])


def test_its_parameters_and_operations_are_counted() -> None:
    config = extended_cases(FILE, RUN, [({}, "none")])[0].single.config
    leaves, meta = FusibleFunctionCompiler(), torch.device("meta")
    choice = choose_kernels(config, torch.device("cpu"))
    built = Decoder(make_layer_builder(config, ParallelGroups(), meta, choice, leaves))
    assert sum(parameter.numel() for parameter in built.parameters()) == count_model_parameters(config.model)
    parts = compute_forward_flops_per_token(config.model, 16)
    heads, size, layers = 4, 4, 2
    assert parts["differential projections"] == layers * 2 * 4 * 32 * 32
    assert parts["differential mixing"] == layers * 2 * heads * 2 * (size + 2 * size) * (16 + 1) / 2
    (planned,) = predict_memory(config.model, make_training_layout(config, 1))
    assert planned["weights"] == 8 * count_model_parameters(config.model)
