r"""One spelling for what can be written in many ways: Unicode, LaTeX commands for layout, text inside formulas.

After :func:`tidy` only these remain: plain letters and digits, ``* / ^ _ ! |``, brackets, ``≤ ≥ ≠ ∪ ∈ ±``, ``°`` for
degrees, and LaTeX commands that mean something (``\frac``, ``\sqrt``, ``\pi``, ``\sin``).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import TypeVar

T = TypeVar("T")

MAX_CHARS = 100
"""Longer texts are read each time: few repeat, and they would fill memory."""
MAX_TEXTS = 4096


def remembered(function: Callable[[str], T]) -> Callable[[str], T]:
    """The same function, which must depend on its text alone and return something that nobody changes."""
    known = lru_cache(maxsize=MAX_TEXTS)(function)

    @wraps(function)
    def answer(text: str) -> T:
        return known(text) if len(text) <= MAX_CHARS else function(text)

    return answer


ROW_END = "¶"
"""The end of a row of a matrix."""

_SPACE_AT_END = re.compile(r"(?<!\\)\\[,;:! ]\s*$")
r"""``42\,``"""
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_CHARACTERS = {
    **dict.fromkeys("−–—‐‑﹣－", "-"),
    **dict.fromkeys("×·⋅∗∙", "*"),
    **dict.fromkeys("÷⁄∕", "/"),
    **{"⩽": "≤", "⩾": "≥", "′": "'", "’": "'", "º": "°", "⟨": "(", "⟩": ")", "℃": "°C", "℉": "°F"},
    **{"π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "∅": r"\emptyset ", "α": r"\alpha ", "β": r"\beta "},
    **{"γ": r"\gamma ", "δ": r"\delta ", "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ", "σ": r"\sigma "},
    **{"φ": r"\phi ", "ω": r"\omega "},
}


def _text(found: re.Match[str]) -> str:
    inside = found.group(1)
    return rf" \text{{{inside}}}" if re.fullmatch(r"[A-Za-z]", inside) else f" {inside} "


@dataclass(frozen=True, slots=True)
class Rule:
    """One replacement."""

    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]
    needs: tuple[str, ...] = ("\\",)
    """Text that a match must contain, one of these: looking for it is many times cheaper than trying the pattern"""


def _rule(pattern: str, replacement: str | Callable[[re.Match[str]], str], *needs: str) -> Rule:
    return Rule(re.compile(pattern), replacement, needs or ("\\",))


RULES = (
    _rule(r"\\\\(?=[A-Za-z])", r"\\"),  # doubly escaped
    _rule(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|rm|textstyle)(?![A-Za-z])\s*\.?", ""),
    _rule(r"\\(?:bf|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])", ""),
    _rule(r"\\(?:mathrm|text)\s*\{\s*([ei])\s*\}", r"\1"),
    _rule(r"\\(?:mathrm|operatorname\*?|mathit|textrm|mathsf)(?=\s*\{)", r"\\text"),
    _rule(r"\\(?:mbox|textbf|textit|textnormal|hbox)(?=\s*\{)", r"\\text"),
    _rule(r"\\(?:text)?color\s*\{[A-Za-z]+\}", ""),
    _rule(r"\\(?:mathbf|boldsymbol|bm|underline)\s*\{([A-Za-z]|[\d.]+)\}", r"\1"),
    _rule(r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    _rule(r"\\(?:times|cdot|ast)(?![A-Za-z])", "*"),
    _rule(r"\\div(?![A-Za-z])", "/"),
    _rule(r"\{\s*,\s*\}", ",", "{"),
    _rule(r"\\!\s*", ""),
    _rule(r"\\(?:[,;:> ]|quad|qquad|thinspace|enspace)(?![A-Za-z])|~", " ", "\\", "~"),
    _rule(r"\\([$%#&])", r"\1"),
    _rule(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])|\^\s*°", "°", "\\", "°"),
    _rule(r"\\(?:leqslant|leq|le)(?![A-Za-z])|<=", "≤", "\\", "<="),
    _rule(r"\\(?:geqslant|geq|ge)(?![A-Za-z])|>=", "≥", "\\", ">="),
    _rule(r"\\(?:neq|ne)(?![A-Za-z])|!=", "≠", "\\", "!="),
    _rule(r"\\(?:approx|simeq)(?![A-Za-z])", "≈"),
    _rule(r"\\lt(?![A-Za-z])", "<"),
    _rule(r"\\gt(?![A-Za-z])", ">"),
    _rule(r"\\pm(?![A-Za-z])|\+/-|\+-(?=\s*\d)", "±", "\\", "+/-", "+-"),
    _rule(r"\\cup(?![A-Za-z])", "∪"),
    _rule(r"\\in(?![A-Za-z])", "∈"),
    _rule(r"\\(?:lvert|rvert|vert|mid)(?![A-Za-z])", "|"),
    _rule(r"\\(?:langle|lparen)(?![A-Za-z])", "("),
    _rule(r"\\(?:rangle|rparen)(?![A-Za-z])", ")"),
    _rule(r"\\lbrace(?![A-Za-z])", r"\\{"),
    _rule(r"\\rbrace(?![A-Za-z])", r"\\}"),
    _rule(r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
    _rule(r"\\var(theta|phi|epsilon)(?![A-Za-z])", r"\\\1"),
    _rule(r"\\(?:ldots|dots|cdots)(?![A-Za-z])", "…"),
    _rule(r"\*\*", "^", "**"),
    _rule(r"(?<=\d)\s+[xX]\s+(?=\d)", "*", "x", "X"),
    _rule(r"(?<![A-Za-z\\])(?:infinity|inf)(?![A-Za-z])", r"\\infty ", "inf"),
    _rule(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi ", "pi"),
    # A single letter of text may be a unit, which the same letter in a formula is not.
    _rule(r"\\text\s*\{\s*([^{}]*?)\s*\}", _text),
)
"""In this order."""


@remembered
def tidy(text: str) -> str:
    """The text in the one spelling that the rest of the grader reads."""
    if "\\begin" in text:
        text = text.replace("\\\\", ROW_END)
    text = text if text.isascii() else _in_ascii(text)
    for rule in RULES:
        if any(needed in text for needed in rule.needs):
            text = rule.pattern.sub(rule.replacement, text)
    return re.sub(r"\s+", " ", text).strip()


def _in_ascii(text: str) -> str:
    """As far as there is a spelling."""
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda found: f"^{{{found.group().translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda found: f"_{{{found.group().translate(_SUBSCRIPTS)}}}", text)
    text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text)
    return "".join(_character(character) for character in text)


def _character(character: str) -> str:
    if character.isascii():
        return character
    if character in _CHARACTERS:
        return _CHARACTERS[character]
    category = unicodedata.category(character)
    if category == "Cf":  # invisible
        return ""
    if category == "Zs":
        return " "
    if category == "No" and "FRACTION" in unicodedata.name(character, ""):
        return f" {unicodedata.normalize('NFKC', character).replace('⁄', '/')}"
    return character


@remembered
def strip_wrapping(text: str) -> str:
    """Without surrounding emphasis, math delimiters, quotes and closing punctuation."""
    previous = None
    while text != previous:
        previous = text
        text = _SPACE_AT_END.sub("", text).strip().strip('*`"')
        text = text if text.endswith("..") else text.rstrip(".,;:?")
        for opening, closing in (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"), ("'", "'")):
            if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
                inside = text[len(opening) : -len(closing)]
                if opening not in inside and closing not in inside:
                    text = inside
    # $125$ miles: a formula among text.
    return re.sub(r"^\$([^$]+)\$(?=[^$]*$)", r"\1 ", text)


@remembered
def words(text: str) -> str:
    """Text as it is compared with text: in lower case, one space between words, no closing punctuation."""
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", tidy(strip_wrapping(text))).casefold()
    plain = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m", plain)
    plain = re.sub(r"(\d)(?::00)?\s*([ap]m)\b", r"\1 \2", plain)
    return re.sub(r"\s+", " ", strip_wrapping(plain)).strip()


@remembered
def spelled(text: str) -> str:
    """A formula as it is compared as text: no space but between two words or two numbers, case kept."""
    plain = tidy(strip_wrapping(text))
    return re.sub(r"(?<![A-Za-z]) (?=[A-Za-z\\(])|(?<=[A-Za-z)\]}]) (?=\d)|(?<!\w) | (?!\w)", "", plain)
