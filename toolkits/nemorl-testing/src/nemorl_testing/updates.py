"""Requests of a run to its models: the batch and the loss of each update, and what the model said of it before.

# N = tokens of all sequences concatenated
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemorl_rl.callbacks import Callback

POLICY, VALUE = "policy", "value"


@dataclass
class Update:
    """The first update of a model in a run."""

    role: str
    """``policy``, or that of another model that learns"""
    head: str
    batch: Any
    loss: Any
    before: Any
    """[N] log-probs, or values under a value head, before the update."""
    after: Any = None
    """[N] the same after the last update of the run."""


class Updates(Callback):
    """Notes them from within a run."""

    def __init__(self) -> None:
        self.first: dict[str, Update] = {}
        """Of each model, by its role."""
        self.metrics: dict[str, list[dict[str, float]]] = {}
        """Metrics of each update, by the role of its model."""
        self.samples: Sequence[Any] = ()
        """Those of the first step; none where the algorithm samples nothing."""

    @property
    def numbers(self) -> dict[str, float]:
        """Loss and gradient norm of every update."""
        return {
            f"{name} of {role}'s update {number}": metrics[name]
            for role, updates in self.metrics.items()
            for number, metrics in enumerate(updates, start=1)
            for name in ("loss", "grad_norm")
        }

    def shutdown(self) -> None:
        """Nothing is alive in what it noted."""

    def on_fit_begin(self, trainer: Any) -> None:
        for role, model in trainer.run.learners.items():
            model.train_step = partial(self._train_step, _head(trainer.config, role), role, model, model.train_step)

    def on_rollout_end(self, trainer: Any, step: int, samples: Sequence[Any]) -> None:
        self.samples = self.samples or samples

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == trainer.config.max_steps:
            for role, update in self.first.items():
                update.after = _said(trainer.run.learners[role], update.head, update.batch)

    def _train_step(
        self, head: str, role: str, model: Any, train_step: Callable[..., Any], batch: Any, loss: Any
    ) -> Any:
        if role not in self.first:
            self.first[role] = Update(role, head, batch, loss, _said(model, head, batch))
        metrics = train_step(batch, loss)
        self.metrics.setdefault(role, []).append({name: metric.value for name, metric in metrics.items()})
        return metrics


def _head(config: Any, role: str) -> str:
    head: str = config.policy_head if role == POLICY else config.auxiliary_models[role].head
    return head


def _said(model: Any, head: str, batch: Any) -> Any:
    return model.get_values(batch) if head == VALUE else model.get_logprobs(batch)
