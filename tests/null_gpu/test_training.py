"""Every model of the parity suite trains, evaluates and hands out its checkpoint on a CUDA device, as far as a host can see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity import eight_bits
from parity.cases import MODELS, VARIANTS, case

from mega_common.errors import ConfigError
from mega_trainer.config.fp8_config import check_fp8_device
from mega_trainer.data.micro_batch import split_micro_batches
from mega_trainer.kernels.fp8_kernels import KINDS
from mega_trainer.objectives.training_objective import TrainingObjective
from mega_trainer.run.train_step import evaluate_losses
from mega_trainer.verify.case_trainer import CaseTrainer, copy_sharded_tensors_to_host
from mega_trainer.verify.layout_case import LayoutCase

CUDA = torch.device("cuda", 0)
WIDE_HEADS = {"head_dim": 16}  # of which torch has flash kernels and FlexAttention


def models() -> Iterator[tuple[str, LayoutCase]]:
    """Every variant of every model in bf16, and some in the other precisions and with other options of a step."""
    for name in MODELS:
        for number, variant in enumerate(VARIANTS.get(name, [{}])):
            yield f"{name} {number}", case(name, 1, variant=variant, precision="bf16", micro=4)
    for name in ("dense", "gqa", "gemma", "long", "moe", "hybrid"):
        yield f"{name}, wide heads", case(name, 1, variant=WIDE_HEADS, precision="bf16", micro=4)
        for precision in ("fp16", "fp32"):
            yield f"{name} {precision}", case(name, 1, precision=precision, micro=4)
    options: dict[str, dict[str, Any]] = {
        "recompute": {"recompute": {"kind": "full"}}, "selective": {"recompute": {"kind": "selective"}},
        "offload": {"offload": {"activations": 1, "min_bytes": 0}}, "muon": {"optimizer": "muon"}, "open": {"closed": False},
    }  # fmt: skip
    for name in ("tied", "mla", "moe", "vision"):
        for option, fields in options.items():
            yield f"{name}, {option}", case(name, 1, precision="bf16", micro=4, **fields)


def eight_bit_models() -> Iterator[tuple[str, LayoutCase]]:
    """Each recipe with what it is refused with on this device left out: experts, widths of less than a block."""
    for recipe in KINDS:
        whole = eight_bits.case(recipe, 1, {}, wide=False, micro=2)
        dense = {field: value for field, value in whole.model.items() if field != "moe"}
        for name, model in {"experts": whole.model, "dense": dense, "norms": {**dense, "qk_norm": True}}.items():
            yield f"{recipe}, {name}", replace(whole, model=model)


CASES = dict([*models(), *eight_bit_models()])


def train(one: LayoutCase) -> CaseTrainer:
    """Two steps, an evaluation, and the tensors of a checkpoint."""
    trainer = CaseTrainer.build(one, device=CUDA)
    trainer.run(2)
    batch = trainer.batches(trainer.config, 0, 0, 1, one.closed)
    micro = list(split_micro_batches(batch, trainer.config, CUDA, trainer.groups.cp))
    for stage in trainer.state.stages.values():
        stage.eval()
    evaluate_losses(trainer.executor, [micro], TrainingObjective(trainer.groups, 0).validation_totals)
    copy_sharded_tensors_to_host(trainer.state.checkpoint_tensors())
    return trainer


@pytest.mark.parametrize("name", CASES)
def test_trains(name: str) -> None:
    one, capability = CASES[name], torch.cuda.get_device_capability(CUDA)
    if one.precision == "fp8":
        supported(capability, one)
    trainer = train(one)
    assert trainer.state.step == 2
    assert {parameter.device for parameter in trainer.state.stages[0].parameters()} == {CUDA}


def supported(capability: tuple[int, int], one: LayoutCase) -> None:
    """Skip what mega refuses on the device, in a sentence."""
    try:
        check_fp8_device(capability, one.fp8["recipe"], experts="moe" in one.model)
    except ConfigError as error:
        pytest.skip(str(error))
