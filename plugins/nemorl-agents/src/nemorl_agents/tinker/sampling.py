"""Sampling: requests over the same weights are answered by one call, and one that is wrong fails alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from nemorl.errors import DataError

from nemorl_agents.tinker.execution import Execution, derived_seed, failed
from nemorl_agents.tinker.models import Sampled, SampleRequest
from nemorl_agents.tinker.records import Answer, Request, Sampler
from nemorl_agents.tinker.wire.bodies import body_of
from nemorl_agents.tinker.wire.outputs import PROTOBUF, encoded_samples
from nemorl_agents.tinker.wire.sampling import Sample


class Sampling:
    """Runs requests of samplers, on the thread that owns the models."""

    def __init__(self, execution: Execution) -> None:
        self._execution, self._records = execution, execution.records

    def run(self, requests: Sequence[Request]) -> list[Answer]:
        """Answers of requests over the same weights, in order."""
        answers: dict[int, Answer] = {}
        asked: dict[int, tuple[Sampler, Sample, SampleRequest]] = {}
        for number, request in enumerate(requests):
            try:
                asked[number] = self._asked(request)
            except Exception as error:
                answers[number] = failed(error)
        answers |= self._answered(asked)
        return [answers[number] for number in range(len(requests))]

    def _asked(self, request: Request) -> tuple[Sampler, Sample, SampleRequest]:
        assert request.body is not None, "a request that waits has its body"
        sampler = self._records.samplers.get(request.scope)
        assert sampler is not None, "requests of unknown samplers are refused"
        if sampler.is_dropped:
            raise DataError("the weights of this sampling client were dropped for newer ones", fix="save them by name")
        if sampler.folder is not None and not (self._execution.folders.root / sampler.folder).is_dir():
            raise DataError("the weights of this sampling client were deleted", fix="sample from others")
        body = body_of(Sample, request.body)
        base = self._execution.base(sampler.base)
        return sampler, body, body.request(derived_seed(request.id), base.max_context_tokens)

    def _answered(self, asked: dict[int, tuple[Sampler, Sample, SampleRequest]]) -> dict[int, Answer]:
        """By number. Where a call fails, each of its requests is tried by itself."""
        if not asked:
            return {}
        sampler = next(iter(asked.values()))[0]
        folder = None if sampler.folder is None else self._execution.folders.root / sampler.folder
        try:
            found = self._execution.models.sample(sampler.base, folder, [each for _, _, each in asked.values()])
        except Exception as error:
            if len(asked) == 1:
                ((number, (_, body, request)),) = asked.items()
                latest = self._records.samplers.get(sampler.id)
                if latest is not None and latest.folder != sampler.folder:
                    # It goes along with its model, and the weights were replaced while they were read.
                    return self._answered({number: (latest, body, request)})
                return {number: failed(error)}
            alone = [self._answered({number: each}) for number, each in asked.items()]
            return {number: answer for each in alone for number, answer in each.items()}
        bodies = [body for _, body, _ in asked.values()]
        encoded = [encoded_answer(*pair) for pair in zip(found, bodies, strict=True)]
        return {number: Answer("done", raw, PROTOBUF) for number, raw in zip(asked, encoded, strict=True)}


def encoded_answer(sampled: Sampled, body: Sample) -> bytes:
    """The answer to a request as its client reads it."""
    return encoded_samples(_last_only(sampled, body))


def _last_only(sampled: Sampled, body: Sample) -> Sampled:
    """Without the prompt's log-probs before the last ones that the client asks for."""
    last = body.prompt_logprobs_last_n
    if last is None or sampled.prompt_logprobs is None:
        return sampled
    hidden = max(0, len(sampled.prompt_logprobs) - last)
    topk = None if sampled.topk_prompt is None else [*[None] * hidden, *sampled.topk_prompt[hidden:]]
    kept = [*[math.nan] * hidden, *sampled.prompt_logprobs[hidden:]]
    return replace(sampled, prompt_logprobs=kept, topk_prompt=topk)
