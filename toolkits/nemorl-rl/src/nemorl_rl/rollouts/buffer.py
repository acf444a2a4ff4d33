"""AsyncRolloutBuffer: scored groups in the order they are done, while the trainer trains on earlier ones.

It is the data module of a run whose batches are more than "the next P rows": ``next_batch`` returns P rows whose groups
are sampled, scored and wanted, ``collect`` hands over their samples. What is begun, taken and given up is decided by
:class:`nemorl_rl.rollouts.schedule.RolloutSchedule`; here are its threads, its waits and its clock.

Who waits for whom: the trainer, in ``next_batch``, for P groups; a batch's thread for the generator and the
environments, which have deadlines of their own. With ``max_staleness = 0`` nothing is begun before the trainer asks and
nothing runs on while it trains, hence a buffer without a filter gives exactly the samples of a run without a buffer,
and one with a filter gives the same samples however fast the environments are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from nemorl.contracts import DataModule
from nemorl.errors import DataError, DeadlineError
from nemorl.metrics import Mean, Metric
from nemorl.types import Row, Sample, Samples

from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan
from nemorl_rl.rollouts.prompts import to_prompts
from nemorl_rl.rollouts.schedule import Batch, Move, OnStale, RolloutSchedule, Settled
from nemorl_rl.rollouts.seeding import derive_seed


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
        on_stale: OnStale = "drop",
        deadline_s: float,
        seed_of: Callable[[int], int],
        on_dropped: Callable[[list[Sample], str], None] = lambda _group, _why: None,
        on_settled: Callable[[Settled], None] = lambda _row: None,
    ) -> None:
        """
        Args:
            data: Where rows come from.
            engine: Samples and scores them. Its timer must not be the trainer's.
            plan: How a prompt becomes a group, and which groups are wanted.
            max_staleness: Weight versions a group may be old when it is trained on.
            on_stale: What becomes of older ones.
            max_batches: With a filter: batches sampled for one step before that is an error.
            deadline_s: Longest wait of the trainer since it began a batch.
            seed_of: Batch number (1 is the first) -> the seed of its samples.
            on_dropped: Told of each group that is not trained on, and why. Any thread calls it, with a lock held.
            on_settled: Told what became of each row, before the next rows are drawn and before the state is asked for,
                in the order in which they were drawn. The trainer's thread calls it.
        """
        self._data, self._engine, self._plan = data, engine, plan
        self._deadline_s, self._seed_of = deadline_s, seed_of
        self._on_dropped, self._on_settled = on_dropped, on_settled
        self._changed = threading.Condition()
        """Held by whoever reads or changes what follows."""
        limit = max_batches if plan.keep is not None else None
        self._schedule = RolloutSchedule(max_staleness=max_staleness, max_batches=limit, on_stale=on_stale)
        self._generating = BusyTime(time.monotonic())
        self._failure: BaseException | None = None
        self._taken = Samples(())

    # What the trainer calls

    def next_batch(self) -> list[Row]:
        """The rows of the P oldest groups that are ready, once there are P.

        Raises:
            DeadlineError: they did not come in time.
            DataError: the filter rejects nearly everything.
        """
        begun, deadline_s = 0, time.monotonic() + self._deadline_s
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                self._start_waiting()
                now_s = time.monotonic()
                move = self._schedule.next_move(begun, now_s)
                if move is Move.BEGIN:
                    self._start(self._draw())
                    begun, deadline_s = begun + 1, time.monotonic() + self._deadline_s
                elif move is Move.TAKE:
                    self._tell_dropped(self._schedule)
                    rows, self._taken = self._schedule.take()
                    self._tell_settled()
                    return rows
                elif move is Move.GIVE_UP:
                    raise self._too_few_groups_error(begun)
                elif now_s >= deadline_s:
                    raise self._late_error()
                else:
                    self._changed.wait(min(deadline_s - now_s, self._schedule.grace_s(now_s) or self._deadline_s))

    def collect(self) -> Samples:
        """The samples of the rows that ``next_batch`` returned last, groups in their order."""
        return self._taken

    def publish(self, version: int) -> None:
        """The generator has the weights of ``version`` from now on."""
        with self._changed:
            self._schedule.publish(version)
            self._tell_dropped(self._schedule)
            if self._schedule.again:
                self._start_waiting()

    def metrics(self) -> dict[str, Metric]:
        """Ages of the last batch, groups thrown away since the last call, and how busy the generator was since."""
        with self._changed:
            found = self._schedule.metrics()
            busy_s, whole_s = self._generating.taken(time.monotonic())
        if not self._schedule.max_staleness:
            return found
        return {
            **found,
            "performance/generator_idle_frac": Mean(whole_s - busy_s, whole_s),
            "performance/generator_busy_s": Mean(busy_s),
        }

    @property
    def epoch(self) -> int:
        return self._data.epoch

    def state_dict(self) -> dict[str, Any]:
        """The position of the oldest unsettled batch, and the groups settled since, which are not made again."""
        with self._changed:
            self._tell_settled()
            return self._schedule.state_dict(self._data.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw again what was unsettled. It is sampled when the trainer asks: the generator has yet to get weights.

        Threads that were started before go on with the schedule they were started for, which nobody reads any more.
        """
        with self._changed:
            before = self._schedule
            self._schedule = RolloutSchedule(
                max_staleness=before.max_staleness,
                max_batches=before.max_batches,
                on_stale=before.on_stale,
                version=before.version,
                drawn=int(state["drawn"]),
            )
            self._failure, self._taken = None, Samples(())
            self._data.load_state_dict(state["data"])
            for settled in state["settled"]:
                self._draw().settled.update(settled)

    # With the lock held

    def _tell_dropped(self, schedule: RolloutSchedule) -> None:
        """Of the schedule that is read: what an earlier life of the run drops is made again."""
        for group, why in schedule.take_dropped() if schedule is self._schedule else []:
            self._on_dropped(group, why)

    def _tell_settled(self) -> None:
        for row in self._schedule.take_settled():
            self._on_settled(row)

    def _draw(self) -> Batch:
        self._tell_settled()
        position = self._data.state_dict()
        return self._schedule.draw(self._data.next_batch(), position)

    def _start_waiting(self) -> None:
        """Begin what is drawn and not begun: restored batches, and groups that are made again."""
        for batch in self._schedule.all:
            if batch.missing and not batch.is_started:
                self._start(batch)

    def _start(self, batch: Batch) -> None:
        now_s = time.monotonic()
        self._schedule.start(batch, now_s)
        self._generating.begin(now_s)
        name = f"rollouts-{batch.number}"
        threading.Thread(target=self._run, args=(batch, self._schedule), name=name, daemon=True).start()

    # In a batch's thread

    def _run(self, batch: Batch, schedule: RolloutSchedule) -> None:
        """Sample and score what is not settled yet, group by group, for the schedule that the batch is of."""

        def end_generation() -> None:
            with self._changed:
                now_s = time.monotonic()
                if batch.is_generating:
                    self._generating.end(now_s)
                schedule.end_generation(batch, now_s)
                self._changed.notify_all()

        try:
            prompts = [p for p in to_prompts(batch.rows, self._engine.tokenizer) if p.index not in batch.settled]
            seed = self._seed_of(batch.number)
            if batch.attempt:
                seed = derive_seed(seed, "again", batch.attempt)
            for group in self._engine.stream(prompts, self._plan, seed=seed, on_generated=end_generation):
                is_wanted = self._plan.keep is None or self._plan.keep(group)
                with self._changed:
                    schedule.deliver(batch, group, is_wanted=is_wanted)
                    self._tell_dropped(schedule)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                if schedule is self._schedule:
                    self._failure = error
                self._changed.notify_all()
        finally:
            end_generation()

    # Errors

    def _late_error(self) -> DeadlineError:
        waiting = [batch for batch in self._schedule.batches if batch.missing]
        generating = sum(batch.is_generating for batch in waiting)
        return DeadlineError(
            f"the trainer waited {self._deadline_s:.0f} s for {self._schedule.size} groups and has "
            f"{self._schedule.ready}; {sum(batch.missing for batch in waiting)} are on their way: {generating} batches "
            f"with the generator, {len(waiting) - generating} with the environment",
            fix="look at the generator's log; raise cluster.worker_timeout_s if rollouts take that long, or lower "
            "rollouts.environment_timeout_s",
        )

    def _too_few_groups_error(self, begun: int) -> DataError:
        return DataError(
            f"{begun} batches gave {self._schedule.ready} groups whose rewards differ, a step needs "
            f"{self._schedule.size}",
            fix="the tasks are too easy or too hard for this model: change the dataset, raise "
            "num_generations_per_prompt, or raise rollouts.max_batches_per_step",
        )


class BusyTime:
    """Busy and idle seconds since the last question, of several things, by a clock that the caller reads.

    Example:
        >>> work = BusyTime(now_s=0.0)
        >>> work.begin(1.0)
        >>> work.begin(2.0)
        >>> work.end(3.0)
        >>> work.end(4.0)
        >>> work.taken(10.0)  # busy from 1 to 4
        (3.0, 10.0)
    """

    def __init__(self, now_s: float) -> None:
        self._asked_s = self._settled_s = now_s
        self._busy_s = 0.0
        self._under_way = 0

    def begin(self, now_s: float) -> None:
        """One more is under way."""
        self._settle(now_s)
        self._under_way += 1

    def end(self, now_s: float) -> None:
        """One less is."""
        self._settle(now_s)
        self._under_way -= 1

    def taken(self, now_s: float) -> tuple[float, float]:
        """Seconds since the last call in which something was under way, and all seconds since then."""
        self._settle(now_s)
        whole_s, busy_s = now_s - self._asked_s, self._busy_s
        self._asked_s, self._busy_s = now_s, 0.0
        return busy_s, whole_s

    def _settle(self, now_s: float) -> None:
        if self._under_way:
            self._busy_s += now_s - self._settled_s
        self._settled_s = now_s
