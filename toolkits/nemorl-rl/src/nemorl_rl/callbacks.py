"""Callbacks: a user's own code at the lifecycle events of a run, and the ready-made ones.

Subclass :class:`Callback`, override what you need, pass instances to ``trainer.fit(callbacks=[…])``. They register
with the same manager as hook plugins; :class:`nemorl.plugins.hooks.HookSpecs` documents every event. The services that
``LoggerCallback`` logs to are plugins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nemorl.base.files.jsonl import read_jsonl
from nemorl.base.text.suggest import did_you_mean
from nemorl.config.component import missing_modules
from nemorl.config.load import validate
from nemorl.errors import UsageError
from nemorl.plugins import registry

if TYPE_CHECKING:
    from nemorl.contracts import Logger
    from nemorl.plugins.kinds import LoggerConfig


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

    A resumed run counts the validations before the interruption too. One in which every episode failed says nothing
    and is passed over.

    Args:
        metric: Name as in validation metrics, e.g. ``accuracy``.
        threshold: Stop when reached.
        patience: Stop after this many validations without a new best. ``None``: never.
        min_delta: A new best must be better by more than this.
        higher_is_better: Direction of the metric.

    Example:
        >>> stops = EarlyStopping("accuracy", threshold=0.95)
    """

    def __init__(
        self,
        metric: str = "accuracy",
        *,
        threshold: float | None = None,
        patience: int | None = None,
        min_delta: float = 0.0,
        higher_is_better: bool = True,
    ) -> None:
        self.metric, self.threshold, self.patience, self.min_delta = metric, threshold, patience, min_delta
        self._sign = 1.0 if higher_is_better else -1.0
        self._best, self._since_best = -self._sign * math.inf, 0

    def on_fit_begin(self, trainer: Any) -> None:
        self._best, self._since_best = -self._sign * math.inf, 0
        for record in read_jsonl(trainer.run.path / "metrics.jsonl"):
            if (name := f"validation/{self.metric}") in record:
                self._count(record[name])

    def on_validation_end(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        if metrics.get("failed_frac") == 1.0:
            return
        if self.metric not in metrics:
            raise UsageError(
                f"EarlyStopping: validation has no metric {self.metric!r} (it has {', '.join(metrics)})",
                fix=did_you_mean(self.metric, metrics) or "name one of them",
            )
        value = metrics[self.metric]
        self._count(value)
        if self.threshold is not None and self._sign * value >= self._sign * self.threshold:
            trainer.stop(f"{self.metric} reached {self.threshold}")
        elif self.patience is not None and self._since_best >= self.patience:
            trainer.stop(f"{self.metric} has not improved for {self.patience} validations")

    def _count(self, value: float | None) -> None:
        """NaN, for which records have ``None``, is better than nothing."""
        if value is not None and self._sign * (value - self._best) > self.min_delta:
            self._best, self._since_best = value, 0
        else:
            self._since_best += 1


class CheckpointCallback(Callback):
    """Saves every so many steps, beside what ``checkpoint.every`` of the config asks for.

    A checkpoint of a step that is also validated is written after the validation, which can then rank it. The last
    step is always saved by the run itself.

    Args:
        every: Steps between checkpoints.
        keep: Most recent checkpoints to keep, in place of ``checkpoint.keep_last``. The best ones are kept as well
            (``checkpoint.keep_best``).

    Example:
        >>> saves = CheckpointCallback(every=20, keep=3)
    """

    essential = True

    def __init__(self, every: int = 50, keep: int | None = None) -> None:
        if every < 1 or (keep is not None and keep < 1):
            raise UsageError(f"CheckpointCallback(every={every}, keep={keep})", fix="give whole numbers of at least 1")
        self.every, self.keep = every, keep

    def on_fit_begin(self, trainer: Any) -> None:
        if self.keep is not None:
            checkpoints = trainer.run.checkpoints
            checkpoints.config = checkpoints.config.model_copy(update={"keep_last": self.keep})

    def on_step_end(self, trainer: Any, step: int) -> None:
        if not is_validated(trainer, step) and step % self.every == 0:
            save_beside(trainer, step)

    def on_validation_end(self, trainer: Any, step: int) -> None:
        if step % self.every == 0:
            save_beside(trainer, step)


def is_validated(trainer: Any, step: int) -> bool:
    """A validation comes after the end of this step."""
    every = trainer.config.validation.every
    return bool(every > 0 and step % every == 0 and trainer.run.held_out is not None)


def save_beside(trainer: Any, step: int) -> None:
    """Write a checkpoint of this step, unless the run itself writes one after it."""
    every = trainer.config.checkpoint.every
    if 0 < step < trainer.total_steps and not (every > 0 and step % every == 0):
        trainer.save()


class LoggerCallback(Callback):
    """Sends every metric to a logger plugin, without naming it in the config.

    Args:
        name: Name of an installed or registered logger, e.g. ``tensorboard``.
        **options: The options of that logger (``nemorl plugins show tensorboard``).

    Raises:
        PluginNotFoundError: no such logger is installed; says what to install.
        UsageError: the service's own package is missing; says what to install.
        ConfigError: every option that is wrong.

    Example:
        >>> logs = LoggerCallback("tensorboard")
    """

    def __init__(self, name: str, **options: Any) -> None:
        config_class: type[LoggerConfig] = registry().load("loggers", name)
        problem = missing_modules("loggers", name, config_class)
        if problem is not None:
            raise UsageError(problem.message, fix=problem.fix)
        self._config = validate(config_class, options, source=f"logger {name}")
        self._logger: Logger | None = None

    def on_fit_begin(self, trainer: Any) -> None:
        self._logger = self._config.build(trainer.run.path)

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._logger is not None, "metrics are logged after on_fit_begin"
        self._logger.log(metrics, step)

    def on_fit_end(self) -> None:
        self._close()

    def on_exception(self) -> None:
        self._close()

    def _close(self) -> None:
        logger, self._logger = self._logger, None
        if logger is not None:
            logger.close()


class WandbCallback(LoggerCallback):
    """Sends every metric to Weights & Biases; ``WANDB_MODE=offline`` writes to the run directory only.

    Needs ``pip install "nemorl-insight[wandb]"``. The API key comes from ``wandb login`` or ``WANDB_API_KEY``.

    Args:
        project: Project that the run appears in.
        **options: More options of the logger ``wandb``: ``entity``, ``run_name``, ``tags``, ``mode``.

    Example:
        >>> logs = WandbCallback(project="sums")  # doctest: +SKIP
    """

    def __init__(self, project: str = "nemorl", **options: Any) -> None:
        super().__init__("wandb", project=project, **options)
