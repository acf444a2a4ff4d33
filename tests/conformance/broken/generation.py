"""Generation backends with one thing done wrong. Those under "In one clause" break a single clause of the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nemorl.errors import BackendError
from nemorl.types import Completion, GenerationRequest
from nemorl.weights import in_process_handle
from nemorl_dtensor.decode import build_decoder
from nemorl_dtensor.generation import HFGeneration

__all__ = ["HFGeneration"]

Requests = Sequence[GenerationRequest]
Completions = list[list[Completion]]


class _Rewrites(HFGeneration):
    """Changes each completion, seeing its request."""

    def change(self, request: GenerationRequest, completion: Completion) -> Completion:
        raise NotImplementedError

    def generate(self, requests: Requests) -> Completions:
        found = super().generate(requests)
        return [
            [self.change(request, completion) for completion in completions]
            for request, completions in zip(requests, found, strict=True)
        ]


def _scaled(completion: Completion, factor: float) -> Completion:
    return replace(completion, logprobs=tuple(logprob * factor for logprob in completion.logprobs))


# In one clause


class RefusesEmptyCalls(HFGeneration):
    """A call without requests is an error to it."""

    def generate(self, requests: Requests) -> Completions:
        if not requests:
            raise BackendError("there are no requests", fix="give at least one")
        return super().generate(requests)


class ForgetsTemperature(_Rewrites):
    """Above 1, its log-probs are not those of what was drawn from."""

    def change(self, request: GenerationRequest, completion: Completion) -> Completion:
        return _scaled(completion, max(1.0, request.sampling.temperature))


class Renormalises(_Rewrites):
    """Log-probs of what top-p, top-k and min-p left over: too high by a factor."""

    def change(self, request: GenerationRequest, completion: Completion) -> Completion:
        sampling = request.sampling
        return _scaled(completion, 0.5) if sampling.top_p < 1 or sampling.top_k or sampling.min_p else completion


class OneSeedForAll(HFGeneration):
    def generate(self, requests: Requests) -> Completions:
        return super().generate([replace(request, seeds=(0,) * len(request.seeds)) for request in requests])


class PaddingChangesSeeds(HFGeneration):
    """What a prompt is continued with depends on the longest prompt of the call."""

    def generate(self, requests: Requests) -> Completions:
        longest = max((len(request.token_ids) for request in requests), default=0)
        return super().generate(
            [replace(r, seeds=tuple(seed + 100 * (longest - len(r.token_ids)) for seed in r.seeds)) for r in requests]
        )


class SeveralSeedsAreNeverGreedy(HFGeneration):
    """Takes several seeds for a wish to see different responses."""

    def generate(self, requests: Requests) -> Completions:
        return super().generate(
            [
                replace(r, sampling=replace(r.sampling, temperature=1.0))
                if r.sampling.temperature == 0 and len(r.seeds) > 1
                else r
                for r in requests
            ]
        )


class FullContextIsAnEnd(_Rewrites):
    """A response that fills the context is called finished."""

    def change(self, request: GenerationRequest, completion: Completion) -> Completion:
        is_full = len(request.token_ids) + len(completion.token_ids) == self._policy.max_sequence_tokens
        return replace(completion, finish_reason="stop") if is_full else completion


class LongResponsesAreCut(_Rewrites):
    """A response that ends by itself, but late, is called cut."""

    def change(self, request: GenerationRequest, completion: Completion) -> Completion:
        return replace(completion, finish_reason="length") if len(completion.token_ids) > 12 else completion


class IgnoresStopTokens(HFGeneration):
    def generate(self, requests: Requests) -> Completions:
        return super().generate([replace(r, sampling=replace(r.sampling, stop_token_ids=())) for r in requests])


class IgnoresStopStrings(HFGeneration):
    def generate(self, requests: Requests) -> Completions:
        return super().generate([replace(r, sampling=replace(r.sampling, stop_strings=())) for r in requests])


class OneMinPForAll(HFGeneration):
    """The first request's holds for all."""

    def generate(self, requests: Requests) -> Completions:
        return super().generate(
            [replace(r, sampling=replace(r.sampling, min_p=requests[0].sampling.min_p)) for r in requests]
        )


class TopKPlusOne(HFGeneration):
    """Keeps all that are not less likely than the token after the k-th."""

    def generate(self, requests: Requests) -> Completions:
        return super().generate(
            [
                replace(r, sampling=replace(r.sampling, top_k=r.sampling.top_k + 1))
                if (r.sampling.top_k or 0) > 1
                else r
                for r in requests
            ]
        )


class CountsUpdates(HFGeneration):
    """Numbers the weights itself."""

    def update_weights(self, handle: Any, version: int) -> None:
        super().update_weights(handle, version if self._version == 0 else self._version + 1)


class CopiesWeights(HFGeneration):
    def update_weights(self, handle: Any, version: int) -> None:
        super().update_weights(_copied(handle, version), version)


class RaisesPlainErrors(HFGeneration):
    def generate(self, requests: Requests) -> Completions:
        try:
            return super().generate(requests)
        except BackendError as error:
            raise ValueError("bad request") from error


class WakesUpYoung(HFGeneration):
    """Takes the weights it wakes up with for those it was built with."""

    def wake(self, parts: Any) -> None:
        super().wake(parts)
        self._version = 0


class ShutsDownOnce(HFGeneration):
    is_live = True

    def shutdown(self) -> None:
        assert self.is_live, "shut down twice"
        self.is_live = False
        super().shutdown()


class SeesNewTensorsOnly(HFGeneration):
    """Keeps what it derived from the weights while the tensors are the same, whatever an optimizer wrote into them."""

    places: frozenset[int] = frozenset()

    def update_weights(self, handle: Any, version: int) -> None:
        derived = self._decoder
        super().update_weights(handle, version)
        before, self.places = self.places, frozenset(p.data_ptr() for p in self._model.parameters())
        if self.places == before:
            self._decoder = derived


class KeepsTurnsForEver(HFGeneration):
    """Takes up a conversation from keys and values of older weights."""

    def update_weights(self, handle: Any, version: int) -> None:
        before: Any = self._decoder
        super().update_weights(handle, version)
        if before is not None:
            self._decoder = build_decoder(self._model, self._policy.max_sequence_tokens, turn_tokens=10_000)
            self._decoder._turns = before._turns  # type: ignore[attr-defined]


# In many: mistakes so plain that most of the kit sees them


class DropsStopTokens(_Rewrites):
    def change(self, request: GenerationRequest, completion: Completion) -> Completion:
        if completion.finish_reason == "length" or len(completion.token_ids) < 2:
            return completion
        return replace(completion, token_ids=completion.token_ids[:-1], logprobs=completion.logprobs[:-1])


class OneTokenTooMany(HFGeneration):
    def generate(self, requests: Requests) -> Completions:
        return super().generate(
            [replace(r, sampling=replace(r.sampling, max_new_tokens=r.sampling.max_new_tokens + 1)) for r in requests]
        )


class KeepsOldWeights(HFGeneration):
    """An update changes the version number only."""

    has_weights = False

    def update_weights(self, handle: Any, version: int) -> None:
        if not self.has_weights:
            super().update_weights(_copied(handle, version), version)
            self.has_weights = True
        self._version = version


def _copied(handle: Any, version: int) -> Any:
    payload = [{name: tensor.detach().clone() for name, tensor in bucket.items()} for bucket in handle.payload()]
    return in_process_handle(lambda: iter(payload), version)
