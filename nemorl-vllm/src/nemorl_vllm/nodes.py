"""An engine over several nodes: vLLM's own workers on each, of which one process on the node takes care.

The process that schedules (rank 0) starts one on every further node, on places that the run has reserved for it
(``WorkerContext.further_nodes``). They meet at an address of the first node. Weights that vLLM's workers cannot
fetch by themselves are fetched once on every node and lie there in memory that these map. The processes end with the
first; when one of them or its workers is lost, so is the engine.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import active_children
from typing import TYPE_CHECKING, Any

from nemorl.errors import DeadlineError
from nemorl.plugins import registry
from nemorl.resources.ports import free_port
from nemorl.weights import WeightHandle, transport
from nemorl_tensors.engines.drafted import DraftedHandle, parts_of

from nemorl_vllm.environment import import_vllm, process_state_kept

if TYPE_CHECKING:
    from nemorl.config.models import PolicyConfig
    from nemorl.resources.worker import WorkerContext

    from nemorl_vllm.config import VLLMConfig

log = logging.getLogger(__name__)

SHARED_MEMORY = "shared_memory"
CLOSING_S = 10.0
"""Longest wait for the workers of a further node to be ended."""
PREPARING_S = 600.0
"""Longest wait for a node to import vLLM and read the model's config."""


class Republisher:
    """Weights in memory that all processes of this node can map."""

    def __init__(self) -> None:
        self._policy, self._draft = transport(SHARED_MEMORY), transport(SHARED_MEMORY)

    def handle(self, handle: WeightHandle) -> WeightHandle:
        """The same weights, as every process of the node can fetch them by itself."""
        if registry().load("weight_transports", handle.transport).reaches_subprocesses:
            return handle
        policy, draft = parts_of(handle)
        payload = self._policy.publish(policy.buckets)
        here = WeightHandle(SHARED_MEMORY, policy.version, payload, digests=handle.digests)
        if draft is None:
            return here
        return DraftedHandle.of(here, WeightHandle(SHARED_MEMORY, draft.version, self._draft.publish(draft.buckets)))

    def close(self) -> None:
        self._policy.close()
        self._draft.close()


class NodeWorkers:
    """vLLM's workers of one further node; lives in a process there."""

    def __init__(self, arguments: Mapping[str, Any], context: WorkerContext) -> None:
        """
        Args:
            arguments: Of ``engine_args``.
            context: Of the process: its device and seed are the engine's.
        """
        from nemorl_vllm.engine import engine_args, set_device

        _say_address()
        import_vllm()
        self._executor: Any = None
        self._republisher = Republisher()
        with process_state_kept(context.device):
            self._config = engine_args(worker=context, **arguments).create_engine_config(headless=True)
            set_device(self._config, context.device)

    def serve(self) -> None:
        """Start the workers, and return when one of them has ended."""
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        self._executor = MultiprocExecutor(self._config, monitor_workers=False)
        self._executor.start_worker_monitor(inline=True)

    def republish(self, handle: WeightHandle) -> WeightHandle:
        return self._republisher.handle(handle)

    def shutdown(self) -> None:
        """End the workers. They have nothing to tidy up, and would wait for the first node's messages for a minute."""
        if self._executor is not None:
            for worker in self._executor.workers:
                worker.proc.kill()
            self._executor.shutdown()
        self._republisher.close()


class FurtherNodes:
    """The further nodes of an engine, seen from its first."""

    def __init__(
        self, policy: PolicyConfig, context: WorkerContext, options: VLLMConfig, arguments: Mapping[str, Any]
    ) -> None:
        """
        Args:
            policy: The model.
            context: Of the process on the first node.
            options: The backend's.
            arguments: Further ones of ``engine_args``, the same on all nodes.

        Raises:
            NemorlError: A node cannot run vLLM.
        """
        self._actors: list[Any] = []
        self._is_closing = False
        self._republisher = Republisher()
        self.arguments: dict[str, Any] = {}
        """Of ``vllm.EngineArgs``, for the first node."""
        if not context.further_nodes:
            return
        count = 1 + len(context.further_nodes)
        meeting = {"nnodes": count, "master_addr": _say_address(), "master_port": free_port()}
        self.arguments = {**meeting, "node_rank": 0}
        self._actors = [start() for start in context.further_nodes]
        built = []
        for rank, (actor, gpus) in enumerate(zip(self._actors, context.further_gpus, strict=True), start=1):
            further = {**arguments["further"], **meeting, "node_rank": rank}
            given = {**arguments, "policy": policy, "options": options, "further": further}
            there = replace(context, gpus=gpus, further_nodes=(), further_gpus=())
            built.append(actor.build.remote(_Build(given), there))
        try:
            _answers(built, PREPARING_S)
        except BaseException:
            self.close()
            raise
        for rank, actor in enumerate(self._actors, start=1):
            served = actor.invoke.remote("backend", "serve", {}, None)
            threading.Thread(target=self._watch, args=(rank, served), daemon=True).start()

    def handles(self, handle: WeightHandle) -> tuple[WeightHandle, ...]:
        """The weights as the processes of each node can fetch them.

        Raises:
            WeightsLostError: A node could not fetch them.
        """
        asked = [actor.invoke.remote("backend", "republish", {}, None, handle) for actor in self._actors]
        return (self._republisher.handle(handle), *_answers(asked))

    def close(self) -> None:
        """End the workers of the further nodes. Calling it twice is harmless."""
        self._is_closing = True
        self._republisher.close()
        actors, self._actors = self._actors, []
        if actors:
            import ray

            asked = [actor.shutdown.remote() for actor in actors]
            ray.wait(asked, num_returns=len(asked), timeout=CLOSING_S)
            for actor in actors:
                ray.kill(actor)

    def _watch(self, rank: int, served: Any) -> None:
        """End this process when the workers of a further node are lost: the run replaces it as any lost worker. vLLM
        itself would wait for their answer."""
        import ray

        try:
            ray.get(served)
            reason = "one of its vLLM workers ended"
        except Exception as error:  # whatever it is, they are gone
            reason = str(error)
        if not self._is_closing:
            log.error("node %d of this engine is lost: %s", rank, reason)
            for child in active_children():
                child.terminate()
            os._exit(1)


class _Build:
    """Builds the workers of a node, in a process there."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments

    def __call__(self, context: WorkerContext) -> NodeWorkers:
        return NodeWorkers(self._arguments, context)


def _answers(asked: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
    """What each further node answers.

    Raises:
        DeadlineError: One does not, in so many seconds.
    """
    if not asked:
        return []
    import ray

    try:
        found: list[Any] = ray.get(list(asked), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineError(
            f"not all of the {len(asked)} further nodes of this vLLM engine were ready within {timeout_s:.0f} s",
            fix="look at the logs of their workers: one cannot import vLLM, or reads the model from a slow disk",
        ) from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    return found


def _say_address() -> str:
    """Have vLLM use the address by which Ray's other nodes know this one."""
    import ray

    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    os.environ["VLLM_HOST_IP"] = address
    return address
