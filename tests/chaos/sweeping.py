"""What the sweeps of faults share: which cases are played, in which order, and what is kept of each."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from faulty_files import Fault, faults_at

KILLED = 137
"""The end of a process that was killed."""


@dataclass
class Played:
    """Cases that a call of a sweep plays; those in its folder's ``results.jsonl`` were played before."""

    folder: Path
    kinds: tuple[str, ...]
    only: str
    share: tuple[int, int]
    left: int
    has_failed: bool = False

    @classmethod
    def asked(cls, about: str | None, kinds: Iterable[str], kind: str, arguments: Sequence[str] | None) -> Played:
        """Of a command line.

        Args:
            about: What the command does.
            kinds: What can be swept.
            kind: The option that names some of it.
            arguments: Unset: those of this process.
        """
        parser = argparse.ArgumentParser(description=about)
        parser.add_argument("folder", type=Path)
        parser.add_argument(f"--{kind}", choices=(every := tuple(kinds)), action="append", dest="kinds")
        parser.add_argument("--only", default="", help="cases whose description contains this text")
        parser.add_argument("--share", default="0/1", metavar="K/N", help="one of N equal shares")
        parser.add_argument("--most", type=int, default=10**9, help="cases at most")
        asked = parser.parse_args(arguments)
        first, of = map(int, asked.share.split("/"))
        return cls(asked.folder.resolve(), tuple(asked.kinds or every), asked.only, (first, of), asked.most)

    def sweep(
        self,
        places: Callable[[str], list[tuple[str, int]]],
        problems: Callable[[str, Fault], list[str] | None],
    ) -> None:
        """Play them in a random order, and write one line per case.

        Args:
            places: Operations of a kind that can fail.
            problems: What went wrong when one did; ``None``: it never came.
        """
        results = self.folder / "results.jsonl"
        done = {json.loads(line)["case"] for line in results.read_text().splitlines()} if results.exists() else set()
        for kind in self.kinds:
            faults = list(faults_at(places(kind)))
            random.Random(0).shuffle(faults)
            for fault in faults:
                case = f"{kind}: {fault}"
                if case in done or not self._is_ours(case):
                    continue
                self.left -= 1
                found = problems(kind, fault)
                with results.open("a") as file:
                    file.write(json.dumps({"case": case, "struck": found is not None, "problems": found or []}) + "\n")
                if found:
                    self.has_failed = True
                    print(case, *found, sep="\n    ", flush=True)

    def _is_ours(self, case: str) -> bool:
        first, every = self.share
        is_of_share = crc32(case.encode()) % every == first  # by its name: two runs may differ in an operation
        return is_of_share and self.only in case and self.left > 0
