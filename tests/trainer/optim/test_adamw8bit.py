"""AdamW with moments in 8 bits: against bitsandbytes' own optimizer, against AdamW in layouts, and resumed bit by bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from extension_cases import SIZES
from parity.bits import resumed, told
from ranks import run_ranks
from torch import Tensor, nn

from mega_common.errors import ConfigError
from mega_trainer.config.run_config import RunConfig
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.optim.adamw8bit import BLOCK, AdamW8bitUpdateRule
from mega_trainer.optim.optimizer_slots import OptimizerOffloadTransfers, OptimizerSlot
from mega_trainer.parallel.parameter_shards import GatheredShardLayout, ParameterShard, ParamGroupKey
from mega_trainer.verify.case_comparison import compare_outcomes
from mega_trainer.verify.case_trainer import CaseTrainer, SingleProcessOutcomes, make_case_process_groups
from mega_trainer.verify.layout_case import LayoutCase

bitsandbytes = pytest.importorskip("bitsandbytes")

RUN = {
    "model": {**SIZES, "num_layers": 2}, "data": {"train": "data/train", "seq_length": 16}, "train": {"steps": 2},
    "output": "runs/x",
}  # fmt: skip


def eight_bits(ranks: int, parallel: dict[str, Any], **optimizer: Any) -> LayoutCase:
    settings = {"name": "adamw8bit", "eps": 1e-4, **optimizer}
    return LayoutCase(
        "8 bits", {**SIZES, "num_layers": 2}, ranks, parallel=parallel, micro=2, precision="fp32",
        sections={"optimizer": settings},
    )  # fmt: skip


def slot_of(values: Tensor) -> OptimizerSlot:
    """A slot of one matrix."""
    kind = ParamGroupKey(CommGroup("dp"), (), (), True, False, torch.float32)
    main, grads = values.flatten().clone(), torch.zeros(values.numel())
    return OptimizerSlot(kind, True, ParameterShard(main, grads, [], GatheredShardLayout(len(main), {})), main, grads)


def test_updates_are_those_of_bitsandbytes() -> None:
    values = torch.randn(64, 80)
    slot, theirs = slot_of(values), nn.Parameter(values.clone())
    rule = AdamW8bitUpdateRule([slot], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer = bitsandbytes.optim.AdamW8bit([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    optimizer.fill_qmap()
    optimizer.name2qmap["dynamic"] = rule._moments[0][0].values_by_code  # which ends at -1
    optimizer.fill_qmap = lambda: None
    for _ in range(4):
        theirs.grad = torch.randn_like(values)
        slot.grads.copy_(theirs.grad.flatten())
        rule.update_slots(OptimizerOffloadTransfers(), 0.01)
        optimizer.step()
        assert torch.equal(slot.main.view_as(theirs), theirs.detach())
    assert (slot.main.view_as(values) - values).abs().max() > 0.01


def test_unpacked_moments_are_packed_to_the_same_bits() -> None:
    slot = slot_of(torch.randn(37, 80))
    rule = AdamW8bitUpdateRule([slot], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for size in (1e-6, 1.0, 30.0):
        slot.grads.copy_(size * torch.randn_like(slot.grads) ** 3)
        rule.update_slots(OptimizerOffloadTransfers(), 0.01)
    kept = [(moment.codes.clone(), moment.scales.clone()) for moment in rule._moments[0]]
    state = rule.state_tensors()
    for moment in rule._moments[0]:
        moment.codes.fill_(7)
        moment.scales.fill_(7)
    rule.pack_loaded_state()
    for moment, (codes, scales) in zip(rule._moments[0], kept, strict=True):
        assert torch.equal(moment.codes, codes)
        assert torch.equal(moment.scales, scales)
        assert len(scales) == -(-len(codes) // BLOCK)
    assert {name: values.dtype for name, [(_, values)] in state.items()} == {
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }


LAYOUTS = [
    eight_bits(2, {"zero": 1}), eight_bits(2, {"tp": 2}), eight_bits(2, {"zero": 3}),
    eight_bits(2, {"pp": 2}, offload=True),
]  # fmt: skip


def layouts_and_resumption(folder: Path) -> tuple[list[dict[str, float] | None], list[list[str] | None]]:
    """Errors of each layout against one process, and what differs in bits after it was saved and resumed."""
    rank, maker = dist.get_rank(), make_case_process_groups(LAYOUTS)
    references = SingleProcessOutcomes((one, one.steps) for one in LAYOUTS)
    errors = [
        compare_outcomes(CaseTrainer.build(one, rank, maker).run(), references.get_outcome(one))
        if rank < one.ranks
        else None
        for one in LAYOUTS
    ]
    return errors, resumed(LAYOUTS, folder)


def test_layouts_agree_to_rounding_and_resume_bit_by_bit(tmp_path: Path) -> None:
    """The blocks of a layout have scales of their own: errors of a moment are up to some percent of its block's largest."""
    found = run_ranks(layouts_and_resumption, 2, tmp_path, timeout=200)
    for errors in (one for ranks, _ in found for one in ranks if one):
        assert errors["loss"] < 1e-3
        assert errors["norm"] < 1e-2
        assert errors["gradients"] < 3e-5  # of the first step
        assert errors["weights"] < 0.05
    assert not told(LAYOUTS, [bits for _, bits in found])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"precision": "fp64"}, "optimizer.name = 'adamw8bit': requires fp32 main weights"),
        ({"fault": {"hash_every": 5}}, "fault.hash_every = 5: is not supported with optimizer.name = adamw8bit"),
    ],
)
def test_what_it_cannot_do_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.parse({**RUN, "optimizer": {"name": "adamw8bit"}, **settings})
    assert said in str(caught.value)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(ConfigError, match="adamw8bit requires bitsandbytes"):
        AdamW8bitUpdateRule([], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
