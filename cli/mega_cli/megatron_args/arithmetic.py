"""Integer arithmetic of `$(( ))`, and patterns of layers."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),  # bash rounds towards zero
    ast.Mod: lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1),
}


def calculate(expression: str) -> int | None:
    """The value of an expression of integers with + - * / % and brackets; None for anything else."""
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def layer_pattern(text: str) -> int | list[int] | None:
    """A pattern of layers: every n-th, or a list such as `[0]*3+[1]*58`; None for anything else."""
    try:
        return _items(ast.parse(text.strip(), mode="eval").body) if "[" in text else int(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _items(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _items(left) + _items(right)
        case ast.BinOp(left=ast.Constant() as count, op=ast.Mult(), right=items):
            return _value(count) * _items(items)
        case ast.BinOp(left=items, op=ast.Mult(), right=count):
            return _items(items) * _value(count)
    raise ValueError("not a list of integers")


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](_value(left), _value(right))
    raise ValueError("not an integer expression")
