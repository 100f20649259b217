"""Alternating updates of residual streams and sparse gates, where transformers' model in evaluation does not say it."""

from __future__ import annotations

import torch
from tiny_models import variant
from torch.nn import functional as F

from mega_trainer.model.alternating_updates import AlternatingUpdate, StreamExpansion
from mega_trainer.model.feed_forward import SparseFeedForward
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights

BUILD = LayerBuilder(variant("gemma3n"), dtype=torch.float64)


def test_coefficients_are_clipped_in_training_alone() -> None:
    altup = AlternatingUpdate(BUILD, 0)
    initialize_weights(altup, 1)
    altup.clip = 0.5
    with torch.no_grad():
        altup.prediction.fill_(3.0)
        altup.correction.fill_(-3.0)
    x, y = torch.randn(1, 2, 72, dtype=torch.float64), torch.randn(1, 2, 24, dtype=torch.float64)

    def updates() -> list[torch.Tensor]:
        predicted = altup.predict(x)
        return [predicted, altup.correct(predicted.detach(), y)]

    clipped, whole = updates(), [each.detach() for each in altup.eval() and updates()]
    with torch.no_grad():
        altup.prediction.fill_(0.5)
        altup.correction.fill_(-0.5)
    assert not torch.allclose(clipped[0], whole[0])
    torch.testing.assert_close(clipped[0], updates()[0])
    altup.train()
    torch.testing.assert_close(altup.correct(clipped[0].detach(), y), clipped[1])


def test_the_cutoff_makes_a_share_of_the_gates_zero() -> None:
    mlp = SparseFeedForward(BUILD, "mlp", 4000, 0.9)
    gate_up = torch.randn(2, 3, 8000, dtype=torch.float64)
    (cutoff,) = mlp.activation_inputs(gate_up)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(
        cutoff, gate.mean(-1, True) + 1.2815515655446004 * gate.std(-1, correction=0, keepdim=True)
    )
    h = mlp.activate(gate_up, cutoff)
    torch.testing.assert_close(h, F.gelu((gate - cutoff).clamp(min=0), approximate="tanh") * up)
    assert 0.87 < (h == 0).double().mean() < 0.93


def test_gradients_are_finite_where_embeddings_or_gates_are_zero() -> None:
    """As those of a padding token may be."""
    x = torch.zeros(1, 2, 24, dtype=torch.float64, requires_grad=True)
    for module in (StreamExpansion(BUILD), SparseFeedForward(BUILD, "mlp", 40, 0.5)):
        initialize_weights(module, 1)
        module(x).sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert all(weight.grad is None or weight.grad.isfinite().all() for weight in module.parameters())
