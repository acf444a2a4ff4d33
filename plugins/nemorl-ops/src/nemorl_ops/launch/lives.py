"""A job that is started again and again has to get on: what is paid for twice at the same step is not paid for again.

Launchers that start a run anew by themselves note its lives beside its directory, in ``<run_dir>.lives.jsonl``: where
each began, by the last step that the run had logged or saved by then, and whether somebody asked it to stop.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from nemorl.base.files.jsonl import read_jsonl
from nemorl.errors import ResourceError

FAILED, ALL = 2, 5
"""Lives in a row without progress after which no other begins: that failed, and also such as were asked to stop, since
preemption is nobody's fault, and a time limit shorter than a step is somebody's."""


class Lives:
    """Of one launch."""

    def __init__(self, run_dir: Path, launch: str) -> None:
        """
        Args:
            run_dir: Of the run.
            launch: Names the submission: whoever submits again begins anew.
        """
        self._run_dir, self._launch = run_dir, launch
        self._path = run_dir.with_name(f"{run_dir.name}.lives.jsonl")

    def begin(self) -> None:
        """Note that a life begins.

        Raises:
            ResourceError: The lives before it got nowhere.
        """
        step, before = self._last_step(), list(self._noted())
        # A life that began here and is over got nowhere: the one at hand begins at the same step.
        idle = list(takewhile(lambda life: life["begun"] == step, reversed(before)))
        failed = list(takewhile(lambda life: not life["asked"], idle))
        if len(failed) >= FAILED or len(idle) >= ALL:
            lives = len(failed) if len(failed) >= FAILED else len(idle)
            raise ResourceError(
                f"the run was started {lives} times at step {step}, and ended each time without another step",
                fix=f"see {self._run_dir}/events.jsonl and the logs for why; submit it again once that is mended",
            )
        self._note({"begun": step})

    def asked(self) -> None:
        """Note that the life at hand was asked to stop."""
        self._note({"asked": True})

    def _note(self, fact: dict[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps({"launch": self._launch, **fact}) + "\n")

    def _noted(self) -> Iterator[dict[str, Any]]:
        """The lives of this launch, from the first."""
        life: dict[str, Any] | None = None
        for fact in read_jsonl(self._path) if self._path.is_file() else ():
            if fact.get("launch") == self._launch and "begun" in fact:
                if life is not None:
                    yield life
                life = {"begun": fact["begun"], "asked": False}
            elif fact.get("launch") == self._launch and life is not None:
                life["asked"] = True
        if life is not None:
            yield life

    def _last_step(self) -> int:
        """The last step that was logged or saved; 0 before the first."""
        metrics = self._run_dir / "metrics.jsonl"
        logged = (record.get("step") for record in (read_jsonl(metrics) if metrics.is_file() else ()))
        saved = (path.name[5:] for path in (self._run_dir / "checkpoints").glob("step_*"))
        steps = [step for step in logged if isinstance(step, int)] + [int(name) for name in saved if name.isdigit()]
        return max(steps, default=0)
