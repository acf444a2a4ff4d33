"""Generation backends with one thing done wrong about their weights: updates, versions, sleep."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

from nemorl.errors import BackendError
from nemorl.types import GenerationRequest
from nemorl.weights import in_process_handle
from nemorl_dtensor.generation import HFGeneration

from broken.generation import Answer, Completions, Requests

# In one clause


class CountsUpdates(HFGeneration):
    """Numbers the weights itself."""

    def update_weights(self, handle: Any, version: int) -> None:
        super().update_weights(handle, self._versions.newest.batch._version + 1)


class DigestsOfFewUpdates(HFGeneration):
    """Sees that some tensors are new, and takes an update of most of them for none."""

    said: Any = None

    def held_digests(self, names: Any) -> Any:
        found = super().held_digests(names)
        self.said = self.said or found
        if 2 * sum(found[name] == self.said[name] for name in found) > len(found):
            self.said = found
        return self.said


class EchoesDigests(HFGeneration):
    """Says that it holds what it was told that it would be sent."""

    def update_weights(self, handle: Any, version: int) -> int:
        self.told = handle.digests
        return super().update_weights(handle, version)

    def held_digests(self, names: Any) -> Any:
        return self.told


class CopiesWeights(HFGeneration):
    def __init__(self, generation: Any, policy: Any, worker: Any, weights: Any, options: Any) -> None:
        own = None if weights is None else _copied(weights, weights.version)
        super().__init__(generation, policy, worker, own, options)

    def update_weights(self, handle: Any, version: int) -> None:
        super().update_weights(_copied(handle, version), version)


class SleepsWithItsWeights(HFGeneration):
    """Gives nothing but its caches back for a short sleep."""

    def _leave(self, level: Any) -> None:
        if level == 2:
            super()._leave(level)
        else:
            for held in self._versions.all:
                held.batch.renew()


class WakesUpYoung(HFGeneration):
    """Takes the weights it wakes up with for those it was built with."""

    def wake(self, parts: Any) -> None:
        super().wake(parts)
        self._versions.newest.batch.renew(0)


class TakesMemoryForWeights(HFGeneration):
    """Samples from whatever is in the memory that it wakes up with."""

    def wake(self, parts: Any) -> None:
        super().wake(parts)
        for held in self._versions.all:
            held.model._parking.renewed("weights")


class SeesNewTensorsOnly(HFGeneration):
    """Keeps what it derived from the weights while the tensors are the same, whatever an optimizer wrote into them."""

    places: frozenset[int] = frozenset()

    def update_weights(self, handle: Any, version: int) -> int:
        def update() -> int:
            derived = self._versions.newest.batch._decoder
            read = self._versions.update(handle, version)
            before, self.places = self.places, frozenset(_places(self._versions.newest.model))
            if self.places == before:
                self._versions.newest.batch._decoder = derived
            return read

        return self.call(update)


class KeepsTurnsForEver(HFGeneration):
    """Takes up a conversation from keys and values of older weights."""

    def update_weights(self, handle: Any, version: int) -> int:
        def update() -> int:
            before: Any = self._versions.newest.batch._decoder
            read = self._versions.update(handle, version)
            if before is not None:
                after: Any = self._versions.newest.model.decoder()
                after._turns = before._turns
                self._versions.newest.batch._decoder = after
            return read

        return self.call(update)  # at once: rows that run must not meet a decoder between the two


class UpdatesWhenIdle(HFGeneration):
    """Where there is room for one version, new weights wait for the requests that run."""

    last: Answer | None = None

    def submit(self, request: GenerationRequest) -> Answer:
        answer = super().submit(request)
        if request.sampling.ignore_eos:
            self.last = answer
        return answer

    def update_weights(self, handle: Any, version: int) -> int:
        if self.last is not None and self._versions._limit == 1:
            wait([self.last])
        return super().update_weights(handle, version)


class SleepsWheneverAsked(HFGeneration):
    """Forgets its requests when it falls asleep."""

    def sleep(self, level: Any) -> None:
        self.call(lambda: self.fail(BackendError("asleep", fix="wake it")))
        super().sleep(level)


class SharesSnapshots(HFGeneration):
    """Holds older versions in tensors that the trainer goes on with."""

    def __init__(self, generation: Any, policy: Any, worker: Any, weights: Any, options: Any) -> None:
        super().__init__(generation, policy, worker, weights, options)
        if weights is not None:
            self._versions.newest.model._copies = False
            self._versions.newest.model.bind(weights)


class AnswersWithTheNewest(HFGeneration):
    """Where it lacks a version."""

    def generate(self, requests: Requests) -> Completions:
        held = self._versions._held
        return super().generate([replace(r, version=r.version if r.version in held else None) for r in requests])


class MovesAllRequests(HFGeneration):
    """Those that name a version too."""

    def submit(self, request: GenerationRequest) -> Answer:
        is_held = request.version is None or request.version in self._versions._held
        return super().submit(replace(request, version=None) if is_held else request)


# In many: mistakes so plain that most of the kit sees them


class KeepsOldWeights(CopiesWeights):
    """An update changes the version number only."""

    def update_weights(self, handle: Any, version: int) -> None:
        self.call(lambda: self._versions.newest.batch.renew(version))


def _places(model: Any) -> Iterator[int]:
    """Where its parameters are, also those that it shares with a trainer."""
    return (parameter.data_ptr() for parameter in model._model.parameters())


def _copied(handle: Any, version: int) -> Any:
    payload = [{name: tensor.detach().clone() for name, tensor in bucket.items()} for bucket in handle.payload()]
    return in_process_handle(lambda: iter(payload), version)
