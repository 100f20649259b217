"""DeepEP's dispatcher: our calls against its published source, and what we make of its answers, over a stand-in on gloo."""

from __future__ import annotations

import ast
import threading
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any
from unittest import mock

import deepep_twin as deepep_twin_module
import pytest
import torch
import torch.distributed as dist
from deepep_twin import deepep_twin
from ranks import run_ranks
from torch import Tensor
from trainer.kernels.published import ARCHIVES, Library

from mega_common.errors import ConfigError
from mega_trainer.distributed.comm import CommGroup
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.parallel import deepep_dispatch
from mega_trainer.parallel.deepep_dispatch import DeepEpDispatcher
from mega_trainer.parallel.expert_parallel import run_through_experts
from mega_trainer.parallel.pass_interleaver import PassInterleaver

SOURCE = Path(deepep_dispatch.__file__).read_text()
E, D = 8, 3


def methods() -> dict[str, Signature]:
    """Of the published ElasticBuffer."""
    found = sorted(ARCHIVES.glob("sgl_deep_ep-*.whl"))
    assert len(found) == 1, f"{ARCHIVES}: `make setup` downloads it"
    tree = ast.parse(Library(found[0]).files["deep_ep/buffers/elastic.py"])
    (buffer,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "ElasticBuffer")
    return {node.name: signature(node) for node in buffer.body if isinstance(node, ast.FunctionDef)}


def signature(function: ast.FunctionDef) -> Signature:
    names = [arg.arg for arg in function.args.args[1:]]
    required = len(names) - len(function.args.defaults)
    kind = Parameter.POSITIONAL_OR_KEYWORD
    return Signature([
        Parameter(name, kind) if i < required else Parameter(name, kind, default=None) for i, name in enumerate(names)
    ])  # fmt: skip


def calls(source: str) -> list[tuple[str, ast.Call]]:
    """Of the buffer's methods, and of its constructor."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "ElasticBuffer" or name.startswith("buffer."):
                found.append(("__init__" if name == "ElasticBuffer" else name.removeprefix("buffer."), node))
    return found


def check(source: str) -> int:
    published, found = methods(), calls(source)
    for name, call in found:
        published[name].bind(*call.args, **{str(keyword.arg): None for keyword in call.keywords})
    return len(found)


def test_the_library_takes_what_we_give() -> None:
    assert check(SOURCE) == 4


@pytest.mark.parametrize(
    "wrong",
    [("do_cpu_sync=", "cpu_sync="), ("hidden=width", "width=width"), ("buffer.combine(y, self.handle, topk_weights=weights, ", "buffer.combine(y, "),
     ("buffer.combine(", "buffer.combined(")],
)  # fmt: skip
def test_a_wrong_call_is_seen(wrong: tuple[str, str]) -> None:
    assert wrong[0] in SOURCE
    with pytest.raises((TypeError, KeyError)):
        check(SOURCE.replace(*wrong))


def test_attributes_of_its_handle_are_there() -> None:
    (found,) = ARCHIVES.glob("sgl_deep_ep-*.whl")
    tree = ast.parse(Library(found).files["deep_ep/buffers/elastic.py"])
    (handle,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EPHandle")
    (init,) = (node for node in handle.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    read = {
        node.attr for node in ast.walk(ast.parse(SOURCE))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("state.handle", "self.handle")
    }  # fmt: skip
    assert read == {"num_recv_tokens_per_expert_list", "psum_num_recv_tokens_per_scaleup_rank", "num_sms"}
    assert read <= {arg.arg for arg in init.args.args}


def experts(group: CommGroup, rows: Tensor, weights: Tensor, by: GroupedRows) -> Tensor:
    """Experts that multiply by 2^e."""
    return rows * (2.0 ** (group.rank * E // 2 + by.group_of_rows(len(rows)).double()) * weights).unsqueeze(-1)


def dispatched(bound: float | None, deterministic: object) -> tuple[float, float, float]:
    """Errors of the output and of the gradients of tokens and weights."""
    group = CommGroup("ep", (0, 1), dist.get_rank(), dist.group.WORLD)
    g = torch.Generator().manual_seed(group.rank)
    x, dy = (torch.randn(4, D, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.rand(4, 3, generator=g, dtype=torch.float64, requires_grad=True)
    chosen = torch.rand(4, E, generator=g).topk(3).indices
    with deepep_twin():
        dispatcher = DeepEpDispatcher(E, group, bound, bool(deterministic))
        y, lost = run_through_experts(dispatcher.dispatch_tokens(x, chosen, weights), partial(experts, group))
        y.backward(dy.detach())
    both = 2.0 ** chosen.double()
    factor = (both * weights).sum(-1, keepdim=True).detach()
    wanted = (factor * x, factor * dy, both * (x * dy).sum(-1, keepdim=True))
    assert lost == 0
    errors = [(a - b).abs().max().item() for a, b in zip((y, x.grad, weights.grad), wanted, strict=True)]
    return errors[0], errors[1], errors[2]


@pytest.mark.parametrize(("bound", "deterministic"), [(None, True), (2.0, True), (None, False)])
def test_tokens_meet_their_experts(bound: float | None, deterministic: object) -> None:
    """Also where rows are sorted after they came, with gradients in that order."""
    assert all(max(errors) < 1e-12 for errors in run_ranks(dispatched, 2, bound, deterministic))


def beside() -> tuple[list[str], bool]:
    """The exchanges of a forward beside a backward, by pass; and whether both computed what they compute alone."""
    group, interleaver = CommGroup("ep", (0, 1), dist.get_rank(), dist.group.WORLD), PassInterleaver()
    g = torch.Generator().manual_seed(group.rank)
    xs = [torch.randn(4, D, generator=g, dtype=torch.float64).requires_grad_() for _ in range(2)]
    chosen, started = torch.rand(4, E, generator=g).topk(2).indices, list[str]()
    dispatcher = DeepEpDispatcher(E, group, interleaver=interleaver)

    def forward(x: Tensor) -> Tensor:
        dispatch = dispatcher.dispatch_tokens(x, chosen, torch.full((4, 2), 0.5, dtype=torch.float64))
        return run_through_experts(dispatch, partial(experts, group))[0].square()

    def recorded(name: str) -> Any:
        real = getattr(deepep_twin_module.ElasticBuffer, name)

        def call(*args: Any, **options: Any) -> Any:
            own = "f" if threading.current_thread() is threading.main_thread() else "b"
            started.append(f"{own} {name}")
            return real(*args, **options)

        return mock.patch.object(deepep_twin_module.ElasticBuffer, name, call)

    with deepep_twin():
        ys = [forward(x) for x in xs]
        alone = [torch.autograd.grad(y.sum(), x)[0] for x, y in zip(xs, ys, strict=True)]
        waiting = forward(xs[1])
        with recorded("dispatch"), recorded("combine"):
            y = interleaver.run_pair(lambda: forward(xs[0]), lambda: waiting.sum().backward())
        gradients = [torch.autograd.grad(y.sum(), xs[0])[0], xs[1].grad]
    same = [torch.equal(*both) for both in [(y, ys[0]), *zip(gradients, alone, strict=True)]]
    return started, all(same)


def test_exchanges_of_two_passes_alternate() -> None:
    for started, same in run_ranks(beside, 2):
        assert same
        assert started == ["f dispatch", "b dispatch", "f combine", "b combine"]


def test_where_it_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.dispatch = deepep"):
        DeepEpDispatcher(E, CommGroup("ep", (0, 1))).dispatch_tokens(
            torch.zeros(4, D), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)
        )
