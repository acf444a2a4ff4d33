"""The transport ``delta_folder``: changes of the weights as files of a folder that trainer and engines share.

For engines that reach the trainer's node by a file system alone: another cluster over a mounted bucket, a container
without a network. The folder's name stands in the variable ``NEMORL_WEIGHTS_FOLDER``; each sender has one of its own
there, and removes it when it closes:

- ``000007.changes``: from version 6 to 7; ``000007.whole``: all of 7. The first version is whole, others where somebody
  asks;
- ``asks/ID.json``: what an engine wants that has no use for the changes; ``ID.done``: it is there, or why it is not.

Files appear whole or not at all. The sender keeps those of two versions.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from nemorl.base.files.atomic import listed, remove, replace_text, replacing
from nemorl.errors import BackendError, UsageError, WeightsLostError
from nemorl.weights import Export

from nemorl_rl.transports.delta.counts import CountedPayload, Counter

if TYPE_CHECKING:
    from torch import Tensor

    from nemorl_rl.transports.delta.bases import Bases

VARIABLE = "NEMORL_WEIGHTS_FOLDER"
POLL_S = 0.05
"""How often either side looks for the other's files."""
STALE_S = 0.5
"""How long what a reader was sure to find may be hidden by the cache of a file system."""
ASKS = "asks"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderPayload(CountedPayload):
    """Where one version lies."""

    sender: str
    """Its folder"""
    number: int
    """Of the version, among the sender's"""
    deadline_s: float
    """Longest wait of an engine for an answer"""


class DeltaFolder:
    """Either end (see ``WeightTransport``)."""

    def __init__(self, deadline_s: float, bases: Bases | None = None) -> None:
        """
        Args:
            deadline_s: Longest wait of an engine for an answer.
            bases: What was fetched before. Unset: by this process.
        """
        self._deadline_s, self._bases = deadline_s, bases
        self._writer: _Writer | None = None

    def publish(self, export: Export) -> FolderPayload:
        if self._writer is None:
            self._writer = _Writer(own_folder())
        number = self._writer.publish(export)
        return FolderPayload(
            counts=self._writer.counter.counts,
            sender=str(self._writer.folder),
            number=number,
            deadline_s=self._deadline_s,
        )

    def fetch(self, payload: FolderPayload) -> Iterator[Mapping[str, Tensor]]:
        from nemorl_rl.transports.delta.bases import OF_PROCESS

        bases = OF_PROCESS if self._bases is None else self._bases
        return bases.fetch(payload.sender, payload.number, partial(_asked, payload))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def own_folder() -> Path:
    """A new folder for a sender.

    Raises:
        UsageError: Nobody has said where.
    """
    shared = os.environ.get(VARIABLE)
    if not shared:
        raise UsageError(
            f"delta_folder has no folder: {VARIABLE} is unset in the trainer's process",
            fix=f"set cluster.env_vars: {{{VARIABLE}: /a/folder/that/trainer/and/engines/share}}",
        )
    return Path(shared).expanduser().absolute() / f"weights-{secrets.token_hex(8)}"


class _Writer:
    """The sender's side."""

    def __init__(self, folder: Path) -> None:
        from nemorl_rl.transports.delta.versions import KeptVersions

        self.folder, self.counter = folder, Counter()
        self._kept = KeptVersions()
        self._ended = threading.Event()
        (folder / ASKS).mkdir(parents=True)
        self._thread = threading.Thread(target=self._answer_all, name="nemorl-delta-folder", daemon=True)
        self._thread.start()

    def publish(self, export: Export) -> int:
        from nemorl_rl.transports.delta.versions import KEPT_VERSIONS

        number = self._kept.publish(export)
        self._write(number, number - 1 if number > 1 else None)
        for old in self.folder.glob("[0-9]*.*"):
            if int(old.stem) <= number - KEPT_VERSIONS:
                remove(old)
        return number

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        remove(self.folder)

    def _write(self, number: int, base: int | None, who: str = "the folder", why: str = "") -> None:
        message = self._kept.message(number, base)
        self.counter.add(who, message, why)
        with replacing(_file(self.folder, number, is_whole=message.is_whole)) as file:
            for part in message.parts:
                file.write(part)

    def _answer_all(self) -> None:
        while not self._ended.wait(POLL_S):
            with suppress(OSError):  # the file system refuses: whoever asks is told by its deadline, or by the next try
                for ask in listed(self.folder / ASKS, "*.json"):
                    self._answer(ask)

    def _answer(self, ask: Path) -> None:
        from nemorl_rl.transports.delta.versions import GoneError

        answer: str | None = None
        try:
            request = json.loads(ask.read_text())
            there = _file(self.folder, request["version"], is_whole=True)
            if request["why"] or not there.exists():
                self._write(request["version"], None, request["who"], request["why"])
        except (OSError, ValueError, KeyError, GoneError) as error:
            answer = f"{type(error).__name__}: {error}"
        try:
            replace_text(ask.with_suffix(".done"), json.dumps({"gone": answer}))
        finally:
            remove(ask)


def _file(folder: Path, number: int, *, is_whole: bool) -> Path:
    return folder / f"{number:06}.{'whole' if is_whole else 'changes'}"


@contextmanager
def _asked(payload: FolderPayload, base: int | None, why: str) -> Iterator[BinaryIO]:
    """See ``Ask``. Changes are there for all; what one engine needs beyond is written for it."""
    path = _file(Path(payload.sender), payload.number, is_whole=base is None)
    if base is None and (why or not path.exists()):
        _ask(path.parent, payload, why)
    with _opened(path) as file:
        yield file


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    from nemorl_rl.transports.delta.changes import DamageError

    limit_s = time.monotonic() + STALE_S
    while True:
        try:
            file = path.open("rb")
            break
        except OSError as error:
            if time.monotonic() > limit_s:
                raise DamageError(f"{path.name} cannot be read: {error.strerror}") from error
            time.sleep(POLL_S)
    with file:
        yield file


def _ask(folder: Path, payload: FolderPayload, why: str) -> None:
    """Have the whole weights written.

    Raises:
        WeightsLostError: The sender is gone, or does not answer.
        BackendError: It cannot.
    """
    who = f"{socket.gethostname()}, process {os.getpid()}"
    ask = folder / ASKS / f"{secrets.token_hex(8)}.json"
    done, limit_s = ask.with_suffix(".done"), time.monotonic() + payload.deadline_s
    lost = WeightsLostError(
        f"nobody writes the trainer's weights to {folder}",
        fix=f"the trainer has ended, or {VARIABLE} names a folder that this node does not share with it",
    )
    if not folder.is_dir():
        raise lost
    replace_text(ask, json.dumps({"version": payload.number, "who": who, "why": why}))
    while not done.exists():
        if time.monotonic() > limit_s or not folder.is_dir():
            raise lost
        time.sleep(POLL_S)
    gone = json.loads(done.read_text())["gone"]
    remove(done)
    if gone is not None:
        raise BackendError(gone, fix="fetch each version before the next but one is published")
