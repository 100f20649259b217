"""CUDA graphs of layers: which there are, and what they compute, by a stand-in for capture and replay on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from parity.cases import case
from ranks import run_ranks
from torch import Tensor, nn
from torch.autograd import Function

from mega_common.errors import ConfigError
from mega_trainer.config.cuda_graph_rules import list_graphed_layers
from mega_trainer.model import layer_graphs
from mega_trainer.run import build_components
from mega_trainer.verify.case_comparison import compute_largest_tensor_error
from mega_trainer.verify.case_trainer import CaseOutcome, CaseTrainer, get_rank_and_world, make_case_process_groups
from mega_trainer.verify.layout_case import LayoutCase

GRAPHS = {"cuda_graphs": "auto"}


class _Replay(Function):
    """A graph's launch: on its own input, with the main gradients that it was captured with."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: Twin, *parameters: Tensor) -> Tensor:
        ctx.graph, ctx.parameters = graph, parameters
        graph.replays += 1
        return graph.run_forward(x)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        dx, *grads = torch.autograd.grad(
            ctx.graph.y, [ctx.graph.x, *ctx.parameters], dys, allow_unused=True, retain_graph=True
        )
        return dx, None, *grads


class Twin:
    """One of `torch.cuda.make_graphed_callables`: runs the function again, and has no other way in than its input."""

    def __init__(self, function: nn.Module, sample: Tensor) -> None:
        self.function, self.x, self.replays = function, sample, 0
        self.writers = {p: p.main_grad for p in function.parameters() if hasattr(p, "main_grad")}
        self.y = sample
        for _ in range(2):  # as the runs before a capture, which leave something in the main gradients
            self.run_forward(sample.detach().clone())
            torch.autograd.grad(self.y, [self.x, *function.parameters()], torch.ones_like(self.y), allow_unused=True)

    def run_forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.x.copy_(x)
        before = {parameter: parameter.main_grad for parameter in self.writers}
        for parameter, writer in self.writers.items():
            parameter.main_grad = writer
        with torch.enable_grad():
            self.y = self.function(self.x)
        for parameter, asks in before.items():
            parameter.main_grad = asks
        return self.y.detach()

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = _Replay.apply(x, self, *self.function.parameters())  # type: ignore[no-untyped-call]
        return y


@contextmanager
def twins() -> Iterator[list[Twin]]:
    """Let the stand-in capture, and a CPU be as good as a GPU."""
    made: list[Twin] = []

    def capture(calls: Sequence[nn.Module], samples: Any, *, allow_unused_input: bool) -> Sequence[Callable[..., Any]]:
        assert allow_unused_input
        made.extend(Twin(call, sample) for call, (sample,) in zip(calls, samples, strict=True))
        return made

    with (
        mock.patch.object(torch.cuda, "make_graphed_callables", capture),
        mock.patch.object(
            build_components, "choose_graphed_layers", lambda config, device: list_graphed_layers(config)
        ),
    ):
        yield made


def both(one: LayoutCase) -> tuple[list[float], int]:
    """The errors of weights, losses and norms against the same without graphs; replays."""
    (rank, _), groups = get_rank_and_world(), make_case_process_groups([one])
    plain = CaseTrainer.build(one, rank, groups).run(one.steps)
    with twins() as made:
        graphed: CaseOutcome = CaseTrainer.build(replace(one, sections=GRAPHS), rank, groups).run(one.steps)
    numbers = zip(graphed.losses + graphed.norms, plain.losses + plain.norms, strict=True)
    weights = compute_largest_tensor_error(*(outcome.tensors_by_kind()["weights"] for outcome in (graphed, plain)))
    return [weights, *(abs(a - b) for a, b in numbers)], sum(twin.replays for twin in made)


@pytest.mark.parametrize(
    ("name", "layers", "graphs"), [("dense", 2, 2), ("gqa", 2, 2), ("moe", 3, 1)], ids=["dense", "window", "experts"]
)
def test_graphs_compute_what_layers_compute_bit_for_bit(name: str, layers: int, graphs: int) -> None:
    """With two micro-batches a step, on two data ranks with ZeRO-1; experts are no graphs."""
    one = case(name, 2, layers=layers, micro=2, parallel={"zero": 1}, precision="fp32", closed=False)
    for errors, replays in run_ranks(both, 2, one):
        assert max(errors) == 0
        assert replays == graphs * 2 * one.steps


def test_micro_batches_with_documents_run_the_layers() -> None:
    one = case("dense", 1, micro=4, precision="fp32", steps=1)
    assert run_ranks(both, 1, one)[0][1] == 0


def test_a_capture_within_a_step_is_put_off() -> None:
    """Main gradients that a step has already are not to be lost."""
    parameter = nn.Parameter(torch.ones(2))
    view = torch.ones(2)
    parameter.main_grad = lambda: (view, True)  # type: ignore[attr-defined]
    assert layer_graphs._take_main_grads([parameter]) == ({parameter: view}, [])


@pytest.mark.parametrize(
    ("found", "needs"),
    [
        ({"parallel": {"pp": 2}}, "requires parallel.pp = 1, tp = 1 and cp = 1"),
        ({"parallel": {"zero": 2}}, "requires parallel.zero < 2"),
        ({"recompute": {"kind": "selective"}}, "requires recompute.kind = none"),
        ({"offload": {"activations": 1}}, "requires offload.activations = 0"),
        ({"precision": "fp64"}, "requires precision = bf16, fp16 or fp32"),
        ({"data": {"reset_attention_mask": True}}, "requires data.reset_attention_mask = false"),
        ({"model": {"residual_dropout": 0.1}}, "requires a model without dropout"),
        ({"model": {"position": "alibi"}}, "requires layers that share rotary angles alone"),
        ({"model": {"hyper_connections": {"streams": 2}}}, "requires a residual stream of one width"),
    ],
)
def test_what_rules_graphs_out_is_named(found: dict[str, Any], needs: str) -> None:
    one = case("dense", 2, precision="bf16", micro=2)
    sections = {"cuda_graphs": "layers", **found}
    with pytest.raises(ConfigError) as error:
        _ = replace(one, sections=sections).config
    assert f"cuda_graphs = 'layers': {needs}" in str(error.value)


def test_graphs_on_a_cpu_are_refused_or_left_out(caplog: pytest.LogCaptureFixture) -> None:
    plain = case("dense", 1, precision="bf16")
    cpu = torch.device("cpu")
    with pytest.raises(ConfigError, match="cuda_graphs = layers requires a GPU, found cpu"):
        build_components.choose_graphed_layers(replace(plain, sections={"cuda_graphs": "layers"}).config, cpu)
    with caplog.at_level("INFO"):
        assert build_components.choose_graphed_layers(replace(plain, sections=GRAPHS).config, cpu) == []
    assert "CUDA graphs: off: requires a GPU" in caplog.text
