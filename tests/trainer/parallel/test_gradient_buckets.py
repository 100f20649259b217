"""Gradients that a backward puts in their places itself: the sums are those of autograd's, whatever was there before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mega_common.model_config import ModelConfig
from mega_trainer.model.activation_checkpointing import RecomputePolicy
from mega_trainer.model.decoder import Decoder
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.weight_init import initialize_weights
from mega_trainer.parallel.gradient_buckets import GradientBucket, StepGradientBucket
from mega_trainer.parallel.parallel_linear import DeferredWgradQueue
from mega_trainer.parallel.parameter_info import get_main_grad_function, get_parameter_info
from mega_trainer.parallel.zero_buffers import FlatBufferStage, ZeroConfig, flatten_parameters

LENGTH, MICROS = 8, 3
BASE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "num_kv_heads": 2,
    "vocab_size": 29, "max_position": LENGTH, "qkv_bias": True,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "dense": BASE,
    "tied": {**BASE, "tie_embeddings": True},
    "experts": {**BASE, "moe": {"num_experts": 8, "top_k": 1, "ffn_hidden_size": 8}},  # of which some get no token
}
KINDS = {
    "step": ZeroConfig(shard_grads=False, bucket_elements=700),
    "micro": ZeroConfig(shard_grads=True, reduce_every_microbatch=True),
}


def build_decoder(name: str, dtype: torch.dtype, recompute: bool = False) -> Decoder:
    build = LayerBuilder(ModelConfig.model_validate(MODELS[name]), dtype=dtype)
    model = Decoder(build, recompute=RecomputePolicy("full" if recompute else "none")).train()
    initialize_weights(model, 3)
    return model


def objective(model: Decoder, micro: int) -> Tensor:
    g = torch.Generator().manual_seed(micro)
    tokens, labels = torch.randint(0, 29, (2, 1, LENGTH), generator=g)
    positions = torch.arange(LENGTH)[None]
    x = model(model.embed_inputs(tokens, positions), model.make_forward_context(positions))
    return model.compute_token_loss(x, labels, torch.rand(1, LENGTH, generator=g))[0] * 0.3


def reference(model: Decoder, dtype: torch.dtype) -> list[Tensor]:
    """Sums of autograd's gradients over the micro-batches, in at least fp32."""
    parameters = list(model.parameters())
    sums = [torch.zeros_like(p, dtype=torch.promote_types(dtype, torch.float32)) for p in parameters]
    for micro in range(MICROS):
        for total, gradient in zip(sums, torch.autograd.grad(objective(model, micro), parameters), strict=True):
            total += gradient
    return sums


def spoil(stage: FlatBufferStage) -> None:
    """Nothing of what buckets hold may be read in the next step."""
    for buffer in stage.buffers:
        for bucket in buffer.buckets:
            bucket.grads.fill_(float("nan"))


def summed(model: Decoder, stage: FlatBufferStage) -> list[Tensor]:
    """The same by the buckets of a stage."""
    stage.begin_step()
    for micro in range(MICROS):
        with stage.backward_context(last=micro == MICROS - 1):
            objective(model, micro).backward()
    stage.finish_gradients()
    found = {
        parameter: bucket.grads[place].view(parameter.shape)
        for buffer in stage.buffers for bucket in buffer.buckets for parameter, place in bucket.param_slices.items()
    }  # fmt: skip
    assert all(parameter.grad is None for parameter in found)
    return [found[parameter].clone() for parameter in model.parameters()]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_sums_are_those_of_autograds_gradients(name: str, kind: str, recompute: bool) -> None:
    """To the bit in bf16, where each gradient is rounded before it is added; twice, for a step must leave nothing."""
    expected = reference(build_decoder(name, torch.bfloat16), torch.bfloat16)
    model = build_decoder(name, torch.bfloat16, recompute)
    stage = flatten_parameters(model, KINDS[kind], model.list_parameter_units())
    for _ in range(2):
        spoil(stage)
        found = summed(model, stage)
        unlike = [
            get_parameter_info(p).pieces[0].name
            for p, a, b in zip(model.parameters(), found, expected, strict=True)
            if not a.equal(b)
        ]
        assert not unlike


def test_products_are_added_where_they_are_made() -> None:
    """All that autograd brings of a dense model are norms and biases."""
    model = build_decoder("dense", torch.float64)
    stage = flatten_parameters(model, KINDS["step"], model.list_parameter_units())
    brought: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: brought.extend([] if p.grad is None else [p.dim()]))
    found, expected = summed(model, stage), reference(build_decoder("dense", torch.float64), torch.float64)
    torch.testing.assert_close(found, expected)
    assert set(brought) == {1}
    matrices = [p for p in model.parameters() if p.dim() > 1]
    assert len(brought) == MICROS * (len(list(model.parameters())) - len(matrices))


def test_sums_over_ranks_start_as_soon_as_their_gradients_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only at a backward's end, though autograd brings none of a product's."""
    model, left = build_decoder("dense", torch.float32), list[int]()
    stage, reduce = (
        flatten_parameters(model, KINDS["step"], model.list_parameter_units()),
        StepGradientBucket.start_reduce,
    )
    buckets: list[GradientBucket] = [bucket for buffer in stage.buffers for bucket in buffer.buckets]
    monkeypatch.setattr(
        StepGradientBucket, "start_reduce", lambda bucket: (left.append(len(bucket._missing)), reduce(bucket))
    )
    stage.begin_step()
    with stage.backward_context(last=True):
        objective(model, 0).backward()
        assert len(left) == len(buckets) > 2
    assert set(left) == {0}


def test_what_is_used_twice_or_put_off_goes_by_autograd() -> None:
    """An embedding and a head, where they are one, where further tokens use them too, or where a backward is cut in two."""

    def straight(build: LayerBuilder) -> list[str]:
        model = Decoder(build)
        stage = flatten_parameters(model, KINDS["step"], model.list_parameter_units())
        assert stage.buffers
        ends = [p for p in model.parameters() if p.shape == (29, 16)]
        return sorted(get_parameter_info(p).pieces[0].name for p in ends if get_main_grad_function(p) is not None)

    base, config = ModelConfig.model_validate(BASE), ModelConfig.model_validate
    assert straight(LayerBuilder(base)) == ["lm_head.weight", "model.embed_tokens.weight"]
    assert not straight(LayerBuilder(config(MODELS["tied"])))
    assert not straight(LayerBuilder(config({**BASE, "mtp_layers": 1})))
    assert not straight(LayerBuilder(base, deferred=DeferredWgradQueue()))
