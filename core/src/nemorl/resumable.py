"""Saving a trainer, and being where it was: after a restart of the run, or after the loss of its workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from nemorl.checkpoints import Checkpoint
from nemorl.config.run import RunConfig
from nemorl.contracts import DataModule
from nemorl.errors import CheckpointError, WorkerLostError
from nemorl.run import Run


@dataclass
class Progress:
    """The trainer's own counters: all of it is saved, all of it is restored."""

    step: int = 0
    tokens: int = 0
    latest: dict[str, float] = field(default_factory=dict)


C = TypeVar("C", bound=RunConfig)


class Resumable(Generic[C]):
    """The part of a trainer that knows what makes its next step (invariant 9: all of it is saved)."""

    config: C
    run: Run
    progress: Progress
    history: list[dict[str, float]]

    @property
    def batches(self) -> DataModule:
        """Where the rows of the steps come from."""
        raise NotImplementedError

    def sync_weights(self) -> None:
        """Give the generator the current policy."""
        raise NotImplementedError

    def save(self) -> Path:
        """Write a checkpoint of everything that makes the next step."""
        with self.run.timer.phase("checkpointing"):
            writers = {name: learner.save_checkpoint for name, learner in self.run.learners.items()}
            checkpoint = self.run.checkpoints.save(self.progress.step, writers, self.state_dict(), self.progress.latest)
        self.run.directory.event("checkpoint", step=self.progress.step, path=checkpoint.path.name)
        self.run.hooks.fire("on_checkpoint_saved", trainer=self, step=self.progress.step, path=checkpoint.path)
        return checkpoint.path

    def state_dict(self) -> dict[str, Any]:
        """The JSON side of a checkpoint. Extend it where an algorithm keeps state of its own."""
        return {
            "algorithm": type(self.config).__name__,
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "latest": self.progress.latest,
            "data": self.batches.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The counterpart of ``state_dict``."""
        if state["algorithm"] != type(self.config).__name__:
            raise CheckpointError(
                f"the checkpoint belongs to {state['algorithm']}, this run is {type(self.config).__name__}",
                fix="resume with the algorithm that wrote it",
            )
        self.progress = Progress(state["step"], state["tokens"], dict(state["latest"]))
        self.batches.load_state_dict(state["data"])

    def restore(self) -> None:
        """Continue from the newest checkpoint when the run is being resumed."""
        self._initial_state = self.state_dict()
        checkpoint = self.run.checkpoints.latest() if self.run.is_resumed else None
        if checkpoint is not None:
            self._load(checkpoint)
            self.run.console.message(f"continuing {self.run.path} after step {checkpoint.step}")
        else:
            self.run.rewind_logs(-1)  # what was validated before the first step is validated again

    def _load(self, checkpoint: Checkpoint) -> None:
        """Be where the run was when it saved ``checkpoint``, logs included."""
        checkpoint.verify()
        self.load_state_dict(checkpoint.read_state())
        for name, learner in self.run.learners.items():
            learner.load_checkpoint(checkpoint.path / name)
        self.run.rewind_logs(self.progress.step)

    def recover(self, error: WorkerLostError) -> None:
        """Training workers were lost: replace them, go back to the last good state and continue from there.

        Raises:
            WorkerLostError: ``error`` itself, when the run may not restart workers again.
        """
        self.run.resources.restart_training(error)
        self.run.timer.drain()
        checkpoint = self.run.checkpoints.latest()
        if checkpoint is None:
            self.load_state_dict(self._initial_state)
            self.run.rewind_logs(self.progress.step)
        else:
            self._load(checkpoint)
        self.history = [record for record in self.history if record["step"] <= self.progress.step]
        self.sync_weights()
        self.run.directory.event("recovered", step=self.progress.step, error=error.message)
