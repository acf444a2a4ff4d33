"""The generation backend ``server``: requests over HTTP to engines that somebody else started.

What a server answers is not trusted to end where a response must: tokens go through the same bookkeeping as those of
in-process engines (``nemorl_tensors.engines.responses``), which decides what ends a response and why.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nemorl.base.files.owned_folders import owned_folder
from nemorl.errors import BackendError
from nemorl.types import Completion, GenerationRequest
from nemorl_rl.data.tokenizer import Tokenizer, declared_limits
from nemorl_rl.environments.loop_thread import LoopThread
from nemorl_rl.rollouts.seeding import mixed_seed
from nemorl_tensors.engines.model_config import read_model_config
from nemorl_tensors.engines.responses import Response

from nemorl_agents.servers.checks import Identity
from nemorl_agents.servers.dialects.base import Answer, Ask
from nemorl_agents.servers.first_look import look
from nemorl_agents.servers.pool import Pool
from nemorl_agents.servers.roster import Roster
from nemorl_agents.servers.versions import Weights, WeightVersions, place_of

if TYPE_CHECKING:
    from nemorl.config.models import GenerationConfig, PolicyConfig
    from nemorl.resources.worker import WorkerContext
    from nemorl.weights import WeightHandle

    from nemorl_agents.servers.config import ServerConfig
    from nemorl_agents.servers.ways import Way

T = TypeVar("T")
HIGHEST_LOGPROB = 1e-3
"""Nats; rounding may leave the log-prob of a certain token a little above 0."""
UNKNOWN_LOGPROB = -9999.0
"""vLLM's word for a log-prob that is not finite."""


class ServerGeneration:
    """Generates at servers (see ``RequestBackend``)."""

    def __init__(
        self,
        generation: GenerationConfig,
        policy: PolicyConfig,
        worker: WorkerContext,
        weights: WeightHandle | None,
        options: ServerConfig,
    ) -> None:
        self._policy = policy
        self._config = read_model_config(policy)
        self._tokenizer = Tokenizer.of(policy)
        self._limits = declared_limits(policy, self._tokenizer, self._config)
        self._scratch = Path(worker.scratch) if worker.scratch else owned_folder("nemorl-engines-")
        self._versions = WeightVersions(place_of(self._scratch, options.weights_folder), policy)
        self._device = worker.device
        self._loop = LoopThread("nemorl-servers")
        self._closed = False
        identity = Identity(policy, self._config, self._tokenizer, generation.sampling())
        roster = Roster(self._scratch / "engines")
        self._pool = Pool(options, identity, roster, worker.device)
        self._way: Way = "folder"
        self._why = ""
        try:
            if weights is not None:
                urls = roster.wanted(options.urls)
                self._way, self._why = self._run(look(options, identity, urls, worker.device))
            taken = None if weights is None else self._taken(weights, weights.version)
            self._run(self._pool.start(taken, self._way))
        except BaseException:
            self.shutdown()
            raise

    def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """One list per request, one completion per seed. Several threads may call it.

        Raises:
            BackendError: A prompt is empty, too long or not of this vocabulary, or a server's answer makes no sense.
            DeadlineError: There was no server for too long.
        """
        self._require_open()
        for index, request in enumerate(requests):
            self._limits.require(index, request)
        begun = [self.submit(request) for request in requests]
        try:
            return [self._outcome(future) for future in begun]
        except BaseException:  # the others are not wanted any more
            for future in begun:
                future.cancel()
            raise

    def submit(self, request: GenerationRequest) -> Future[list[Completion]]:
        """Begin a request and return at once. Cancelling the future ends it at its server too.

        Its errors are those of ``generate``.
        """
        self._require_open()
        return asyncio.run_coroutine_threadsafe(self._answer(request), self._loop.loop)

    def update_weights(self, handle: WeightHandle, version: int) -> int:
        """Generate from these weights from now on, also where a response is half done. Returns their bytes."""
        self._require_open()
        taken = self._taken(handle, version)
        self._run(self._pool.publish(taken))
        return taken.bytes

    def remarks(self) -> Sequence[str]:
        """In which way servers get weights, and why."""
        return [f"servers get new weights by {self._way}: {self._why}"] if self._why else []

    def shutdown(self) -> None:
        """Leave the servers, which go on. Calling it twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._run(self._pool.close())
        self._loop.stop()
        self._versions.clear()

    def _taken(self, handle: WeightHandle, version: int) -> Weights:
        return self._versions.taken(self._way, handle, version, self._device)

    async def _answer(self, request: GenerationRequest) -> list[Completion]:
        self._limits.require(0, request)
        try:
            async with asyncio.TaskGroup() as tasks:
                begun = [
                    tasks.create_task(self._complete(response, scores_prompt=index == 0))
                    for index, response in enumerate(self._limits.begin(request))
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        completions = [task.result() for task in begun]
        # The prompt is the same for all: it is scored once.
        return [replace(one, prompt_logprobs=completions[0].prompt_logprobs) for one in completions]

    async def _complete(self, response: Response, *, scores_prompt: bool) -> Completion:
        sampling = response.sampling
        own_ends = frozenset[int]() if sampling.ignore_eos else self._limits.end_ids
        ask = Ask(
            response.prompt,
            replace(sampling, prompt_logprobs=sampling.prompt_logprobs and scores_prompt),
            mixed_seed(response.seed),
            response.limit,
            tuple(sorted(own_ends.union(sampling.stop_token_ids))),
        )
        answer, spans = await self._pool.sample(ask)
        self._require_sane(ask, answer)
        response.prompt_logprobs = answer.prompt_logprobs
        begins = {span.start: span.version for span in spans}
        for place, (token, logprob) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            if response.is_over:  # an engine may add tokens after a stop string is complete
                break
            if place in begins:
                response.use(begins[place])
            response.push(token, min(float(logprob), 0.0))
        if not response.is_over:
            raise BackendError(
                f"a server ended a response after {len(answer.token_ids)} of {response.limit} tokens, with none of the "
                "tokens and texts that end one",
                fix="the server's own log says more",
            )
        return response.completion()

    def _require_sane(self, ask: Ask, answer: Answer) -> None:
        ids, logprobs = answer.token_ids, answer.logprobs
        problem = None
        if len(ids) != len(logprobs) or not ids:
            problem = f"{len(ids)} tokens with {len(logprobs)} log-probs"
        elif not all(type(token) is int and 0 <= token < self._limits.vocabulary for token in ids):
            problem = f"tokens outside the vocabulary of {self._limits.vocabulary}: {ids[:8]}"
        elif not all(isinstance(value, (int, float)) and abs(value) <= sys.float_info.max for value in logprobs):
            problem = f"log-probs that are no finite numbers: {logprobs[:8]}"
        elif max(logprobs) > HIGHEST_LOGPROB or min(logprobs) <= UNKNOWN_LOGPROB:
            problem = f"log-probs from {min(logprobs):g} to {max(logprobs):g}, which are none"
        elif ask.sampling.prompt_logprobs and len(answer.prompt_logprobs) != len(ask.token_ids):
            problem = f"{len(answer.prompt_logprobs)} log-probs of a prompt of {len(ask.token_ids)} tokens"
        elif answer.weights is not None and [start for _, start in answer.weights][:1] != [0]:
            problem = f"that these weights drew its tokens: {answer.weights}"
        if problem is not None:
            fix = "the weights have diverged, or generation.backend.engine names other software than answers there"
            raise BackendError(f"a server answered {problem}", fix=fix)

    def _require_open(self) -> None:
        if self._closed:
            raise BackendError("this generator has been shut down", fix="build a new one")

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine on the loop; it is cancelled where the wait is (Ctrl-C)."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop.loop)
        try:
            return self._outcome(future)
        except BaseException:
            future.cancel()
            raise

    def _outcome(self, future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError:
            fix = "wait for generate to return"
            raise BackendError("the generator was shut down while it generated", fix=fix) from None
