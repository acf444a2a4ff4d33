"""The bias of giving up groups that come too late: half of the tasks are slow, how many of those trained on are?

    python benchmarks/stale_groups.py --json

The real schedule of asynchronous rollouts runs against a clock of its own: no model, no threads, the same numbers
everywhere. A step trains on P groups and takes one unit of time, generating a batch another. Fast tasks are scored at
once, slow ones after ``latency`` units; half are slow, drawn by a seed. Unbiased would be a share of 0.5.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from _common import print_table
from nemorl.types import Prompt, Sample, Score
from nemorl_rl.rollouts.schedule import Batch, Move, RolloutSchedule

P, STEPS = 16, 300
TRAIN_S = GENERATE_S = 1.0
POLICIES = ("drop", "requeue", "train")


class Clock:
    """A run in which everything takes as long as it is said to."""

    def __init__(self, on_stale: Any, max_staleness: int, latency_s: float, seed: int = 0) -> None:
        self.schedule = RolloutSchedule(max_staleness=max_staleness, on_stale=on_stale)
        self._latency_s, self._draw = latency_s, random.Random(seed)
        self._events: list[tuple[float, int, Batch, int]] = []
        self._order = itertools.count()
        self._now_s = self._generator_free_s = 0.0

    def run(self) -> dict[str, float]:
        """Shares and times of ``STEPS`` steps."""
        slow, ages = 0, []
        for version in range(1, STEPS + 1):
            self._wait_for_groups()
            rows, samples = self.schedule.take()
            slow += sum(row["is_slow"] for row in rows)
            ages += [version - 1 - sample.weight_versions[0] for sample in samples]
            self._pass(self._now_s + TRAIN_S)
            self.schedule.publish(version)
            for batch in self.schedule.again:
                if not batch.is_started:
                    self._begin(batch)
        return {
            "slow_share": round(slow / (STEPS * P), 3),
            "mean_age": round(sum(ages) / len(ages), 2),
            "max_age": max(ages),
            "time_per_step": round(self._now_s / STEPS, 3),
        }

    def _wait_for_groups(self) -> None:
        begun = 0
        while (move := self.schedule.next_move(begun, self._now_s)) is not Move.TAKE:
            if move is Move.BEGIN:
                rows = [{"is_slow": self._draw.random() < 0.5} for _ in range(P)]
                self._begin(self.schedule.draw(rows, {}))
                begun += 1
            else:
                grace_s = self.schedule.grace_s(self._now_s)
                self._pass(min(self._now_s + grace_s if grace_s else self._events[0][0], self._events[0][0]))

    def _begin(self, batch: Batch) -> None:
        self.schedule.start(batch, self._now_s)
        self._generator_free_s = max(self._generator_free_s, self._now_s) + GENERATE_S * len(batch.rows) / P
        self._at(self._generator_free_s, batch, -1)
        for index, row in enumerate(batch.rows):
            self._at(self._generator_free_s + (self._latency_s if row["is_slow"] else 0.0), batch, index)

    def _at(self, moment_s: float, batch: Batch, index: int) -> None:
        heapq.heappush(self._events, (moment_s, next(self._order), batch, index))

    def _pass(self, until_s: float) -> None:
        """Let time pass, and what happens meanwhile happen."""
        while self._events and self._events[0][0] <= until_s:
            self._now_s, _, batch, index = heapq.heappop(self._events)
            if index < 0:
                self.schedule.end_generation(batch, self._now_s)
            else:
                prompt = Prompt(index, "", ())
                one = Sample(prompt, (), (), (), Score(1.0), "", "stop", weight_versions=(batch.version,))
                self.schedule.deliver(batch, [one], is_wanted=True)
        self._now_s = until_s


def cases() -> Iterator[dict[str, Any]]:
    """Every policy at two bounds and two latencies."""
    for staleness, latency_s, policy in itertools.product((1, 2), (1.5, 4.0), POLICIES):
        found = Clock(policy, staleness, latency_s).run()
        yield {"max_staleness": staleness, "latency": latency_s, "on_stale": policy, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args()
    found = list(cases())
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print_table(
        "Half of the tasks are slow",
        [str(name) for name in found[0]],
        [[str(value) for value in row.values()] for row in found],
    )


if __name__ == "__main__":
    main()
