"""vLLM's engine as one that answers nemorl's requests: each of their samples is a request of its own to vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from nemorl.base.process.timing import Span
from nemorl.errors import BackendError, NemorlError, boundary

from nemorl_vllm.conversion import completions
from nemorl_vllm.engine import close_engine
from nemorl_vllm.shown import prompt_of

if TYPE_CHECKING:
    from nemorl.types import GenerationRequest
    from nemorl_tensors.engines.requests import Outcome

    from nemorl_vllm.adapters import Adapters
    from nemorl_vllm.conversion import VLLMLimits

ONE_ENGINE_AT_A_TIME = threading.RLock()
"""vLLM keeps the context of a forward pass in a variable of the process."""


class LLMRequests:
    """The ``RequestEngine`` over a ``vllm.v1.engine.llm_engine.LLMEngine``."""

    def __init__(self, limits: VLLMLimits, adapters: Adapters | None = None) -> None:
        """
        Args:
            limits: Of the model.
            adapters: Of the versions that requests may name; ``None``: the weights are in the model.
        """
        self.engine: Any = None
        self.unusable: BackendError | None = None
        """Why the weights are unusable: an update failed half way, or they were forgotten and none have come since."""
        self.asleep: BackendError | None = None
        """The error that names the parts away, while the engine sleeps."""
        self.cache_salt: str | None = None
        """Of requests from now on: cached prefixes of other ones are not theirs"""
        self._limits, self._adapters = limits, adapters
        self._samples: dict[int, dict[str, Any]] = {}
        """vLLM's names of a request's samples, and their outputs once these have ended, with when they were made."""
        self._numbers: dict[str, int] = {}
        self._prompts: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        """Token ids of a request, and the same as vLLM was given them."""
        self._named: dict[int, int] = {}
        """The version that a request names, if it does."""
        self._failed: dict[int, Outcome] = {}
        """Requests whose version was dropped, until the next step."""
        self._asked_s: dict[int, float] = {}
        """When vLLM was given a request: a moment of ``time.monotonic()``."""

    def start(self, build: Callable[[], Any]) -> Self:
        """Build the engine."""
        self.engine = build()
        return self

    def add(self, requests: Mapping[int, GenerationRequest]) -> Mapping[int, Exception]:
        refused: dict[int, Exception] = {}
        for number, request in requests.items():
            try:
                self._add(number, request)
            except NemorlError as error:
                self.drop([number])
                refused[number] = error
        return refused

    def _add(self, number: int, request: GenerationRequest) -> None:
        items = self._limits.shown.take(request)  # first: whatever becomes of the request, it waits no longer
        reason = self.asleep or self.unusable
        if reason is not None:
            raise reason
        adapter = None
        if self._adapters is not None:
            adapter = self._adapters.request(request.version)
            if request.version is not None:
                self._named[number] = request.version
        self._samples[number], self._asked_s[number] = {}, time.monotonic()
        with boundary("vLLM"):
            words = self._limits.shown.words(request)
            prompt = prompt_of(self.engine, words, items, self.cache_salt)
            self._prompts[number] = request.token_ids, words
            for place, seed in enumerate(request.seeds):
                name = f"{number}.{place}"
                params = self._limits.params(
                    request, seed, scores_prompt=place == 0 and request.sampling.prompt_logprobs
                )
                self.engine.add_request(name, prompt, params, lora_request=adapter)
                self._samples[number][name], self._numbers[name] = None, number

    def drop(self, numbers: Collection[int]) -> None:
        names = [name for number in numbers for name, output in self._forget(number).items() if output is None]
        if names:
            self.engine.abort_request(names)

    def fail_version(self, version: int, error: NemorlError) -> None:
        """End the requests that name a version."""
        failed = [number for number, named in self._named.items() if named == version]
        self.drop(failed)
        self._failed |= dict.fromkeys(failed, error)

    def step(self) -> Mapping[int, Outcome]:
        if self._failed:
            failed, self._failed = self._failed, {}
            return failed
        with boundary("vLLM"):
            outputs = self.engine.step()
        ended: dict[int, Outcome] = {}
        for output in outputs:
            number = self._numbers.get(output.request_id)
            if not output.finished or number is None:
                continue
            samples = self._samples[number]
            samples[output.request_id] = output, Span(0.0, time.monotonic() - self._asked_s[number])
            if None not in samples.values():
                version, prompt = self._named.get(number), self._prompts[number]
                ended[number] = _outcome(self._forget(number), prompt, version)
        return ended

    def close(self) -> None:
        engine, self.engine = self.engine, None
        close_engine(engine)

    def _forget(self, number: int) -> dict[str, Any]:
        samples = self._samples.pop(number, {})
        self._asked_s.pop(number, None)
        self._named.pop(number, None)
        self._prompts.pop(number, None)
        self._failed.pop(number, None)
        for name in samples:
            self._numbers.pop(name)
        return samples


def _outcome(samples: Mapping[str, Any], prompt: tuple[Sequence[int], Sequence[int]], version: int | None) -> Outcome:
    try:
        return completions([*samples.values()], *prompt, version)
    except BackendError as error:
        return error
