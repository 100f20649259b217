"""Integer arithmetic of `$(( ))` and `(( ))`, and layer patterns."""

from __future__ import annotations

import ast
import operator
import re
from collections import deque
from collections.abc import Callable
from typing import Protocol

# Not parsed by tree-sitter-bash, which binds `-a + b` as `-(a + b)` and `a = b = c` from the left.
TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+#\w+|\d\w*)|(?P<name>[A-Za-z_]\w*(?:\[[^]]*\])?)"
    r"|(?P<sign><<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>=!~&^|?:(),]))",
    re.ASCII,
)
POWER = 13
BINARY: dict[str, tuple[int, Callable[[int, int], int]]] = {
    ",": (1, lambda a, b: b),
    "||": (4, lambda a, b: int(a != 0 or b != 0)),
    "&&": (5, lambda a, b: int(a != 0 and b != 0)),
    "|": (6, operator.or_), "^": (7, operator.xor), "&": (8, operator.and_),
    "==": (9, operator.eq), "!=": (9, operator.ne),
    "<": (10, operator.lt), ">": (10, operator.gt), "<=": (10, operator.le), ">=": (10, operator.ge),
    "<<": (11, operator.lshift), ">>": (11, operator.rshift),
    "+": (12, operator.add), "-": (12, operator.sub),
    "*": (POWER, operator.mul),
    "/": (POWER, lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)),  # bash rounds towards zero
    "%": (POWER, lambda a, b: abs(a) % abs(b) * (1 if a >= 0 else -1)),
    "**": (POWER + 1, lambda a, b: operator.pow(a, b)),
}  # fmt: skip
UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg, "+": operator.pos, "~": operator.invert, "!": operator.not_,
}  # fmt: skip
ASSIGNING = {"=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^="}
LARGEST = 2**63
DEPTH = 50
LONGEST = 100_000  # entries of a pattern of layers


class ShellVariableScope(Protocol):
    """Interface by which shell arithmetic reads and sets a script's variables; None is an unknown value."""

    def read_number(self, name: str) -> str | None:
        """Return a shell variable's text, itself an arithmetic expression, or None if its value is unknown."""

    def assign_number(self, name: str, value: str | None) -> None:
        """Set a shell variable to the result of an arithmetic assignment; None marks its value as unknown."""


def evaluate_bash_arithmetic(expression: str, scope: ShellVariableScope | None = None, depth: int = 0) -> int | None:
    """Return the value of a bash arithmetic expression, or None if it is unknown, invalid or beyond 64 bits.
    Its variables are read and set by `scope`. An unset variable and a division by zero give None too.
    """
    try:
        value = _ArithmeticParser(expression, scope, depth).value()
    except (ValueError, ZeroDivisionError, KeyError, OverflowError, RecursionError):
        return None
    return value if -LARGEST <= value < LARGEST else None


class _ArithmeticParser:
    """Precedence climbing over the tokens of an expression."""

    def __init__(self, expression: str, scope: ShellVariableScope | None, depth: int) -> None:
        if depth > DEPTH:
            raise ValueError("a variable refers to itself")
        self.scope, self.depth, self.skipping = scope, depth, False
        self.tokens: deque[tuple[str, str]] = deque()
        at, end = 0, len(expression.rstrip())
        while at < end:
            match = TOKEN.match(expression, at)
            if not match or not match.lastgroup:
                raise ValueError(f"not an arithmetic expression: {expression}")
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            at = match.end()

    def value(self) -> int:
        if not self.tokens:
            return 0
        value = self._binary(1)
        if self.tokens:
            raise ValueError("something follows the expression")
        return value

    def _take_operator(self, *wanted: str) -> str:
        """Return the next token if it is one of the given operators."""
        return self.tokens.popleft()[1] if self.tokens and self.tokens[0][1] in wanted else ""

    def _parse_unevaluated(self, skip: bool, lowest: int) -> int:
        """Read an operand without evaluating it, after an operand that decides the result."""
        before, self.skipping = self.skipping, self.skipping or skip
        try:
            return self._binary(lowest)
        finally:
            self.skipping = before

    def _binary(self, lowest: int) -> int:
        left = self._unary()
        while self.tokens:
            sign = self.tokens[0][1]
            if sign == "?" and lowest <= 3:
                left = self._choice(left)
                continue
            if sign not in BINARY or BINARY[sign][0] < lowest:
                break
            self.tokens.popleft()
            precedence, apply = BINARY[sign]
            decided = (sign == "&&" and left == 0) or (sign == "||" and left != 0)
            right = self._parse_unevaluated(decided, precedence + (sign != "**"))
            if self.skipping:
                continue
            if sign in ("**", "<<", ">>") and not 0 <= right < 64:
                raise ValueError(f"{sign} {right}")
            left = int(apply(left, right))
            if abs(left) > LARGEST:
                raise ValueError("more than 64 bits")
        return left

    def _choice(self, condition: int) -> int:
        self._take_operator("?")
        chosen = self._parse_unevaluated(condition == 0, 2)
        if not self._take_operator(":"):
            raise ValueError("no : after ?")
        other = self._parse_unevaluated(condition != 0, 3)
        return chosen if condition else other

    def _unary(self) -> int:
        kind, text = self.tokens.popleft() if self.tokens else ("", "")
        if kind == "number":
            return _number(text)
        if kind == "name":
            return self._name(text)
        if text in ("++", "--") and self.tokens and self.tokens[0][0] == "name":
            return self._assign(self.tokens.popleft()[1], text[0] + "=", lambda: 1)
        if text in UNARY:
            return int(UNARY[text](self._unary()))
        if text != "(":
            raise ValueError(f"no operand: {text}")
        value = self._binary(1)
        if not self._take_operator(")"):
            raise ValueError("( is not closed")
        return value

    def _name(self, name: str) -> int:
        if sign := self._take_operator(*ASSIGNING):
            return self._assign(name, sign, lambda: self._binary(2))
        if sign := self._take_operator("++", "--"):
            return self._assign(name, sign[0] + "=", lambda: 1) + (1 if sign == "--" else -1)
        return self._evaluate_variable(name, self.scope.read_number(name) if self.scope else None)

    def _evaluate_variable(self, name: str, text: str | None) -> int:
        if self.skipping:
            return 0
        value = None if text is None else evaluate_bash_arithmetic(text, self.scope, self.depth + 1)
        if value is None:
            raise KeyError(name)
        return value

    def _assign(self, name: str, sign: str, operand: Callable[[], int]) -> int:
        if self.skipping:
            return operand()
        if self.scope is None:
            raise KeyError(name)
        old = self.scope.read_number(name)
        try:
            value = operand()
            if sign != "=":
                value = int(BINARY[sign[:-1]][1](self._evaluate_variable(name, old), value))
        except Exception:
            self.scope.assign_number(name, None)
            raise
        self.scope.assign_number(name, str(value))
        return value


def _number(text: str) -> int:
    if "#" in text:
        base, _, digits = text.partition("#")
        return int(digits, int(base))
    if text[0] == "0" and text.isdigit():
        return int(text, 8)
    return int(text, 16) if text[:2].lower() == "0x" else int(text)


def parse_megatron_layer_freq(text: str) -> int | list[int] | None:
    """Return a Megatron layer pattern as n (every n-th layer) or a list of numbers; None for anything else.
    A list is written such as `[0]*3+[1]*58`.
    """
    try:
        return _items(ast.parse(text.strip(), mode="eval").body) if "[" in text else int(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _items(node: ast.expr) -> list[int]:
    match node:
        case ast.List(elts=elements):
            return [_whole(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _items(left) + _items(right)
        case ast.BinOp(left=ast.Constant() as count, op=ast.Mult(), right=items):
            return _repeated(_items(items), _whole(count))
        case ast.BinOp(left=items, op=ast.Mult(), right=count):
            return _repeated(_items(items), _whole(count))
    raise ValueError("not a list of integers")


def _repeated(items: list[int], count: int) -> list[int]:
    if len(items) * count > LONGEST:
        raise ValueError("the list has too many layers")
    return items * count


def _whole(node: ast.expr) -> int:
    value = evaluate_bash_arithmetic(ast.unparse(node))
    if value is None:
        raise ValueError("not an integer expression")
    return value
