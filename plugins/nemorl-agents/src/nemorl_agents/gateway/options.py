"""GatewayOptions: how a gateway listens, and what it lets pass."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nemorl_trust.listening import Place

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class GatewayOptions(Place):
    """How a gateway listens, and what it lets pass."""

    models: tuple[str, ...] = ("policy",)
    """Names of models that are answered; ``*`` stands for any characters. The name is echoed and selects nothing."""
    ignored_fields: tuple[str, ...] = ()
    """Fields of bodies that are left out, where they would be refused. For agents that cannot be told to omit them."""
    max_body_bytes: int = 8 * MIB
    """Longest body of a request. A million tokens of text take about half of the default."""
    max_concurrent_calls: int = 64
    """Requests of one episode that are answered at the same time; what comes on top is told to come again."""
    body_timeout_s: float = 30.0
    """Longest time for a body to arrive, in seconds."""
    quiet_s: float = 5.0
    """Seconds without an event after which a stream gets a comment, so that nobody takes it for dead. A stream begins
    after as many, or with the answer if that is earlier: errors until then have a status of their own."""

    def answers(self, model: str) -> bool:
        """A model of this name is served."""
        return any(_fits(model, pattern) for pattern in self.models)

    @property
    def named(self) -> tuple[str, ...]:
        """The names that stand for themselves."""
        return tuple(name for name in self.models if "*" not in name)


def _fits(model: str, pattern: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), model, re.DOTALL) is not None
