"""Arithmetic that is safe to evaluate for a policy: parsed by ``ast``, never executed, exact, and bounded.

Numbers, ``+ - * / // % **`` and parentheses. Exact fractions, so that 0.1 + 0.2 is 0.3. Each bound below stops one way
to make a short expression expensive.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

MAX_CHARS = 200
MAX_BITS = 4096
"""Of numerator and denominator; ``9**9**9`` would have 1.2 billion."""
MAX_EXPONENT = 1000
DIGITS = 10
"""Significant digits of a value that is no whole number."""
MAX_SHOWN_CHARS = 60
"""Longer whole numbers are rounded as well."""

_OPERATORS: dict[type[ast.AST], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


class ExpressionError(ValueError):
    """An expression without a value; the message is for the policy."""


def evaluate(text: str) -> Fraction:
    """The value of an expression.

    Raises:
        ExpressionError: it is not arithmetic, too long, too large, or divides by zero.
    """
    source = text.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-").replace(",", "")
    if len(source) > MAX_CHARS:
        raise ExpressionError(f"longer than {MAX_CHARS} characters")
    try:
        return _value(ast.parse(source, mode="eval").body)
    except ZeroDivisionError as error:
        raise ExpressionError("division by zero") from error
    except ExpressionError:
        raise
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ExpressionError("not an arithmetic expression") from error


def _value(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=bool()):
            raise ExpressionError("not an arithmetic expression")
        case ast.Constant(value=int() | float() as number):
            return _bounded(Fraction(repr(number)))  # by its digits: 0.1 is one tenth; 1e999 is inf, hence no number
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
    raise ExpressionError("only numbers, + - * / // % ** and parentheses are known")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ExpressionError("exponents must be whole numbers")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) > MAX_EXPONENT or size * abs(exponent) > MAX_BITS:
        raise ExpressionError("too large")
    return Fraction(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ExpressionError("too large")
    return value


def show(value: Fraction) -> str:
    """A whole number as such, anything else with 10 significant digits: ``84``, ``0.3333333333``, ``1.5e+80``."""
    if value.denominator == 1 and len(text := str(value.numerator)) <= MAX_SHOWN_CHARS:
        return text
    try:
        return f"{float(value):.{DIGITS}g}"
    except OverflowError as error:
        raise ExpressionError("too large") from error
