"""The asynchronous buffer over restarts: no row is lost, none is trained on twice, nothing old comes through."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from buffer_world import ROWS, Build, World, names, seed_of, worlds
from nemorl.errors import DeadlineError, ForeignError
from nemorl_rl.data.rows import RowDataModule
from nemorl_rl.rollouts.prompts import to_prompts


@pytest.fixture
def build(tiny_model: Path) -> Iterator[Build]:
    with worlds(tiny_model) as make:
        yield make


def unsettled(state: Mapping[str, Any], prompts: int) -> list[str]:
    """Rows that a state says were drawn and are neither trained on nor dropped."""
    first = int(state["data"]["position"])
    return [
        str(first + prompts * batch + index)
        for batch, settled in enumerate(state["settled"])
        for index in range(prompts)
        if index not in settled
    ]


def drawn(state: Mapping[str, Any], prompts: int) -> int:
    return int(state["data"]["position"]) + prompts * len(state["settled"])


class Trainer:
    """Steps, checkpoints and restarts, in an order that dice decide."""

    def __init__(self, world: World, dice: random.Random) -> None:
        self.world, self.dice = world, dice
        self.trained: dict[str, list[str]] = {}
        """Row -> the responses it was trained on."""
        self.dropped = 0
        self.pool = ThreadPoolExecutor(1)
        self.save()

    def step(self) -> None:
        """Take a batch while environments answer in any order, and train on it."""
        world = self.world
        taking = self.pool.submit(world.take)
        taking.add_done_callback(world.doors.wake)
        while not taking.done():
            self.answer(taking)
        for name in taking.result():
            assert name not in self.trained, "a row was trained on twice"
            self.trained[name] = [s.response for s in world.buffer.collect() if s.prompt.text == name]
        metrics = world.update()
        assert metrics["max_trajectory_age"] <= world.limits["max_staleness"]
        self.dropped += int(metrics["dropped_stale_groups"])

    def answer(self, taking: Future[Any] | None = None) -> None:
        """Let one environment answer, of those that were asked."""
        doors = self.world.doors
        if taking is not None:
            doors.wait_for(lambda: bool(doors.waiting) or taking.done())
        if waiting := sorted(doors.waiting):
            doors.open(self.dice.choice(waiting))

    def save(self) -> None:
        """Every row drawn is trained on, dropped and counted, or will be made again: none is lost."""
        state = self.world.buffer.state_dict()
        pending = unsettled(state, self.world.prompts)
        assert not set(pending) & set(self.trained)
        missing = set(names(*range(drawn(state, self.world.prompts)))) - set(pending) - set(self.trained)
        if self.world.plan.keep is None:
            assert len(missing) == self.dropped
        else:  # a group that was dropped before anyone saw it is not known to be unwanted
            assert len([name for name in missing if not is_unwanted(name)]) <= self.dropped
        self.saved = state, dict(self.trained), self.dropped, self.world.version

    def restart(self) -> None:
        """Continue from the last checkpoint, in a new process or in this one, environments busy as ever."""
        state, trained, self.dropped, self.world.version = self.saved
        self.trained = dict(trained)
        if self.dice.random() < 0.5:
            self.world.buffer = self.world.new_buffer()
        self.world.buffer.load_state_dict(state)
        self.world.doors.close()
        self.world.speaker.versions = (self.world.version,)
        self.world.buffer.publish(self.world.version)


def is_unwanted(name: str) -> bool:
    return int(name) % 4 == 1


@pytest.mark.parametrize("on_stale", ["drop", "requeue"])
@pytest.mark.parametrize("has_filter", [False, True], ids=["all", "filtered"])
@pytest.mark.parametrize("seed", range(5))
def test_no_restart_loses_a_row_or_repeats_one(build: Build, seed: int, has_filter: bool, on_stale: str) -> None:
    dice = random.Random(seed)
    prompts, staleness = dice.randint(1, 4), dice.randint(1, 3)
    keep = (lambda group: not is_unwanted(group[0].prompt.text)) if has_filter else None
    world = build(prompts=prompts, group=2, staleness=staleness, keep=keep, on_stale=on_stale)
    whole = all_groups(build(prompts=prompts, group=2), batches=40)
    world.doors.close()
    trainer = Trainer(world, dice)
    for _ in range(30):
        dice.choice([trainer.step, trainer.step, trainer.answer, trainer.save, trainer.restart])()
    trainer.step()
    trainer.save()
    trainer.pool.shutdown()
    if on_stale == "drop":  # what is made again has seeds of its own
        assert all(whole[name] == responses for name, responses in trainer.trained.items())
    assert not has_filter or not any(map(is_unwanted, trainer.trained))


def all_groups(world: World, batches: int) -> dict[str, list[str]]:
    """What each row's group must be: its batch's seed decides."""
    data = RowDataModule(ROWS, world.prompts, seed=1, shuffle=False)
    found: dict[str, list[str]] = {}
    for number in range(1, batches + 1):
        prompts = to_prompts(data.next_batch(), world.engine.tokenizer)
        for sample in world.engine.collect(prompts, world.plan, seed=seed_of(number)):
            found.setdefault(sample.prompt.text, []).append(sample.response)
    return found


@pytest.mark.parametrize("has_filter", [False, True], ids=["all", "filtered"])
def test_without_staleness_a_restart_at_any_step_continues_identically(build: Build, has_filter: bool) -> None:
    keep = (lambda group: int(group[0].prompt.text) % 5 != 0) if has_filter else None
    world = build(prompts=3, group=2, staleness=0, keep=keep)
    states, batches = [world.buffer.state_dict()], []
    for _ in range(6):
        batches.append((world.take(), list(world.buffer.collect())))
        world.update()
        states.append(world.buffer.state_dict())
    for begin, state in enumerate(states):
        again = build(prompts=3, group=2, staleness=0, keep=keep)
        again.buffer.load_state_dict(state)
        again.version = begin - 1
        again.update()
        for rows, samples in batches[begin:]:
            assert again.take() == rows
            expected = [(s.prompt, s.token_ids, s.reward) for s in samples]
            assert [(s.prompt, s.token_ids, s.reward) for s in again.buffer.collect()] == expected
            again.update()


def test_a_batch_settled_before_an_older_one_is_not_made_again(build: Build) -> None:
    # 0 1 | 2 3 | 4 5 and row 1 held up: training on 0 and 2, then on 3 and 4, settles the second batch, not the first.
    world = build(prompts=2, staleness=2)
    world.doors.close()
    assert world.take_of("0", "2") == names(0, 2)
    world.update()
    assert world.take_of("3", "4") == names(3, 4)
    world.update()
    state = world.buffer.state_dict()
    assert unsettled(state, 2)[:2] == names(1, 5)
    world.let_all_go()
    again = build(prompts=2, staleness=2)
    again.buffer.load_state_dict(state)
    again.take()
    again.finish_threads()
    assert not {"0", "2", "3", "4"} & set(again.speaker.asked)
    assert {"1", "5"} <= set(again.speaker.asked)


def test_restored_groups_are_sampled_with_the_first_weights_after_a_restart(build: Build) -> None:
    world = build(prompts=2, staleness=1)
    world.version = 5
    world.update()
    world.take()
    world.update()
    state = world.buffer.state_dict()
    pending = unsettled(state, 2)
    assert len(pending) == 2
    again = build(prompts=2, staleness=1)
    again.buffer.load_state_dict(state)
    assert again.speaker.asked == []  # the generator has weights of its own making still
    again.version = 6
    assert again.update()["dropped_stale_groups"] == 0
    again.take()
    again.finish_threads()
    assert set(pending) <= set(again.speaker.asked)
    metrics = again.update()
    assert (metrics["max_trajectory_age"], metrics["dropped_stale_groups"]) == (0, 0)


def test_threads_of_an_earlier_life_bring_nothing(build: Build) -> None:
    world = build(prompts=1, staleness=1, deadline_s=0.1)
    state = world.buffer.state_dict()
    world.speaker.doors.close()
    world.speaker.versions = (99,)
    with pytest.raises(DeadlineError):
        world.take()  # rows 0 and 1 are being sampled with weights 99
    world.buffer.load_state_dict(state)
    world.speaker.versions = (0,)
    world.let_all_go()
    assert world.take() in (names(0), names(1))
    assert [sample.weight_versions for sample in world.buffer.collect()] == [(0,)]


def test_a_failure_of_an_earlier_life_is_forgotten(build: Build) -> None:
    world = build(prompts=1, staleness=1)
    state = world.buffer.state_dict()
    world.speaker.broken = True
    with pytest.raises(ForeignError):
        world.take()
    world.finish_threads()
    world.speaker.broken = False
    world.buffer.load_state_dict(state)
    assert world.take() in (names(0), names(1))
