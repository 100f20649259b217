from __future__ import annotations

from dataclasses import replace

import pytest

from mega_common.lora_config import LoraConfig
from mega_common.model_config import ModelConfig
from mega_common.model_presets import load_model_preset
from mega_trainer.config.run_config import RunConfig
from mega_trainer.plan.flops import compute_model_flops_per_token, count_parameters_by_layer
from mega_trainer.plan.layer_cost import TrainerProfile
from mega_trainer.plan.machine import load_machine
from mega_trainer.plan.memory_advice import make_training_layout
from mega_trainer.plan.memory_prediction import predict_memory
from mega_trainer.plan.step_time import PlannedRun, predict_step_time
from mega_trainer.plan.trainable_parameters import TrainableParameters
from mega_trainer.plan.training_layout import TrainingLayout

H100 = load_machine("h100")
LLAMA = ModelConfig.parse({**load_model_preset("llama3-8b"), "num_layers": 4})
WHOLE = count_parameters_by_layer(LLAMA)
RUN = TrainingLayout(4096, microbatches=4, dp=8, zero=1)
LORA = LoraConfig(rank=8).model_dump_json()


def test_an_adapters_run_holds_no_gradients_of_frozen_weights() -> None:
    adapters = TrainableParameters.from_training_layout(LLAMA, replace(RUN, lora=LORA), WHOLE).count.total
    alone = replace(RUN, dp=1, lora=LORA)
    (table,) = predict_memory(LLAMA, alone)
    assert table["gradients"] == 4 * adapters < 0.01 * WHOLE.total
    assert table["optimizer"] == 12 * adapters
    assert table["weights"] == 2 * (WHOLE.total + adapters)


def test_what_is_frozen_has_no_state_in_its_layers_alone() -> None:
    (some,) = predict_memory(LLAMA, replace(RUN, dp=1, freeze=("model.layers.[01].*",)))
    assert some["gradients"] == 4 * (WHOLE.total - 2 * WHOLE.layers[0].total)


def test_an_average_is_four_bytes_a_parameter_of_a_slice() -> None:
    ((plain,), (averaged,)) = (predict_memory(LLAMA, replace(RUN, ema=ema)) for ema in (False, True))
    assert averaged["optimizer"] - plain["optimizer"] == pytest.approx(4 * WHOLE.total / 8, rel=1e-6)


def test_frozen_weights_cost_no_product_sum_or_update() -> None:
    full, frozen, adapted = (
        predict_step_time(LLAMA, run, H100, H100.achieved_efficiency)
        for run in (RUN, replace(RUN, freeze=("*",)), replace(RUN, lora=LORA))
    )
    assert 0.6 < frozen.parts["products"] / full.parts["products"] < 0.7
    assert "data" not in frozen.parts
    assert frozen.seconds < adapted.seconds < full.seconds


def test_flops_of_a_run_are_those_of_what_it_trains() -> None:
    """Two of six operations a weight are its gradient's; an adapter's products are few."""
    frozen = TrainableParameters.from_training_layout(LLAMA, replace(RUN, freeze=("*",)), WHOLE).extra_flops(
        LLAMA, WHOLE
    )
    matrices = WHOLE.total - WHOLE.embedding - WHOLE.final_norm
    assert frozen == -2 * matrices
    adapted = TrainableParameters.from_training_layout(LLAMA, replace(RUN, lora=LORA), WHOLE)
    assert adapted.extra_flops(LLAMA, WHOLE) - frozen == 6 * adapted.count.total
    assert TrainableParameters.from_training_layout(LLAMA, RUN, WHOLE).extra_flops(LLAMA, WHOLE) == 0
    assert compute_model_flops_per_token(LLAMA, 4096) + frozen > 0.66 * compute_model_flops_per_token(LLAMA, 4096)


def test_a_run_says_what_it_trains() -> None:
    raw = {
        "model": load_model_preset("llama3-8b"), "data": {"train": ["x"], "seq_length": 4096}, "init_from": "there",
        "lora": {"rank": 8}, "train": {"ema": 0.99, "freeze": ["*.layers.0.*"]},
    }  # fmt: skip
    run = make_training_layout(RunConfig.parse(raw), 1)
    model = RunConfig.parse(raw).model
    assert (run.ema, run.freeze) == (True, ("*.layers.0.*",))
    trained = PlannedRun.from_settings(model, run, H100, H100.achieved_efficiency, TrainerProfile()).trained
    assert trained.count.layers[0].total == 0 < trained.count.layers[1].total
