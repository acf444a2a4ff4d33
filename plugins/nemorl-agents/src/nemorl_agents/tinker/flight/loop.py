"""Loop: one client's loop while it goes on, and what came since its last step."""

from __future__ import annotations

from dataclasses import dataclass, field

from nemorl_agents.tinker.flight.logbook import Logbook
from nemorl_agents.tinker.flight.operations import Operation
from nemorl_agents.tinker.wire.data import pass_body

MOST_HELD_BYTES = 2**30
"""Samples and forward passes of one step that are held until its update. What is beyond is left out, and warned of."""
TOO_MUCH = "samples and forward passes are not kept: there was more than 1 GiB before the update"


@dataclass
class Loop:
    """One that goes on."""

    book: Logbook
    told_seq: int
    """Requests up to this one are known: a model that comes back runs some of them again."""
    operations: list[Operation] = field(default_factory=list)
    """Those since the last step."""
    held_bytes: int = 0
    """Of these, in samples and forward passes."""
    left_out: int = 0

    @property
    def has_loaded(self) -> bool:
        """Its weights are no longer those of its last step."""
        return any(each.kind == "load_weights" for each in self.operations)

    def hold(self, operation: Operation) -> None:
        """Keep a request until the next step."""
        if _is_apart(operation):
            size = len(operation.body) + len(operation.answer)
            if self.held_bytes + size > MOST_HELD_BYTES:
                self.left_out += 1
                return
            self.held_bytes += size
        self.operations.append(operation)

    def taken(self) -> tuple[list[Operation], int]:
        """What was held, and how many requests were left out."""
        found = self.operations, self.left_out
        self.operations, self.held_bytes, self.left_out = [], 0, 0
        return found


def _is_apart(operation: Operation) -> bool:
    """No update depends on it."""
    return operation.kind == "sample" or (
        operation.kind == "forward_backward" and pass_body(operation.body).forward_only
    )
