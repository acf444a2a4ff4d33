"""Generation backends with one thing done wrong about requests and what is sampled for them.

Those under "In one clause" break a single clause of the contract. Mistakes about weights are in ``generation_weights``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy
from nemorl.errors import BackendError
from nemorl.types import Completion, GenerationRequest
from nemorl_dtensor.generation import HFGeneration
from nemorl_rl.serving.requests import notify_cancelled
from nemorl_testing.seeing_parts import words

__all__ = ["HFGeneration"]

Requests = Sequence[GenerationRequest]
Completions = list[list[Completion]]
Answer = Future[list[Completion]]


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


class _Asks(HFGeneration):
    """Changes each request."""

    def ask(self, request: GenerationRequest) -> GenerationRequest:
        raise NotImplementedError

    def generate(self, requests: Requests) -> Completions:
        return super().generate([self.ask(request) for request in requests])

    def submit(self, request: GenerationRequest) -> Answer:
        return super().submit(self.ask(request))


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


class OneSeedForAll(_Asks):
    def ask(self, request: GenerationRequest) -> GenerationRequest:
        return replace(request, seeds=(0,) * len(request.seeds))


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
        is_full = len(request.token_ids) + len(completion.token_ids) == self._limits.max_sequence_tokens
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


class RaisesPlainErrors(HFGeneration):
    """Of requests for text that cannot be answered."""

    def generate(self, requests: Requests) -> Completions:
        try:
            for index, request in enumerate(requests):
                if not request.media:
                    self._limits.require(index, request)
        except BackendError as error:
            raise ValueError("bad request") from error
        return super().generate(requests)


class ShutsDownOnce(HFGeneration):
    is_live = True

    def shutdown(self) -> None:
        assert self.is_live, "shut down twice"
        self.is_live = False
        super().shutdown()


class EndsAtIgnoredTokens(_Rewrites):
    """A response that was to go on past the end token is cut there."""

    def change(self, request: GenerationRequest, completion: Completion) -> Completion:
        ends = [place for place, token in enumerate(completion.token_ids) if token in self._limits.end_ids]
        if not request.sampling.ignore_eos or not ends:
            return completion
        end = ends[0] + 1
        return replace(completion, token_ids=completion.token_ids[:end], logprobs=completion.logprobs[:end])


class ShiftsPromptLogprobs(_Rewrites):
    """Index t describes the token after t."""

    def change(self, request: GenerationRequest, completion: Completion) -> Completion:
        known = completion.prompt_logprobs
        return replace(completion, prompt_logprobs=(*known[1:], 0.0) if known else ())


class ShiftsRoutes(_Rewrites):
    """Index t describes the token after t."""

    def change(self, request: GenerationRequest, completion: Completion) -> Completion:
        known = completion.routes
        return completion if known is None else replace(completion, routes=numpy.roll(known, -1, axis=0))


class ReadsPlaceholders(HFGeneration):
    """An image is answered for by the words that stand in its place."""

    def submit_all(self, requests: Sequence[GenerationRequest]) -> list[Answer]:
        return super().submit_all(
            [replace(one, token_ids=tuple(words(one.token_ids, placeholder=0)), media=()) for one in requests]
        )


class SubmitsOneSeed(HFGeneration):
    """One completion per submitted request."""

    def submit(self, request: GenerationRequest) -> Answer:
        short = request if request.sampling.ignore_eos else replace(request, seeds=request.seeds[:1])
        return super().submit(short)


class LongerPromptsWait(HFGeneration):
    """A request begins when the one before it has been answered, if that one's prompt is shorter."""

    last: Answer | None = None
    last_tokens = 0

    def submit(self, request: GenerationRequest) -> Answer:
        tokens = len(request.token_ids)
        before = self.last if tokens > self.last_tokens else None
        answer = _answer()
        answer.add_done_callback(lambda _: own.cancel() if own is not None and answer.cancelled() else None)
        own: Answer | None = None

        def begin(_: object = None) -> None:
            nonlocal own
            own = super(LongerPromptsWait, self).submit(request)
            own.add_done_callback(lambda done: _copy(done, answer))

        self.last, self.last_tokens = answer, tokens
        if before is None:
            begin()
        else:
            before.add_done_callback(begin)
        return answer


class CompanyChangesSeeds(HFGeneration):
    """What a prompt is continued with depends on whether others run."""

    running: Answer | None = None

    def submit(self, request: GenerationRequest) -> Answer:
        if request.sampling.ignore_eos:
            self.running = super().submit(request)
            return self.running
        if len(request.seeds) > 1 and self.running is not None and not self.running.done():
            request = replace(request, seeds=tuple(seed + 1 for seed in request.seeds))
        return super().submit(request)


class CancelsTheFutureAlone(HFGeneration):
    """The rows of a cancelled request run to their end."""

    def submit(self, request: GenerationRequest) -> Answer:
        answer = _answer()
        super().submit(request).add_done_callback(lambda done: _copy(done, answer))
        return answer


class OneBadRequestEndsAll(HFGeneration):
    def submit(self, request: GenerationRequest) -> Answer:
        answer = super().submit(request)
        if answer.done() and not answer.cancelled() and (error := answer.exception()):
            reason = BackendError(str(error), fix="submit better ones")
            self.call(lambda: self.fail(reason))
        return answer


class MissesTheUpdate(HFGeneration):
    """Says that the new weights came one token later than they did."""

    def submit(self, request: GenerationRequest) -> Answer:
        answer = _answer()
        inner = super().submit(request)
        answer.add_done_callback(lambda _: inner.cancel())
        inner.add_done_callback(lambda done: _copy(done, answer, self._late))
        return answer

    def _late(self, completion: Completion) -> Completion:
        starts = completion.version_starts
        return replace(completion, version_starts=(0, *(start + 1 for start in starts[1:])))


class ObservesAnotherSeed(HFGeneration):
    def observe(self, request: GenerationRequest) -> Any:
        return super().observe(_reseeded(request))


class RecordsAnotherResponse(HFGeneration):
    """What it computed when it was asked the same once more."""

    def observe(self, request: GenerationRequest) -> Any:
        completion, _ = super().observe(request)
        return completion, super().observe(_reseeded(request))[1]


def _reseeded(request: GenerationRequest) -> GenerationRequest:
    return replace(request, seeds=tuple(seed + 1 for seed in request.seeds))


def _answer() -> Answer:
    """A new future."""
    found: Answer = Future()
    found.add_done_callback(notify_cancelled)
    return found


def _copy(done: Answer, answer: Answer, change: Callable[[Completion], Completion] = lambda found: found) -> None:
    """Give one future what another one has, unless it is done."""
    with suppress(InvalidStateError):
        if done.cancelled():
            answer.cancel()
        elif error := done.exception():
            answer.set_exception(error)
        else:
            answer.set_result([change(completion) for completion in done.result()])


# In many: mistakes so plain that most of the kit sees them


class DropsStopTokens(_Rewrites):
    def change(self, request: GenerationRequest, completion: Completion) -> Completion:
        if completion.finish_reason == "length" or len(completion.token_ids) < 2:
            return completion
        return replace(completion, token_ids=completion.token_ids[:-1], logprobs=completion.logprobs[:-1])


class OneTokenTooMany(_Asks):
    def ask(self, request: GenerationRequest) -> GenerationRequest:
        more = request.sampling.max_new_tokens + 1
        return replace(request, sampling=replace(request.sampling, max_new_tokens=more))
