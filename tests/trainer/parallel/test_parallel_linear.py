"""The one Function under all linear layers: a back end multiplies whatever the layout, and all of it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mega_ckpt.tensor_pieces import TensorPiece
from mega_common.model_config import ModelConfig
from mega_trainer.config.parallel_layout import ParallelLayout
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.distributed.process_groups import build_parallel_groups
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.model.forward_context import ForwardContext, SequenceMask
from mega_trainer.model.layer_builder import LayerBuilder
from mega_trainer.model.rotary_embedding import RotaryEmbedding
from mega_trainer.model.transformer_layer import TransformerLayer
from mega_trainer.parallel import parallel_linear
from mega_trainer.parallel.gradient_buckets import StepGradientBucket
from mega_trainer.parallel.parallel_linear import (
    DeferredWgradQueue,
    ParallelLinearFunction,
    apply_grouped_linear,
    run_deferred_wgrads,
)
from mega_trainer.parallel.parameter_info import make_parameter
from mega_trainer.parallel.zero_buffers import ZeroConfig, flatten_parameters

LENGTH = 8
DENSE = {
    "num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4, "vocab_size": 32,
    "max_position": LENGTH,
}  # fmt: skip
MLA = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 8, "shared_ffn_hidden_size": 8}
MODELS = {  # with the number of products each way: a block's layers, those of experts apart
    "dense": (DENSE, 4, 0),
    "latent": ({**DENSE, "mla": MLA, "rope": {"interleaved": True}}, 7, 0),
    "experts": ({**DENSE, "moe": MOE}, 4, 2),
    "shared heads": ({**DENSE, "num_kv_heads": 1, "qkv_bias": True}, 4, 0),
}


class Counting(TorchKernels):
    """Counts its products."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("linear", "grouped")):
            self.calls[name] += 1
        return super().__getattribute__(name)


def products_of_blocks() -> dict[str, list[dict[str, int]]]:
    """What the back end multiplies in a block's forward and backward, by model and layout."""
    out: dict[str, list[dict[str, int]]] = {}
    for name, (raw, *_) in MODELS.items():
        config, out[name] = ModelConfig.model_validate(raw), []
        for tp, sp in [(1, False), (2, False), (2, True)]:
            groups = build_parallel_groups(
                ParallelLayout(tp=tp, dp=2 // tp), dist.get_rank(), heads=config.shared_head_counts
            )
            kernels = Counting()
            block = TransformerLayer(LayerBuilder(config, groups, kernels, sp=sp), 0)
            turned = RotaryEmbedding.from_model_config(config, config.rope).compute_rotation(
                torch.arange(LENGTH)[None], torch.float32
            )
            x = torch.randn(1, LENGTH // 2 if sp else LENGTH, 16, requires_grad=True)
            block(x, ForwardContext(SequenceMask(LENGTH, x.device), turned)).sum().backward()
            out[name].append(dict(kernels.calls))
    return out


def test_a_back_end_multiplies_in_every_layout() -> None:
    for found in run_ranks(products_of_blocks, 2):
        for name, (_, plain, grouped) in MODELS.items():
            kinds = {"linear_forward": plain, "linear_dgrad": plain, "linear_wgrad": plain}
            kinds |= {"grouped_linear": grouped, "grouped_dgrad": grouped, "grouped_wgrad": grouped} if grouped else {}
            assert found[name] == [kinds] * 3, name


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_only_gradients_that_are_wanted_are_computed(wanted: tuple[bool, bool]) -> None:
    x, weight = (torch.randn(3, 5, requires_grad=there) for there in wanted)
    kernels = Counting()
    ParallelLinearFunction(kernels)(x, weight).sum().backward()
    expected = {
        "linear_forward": 1,
        **({"linear_dgrad": 1} if wanted[0] else {}),
        **({"linear_wgrad": 1} if wanted[1] else {}),
    }
    assert kernels.calls == expected


@pytest.mark.parametrize("counts", [[2, 0, 3], [0, 0, 5]])
def test_each_group_has_its_gradients(counts: list[int]) -> None:
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in [(5, 4), (3, 6, 4)])
    dy = torch.randn(5, 6, dtype=torch.float64)
    y = apply_grouped_linear(x, weight, GroupedRows.from_counts(counts, x.device), TorchKernels())
    group = [g for g, count in enumerate(counts) for _ in range(count)]
    reference = torch.stack([F.linear(row, weight[g]) for row, g in zip(x, group, strict=True)])
    torch.testing.assert_close(y, reference)
    mine, theirs = (torch.autograd.grad([out], [x, weight], [dy]) for out in (y, reference))
    torch.testing.assert_close(mine, theirs)


def test_collectives_of_a_backward_run_beside_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under sequence parallelism: X is gathered beside the product for dX, which is summed beside that for dW."""
    events: list[str] = []

    class Noting(TorchKernels):
        def linear_dgrad(self, dy: Tensor, weight: Tensor) -> Tensor:
            events.append("dX")
            return super().linear_dgrad(dy, weight)

        def linear_wgrad(self, dy: Tensor, x: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
            events.append("dW")
            return super().linear_wgrad(dy, x, out, add=add)

    class Done:
        def __init__(self, what: str) -> None:
            events.append(f"start {what}")
            self.what = what

        def wait(self) -> None:
            events.append(f"wait {self.what}")

    monkeypatch.setattr(parallel_linear, "all_gather", lambda x, group, dim: torch.cat([x, x], dim))
    monkeypatch.setattr(
        parallel_linear, "start_all_gather", lambda x, group, dim: (torch.cat([x, x], dim), Done("gather"))
    )
    monkeypatch.setattr(
        parallel_linear, "start_reduce_scatter", lambda x, group, dim: (x.chunk(2, dim)[0], Done("sum"))
    )
    x, weight = torch.randn(1, 4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    ParallelLinearFunction(Noting(), group=CommGroup("tp", (0, 1)), sp=True)(x, weight).sum().backward()
    assert events == ["start gather", "dX", "start sum", "wait gather", "dW", "wait sum"]


def test_a_deferred_product_is_the_back_ends() -> None:
    kernels, later, weight = Counting(), DeferredWgradQueue(), torch.randn(5, 4, requires_grad=True)
    y = ParallelLinearFunction(kernels, later)(torch.randn(3, 4), weight)
    torch.autograd.grad([y], [weight], [torch.ones_like(y)], allow_unused=True)
    assert kernels.calls["linear_wgrad"] == 0
    (product,) = later.take_all_wgrads()
    gradient: Tensor = product.compute_grad()
    assert gradient.shape == weight.shape
    assert kernels.calls["linear_wgrad"] == 1


def test_a_weight_is_prepared_once_an_update_for_all_micro_batches_and_recomputations() -> None:
    """And what goes into its products is what was prepared, not the weight."""
    prepared = []

    class Preparing(Counting):
        def prepare_weight(self, weight: Tensor) -> Tensor:
            prepared.append(weight * 2)
            return prepared[-1]

    kernels, model = Preparing(), nn.Module()
    group = CommGroup("data", (0,), 0)
    model.weight = make_parameter((5, 3), [], data=group, dtype=torch.float32, device=torch.device("cpu"), fill=1.0)
    with torch.no_grad():
        model.weight.normal_()
    stage, layer, x = (
        flatten_parameters(model, ZeroConfig(shard_grads=True, cache_prepared_weights=True)),
        ParallelLinearFunction(kernels),
        torch.randn(4, 3),
    )
    for step in (1, 2):
        stage.begin_step()
        for micro in (False, True):
            given = x.clone().requires_grad_()
            with stage.backward_context(last=micro):
                y = checkpoint(layer, given, model.weight, use_reentrant=False)
                assert torch.equal(y, x @ (2 * model.weight).t())
                y.sum().backward()
            assert torch.equal(given.grad, torch.ones(4, 5) @ (2 * model.weight))
        assert len(prepared) == step
        with torch.no_grad():
            model.weight.mul_(3)
        stage.all_gather_params()


KERNELS, CPU = TorchKernels(), torch.device("cpu")


def parameters(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(4)
    return [nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in shapes]


def halves(
    y: Tensor, dy: Tensor, inputs: Sequence[Tensor], weights: Sequence[Tensor], later: DeferredWgradQueue
) -> list[Tensor]:
    """A backward in two halves; the gradients of the inputs."""
    gradients = torch.autograd.grad([y], [*inputs, *weights], [dy], allow_unused=True)
    del y
    rest = zip(weights, gradients[len(inputs) :], strict=True)
    run_deferred_wgrads(
        later.take_all_wgrads(), [(weight, gradient) for weight, gradient in rest if gradient is not None]
    )
    return list(gradients[: len(inputs)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_has_the_bits_of_the_one_that_puts_nothing_off(dtype: torch.dtype, bias: bool) -> None:
    (weight, offset), x = parameters((7, 5), (7,), dtype=dtype), torch.randn(2, 3, 5).to(dtype).requires_grad_()
    later, dy = DeferredWgradQueue(), torch.randn(3, 2, 7).to(dtype).transpose(0, 1)
    used = [weight, offset] if bias else [weight]
    y = F.linear(x, weight, offset if bias else None)
    whole = torch.autograd.grad([y], [x, *used], [dy])
    z = ParallelLinearFunction(KERNELS, later)(x, weight, offset if bias else None)
    (dx,) = halves(z, dy, [x], used, later)
    assert torch.equal(z, y)
    for mine, reference in zip([dx, *(p.grad for p in used)], whole, strict=True):
        assert mine is not None
        assert torch.equal(mine, reference)


def network(linear: ParallelLinearFunction, a: Tensor, b: Tensor, scale: Tensor) -> Callable[[Tensor], Tensor]:
    """The first weight is used twice, the second is made of it."""
    return lambda x: linear(torch.tanh(linear(x * scale, a)), torch.cat([a, b]))


@pytest.mark.parametrize("recompute", [False, True])
def test_each_parameter_gets_its_gradient_once_whole(recompute: bool) -> None:
    (a, b, scale), later = parameters((5, 5), (2, 5), (5,), dtype=torch.float64), DeferredWgradQueue()
    x, dy = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True), torch.randn(2, 3, 7, dtype=torch.float64)
    whole = torch.autograd.grad([network(ParallelLinearFunction(KERNELS), a, b, scale)(x)], [x, a, b, scale], [dy])
    arrived: list[Tensor] = []
    for parameter in (a, b, scale):
        parameter.register_post_accumulate_grad_hook(arrived.append)
    apart = network(ParallelLinearFunction(KERNELS, later), a, b, scale)
    y = checkpoint(apart, x, use_reentrant=False, preserve_rng_state=False) if recompute else apart(x)
    assert isinstance(y, Tensor)
    (dx,) = halves(y, dy, [x], [a, b, scale], later)
    assert len(arrived) == 3
    assert {id(parameter) for parameter in arrived} == {id(a), id(b), id(scale)}
    for mine, reference in zip([dx, a.grad, b.grad, scale.grad], whole, strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, reference, rtol=1e-14, atol=1e-14)


def test_the_last_layers_gradient_arrives_first_and_frees_what_it_was_made_from() -> None:
    first, second = parameters((5, 5), (5, 5))
    later, order = DeferredWgradQueue(), list[str]()
    linear = ParallelLinearFunction(KERNELS, later)
    middle = torch.tanh(linear(torch.randn(3, 5), first))
    kept, y = weakref.ref(middle), linear(middle, second)
    del middle
    second.register_post_accumulate_grad_hook(lambda _: order.append("second"))
    first.register_post_accumulate_grad_hook(lambda _: order.append("first" if kept() is None else "kept"))
    torch.autograd.grad([y], [first, second], [torch.ones(3, 5)], allow_unused=True)
    del y
    assert kept() is not None  # the second layer's input
    run_deferred_wgrads(later.take_all_wgrads(), [])
    assert order == ["second", "first"]


def test_nothing_but_inputs_and_gradients_of_products_is_kept() -> None:
    (weight,), later = parameters((5, 5)), DeferredWgradQueue()
    hidden = ParallelLinearFunction(KERNELS, later)(torch.randn(3, 5), weight).exp()
    gone, y = weakref.ref(hidden), hidden.sum()
    del hidden
    torch.autograd.grad([y], [weight], allow_unused=True)
    del y
    assert gone() is None
    assert len(later.take_all_wgrads()) == 1
    assert not later.take_all_wgrads()


def test_sums_over_the_ranks_start_while_other_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, later, events = nn.Module(), DeferredWgradQueue(), list[str]()
    for name in ("first", "second"):
        parameter = make_parameter(
            (2, 2), [TensorPiece.whole_tensor(name, (2, 2))], data=CommGroup("dp"), dtype=torch.float32, device=CPU
        )
        model.register_parameter(name, parameter)
    stage = flatten_parameters(model, ZeroConfig(shard_grads=False, bucket_elements=1))
    reduce = StepGradientBucket.start_reduce
    monkeypatch.setattr(StepGradientBucket, "start_reduce", lambda bucket: (events.append("sum"), reduce(bucket)))

    def computed(name: str) -> Tensor:
        events.append(name)
        return torch.ones(2, 2)

    stage.begin_step()
    for name in ("second", "first"):
        later.defer_wgrad(model.get_parameter(name), partial(computed, name))
    with stage.backward_context(last=True):
        run_deferred_wgrads(later.take_all_wgrads(), [])
    assert events == ["second", "sum", "first", "sum"]
