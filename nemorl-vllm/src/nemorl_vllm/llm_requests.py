"""vLLM's engine as one that answers nemorl's requests: each of their samples is a request of its own to vLLM."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Self

from nemorl.errors import BackendError, NemorlError, boundary
from nemorl_base.timing import Span

from nemorl_vllm.conversion import completions
from nemorl_vllm.engine import close_engine

if TYPE_CHECKING:
    from nemorl.types import GenerationRequest
    from nemorl_tensors.engines.requests import Outcome

    from nemorl_vllm.conversion import ModelLimits

ONE_ENGINE_AT_A_TIME = threading.RLock()
"""vLLM keeps the context of a forward pass in a variable of the process."""


class LLMRequests:
    """The ``RequestEngine`` over a ``vllm.v1.engine.llm_engine.LLMEngine``."""

    def __init__(self, limits: ModelLimits, adapter: Any = None) -> None:
        """
        Args:
            limits: Of the model.
            adapter: The ``LoRARequest`` of every request.
        """
        self.engine: Any = None
        self.unusable: BackendError | None = None
        """Why the weights are unusable, after an update that failed half way."""
        self.asleep: BackendError | None = None
        """What is away, while the engine sleeps."""
        self._limits, self._adapter = limits, adapter
        self._samples: dict[int, dict[str, Any]] = {}
        """vLLM's names of a request's samples, and their outputs once these have ended, with when they were made."""
        self._numbers: dict[str, int] = {}
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
        from vllm.inputs import tokens_input

        reason = self.unusable or self.asleep
        if reason is not None:
            raise reason
        self._samples[number], self._asked_s[number] = {}, time.monotonic()
        with boundary("vLLM"):
            for place, seed in enumerate(request.seeds):
                name = f"{number}.{place}"
                params = self._limits.params(
                    request, seed, scores_prompt=place == 0 and request.sampling.prompt_logprobs
                )
                self.engine.add_request(name, tokens_input(list(request.token_ids)), params, lora_request=self._adapter)
                self._samples[number][name], self._numbers[name] = None, number

    def drop(self, numbers: Collection[int]) -> None:
        names = [name for number in numbers for name, output in self._forget(number).items() if output is None]
        if names:
            self.engine.abort_request(names)

    def step(self) -> Mapping[int, Outcome]:
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
                ended[number] = _outcome(self._forget(number))
        return ended

    def close(self) -> None:
        engine, self.engine = self.engine, None
        close_engine(engine)

    def _forget(self, number: int) -> dict[str, Any]:
        samples = self._samples.pop(number, {})
        self._asked_s.pop(number, None)
        for name in samples:
            self._numbers.pop(name)
        return samples


def _outcome(samples: Mapping[str, Any]) -> Outcome:
    try:
        return completions([*samples.values()])
    except BackendError as error:
        return error
