"""A ``multiprocessing`` spawn context whose processes do not run the user's script again.

Spawned processes import the parent's main module, so a training script without ``if __name__ == "__main__"`` would
start over inside the first grader, in the middle of a run. Graders need nothing from it. Forking is no way out: the
parent holds CUDA, Ray and a dozen threads. The standard library has no switch for this (joblib's loky carries its
own spawn for the same reason), hence one filter on what a process is told about its parent, active only in the
thread that starts a grader and only while it does.
"""

from __future__ import annotations

import threading
from multiprocessing import spawn
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

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
    """Pass it where a multiprocessing context goes. Targets must live in importable modules, not in ``__main__``."""

    Process = _GraderProcess
