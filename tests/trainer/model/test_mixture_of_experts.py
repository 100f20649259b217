"""The mixture of experts against its formula, token by token and expert by expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mega_common.model_config import ModelConfig
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.expert_router import ExpertRouter
from mega_trainer.model.forward_context import ForwardContext, SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.mixture_of_experts import MixtureOfExperts
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.expert_routing import MicroBatchRouting

D, F_, E = 6, 8, 5


def config(**fields: Any) -> ModelConfig:
    moe = {"num_experts": E, "top_k": 2, "ffn_hidden_size": F_, **fields.pop("moe", {})}
    return ModelConfig.model_validate({
        "num_layers": 1, "hidden_size": D, "ffn_hidden_size": 10, "num_attention_heads": 1, "vocab_size": 8,
        "init_std": 0.5, "moe": moe, **fields,
    })  # fmt: skip


def layer(model: ModelConfig) -> MixtureOfExperts:
    made = MixtureOfExperts(LayerBuilder(model, dtype=torch.float64), 0)
    initialize_weights(made, 1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return made


def run(it: MixtureOfExperts, x: Tensor) -> Tensor:
    y: Tensor = it(x, ForwardContext(SequenceMask(x.shape[1], x.device)))
    return y


def activated(h: Tensor, model: ModelConfig) -> Tensor:
    if not model.has_gated_mlp:
        return F.gelu(h)
    gate, up = h.chunk(2, -1)
    if model.activation_limit is None:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=model.activation_limit), up.clamp(-model.activation_limit, model.activation_limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def by_formula(it: MixtureOfExperts, x: Tensor, model: ModelConfig) -> Tensor:
    out = []
    for token in x.flatten(0, 1):
        scores = (it.router.weight @ token).softmax(-1)
        best = scores.topk(2)
        y = torch.zeros(D, dtype=x.dtype)
        for weight, expert in zip(best.values / best.values.sum(), best.indices, strict=True):
            h = it.experts.up[expert] @ token
            h = h if it.experts.up_bias is None else h + it.experts.up_bias[expert]
            down = it.experts.down[expert] @ activated(h, model)
            y = y + weight * (down if it.experts.down_bias is None else down + it.experts.down_bias[expert])
        if it.shared is not None:
            gate = 1.0 if it.shared_gate is None else torch.sigmoid(it.shared_gate[0] @ token)
            y = y + gate * it.shared(token[None, None])[0, 0]
        out.append(y)
    return torch.stack(out).view_as(x)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"moe": {"shared_ffn_hidden_size": 4}},
        {"moe": {"shared_ffn_hidden_size": 4, "shared_gate": True}, "mlp_bias": True},
        {"activation": "gelu", "mlp_bias": True},
        {"activation_limit": 0.5, "mlp_bias": True},
    ],
)
def test_formula(fields: dict[str, Any]) -> None:
    model = config(**fields)
    it = layer(model)
    x = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    y, expected = run(it, x), by_formula(it, x, model)
    torch.testing.assert_close(y, expected)
    wanted = [x, *it.parameters()]
    found, right = (
        torch.autograd.grad(z.square().sum(), wanted, allow_unused=True, materialize_grads=True) for z in (y, expected)
    )
    torch.testing.assert_close(found, right)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    it = layer(config())
    x = torch.randn(1, 4, D, dtype=torch.float64).abs()
    with torch.no_grad():
        it.router.weight[3] = -10.0
    run(it, x).sum().backward()
    assert it.experts.up.grad is not None
    assert (it.experts.up.grad[3] == 0).all()
    assert it.experts.up.grad.abs().sum() > 0


def test_no_token_that_matters() -> None:
    """A micro-batch of padding."""
    it = layer(config(mlp_bias=True))
    none = MicroBatchRouting(torch.zeros(1, 4, dtype=torch.bool), None, 1.0, 1.0)
    x = torch.randn(1, 4, D, dtype=torch.float64)
    y = it(x, ForwardContext(SequenceMask(4, x.device), routing=none))
    assert (y == 0).all()
    y.sum().backward()
    assert all(parameter.grad is not None and (parameter.grad == 0).all() for parameter in it.parameters())


def test_a_layer_far_from_experts_takes_the_stream_of_a_pipeline_stage() -> None:
    """Between stages the stream is as wide as hidden states and deferred output; a layer may begin a stage and have neither."""
    made = config(
        num_layers=4, moe={"layers": [1], "shared_ffn_hidden_size": 10, "shortcut": True}, ffn_hidden_size=10,
    )  # fmt: skip
    model = Decoder(LayerBuilder(made, dtype=torch.float64)).eval().requires_grad_(False)
    initialize_weights(model, 1)
    positions = torch.arange(3)[None]
    x, context = torch.randn(1, 3, D, dtype=torch.float64), model.make_forward_context(positions)
    for layer in (0, 3):
        torch.testing.assert_close(
            model.layers[layer](model.resize_stream_width(x), context), model.layers[layer](x, context), rtol=0, atol=0
        )


def test_a_table_of_experts_may_name_experts_that_return_their_input() -> None:
    made = config(moe={"top_k": 6, "zero_experts": 2, "hash_layers": [0]})
    table = ExpertRouter(LayerBuilder(made), 0).hash_table
    assert table is not None
    assert {len(set(row)) for row in table.values.tolist()} == {6}
    assert table.values.max() >= E
