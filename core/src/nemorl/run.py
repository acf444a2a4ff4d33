"""Run: the live parts of one run, and what ``fit`` hands back of it.

Parts are built in dependency order and closed in reverse, whatever happens in between.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from nemorl.base.process.deadlines import deadline
from nemorl.base.process.timing import Timer
from nemorl.config.run import RunConfig
from nemorl.contracts import DataModule, HeldOut, Logger
from nemorl.contracts.display import Display
from nemorl.errors import NemorlError, boundary
from nemorl.plugins.hooks import Hooks
from nemorl.plugins.kinds import LoggerConfig
from nemorl.resources.manager import ResourceManager
from nemorl.resources.policies import TrainingPolicy
from nemorl.storage.checkpoints import CheckpointManager
from nemorl.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADLINES = ("validation/accuracy", "validation/val_loss", "train/reward", "train/loss")
"""Metrics that say most about a run, in order of preference."""


class Run:
    """Everything that is alive between ``fit`` and its return. Closing it releases all of it but the directory."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, console: Display, hooks: Hooks, timer: Timer
    ) -> None:
        self.config, self.directory, self.console, self.hooks, self.timer = config, directory, console, hooks, timer
        self._stack = ExitStack()

    data: DataModule
    held_out: HeldOut | None
    """Held-out rows, if there are any."""
    loggers: list[Logger]
    resources: ResourceManager
    policy: TrainingPolicy
    auxiliary_models: dict[str, TrainingPolicy]
    """The other models of the run, by role."""

    @classmethod
    def build(
        cls,
        config: RunConfig,
        directory: RunDirectory,
        console: Display,
        hooks: Hooks,
        data: DataModule,
        held_out: HeldOut | None,
        *,
        planned_updates: int,
        resources: type[ResourceManager] = ResourceManager,
    ) -> Self:
        """Load the models, on the workers that ``cluster`` asks for. On failure, what was built is closed.

        Args:
            config: Of the run.
            directory: That it owns.
            console: Shows a person what happens.
            hooks: Called at its events.
            data: To train on.
            held_out: To validate on, if there are any.
            planned_updates: Optimizer steps of the whole run, the length of a learning-rate decay.
            resources: Places the workers.
        """
        run = cls(config, directory, console, hooks, Timer(on_enter=console.phase))
        run.data, run.held_out = data, held_out
        try:
            run.loggers = [run._logger(logger) for logger in config.loggers]
            console.announce(f"loading PyTorch and the model {config.policy.model_name}")
            run.resources = run.own(resources(config, run.path, on_restart=run.warn), "close")
            with run.loading():
                run.policy = run.resources.training_policy(planned_updates)
                for text in run.resources.remarks():
                    directory.event("remark", message=text)
                run.auxiliary_models = {
                    role: run.resources.auxiliary_policy(role, auxiliary, planned_updates + auxiliary.extra_updates)
                    for role, auxiliary in config.auxiliary_models.items()
                }
        except BaseException:
            with suppress(NemorlError):  # has an event of its own, and this error comes first
                run.close()
            raise
        return run

    def loading(self) -> deadline:
        """The time that models may take to load, for a ``with`` block."""
        config = self.config
        limit_s = max(config.plugins.build_timeout_s, 2 * config.cluster.worker_timeout_s)  # Ray's own come first
        return deadline("loading the model", limit_s, setting="plugins.build_timeout_s")

    def own(self, part: Any, closer: str) -> Any:
        """``part``, whose method ``closer`` is called when the run is closed."""
        self._stack.callback(self._close_part, part, closer)
        return part

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def checkpoints(self) -> CheckpointManager:
        return self.directory.checkpoints

    @property
    def learners(self) -> dict[str, TrainingPolicy]:
        """The models that checkpoints hold, by the name of their folder."""
        learning = {role: self.auxiliary_models[role] for role, c in self.config.auxiliary_models.items() if c.learns}
        return {"policy": self.policy, **learning}

    def _logger(self, config: LoggerConfig) -> Logger:
        owner = f"logger {type(config).__name__}"
        limit_s = self.config.plugins.build_timeout_s
        with boundary(owner), deadline(f"building {owner}", limit_s, setting="plugins.build_timeout_s"):
            logger: Logger = self.own(config.build(self.path), "close")
        return logger

    def _close_part(self, part: Any, closer: str) -> None:
        """A failure to close is an error like others: it gets an event, and the rest is closed all the same."""
        owner, limit_s = f"closing {type(part).__name__}", self.config.plugins.build_timeout_s
        try:
            with boundary(owner), deadline(owner, limit_s, setting="plugins.build_timeout_s"):
                getattr(part, closer)()
        except NemorlError as error:
            self.directory.event("failed", error=f"{type(error).__name__}: {error}")
            raise

    def warn(self, text: str) -> None:
        """Tell the person and the audit log."""
        self.directory.warn(text)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One record to ``metrics.jsonl``, the console and every logger."""
        self.directory.metrics.write({**metrics, "step": step, "time": time.time()})
        self.console.step(step, metrics)
        limit_s = self.config.plugins.hook_timeout_s
        for logger in self.loggers:
            owner = f"logger {type(logger).__name__}"
            with boundary(owner), deadline(owner, limit_s, setting="plugins.hook_timeout_s"):
                logger.log(metrics, step)

    def close(self) -> None:
        self._stack.close()


@dataclass(frozen=True, repr=False)
class TrainResult:
    """The result of ``fit``.

    >>> TrainResult({"train/loss": 0.5}, [], Path("runs/a"), None, 10)
    TrainResult(10 steps in runs/a, train/loss 0.5)
    """

    metrics: Mapping[str, float]
    """The last value of every logged metric."""
    history: Sequence[Mapping[str, float]]
    """One record per logged step, as in ``metrics.jsonl``; a resumed run's begins where it was resumed."""
    run_dir: Path
    best_checkpoint: Path | None
    steps: int
    """Steps completed, those before a resume included."""
    stopped: str | None = None
    """The reason for an early end; ``None`` when the run reached its end."""

    def __repr__(self) -> str:
        parts = [f"{self.steps} steps in {self.run_dir}"]
        parts += [f"stopped: {self.stopped}"] if self.stopped else []
        parts += [f"{name} {self.metrics[name]:.4g}" for name in HEADLINES if name in self.metrics]
        parts += [f"best checkpoint {self.best_checkpoint.name}"] if self.best_checkpoint else []
        return f"TrainResult({', '.join(parts)})"

    def plot(self, path: Path | str | None = None, metrics: Sequence[str] = ()) -> Figure:
        """Curves over the steps of the whole run, one panel per metric: ``nemorl.plot_run`` of its directory.

        Args:
            path: Also write them to this file; its suffix says how (``.png``, ``.svg``, ``.pdf``).
            metrics: Names as in ``metrics.jsonl``. Empty: accuracy, validation loss, reward and loss, where logged.

        Returns:
            A matplotlib figure, which notebooks display.
        """
        import nemorl

        figure: Figure = nemorl.plot_run(self.run_dir, path, metrics, history=self.history)
        return figure
