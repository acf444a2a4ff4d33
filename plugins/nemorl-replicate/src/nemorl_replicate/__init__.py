"""A second copy of a run's checkpoints elsewhere, and copying runs (``nemorl runs copy``)."""

from nemorl_replicate.config import ReplicateConfig

__all__ = ["ReplicateConfig"]
