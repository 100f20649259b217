"""Compilation of leaf functions: elementwise or row-wise computations, each of which torch.compile makes one kernel.

A leaf is a plain function of tensors, numbers and names, without autograd: the `Function` that calls it has a leaf for its
forward and one for its backward. So a compiler never sees a collective, a cache or a wait for the device, and leaves compile
under any layout, with experts and with recomputation alike.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from mega_common.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


class LeafCompiler:
    """Caller of leaf functions: eager or, with `compiled`, by torch.compile, once for each.

    A second number of rows compiles a leaf again, for any number; results of both ways differ by rounding alone.
    """

    def __init__(self, *, compiled: bool = False) -> None:
        self.compiled = compiled
        self._made: dict[Callable[..., object], Callable[..., Any]] = {}

    def __call__(self, leaf: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `leaf` and return its result; not differentiable."""
        if not self.compiled:
            return leaf(*args, **kwargs)
        if leaf not in self._made:
            self._made[leaf] = torch.compile(leaf)
        # a leaf must not be compiled again for an argument that happens to want a gradient, or to be a parameter
        plain = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
        made: R = self._made[leaf](*plain, **kwargs)
        return made


def apply_function(function: type[Function], *args: Any) -> Any:
    """Call `function.apply`; without gradients only its forward, which takes half of the host's time or less."""
    if torch.is_grad_enabled():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    return function.forward(_NoContext(), *args)


class _NoContext:
    """Context of a `Function` without a backward; keeps nothing."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Ignore the tensors."""

    def set_materialize_grads(self, value: bool) -> None:
        """Ignore the setting."""


def should_compile(setting: bool | Literal["auto"], device: torch.device) -> bool:
    """Return whether a run on `device` compiles its leaves; `auto` does on a GPU, where it can.

    Raises:
        ConfigError: when it is to and cannot.
    """
    if setting is False or (setting == "auto" and device.type == "cpu"):
        return False
    problem = _compiler_problem(device)
    if problem is not None and setting is True:
        raise ConfigError(f"compile = true: {problem}", hint="install it, or set compile=false")
    return problem is None


def _compiler_problem(device: torch.device) -> str | None:
    """Return the reason that torch.compile cannot generate code for the device, else None."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler  # here: it takes a second
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "there is no C++ compiler here (g++ or clang++), which code for a CPU wants"
        return None
    from torch.utils._triton import has_triton

    if not has_triton():
        return "triton, which code for a GPU wants, is not installed or does not know this one"
    return None if any(map(shutil.which, ("cc", "gcc", "clang"))) else "there is no C compiler here, which triton wants"
