"""Every file operation of a run fails once, in every way it can, and the run is continued (as SQLite tests itself).

``python file_sweep.py FOLDER`` sweeps all of them and writes one line per case to ``FOLDER/results.jsonl``; begun again
it goes on where it was. ``--only 'TEXT'`` takes the cases whose description contains a text, ``--share 0/2`` a half
of them: another process, with a folder of its own, takes the others.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faulty_files import Fault, has_struck, operations
from lives import SIZES, warm
from nemorl_rl.models.tiny import write_tiny_model
from run_checks import broken_promises, differences
from sweeping import KILLED, Played
from warm import HUNG, Warm

DEADLINE_S = 300.0
"""Of one life, which takes a second: what has not ended by then hangs."""


@dataclass(frozen=True)
class Story:
    """What a run has been through when the fault comes, and how its life then is: arguments of ``tiny_runs.train``."""

    before: tuple[dict[str, Any], ...] = ()
    then: dict[str, Any] = field(default_factory=dict)
    always: dict[str, Any] = field(default_factory=dict)
    """In every life, that after the fault too."""


STORIES = {
    "new": Story(),
    "saving beside the step": Story(always={"subject": "saving beside the step"}),
    "continued": Story(before=({"stop_after": 2},)),
    "gone back": Story(before=({"stop_after": 3},), then={"from_step": 2}),
    "after a kill": Story(before=({"fault": asdict(Fault("rename checkpoints/.writing_step_#", 3, "killed before"))},)),
}


class FileSweep:
    """Runs cases in a folder; the undisturbed run is made first."""

    def __init__(self, folder: Path, forks: Warm) -> None:
        self.folder, self.forks = folder, forks
        folder.mkdir(parents=True, exist_ok=True)
        self.model = write_tiny_model(folder / "tiny", **SIZES)
        self.whole = folder / "whole"
        for left in (self.whole, *folder.glob("before *")):
            shutil.rmtree(left, ignore_errors=True)
        assert self._live(self.whole, {}) == 0, self._said(self.whole)

    def places(self, story: str) -> list[tuple[str, int]]:
        """The operations of a story's last life."""
        place = self._prepared(story)
        self._live(place, {**STORIES[story].always, **STORIES[story].then})
        return operations(place.with_suffix(".trace"))

    def problems(self, story: str, fault: Fault) -> list[str] | None:
        """What went wrong when a fault met a story, and in continuing; ``None`` where the fault never came."""
        place, always = self._prepared(story), STORIES[story].always
        end = self._live(place, {**always, **STORIES[story].then, "fault": asdict(fault)})
        if not has_struck(place.with_suffix(".trace")):
            return None
        found = [*self._bad_end(place, end), *broken_promises(place)]
        if end != 0:
            again = self._live(place, always)
            if again != 0:
                return [*found, f"could not be continued ({again}): {self._said(place)}"]
        may_lack = "kill" in fault.mode or fault.mode == "full from here"
        differing = list(differences(self.whole, place, records_may_lack=may_lack))
        if end == 0 and differing and all(what.startswith("left behind") for what in differing):
            self._live(place, always)  # what a run could not remove, its next owner does
            differing = list(differences(self.whole, place, records_may_lack=may_lack))
        return [*found, *differing]

    def _prepared(self, story: str) -> Path:
        """A run that has been through what precedes the fault: a copy of one that was made once."""
        template, place = self.folder / f"before {story}", self.folder / "run"
        for path in self.folder.glob("run*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if STORIES[story].before and not template.exists():
            for life in STORIES[story].before:
                end = self._live(place, {**STORIES[story].always, **life})
                assert end in (0, KILLED), self._said(place)
            shutil.copytree(place, template)
            return self._prepared(story)
        if template.exists():
            shutil.copytree(template, place)
        return place

    def _live(self, place: Path, changes: dict[str, Any]) -> int | str:
        for suffix in (".trace", ".outcome", ".said"):
            place.with_suffix(suffix).unlink(missing_ok=True)
        arguments = {**self._arguments(place), **changes}
        return self.forks.run("tiny_runs:train", arguments, said=place.with_suffix(".said"), deadline_s=DEADLINE_S)

    def _arguments(self, place: Path) -> dict[str, str]:
        names = {"trace": place.with_suffix(".trace"), "outcome": place.with_suffix(".outcome"), "run_dir": place}
        return {"model": str(self.model), **{name: str(path) for name, path in names.items()}}

    def _bad_end(self, place: Path, end: int | str) -> Iterator[str]:
        """An end other than a good one, a kill, and an error that says what, why and how to fix it."""
        if end == HUNG:
            yield f"hung for {DEADLINE_S:g} s"
        elif end == 2:
            said = json.loads(place.with_suffix(".outcome").read_text())
            if "fix: " not in said["text"] or str(place) not in said["text"]:
                yield f"does not say what, where and how to fix it: {said}"
        elif end not in (0, KILLED):
            yield f"ended with {end}: {self._said(place)}"

    def _said(self, place: Path) -> str:
        outcome = place.with_suffix(".outcome")
        said = outcome.read_text() if outcome.exists() else ""
        return f"{said} {place.with_suffix('.said').read_text()[-1500:]}"


def main(arguments: Sequence[str] | None = None) -> None:
    played = Played.asked(__doc__, STORIES, "story", arguments)
    with warm(played.folder) as forks:
        sweep = FileSweep(played.folder, forks)
        played.sweep(sweep.places, sweep.problems)
    sys.exit(played.has_failed)


if __name__ == "__main__":
    main()
