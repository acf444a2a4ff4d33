r"""Reading the final answer out of a response, and deciding the easy comparisons exactly.

Only the *final* answer counts, and all of it. It is the last marked one (``\boxed{…}``, ``<answer>…</answer>``,
``#### …``, ``the answer is …``), else the last formula or number of the text. A right number that another one follows,
that is hedged (``5 or 7``), denied (``not 5``) or changed by the words beside it (``5 million``) earns nothing.

Nothing here can hang: patterns are linear and numbers are exact fractions. What :func:`decide` leaves open (``None``)
goes to a worker process (``grader.py``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nemorl_math_env.boxes import Box, find_boxes
from nemorl_math_env.comparison import equal_forms
from nemorl_math_env.context import (
    CHANGED,
    CHANGING_BEFORE,
    DOUBTED,
    corrected,
    is_changed,
    is_denied,
    is_part,
    is_struck,
    is_supposed,
    is_taken_back,
)
from nemorl_math_env.forms import Brackets, Chain, Form, Matrix, Name, Scalar, Words, read_form
from nemorl_math_env.judges import QuickJudge
from nemorl_math_env.markdown import plain
from nemorl_math_env.quantities import read_quantity
from nemorl_math_env.spelling import strip_wrapping, tidy
from nemorl_math_env.units import MODIFIERS, NONE, Unit

MAX_ANSWER_CHARS = 1000
"""Longer than this is not an answer."""
CONTEXT_CHARS = 300
"""So much before and after an answer may deny it or take it back."""
MAX_MARKS = 50
"""Marked answers looked at, from the last one back."""
DEFAULT_MARKERS = ("####", "answer is", "answer:", "answer =")

_NUMERAL = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+"
_SIGNED = rf"(?:[-+−–]\s?)?[$€£]?[-−]?(?:{_NUMERAL})"
_OPERATOR = r"(?:[-+*/×÷·^−–]|(?<=\s)x(?=\s))"
_RUN = re.compile(rf"{_SIGNED}(?:\s*{_OPERATOR}\s*(?:{_SIGNED}))*(?:\s?%)?", re.ASCII)
"""A number, or an arithmetic expression of numbers: ``12``, ``1/2``, ``12 + 7``."""
_FRACTION = re.compile(r"[-+]?\\[dt]?frac\s*(?:\{\s*[-+]?\d+\s*\}\s*\{\s*\d+\s*\}|\d\s*\d)")
_FORMULA = re.compile(r"\$\$(.{1,1000}?)\$\$|\\\[(.{1,1000}?)\\\]|\\\((.{1,1000}?)\\\)|\$([^$\n]{1,1000})\$", re.DOTALL)
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
_CONTRAST = re.compile(
    r"\bnot\s+\$?-?\d[\d.,/]{0,20}\$?,?\s+but\s+(?:rather\s+)?"
    r"|,?\s(?:and\s+)?not\s+\$?-?\d(?:[\d.,/]{0,20}\d)?\$?(?=[.!\s]*\Z)",
    re.IGNORECASE,
)
"""``not 41 but`` before an answer, ``, not 43`` after it."""
_LABEL = re.compile(r"\A(?:A|Ans)[.:]\s+")
_WORKING = re.compile(r"\s\((?=[\s$]*\d)[^()\w]*(?:[\w.,]*\s*[-+*/=×÷^]\s*)+[\w.,$]*\)(?=[\s.!]*\Z)")
"""``(12 + 30)`` after an answer."""
_SENTENCE_END = re.compile(r"[.?](?=\s|$)|!(?=\s+[A-Z]|\s*$)")
_JOINED = re.compile(r"\s{0,9},?\s{0,9}(?:or|and|to|,|/|;|±|\\pm|vs\.?)?\s{0,9}(?:\$|\\[(\[]|\d)", re.IGNORECASE)
"""Another number or formula directly after the first."""
_BESIDE_BEFORE = re.compile(r"(?:^|[\s*\"':=`])$")
_BESIDE_AFTER = re.compile(
    r"[$€£]?[.,;:?)*\"'`]*(?:!(?=\s*$|\s+[A-Z]))?(?:\s+(?:[A-Za-z(.,;]|\*\*|[-–—]+\s[A-Za-z])|\s*$)"
)
"""Characters that may stand right before and after a number that stands for itself."""
_HEDGE = re.compile(
    r"\b(?:or|maybe|perhaps|possibly|could|might|vs|versus|rather|to|and)\b|[?±–,;-]\s*$", re.IGNORECASE
)
_DENIED = re.compile(r"\b(?:not|never|no|neither|nor|cannot|except|minus|negative)\b|n[’']t\b", re.IGNORECASE)
_DENIED_AFTER = re.compile(r"\b(?:wrong|incorrect|false|not|never)\b|n[’']t\b", re.IGNORECASE)
_HARMLESS_AFTER = frozenset(
    ("or", "to", "and", "all", "each", "every", "any", "some", "by", "before", "after", "until", "up", "under", "over")
)
"""``5 and no more``, ``5 each``: they say nothing about the number."""
_FILLER = re.compile(
    r"(?:(?:therefore|thus|hence|then|so|simply|just|exactly|indeed|clearly|the|number|value|expression|given|by|equal"
    r"|to)[\s,:]+)*",
    re.IGNORECASE,
)


def final_answer(
    response: str, *, markers: Sequence[str] = DEFAULT_MARKERS, require_marker: bool = False, numeric: bool = True
) -> str | None:
    """The text of the answer that the response commits to, or ``None`` where there is none.

    Args:
        response: What the policy wrote. Anything up to a closing ``</think>`` is ignored.
        markers: Phrases, in any case, that an answer follows.
        require_marker: Take marked answers only.
        numeric: The ground truth is a number, so words around a number are its context and not part of it.
    """
    text = response.rpartition("</think>")[2]
    if "box" not in text:
        text = plain(text, markers)
    inside, after = _last_element(text)
    answer = _marked(after, markers, numeric)
    if answer is None and inside is not None:
        answer = _marked(inside, markers, numeric) or _unmarked(inside, numeric)
    if answer is None and inside is None and not require_marker:
        answer = _unmarked(text, numeric)
    return answer if answer and len(answer) <= MAX_ANSWER_CHARS else None


def reference_answer(answer: str) -> str:
    """The ground truth itself, out of a worked solution such as GSM8K's ``… #### 42`` or one with ``\\boxed{…}``."""
    boxes = find_boxes(answer)
    if boxes:
        return strip_wrapping(boxes[-1].content)
    return strip_wrapping(answer.rpartition("####")[2])


def is_number(text: str) -> bool:
    """It is a plain number, with or without a unit."""
    return read_quantity(text) is not None


def decide(truth: str, answer: str, *, accept_unevaluated: bool = False) -> bool | None:
    """The verdict on an answer where it is certain without algebra; ``None`` otherwise.

    Two plain numbers are always decided, exactly. A sum or product where a number is asked for (``12 + 7`` for ``19``)
    is wrong, since it repeats the question, unless ``accept_unevaluated``.
    """
    return equal_forms(read_form(truth), read_form(answer), QuickJudge(accept_unevaluated))


def canonical(answer: str, *, truth: str | None = None) -> str:
    """One spelling for answers that are equal as numbers or as text: ``0.5`` and ``1/2`` are both ``1/2``.

    Args:
        answer: An answer of a response.
        truth: The right one, whose unit (or none) is understood: beside ``12``, ``5`` and ``5 cm`` are one answer.
    """
    unit: Unit | None = None
    if truth is not None:
        wanted = read_form(truth)
        unit = wanted.unit if isinstance(wanted, Scalar) else None
    return _spell(read_form(answer), unit)


def without_nouns(answer: str, truth: str, question: str) -> str:
    """``12 clips`` as ``12`` where the truth is a bare number and the question speaks of clips."""
    found = re.fullmatch(r"(.*[\d}])\s*((?:\s[A-Za-z]{3,}){1,3})", tidy(strip_wrapping(answer)))
    if found is None or not is_number(found[1]):
        return answer
    wanted = read_quantity(truth)
    words = found[2].casefold().split()
    known = set(re.findall(r"[a-z]+", question.casefold()))
    is_context = all((word in known or word.removesuffix("s") in known) and word not in MODIFIERS for word in words)
    return found[1] if wanted is not None and not wanted.unit and is_context else answer


def _spell(form: Form, understood: Unit | None) -> str:
    if isinstance(form, Scalar):
        value = str(form.quantity.value) if form.quantity else form.text
        unit = NONE if understood is not None and (not understood or form.unit & understood) else form.unit
        return f"{value} {min(unit)}" if unit else value
    if isinstance(form, Words):
        return form.text
    if isinstance(form, Name):
        return form.text
    if isinstance(form, Matrix):
        return "; ".join(", ".join(_spell(cell, understood) for cell in row) for row in form.rows)
    parts = [_spell(item, understood) for item in form.items]
    if isinstance(form, Brackets):
        return f"{form.opening}{', '.join(parts)}{form.closing}"
    if isinstance(form, Chain):
        if set(form.relations) == {"="} and isinstance(form.items[0], Name) and form.items[0].is_simple:
            return parts[-1]
        return "".join(f"{part}{relation}" for part, relation in zip(parts, (*form.relations, ""), strict=True))
    return (" : " if form.kind == "ratio" else " , ").join(parts if form.kind == "ratio" else sorted(parts))


def _last_element(text: str) -> tuple[str | None, str]:
    """The content of the last ``<answer>…</answer>`` and what follows it; without one, nothing and the whole text."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start < 0:
        return None, text
    return text[start + len("<answer>") : end], text[end + len("</answer>") :]


def _marked(text: str, markers: Sequence[str], numeric: bool) -> str | None:
    """The last marked answer that has any content."""
    boxes = {box.position: box for box in find_boxes(text)} if "box" in text else {}
    phrases: dict[int, re.Match[str]] = {}
    lowered = text.casefold()
    for marker in markers:
        if marker.casefold() not in lowered:
            continue
        phrases |= {found.start(): found for found in re.finditer(re.escape(marker), text, re.IGNORECASE)}
    # From the end, and not for ever: a response may repeat its marker thousands of times.
    for start in sorted({*boxes, *phrases}, reverse=True)[:MAX_MARKS]:
        if start in boxes:
            answer = _in_words(text, boxes[start], numeric)
            meant = bool(strip_wrapping(boxes[start].content))
        else:
            end = phrases[start].end()
            answer = _segment(text[end : end + MAX_ANSWER_CHARS], numeric)
            meant = bool(answer) and (numeric or phrases[start].group() == "####" or _looks_mathematical(answer))
            meant = meant and (not numeric or re.search(r"\d|\\[A-Za-z]", answer) is not None)
            meant = meant or (not numeric and not boxes and _is_closing(text, end, answer))
            if meant:
                doubted = DOUBTED.search(text[max(0, start - 60) : start]) is not None
                answer = _unless(doubted, answer, corrected(f"_{text[end : end + CONTEXT_CHARS]}"), numeric)
        if meant:
            return answer
    return None


def _in_words(text: str, box: Box, numeric: bool) -> str:
    """The box's answer, unless the words around it deny it or offer something else."""
    before, after = text[max(0, box.start - CONTEXT_CHARS) : box.start], text[box.end : box.end + CONTEXT_CHARS]
    denied = is_changed(before, after) or is_taken_back(after) or is_struck(before) or is_supposed(before, after)
    denied = denied or "?" in box.content[-2:]
    return _unless(denied, strip_wrapping(box.answer), corrected(after), numeric)


def _unless(denied: bool, answer: str, correction: str | None, numeric: bool) -> str:
    """The answer; what the response says in its stead; or that it is denied."""
    instead = None if correction is None else _unmarked(correction, numeric)
    return instead or (f"not {answer}" if denied or correction is not None else answer)


def _is_closing(text: str, end: int, answer: str) -> bool:
    """The text ends in a few words after the marker and holds no formula: ``Answer: New York``."""
    closes = 0 < len(answer.split()) <= 8 and "\n" not in text[end:].strip()
    return closes and _FORMULA.search(text) is None


def _segment(rest: str, numeric: bool) -> str:
    """The answer after a marker: up to the end of its sentence; for numbers, the value it arrives at."""
    rest = rest.lstrip(" \t\r\n:*_=")
    line = _CONTRAST.sub("", rest.split("\n", 1)[0])
    length = _sentence_length(line)
    if re.match(r"[.!?]\s*or\b", line[length:]):
        return line
    formula = _FORMULA.match(line, _FILLER.match(line).end())  # type: ignore[union-attr]
    if formula and _is_formula(_content(formula)):
        after = line[formula.end() : max(length, formula.end())]
        if _JOINED.match(after) or _is_hedged(after) or re.match(r"\s*[\^_!]", after):
            return strip_wrapping(line[:length].replace("$", " "))
        return strip_wrapping(_content(formula) + _changing_words(after))
    sentence = line[:length]
    if not numeric:
        return strip_wrapping(sentence)
    value = strip_wrapping(re.split(r"(?<![<>!])=", sentence)[-1])
    if is_number(value) or "\\" in value:
        return value
    return _number_in(value, first=True) or value


def _number_in(sentence: str, *, first: bool) -> str | None:
    """The first or last number that a sentence speaks of, with what changes it; ``None`` where it has none.

    A number that is denied, hedged, or part of a formula is no answer by itself: then the whole sentence is returned,
    which no grader takes for a number.
    """
    runs = list(_RUN.finditer(sentence))
    if not runs:
        return None
    run = runs[0] if first else runs[-1]
    earlier = runs[-2].end() if len(runs) > 1 and not first else 0
    before = sentence[max(earlier, run.start() - CONTEXT_CHARS) : run.start()]
    after = sentence[run.end() : run.end() + CONTEXT_CHARS]
    if not _BESIDE_BEFORE.search(sentence[max(0, run.start() - 1) : run.start()]):
        return sentence
    attached = re.match(r"[A-Za-z°€£¢]+[²³]?", after)
    if attached and is_number(run.group() + attached.group()) and not _is_hedged(after):
        return f"{run.group()}{attached.group()}" if _BESIDE_AFTER.match(after[attached.end() :]) else sentence
    beside = re.search(r"([A-Za-z]+)\s*$", before)
    if not _BESIDE_AFTER.match(after) or (beside and beside[1].casefold() in CHANGING_BEFORE):
        return sentence
    if (
        _DENIED.search(before)
        or is_denied(before)
        or _DENIED_AFTER.search(after)
        or CHANGED.search(before)
        or is_part(before)
        or _is_hedged(after)
        or _JOINED.match(after)
    ):
        return sentence
    said = re.sub(_HEDGE, "", before)
    if earlier and _HEDGE.search(before.rstrip(" $")[-12:]) and not re.search(r"\w{3,}|\bso\b", said):
        return sentence
    changing = _changing_words(after)
    if changing and re.search(r"\d", after):  # 5 times 6
        return sentence
    return strip_wrapping(run.group() + changing)


def _is_hedged(after: str) -> bool:
    """A second number is offered: ``or 7``, ``maybe 7``."""
    other = re.search(r"\d|\$", after)
    return (
        other is not None
        and re.search(r"\b(?:or|maybe|perhaps|possibly|could|might|vs)\b|\?", after[: other.start()]) is not None
    )


def _changing_words(after: str) -> str:
    """The words directly after a number, up to the one that makes another number of it: ``million``, ``or more``."""
    found = re.match(r"\s*((?:[A-Za-z.']+[ -]*){1,4})", after)
    words = found.group(1).split() if found else []
    for index, word in enumerate(words[:2]):
        plain = word.casefold().strip(".'")
        harmless = plain in _HARMLESS_AFTER and not (plain == "or" and words[index + 1 :])
        if (plain in MODIFIERS and not harmless) or (
            plain in ("percent", "%") and words[index + 1 : index + 2] == ["of"]
        ):
            return " " + " ".join(words[: index + 2])
    return ""


def _unmarked(text: str, numeric: bool) -> str | None:
    """The last formula, fraction or number; the whole text or its last line where the truth is not a number."""
    if numeric:
        text = _LABEL.sub("", _WORKING.sub("", text) if text.rstrip(" .!").endswith(")") else text)
    whole = text.strip()
    is_short = "\n" not in whole and len(whole) <= MAX_ANSWER_CHARS
    if is_short:
        whole = _FORMULA.sub(lambda found: f" {_content(found)} ", whole).strip()
    if is_short and (not _WORD.search(tidy(whole)) or is_number(whole)):
        return strip_wrapping(whole)
    found: list[tuple[int, str]] = []
    for match in list(_FORMULA.finditer(text))[-MAX_MARKS:]:
        content = _content(match)
        if _is_formula(content):
            said = strip_wrapping(content + _changing_words(text[match.end() : match.end() + 40]))
            before = re.split(r"\n|[.!?]\s", text[max(0, match.start() - 80) : match.start()])[-1]
            found.append((match.end(), f"{before} {said}" if is_changed(before) else said))
    if numeric:
        found += [(match.end(), match.group()) for match in _FRACTION.finditer(text)]
        found += _bare_numbers(text)
    if found:
        return max(found, key=lambda item: item[0])[1] or None
    last_line = whole.rsplit("\n", 1)[-1]
    return None if numeric or len(last_line) > MAX_ANSWER_CHARS else strip_wrapping(last_line) or None


def _bare_numbers(text: str) -> list[tuple[int, str]]:
    """The last number of the text, with where it ends."""
    runs = list(_RUN.finditer(text))
    if not runs:
        return []
    last = runs[-1]
    start = text.rfind("\n", 0, last.start()) + 1
    line = text[start : last.end() + 60].split("\n", 1)[0]
    end = last.end() - start + _sentence_length(line[last.end() - start :])
    sentence = re.split(r"[.!?]\s+", line[:end])[-1]
    number = _number_in(re.sub(r"^.*(?<![<>!])=(?=[^=]*\d)", "", sentence), first=False) or ""
    taken_back = corrected(text[last.end() : last.end() + CONTEXT_CHARS]) is not None
    return [(last.end(), f"not {number}" if taken_back else number)]


def _sentence_length(line: str) -> int:
    end = _SENTENCE_END.search(line)
    return end.start() if end else len(line)


def _content(match: re.Match[str]) -> str:
    """Content of a formula: of aligned lines, the last."""
    content = next(group for group in match.groups() if group is not None)
    if r"\begin{align" in content or r"\begin{gather" in content:
        rows = re.split(r"\\\\|\\(?:begin|end)\{[a-z]+\*?\}", content)
        last = next((row for row in reversed(rows) if row.strip()), content)
        content = last.replace("&", " ").strip().removeprefix("=")
    return content


def _is_formula(content: str) -> bool:
    """``$5 and $`` between two prices is not a formula."""
    return "\\" in content or not _WORD.search(content)


def _looks_mathematical(text: str) -> bool:
    return bool(re.search(r"[\d\\$^=]", text)) or len(text) <= 2 or " " not in text
