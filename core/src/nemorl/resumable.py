"""Saving a trainer, and being where it was: after a restart of the run, or after the loss of its workers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from nemorl.base.files.checkpoints import Checkpoint
from nemorl.config.run import RunConfig
from nemorl.contracts import DataModule
from nemorl.errors import CheckpointError, NemorlError, WorkerLostError
from nemorl.run import Run
from nemorl.storage.fingerprints import Fingerprints, refuse
from nemorl.storage.run_directory import RunDirectory


@dataclass
class Progress:
    """The trainer's own counters, saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    latest: dict[str, float] = field(default_factory=dict)


C = TypeVar("C", bound=RunConfig)


class Resumable(Generic[C]):
    """The part of a trainer that saves and restores everything on which its next step depends."""

    config: C
    run: Run
    directory: RunDirectory
    progress: Progress
    history: list[dict[str, float]]
    inputs: Fingerprints
    """Rows and code that this process was given beside the config."""
    _left_nodes: set[str]
    """Nodes of which it is known that they are about to go"""
    accept_changed_data: bool
    """Continue with other rows than the run has had so far."""

    @property
    def batches(self) -> DataModule:
        """The data module that gives the rows of the steps."""
        raise NotImplementedError

    def sync_weights(self) -> None:
        """Give the generator the current policy."""
        raise NotImplementedError

    def save(self) -> Path:
        """Write a checkpoint of everything that makes the next step. An asynchronous one appears after a later step."""
        settings, timer = self.config.checkpoint, self.run.timer
        if self.run.checkpoints.draft is not None:
            with timer.phase("checkpointing/wait"):
                self.publish_checkpoint(wait=True)
        whole, later = settings.save_optimizer, settings.asynchronous
        learners = self.run.learners
        writers = {n: partial(one.save_checkpoint, optimizer=whole, snapshot=later) for n, one in learners.items()}
        ranks = [one.snapshot_files for one in learners.values()] if later else []
        with timer.phase("checkpointing"):
            step, latest = self.progress.step, self.progress.latest
            final = self.run.checkpoints.begin(step, writers, self.state_dict(), latest, ranks)
        self.publish_checkpoint(wait=not later)
        return final

    def publish_checkpoint(self, *, wait: bool) -> None:
        """Let the checkpoint that is being written appear, if all of it is on disk by now, and tell the hooks."""
        if self.run.checkpoints.draft is None:
            return
        with self.run.timer.phase("checkpointing"):
            saved = self.run.checkpoints.publish(wait=wait)
        if saved is not None:
            self.run.directory.event("checkpoint", step=saved.step, path=saved.path.name)
            self.run.hooks.fire("on_checkpoint_saved", trainer=self, step=saved.step, path=saved.path)

    def end_saving(self) -> None:
        """Before the workers end: what is being written is kept, unless they are lost or the run is to stop at once."""
        error = sys.exception()
        if (error is None or isinstance(error, Exception)) and not isinstance(error, WorkerLostError):
            self.publish_checkpoint(wait=True)
        self.run.checkpoints.abandon()

    def state_dict(self) -> dict[str, Any]:
        """The JSON side of a checkpoint. Extend it where an algorithm keeps state of its own."""
        return {
            "algorithm": type(self.config).__name__,
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "latest": dict(self.progress.latest),
            "data": self.batches.state_dict(),
            "inputs": asdict(self.inputs),
            "optimizer": self.config.checkpoint.save_optimizer,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The counterpart of ``state_dict``."""
        if state["algorithm"] != type(self.config).__name__:
            raise CheckpointError(
                f"the checkpoint belongs to {state['algorithm']}, this run is {type(self.config).__name__}",
                fix="resume with the algorithm that wrote it",
            )
        self._compare_inputs(state.get("inputs"), f"step {state['step']}")
        self.progress = Progress(state["step"], state["tokens"], dict(state["latest"]))
        self.batches.load_state_dict(state["data"])

    def foresee_changes(self) -> None:
        """Refuse other rows than those of the checkpoint to continue from, while nothing is loaded yet.

        Raises:
            DataError: they have changed, and that is not accepted.
        """
        checkpoints, step = self.directory.checkpoints, self.directory.from_step
        newest = checkpoints.latest() if step is None else checkpoints.of_step(step)
        if newest is not None and not self.accept_changed_data:
            with suppress(CheckpointError):  # it is damaged, and an older one will be found
                refuse(self.inputs.other_rows(newest.read_state().get("inputs") or {}), newest.path.name)

    def _compare_inputs(self, before: Mapping[str, Any] | None, place: str) -> None:
        """Hold the run to the rows of a checkpoint, and say where the code of its rewards is another."""
        directory = self.run.directory
        if before is None:
            text = f"{place} was saved without fingerprints: whether data and rewards are the same is not known"
            directory.event("remark", message=text)
            return
        changes = self.inputs.other_rows(before)
        if not self.accept_changed_data:
            refuse(changes, place)
        for what, (old, new) in changes.items():
            self.run.warn(f"{what} are others than those of {place}, which was accepted")
            directory.event("data_changed", what=what, before=old, now=new)
        for name in self.inputs.other_code(before):
            self.run.warn(f"the code of {name} has changed since {place}: rewards may mean something else from here on")

    def restore(self) -> None:
        """Load the newest sound checkpoint of a run that is resumed, or the one asked for."""
        self._initial_state = self.state_dict()
        checkpoint = self._go_back(self.run.directory.from_step) if self.run.directory.is_resumed else None
        if checkpoint is not None:
            self.run.console.message(f"continuing {self.run.path} after step {checkpoint.step}")
        else:
            if self.run.directory.is_resumed:
                folder = self.run.directory.set_aside([], 0)
                what = f"{self.run.path} has no checkpoint: its steps are done again from the first"
                self.run.warn(f"{what}; what it has logged is in {folder}")
            self.run.directory.rewind(-1)  # what was validated before the first step is validated again

    def _go_back(self, step: int | None = None) -> Checkpoint | None:
        """Load the newest sound checkpoint (or that of ``step``) and cut the logs after its step.

        Checkpoints that are damaged, of another run or newer are set aside, never removed.

        Returns:
            The checkpoint; ``None`` where the run has saved none.

        Raises:
            CheckpointError: There are checkpoints, and none of them can be used.
        """
        checkpoints = self.run.checkpoints
        damaged = checkpoints.damaged()
        sound = checkpoints.all() if step is None else [checkpoints.of_step(step)]
        for checkpoint in reversed(sound):
            try:
                self._load(checkpoint)
            except CheckpointError as error:
                damaged[checkpoint.path] = error.message
            else:
                self._leave_behind(checkpoint, damaged)
                return checkpoint
        if not damaged:
            return None
        where = "any checkpoint" if step is None else f"step {step}"
        reasons = "".join(f"\n  - {reason}" for reason in damaged.values())
        raise CheckpointError(
            f"{self.run.path} cannot be continued from {where}:{reasons}",
            fix="put a sound copy in place (`nemorl runs verify` looks at all of them), or choose another run_dir",
        )

    def _leave_behind(self, checkpoint: Checkpoint, damaged: Mapping[Path, str]) -> None:
        """Set aside what is damaged or newer than where the run now is, say so, and rewind the logs."""
        for reason in damaged.values():
            self.run.warn(f"a checkpoint cannot be used: {reason}")
        newer = [other.path for other in self.run.checkpoints.all() if other.step > checkpoint.step]
        if leaving := sorted({*damaged, *newer}):
            folder = self.run.directory.set_aside(leaving, checkpoint.step)
            names = ", ".join(path.name for path in leaving)
            self.run.warn(f"continuing from step {checkpoint.step}; {names} and the logs so far are in {folder}")
        self.run.directory.rewind(checkpoint.step)

    def _load(self, checkpoint: Checkpoint) -> None:
        checkpoint.verify()
        state = checkpoint.read_state()
        try:
            self.load_state_dict(state)
        except NemorlError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{checkpoint.path / 'trainer.json'} is no state of this run ({type(error).__name__}: {error})"
            ) from error
        if self.progress.step != checkpoint.step:
            raise CheckpointError(f"{checkpoint.path / 'trainer.json'} is the state of step {self.progress.step}")
        for name in sorted(self.run.learners.keys() & {part.name for part in checkpoint.path.iterdir()}):
            self.run.learners[name].load_checkpoint(checkpoint.path / name)
        if not state.get("optimizer", True):
            self.run.warn(f"{checkpoint.path.name} was saved without optimizer state: the optimizer starts anew")

    def recover(self, error: WorkerLostError) -> None:
        """Training workers were lost: replace them, go back to the last good state and continue from there.

        Raises:
            WorkerLostError: ``error`` itself, when the run may not restart workers again.
        """
        self.run.checkpoints.abandon()
        self.run.resources.count_restart(error)
        self.run.resources.replace_training()
        self.run.timer.drain()
        if self._go_back() is None:
            self.load_state_dict(self._initial_state)
            self.run.directory.rewind(self.progress.step)
        self.history = [record for record in self.history if record["step"] <= self.progress.step]
        self.sync_weights()
        self.run.directory.event("recovered", step=self.progress.step, error=error.message)

    def leave_drained_nodes(self) -> None:
        """Between two steps: have workers leave the nodes that the cluster is about to take away.

        All is saved first, so that a node which goes before there is room elsewhere costs nothing either. Training
        workers move all together, since they hold one model; engines move alone.
        """
        resources, directory = self.run.resources, self.run.directory
        drains = resources.launcher.drains
        leaving = [] if drains is None else drains.drained_nodes()
        if drains is None or not leaving:
            return
        if new := sorted({*leaving} - self._left_nodes):
            self._left_nodes.update(new)
            directory.event("draining", step=self.progress.step, nodes=new)
            self.run.console.message(f"nodes {', '.join(new)} are about to go: saving, then moving their workers")
            self._save_step()
        if not drains.is_room_elsewhere:
            return
        self._save_step()
        with resources.moving() as moves_training:
            if moves_training:
                resources.replace_training()
                self._go_back()
        self.sync_weights()
        self.run.timer.drain()
        directory.event("moved", step=self.progress.step, nodes=sorted(leaving), training=moves_training)

    def _save_step(self) -> None:
        """Have a checkpoint of the present step, whole."""
        self.publish_checkpoint(wait=True)
        latest = self.run.checkpoints.latest()
        if latest is None or latest.step != self.progress.step:
            self.save()
            self.publish_checkpoint(wait=True)
