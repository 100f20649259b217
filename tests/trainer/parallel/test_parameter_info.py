"""A parameter's description."""

from __future__ import annotations

import pytest
import torch

from mega_ckpt.tensor_pieces import TensorPiece
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.parallel.parameter_info import get_parameter_info, is_weight_matrix, make_parameter


def test_a_parameter_carries_its_description_and_groups_of_one_are_left_out() -> None:
    pair, alone = CommGroup("tp", (0, 1)), CommGroup("shared")
    made = make_parameter(
        [2, 3], [TensorPiece.whole_tensor("w", (2, 3))], data=alone, dtype=torch.bfloat16, device=torch.device("cpu"), std=0.1,
        grad_sync=[pair, alone], replicas=[alone],
    )  # fmt: skip
    info = get_parameter_info(made)
    assert made.shape == (2, 3)
    assert made.dtype == torch.bfloat16
    assert made.requires_grad
    assert info.pieces == (TensorPiece.whole_tensor("w", (2, 3)),)
    assert info.grad_sync == (pair,)
    assert info.replicas == ()
    assert info.std == 0.1


@pytest.mark.parametrize(
    ("name", "shape", "matrix"),
    [
        ("model.layers.0.mlp.up_proj.weight", (2, 3), True),
        ("model.layers.0.self_attn.q_norm.weight", (2, 3), False),
        ("model.layers.0.mlp.experts.up_proj.bias", (2, 3), False),
        ("model.norm.weight", (3,), False),
    ],
)
def test_stacks_of_norms_and_biases_are_no_matrices(name: str, shape: tuple[int, ...], matrix: bool) -> None:
    device, alone = torch.device("cpu"), CommGroup("dp")
    made = make_parameter(
        shape, [TensorPiece.whole_tensor(name, shape)], data=alone, dtype=torch.float32, device=device
    )
    assert is_weight_matrix(made) is matrix
