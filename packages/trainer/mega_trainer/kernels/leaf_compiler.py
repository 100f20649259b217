"""Compilation of fusible functions: elementwise or row-wise computations that torch.compile turns into one kernel each.

A leaf is a plain function of tensors, numbers and strings, without autograd: the `Function` that calls it has a leaf for its
forward and one for its backward. So compiled code contains no collective, cache or device synchronisation, and leaves
compile under any layout, with experts and with recomputation.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Hashable
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

from mega_common.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
MOST_SHAPES = 32  # compilations of one variant; sizes that change become dynamic, so that far fewer are made


class FusibleFunctionCompiler:
    """Caller of fusible (elementwise or row-wise) functions, eagerly or, if `compiled`, by torch.compile.

    A function is compiled once for each variant of its arguments, and again for dynamic shapes at the second number of rows.
    Compiled and eager results differ only by rounding.
    """

    def __init__(self, *, compiled: bool = False) -> None:
        self.compiled = compiled
        self._compiled_leaves: dict[tuple[object, ...], Callable[..., Any]] = {}

    def __call__(self, leaf: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `leaf` and return its result; not differentiable."""
        if not self.compiled:
            return leaf(*args, **kwargs)
        variant = (leaf, *map(_argument_variant, args), *map(_argument_variant, kwargs.values()))
        if variant not in self._compiled_leaves:
            self._compiled_leaves[variant] = compile_with_own_cache(leaf)
        # detached, so that arguments that require a gradient, or are parameters, do not cause recompilation
        plain = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
        result: R = self._compiled_leaves[variant](*plain, **kwargs)
        return result


def compile_with_own_cache(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function compiled by torch.compile, with its own cache of at most `MOST_SHAPES` compilations.

    By default torch keeps eight compilations of a function for all its callers, and beyond them runs it uncompiled for the
    rest of the process, with only a warning.
    """
    # torch's type stub does not have these two arguments
    compile_isolated: Callable[..., Callable[P, R]] = torch.compile
    return compile_isolated(function, isolate_recompiles=True, recompile_limit=MOST_SHAPES)


def _argument_variant(arg: object) -> Hashable:
    """Return the properties of an argument that generated code depends on, other than the sizes of tensors."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.dim(), arg.is_contiguous()
    return arg if isinstance(arg, Hashable) else repr(arg)


def apply_autograd_function(function: type[Function], *args: Any) -> Any:
    """Call `function.apply` of an autograd function with less host time, or under `no_grad` only its `forward`.
    torch's check for transforms such as vmap, which takes a third of the call, is left out. The forward alone takes at
    most half of the host time.
    """
    if torch.is_grad_enabled():
        return super(Function, function).apply(*args)  # type: ignore[misc]
    return function.forward(_NoContext(), *args)


class _NoContext:
    """Context of a `Function` without a backward; keeps nothing."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Ignore the tensors."""

    def set_materialize_grads(self, value: bool) -> None:
        """Ignore the setting."""


def should_compile(setting: bool | Literal["auto"], device: torch.device) -> bool:
    """Return whether a run compiles fusible functions: `auto` on a GPU with a working compiler; true without one raises.

    Raises:
        ConfigError: when `setting` is true and the compiler does not work.
    """
    if setting is False or (setting == "auto" and device.type == "cpu"):
        return False
    problem = find_compiler_problem(device)
    if problem is not None and setting is True:
        raise ConfigError(f"compile = true requires {problem}", hint="install it, or set compile=false")
    return problem is None


def find_compiler_problem(device: torch.device) -> str | None:
    """Return the requirement of torch.compile that is missing to generate code for the device, else None."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler  # a local import, since it takes a second
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "a C++ compiler (g++ or clang++), and none is found"
        return None
    from torch.utils._triton import has_triton

    if not has_triton():
        return "triton, which is not installed or does not support this GPU"
    return None if any(map(shutil.which, ("cc", "gcc", "clang"))) else "a C compiler for triton, and none is found"
