"""Receipts for weights: what an engine says that it holds, against what was sent.

A sync that asks for one carries a digest per tensor; the engine answers with digests of its own memory. Digests are
exact: a difference is a fault, and :func:`compare` says which. Where a tensor cannot be compared (rounded, packed for a
kernel), the log-probs of a few tokens stand in, which are numbers of two programs and equal up to rounding only.
Asking engines and the trainer is the affair of ``proving``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemorl.weights import Digest

NAMED = 5
"""Tensors that a message names."""
PROBE = "the log-probs of the probe"
"""Named among faults where no tensor is."""


@dataclass(frozen=True)
class Probe:
    """Log-probs of the same tokens, in nats."""

    trainer: tuple[float, ...]
    engine: tuple[float, ...]

    @property
    def gap(self) -> float:
        """Mean distance; infinite where one of them is no number."""
        distances = [abs(mine - its) for mine, its in zip(self.trainer, self.engine, strict=True)]
        mean = sum(distances) / max(len(distances), 1)
        return mean if math.isfinite(mean) else math.inf

    def is_stuck(self, before: Probe | None) -> bool:
        """The trainer's have moved since, and the engine's are the same to the last bit."""
        return before is not None and self.trainer != before.trainer and self.engine == before.engine


@dataclass(frozen=True)
class Receipt:
    """What is known of one version in all replicas of the engine."""

    version: int
    proven: int = 0
    """Tensors that every replica holds as they were sent."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Tensors that one holds otherwise, and what has likely happened."""
    incomparable: Mapping[str, str] = field(default_factory=dict)
    """Tensors that have no digest, and why."""
    probe_gap: float | None = None
    """Mean distance of the probe's log-probs, in nats, in the worst replica; ``None``: it was not asked."""

    @property
    def is_proven(self) -> bool | None:
        """``None`` where nothing contradicts and not everything was compared."""
        if self.faults:
            return False
        compared = self.proven > 0 and not self.incomparable
        return True if compared or self.probe_gap is not None else None

    def facts(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "version": self.version,
            "is_proven": self.is_proven,
            "proven": self.proven,
            "faults": dict(list(self.faults.items())[:NAMED]),
            "num_faults": len(self.faults),
            "incomparable": dict(list(self.incomparable.items())[:NAMED]),
            "num_incomparable": len(self.incomparable),
            "probe_gap": self.probe_gap,
        }

    def complaint(self) -> str:
        """One line about its faults."""
        named = "; ".join(f"{name}: {what}" for name, what in list(self.faults.items())[:NAMED])
        more = len(self.faults) - NAMED
        return f"the engine does not hold version {self.version} of the weights as they were sent: {named}" + (
            f"; and {more} more" if more > 0 else ""
        )


@dataclass(frozen=True)
class Sent:
    """Digests of a version."""

    version: int
    digests: Mapping[str, Digest]


def compare(sent: Sent, answers: Sequence[Mapping[str, Digest | str]], before: Iterable[Sent] = ()) -> Receipt:
    """What the answers of replicas say about weights.

    Args:
        sent: By the trainer.
        answers: One per replica: digests, reasons why there is none, or nothing.
        before: Earlier versions that had a receipt, the newest first.
    """
    faults: dict[str, str] = {}
    incomparable: dict[str, str] = {}
    for replica, held in enumerate(answers):
        where = f" (replica {replica})" if len(answers) > 1 else ""
        for name, digest in sent.digests.items():
            found = held.get(name)
            if isinstance(found, str):
                incomparable.setdefault(name, found)
            elif found != digest:
                faults.setdefault(name, _likely(name, found, sent, held, before) + where)
    proven = len(sent.digests) - len(faults.keys() | incomparable.keys()) if answers else 0
    return Receipt(sent.version, proven, faults, incomparable)


def _likely(
    name: str, found: Digest | None, sent: Sent, held: Mapping[str, Digest | str], before: Iterable[Sent]
) -> str:
    """What has happened to a tensor whose digest is not what was sent."""
    expected = sent.digests[name]
    if found is None:
        return "dropped: the engine holds no such tensor"
    stale = next((old.version for old in before if old.digests.get(name) == found), None)
    if stale is not None:
        return f"stale: it is as in version {stale}"
    others = [other for other, digest in sent.digests.items() if digest == found]
    swapped = [other for other in others if held.get(other) == expected]
    if swapped:
        return f"swapped with {swapped[0]}"
    if others:
        return f"it holds what was sent as {others[0]}"
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"held as {found.dtype} {list(found.shape)}, sent as {expected.dtype} {list(expected.shape)}"
    return "truncated or overwritten: other bits, of no version that is known"
