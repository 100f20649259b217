"""Output of commands that calculate: `expr`, `bc`, `seq`, and the expressions of `awk`."""

from __future__ import annotations

import ast
import getopt
import math
import operator
import re
from collections.abc import Callable, Sequence
from decimal import ROUND_DOWN, Decimal, localcontext

Number = Decimal | float
LONGEST_SEQUENCE = 10_000  # numbers of a `seq`
LONGEST_SEPARATOR = 100  # characters
LONGEST_EXPRESSION = 300  # characters
LARGEST_EXPONENT = 100
LIBRARY_SCALE = 20  # digits after the point with `bc -l`
PRECISION = 200  # digits of an intermediate result
LINE = 60  # digits that `bc` prints on one line


def simulate_expr_command(arguments: Sequence[str], _: str | None) -> str | None:
    """Return the output of the shell command `expr` for whole numbers, or None for other arguments."""
    text = " ".join(arguments)
    if any(not re.fullmatch(r"[-+*/%()]|-?\d+", argument) for argument in arguments):
        return None
    return f"{_evaluate_expression(text, _Decimals(0))}\n"


def simulate_bc_command(arguments: Sequence[str], entered: str | None) -> str | None:
    """Return the output of the shell command `bc` for numeric expressions in `entered`, or None for other input.
    Assignments of `scale` are supported.
    """
    if entered is None or any(argument not in ("-l", "-q", "-lq", "-ql") for argument in arguments):
        return None
    scale, printed = (LIBRARY_SCALE if any("l" in argument for argument in arguments) else 0), ""
    for statement in filter(str.strip, re.split("[;\n]", entered)):
        if assigned := re.fullmatch(r"\s*scale\s*=\s*(\d\d?)\s*", statement):
            scale = int(assigned[1])
        else:
            printed += _format_as_bc(_evaluate_expression(statement, _Decimals(scale))) + "\n"
    return printed


def _format_as_bc(value: Number) -> str:
    """Format a number as bc prints it: with all its digits, and without a zero before the point."""
    text = re.sub(r"^(-?)0\.", r"\1.", f"{value:f}")
    if len(text) > LINE:
        raise ValueError("bc breaks long lines")
    return "0" if not value else text


def simulate_seq_command(arguments: Sequence[str], _: str | None) -> str | None:
    """Return the output that the shell command `seq` would have for whole numbers, or None for other arguments."""
    if not arguments or re.match(r"-\d", arguments[0]):
        options, words = list[tuple[str, str]](), list(arguments)
    else:
        options, words = getopt.getopt(list(arguments), "s:w", ["separator=", "equal-width"])
    if any(not re.fullmatch(r"-?(0|[1-9]\d*)", word) for word in words) or len(words) > 3:
        return None
    numbers = list(map(int, words))
    first, step = (numbers[0] if len(numbers) > 1 else 1), (numbers[1] if len(numbers) > 2 else 1)
    found = range(first, numbers[-1] + (1 if step > 0 else -1), step)
    separator = next((value for name, value in options if name in ("-s", "--separator")), "\n")
    padded = any(name in ("-w", "--equal-width") for name, _ in options)
    if len(found) > LONGEST_SEQUENCE or len(separator) > LONGEST_SEPARATOR or "\\" in separator:
        return None
    if padded and min(first, numbers[-1]) < 0:
        return None
    width = max(len(str(first)), len(words[-1])) if padded else 0
    return separator.join(f"{number:0{width}d}" if padded else str(number) for number in found) + "\n" if found else ""


def evaluate_awk_expression(expression: str) -> str:
    """Return the value of a numeric expression, formatted as `print` of awk does.

    Raises:
        ValueError: if it is not a numeric expression.
    """
    value = float(_evaluate_expression(expression, _Floats()))
    if not math.isfinite(value) or abs(value) >= 2**31:  # awk implementations differ above it
        raise ValueError("the number is too large")
    return str(int(value)) if value.is_integer() else f"{value:.6g}"


class _Decimals:
    """Arithmetic of bc, whose division keeps `scale` digits after the point."""

    def __init__(self, scale: int) -> None:
        self._scale = scale

    def parse_number(self, text: str) -> Number:
        return Decimal(text)

    def apply_operator(self, operation: type[ast.operator], left: Number, right: Number) -> Number:
        left, right = Decimal(left), Decimal(right)
        digits = max(_digits(left), _digits(right))
        if operation in (ast.Add, ast.Sub):
            return _truncate((operator.add if operation is ast.Add else operator.sub)(left, right), digits)
        if operation is ast.Mult:
            return _truncate(left * right, min(_digits(left) + _digits(right), max(self._scale, digits)))
        if operation is ast.Div:
            return _truncate(left / right, self._scale)
        whole = not self._scale and not digits
        if operation is ast.Mod and whole:
            return left - _truncate(left / right, 0) * right
        if operation is ast.Pow and whole and 0 <= right <= LARGEST_EXPONENT:
            return left**right
        raise ValueError("an operation of bc that is not simulated")


class _Floats:
    """Arithmetic of awk."""

    def parse_number(self, text: str) -> Number:
        return float(text)

    def apply_operator(self, operation: type[ast.operator], left: Number, right: Number) -> Number:
        operations: dict[type[ast.operator], Callable[[float, float], float]] = {
            ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
            ast.Mod: math.fmod,
        }  # fmt: skip
        return operations[operation](float(left), float(right))


def _digits(value: Decimal) -> int:
    """Return the number of digits after the point."""
    return max(0, -int(value.as_tuple().exponent))


def _truncate(value: Decimal, digits: int) -> Decimal:
    """Truncate a number to `digits` digits after the point."""
    return value.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_DOWN)


def _evaluate_expression(text: str, arithmetic: _Decimals | _Floats) -> Number:
    """Return the value of an expression.

    Raises:
        ValueError: if it has other tokens than numbers, + - * / % ^ ( ) and `int(...)`, or divides by zero.
    """
    powers = "^" in text
    if len(text) > LONGEST_EXPRESSION or re.search(r"\*\*|//|_", text) or (powers and re.search(r"-|\^.*\^", text)):
        raise ValueError("an expression that is not simulated")
    source = re.sub(r"(?<![\d.])0+(?=\d)", "", text.strip()).replace("^", "**")
    try:
        with localcontext(prec=PRECISION):
            return _evaluate_node(ast.parse(source, mode="eval").body, source, arithmetic)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError):
        raise ValueError("not an expression of numbers") from None


def _evaluate_node(node: ast.expr, source: str, arithmetic: _Decimals | _Floats) -> Number:
    match node:
        case ast.Constant(value=int() | float()):
            text = ast.get_source_segment(source, node) or ""
            if not re.fullmatch(r"\d+\.?\d*|\.\d+", text):
                raise ValueError("not a decimal number")
            return arithmetic.parse_number(text)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate_node(operand, source, arithmetic)
        case ast.BinOp(left=left, op=operation, right=right):
            return arithmetic.apply_operator(
                type(operation), _evaluate_node(left, source, arithmetic), _evaluate_node(right, source, arithmetic)
            )
        case ast.Call(func=ast.Name(id="int"), args=[argument]) if isinstance(arithmetic, _Floats):
            return float(math.trunc(_evaluate_node(argument, source, arithmetic)))
    raise ValueError("not an expression of numbers")
