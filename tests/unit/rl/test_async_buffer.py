"""The rollout buffer: what is begun, taken, dropped and refused. Restarts are in ``test_async_buffer_restarts``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from buffer_world import PATIENCE_S, ROWS, Build, Doors, names, seed_of, worlds
from nemorl.contracts.environment import Environment
from nemorl.errors import DataError, DeadlineError, ForeignError
from nemorl.metrics import values
from nemorl.types import Prompt, Sample, Score, Step
from nemorl_rl.data.rows import RowDataModule
from nemorl_rl.environments import RewardFunction
from nemorl_rl.rollouts import schedule as rollout_schedule
from nemorl_rl.rollouts.prompts import to_prompts
from recorded_messages import Raises


@pytest.fixture
def build(tiny_model: Path) -> Iterator[Build]:
    with worlds(tiny_model) as make:
        yield make


# Without staleness


def test_without_staleness_rows_and_samples_are_those_of_a_run_without_a_buffer(build: Build) -> None:
    world = build(prompts=3, group=2, staleness=0)
    data = RowDataModule(ROWS, 3, seed=1, shuffle=False)
    for step in range(1, 5):
        rows = data.next_batch()
        expected = world.engine.collect(to_prompts(rows, world.engine.tokenizer), world.plan, seed=seed_of(step))
        assert world.buffer.next_batch() == rows
        assert list(world.buffer.collect()) == list(expected)
        assert world.update()["max_trajectory_age"] == 0


def test_without_staleness_nothing_is_begun_before_the_trainer_asks(build: Build) -> None:
    world = build(staleness=0)
    world.take()
    world.finish_threads()
    assert world.speaker.asked == names(0, 1)


class Asking(Environment):
    """Two turns; between them, a prompt waits at its door."""

    name = "asking"

    def __init__(self, doors: Doors) -> None:
        self.doors = doors

    def start(self, prompt: Prompt) -> Any:
        return _Talk(self.doors, prompt)

    def close(self) -> None: ...


class _Talk:
    def __init__(self, doors: Doors, prompt: Prompt) -> None:
        self.doors, self.prompt, self.turns = doors, prompt, 0

    def step(self, response: str) -> Step:
        self.turns += 1
        self.doors.enter(f"{self.prompt.text}.{self.turns}")
        # A prompt below 2 is done after one turn, the others are asked again.
        is_asked_again = self.turns == 1 and int(self.prompt.text) >= 2
        return Step(Score(1.0), "more" if is_asked_again else None, done=not is_asked_again)


def test_without_staleness_no_one_samples_while_the_trainer_trains(build: Build) -> None:
    # 0 is unwanted, so a second batch (2, 3) is begun; 2 ends its second turn while 3 waits to be asked again.
    doors = Doors()
    doors.close()
    world = build(staleness=0, turns=2, environment=Asking(doors), keep=lambda group: group[0].prompt.text != "0")
    with ThreadPoolExecutor(1) as trainer:
        taking = trainer.submit(world.take)
        taking.add_done_callback(doors.wake)
        doors.open("0.1", "1.1", "2.1", "3.1", "2.2")
        doors.wait_for(lambda: "3.2" in doors.waiting or taking.done())
        world.wait_for_groups("2")
        with pytest.raises(TimeoutError):
            taking.result(0.2)
        doors.open()
        assert taking.result(PATIENCE_S) == names(1, 2)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (2, 1, 0, 5, 4, 3)])
def test_without_staleness_the_speed_of_environments_changes_no_batch(build: Build, order: tuple[int, ...]) -> None:
    # Rows 0 and 1 are unwanted: of 3, 4, 5 that come to replace them, 3 and 4 are taken, whoever was first.
    world = build(prompts=3, staleness=0, keep=lambda group: int(group[0].prompt.text) > 1)
    world.doors.close()
    with ThreadPoolExecutor(1) as trainer:
        taking = trainer.submit(world.take)
        for number in order:
            world.doors.open(str(number))
            world.wait_for_groups(str(number))
        assert taking.result(PATIENCE_S) == names(2, 3, 4)
    assert world.update()["dropped_unwanted_groups"] == 2


# With staleness


def test_ages_by_hand(build: Build) -> None:
    world = build(prompts=1, staleness=2)
    world.doors.close()
    # Begun with weights 0: rows 0, 1, 2. With weights 1: row 3. With weights 2: row 4. …
    ages = []
    for step in range(5):
        assert world.take_of(str(step)) == names(step)
        # Batches are sampled in parallel: both that were begun and not taken must have been, before weights change.
        world.doors.wait_for(lambda ahead={str(step + 1), str(step + 2)}: world.doors.waiting >= ahead)
        metrics = world.update()
        # The metrics are those of the batch just trained on, its age when it was taken.
        ages.append((metrics["avg_trajectory_age"], metrics["max_trajectory_age"]))
    assert ages == [(0, 0), (1, 1), (2, 2), (2, 2), (2, 2)]


def test_mean_and_maximum_of_ages_are_over_samples(build: Build) -> None:
    world = build(prompts=2, group=2, staleness=1)
    world.doors.close()
    # Rows 0 1 | 2 3 with weights 0; row 1 is held up, so the first step trains on 0 and 2 and row 3 waits.
    assert world.take_of("0", "2") == names(0, 2)
    world.doors.open("3")
    world.wait_for_groups("3")
    world.update()
    # Then 4 5 with weights 1: the second step trains on 3 (age 1, twice) and 4 (age 0, twice).
    assert world.take_of("4") == names(3, 4)
    metrics = world.update()
    assert (metrics["avg_trajectory_age"], metrics["max_trajectory_age"]) == (0.5, 1)


def test_a_straggler_holds_nobody_up_and_is_dropped_once_too_old(build: Build) -> None:
    world = build(prompts=2, staleness=1)
    world.doors.close()
    # Row 1 is the straggler.
    assert world.take_of("0", "2") == names(0, 2)
    assert world.update()["dropped_stale_groups"] == 0  # it would be of age 1
    assert world.take_of("3", "4") == names(3, 4)
    assert world.update()["dropped_stale_groups"] == 1  # it would be of age 2
    assert world.take_of("5", "6") == names(5, 6)
    world.doors.open("1")
    world.wait_for_groups("1")
    assert world.update()["dropped_stale_groups"] == 0  # it is counted once, however late it comes
    assert world.take_of("7", "8") == names(7, 8)


def test_a_straggler_that_comes_in_time_is_trained_on(build: Build) -> None:
    world = build(prompts=2, staleness=1)
    world.doors.close()
    assert world.take_of("0", "2") == names(0, 2)
    assert world.update()["dropped_stale_groups"] == 0
    assert world.take_of("1", "3") == names(1, 3)


def test_a_group_that_waited_too_long_for_its_turn_is_dropped(build: Build) -> None:
    world = build(prompts=1, staleness=1)
    world.doors.close()
    assert world.take_of("0") == names(0)
    world.doors.open("1")
    world.wait_for_groups("1")
    world.update()
    assert world.update()["dropped_stale_groups"] == 1  # two updates: row 1 is of age 2
    assert world.take_of("2") == names(2)


@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("slow", ["generator", "environment"])
def test_while_everything_is_slow_no_more_is_begun_than_can_be_trained_on(
    build: Build, staleness: int, slow: str
) -> None:
    world = build(prompts=2, staleness=staleness, deadline_s=0.1)
    (world.doors if slow == "environment" else world.speaker.doors).close()
    for _ in range(2):  # asking again changes nothing
        with pytest.raises(DeadlineError):
            world.take()
    assert len(world.speaker.asked) == 2 * (staleness + 1)


def test_one_straggler_in_every_batch_does_not_pile_up_batches(build: Build) -> None:
    world = build(prompts=3, staleness=1)
    world.doors.close()
    world.doors.open(*(str(number) for number in range(200) if number % 3))  # the first of each batch never comes
    dropped = 0.0
    for step in range(1, 21):
        world.take()
        dropped += world.update()["dropped_stale_groups"]
        # A third batch is begun while fewer than (1 + staleness) P rows are outstanding: at most 5 + 3.
        assert len(world.speaker.asked) - 3 * step - dropped <= 8


@pytest.mark.parametrize("grace_s", [PATIENCE_S, 0.0])
def test_no_batch_is_begun_while_scores_that_suffice_may_be_a_moment_away(
    build: Build, monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    monkeypatch.setattr(rollout_schedule, "MIN_GRACE_S", grace_s)
    monkeypatch.setattr(rollout_schedule, "GRACE_FRAC", 0.0)
    world = build(prompts=2, staleness=1, keep=lambda group: group[0].prompt.text != "1")
    world.doors.close()
    with ThreadPoolExecutor(1) as trainer:
        taking = trainer.submit(world.take)
        world.doors.wait_for(lambda: world.doors.waiting >= set(names(0, 1, 2, 3)))  # nothing is generated any more
        world.doors.open("0", "1")
        world.wait_for_groups("0", "1")
        # 0 is ready, 1 unwanted. The step needs one more, 2 and 3 wait for their scores, and there is room for a batch.
        if not grace_s:
            world.doors.wait_for(lambda: world.doors.waiting >= set(names(2, 3, 4, 5)))
        world.doors.open("2")
        assert taking.result(PATIENCE_S) == names(0, 2)
    assert set(world.speaker.asked) == set(names(0, 1, 2, 3) if grace_s else names(0, 1, 2, 3, 4, 5))


def test_groups_are_taken_oldest_first_and_renumbered(build: Build) -> None:
    world = build(prompts=3, group=2, staleness=2, deadline_s=0.1)
    world.doors.close()
    with pytest.raises(DeadlineError):
        world.take()  # 0 1 2 | 3 4 5 | 6 7 8 are with the environment
    for name in names(8, 3, 5, 2, 4):  # whoever is done first
        world.doors.open(name)
        world.wait_for_groups(name)
    assert world.take() == names(2, 3, 4)
    samples = world.buffer.collect()
    assert [(sample.prompt.index, sample.prompt.text) for sample in samples] == [
        (0, "2"), (0, "2"), (1, "3"), (1, "3"), (2, "4"), (2, "4"),
    ]  # fmt: skip


def test_samples_carry_every_version_of_the_weights_and_age_by_the_oldest(build: Build) -> None:
    world = build(prompts=1, staleness=1)
    world.update()
    world.speaker.versions = (0, 1)  # weights changed while the response was sampled
    world.take()
    assert [sample.weight_versions for sample in world.buffer.collect()] == [(0, 1)]
    assert values(world.buffer.metrics())["max_trajectory_age"] == 1
    world.finish_threads()
    assert world.update()["dropped_stale_groups"] == 1  # the other row of weights 0 and 1


# Unwanted groups


def test_unwanted_groups_are_replaced_and_counted(build: Build) -> None:
    world = build(prompts=2, staleness=0, keep=lambda group: int(group[0].prompt.text) % 3 == 2)
    # 0 1 | 2 3 | 4 5: four unwanted.
    assert world.take() == names(2, 5)
    assert world.update()["dropped_unwanted_groups"] == 4
    # 6 7 | 8 9 | 10 11
    assert world.take() == names(8, 11)
    assert world.update()["dropped_unwanted_groups"] == 4


def test_surplus_groups_are_dropped_without_staleness_and_kept_with_it(build: Build) -> None:
    def keep(group: Sequence[Sample]) -> bool:
        return group[0].prompt.text != "0"

    strict = build(prompts=2, staleness=0, keep=keep)
    assert strict.take() == names(1, 2)
    assert strict.update()["dropped_stale_groups"] == 1  # row 3
    assert strict.take() == names(4, 5)

    lenient = build(prompts=2, staleness=1, keep=keep)
    lenient.doors.close()
    assert lenient.take_of("0", "1", "2") == names(1, 2)
    lenient.doors.open("3")
    lenient.wait_for_groups("3")
    assert lenient.update()["dropped_stale_groups"] == 0
    assert lenient.take_of("4") == names(3, 4)


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_filter_that_rejects_everything_ends_the_run(build: Build, staleness: int, raises: Raises) -> None:
    world = build(prompts=2, staleness=staleness, max_batches=4, keep=lambda group: False)
    count = 4 + staleness
    with raises(DataError, count, 0, 2, "rollouts.max_batches_per_step"):
        world.take()
    assert len(world.speaker.asked) == 2 * count


def test_the_limit_of_batches_is_per_step(build: Build) -> None:
    world = build(prompts=2, staleness=0, max_batches=2, keep=lambda group: int(group[0].prompt.text) % 2 == 1)
    for step in range(5):
        assert world.take() == names(4 * step + 1, 4 * step + 3)
        world.update()


def test_a_full_batch_is_taken_even_if_no_more_may_be_begun(build: Build) -> None:
    # 0 1 | 2 3 give one group each, which is enough; a third batch, to work ahead, would exceed the limit of 1 + 1.
    world = build(prompts=2, staleness=1, max_batches=1, keep=lambda group: int(group[0].prompt.text) % 2 == 1)
    assert world.take() == names(1, 3)


# Failures


def test_an_environment_that_raises_ends_the_run(build: Build, raises: Raises) -> None:
    def broken(prompt: str, response: str) -> float:
        raise ZeroDivisionError("no such task")

    world = build(environment=RewardFunction(broken))
    with raises(ForeignError, "broken"):
        world.take()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_generator_that_raises_ends_the_run(build: Build, staleness: int, raises: Raises) -> None:
    world = build(staleness=staleness)
    world.speaker.broken = True
    with raises(ForeignError):
        world.take()


@pytest.mark.parametrize("slow", ["generator", "environment"])
def test_a_deadline_says_who_waits_for_whom(build: Build, slow: str, raises: Raises) -> None:
    world = build(prompts=2, deadline_s=0.2)
    (world.doors if slow == "environment" else world.speaker.doors).close()
    with raises(DeadlineError, 0, 2, 4, "rollouts.environment_timeout_s"):
        world.take()
