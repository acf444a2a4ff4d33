"""Callbacks: a user's own code at the lifecycle events of a run.

Subclass :class:`Callback`, override what you need, pass instances to ``trainer.fit(callbacks=[…])``. They register
with the same manager as hook plugins; :class:`nemorl.plugins.hooks.HookSpecs` documents every event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Callback:
    """Base class: its methods do nothing, so override only what you need.

    Example:
        >>> class PrintLoss(Callback):
        ...     def on_step_end(self, trainer, step, metrics):
        ...         print(step, metrics["loss"])
    """

    essential = False
    """True: an exception in a method ends the run instead of disabling this callback."""


class EarlyStopping(Callback):
    """Ends the run once a validation metric has reached ``threshold``, or stopped improving.

    Args:
        metric: Name as in validation metrics, e.g. ``accuracy``.
        threshold: Stop when reached.
        patience: Stop after this many validations without a new best. ``None``: never.
        higher_is_better: Direction of the metric.
    """

    def __init__(
        self,
        metric: str = "accuracy",
        *,
        threshold: float | None = None,
        patience: int | None = None,
        higher_is_better: bool = True,
    ) -> None:
        self.metric, self.threshold, self.patience = metric, threshold, patience
        self._sign = 1.0 if higher_is_better else -1.0
        self._best: float | None = None
        self._since_best = 0

    def on_validation_end(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        value = self._sign * metrics[self.metric]
        self._since_best = 0 if self._best is None or value > self._best else self._since_best + 1
        self._best = value if self._best is None else max(self._best, value)
        if self.threshold is not None and value >= self._sign * self.threshold:
            trainer.stop(f"{self.metric} reached {self.threshold}")
        elif self.patience is not None and self._since_best >= self.patience:
            trainer.stop(f"{self.metric} has not improved for {self.patience} validations")
