"""The checkpoints of a run: begun, published, ranked, pruned. One is a ``nemorl.base.files.checkpoints.Checkpoint``."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from nemorl.base.files import sealed_folders
from nemorl.base.files.atomic import listed
from nemorl.base.files.checkpoints import FORMAT, Checkpoint, checkpoint_name
from nemorl.base.files.saving import Draft, FilesOfRanks, kept_steps
from nemorl.config.run import CheckpointConfig, RunConfig
from nemorl.errors import CheckpointError


class CheckpointManager:
    """Saves, finds and prunes the checkpoints of one run."""

    def __init__(self, folder: Path, config: CheckpointConfig, *, metric: str, higher_is_better: bool = True) -> None:
        """
        Args:
            folder: Where the checkpoints are.
            config: What to keep.
            metric: Ranks them where ``config.metric`` is unset.
            higher_is_better: Direction of ``metric``.
        """
        self.folder = folder
        self.config = config
        self.metric = config.metric or metric
        self.draft: Draft | None = None
        """The save that was begun and not published yet."""
        self.sign = 1.0 if (config.higher_is_better if config.metric else higher_is_better) else -1.0

    @classmethod
    def of_run(cls, run_dir: Path, config: RunConfig) -> Self:
        """The checkpoints of a run, ranked as its config says."""
        folder, metric = run_dir / "checkpoints", config.best_metric
        return cls(folder, config.checkpoint, metric=metric, higher_is_better=config.best_is_highest)

    def begin(
        self,
        step: int,
        writers: Mapping[str, Callable[[Path], None]],
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        ranks: Sequence[FilesOfRanks] = (),
    ) -> Path:
        """Begin a checkpoint; returns where :meth:`publish` lets it appear.

        Args:
            step: Steps completed.
            writers: Each fills its (existing, empty) folder, of the name given, or has others begin to.
            state: The trainer's JSON state.
            metrics: Latest metrics, for ranking.
            ranks: Those who are still writing afterwards, by model.
        """
        facts = {"format": FORMAT, "step": step, "metrics": {n: v for n, v in metrics.items() if math.isfinite(v)}}
        self.draft = Draft(self.folder / checkpoint_name(step), facts, writers, state, ranks)
        return self.draft.final

    def publish(self, *, wait: bool) -> Checkpoint | None:
        """The checkpoint that was begun, if all of it is on disk: from here on it exists, and old ones are pruned.

        Args:
            wait: Until it is.
        """
        draft, self.draft = self.draft, None
        if draft is not None and not draft.publish(wait=wait):
            draft, self.draft = None, draft
        if draft is None:
            return None
        with suppress(OSError):  # the next save tries again
            self.prune()
        return Checkpoint.read(draft.final)

    def abandon(self) -> None:
        """Forget the checkpoint that was begun: its writers are gone."""
        if self.draft is not None:
            self.draft.discard()
        self.draft = None

    def all(self) -> list[Checkpoint]:
        """Checkpoints whose manifest is sound, oldest first. Folders without a manifest are not checkpoints."""
        return self._listed()[0]

    def damaged(self) -> dict[Path, str]:
        """Paths that are named like checkpoints and cannot be used, each with the reason."""
        return self._listed()[1]

    def latest(self) -> Checkpoint | None:
        return next(reversed(self.all()), None)

    def best(self) -> Checkpoint | None:
        """The best by the configured metric (newer wins ties); the latest when none has the metric."""
        ranked = self._ranked()
        return ranked[0] if ranked else self.latest()

    def of_step(self, step: int) -> Checkpoint:
        """The checkpoint of a step.

        Raises:
            CheckpointError: There is none, or it is damaged; says which there are.
        """
        found, damaged = self._listed()
        for checkpoint in found:
            if checkpoint.step == step:
                return checkpoint
        others = f"there are {', '.join(str(checkpoint.step) for checkpoint in found)}" if found else "there are none"
        reason = damaged.get(self.folder / checkpoint_name(step), f"{self.folder} has no checkpoint of step {step}")
        raise CheckpointError(reason, fix=f"choose another step: {others}")

    def prune(self) -> None:
        """Remove all but the newest ``keep_last``, the best ``keep_best`` and every multiple of ``keep_every``."""
        for checkpoint in self.surplus():
            sealed_folders.withdraw(checkpoint.path, in_thread=self.config.asynchronous)

    def surplus(self) -> list[Checkpoint]:
        """Those that pruning removes."""
        keep, found, ranked = self.config, self.all(), [checkpoint.step for checkpoint in self._ranked()]
        steps = [checkpoint.step for checkpoint in found]
        kept = kept_steps(steps, ranked, last=keep.keep_last, best=keep.keep_best, every=keep.keep_every)
        return [checkpoint for checkpoint in found if checkpoint.step not in kept]

    def repair(self) -> None:
        """Undo a save or a removal that was cut short by a kill. Only for the owner of the run."""
        sealed_folders.repair(self.folder)

    def _listed(self) -> tuple[list[Checkpoint], dict[Path, str]]:
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} is not a folder", fix="mount what it leads to, or move away what is in its place"
            )
        found, damaged = [], {}
        for path in listed(self.folder, "step_*"):
            try:
                found.append(Checkpoint.read(path))
            except CheckpointError as error:
                damaged[path] = error.message
        return sorted(found, key=lambda checkpoint: checkpoint.step), damaged

    def _ranked(self) -> list[Checkpoint]:
        scored = [c for c in self.all() if self.metric in c.metrics]
        return sorted(scored, key=lambda c: (self.sign * c.metrics[self.metric], c.step), reverse=True)
