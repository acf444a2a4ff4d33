"""The contract between a run's driver and its workers: groups of ranks, and what carries weights between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from nemorl.weights import Digested, Export, Form, WeightHandle

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

Verb = Callable[Concatenate[Any, P], R]
"""A method as its class has it, ``TrainingBackend.train_step``. Each worker runs its own method of that name."""
ShardVerb = Callable[Concatenate[Any, S, P], R]
"""One whose first argument is different on each data-parallel rank."""


References = Sequence[Any]
"""One per data-parallel rank, each of a value that later calls take from where it lies. It is freed with them."""


@dataclass(frozen=True)
class Composed(Sequence[S]):
    """First arguments that ranks make themselves, of values that they are referred to."""

    make: Callable[..., S]
    parts: tuple[References, ...]
    """Each of one argument of ``make``"""

    def __len__(self) -> int:
        return len(self.parts[0])

    def __getitem__(self, rank: Any) -> Any:
        return self.make(*(part[rank] for part in self.parts))


class WorkerGroup(Protocol):
    """The ranks of one backend, wherever they run.

    >>> losses = group.scatter(TrainingBackend.train_step, shards, loss)  # doctest: +SKIP
    """

    @property
    def data_parallel_size(self) -> int: ...

    def call(self, verb: Verb[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call on all ranks; results in rank order."""
        ...

    def scatter(self, verb: ShardVerb[S, P, R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call with ``shards[i]`` as first argument on data-parallel rank i; one result per shard."""
        ...

    def submit(self, rank: int, verb: Verb[P, Future[R]], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call what returns a future on one of several independent replicas, and return at once, from any thread.

        The future has the result of the replica's, or why there is none.
        """
        ...

    def publish(
        self, transport: str, version: int, form: Form = "model", digested: Digested | None = None
    ) -> WeightHandle:
        """The weights that the ranks hold together, made available over a transport, with digests where asked for."""
        ...

    def shutdown(self) -> None: ...


class ReferringGroup(WorkerGroup, Protocol):
    """A worker group whose calls may refer to values that were sent before, and to results of other calls.

    >>> logprobs = group.scatter_kept(TrainingBackend.get_logprobs, group.put(shards))  # doctest: +SKIP
    """

    def put(self, values: Sequence[Any]) -> References:
        """Send a value for each data-parallel rank, once for all calls that refer to it."""
        ...

    def read(self, references: References) -> list[Any]:
        """The values behind references."""
        ...

    def scatter_kept(
        self, verb: ShardVerb[S, P, R], shards: Sequence[S], *args: P.args, **kwargs: P.kwargs
    ) -> References:
        """``scatter``, whose results stay where they are."""
        ...


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
