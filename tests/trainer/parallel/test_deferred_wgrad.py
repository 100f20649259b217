"""Weight gradients that are put off are, bit for bit, those that are not, and arrive as those do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mega_ckpt.tensor_pieces import TensorPiece
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.torch_kernels import TorchKernels
from mega_trainer.parallel.deferred_wgrad import DeferredWgradQueue, run_deferred_wgrads
from mega_trainer.parallel.gradient_buckets import StepGradientBucket
from mega_trainer.parallel.parallel_linear import ParallelLinearFunction
from mega_trainer.parallel.parameter_info import make_parameter
from mega_trainer.parallel.zero_buffers import ZeroConfig, flatten_parameters

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
