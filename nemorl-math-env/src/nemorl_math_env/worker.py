"""Functions that run inside a grader process."""

from __future__ import annotations

import signal
import sys
from typing import Literal

Verdict = Literal["right", "wrong", "unparsable"]


def prepare(memory_gib: float) -> None:
    """Start-up of a worker, before its first answer, so that imports do not eat into an answer's time."""
    # A Python-level handler never runs while C code computes a huge power; the default one ends the process at once.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform != "win32":
        import resource

        # Such a power can also fill the machine's memory well within the time limit.
        limit = int(memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    import nemorl_math_env.values  # noqa: F401


def ready() -> bool:
    """Answered by a worker that has started."""
    return True


def grade(truth: str, answer: str) -> Verdict:
    """Compare two answers by algebra: ``x^2+2x+1`` is ``(x+1)^2``, ``0.333333`` is ``1/3`` to six places."""
    return _grade(truth, answer, accept_unevaluated=False)


def grade_unevaluated(truth: str, answer: str) -> Verdict:
    """The same, with ``12 + 7`` as good as ``19``."""
    return _grade(truth, answer, accept_unevaluated=True)


def _grade(truth: str, answer: str, *, accept_unevaluated: bool) -> Verdict:
    from nemorl_math_env.comparison import equal_forms
    from nemorl_math_env.forms import read_form
    from nemorl_math_env.judges import AlgebraJudge

    is_right = equal_forms(read_form(truth), read_form(answer), AlgebraJudge(accept_unevaluated))
    return "right" if is_right else "wrong"
