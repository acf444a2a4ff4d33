"""A small world for the rollout buffer: real parts, but environments and generator wait until the test lets them go.

Rows are prompts "0", "1", "2", … in batches of P. What each group looks like is fixed by its batch's seed, so that a
group that is made again after a restart can be told from a wrong one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemorl.metrics import values
from nemorl.resources.local import LocalWorkerGroup
from nemorl.resources.worker import WorkerContext
from nemorl.types import Completion, GenerationRequest, Sample, SamplingParams
from nemorl.weights import WeightHandle
from nemorl_rl.data.rows import RowDataModule
from nemorl_rl.data.tokenizer import Tokenizer
from nemorl_rl.environments import EnvironmentPool, RewardFunction
from nemorl_rl.rollouts.buffer import AsyncRolloutBuffer
from nemorl_rl.rollouts.engine import RolloutEngine, RolloutPlan
from nemorl_rl.rollouts.seeding import derive_seed
from nemorl_rl.serving.generation_policy import GenerationPolicy

PATIENCE_S = 20.0
"""A test that waits longer for a thread fails; none should come near."""
ROWS = [{"prompt": str(number)} for number in range(400)]


class Doors:
    """Who may pass, by name. ``None`` as the set of open doors means that everyone may."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open: set[str] | None = None
        self.waiting: set[str] = set()
        self.passed: set[str] = set()

    def close(self) -> None:
        """From now on everyone waits."""
        with self._changed:
            self._open = set()
            self.passed = set()

    def open(self, *names: str) -> None:
        """Let these pass; without names, everyone from now on."""
        with self._changed:
            self._open = None if not names or self._open is None else self._open | set(names)
            self._changed.notify_all()

    def enter(self, name: str) -> None:
        with self._changed:
            self.waiting.add(name)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._open is None or name in self._open, PATIENCE_S)
            self.waiting.discard(name)

    def report(self, name: str) -> None:
        """``name`` is through and was taken care of."""
        with self._changed:
            self.passed.add(name)
            self._changed.notify_all()

    def wake(self, _: object = None) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(is_so, PATIENCE_S)


class Speaker:
    """A generation backend whose answers are made from seeds; it says which weights it has."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.versions: tuple[int, ...] = (0,)
        self.doors = Doors()
        self.asked: list[str] = []
        self.broken = False

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        texts = [self.tokenizer.decode(request.token_ids) for request in requests]
        self.asked += texts
        versions = self.versions
        self.doors.enter("generator")
        if self.broken:
            raise OSError("no memory left")
        return [[self._one(seed, versions) for seed in request.seeds] for request in requests]

    def update_weights(self, handle: WeightHandle, version: int) -> None: ...

    def shutdown(self) -> None: ...

    def _one(self, seed: int, versions: tuple[int, ...]) -> Completion:
        ids = (*self.tokenizer.encode(str(seed % 1000)), *self.tokenizer.stop_token_ids)
        return Completion(ids, tuple(-1.0 for _ in ids), "stop", versions)


class Engine(RolloutEngine):
    """The real one; it reports each group once its taker has dealt with it."""

    delivered: Doors

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[list[Sample]]:
        for group in super().stream(*args, **kwargs):
            yield group
            self.delivered.report(group[0].prompt.text)


class World:
    """A buffer over one speaker and one environment, and the part of the trainer that it sees."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompts: int = 2,
        group: int = 1,
        staleness: int = 1,
        turns: int = 1,
        keep: Callable[[Sequence[Sample]], bool] | None = None,
        environment: Any = None,
        max_batches: int = 10,
        deadline_s: float = PATIENCE_S,
        on_stale: str = "drop",
    ) -> None:
        self.doors = Doors()
        self.speaker = Speaker(tokenizer)
        self.plan = RolloutPlan(group, SamplingParams(max_new_tokens=8), turns, keep)
        workers = LocalWorkerGroup(lambda _: self.speaker, WorkerContext(), "speaker")
        pool = EnvironmentPool(environment or RewardFunction(self.score), timeout_s=PATIENCE_S)
        self.engine = Engine(GenerationPolicy(workers), pool, tokenizer, max_sequence_tokens=64)
        self.engine.delivered = self.doors
        self.prompts, self.version = prompts, 0
        self.limits: dict[str, Any] = {"max_staleness": staleness, "max_batches": max_batches, "deadline_s": deadline_s}
        self.limits["on_stale"] = on_stale
        self.buffer = self.new_buffer()

    def new_buffer(self) -> AsyncRolloutBuffer:
        data = RowDataModule(ROWS, self.prompts, seed=1, shuffle=False)
        return AsyncRolloutBuffer(data, self.engine, self.plan, seed_of=seed_of, **self.limits)  # type: ignore[arg-type]

    def score(self, prompt: str, response: str) -> float:
        self.doors.enter(prompt)
        return float(len(response))

    def take(self) -> list[str]:
        """The prompts of the next batch."""
        return [row["prompt"] for row in self.buffer.next_batch()]

    def take_of(self, *names: str) -> list[str]:
        """The next batch when environments answer for these only, in this order."""
        with ThreadPoolExecutor(1) as trainer:
            taking = trainer.submit(self.take)
            for name in names:
                self.doors.open(name)
                self.wait_for_groups(name)
            return taking.result(PATIENCE_S)

    def update(self) -> dict[str, float]:
        """The end of a training step: new weights, then metrics."""
        self.version += 1
        self.speaker.versions = (self.version,)
        self.buffer.publish(self.version)
        return values(self.buffer.metrics())

    def wait_for_groups(self, *names: str) -> None:
        """Until the buffer has these groups."""
        self.doors.wait_for(lambda: self.doors.passed >= set(names))

    def finish_threads(self) -> None:
        """Until no batch is being made."""
        for thread in threading.enumerate():
            if thread.name.startswith("rollouts-"):
                thread.join(PATIENCE_S)
                assert not thread.is_alive()

    def let_all_go(self) -> None:
        self.doors.open()
        self.speaker.doors.open()
        self.finish_threads()


def seed_of(batch: int) -> int:
    return derive_seed(3, "rollout", batch)


def names(*numbers: int) -> list[str]:
    return [str(number) for number in numbers]


Build = Callable[..., World]


@contextmanager
def worlds(model: Path) -> Iterator[Build]:
    """Makes worlds; whoever still waits in one of them at the end is let go."""
    made: list[World] = []
    tokenizer = Tokenizer.load(str(model))

    def build(**settings: Any) -> World:
        made.append(World(tokenizer, **settings))
        return made[-1]

    yield build
    for world in made:
        world.doors.open()
        world.speaker.doors.open()
    for world in made:
        world.finish_threads()
