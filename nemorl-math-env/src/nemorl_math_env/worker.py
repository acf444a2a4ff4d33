"""A grader process: the functions that run in it, and a start that does not run the user's script again."""

from __future__ import annotations

import signal
import sys
import threading
from multiprocessing import spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, Literal

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


# Spawned processes import the parent's main module, so a training script without `if __name__ == "__main__"` would
# start over inside the first grader, in the middle of a run. Graders need nothing from it. Forking is no way out: the
# parent holds CUDA, Ray and a dozen threads. The standard library has no switch for this (joblib's loky carries its own
# spawn for the same reason), hence one filter on what a process is told about its parent, active only in the thread
# that starts a grader and only while it does.


_here = threading.local()
_preparation_data = spawn.get_preparation_data


def _without_main(name: str) -> dict[str, Any]:
    data: dict[str, Any] = dict(_preparation_data(name))
    if getattr(_here, "starting_grader", False):
        data.pop("init_main_from_path", None)
        data.pop("init_main_from_name", None)
    return data


spawn.get_preparation_data = _without_main  # type: ignore[assignment]


class _GraderProcess(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        _here.starting_grader = True
        try:
            return SpawnProcess._Popen(process_obj)  # type: ignore[attr-defined]
        finally:
            _here.starting_grader = False


class GraderContext(SpawnContext):
    """A spawn context for graders: targets must live in importable modules, not in ``__main__``."""

    Process = _GraderProcess
