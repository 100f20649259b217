"""Leaf functions are called as written or compiled, and who cannot compile is told so."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from mega_common.errors import ConfigError
from mega_trainer.kernels.leaf_compiler import FusibleFunctionCompiler, should_compile

CPU = torch.device("cpu")


def test_a_leaf_is_compiled_only_where_it_is_asked_for() -> None:
    def seen(x: Tensor) -> bool:
        return torch.compiler.is_compiling()

    assert not FusibleFunctionCompiler()(seen, torch.ones(2))
    assert FusibleFunctionCompiler(compiled=True)(seen, torch.ones(2))


def test_auto_compiles_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not should_compile("auto", CPU)
    assert not should_compile(False, CPU)
    assert should_compile(True, CPU)


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(ConfigError, match=r"compile = true requires a C\+\+ compiler"):
        should_compile(True, CPU)


def test_variants_of_a_leaf_are_compiled_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch alone makes eight compilations of a function, whoever calls it, and runs it uncompiled from then on."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))

    def seen(x: Tensor, rows: int, name: str) -> tuple[bool, Tensor, str]:
        return torch.compiler.is_compiling(), x + rows, name + "!"

    leaves = FusibleFunctionCompiler(compiled=True)
    calls = [
        (torch.ones(size, 4, dtype=dtype), rows, name)
        for dtype in (torch.float32, torch.bfloat16) for rows in (0, 128) for name in "abcde" for size in (2, 3)
    ]  # fmt: skip
    assert all(leaves(seen, *call)[0] for call in calls)
    assert all(leaves(seen, x.mT, rows, name)[0] for x, rows, name in calls)
