"""The versions of the weights that a generator holds, each with the batch of rows that is sampled from it.

A request that names no version is in the newest one's batch, and moves on to the next with each update. One that names
a version stays with it. Where there is room for one version only, both are in its batch, and an update fails the
latter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from nemorl.types import GenerationRequest
from nemorl.weights import WeightHandle
from nemorl_rl.serving.snapshots import version_error
from nemorl_tensors.engines.decoding import RunningBatch
from nemorl_tensors.engines.request_batch import RequestBatch
from nemorl_tensors.engines.requests import Outcome

from nemorl_dtensor.live_model import LiveModel


@dataclass(frozen=True, eq=False)
class Held:
    """One version: its weights, and what is sampled from them."""

    model: LiveModel
    batch: RunningBatch
    requests: RequestBatch


class Versions:
    """A ``RequestEngine`` over the newest versions. The engine's thread alone calls it."""

    def __init__(self, first: Held, version: int, limit: int, build: Callable[[], Held]) -> None:
        """
        Args:
            first: With its weights.
            version: Of these.
            limit: Most versions that are held.
            build: Makes another one without weights.
        """
        self._held = {version: first}
        """By version, the newest at the end."""
        self._limit, self._build = limit, build
        self._following: set[int] = set()
        """Requests that name no version."""
        self._failed: dict[int, Outcome] = {}
        """Requests whose version was dropped, until the next step."""

    @property
    def newest(self) -> Held:
        return self._held[next(reversed(self._held))]

    @property
    def all(self) -> Collection[Held]:
        return self._held.values()

    def add(self, requests: Mapping[int, GenerationRequest]) -> Mapping[int, Exception]:
        refused: dict[int, Exception] = {}
        for version in dict.fromkeys(request.version for request in requests.values()):
            asked = {number: request for number, request in requests.items() if request.version == version}
            if version is None:
                self._following |= asked.keys()
                refused |= self.newest.requests.add(asked)
            elif version in self._held:
                refused |= self._held[version].requests.add(asked)
            else:
                refused |= dict.fromkeys(asked, version_error(version, self._held))
        return refused

    def drop(self, numbers: Collection[int]) -> None:
        self._forget(numbers)
        for held in self.all:
            found = [number for number in numbers if number in held.requests]
            if found:
                held.requests.drop(found)

    def step(self) -> Mapping[int, Outcome]:
        ended, self._failed = self._failed, {}
        for held in self.all:
            if held.batch.is_busy:
                ended |= held.requests.step()
        self._following -= ended.keys()
        return ended

    def close(self) -> None:
        for held in self.all:
            held.requests.close()

    def update(self, handle: WeightHandle, version: int) -> int:
        """Take weights, which are the newest from now on. Bytes that were read.

        Where there is no room for one version more, the oldest is dropped; requests that named it fail.
        """
        before = self.newest
        held = self._held.get(version) or self._with_room_for(version)
        read = held.model.bind(handle)
        held.batch.renew(version)
        self._held = {number: other for number, other in self._held.items() if other is not held} | {version: held}
        if held is not before:
            held.requests.resume(before.requests.release(self._following))
        return read

    def keep_newest(self) -> None:
        """Drop all other versions. There are no requests."""
        *older, newest = self._held
        for version in older:
            self._held.pop(version).model.forget()
        assert newest in self._held

    def _with_room_for(self, coming: int) -> Held:
        """The place of one more version: the oldest one's place, if there is no other."""
        if len(self._held) < self._limit:
            return self._build()
        version, oldest = next(iter(self._held.items()))
        self._fail_named(oldest, version, [*(number for number in self._held if number != version), coming])
        if oldest is not self.newest:
            del self._held[version]  # it is being overwritten
        return oldest

    def _fail_named(self, held: Held, version: int, left: Collection[int]) -> None:
        named = [number for number in held.requests if number not in self._following]
        if named:
            held.requests.drop(named)
            self._failed |= dict.fromkeys(named, version_error(version, left))

    def _forget(self, numbers: Collection[int]) -> None:
        self._following.difference_update(numbers)
        for number in numbers:
            self._failed.pop(number, None)
