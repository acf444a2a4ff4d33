"""What a sender of changes has sent so far, and the payloads that tell it to the driver of a run."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemorl.metrics import Mean, Metrics

if TYPE_CHECKING:
    from nemorl_rl.transports.delta.versions import Message


@dataclass(frozen=True, slots=True)
class Counts:
    """Of messages since the sender began."""

    changes: int = 0
    wholes: int = 0
    """Whole weights to those who had none: at the start, or in the place of a lost engine"""
    fallbacks: int = 0
    """Whole weights to those who had some"""
    nbytes: int = 0
    why: str = ""
    """Of the first fallback"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPayload:
    """A transport's payload that brings the counts of its sender, as they were when it was published."""

    counts: Counts = Counts()

    def metrics(self) -> Metrics:
        """For the run."""
        return {"weight_sync_fallbacks": Mean(float(self.counts.fallbacks))}

    def remark(self) -> str | None:
        """For a person, about the first fallback."""
        why = self.counts.why
        return f"an engine was sent the whole weights instead of what has changed: {why}" if why else None


class Counter:
    """Keeps the counts of a sender, and tells its log of the first fallback."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._lock = threading.Lock()

    @property
    def counts(self) -> Counts:
        """So far."""
        return self._counts

    def add(self, who: str, message: Message, asked: str) -> None:
        """One message that is sent.

        Args:
            who: Receives it.
            message: What it is sent.
            asked: What it says kept it from taking changes; empty: nothing, or that it had no weights.
        """
        is_whole, nbytes, why = message.is_whole, message.nbytes, message.why or asked
        is_fallback = is_whole and bool(why)
        with self._lock:
            old, is_first = self._counts, is_fallback and not self._counts.why
            self._counts = Counts(
                old.changes + (not is_whole),
                old.wholes + (is_whole and not is_fallback),
                old.fallbacks + is_fallback,
                old.nbytes + nbytes,
                f"{who}: {why}" if is_first else old.why,
            )
        if is_first:
            text = f"nemorl: {who} is sent the whole weights instead of what has changed: {why}"
            print(text, file=sys.stderr, flush=True)  # the worker's log
