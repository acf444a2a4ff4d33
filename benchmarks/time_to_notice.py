"""Seconds until a training group is known to be lost, and what looking for that costs.

    python benchmarks/time_to_notice.py --json

Two ranks of a gloo group, each a Ray actor of this machine, meet in an all-reduce. One of them is killed, stopped, kept
asleep, or comes after the collective's own time-out; the seconds are those from then until the driver has the error.
Calls are timed with heartbeats switched on and off, medians of ``--calls``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from _common import limit_threads, machine, print_table

THREADS = limit_threads()
PATIENT_S = 300.0


class Rank:
    """One rank of the group."""

    def __init__(self, context: Any) -> None:
        import torch.distributed as dist
        from nemorl_tensors.engines.collectives import count_collectives

        self.rank = context.rank
        where = f"tcp://{context.master_address}:{context.master_port}"
        timeout = timedelta(seconds=context.collective_timeout_s)
        dist.init_process_group("gloo", where, timeout, context.world_size, context.rank)
        count_collectives()

    def meet(self, sleep_s: float = 0.0) -> None:
        """An all-reduce, to which rank 1 comes late."""
        import torch
        import torch.distributed as dist

        if self.rank == 1:
            time.sleep(sleep_s)
        dist.all_reduce(torch.ones(()))

    def nothing(self) -> None:
        """Answer at once."""

    def shutdown(self) -> None:
        """The process ends, and the group with it."""


@contextmanager
def group(hang_timeout_s: float | None, collective_timeout_s: float = PATIENT_S) -> Iterator[Any]:
    """Two ranks that have met once."""
    from nemorl.config import ClusterConfig
    from nemorl.resources.ray_cluster import RayVirtualCluster
    from nemorl.resources.ray_workers import RayWorkerGroup
    from nemorl.resources.worker import WorkerContext

    config = ClusterConfig(launcher="ray", workers_per_node=2, cpus_per_worker=0.5, hang_timeout_s=hang_timeout_s)
    cluster = RayVirtualCluster([2], config)
    ranks = RayWorkerGroup(cluster, Rank, replace(WorkerContext(), collective_timeout_s=collective_timeout_s))
    try:
        ranks.call(Rank.meet)
        yield ranks
    finally:
        ranks.kill()
        cluster.shutdown()


def noticed(
    strike: signal.Signals | None, hang_timeout_s: float | None, collective_timeout_s: float
) -> tuple[float, str]:
    """Seconds from the blow until the driver's error, and its class."""
    from nemorl.errors import WorkerLostError

    delay_s = 1.0
    with group(hang_timeout_s, collective_timeout_s) as ranks:
        if strike is not None:
            threading.Timer(delay_s, os.kill, (ranks.facts[1].pid, strike)).start()
        began_s = time.monotonic()
        try:
            ranks.call(Rank.meet, 10 * PATIENT_S)
        except WorkerLostError as error:
            return time.monotonic() - began_s - (delay_s if strike is not None else 0.0), type(error).__name__
    raise AssertionError("nobody noticed")


def call_ms(hang_timeout_s: float | None, calls: int) -> float:
    """Median milliseconds of a call of both ranks that does nothing."""
    with group(hang_timeout_s) as ranks:
        found = []
        for _ in range(calls):
            began_s = time.monotonic()
            ranks.call(Rank.nothing)
            found.append(time.monotonic() - began_s)
    return 1000 * statistics.median(found)


def pulse_ms(calls: int) -> float:
    """Median milliseconds until a rank that is at work has answered one heartbeat."""
    import ray
    from nemorl.resources.ray_actor import PULSE

    with group(PATIENT_S) as ranks:
        actor, found = ranks._ranks[1].actor, []
        busy = actor.invoke.remote("backend", "meet", {"sleep_s": 60.0}, None)
        for _ in range(calls):
            began_s = time.monotonic()
            ray.get(actor.pulse.options(concurrency_group=PULSE).remote())
            found.append(time.monotonic() - began_s)
        del busy
    return 1000 * statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hang-timeout", type=float, default=12.0, help="cluster.hang_timeout_s of the blows")
    parser.add_argument("--calls", type=int, default=300, help="calls of which the median is shown")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    from nemorl.config import ClusterConfig
    from nemorl.resources.ray_session import RaySession

    limit_s = arguments.hang_timeout
    blows: dict[str, tuple[signal.Signals | None, float | None, float]] = {
        "killed before the collective": (signal.SIGKILL, limit_s, PATIENT_S),
        "stopped before the collective": (signal.SIGSTOP, limit_s, PATIENT_S),
        "asleep before the collective": (None, limit_s, PATIENT_S),
        "asleep, heartbeats off, the collective's time-out is 12 s": (None, None, 12.0),
    }
    session = RaySession(ClusterConfig(launcher="ray"))
    try:
        found = {name: noticed(*blow) for name, blow in blows.items()}
        costs = {
            "a call, heartbeats on": call_ms(600.0, arguments.calls),
            "a call, heartbeats off": call_ms(None, arguments.calls),
            "a heartbeat of a rank at work": pulse_ms(arguments.calls),
        }
    finally:
        session.close()
    if arguments.json:
        seconds = {name: {"seconds": round(s, 2), "error": kind} for name, (s, kind) in found.items()}
        milliseconds = {name: round(ms, 3) for name, ms in costs.items()}
        print(json.dumps({"machine": machine(THREADS), "noticed": seconds, "milliseconds": milliseconds}, indent=2))
        return
    rows = [[name, f"{seconds:.1f}", kind] for name, (seconds, kind) in found.items()]
    print_table("Until it is known", ["rank 1 is", "noticed after [s]", "error"], rows)
    print_table("What looking costs", ["", "[ms]"], [[name, f"{ms:.2f}"] for name, ms in costs.items()])


if __name__ == "__main__":
    main()
