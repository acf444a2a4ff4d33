"""The facts of an episode when it is scored, and how its answer is found."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemorl_rl.agents.contract import ChatMessage
from nemorl_rl.agents.outcomes import Ending

MAX_ANSWER_BYTES = 1 << 20
COLUMN = "episode"
"""Under this name a reward function may ask for the :class:`Episode`, as for a column of the row."""


@dataclass(frozen=True)
class Episode:
    """One episode, as a reward function gets it: ``def reward(prompt, response, episode)``.

    >>> Episode("finished", stdout="thinking\\n42\\n").last_line
    '42'
    """

    outcome: Ending
    returncode: int | None = None
    """Of the program; below 0: ended by that signal. ``None``: it was ended at its deadline, or there is none."""
    stdout: str = ""
    """The end of it."""
    stderr: str = ""
    """The end of it."""
    messages: Sequence[ChatMessage] = ()
    """The policy's, in the order in which they were answered."""
    folder: Path | None = None
    """Where the program ran, while the reward is computed. What lies in it is the agent's: see ``read``."""

    @property
    def last_line(self) -> str:
        """The last line of standard output that is not empty."""
        return next((line.strip() for line in reversed(self.stdout.splitlines()) if line.strip()), "")

    @property
    def last_message(self) -> str:
        """The text of the policy's last message that has any."""
        return next((str(m["content"]) for m in reversed(self.messages) if m.get("content")), "")

    @property
    def files(self) -> Mapping[str, int]:
        """Regular files of the folder and their sizes in bytes; links are not followed."""
        found: dict[str, int] = {}
        for folder, _, names in os.walk(self.folder) if self.folder is not None else ():
            for name in names:
                path = Path(folder, name)
                status = path.lstat()
                if self.folder is not None and stat.S_ISREG(status.st_mode):
                    found[path.relative_to(self.folder).as_posix()] = status.st_size
        return found

    def read(self, name: str, max_bytes: int = MAX_ANSWER_BYTES) -> str:
        """A file's text, its first ``max_bytes``; empty where there is none. Links are not followed: they may lead
        anywhere."""
        if self.folder is None or not (self.folder / name).is_relative_to(self.folder) or ".." in Path(name).parts:
            return ""
        if any((self.folder / part).is_symlink() for part in Path(name).parents):
            return ""
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return ""
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return ""
            return file.read(max_bytes).decode("utf-8", "replace")

    def answer(self, where: str) -> str:
        """The final answer: ``stdout`` (its last line), ``last_message``, or ``file:NAME``."""
        if where.startswith("file:"):
            return self.read(where.removeprefix("file:")).strip()
        return self.last_line if where == "stdout" else self.last_message
