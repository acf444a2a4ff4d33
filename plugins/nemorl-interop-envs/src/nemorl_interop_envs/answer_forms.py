r"""The final answer of a response, in the forms that models are taught: a tag, a box, a marked line.

A small reader of its own: answers of puzzles are text of many lines as often as numbers, so nothing is parsed here.

>>> readings("So\n**Answer:** 12")
['12']
>>> readings(r"Hence \boxed{\text{no}}.")
['\\text{no}', 'no']
"""

from __future__ import annotations

import re

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MARKED = re.compile(
    r"^(?=[^\n]*answer)[^\n:\uff1a]*\banswer\b[^\n:\uff1a]*[:\uff1a]([^\n]*)$", re.IGNORECASE | re.MULTILINE
)
_FENCE = re.compile(r"\A\s*(`{3,}|~{3,})[^\n]*\n(.*?)^[ \t]*\1", re.DOTALL | re.MULTILINE)
_BRACES = re.compile(r"(\\f?boxed\s*\{)|\\.|[{}]", re.DOTALL)
MARKS = (("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
WRAPPERS = (*MARKS, (r"\text{", "}"), ('"', '"'), ("\u201c", "\u201d"))
ENDS = " \t\r\n.!\u2705\u2713\u2714"


def readings(response: str) -> list[str]:
    """What the answer may be: as it is written, and without what only marks it up.

    The last tagged answer, else the last boxed one, else what follows the last ``Answer:``, else all there is.
    """
    tagged = _TAGGED.findall(response)
    found = tagged[-1] if tagged else _boxed(response) or _marked(response)
    written = (response if found is None else found).strip()
    return list(dict.fromkeys([written, _plain(written)]))


def _boxed(response: str) -> str | None:
    """The content of the box that is closed last."""
    content = None
    opened: list[int | None] = []
    for mark in _BRACES.finditer(response):
        if mark[0].endswith("{") and (mark[1] or mark[0] == "{"):
            opened.append(mark.end() if mark[1] else None)
        elif mark[0] == "}" and opened and (start := opened.pop()) is not None:
            content = response[start : mark.start()]
    return content


def _marked(response: str) -> str | None:
    """The rest of the line, or all that follows where nothing is left of it: a grid, or a block of code."""
    lines = list(_MARKED.finditer(response))
    if not lines:
        return None
    rest = lines[-1][1]
    # In `**Answer:** 12` and `**Answer: 12**` one half of the marks is before the colon.
    for mark in ("**", "__", "*", "_"):
        if rest.count(mark) % 2 and lines[-1][0].count(mark) % 2 == 0:
            rest = rest.strip().removeprefix(mark).removesuffix(mark)
            break
    return rest if rest.strip() else response[lines[-1].end() :]


def _plain(answer: str) -> str:
    """Without a fence around it, marks of Markdown and LaTeX, quotation marks, and a full stop."""
    fenced = _FENCE.match(answer)
    text = (fenced[2] if fenced else answer).strip()
    while True:
        bare = text.rstrip(ENDS)
        for opening, closing in WRAPPERS:
            if len(bare) > len(opening) + len(closing) and bare.startswith(opening) and bare.endswith(closing):
                bare = bare[len(opening) : -len(closing)].strip()
        if bare == text:
            return text
        text = bare
