"""What runs inside a grader process. Imports math-verify; the training process never imports this module's needs."""

from __future__ import annotations

import logging
import signal
import sys
from typing import Literal

Verdict = Literal["right", "wrong", "unparsable"]


def prepare(memory_gib: float) -> None:
    """Start-up of a worker, before its first answer, so that imports do not eat into an answer's time."""
    # A Python-level handler never runs while C code computes 9**9**9; the default one ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform != "win32":
        import resource

        # Such a power can also fill the machine's memory well within the time limit.
        limit = int(memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    import math_verify  # noqa: F401

    # It warns once per process that its own timeout is off. The pool's timeout replaces it.
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def ready() -> bool:
    """Answered by a worker that has started."""
    return True


def grade(truth: str, answer: str) -> Verdict:
    """Compare two answers by algebra: ``x^2+2x+1`` is ``(x+1)^2``, ``0.333333`` is ``1/3`` to six places."""
    from math_verify import verify

    # math-verify's own timeout is a SIGALRM, which the process pool makes unnecessary.
    expected, given = _parse(truth), _parse(answer)
    if not given:
        return "unparsable"
    return "right" if verify(expected, given, timeout_seconds=None) else "wrong"


def _parse(text: str) -> list[object]:
    """As a formula, or failing that as plain text."""
    from math_verify import parse

    bare = text.strip().strip("$")
    for candidate in (f"${bare}$", text):
        parsed: list[object] = parse(candidate, parsing_timeout=None)
        if any(not isinstance(item, str) for item in parsed):
            return parsed
    return []
