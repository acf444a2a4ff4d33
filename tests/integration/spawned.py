"""Run functions on several ranks, each a process of its own, and bring the results back.

Ranks are forked from one process that has imported what is heavy and done nothing else. One start serves many calls.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from queue import Empty
from typing import Any

import torch
from nemorl.resources.ports import free_port
from nemorl.resources.worker import WorkerContext

DEADLINE_S = 240.0
"""Longest wait for any rank's next result."""
COLLECTIVE_TIMEOUT_S = 60.0
POLL_S = 1.0

HEAVY = [
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "nemorl_dtensor.training",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "nemorl_megatron.training",
]
"""Imported once for all ranks, where it is installed."""

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function of a module that children can import, and its arguments after the ``WorkerContext``."""


class RankError(AssertionError):
    """A call failed on a rank; the text is its traceback."""


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """``function(context, *arguments)`` on every rank; results in rank order.

    Raises:
        RankError: it failed on a rank.
    """
    return run_calls([(function, arguments)], world_size)[0]


def run_calls(calls: Sequence[Call], world_size: int) -> list[list[Any]]:
    """Make calls one after the other, each on all ranks at the same time and with a rendezvous of its own.

    Args:
        calls: Each begins ``function(context, …)`` and leaves no process group behind.
        world_size: Processes.

    Returns:
        For each call its results in rank order.

    Raises:
        RankError: the first failure.
    """
    outcomes = gather(calls, world_size)
    for result in chain.from_iterable(outcomes):
        if isinstance(result, RankError):
            raise result
    return outcomes


def gather(calls: Sequence[Call], world_size: int) -> list[list[Any]]:
    """The same with failures among the results, as ``RankError``; a rank makes no calls after one that failed."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(HEAVY)
    queue = forks.Queue()
    ports = [forks.Queue() for _ in range(world_size)]
    processes = [
        forks.Process(target=_run, args=(queue, calls, ports, rank, world_size), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        results: dict[tuple[int, int], Any] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(results) < len(calls) * world_size:
            try:
                rank, found = pickle.loads(queue.get(timeout=POLL_S))
                deadline = time.monotonic() + DEADLINE_S
            except Empty:
                assert time.monotonic() < deadline, f"no rank reported anything for {DEADLINE_S:.0f} s"
                rank, found = _dead(processes, results, len(calls))
            for number, outcome in found.items():
                results.setdefault((number, rank), outcome)
        return [[results[number, rank] for rank in range(world_size)] for number in range(len(calls))]
    finally:
        for process in processes:
            process.terminate()


def _dead(processes: Sequence[Any], results: Mapping[tuple[int, int], Any], calls: int) -> tuple[int, dict[int, Any]]:
    """The first rank that ended without a report, and that as its results."""
    for rank, process in enumerate(processes):
        missing = [number for number in range(calls) if (number, rank) not in results]
        if missing and process.exitcode:
            failure = RankError(f"rank {rank} ended without a result, exit code {process.exitcode}")
            return rank, dict.fromkeys(missing, failure)
    return 0, {}


def _run(queue: Any, calls: Sequence[Call], ports: Sequence[Any], rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    # FSDP2 warns of what would give wrong gradients after an in-place operation, at every forward pass.
    warnings.filterwarnings("error", message=".*returned a view tensor")
    context = WorkerContext(rank=rank, world_size=world_size, collective_timeout_s=COLLECTIVE_TIMEOUT_S)
    for number, (function, arguments) in enumerate(calls):
        try:
            # Found at the last moment: a port that waits to be used is soon another's.
            port = free_port() if rank == 0 else ports[rank].get(timeout=DEADLINE_S)
            for others in ports[1:] if rank == 0 else ():
                others.put(port)
            outcome = function(replace(context, master_port=port), *arguments)
            # As bytes: tensors would travel as open files, which are gone with this process.
            queue.put(pickle.dumps((rank, {number: outcome})))
        except BaseException:
            failure = RankError(f"rank {rank} failed in {function.__name__}:\n{traceback.format_exc()}")
            queue.put(pickle.dumps((rank, dict.fromkeys(range(number, len(calls)), failure))))
            return
