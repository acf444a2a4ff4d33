"""Rewards of which only a bound is known: an episode that was cut off earns at most what it could still have earned.

Scored at its bound, such an episode counts as better than it was; dropped, it takes with it what the bound says. Here
it gets what the verdicts of its group say of rewards below the bound. The order of episodes is kept: nothing that is
imputed exceeds its bound, and a lower bound never gives more than a higher one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def expected_below(rewards: Sequence[float], bounds: Sequence[float]) -> list[float]:
    """What is to be expected of rewards that are at most their bounds.

    r_i = mean of { rewards <= bound_i } and { r_j : bound_j < bound_i };  bound_i where there are none

    These are the conditional expectations E[R | R <= bound_i] under the Kaplan-Meier distribution of the group, which
    Efron builds by sharing the mass of a censored value among those beyond it (The two sample problem with censored
    data, 1967), and which Buckley and James put in the place of censored values (Biometrika 66, 1979).
    Differs from the sources: mirrored, since bounds are from above; a reward equal to a bound counts as below it; no
    covariates, so one pass is the fixed point.

    Args:
        rewards: Those that are known.
        bounds: One for each that is not.

    Returns:
        One reward per bound, in input order, each at most its bound.

    Example:
        >>> expected_below([0.0, 0.5, 1.0], [0.75, 0.25])  # (0 + 0.5 + 0) / 3, and 0 alone
        [0.16666666666666666, 0.0]
    """
    imputed: dict[float, float] = {}
    for bound in sorted(set(bounds)):
        lower = [value for value in bounds if value < bound]
        values = [*(reward for reward in rewards if reward <= bound), *(imputed[value] for value in lower)]
        imputed[bound] = math.fsum(values) / len(values) if values else bound
    return [imputed[bound] for bound in bounds]
