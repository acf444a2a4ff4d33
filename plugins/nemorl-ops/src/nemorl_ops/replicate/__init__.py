"""A second copy of a run's checkpoints elsewhere, and copying runs (``nemorl runs copy``)."""

from nemorl_ops.replicate.config import ReplicateConfig

__all__ = ["ReplicateConfig"]
