"""Small workers for the tests of worker groups: a module of its own, so that worker processes can import it.

It imports no torch: most tests do not need it, and each of many processes would take a second for that.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from nemorl.config import ClusterConfig
from nemorl.errors import BackendError
from nemorl.metrics import Metrics
from nemorl.resources.worker import WorkerContext

if TYPE_CHECKING:
    import torch
    from nemorl_tensors import TokenBatch

CPU = ClusterConfig(launcher="ray", workers_per_node=2, cpus_per_worker=0.5, placement_timeout_s=2, worker_timeout_s=60)


class Faulty:
    """A loss that exits, as if all were well."""

    requires: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, outputs: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Metrics]:
        sys.exit(0)


class Adder:
    """Knows its rank, adds to it, and fails on demand."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def add(self, number: int) -> int:
        print(f"rank {self.context.rank} adds {number}", flush=True)
        return self.context.rank + number

    def note(self, text: str) -> None:
        logging.getLogger("nemorl_workers").info(text)

    def place(self) -> WorkerContext:
        return self.context

    def process(self) -> int:
        return os.getpid()

    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    def interpreter(self) -> str:
        return sys.executable

    def owned(self) -> list[object]:
        """A reference to a value that ends with this process."""
        import ray

        return [ray.put(bytes(1_000_000))]

    def ask_a_dead_helper(self) -> None:
        """As an engine over several nodes does, one of which is gone."""
        import ray

        helper = ray.remote(num_cpus=0)(Doubler).remote(None, None)
        ray.kill(helper)
        ray.get(helper.shutdown.remote())

    def fail(self, rank: int, kind: str) -> None:
        """``rank`` refuses, breaks, dies or sleeps; with ``dies`` its peers notice a broken connection at once."""
        mine = self.context.rank == rank
        if kind == "dies":
            if mine:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("Connection closed by peer")
        if mine and kind == "refuses":
            raise BackendError("out of memory", fix="use less")
        if mine and kind == "breaks":
            raise ZeroDivisionError("division by zero")
        if mine and kind == "loses":
            import torch
            from nemorl_tensors import TokenBatch
            from nemorl_tensors.engines.steps import evaluate_loss

            evaluate_loss(Faulty(), torch.zeros(2), TokenBatch.from_sequences([[1, 2]], [[False, True]]))
        if mine and kind == "sleeps":
            time.sleep(60)

    def shutdown(self) -> None:
        pass


class Doubler:
    """Attached to an adder."""

    def __init__(self, host: Adder, context: WorkerContext) -> None:
        assert host is None or host.context is context
        self.host = host

    def double(self, number: int) -> int:
        return 2 * self.host.add(number)

    def shutdown(self) -> None:
        pass


class SlowStarter(Adder):
    """Takes a while to be built, like an engine that loads a model."""

    def __init__(self, context: WorkerContext) -> None:
        time.sleep(1.0)
        super().__init__(context)

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


class Seeing:
    """Knows which GPUs its process was shown when it was built."""

    def __init__(self, context: WorkerContext) -> None:
        self.gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def visible(self) -> str:
        return self.gpus

    def where(self) -> tuple[str, str]:
        """Node and visible GPUs."""
        import ray

        return ray.get_runtime_context().get_node_id(), self.gpus

    def shutdown(self) -> None:
        pass


class Spread(Seeing):
    """Starts the processes of its further nodes, and says where all of them are."""

    def __init__(self, context: WorkerContext) -> None:
        import ray

        super().__init__(context)
        self.actors = [start() for start in context.further_nodes]
        there = [replace(context, gpus=gpus) for gpus in context.further_gpus]
        ray.get([actor.build.remote(Seeing, each) for actor, each in zip(self.actors, there, strict=True)])

    def all_places(self) -> list[tuple[str, str]]:
        """Node and visible GPUs of this process and of those on further nodes."""
        import ray

        return [self.where(), *ray.get([actor.invoke.remote("backend", "where", {}, None) for actor in self.actors])]

    def further_pids(self) -> list[int]:
        import ray

        return [facts.pid for facts in ray.get([actor.facts.remote() for actor in self.actors])]


class Collective:
    """A rank of a gloo group, whose ranks meet in an all-reduce unless one of them is kept away."""

    def __init__(self, context: WorkerContext) -> None:
        from datetime import timedelta

        import torch.distributed as dist
        from nemorl_tensors.engines.collectives import count_collectives

        self.context = context
        where = f"tcp://{context.master_address}:{context.master_port}"
        timeout = timedelta(seconds=context.collective_timeout_s)
        dist.init_process_group("gloo", where, timeout, context.world_size, context.rank)
        count_collectives()

    def meet(self, late: int | None = None, seconds: float = 0.0, busy: bool = False) -> float:
        """The sum of all ranks' numbers, 1 each; rank ``late`` comes ``seconds`` later, asleep or at work."""
        import torch
        import torch.distributed as dist

        if self.context.rank == late:
            self.be_late(seconds, busy)
        found = torch.ones(())
        dist.all_reduce(found)
        return float(found)

    def be_late(self, seconds: float, busy: bool) -> None:
        end_s = time.monotonic() + seconds
        while busy and time.monotonic() < end_s:
            pass
        time.sleep(max(0.0, end_s - time.monotonic()))

    def fail_on_its_device(self, rank: int) -> None:
        """As torch says it of a GPU whose memory is beyond correction."""
        if self.context.rank == rank:
            raise RuntimeError(
                "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported"
            )

    def shutdown(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
