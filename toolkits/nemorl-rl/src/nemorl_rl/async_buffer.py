"""AsyncRolloutBuffer: scored groups in the order they are done, while the trainer trains on earlier ones.

It is the data module of a run whose batches are more than "the next P rows": ``next_batch`` returns P rows whose groups
are sampled, scored and wanted, ``collect`` hands over their samples. The version of the weights counts the trainer's
steps. A group is trained on at most ``max_staleness`` versions after the oldest weights that produced any of its
tokens; what comes too late, because its environment was slow, is dropped and counted, so that it stalls nobody.

Who waits for whom: the trainer, in ``next_batch``, for P groups; a batch's thread for the generator and the
environments, which have deadlines of their own. With ``max_staleness = 0`` nothing is begun before the trainer asks and
nothing runs on while it trains, hence a stream without a filter gives exactly the samples of a run without a stream,
and one with a filter gives the same samples however fast the environments are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nemorl.contracts import DataModule
from nemorl.errors import DataError, DeadlineError
from nemorl.metrics import Max, Mean, Metric, Sum
from nemorl.types import Row, Sample, Samples

from nemorl_rl.prompts import to_prompts
from nemorl_rl.rollouts import RolloutEngine, RolloutPlan

Group = list[Sample]

GRACE_FRAC, MIN_GRACE_S = 0.05, 0.05
"""How long the generator may idle for scores that would make another batch superfluous: this fraction of the seconds
that their batch was generated in. Most environments answer within it; a straggler costs it once per batch."""


@dataclass
class _Batch:
    """P rows that were drawn together."""

    number: int
    rows: list[Row]
    position: Mapping[str, Any]
    """The data module's state before it was drawn."""
    settled: set[int] = field(default_factory=set)
    """Groups that were trained on, or dropped."""
    ready: dict[int, Group] = field(default_factory=dict)
    """Groups that are done and wanted."""
    version: int = 0
    """The newest weights when it was started."""
    is_started: bool = False
    is_generating: bool = True
    started_at: float = 0.0
    grace_until: float = 0.0
    """Until then its scores may well come: a moment of ``time.monotonic()``, known once it is generated."""

    @property
    def is_running(self) -> bool:
        return len(self.settled) + len(self.ready) < len(self.rows)

    @property
    def is_settled(self) -> bool:
        return len(self.settled) == len(self.rows)


class AsyncRolloutBuffer:
    """A ``DataModule`` of finished rollouts."""

    def __init__(
        self,
        data: DataModule,
        engine: RolloutEngine,
        plan: RolloutPlan,
        *,
        max_staleness: int,
        max_batches: int,
        deadline_s: float,
        seed_of: Callable[[int], int],
    ) -> None:
        """
        Args:
            data: Where rows come from.
            engine: Samples and scores them. Its timer must not be the trainer's.
            plan: How a prompt becomes a group, and which groups are wanted.
            max_staleness: Weight versions a group may be old when it is trained on.
            max_batches: With a filter: batches sampled for one step before that is an error.
            deadline_s: Longest wait of the trainer since it began a batch.
            seed_of: Batch number (1 is the first) -> the seed of its samples.
        """
        self._data, self._engine, self._plan = data, engine, plan
        self._max_staleness, self._max_batches, self._deadline_s = max_staleness, max_batches, deadline_s
        self._seed_of = seed_of
        self._changed = threading.Condition()
        self._batches: list[_Batch] = []
        """In the order they were drawn, none left out: from the oldest that is not settled to the newest."""
        self._drawn = 0
        self._size = 1
        """P, known once a batch was drawn."""
        self._version = 0
        self._failure: BaseException | None = None
        self._life = 0
        """Raised by ``load_state_dict``: threads of an earlier life find that nobody wants what they bring."""
        self._taken = Samples(())
        self._ages: list[int] = []
        self._stale = self._unwanted = 0

    # What the trainer calls

    def next_batch(self) -> list[Row]:
        """The rows of the P oldest groups that are ready, once there are P.

        Raises:
            DeadlineError: they did not come in time.
            DataError: the filter rejects nearly everything.
        """
        deadline = time.monotonic() + self._deadline_s
        begun = 0
        with self._changed:
            self._start_restored()
            while True:
                if self._failure is not None:
                    raise self._failure
                self._drop_stale()
                ready = sum(len(batch.ready) for batch in self._batches)
                grace_s = self._grace_s(ready)
                may_begin = self._may_begin(ready) and grace_s <= 0
                is_last = self._plan.keep is not None and begun == self._max_batches + self._max_staleness
                if may_begin and not is_last:
                    self._start(self._draw())
                    begun += 1
                    deadline = time.monotonic() + self._deadline_s
                elif ready >= self._size and not self._must_finish():
                    return self._take()
                elif may_begin and not any(batch.is_running for batch in self._batches):
                    raise self._too_picky(begun, ready)
                elif (left_s := deadline - time.monotonic()) <= 0:
                    raise self._late(ready)
                else:
                    self._changed.wait(min(left_s, grace_s) if grace_s > 0 else left_s)

    def collect(self) -> Samples:
        """The samples of the rows that ``next_batch`` returned last, groups in their order."""
        return self._taken

    def publish(self, version: int) -> None:
        """The generator has the weights of ``version`` from now on."""
        with self._changed:
            self._version = version
            self._drop_stale()  # before a checkpoint is written: it must not bring back what this run gives up

    def metrics(self) -> dict[str, Metric]:
        """How old the last batch was and what was thrown away since the last call."""
        with self._changed:
            found: dict[str, Metric] = {
                "avg_trajectory_age": Mean.of(self._ages),
                "max_trajectory_age": Max(max(self._ages, default=0)),
                "dropped_stale_groups": Sum(float(self._stale)),
                "dropped_unwanted_groups": Sum(float(self._unwanted)),
            }
            self._stale = self._unwanted = 0
        return found

    @property
    def epoch(self) -> int:
        return self._data.epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the oldest unsettled batch was drawn, and which groups since are settled: they are not made again."""
        with self._changed:
            oldest = self._batches[0] if self._batches else None
            return {
                "data": dict(oldest.position) if oldest else self._data.state_dict(),
                "drawn": oldest.number - 1 if oldest else self._drawn,
                "settled": [sorted(batch.settled) for batch in self._batches],
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw again what was unsettled. It is sampled when the trainer asks: the generator has yet to get weights."""
        with self._changed:
            self._life += 1
            self._batches, self._failure, self._taken = [], None, Samples(())
            self._ages, self._stale, self._unwanted = [], 0, 0
            self._data.load_state_dict(state["data"])
            self._drawn = int(state["drawn"])
            for settled in state["settled"]:
                self._draw().settled.update(settled)

    # Inside, with the lock held

    def _may_begin(self, ready: int) -> bool:
        """Whether another batch would be trained on in time, or is needed because nothing is on its way."""
        if self._is_room_ahead():
            return True
        running = [batch for batch in self._batches if batch.is_running]
        on_its_way = any(batch.is_generating for batch in running) if self._max_staleness else bool(running)
        return ready < self._size and not on_its_way and self._outstanding() < (self._max_staleness + 1) * self._size

    def _is_room_ahead(self) -> bool:
        return self._outstanding() <= self._max_staleness * self._size

    def _outstanding(self) -> int:
        return sum(len(batch.rows) - len(batch.settled) for batch in self._batches)

    def _grace_s(self, ready: int) -> float:
        """Seconds for which to wait for scores, because with those of fresh batches there would be enough groups."""
        now = time.monotonic()
        if ready >= self._size or self._is_room_ahead():
            return 0.0
        fresh = [batch for batch in self._batches if not batch.is_generating and batch.grace_until > now]
        waiting = sum(len(batch.rows) - len(batch.settled) - len(batch.ready) for batch in fresh)
        return max(batch.grace_until for batch in fresh) - now if fresh and ready + waiting >= self._size else 0.0

    def _must_finish(self) -> bool:
        """Without staleness, the trainer takes nothing while the generator may still be asked for more."""
        return self._max_staleness == 0 and any(batch.is_running for batch in self._batches)

    def _draw(self) -> _Batch:
        position = self._data.state_dict()
        self._drawn += 1
        batch = _Batch(self._drawn, self._data.next_batch(), position)
        self._size = len(batch.rows)
        self._batches.append(batch)
        return batch

    def _start_restored(self) -> None:
        for batch in self._batches:
            if batch.is_running and not batch.is_started:
                self._start(batch)

    def _start(self, batch: _Batch) -> None:
        batch.version, batch.is_started, batch.started_at = self._version, True, time.monotonic()
        name = f"rollouts-{batch.number}"
        threading.Thread(target=self._run, args=(batch, self._life), name=name, daemon=True).start()

    def _take(self) -> list[Row]:
        rows: list[Row] = []
        samples: list[Sample] = []
        self._ages = []
        for batch in self._batches:
            for index in sorted(batch.ready)[: self._size - len(rows)]:
                group = batch.ready.pop(index)
                batch.settled.add(index)
                prompt = replace(group[0].prompt, index=len(rows))
                samples += [replace(sample, prompt=prompt) for sample in group]
                self._ages += [self._version - min(sample.weight_versions) for sample in group]
                rows.append(batch.rows[index])
        self._forget_settled()
        self._taken = Samples(samples)
        return rows

    def _drop_stale(self) -> None:
        """Give up groups that are too old, whether ready or still with a slow environment."""
        for batch in self._batches:
            stale = {index for index, group in batch.ready.items() if self._is_stale(_oldest_version(group))}
            if not batch.is_generating and self._is_stale(batch.version):
                stale |= set(range(len(batch.rows))) - batch.settled - batch.ready.keys()
            for index in stale:
                batch.ready.pop(index, None)
            batch.settled |= stale
            self._stale += len(stale)
        self._forget_settled()

    def _forget_settled(self) -> None:
        """A settled batch stays while an older one is unsettled: a checkpoint tells what became of its rows."""
        while self._batches and self._batches[0].is_settled:
            del self._batches[0]

    def _is_stale(self, version: int) -> bool:
        return self._version - version > self._max_staleness

    # In a batch's thread

    def _run(self, batch: _Batch, life: int) -> None:
        """Sample and score what is not settled yet, group by group."""
        try:
            prompts = [p for p in to_prompts(batch.rows, self._engine.tokenizer) if p.index not in batch.settled]
            groups = self._engine.stream(
                prompts, self._plan, seed=self._seed_of(batch.number), on_generated=lambda: self._generated(batch)
            )
            for group in groups:
                self._deliver(batch, life, group)
        except BaseException as error:
            with self._changed:
                if life == self._life:
                    self._failure = error
                self._changed.notify_all()
        finally:
            self._generated(batch)

    def _deliver(self, batch: _Batch, life: int, group: Group) -> None:
        index = group[0].prompt.index
        is_wanted = self._plan.keep is None or self._plan.keep(group)
        with self._changed:
            if life == self._life and index not in batch.settled:
                if is_wanted:
                    batch.ready[index] = group
                else:
                    batch.settled.add(index)
                    self._unwanted += 1
            self._changed.notify_all()

    def _generated(self, batch: _Batch) -> None:
        with self._changed:
            if batch.is_generating:
                now = time.monotonic()
                batch.grace_until = now + max(MIN_GRACE_S, GRACE_FRAC * (now - batch.started_at))
            batch.is_generating = False
            self._changed.notify_all()

    # Words

    def _late(self, ready: int) -> DeadlineError:
        waiting = [batch for batch in self._batches if batch.is_running]
        generating = sum(batch.is_generating for batch in waiting)
        missing = sum(len(batch.rows) - len(batch.settled) - len(batch.ready) for batch in waiting)
        return DeadlineError(
            f"the trainer waited {self._deadline_s:.0f} s for {self._size} groups and has {ready}; {missing} are on "
            f"their way: {generating} batches with the generator, {len(waiting) - generating} with the environment",
            fix="look at the generator's log; raise cluster.worker_timeout_s if rollouts take that long, or lower "
            "rollouts.environment_timeout_s",
        )

    def _too_picky(self, begun: int, ready: int) -> DataError:
        return DataError(
            f"{begun} batches gave {ready} groups whose rewards differ, a step needs {self._size}",
            fix="the tasks are too easy or too hard for this model: change the dataset, raise "
            "num_generations_per_prompt, or raise rollouts.max_batches_per_step",
        )


def _oldest_version(group: Group) -> int:
    return min(min(sample.weight_versions) for sample in group)
