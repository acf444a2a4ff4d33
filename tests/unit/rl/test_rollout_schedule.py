"""The schedule of rollouts, worked by hand: no model, no thread, no clock. Moments are seconds that the test makes up.

In comments, ``0 1 | 2 3`` are the rows of the first and the second batch.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from nemorl.metrics import values
from nemorl.types import Prompt, Sample, Score
from nemorl_rl.rollouts.schedule import Batch, Group, Move, RolloutSchedule, why_unwanted


def draw(schedule: RolloutSchedule, size: int = 2, *, now_s: float = 0.0) -> Batch:
    """Draw and start a batch of rows named by their number in the data."""
    first = schedule.batches[-1].number * size if schedule.batches else 0
    batch = schedule.draw([{"prompt": str(first + index)} for index in range(size)], {"position": first})
    schedule.start(batch, now_s)
    return batch


def group(batch: Batch, index: int, *versions: int) -> Group:
    """One sample of the batch's row ``index``, by these weights; without any, by those it was started with."""
    text = batch.rows[index]["prompt"]
    weights = versions or (batch.version,)
    return [Sample(Prompt(index, text, ()), (7,), (True,), (-1.0,), Score(1.0), "7", "stop", weight_versions=weights)]


def deliver(schedule: RolloutSchedule, batch: Batch, *indices: int, unwanted: bool = False) -> None:
    for index in indices:
        schedule.deliver(batch, group(batch, index), is_wanted=not unwanted)


def taken(schedule: RolloutSchedule) -> list[str]:
    return [row["prompt"] for row in schedule.take()[0]]


def told(schedule: RolloutSchedule) -> list[tuple[str, str]]:
    """Which groups were dropped since the last call, and why."""
    return [(group[0].prompt.text, why) for group, why in schedule.take_dropped()]


def dropped(schedule: RolloutSchedule) -> tuple[float, float]:
    """Stale and unwanted groups since the last call."""
    metrics = values(schedule.metrics())
    return metrics["dropped_stale_groups"], metrics["dropped_unwanted_groups"]


@pytest.mark.parametrize(("staleness", "ahead"), [(0, 1), (1, 2), (3, 4)])
@pytest.mark.slow
def test_batches_are_begun_until_more_than_staleness_times_p_groups_are_outstanding(staleness: int, ahead: int) -> None:
    # P = 2. A batch is begun at 0, 2, …, 2 * staleness outstanding groups: staleness + 1 of them.
    schedule = RolloutSchedule(max_staleness=staleness)
    for begun in range(ahead):
        assert schedule.next_move(begun, 0.0) is Move.BEGIN
        draw(schedule)
    assert schedule.next_move(ahead, 0.0) is Move.WAIT


def test_the_oldest_groups_that_are_ready_are_taken_and_renumbered() -> None:
    # 0 1 | 2 3, of which 0 is slow: 1 and 2 are trained on, as prompts 0 and 1 of their step.
    schedule = RolloutSchedule(max_staleness=1)
    first, second = draw(schedule), draw(schedule)
    deliver(schedule, second, 1, 0)
    deliver(schedule, first, 1)
    assert schedule.next_move(2, 0.0) is Move.TAKE
    rows, samples = schedule.take()
    assert [row["prompt"] for row in rows] == ["1", "2"]
    assert [(sample.prompt.index, sample.prompt.text) for sample in samples] == [(0, "1"), (1, "2")]
    assert schedule.ready == 1  # row 3


def test_ages_count_from_the_oldest_weights_of_a_sample() -> None:
    schedule = RolloutSchedule(max_staleness=3, version=5)
    batch = draw(schedule)
    schedule.deliver(batch, group(batch, 0, 3, 4), is_wanted=True)  # 5 - 3 = 2
    schedule.deliver(batch, group(batch, 1, 5), is_wanted=True)  # 5 - 5 = 0
    schedule.take()
    metrics = values(schedule.metrics())
    assert (metrics["avg_trajectory_age"], metrics["max_trajectory_age"]) == (1.0, 2.0)


def test_new_weights_drop_what_is_ready_and_too_old_and_what_its_environment_holds_up() -> None:
    # 0 is ready and of weights 0, 1 with its environment. Of weights 2, staleness 1 allows weights 1.
    schedule = RolloutSchedule(max_staleness=1)
    batch = draw(schedule)
    deliver(schedule, batch, 0)
    schedule.end_generation(batch, 1.0)
    schedule.publish(1)
    assert (schedule.ready, dropped(schedule)) == (1, (0, 0))
    schedule.publish(2)
    assert (schedule.ready, dropped(schedule)) == (0, (2, 0))
    assert schedule.batches == []
    assert told(schedule) == [("0", "stale")]
    deliver(schedule, batch, 1)  # its environment answers after all
    assert schedule.ready == 0
    assert told(schedule) == [("1", "stale")]


def test_a_group_that_a_filter_rejects_is_told_with_the_reason() -> None:
    schedule = RolloutSchedule(max_staleness=0)
    batch = draw(schedule)
    alike, other = group(batch, 0), group(batch, 1)
    unjudged = [replace(one, score=Score(0.0, valid=False)) for one in other]
    for rejected in (alike, unjudged):
        schedule.deliver(batch, rejected, is_wanted=False)
    assert told(schedule) == [("0", "equal_rewards"), ("1", "invalid")]
    assert told(schedule) == []
    assert why_unwanted([*alike, replace(alike[0], score=Score(9.0))]) == "unwanted"


def test_a_batch_that_is_being_generated_may_yet_get_new_weights() -> None:
    # How old a group is, its samples say: the batch was begun with weights 0 and sampled with 2.
    schedule = RolloutSchedule(max_staleness=1)
    batch = draw(schedule)
    schedule.publish(2)
    assert dropped(schedule) == (0, 0)
    schedule.deliver(batch, group(batch, 0, 2), is_wanted=True)
    schedule.deliver(batch, group(batch, 1, 0, 2), is_wanted=True)  # its first tokens are of weights 0
    schedule.next_move(1, 0.0)
    assert (schedule.ready, dropped(schedule)) == (1, (1, 0))


@pytest.mark.parametrize(("staleness", "begun"), [(0, 3), (2, 5)])
def test_a_step_gives_up_when_the_batches_it_may_begin_gave_too_few_groups(staleness: int, begun: int) -> None:
    # max_batches = 3, and those that are sampled ahead besides.
    schedule = RolloutSchedule(max_staleness=staleness, max_batches=3)
    for number in range(begun):
        assert schedule.next_move(number, 0.0) is Move.BEGIN
        deliver(schedule, draw(schedule), 0, 1, unwanted=True)
    assert schedule.next_move(begun, 0.0) is Move.GIVE_UP
    assert dropped(schedule) == (0, 2 * begun)


def test_without_staleness_nothing_is_taken_while_anything_is_still_running() -> None:
    # 0 is unwanted, so 2 3 are begun. 1 and 2 would suffice, and 3 may yet ask the generator for another turn.
    schedule = RolloutSchedule(max_staleness=0, max_batches=5)
    first = draw(schedule)
    deliver(schedule, first, 0, unwanted=True)
    deliver(schedule, first, 1)
    assert schedule.next_move(1, 0.0) is Move.BEGIN
    second = draw(schedule)
    deliver(schedule, second, 0)
    assert schedule.next_move(2, 0.0) is Move.WAIT
    deliver(schedule, second, 1)
    assert schedule.next_move(2, 0.0) is Move.TAKE
    assert taken(schedule) == ["1", "2"]


def test_a_batch_waits_a_moment_for_scores_that_would_make_it_superfluous() -> None:
    # Generated from second 10 to 30: scores have 5 % of 20 s, until second 31. 0 is ready, 1 unwanted; 2 or 3 would do.
    schedule = RolloutSchedule(max_staleness=1, max_batches=5)
    first, second = draw(schedule, now_s=10.0), draw(schedule, now_s=10.0)
    schedule.end_generation(first, 30.0)
    schedule.end_generation(second, 30.0)
    schedule.end_generation(second, 99.0)  # twice is harmless
    deliver(schedule, first, 0)
    deliver(schedule, first, 1, unwanted=True)
    assert (schedule.next_move(2, 30.25), schedule.grace_s(30.25)) == (Move.WAIT, 0.75)
    assert (schedule.next_move(2, 31.0), schedule.grace_s(31.0)) == (Move.BEGIN, 0.0)


def test_what_was_drawn_after_a_batch_that_is_not_settled_is_saved_with_what_became_of_it() -> None:
    # 0 1 | 2 3 | 4 5, of which 0 and 2 were trained on, then 3 and 4: the second batch is settled, the first is not.
    schedule = RolloutSchedule(max_staleness=2)
    first, second, third = (draw(schedule) for _ in range(3))
    deliver(schedule, first, 0)
    deliver(schedule, second, 0)
    assert taken(schedule) == ["0", "2"]
    deliver(schedule, second, 1)
    deliver(schedule, third, 0)
    assert taken(schedule) == ["3", "4"]
    now = {"position": 6}
    assert schedule.state_dict(now) == {"data": {"position": 0}, "drawn": 0, "settled": [[0], [0, 1], [0]]}
    deliver(schedule, first, 1)
    deliver(schedule, third, 1)
    assert taken(schedule) == ["1", "5"]
    assert schedule.state_dict(now) == {"data": now, "drawn": 3, "settled": []}


@pytest.mark.parametrize("seed", range(40))
def test_no_row_is_trained_on_twice_lost_or_too_old_in_any_order_of_events(seed: int) -> None:
    dice = random.Random(seed)
    size, staleness = dice.randint(1, 4), dice.randint(0, 3)
    limit = dice.choice([None, 1000])
    schedule = RolloutSchedule(max_staleness=staleness, max_batches=limit)
    running: list[tuple[Batch, int]] = []
    trained: list[str] = []
    stale = unwanted = drawn = 0
    clock = itertools.count()
    for _ in range(300):
        now_s = float(next(clock))
        move = schedule.next_move(0, now_s)
        event = dice.choice(["trainer", "trainer", "deliver", "deliver", "generated"])
        if event == "trainer" and move is Move.BEGIN:
            batch = schedule.draw([{"prompt": str(drawn + index)} for index in range(size)], {"position": drawn})
            schedule.start(batch, now_s)
            running += [(batch, index) for index in range(size)]
            drawn += size
        elif event == "trainer" and move is Move.TAKE:
            rows, samples = schedule.take()
            assert len(rows) == len(samples) == size
            assert all(schedule.version - min(sample.weight_versions) <= staleness for sample in samples)
            trained += [row["prompt"] for row in rows]
            schedule.publish(schedule.version + 1)
        elif event == "deliver" and running:
            batch, index = running.pop(dice.randrange(len(running)))
            schedule.deliver(batch, group(batch, index), is_wanted=limit is None or dice.random() < 0.7)
        elif event == "generated" and schedule.batches:
            schedule.end_generation(dice.choice(schedule.batches), now_s)
        more_stale, more_unwanted = dropped(schedule)
        stale, unwanted = stale + int(more_stale), unwanted + int(more_unwanted)
        outstanding = sum(len(batch.rows) - len(batch.settled) for batch in schedule.batches)
        assert outstanding < (staleness + 2) * size
        assert len(trained) + stale + unwanted + outstanding == drawn
    assert len(set(trained)) == len(trained)
    assert trained


# Groups that come too late


def straggling(on_stale: str) -> tuple[RolloutSchedule, Batch]:
    """0 1 | 2 3 | 4 5, of which 1 is so slow that two updates pass; and its batch."""
    schedule = RolloutSchedule(max_staleness=1, on_stale=on_stale)  # type: ignore[arg-type]
    first, second = draw(schedule), draw(schedule)
    for batch in (first, second):
        schedule.end_generation(batch, 0.0)
    deliver(schedule, first, 0)
    deliver(schedule, second, 0)
    assert taken(schedule) == ["0", "2"]
    schedule.publish(1)
    third = draw(schedule)
    deliver(schedule, second, 1)
    deliver(schedule, third, 0)
    assert taken(schedule) == ["3", "4"]
    schedule.publish(2)
    return schedule, first


def test_a_prompt_that_came_too_late_is_made_again_and_comes_first() -> None:
    schedule, first = straggling("requeue")
    (again,) = schedule.again
    assert [row["prompt"] for row in again.rows] == ["1"]
    schedule.start(again, 0.0)
    assert (again.version, again.attempt) == (2, 1)
    deliver(schedule, first, 1)  # what the slow environment says after all is of weights 0
    assert [why for _, why in told(schedule)] == ["stale"]
    deliver(schedule, again, 0)
    deliver(schedule, schedule.batches[-1], 1)
    assert schedule.state_dict({})["settled"] == [[0], [0, 1], [0]]  # 1 is drawn again after a restart
    assert taken(schedule) == ["1", "5"]
    metrics = values(schedule.metrics())
    assert (metrics["requeued_stale_groups"], metrics["dropped_stale_groups"]) == (1, 0)
    assert (schedule.again, schedule.batches) == ([], [])


def test_a_prompt_that_is_always_too_late_is_given_up_in_the_end() -> None:
    schedule, _ = straggling("requeue")
    for attempt in range(1, 4):
        (again,) = schedule.again
        assert again.attempt == attempt
        schedule.start(again, 0.0)
        schedule.end_generation(again, 0.0)
        for _ in range(2):
            schedule.publish(schedule.version + 1)
    assert schedule.again == []
    assert values(schedule.metrics())["dropped_stale_groups"] == 1
    assert [batch.number for batch in schedule.batches] == [3], "5 is still being generated"


def test_a_group_may_be_trained_on_at_any_age() -> None:
    schedule, first = straggling("train")
    deliver(schedule, first, 1)
    deliver(schedule, schedule.batches[-1], 1)
    assert taken(schedule) == ["1", "5"]
    metrics = values(schedule.metrics())
    assert (metrics["max_trajectory_age"], metrics["dropped_stale_groups"]) == (2, 0)
