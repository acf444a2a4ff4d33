"""Recorder: takes rollouts from a trainer and writes them from a thread of its own, beside the step.

One file per split and step, written under another name and renamed: there is never half a file, and a step that is made
again replaces its own. The trainer waits only where the disk is so slow that ``WAITING`` steps are unwritten. What
cannot be written costs records, never the run: it is warned of once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from nemorl.base.files.atomic import replacing
from nemorl.types import Sample, Samples

from nemorl_cli.report.records.prompts import write_prompts
from nemorl_cli.report.records.reading import FOLDER
from nemorl_cli.report.records.schema import WRITING
from nemorl_cli.report.records.selecting import Amounts, Selection
from nemorl_cli.report.records.table import Group, Rollout, Verdict, groups_of, media_of, no_verdict, table_of
from nemorl_cli.report.records.tokens import Vocabulary, of_minibatches, selected

WAITING = 2
"""Steps that may wait to be written."""
MOST_REJECTED = 64
"""Rejected groups kept in memory until the step that they were sampled for is recorded."""
PATIENCE_S = 60.0
"""Longest wait of a trainer for the disk; then the record is dropped."""


def open_records(trainer: Any) -> Recorder:
    """The recorder of a run that samples. The run's directory rewinds it.

    Args:
        trainer: A ``RolloutTrainer`` that has its run directory and its tokenizer.

    Example:
        >>> recorder = nemorl.open_records(trainer)  # doctest: +SKIP
    """
    config, directory = trainer.config, trainer.directory

    def measure(batch: Any) -> Any:
        with trainer.run.timer.phase("policy_and_reference_logprobs"):
            return trainer.run.policy.get_logprobs(batch)

    recorder = Recorder(
        directory.path,
        config.records,
        validation_every=config.validation.every,
        decode=trainer.tokenizer.decode,
        warn=directory.warn,
        measure=measure if config.records.trainer_logprobs else None,
        verdict=trainer.weights_proven,
    )
    directory.logs.append(recorder)
    return recorder


class Recorder:
    """Writes ``records/`` of a run directory. All methods but ``rejected`` belong to one thread."""

    def __init__(
        self,
        run_dir: Path,
        config: Amounts,
        *,
        validation_every: int,
        decode: Callable[[Sequence[int]], str],
        warn: Callable[[str], None],
        measure: Callable[[Any], Any] | None = None,
        verdict: Verdict = no_verdict,
    ) -> None:
        """
        Args:
            run_dir: Of the run; its name is the run's.
            config: What to keep.
            validation_every: Steps between validations; 0: there are none.
            decode: Token ids to text. Called from the writing thread.
            warn: Told once of what cannot be written.
            measure: The trainer's present log-probs of a ``TokenBatch``. Unset: only the step's own are kept.
            verdict: On weights, by their receipts.
        """
        self.path = Path(run_dir) / FOLDER
        self._run, self._decode, self._warn, self._measure = Path(run_dir).resolve().name, decode, warn, measure
        self._verdict = verdict
        self._selection = Selection(self.path, config, validation_every)
        self._vocabulary = Vocabulary(self.path, decode)
        self._unfinished: Rollout | None = None
        """Of the present training step: what trains may follow."""
        self._trained: list[Any] = []
        """Of that, the minibatches of its sequences, in order."""
        self._parts: Counter[tuple[str, int]] = Counter()
        self._rejected: list[Group] = []
        self._lock = threading.Lock()
        """Held by whoever changes ``_rejected``."""
        self._queue: queue.Queue[Rollout | None] = queue.Queue(WAITING)
        self._problem: str | None = None
        self._has_warned = False
        self._thread = threading.Thread(target=self._write_all, name="records", daemon=True)
        self._thread.start()

    # What the trainer calls

    def rollout(self, samples: Samples, split: str, step: int, began_s: float | None = None) -> None:
        self._finish()
        if split == "train":
            self._unfinished = self._of_training(samples, step, began_s)
        else:
            groups = [Group(number, group) for number, group in enumerate(groups_of(samples))]
            self._parts[split, step] += 1
            part = self._parts[split, step]
            at_s = time.time()
            self._put(Rollout(self._run, split, step, at_s, groups, part, began_s=began_s, verdict=self._verdict))

    def rejected(self, group: Sequence[Sample], reason: str) -> None:
        with self._lock:
            if len(self._rejected) < MOST_REJECTED:
                self._rejected.append(Group(len(self._rejected), group, rejected=reason, id_suffix="r"))

    def batch(self, samples: Samples, minibatches: Sequence[Any]) -> None:
        if self._unfinished is None:
            return
        groups = list(groups_of(samples))
        kept = self._picked(groups, self._unfinished.step)
        counts = [sum(len(sample.sequences) for sample in group) for group in groups]
        starts = [0, *accumulate(counts)]
        wanted = [number for group in kept for number in range(starts[group.number], starts[group.number + 1])]
        self._trained = selected(minibatches, wanted)
        rejected = [group for group in self._unfinished.groups if group.rejected is not None]
        self._unfinished = replace(self._unfinished, groups=[*kept, *rejected])
        if self._measure is None:
            self._finish()
        else:
            self._trained = [
                part if "old_logprobs" in part else part.with_tokens(old_logprobs=self._measure(part))
                for part in self._trained
            ]

    def updated(self) -> None:
        if self._measure is not None:
            self._trained = [part.with_tokens(policy_logprobs=self._measure(part)) for part in self._trained]
            self._finish()

    def prompts(self, columns: Mapping[str, Sequence[Any]], step: int, rows: int) -> None:
        try:
            write_prompts(self.path, columns, step, rows)
        except Exception as error:
            self._problem = str(error) or type(error).__name__
            self._say()

    def truncate_after(self, step: int) -> None:
        """Drop what is recorded of later steps: the run makes them again."""
        self.flush()
        self._selection.removed_after(step)
        self._parts.clear()
        with self._lock:
            self._rejected.clear()

    def flush(self) -> None:
        self._finish()
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, PATIENCE_S)

    def close(self) -> None:
        self._finish()
        self._put(None)
        self._thread.join(PATIENCE_S)
        self._say()

    def _of_training(self, samples: Samples, step: int, began_s: float | None) -> Rollout:
        groups = self._picked(list(groups_of(samples)), step)
        with self._lock:
            rejected, self._rejected = self._rejected, []
        places = self._selection.places(step, len(rejected))
        kept = [*groups, *(rejected[place] for place in places)]
        return Rollout(self._run, "train", step, time.time(), kept, began_s=began_s, verdict=self._verdict)

    def _picked(self, groups: Sequence[Sequence[Sample]], step: int) -> list[Group]:
        return [Group(place, groups[place]) for place in self._selection.places(step, len(groups))]

    def _finish(self) -> None:
        rollout, self._unfinished = self._unfinished, None
        trained, self._trained = of_minibatches(self._trained), []
        if rollout is not None and rollout.groups:
            self._put(replace(rollout, trained=trained))

    def _put(self, rollout: Rollout | None) -> None:
        self._say()
        try:
            self._queue.put(rollout, timeout=PATIENCE_S)
        except queue.Full:
            self._problem = f"the disk took no record in {PATIENCE_S:.0f} s"
            self._say()

    def _say(self) -> None:
        if self._problem is not None and not self._has_warned:
            self._has_warned = True
            self._warn(f"rollouts are not recorded: {self._problem}. The run goes on; this is said once")

    # In the writing thread

    def _write_all(self) -> None:
        while (rollout := self._queue.get()) is not None:
            try:
                self._write(rollout)
            except Exception as error:
                self._problem = str(error) or type(error).__name__
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _write(self, rollout: Rollout) -> None:
        import pyarrow.parquet as pq

        kept = self._selection
        if not (kept.places(rollout.step, 1) if rollout.split == "train" else kept.keeps_validation(rollout.step)):
            return  # what is kept was thinned out meanwhile
        if kept.is_full:
            raise OSError("records.max_gib is less than one validation and the steps around it take")
        part = f".{rollout.part}" if rollout.part > 1 else ""
        path = self.path / rollout.split / f"step_{rollout.step:06}{part}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = table_of(rollout, self._decode)
        self._vocabulary.add(table)
        self._selection.media.store(path, media_of(rollout))
        with replacing(path) as file:
            pq.write_table(table, file, **WRITING)
        self._selection.added(path)
