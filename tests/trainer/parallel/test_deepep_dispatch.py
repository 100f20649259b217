"""DeepEP's dispatcher: our calls against its published source, and what we make of its answers, over a stand-in on gloo."""

from __future__ import annotations

import ast
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor
from trainer.kernels.published import ARCHIVES, Library

from mega_common.errors import ConfigError
from mega_trainer.distributed.comm import CommGroup, all_gather
from mega_trainer.kernels.grouped_gemm import GroupedRows
from mega_trainer.parallel import deepep_dispatch
from mega_trainer.parallel.deepep_dispatch import DeepEpDispatcher
from mega_trainer.parallel.expert_parallel import run_through_experts

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
    assert check(SOURCE) == 5


@pytest.mark.parametrize(
    "wrong",
    [("do_cpu_sync=", "cpu_sync="), ("hidden=width", "width=width"), ("buffer.combine(y, trip.handle)", "buffer.combine(y)"),
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
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("state.handle", "ctx.state.handle")
    }  # fmt: skip
    assert read == {"num_recv_tokens_per_expert_list", "psum_num_recv_tokens_per_scaleup_rank", "num_sms"}
    assert read <= {arg.arg for arg in init.args.args}


class StandIn:
    """An ElasticBuffer by gathers: what comes is every token that has an expert here, in the order of ranks."""

    def __init__(self, group: CommGroup) -> None:
        self.group = group

    def dispatch(
        self, x: Tensor, topk_idx: Any = None, topk_weights: Any = None, handle: Any = None, **how: Any
    ) -> Any:
        everyone = all_gather(x, self.group)
        if handle is not None:
            rows = x.new_full((handle.length, x.shape[1]), torch.nan)
            rows[: len(handle.mine)] = everyone[handle.mine]
            return rows, None, None, handle, None
        own = how["num_experts"] // self.group.size
        chosen = all_gather(topk_idx, self.group) - self.group.rank * own
        chosen = chosen.masked_fill((chosen < 0) | (chosen >= own), -1)
        mine = (chosen >= 0).any(-1).nonzero().flatten()
        length = len(mine) if how["do_cpu_sync"] else len(everyone)
        handle = SimpleNamespace(
            mine=mine, length=length, num_sms=1, psum_num_recv_tokens_per_scaleup_rank=torch.tensor([0, len(mine)]),
            num_recv_tokens_per_expert_list=[int((chosen == i).sum()) for i in range(own)] if how["do_cpu_sync"] else [],
        )  # fmt: skip
        tables = [everyone, chosen, all_gather(topk_weights, self.group)]
        rows, theirs, came = (torch.cat([t[mine], t[: length - len(mine)] * 0 + 7]) for t in tables)  # anything behind
        return rows, theirs, came, handle, SimpleNamespace(current_stream_wait=lambda: None)

    def combine(self, x: Tensor, handle: Any, topk_weights: Any = None) -> Any:
        def summed(values: Tensor) -> Tensor:
            whole = values.new_zeros(self.group.size * 4, values.shape[1])
            whole[handle.mine] = values[: len(handle.mine)]
            dist.all_reduce(whole)
            return whole.chunk(self.group.size)[self.group.rank]

        return summed(x), None if topk_weights is None else summed(topk_weights), None


def dispatched(bound: float | None) -> tuple[float, float, float]:
    """Errors of the output and of the gradients of tokens and weights, of experts that multiply by 2^e."""
    group = CommGroup("ep", (0, 1), dist.get_rank(), dist.group.WORLD)
    g = torch.Generator().manual_seed(group.rank)
    x, dy = (torch.randn(4, D, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.rand(4, 3, generator=g, dtype=torch.float64, requires_grad=True)
    chosen = torch.rand(4, E, generator=g).topk(3).indices
    dispatcher = DeepEpDispatcher(E, group, bound, _buffers={(4, D, 3): StandIn(group)})  # type: ignore[dict-item]

    def experts(rows: Tensor, weights: Tensor, by: GroupedRows) -> Tensor:
        return rows * (2.0 ** (group.rank * E // 2 + by.group_of_rows(len(rows)).double()) * weights).unsqueeze(-1)

    y, lost = run_through_experts(dispatcher.dispatch_tokens(x, chosen, weights), experts)
    y.backward(dy.detach())
    both = 2.0 ** chosen.double()
    factor = (both * weights).sum(-1, keepdim=True).detach()
    wanted = (factor * x, factor * dy, both * (x * dy).sum(-1, keepdim=True))
    assert lost == 0
    errors = [(a - b).abs().max().item() for a, b in zip((y, x.grad, weights.grad), wanted, strict=True)]
    return errors[0], errors[1], errors[2]


@pytest.mark.parametrize("bound", [None, 2.0])
def test_tokens_meet_their_experts(bound: float | None) -> None:
    assert all(max(errors) < 1e-12 for errors in run_ranks(dispatched, 2, bound))


def test_where_it_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.dispatch = deepep"):
        DeepEpDispatcher(E, CommGroup("ep", (0, 1))).dispatch_tokens(
            torch.zeros(4, D), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)
        )
