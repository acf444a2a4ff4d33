"""RolloutSchedule: which rows are sampled when, and which groups are trained on, kept or given up.

It decides and counts; it starts nothing, waits for nothing and reads no clock. ``AsyncRolloutBuffer`` (``buffer``) runs
it with threads.

A run draws its rows in batches of P, numbered from 1. Each row is *settled* when its group was trained on, was unwanted
or was given up. The version of the weights counts the trainer's steps. A group is trained on at most ``max_staleness``
versions after the oldest weights that produced any of its tokens. What comes too late, because its environment was
slow, stalls nobody: ``on_stale`` says whether it is given up, made again, or trained on all the same. Giving up is a
bias, since the slow tasks are often the hard ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Literal

from nemorl.metrics import Max, Mean, Metric, Sum
from nemorl.types import Row, Sample, Samples

Group = list[Sample]

GRACE_FRAC, MIN_GRACE_S = 0.05, 0.05
"""The generator idles this fraction of a batch's generation time (at least the minimum) for scores that would make
another batch superfluous. Most environments answer within it; a straggler costs it once per batch."""
STALE = "stale"
"""Why a group is given up: the weights that made its oldest token are too old."""
MAX_REQUEUES = 3
"""Times that a prompt is made again because its group was too old. Then it is given up: it is slower than any weights
last, and only a larger ``max_staleness`` or ``on_stale: train`` learns from it."""
OnStale = Literal["drop", "requeue", "train"]


@dataclass(frozen=True)
class Settled:
    """What became of one row."""

    batch: int
    """Number of the batch."""
    index: int
    """Of the row in it."""
    group: Group | None
    """Its samples; ``None``: they were given up before they were all there."""
    step: int
    """The training step for which it was begun."""


@dataclass
class Batch:
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
    started_s: float = 0.0
    grace_until_s: float = 0.0
    """Until then its scores may well come: a moment of the caller's clock, known once it is generated."""
    requeued: set[int] = field(default_factory=set)
    """Groups that another batch makes again."""
    parent: tuple[Batch, Sequence[int]] | None = None
    """Of a batch that makes groups again: where they were drawn, and which they are there."""
    attempt: int = 0
    """How often its groups were too old."""

    @property
    def missing(self) -> int:
        """Groups that are neither ready nor settled, nor made again elsewhere."""
        return len(self.rows) - len(self.settled) - len(self.ready) - len(self.requeued)

    def settle(self, index: int) -> None:
        """Nothing more becomes of this group, here and where it was drawn."""
        self.settled.add(index)
        if self.parent is not None:
            batch, places = self.parent
            batch.requeued.discard(places[index])
            batch.settle(places[index])


class Move(Enum):
    """The next thing to do for a trainer that asks for P groups."""

    BEGIN = auto()
    """Draw a batch and sample it."""
    TAKE = auto()
    """Train on the groups that are ready."""
    WAIT = auto()
    """Until a group is done; at most for ``grace_s``, where that is not 0."""
    GIVE_UP = auto()
    """As many batches as one step may begin gave too few groups."""


class RolloutSchedule:
    """The state of all batches that are drawn and not settled, and the decisions that follow from it."""

    def __init__(
        self,
        *,
        max_staleness: int,
        max_batches: int | None = None,
        on_stale: OnStale = "drop",
        version: int = 0,
        drawn: int = 0,
    ) -> None:
        """
        Args:
            max_staleness: Weight versions a group may be old when it is trained on.
            on_stale: What becomes of an older one.
            max_batches: Batches begun for one step before that is given up. Unset: no limit, for no group is unwanted.
            version: Of the weights that the generator has.
            drawn: Batches drawn before, in an earlier life of the run.
        """
        self.max_staleness, self.max_batches, self.version = max_staleness, max_batches, version
        self.on_stale: OnStale = on_stale
        self.batches: list[Batch] = []
        """In the order they were drawn, none left out: from the oldest that is not settled to the newest."""
        self.again: list[Batch] = []
        """Of groups that were too old and are made again. They come first."""
        self.size = 1
        """P, known once a batch was drawn."""
        self._drawn = drawn
        self._ages: list[int] = []
        self._stale = self._unwanted = self._requeued = 0
        self._dropped: list[tuple[Group, str]] = []
        self._settled: list[Settled] = []

    # What is decided

    def next_move(self, begun: int, now_s: float) -> Move:
        """The move for a trainer that asks for P groups and for which ``begun`` batches were begun since it asked."""
        self._drop_stale()
        may_begin = self._may_begin() and self.grace_s(now_s) <= 0
        # Batches sampled ahead are for later steps, and do not count against this one.
        is_last = self.max_batches is not None and begun == self.max_batches + self.max_staleness
        is_running = any(batch.missing for batch in self.all)
        if may_begin and not is_last:
            return Move.BEGIN
        # Without staleness, the trainer takes nothing while the generator may still be asked for more.
        if self.ready >= self.size and not (self.max_staleness == 0 and is_running):
            return Move.TAKE
        return Move.WAIT if is_running else Move.GIVE_UP

    def grace_s(self, now_s: float) -> float:
        """Seconds for which to wait for scores, because with those of fresh batches there would be enough groups."""
        if self.ready >= self.size or self._has_room_ahead:
            return 0.0
        fresh = [batch for batch in self.all if not batch.is_generating and batch.grace_until_s > now_s]
        if not fresh or self.ready + sum(batch.missing for batch in fresh) < self.size:
            return 0.0
        return max(batch.grace_until_s for batch in fresh) - now_s

    @property
    def all(self) -> list[Batch]:
        """Batches whose groups are sampled, those that are taken first in front."""
        return [*self.again, *self.batches]

    @property
    def ready(self) -> int:
        """Groups that could be trained on now."""
        return sum(len(batch.ready) for batch in self.all)

    @property
    def _outstanding(self) -> int:
        return sum(len(batch.rows) - len(batch.settled) for batch in self.batches)

    @property
    def _has_room_ahead(self) -> bool:
        return self._outstanding <= self.max_staleness * self.size

    def _may_begin(self) -> bool:
        """Another batch would be trained on in time, or is needed because nothing is on its way."""
        if self._has_room_ahead:
            return True
        running = [batch for batch in self.all if batch.missing]
        on_its_way = any(batch.is_generating for batch in running) if self.max_staleness else bool(running)
        is_crowded = self._outstanding >= (self.max_staleness + 1) * self.size
        return self.ready < self.size and not on_its_way and not is_crowded

    # What happens

    def draw(self, rows: list[Row], position: Mapping[str, Any]) -> Batch:
        """A batch of these rows, which the data module gave at ``position``."""
        self._drawn += 1
        self.size = len(rows)
        self.batches.append(Batch(self._drawn, rows, position))
        return self.batches[-1]

    def start(self, batch: Batch, now_s: float) -> None:
        """The generator begins to sample it."""
        batch.version, batch.is_started, batch.started_s = self.version, True, now_s

    def end_generation(self, batch: Batch, now_s: float) -> None:
        """The generator is through with it: what is missing is with the environment. Twice is harmless."""
        if batch.is_generating:
            batch.is_generating = False
            batch.grace_until_s = now_s + max(MIN_GRACE_S, GRACE_FRAC * (now_s - batch.started_s))

    def deliver(self, batch: Batch, group: Group, *, is_wanted: bool) -> None:
        """A group of the batch is sampled and scored. One that was given up meanwhile stays so."""
        index = group[0].prompt.index
        if index in batch.settled or index in batch.requeued:
            self._dropped.append((group, STALE))
        elif is_wanted:
            batch.ready[index] = group
        else:
            self._settle(batch, index, group)
            self._unwanted += 1
            self._dropped.append((group, why_unwanted(group)))

    def take_dropped(self) -> list[tuple[Group, str]]:
        """The groups that are not trained on, each with the reason, since the last call. Those whose episodes were
        given up come when they have ended, if they do."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def take_settled(self) -> list[Settled]:
        """The rows that were settled since the last call, in the order in which they were drawn."""
        settled, self._settled = self._settled, []
        return sorted(settled, key=lambda one: (one.batch, one.index))

    def take(self) -> tuple[list[Row], Samples]:
        """The rows of the P oldest groups that are ready, and their samples, renumbered from 0."""
        rows: list[Row] = []
        samples: list[Sample] = []
        self._ages = []
        for batch in self.all:
            for index in sorted(batch.ready)[: self.size - len(rows)]:
                group = batch.ready.pop(index)
                self._settle(batch, index, group)
                prompt = replace(group[0].prompt, index=len(rows))
                samples += [replace(sample, prompt=prompt) for sample in group]
                self._ages += [self.version - min(sample.weight_versions) for sample in group]
                rows.append(batch.rows[index])
        self._forget_settled()
        return rows, Samples(samples)

    def publish(self, version: int) -> None:
        """The generator has the weights of ``version`` from now on."""
        self.version = version
        self._drop_stale()  # before a checkpoint is written: it must not bring back what this run gives up

    def _drop_stale(self) -> None:
        """Take groups out that are too old, whether ready or still with a slow environment."""
        for batch in [] if self.on_stale == "train" else self.all:
            stale = {
                index
                for index, group in batch.ready.items()
                if self._is_stale(min(min(sample.weight_versions) for sample in group))
            }
            if not batch.is_generating and self._is_stale(batch.version):
                stale |= set(range(len(batch.rows))) - batch.settled - batch.ready.keys() - batch.requeued
            makes_again = self.on_stale == "requeue" and batch.attempt < MAX_REQUEUES
            for index in sorted(stale):
                group = batch.ready.pop(index, None)
                if group is not None:
                    self._dropped.append((group, STALE))
                if not makes_again:
                    self._settle(batch, index, group)
                    self._stale += 1
            if makes_again:
                self._make_again(batch, sorted(stale))
        self._forget_settled()

    def _make_again(self, batch: Batch, places: Sequence[int]) -> None:
        if places:
            batch.requeued |= set(places)
            rows = [batch.rows[place] for place in places]
            parent = (batch, places)
            self.again.append(Batch(batch.number, rows, batch.position, parent=parent, attempt=batch.attempt + 1))
            self._requeued += len(places)

    def _settle(self, batch: Batch, index: int, group: Group | None) -> None:
        """Nothing more becomes of a group; told as one of the batch that it was drawn with."""
        step = batch.version + 1
        batch.settle(index)
        while batch.parent is not None:
            batch, places = batch.parent
            index = places[index]
        self._settled.append(Settled(batch.number, index, group, step))

    def _is_stale(self, version: int) -> bool:
        return self.version - version > self.max_staleness

    def _forget_settled(self) -> None:
        """A settled batch stays while an older one is unsettled: a checkpoint tells what became of its rows."""
        while self.batches and len(self.batches[0].settled) == len(self.batches[0].rows):
            del self.batches[0]
        self.again = [batch for batch in self.again if batch.missing or batch.ready]

    # What is told

    def metrics(self) -> dict[str, Metric]:
        """Ages of the last batch, and groups thrown away since the last call."""
        found: dict[str, Metric] = {
            "avg_trajectory_age": Mean.of(self._ages),
            "max_trajectory_age": Max(max(self._ages, default=0)),
            "dropped_stale_groups": Sum(float(self._stale)),
            **({"requeued_stale_groups": Sum(float(self._requeued))} if self.on_stale == "requeue" else {}),
            "dropped_unwanted_groups": Sum(float(self._unwanted)),
        }
        self._stale = self._unwanted = self._requeued = 0
        return found

    def state_dict(self, now: Mapping[str, Any]) -> dict[str, Any]:
        """The position of the oldest unsettled batch, and the groups settled since, which are not made again.

        Args:
            now: The data module's state, which is that of the oldest unsettled batch where there is none.
        """
        oldest = self.batches[0] if self.batches else None
        return {
            "data": dict(oldest.position if oldest else now),
            "drawn": oldest.number - 1 if oldest else self._drawn,
            "settled": [sorted(batch.settled) for batch in self.batches],
        }


def why_unwanted(group: Sequence[Sample]) -> str:
    """The reason for which a filter rejects a group: ``invalid``, ``equal_rewards``, or one of its own (``unwanted``).

    Example:
        >>> def response(reward: float) -> Sample:
        ...     return Sample(Prompt(0, "1+1=", (5,)), (5, 6), (False, True), (0.0, -1.0), Score(reward), "2", "stop")
        >>> why_unwanted([response(1.0), response(1.0)])
        'equal_rewards'
    """
    rewards = {sample.reward for sample in group if sample.score.valid}
    return "invalid" if not rewards else "equal_rewards" if len(rewards) == 1 else "unwanted"
