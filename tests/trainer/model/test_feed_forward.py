"""The feed-forward block, by its formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mega_common.model_config import ModelConfig
from mega_trainer.model.feed_forward import FeedForward
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights

FORMULAS: dict[str, Any] = {
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "geglu": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "gelu": lambda up: F.gelu(up),
    "gelu_tanh": lambda up: F.gelu(up, approximate="tanh"),
    "relu2": lambda up: up.clamp(min=0) ** 2,
}


def bounded(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate, up = gate.minimum(torch.tensor(0.3)), up.maximum(torch.tensor(-0.3)).minimum(torch.tensor(0.3))
    return (up + 1) * gate / (1 + (-1.702 * gate).exp())


@pytest.mark.parametrize("activation", [*FORMULAS, "bounded"])
def test_formula(activation: str) -> None:
    formula = bounded if activation == "bounded" else FORMULAS[activation]
    kind = {"activation": "swiglu", "activation_limit": 0.3} if activation == "bounded" else {"activation": activation}
    config = ModelConfig.model_validate({
        "num_layers": 1, "hidden_size": 6, "ffn_hidden_size": 10, "num_attention_heads": 1, "vocab_size": 8,
        **kind, "mlp_bias": True, "init_std": 0.5,
    })  # fmt: skip
    mlp = FeedForward(LayerBuilder(config, dtype=torch.float64), "mlp", 10)
    initialize_weights(mlp, 1)
    with torch.no_grad():
        mlp.up.biases[0].normal_()
        mlp.down.bias.normal_()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    parts = (x @ mlp.up.weights[0].t() + mlp.up.biases[0]).split(10, dim=-1)
    expected = formula(*parts) @ mlp.down.weight.t() + mlp.down.bias
    y = mlp(x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), x), torch.autograd.grad(expected.square().sum(), x)
    )
