"""Options of every algorithm that measures its policy against the initial one. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from nemorl.config import RunConfig
from nemorl.config.models import Placement
from nemorl.errors import ConfigIssue
from nemorl.metrics import MetricInfo
from nemorl_rl.placement.problems import offload_problems

REFERENCE_METRICS = {
    "timing/train/policy_and_reference_logprobs": MetricInfo("Log-probs", "seconds", "old and reference log-probs")
}


class ReferenceConfig(RunConfig):
    """One run of an algorithm whose loss compares the policy with what it was at first."""

    reference: Literal["precomputed", "model"] = "precomputed"
    """``precomputed``: before the first step, ask the policy, which is the reference then, for the log-probs of all
    rows that the run will see, and keep them in the run directory. ``model``: keep a frozen copy and ask it in every
    step; for data whose rows are not known beforehand."""

    def problems(self) -> Iterator[ConfigIssue]:
        yield from super().problems()
        if self.place().takes_turns:
            yield from offload_problems(self)

    def place(self) -> Placement:
        """Policy and reference take turns only where it is asked for, as they change places in every step."""
        return Placement(takes_turns=self.needs_reference and bool(self.cluster.take_turns))

    @property
    def needs_reference(self) -> bool:
        return self.reference == "model"
