"""Every file operation of commands that handle runs fails once, in every way it can, and the command is called again.

``python command_sweep.py FOLDER`` sweeps all of them, with the options of ``file_sweep.py``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from faulty_files import Fault, build, has_struck, operations
from lives import SIZES, files
from nemorl.base.files.checkpoints import Checkpoint
from nemorl.base.files.sealed_folders import MANIFEST
from nemorl.errors import CheckpointError
from nemorl_ops.replicate.transfer import is_whole
from nemorl_rl.models.tiny import write_tiny_model
from sweeping import KILLED, Played
from warm import HUNG, Warm

DEADLINE_S = 120.0
RUN, PLACE = "{folder}/run", "{folder}/place"
COMMANDS: dict[str, tuple[str, ...]] = {
    "copy": ("runs", "copy", RUN, PLACE),
    "prune": ("runs", "prune", RUN, "--keep", "1", "--keep-best", "0"),
    "verify": ("runs", "verify", RUN),
    "export": ("export", RUN, PLACE, "cluster.launcher=local"),
}
MAY_DIFFER = ("run.lock",)
"""Files that say who used the run last."""


class CommandSweep:
    """Runs cases in a folder; a run, and what each command makes of it undisturbed, are there first."""

    def __init__(self, folder: Path) -> None:
        self._whole, self._work = folder / "whole", folder / "work"
        self._trace, self._said = folder / "command.trace", folder / "command.said"
        for left in (self._whole, self._work):
            shutil.rmtree(left, ignore_errors=True)
        self._whole.mkdir(parents=True)
        model = str(write_tiny_model(folder / "tiny", **SIZES))
        first = {"model": model, "run_dir": str(self._whole / "run"), **files(folder)}
        look = [_told("verify", self._whole), _told("copy", self._whole)]
        self._forks = Warm("tiny_commands:prepared", {"commands": look, **first}, preload=build(folder))
        assert self._call("verify", where=self._whole) == 0, self._text()
        self._wanted = {name: self._undisturbed(name) for name in COMMANDS}

    def places(self, name: str) -> list[tuple[str, int]]:
        """The file operations of a command."""
        self._begin()
        self._call(name)
        return operations(self._trace)

    def problems(self, name: str, fault: Fault) -> list[str] | None:
        """What went wrong when a fault met a command, and in calling it again; ``None`` where the fault never came."""
        self._begin()
        end = self._call(name, fault)
        if not has_struck(self._trace):
            return None
        found = [*self._bad_end(end)]
        found += [*self._halves()]
        is_exported = name == "export" and (self._work / "place").exists()  # and refused from now on
        if is_exported or (end == 0 and name != "prune"):
            return [*found, *self._differences(name)]
        if (again := self._call(name)) != 0:
            return [*found, f"does not work afterwards ({again}): {self._text()}"]
        return [*found, *self._differences(name)]

    def close(self) -> None:
        self._forks.__exit__()

    def _undisturbed(self, name: str) -> dict[str, str]:
        self._begin()
        assert self._call(name) == 0, self._text()
        return _content(self._work)

    def _begin(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        shutil.copytree(self._whole / "run", self._work / "run")

    def _call(self, name: str, fault: Fault | None = None, *, where: Path | None = None) -> int | str:
        for path in (self._trace, self._said):
            path.unlink(missing_ok=True)
        told = {"arguments": _told(name, where or self._work), "folder": str(self._work), "trace": str(self._trace)}
        told |= {"fault": asdict(fault) if fault else None}
        return self._forks.run("tiny_commands:command", told, said=self._said, deadline_s=DEADLINE_S)

    def _bad_end(self, end: int | str) -> Iterator[str]:
        """An end other than a good one, a kill, and an error of ours that says what, where and how to fix it."""
        text = self._text()
        if end == HUNG:
            yield f"hung for {DEADLINE_S:g} s"
        elif end not in (0, KILLED) and not (end in (1, 2) and str(self._work) in text.replace("\n", "")):
            yield f"ended with {end}: {text}"
        elif end == 2 and "fix: " not in text:
            yield f"does not say how to fix it: {text}"

    def _differences(self, name: str) -> Iterator[str]:
        wanted, found = self._wanted[name], _content(self._work)
        for path in sorted({*wanted, *found}):
            if wanted.get(path) != found.get(path):
                yield f"{path}: {'missing' if path not in found else 'left' if path not in wanted else 'other'}"

    def _halves(self) -> Iterator[str]:
        """A checkpoint has a manifest, in the run or in its copy, and is not whole."""
        for manifest in self._work.glob(f"*/checkpoints/step_*/{MANIFEST}"):
            try:
                if is_whole(json.loads(manifest.read_text())):
                    Checkpoint.read(manifest.parent).verify()
            except ValueError:
                continue  # a part of a manifest is none
            except CheckpointError as error:
                yield f"a half checkpoint has a manifest: {error}"

    def _text(self) -> str:
        return self._said.read_text(errors="replace")[-1500:]


def _told(name: str, folder: Path) -> list[str]:
    return [part.replace("{folder}", str(folder)) for part in COMMANDS[name]]


def _content(folder: Path) -> dict[str, str]:
    """Each file below it, hidden ones too; of safetensors the tensors alone, whose metadata have no fixed order."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in MAY_DIFFER:
            content = path.read_bytes()
            if path.suffix == ".safetensors":
                content = content[8 + int.from_bytes(content[:8], "little") :]
            found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    played = Played.asked(__doc__, COMMANDS, "command", arguments)
    sweep = CommandSweep(played.folder)
    played.sweep(sweep.places, sweep.problems)
    sweep.close()
    sys.exit(played.has_failed)


if __name__ == "__main__":
    main()
