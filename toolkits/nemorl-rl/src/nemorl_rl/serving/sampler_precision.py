"""Samplers that compute in a lower precision than the policy, and what follows from that for a run.

Their log-probs are not those of the trainer, however well both work: algorithms that can weigh the difference do so by
default (``policy_gradient.config``), and warnings of a mismatch name the precision.
"""

from __future__ import annotations

from nemorl.plugins.kinds import GenerationBackendConfig


class LowerPrecision:
    """Mixin for configs of generation backends that can be told to compute in a lower precision than the policy."""

    @property
    def lower_precision(self) -> str | None:
        """Its name, e.g. ``fp8``; ``None``: it computes in the policy's."""
        raise NotImplementedError(f"{type(self).__name__} must define lower_precision")


def lower_precision(backend: GenerationBackendConfig) -> str | None:
    """The lower precision in which a generation backend computes, if it does.

    >>> lower_precision(GenerationBackendConfig()) is None
    True
    """
    return backend.lower_precision if isinstance(backend, LowerPrecision) else None
