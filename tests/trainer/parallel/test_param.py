"""A parameter's description."""

from __future__ import annotations

import torch

from mega_ckpt.pieces import Piece
from mega_trainer.comm import Group
from mega_trainer.parallel.param import info_of, make_parameter


def test_a_parameter_carries_its_description_and_groups_of_one_are_left_out() -> None:
    pair, alone = Group("tp", (0, 1)), Group("kv")
    made = make_parameter(
        [2, 3], [Piece.whole("w", (2, 3))], data=alone, dtype=torch.bfloat16, device=torch.device("cpu"), std=0.1,
        grad_sync=[pair, alone], replicas=[alone],
    )  # fmt: skip
    info = info_of(made)
    assert made.shape == (2, 3)
    assert made.dtype == torch.bfloat16
    assert made.requires_grad
    assert info.pieces == (Piece.whole("w", (2, 3)),)
    assert info.grad_sync == (pair,)
    assert info.replicas == ()
    assert info.std == 0.1
