r"""Formulas as trees, read as a whole or not at all.

The grammar knows what final answers are made of: numbers, letters, ``+ - * / ^ !``, fractions, roots, absolute values,
binomials and the usual functions, in LaTeX (``\frac{\sqrt{3}}{2}``) or plainly (``sqrt(3)/2``). A text with anything
else in it, or with two readings (``1/2x``), raises :class:`UnreadableError`; no part of it is ever taken for the whole.

A tree is a tuple: ``("number", Fraction)``, ``("symbol", name)``, ``("constant", "pi")`` or ``(operation, *trees)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from typing import Any

from nemorl_math_env.quantities import MAX_DIGITS
from nemorl_math_env.units import MODIFIERS, read_unit, word_set

Tree = tuple[Any, ...]

MAX_TOKENS = 200
MAX_DEPTH = 40
FUNCTIONS = word_set(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log exp sqrt abs floor ceil asin acos atan"
)
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_SAME = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}
_GREEK = word_set(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
)
_ACCENTS = frozenset(("overline", "vec", "hat", "bar", "tilde", "mathbb", "mathcal", "angle", "triangle"))
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|\\(?P<command>[A-Za-z]+)|(?P<letters>[A-Za-z]+)|(?P<mark>[-+*/^_!'(){}\[\]|,°%]))",
    re.ASCII,
)


class UnreadableError(ValueError):
    """The text is not one formula with one reading."""


@lru_cache(maxsize=1024)
def read_expression(text: str) -> Tree:
    """The tree of a tidied text.

    Raises:
        UnreadableError: The text is anything else than exactly one formula.
    """
    reader = _Reader(list(_tokens(text)))
    tree = reader.sum(0)
    if reader.peek() is not None:
        raise UnreadableError(f"{reader.peek()!r} is left over")
    return tree


def try_expression(text: str) -> Tree | None:
    """The tree of a tidied text, or ``None`` where it is unreadable."""
    try:
        return read_expression(text)
    except UnreadableError:
        return None


def symbols(tree: Tree) -> frozenset[str]:
    """Names of the variables in a tree."""
    if tree[0] == "symbol":
        return frozenset({tree[1]})
    return frozenset().union(*(symbols(part) for part in tree[1:] if isinstance(part, tuple)))


def _tokens(text: str) -> Iterator[tuple[str, str, bool]]:
    """(kind, text, a space stands before) of every token."""
    position = count = 0
    text = text.rstrip()
    while position < len(text):
        found = _TOKEN.match(text, position)
        count += 1
        if found is None or count > MAX_TOKENS or len(found[0]) > MAX_DIGITS:
            raise UnreadableError(f"cannot read {text[position : position + 20]!r}")
        kind = str(found.lastgroup)
        content = found[kind]
        spaced = found.start(kind) > position
        position = found.end()
        if kind != "letters":
            yield kind, content, spaced
        elif content in FUNCTIONS:
            yield "command", content, spaced
        else:
            yield from _letters(content, spaced)


def _letters(run: str, spaced: bool) -> Iterator[tuple[str, str, bool]]:
    """Up to three letters are a product of variables, unless they are a word."""
    is_word = run.casefold() in MODIFIERS or read_unit(run, apart=False)
    if len(run) > 1 and (len(run) > 3 or is_word):
        raise UnreadableError(f"{run!r} is a word")
    for index, letter in enumerate(run):
        yield "letter", letter, spaced and index == 0


class _Reader:
    """Recursive descent. Every method starts at the current token and leaves the first one it does not want."""

    def __init__(self, tokens: list[tuple[str, str, bool]]) -> None:
        self._tokens = tokens
        self._at = 0
        self._bars = 0
        """Absolute values that are open: a bar closes the last one."""

    def peek(self) -> str | None:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else None

    def _kind(self) -> str | None:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else None

    def _spaced(self) -> bool:
        return self._at < len(self._tokens) and self._tokens[self._at][2]

    def _take(self, wanted: str | None = None) -> str:
        text = self.peek()
        if text is None or (wanted is not None and (text != wanted or self._kind() != "mark")):
            raise UnreadableError(f"{wanted or 'more'} expected, {text!r} found")
        self._at += 1
        return text

    def _is(self, *marks: str) -> bool:
        return self._kind() == "mark" and self.peek() in marks

    def sum(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise UnreadableError("too deeply nested")
        tree = self._signed_product(depth)
        while self._is("+", "-"):
            operation = "add" if self._take() == "+" else "subtract"
            tree = (operation, tree, self._signed_product(depth))
        return tree

    def _signed_product(self, depth: int) -> Tree:
        if self._is("+", "-"):
            sign = self._take()
            if self._is("+", "-"):
                raise UnreadableError("two signs in a row")
            tree = self._product(depth)
            return ("negative", tree) if sign == "-" else tree
        return self._product(depth)

    def _product(self, depth: int) -> Tree:
        tree = self._power(depth)
        divided = False
        while True:
            if self._is("*", "/"):
                divided = self._take() == "/"
                factor = self._signed_factor(depth)
                tree = ("divide" if divided else "multiply", tree, factor)
            elif self._starts_factor():
                # 1/2x is half of x to some and one over 2x to others.
                if divided and not self._spaced():
                    raise UnreadableError("a factor right after a quotient")
                if self._kind() == "number":
                    raise UnreadableError("a number after a factor")
                tree = ("multiply", tree, self._power(depth))
            else:
                return tree

    def _signed_factor(self, depth: int) -> Tree:
        if self._is("-"):
            self._take()
            return ("negative", self._power(depth))
        return self._power(depth)

    def _starts_factor(self) -> bool:
        kind = self._kind()
        if kind == "command":
            return self.peek() not in ("rfloor", "rceil")
        return kind in ("number", "letter") or self._is("(", "{", "[") or (self._is("|") and not self._bars)

    def _power(self, depth: int) -> Tree:
        tree = self._postfixed(self._atom(depth))
        if self._is("^"):
            self._take()
            exponent = self._exponent(depth)
            tree = ("power", tree, exponent)
            if self._is("^"):
                raise UnreadableError("two exponents")
            tree = self._postfixed(tree)
        return tree

    def _postfixed(self, tree: Tree) -> Tree:
        while self._is("!", "°"):
            tree = ("factorial", tree) if self._take() == "!" else ("degrees", tree)
            if tree[0] == "factorial" and self._is("!"):
                raise UnreadableError("a double factorial")
        return tree

    def _exponent(self, depth: int) -> Tree:
        if self._is("-", "+"):
            sign = self._take()
            tree = self._power(depth + 1)
            return ("negative", tree) if sign == "-" else tree
        if self._is("{"):
            return self._group("{", "}", depth)
        return self._power(depth + 1) if self._is("(") else self._atom(depth)

    def _group(self, opening: str, closing: str, depth: int) -> Tree:
        self._take(opening)
        tree = self.sum(depth + 1)
        self._take(closing)
        return tree

    def _atom(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise UnreadableError("too deeply nested")
        kind = self._kind()
        if kind == "number":
            return self._number()
        if kind == "letter":
            return self._symbol(self._take())
        if kind == "command":
            return self._command(self._take(), depth)
        for opening, closing in (("(", ")"), ("[", "]"), ("{", "}")):
            if self._is(opening):
                return self._group(opening, closing, depth)
        if self._is("|"):
            self._bars += 1
            tree = ("abs", self._group("|", "|", depth))
            self._bars -= 1
            return tree
        raise UnreadableError(f"{self.peek()!r} is no term")

    def _number(self) -> Tree:
        digits = self._take()
        if self._is("_"):  # a numeral in another base
            return ("symbol", f"{digits}{self._subscript()}")
        if self._kind() == "number":
            raise UnreadableError("two numbers in a row")
        value = Fraction(digits)
        at = self._at
        # 2 \frac{1}{2} is a mixed number.
        if "." not in digits and self._kind() == "command" and self.peek() == "frac":
            self._take()
            part = self._fraction(0)
            if part[1][0] == part[2][0] == "number" and 0 < part[1][1] < part[2][1]:
                return ("number", value + part[1][1] / part[2][1])
            self._at = at
        return ("number", value)

    def _symbol(self, name: str) -> Tree:
        if self._is("_"):
            name += self._subscript()
        while self._is("'"):
            name += self._take()
        if name in ("f", "g", "h") and self._is("("):
            raise UnreadableError("an unknown function")
        if name in ("i", "e"):
            return ("constant", name)
        return ("symbol", name)

    def _subscript(self) -> str:
        self._take("_")
        if not self._is("{"):
            return f"_{self._take()}"
        self._take("{")
        inside = ""
        while not self._is("}"):
            if self._is("{", "^"):
                raise UnreadableError("a nested subscript")
            inside += self._take()
        self._take("}")
        return f"_{inside}"

    def _fraction(self, depth: int) -> Tree:
        above = self._argument(depth)
        return ("divide", above, self._argument(depth))

    def _argument(self, depth: int) -> Tree:
        """``{…}``, or one digit or letter."""
        if self._is("{"):
            return self._group("{", "}", depth)
        kind, text, _ = self._tokens[self._at] if self._at < len(self._tokens) else ("", "", False)
        if kind == "number" and text.isdigit() and len(text) > 1:  # \frac12
            self._tokens[self._at : self._at + 1] = [("number", digit, False) for digit in text]
        if kind == "number":
            return ("number", Fraction(self._take()))
        if kind == "command" and text in ("frac", "sqrt"):
            raise UnreadableError("a command without braces")
        return self._atom(depth)

    def _command(self, name: str, depth: int) -> Tree:
        if name == "frac":
            return self._fraction(depth)
        if name in ("binom", "dbinom", "tbinom"):
            return ("binomial", self._argument(depth), self._argument(depth))
        if name == "sqrt":
            index: Tree = ("number", Fraction(2))
            if self._is("["):
                index = self._group("[", "]", depth)
            return ("root", self._root_of(depth), index)
        if name in ("pi", "infty"):
            return ("constant", name)
        if name in _GREEK:
            return self._symbol(f"\\{name}")
        if name in _ACCENTS:
            return self._symbol(f"\\{name} {self._accented()}")
        if name in ("lfloor", "lceil"):
            tree = self.sum(depth + 1)
            if self._kind() != "command" or self._take() != name.replace("l", "r", 1):
                raise UnreadableError("an open bracket")
            return ("floor" if name == "lfloor" else "ceil", tree)
        if name in FUNCTIONS:
            return self._function(_SAME.get(name, name), depth)
        raise UnreadableError(f"\\{name} is unknown")

    def _root_of(self, depth: int) -> Tree:
        return self._group("(", ")", depth) if self._is("(") else self._argument(depth)

    def _accented(self) -> str:
        inside = ""
        self._take("{")
        while self._kind() in ("letter", "number"):
            inside += self._take()
        self._take("}")
        if not inside:
            raise UnreadableError("nothing under an accent")
        return inside

    def _function(self, name: str, depth: int) -> Tree:
        base: Tree | None = None
        power: Tree | None = None
        if name == "log" and self._is("_"):
            self._take("_")
            base = self._argument(depth)
        if self._is("^"):
            self._take()
            power = self._exponent(depth)
        argument = self._function_argument(depth)
        if power == ("negative", ("number", Fraction(1))):
            if name not in _INVERSE:
                raise UnreadableError("an inverse of an unknown kind")
            return (_INVERSE[name], argument)
        tree: Tree = (name, argument) if base is None else (name, argument, base)
        return tree if power is None else ("power", tree, power)

    def _function_argument(self, depth: int) -> Tree:
        if self._is("("):
            return self._group("(", ")", depth)
        if self._is("{"):
            return self._group("{", "}", depth)
        if self._is("|"):
            return self._atom(depth)
        tree = self._power(depth + 1)
        # \sin 2x, but \sin x \cos x and \sin x (x+1) end here.
        while self._kind() == "letter" or (
            self._kind() == "command" and (self.peek() in _GREEK or self.peek() == "pi")
        ):
            tree = ("multiply", tree, self._power(depth + 1))
        if self._is("/"):
            raise UnreadableError("a quotient after a function")
        return tree
