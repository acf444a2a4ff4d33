"""The contract between a run's driver and its workers: groups of ranks, and what carries weights between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from nemorl.weights import Export, Form, WeightHandle


class WorkerGroup(Protocol):
    """The ranks of one backend, wherever they run.

    >>> losses = group.scatter("train_step", [(shard, loss) for shard in shards])  # doctest: +SKIP
    """

    @property
    def data_parallel_size(self) -> int: ...

    def call(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call on all ranks; results in rank order."""
        ...

    def scatter(self, method: str, shards: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call with ``shards[i]`` as arguments on data-parallel rank i; one result per shard."""
        ...

    def submit(self, rank: int, method: str, *args: Any) -> Future[Any]:
        """Call on one of several independent replicas and return at once, from any thread.

        The future has the result (of a method that returns a future: its result), or why there is none.
        """
        ...

    def publish(self, transport: str, version: int, form: Form = "model") -> WeightHandle:
        """The weights that the ranks hold together, made available over a transport."""
        ...

    def shutdown(self) -> None: ...


class WeightTransport(Protocol):
    """Carries weights from the trainer's process to the generator's.

    >>> payload = transport("in_process").publish(lambda: iter([{"head.weight": 1.0}]))
    >>> list(transport("in_process").fetch(payload))
    [{'head.weight': 1.0}]
    """

    def publish(self, export: Export) -> Any:
        """Trainer's side: make what ``export`` yields available; returns a picklable payload that tells where.

        What the version before this one published stays valid: a generator may still be reading it.
        """
        ...

    def fetch(self, payload: Any) -> Iterator[Mapping[str, Tensor]]:
        """Generator's side: the buckets, in any cut. Tensors may be views of the sender's memory."""
        ...

    def close(self) -> None:
        """Release what ``publish`` holds."""
        ...
