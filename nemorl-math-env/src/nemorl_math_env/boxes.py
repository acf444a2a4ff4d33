r"""The answer that a ``\boxed{…}`` gives where it stands.

The answer is the formula that the box is part of, with the box opened: ``2\cdot\boxed{5}`` says ``2\cdot(5)``, and
``x > \boxed{5}`` says ``x > 5``. A derivation before it (``x = ``, ``\implies``) is cut off, and the words around it
may deny it (``context.py``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_CHARS = 1000
"""A box with more in it is no answer."""
MAX_BOXES = 50
"""Boxes looked at, from the last one back: a response may repeat an open box thousands of times."""
_REACH = 300
"""So many characters of a formula are looked at on each side of its box."""

_OPENING = re.compile(r"\\{1,2}f?box(?:ed)?\s*\{")
_ALONE = re.compile(r"\A\s*\\f?box(?:ed)?\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*\Z")
_WORD = r"(?<![\\A-Za-z])(?:[A-Za-z]{2,}(?:[’'][a-z]+)?|[aAI](?=\s[a-z]))"
_COMMANDS = (
    r"\\(?:implies|iff|to|in|therefore|because|approx|equiv|[qQ]?quad|(?:[Ll]ong)?[Rr]ightarrow|hline)(?![A-Za-z])"
)
_BEGINS = re.compile(
    rf"\$|\\[\[(]|\n|~~|</?[a-z][^<>]{{0,80}}>|[.!?;:](?=[\s*])|\\begin\{{[a-z]+\*?\}}|\\text[a-z]*\{{[^{{}}]*\}}|{_COMMANDS}|\\\\|&"
    rf"|(?<![<>])(?<![a-z ]!)=|[≈≡→⇒∴✅|](?=\s)|\b(?:for|in|with|at|after|case|step|when|if)\s[^,\n]{{1,20}},|{_WORD}",
    re.IGNORECASE,
)
r"""After any of these, a formula can begin."""
_FRESH = re.compile(r"(?:\$|\\[\[(]|\n|(?<![<>\\])(?<![a-z ]!)=|(?<![\\A-Za-z{])[a-z]{2,}:?)[ \t]*\Z")
"""The nearest of these is right before the box."""
_ENDS = re.compile(
    rf"\$|~~|\\[\])]|\n|[.!?;:](?=\s|\Z|\*)|\\end\{{|\\text[a-z]*\{{|\\(?:implies|iff|therefore|because|[qQ]?quad|hline)(?![A-Za-z])|\\\\|&|\s[|(✅]|</?[a-z]|[^\x00-\x7f²³±×÷·−≤≥≠]"
    rf"|,?\s*(?:[-–—]+\s+)?{_WORD}"
)
_LIST_MARK = re.compile(r"\A(?:\s*(?:[-*+>#|]+|\d+[.)])\s)+")
_SPACE = re.compile(r"\\[,;:! ]|\\displaystyle|\\left(?=[(\[])|(?<!~)~(?!~)")


@dataclass(frozen=True, slots=True)
class Box:
    position: int
    start: int
    """Where the formula begins"""
    end: int
    """Where it ends"""
    content: str
    """Content of the box alone"""
    answer: str
    """Answer that the formula gives"""


def find_boxes(text: str) -> list[Box]:
    r"""Every ``\boxed{…}`` with balanced braces. A box in a box is part of its content."""
    found: list[Box] = []
    outer = 0
    for match in list(_OPENING.finditer(text))[-MAX_BOXES:]:
        end = _closing_brace(text, match.end()) if match.start() >= outer else None
        if end is not None:
            outer = end + 1
            content = _ALONE.sub(r"\1", text[match.end() : end])
            found.append(_in_formula(text, match.start(), end + 1, content))
    return found


def _closing_brace(text: str, start: int) -> int | None:
    depth, escaped = 1, False
    for position in range(start, min(len(text), start + MAX_CHARS + 1)):
        if not escaped:
            depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
        escaped = text[position] == "\\" and not escaped
    return None


def _in_formula(text: str, start: int, end: int, content: str) -> Box:
    left, right = text[max(0, start - _REACH) : start], text[end : end + _REACH]
    lead = _lead(left)
    tail = _tail(right)
    if "mod" in tail and re.search(r"(?:\\equiv|≡)\s*\Z", left[: len(left) - len(lead)]):
        tail = re.sub(r"\A(?:\s|\\[,;:! ])*(?:\\pmod\s*\{?\w{1,9}\}?|\(\\?mod[^()]{1,9}\))", "", tail)
    quoted = lead.endswith("'")
    before, after = _bare(lead, 1), _bare(tail.removeprefix("'") if quoted else tail, -1)
    if before in ("(", "[") and after[:1] in (")", "]"):
        before, after = "", after[1:]
    elif not before and after in (")", "]"):
        after = ""
    is_apart = before[-1:].isalnum() or before[:1] in tuple("^_!") if before else False
    if after.startswith("=") and not before:  # 5 = 2 + 3, which says what 2 + 3 = 5 says
        return Box(start, start - len(lead), end + len(tail), content, f"{after[1:]} = {content}")
    inside = f"({content})" if before or (after and not re.match(r"\\?%", after)) else content
    answer = f"{before}{' ' if is_apart else ''}{inside}{after}"
    return Box(start, start - len(lead), end + len(tail), content, answer)


def _lead(left: str) -> str:
    """The text before the box in its formula."""
    if _FRESH.search(left[-20:]):
        return ""
    for cut in reversed([0, *(match.end() for match in _BEGINS.finditer(left))]):
        lead = left[cut:]
        if _is_balanced(lead):
            mark = _LIST_MARK.match(lead) if cut == 0 or left[cut - 1] == "\n" else None
            return lead[mark.end() :] if mark else lead
    return left


def _tail(right: str) -> str:
    """The text after it."""
    for match in _ENDS.finditer(right):
        if _is_balanced(right[: match.start()]):
            return right[: match.start()]
    return right


def _is_balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


def _bare(text: str, side: int) -> str:
    """Without space, emphasis and quotes; without the punctuation that separates it from the words beyond."""
    if not text or text.isspace():
        return ""
    text = _SPACE.sub(" ", text)
    if "box" in text:
        text = re.sub(r"\\boxed\s*\{\s*\}", "", text)
    if side > 0:
        text = re.sub(r"(?:\A|(?<=\s)|(?<=[(]))[*_`\"']+\Z", "", text).strip()
        return text.lstrip(".,;:)*`\"'_ ") if not re.search(r"\d", text) else text
    text = re.sub(r"\A[*_`\"]+(?=\W|\Z)", "", text).strip()
    return "" if re.fullmatch(r"[\s.,;:?*_`\"-]*", text) else text.rstrip('.,;:*`"')
