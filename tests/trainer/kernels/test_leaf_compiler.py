"""Leaf functions are called as written or compiled, and who cannot compile is told so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor import cpp_builder
from torch._inductor.exc import InvalidCxxCompiler

from mega_common.errors import ConfigError
from mega_trainer.kernels.leaf_compiler import LeafCompiler, should_compile

CPU = torch.device("cpu")


def test_a_leaf_is_compiled_only_where_it_is_asked_for() -> None:
    def seen(x: Tensor) -> bool:
        return torch.compiler.is_compiling()

    assert not LeafCompiler()(seen, torch.ones(2))
    assert LeafCompiler(compiled=True)(seen, torch.ones(2))


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
