"""Data-parallel attention: ranks that serve requests of their own and share the experts of a mixture.

Each rank is an ``LLMEngine`` with a scheduler and a cache of its own; the model lives in processes that vLLM starts.
In every layer the tokens of all ranks meet at the experts, so a forward pass of one is a forward pass of all. Here all
ranks are scheduled in one process and step together, each on a thread: one that has nothing to compute makes a pass
over a token that nobody sees. Between two steps no rank is inside of a pass, and what is done then, such as an update
of the weights, is done on all of them. vLLM's own ``AsyncLLM`` lets its ranks run and would exchange weights under way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from copy import copy
from multiprocessing import active_children
from typing import Any, TypeVar
from unittest.mock import patch

from nemorl.errors import BackendError

T = TypeVar("T")

HERE = "127.0.0.1"
"""Where the ranks of an engine meet: they are on one node."""
MEETING_PORTS = 5
"""Taken one after the other as process groups are made, the same ones by each rank."""
LAST_STEP_S = 10.0
"""Longest wait for the other ranks once a step of one has failed. On CUDA they would wait for it in a kernel."""


def rank_configs(arguments: Any, ranks: int) -> list[Any]:
    """A ``vllm.config.VllmConfig`` for each rank, by vLLM's way for ranks that a program of its own steps: variables.

    Args:
        arguments: ``vllm.EngineArgs`` of them all.
        ranks: How many there are.
    """
    if ranks == 1:
        return [arguments.create_engine_config()]
    from vllm.utils.network_utils import get_open_ports_list

    ports = get_open_ports_list(MEETING_PORTS)
    variables = {"VLLM_DP_SIZE": str(ranks), "VLLM_DP_MASTER_IP": HERE, "VLLM_DP_MASTER_PORT": str(ports[0])}
    configs = []
    for rank in range(ranks):
        with patch.dict(os.environ, {**variables, "VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)}):
            config = copy(arguments).create_engine_config()
        config.parallel_config._data_parallel_master_port_list = list(ports)
        configs.append(config)
    return configs


class DataParallelEngine:
    """The ranks as one engine: methods of ``LLMEngine``, as far as this package calls them. One thread uses it."""

    def __init__(self, builds: Sequence[Callable[[], Any]]) -> None:
        """Build all ranks at once: none is ready before it has met the others.

        Args:
            builds: Each makes the ``LLMEngine`` of a rank.
        """
        self.ranks: list[Any] = []
        self._lost: BackendError | None = None
        """Why the ranks are no longer in step."""
        self._places: dict[str, int] = {}
        """The rank of every sample that runs."""
        self._running = [0] * len(builds)
        """How many each rank has."""
        self._prompt: Any = None
        """Of the last sample."""
        self._rank = 0
        """Where it went."""
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"vllm-rank-{rank}") for rank in range(len(builds))]
        before = set(active_children())
        building = [thread.submit(build) for thread, build in zip(self._threads, builds, strict=True)]
        done, _ = wait(building, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in done):  # the others would wait for it at the meeting point
            for child in set(active_children()) - before:
                child.terminate()
        self.ranks = _results(building)
        for engine in self.ranks:
            _pass_in_every_step(engine)

    @property
    def vllm_config(self) -> Any:
        """That of the first rank."""
        return self.ranks[0].vllm_config

    def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any = None) -> None:
        """Begin a sample, on the rank with the fewest. Samples of one prompt that come together stay together: the
        rank computes it once."""
        if self._lost is not None:
            raise self._lost
        if prompt is not self._prompt:
            self._prompt, self._rank = prompt, self._running.index(min(self._running))
        self.ranks[self._rank].add_request(name, prompt, params, lora_request=lora_request)
        self._places[name] = self._rank
        self._running[self._rank] += 1

    def abort_request(self, names: Sequence[str]) -> None:
        places = [(name, rank) for name in names if (rank := self._end(name)) is not None]
        for rank, engine in enumerate(self.ranks):
            if here := [name for name, place in places if place == rank]:
                engine.abort_request(here)

    def step(self) -> list[Any]:
        """One forward pass of all ranks: what each of their samples has so far."""
        if self._lost is not None:
            raise self._lost
        steps = self._begin(lambda engine: engine.step())
        done, _ = wait(steps, return_when=FIRST_EXCEPTION)
        if error := next((error for future in done if (error := future.exception())), None):
            self._give_up(steps, error)
        outputs = [output for found in _results(steps) for output in found]
        for output in outputs:
            if output.finished:
                self._end(output.request_id)
        return outputs

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """What every process of every rank answers, in order."""
        answers = self._begin(lambda engine: engine.collective_rpc(method, args=args))
        wait(answers)
        return [answer for found in _results(answers) for answer in found]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        for engine in self.ranks:
            engine.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def reset_encoder_cache(self) -> None:
        for engine in self.ranks:
            engine.reset_encoder_cache()

    def set_weight_version(self, version: str) -> None:
        for engine in self.ranks:
            engine.set_weight_version(version)

    def sleep(self, level: int) -> None:
        for engine in self.ranks:
            engine.sleep(level)

    def wake_up(self, tags: list[str]) -> None:
        for engine in self.ranks:
            engine.wake_up(tags)

    def close(self, close: Callable[[Any], None]) -> None:
        """Close every rank. Not on its thread: at exit the interpreter has ended those."""
        from vllm.distributed.utils import stateless_destroy_torch_distributed_process_group

        for engine in self.ranks:
            close(engine)
            group, engine.dp_group = engine.dp_group, None  # or the engine would, after the interpreter's end
            stateless_destroy_torch_distributed_process_group(group)
        for thread in self._threads:
            thread.shutdown(wait=False)

    def _end(self, name: str) -> int | None:
        """Forget a sample; the rank that it was on."""
        rank = self._places.pop(name, None)
        if rank is not None:
            self._running[rank] -= 1
        return rank

    def _begin(self, function: Callable[[Any], T]) -> list[Future[T]]:
        return [thread.submit(function, engine) for thread, engine in zip(self._threads, self.ranks, strict=True)]

    def _give_up(self, steps: Sequence[Future[Any]], error: BaseException) -> None:
        """End the processes of all ranks: they have made different numbers of passes, or wait for one that failed."""
        wait(steps, timeout=LAST_STEP_S)
        for engine in self.ranks:
            engine.engine_core.engine_core.model_executor.shutdown()
        wait(steps, timeout=LAST_STEP_S)
        self._lost = BackendError(
            f"a rank of this data-parallel engine failed, and the others cannot go on without it: "
            f"{type(error).__name__}: {error}",
            fix="build a new generator; the log above has the error of the rank's process",
        )
        raise self._lost from error


def _pass_in_every_step(engine: Any) -> None:
    """Have a rank make one forward pass per step, whether it has something to compute or not."""
    core = engine.engine_core.engine_core
    step = core.step_fn

    def step_or_follow() -> Any:
        outputs, has_computed = step()
        if not has_computed:
            core.execute_dummy_batch()
        return outputs, has_computed

    core.step_fn = step_or_follow


def _results(futures: Sequence[Future[T]]) -> list[T]:
    """Of all, once they are done; the first exception."""
    wait(futures)
    for future in futures:
        future.result()
    return [future.result() for future in futures]
