r"""The final answer of a response, in the forms that models are taught: a tag, a box, a marked line.

A small reader of its own: answers of puzzles are text of many lines as often as numbers, so nothing is parsed here.

>>> readings("So\n**Answer:** 12")
['12']
>>> readings(r"Hence \boxed{\text{no}}.")
['\\text{no}', 'no']
"""

from __future__ import annotations

import re

OPEN_TAG, CLOSE_TAG = "<answer>", "</answer>"
_WORD = re.compile(r"\banswer\b", re.IGNORECASE)
_COLON = re.compile("[:\uff1a]")
_FENCE = re.compile(r"\A\s*(`{3,}+|~{3,}+)[^\n]*\n(.*?)^[ \t]*\1", re.DOTALL | re.MULTILINE)
_BRACES = re.compile(r"(\\f?boxed\s*\{)|\\.|[{}]", re.DOTALL)
MARKS = (("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"), ("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
WRAPPERS = (*MARKS, (r"\text{", "}"), ('"', '"'), ("\u201c", "\u201d"))
ENDS = " \t\r\n.!\u2705\u2713\u2714"


def readings(response: str) -> list[str]:
    """Candidate answers: as written, and without what only marks it up.

    The last tagged answer, else the last boxed one, else what follows the last ``Answer:``, else all there is.
    """
    tagged = _tagged(response)
    found = tagged if tagged is not None else _boxed(response) or _marked(response)
    written = (response if found is None else found).strip()
    return list(dict.fromkeys([written, _plain(written)]))


def _tagged(response: str) -> str | None:
    *closed, _ = response.split(CLOSE_TAG)
    return next((part.partition(OPEN_TAG)[2] for part in reversed(closed) if OPEN_TAG in part), None)


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
    end = len(response)
    for line in reversed(response.split("\n")):
        colon = _COLON.search(line)
        if colon is not None and _WORD.search(line, 0, colon.start()):
            rest = _without_half_a_mark(line, line[colon.end() :])
            return rest if rest.strip() else response[end:]
        end -= len(line) + 1
    return None


def _without_half_a_mark(line: str, rest: str) -> str:
    """In ``**Answer:** 12`` and ``**Answer: 12**`` one half of the marks is before the colon."""
    for mark in ("**", "__", "*", "_"):
        if rest.count(mark) % 2 and line.count(mark) % 2 == 0:
            return rest.strip().removeprefix(mark).removesuffix(mark)
    return rest


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
