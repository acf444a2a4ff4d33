"""The certificate of a loss: what every loss promises, tried clause by clause, with counterexamples as tests.

    certificate     certify_loss, LossCertificate: all clauses, a few seconds
    clauses         what holds of every batch, or of some; one function each
    slopes          the gradient against finite differences in float64
    bandit          the sign, on a policy of three logits; ``bandit_states`` has its batches
    cases, drawing  batches as plain rows, drawn by the fields that a loss reads
    shrinking       from a counterexample to the simplest one
    printing        from a counterexample to a Python test
    looking         a loss by where it stands, for ``nemorl plugins check MODULE:NAME``

>>> from nemorl_testing.losses import certify_loss
>>> from nemorl_testing.batches import WeightedNLL
>>> certify_loss(WeightedNLL()).is_sound
True

Importing this imports no torch: names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemorl_testing.losses.certificate import LossCertificate, Outcome, certify_loss

__all__ = ["LossCertificate", "Outcome", "certify_loss"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("nemorl_testing.losses.certificate"), name)
