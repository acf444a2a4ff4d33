"""The folder of one episode: what is put into it, and its end."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemorl.base.files.jsonl import dumps
from nemorl.base.files.owned_folders import mark
from nemorl.base.text.suggest import did_you_mean
from nemorl.errors import DataError
from nemorl.types import Prompt

TASK = "task.json"
_PLACEHOLDER = re.compile(r"\{prompt\}|\{row\[([^\]]+)\]\}")


class EpisodeFolder:
    """``work`` is where the program runs; beside it are its home, its temporary files and its task."""

    def __init__(self, keep_in: Path | None, episode_id: str) -> None:
        name = re.sub(r"[^\w.-]+", "-", episode_id)
        if keep_in is not None:
            keep_in.mkdir(parents=True, exist_ok=True)
        self._is_kept = keep_in is not None
        self.root = Path(tempfile.mkdtemp(prefix=f"nemorl-agent-{name}-", dir=keep_in)).resolve()
        if not self._is_kept:
            mark(self.root)
        self.work, self.home, self.temporary = (self.root / part for part in ("work", "home", "tmp"))
        for folder in (self.work, self.home, self.temporary):
            folder.mkdir()
        self.task = self.root / TASK

    def fill(
        self, prompt: Prompt, columns: Mapping[str, Any], files: Mapping[str, str], copies: Sequence[Path]
    ) -> None:
        """Write the task, and what else the program finds.

        Raises:
            DataError: The row lacks a column, or a file would lie elsewhere.
        """
        for source in copies:
            target = self.work / source.name
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                shutil.copy(source, target)
        for name, column in files.items():
            target = self.work / name
            if ".." in Path(name).parts or Path(name).is_absolute():
                raise DataError(f"file {name!r} would lie outside the agent's folder", fix="correct environment.files")
            target.parent.mkdir(parents=True, exist_ok=True)
            value = _column(columns, column)
            target.write_bytes(value.encode() if isinstance(value, str) else dumps(value))
        task = {"prompt": prompt.text, "messages": [dict(message) for message in prompt.messages], "row": dict(columns)}
        self.task.write_bytes(dumps(task))

    def keep(self, stdout: str, stderr: str) -> None:
        """Where folders are kept: the output beside the work."""
        if self._is_kept:
            (self.root / "stdout.txt").write_text(stdout, encoding="utf-8", errors="replace")
            (self.root / "stderr.txt").write_text(stderr, encoding="utf-8", errors="replace")

    def remove(self) -> None:
        """Unless folders are kept."""
        if self._is_kept:
            return
        shutil.rmtree(self.root, onerror=_insist)


def _insist(remove: Any, path: str, _error: object) -> None:
    """Make readable, once, what an agent made unreadable; what then still resists is left in the temporary folder."""
    try:
        for folder in (Path(path).parent, Path(path)):
            if folder.is_dir() and not folder.is_symlink():
                folder.chmod(0o700)
        if Path(path).is_dir() and not Path(path).is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            remove(path)
    except OSError:
        return


def filled_in(argument: str, prompt: Prompt, columns: Mapping[str, Any]) -> str:
    """``{prompt}`` and ``{row[column]}`` replaced; all other braces are left alone.

    >>> filled_in('{"q": "{prompt}"}', Prompt(0, "2+2", ()), {})
    '{"q": "2+2"}'
    """

    def value(found: re.Match[str]) -> str:
        column = found[1]
        return prompt.text if column is None else str(_column(columns, column))

    return _PLACEHOLDER.sub(value, argument)


def visible_columns(prompt: Prompt, hidden: Sequence[str]) -> dict[str, Any]:
    """The columns of a row that an agent may see."""
    return {name: value for name, value in prompt.row.items() if name not in hidden}


def _column(columns: Mapping[str, Any], name: str) -> Any:
    if name not in columns:
        fix = did_you_mean(name, columns) or f"use one of {', '.join(columns) or 'the columns of the data'}"
        raise DataError(f"the row has no column {name!r} that an agent may see", fix=fix)
    return columns[name]
